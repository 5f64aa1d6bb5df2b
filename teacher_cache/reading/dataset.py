"""A cached corpus as a map-style `torch.utils.data.Dataset` of (text, vector)."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from teacher_cache.errors import CacheError, MissingRows
from teacher_cache.storage.manifest import Manifest
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.view import SpaceView


class VectorDataset(Dataset[tuple[Any, torch.Tensor]]):
    """Records of a cached corpus: `(text, vector)` by record number.

    A record with several texts, such as a pair, gives a tuple of its texts and the vector of the first one.
    Works with any sampler and with `DataLoader` worker processes: each process opens the cache itself.

    Args:
        space: as in `TeacherCache.space`.
        corpus: name; None for the only corpus of the cache.

    Raises:
        CacheNotFound, SpaceNotFound, CorpusNotFound: there is no such cache, space or corpus.
        MissingRows: a text of the corpus has no vector in the space.

    Example:
        >>> loader = DataLoader(VectorDataset("cache"), batch_size=32, shuffle=True, num_workers=2)
        >>> texts, vectors = next(iter(loader))  # 32 strings, (32, dims) float32
    """

    def __init__(
        self,
        cache: str | Path | TeacherCache,
        space: str | Mapping[str, Any] | None = None,
        corpus: str | None = None,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        opened = cache if isinstance(cache, TeacherCache) else TeacherCache.open(cache)
        view, manifest = opened.space(space), opened.corpus(corpus)
        missing = manifest.distinct_rows(opened.rows)
        missing = missing[~view.present(missing)]
        if len(missing):
            raise MissingRows(
                f"space {view.slug} has no vector for {len(missing)} texts of corpus {manifest.record.name!r}, first "
                f"row {missing[0]}; `tcache build` with the same teacher fills it"
            )
        self.path, self.space, self.corpus, self.dtype = opened.path, view.slug, manifest.record.name, dtype
        self._fingerprint = manifest.record.fingerprint
        self._handles: tuple[int, TeacherCache, SpaceView, Manifest] | None = (os.getpid(), opened, view, manifest)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_handles": None}

    def _open(self) -> tuple[TeacherCache, SpaceView, Manifest]:
        """Cache, space and manifest, opened by this process: LMDB handles must not cross a fork."""
        if self._handles is None or self._handles[0] != os.getpid():
            cache = TeacherCache.open(self.path)
            manifest = cache.corpus(self.corpus)
            if manifest.record.fingerprint != self._fingerprint:
                raise CacheError(f"corpus {self.corpus!r} of {self.path} was replaced while it was being read")
            self._handles = (os.getpid(), cache, cache.space(self.space), manifest)
        return self._handles[1:]

    def __len__(self) -> int:
        return len(self._open()[2])

    def __getitem__(self, record: int) -> tuple[Any, torch.Tensor]:
        return self.__getitems__([record])[0]

    def __getitems__(self, records: Sequence[int]) -> list[tuple[Any, torch.Tensor]]:
        """Several records at once; `DataLoader` calls this with the numbers of a batch."""
        cache, view, manifest = self._open()
        numbers = np.asarray(records, dtype=np.int64)
        length = len(manifest)
        outside = numbers[(numbers < -length) | (numbers >= length)]
        if len(outside):
            raise IndexError(f"corpus {self.corpus!r} has {length} records, found record {outside[0]}")
        rows = manifest.rows_of(np.where(numbers < 0, numbers + length, numbers))
        vectors = view.gather(rows[:, 0], torch.empty(len(rows), view.dims, dtype=self.dtype))
        texts = cache.texts(rows.ravel())
        width = rows.shape[1]
        named = texts if width == 1 else [tuple(texts[at : at + width]) for at in range(0, len(texts), width)]
        return list(zip(named, vectors, strict=True))
