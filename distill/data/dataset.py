"""Records of a cached corpus as training batches: texts to tokens, vectors to floats.

No teacher, no corpus file: rows come from the manifest, texts and vectors from the cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from distill.errors import ConfigError, RunFolderError
from teacher_cache.cache import TeacherCache
from teacher_cache.errors import DamagedCache, MissingRows
from teacher_cache.storage.manifest import Manifest
from teacher_cache.text_key import text_keys
from teacher_cache.view import SpaceView

# Rows whose text is compared with its key when a dataset is opened.
PROBED_ROWS = 64
RECORDS_AT_ONCE = 2**20


@dataclass(frozen=True)
class Records:
    """B records.

    Attributes:
        texts: B texts of view 1, or 2B texts where the second text of each record is view 2.
        rows: `(B,)` row of each record's first text.
        vectors: `(B, d_T)` float32, the teacher's vector of the first text.
    """

    texts: list[str]
    rows: npt.NDArray[np.int64]
    vectors: npt.NDArray[np.float32]


class CachedDataset(Dataset[Records]):
    """A corpus in one embedding space, by record number; texts that are left out are skipped over.

    Pickles without open handles: each data-loading process opens the cache for itself.

    Args:
        left_out: rows that must not be trained on, wherever they stand in the corpus; they need no vector.
        pairs: give the second text of each record too.

    Raises:
        MissingRows: a text of the corpus has no vector in the space.
        ConfigError: `pairs` of a corpus without a second column, or no record that is not left out.
        DamagedCache: a text and its key do not belong together.
    """

    def __init__(
        self,
        cache: TeacherCache,
        space: SpaceView,
        manifest: Manifest,
        *,
        left_out: npt.NDArray[np.int64] | None = None,
        pairs: bool = False,
    ) -> None:
        if pairs and len(manifest.record.columns) < 2:
            raise ConfigError(
                f"views=pair needs two texts a record, but corpus {manifest.record.name!r} has only the "
                f"column {manifest.record.columns[0]!r}; build it with --text-key FIRST,SECOND"
            )
        self.cache_path = cache.path
        self.space_slug = space.slug
        self.corpus_name = manifest.record.name
        self.fingerprint = manifest.record.fingerprint
        self.pairs = pairs
        self._open: tuple[TeacherCache, SpaceView, Manifest] | None = (cache, space, manifest)
        rows = manifest.distinct_rows(cache.rows)
        excluded = np.zeros(0, dtype=np.int64)
        if left_out is not None and len(left_out):
            rows = np.setdiff1d(rows, left_out, assume_unique=True)
            excluded = _records_with(left_out, manifest, cache.rows)
        _refuse_missing(cache, space, self.corpus_name, rows)
        _probe(cache, rows)
        # Number of trained-on records before each one left out: record i is found by one binary search.
        self._before_excluded = excluded - np.arange(len(excluded))
        self.records = len(manifest) - len(excluded)
        if self.records == 0:
            raise ConfigError(
                f"every record of corpus {self.corpus_name!r} has a text that is held out or quarantined, none is left "
                "to train on; set data.held_out=0, or build a larger corpus"
            )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": None}

    def _handles(self) -> tuple[TeacherCache, SpaceView, Manifest]:
        if self._open is None:
            cache = TeacherCache.open(self.cache_path)
            manifest = cache.corpus(self.corpus_name)
            if manifest.record.fingerprint != self.fingerprint:
                raise RunFolderError(
                    f"corpus {self.corpus_name!r} of {self.cache_path} was built anew while it was being read"
                )
            self._open = (cache, cache.space(self.space_slug), manifest)
        return self._open

    def __len__(self) -> int:
        return self.records

    def __getitem__(self, record: int) -> Records:
        return self.__getitems__([record])

    def __getitems__(self, records: Sequence[int]) -> Records:
        """The records of those numbers, in that order; DataLoader hands whole batches in here."""
        cache, space, manifest = self._handles()
        numbers = np.asarray(records, dtype=np.int64)
        places = numbers + np.searchsorted(self._before_excluded, numbers, side="right")
        rows = manifest.rows[places]
        first = np.ascontiguousarray(rows[:, 0])
        wanted = np.concatenate([first, rows[:, 1]]) if self.pairs else first
        return Records(cache.texts(wanted), first, space.gather(first))


def _records_with(texts: npt.NDArray[np.int64], manifest: Manifest, table_rows: int) -> npt.NDArray[np.int64]:
    """Numbers of the records that hold one of these rows, ascending; read in pieces, a corpus may be long."""
    wanted = np.zeros(table_rows, dtype=bool)
    wanted[texts] = True
    found = [
        start + np.flatnonzero(wanted[manifest.rows[start : start + RECORDS_AT_ONCE]].any(axis=1))
        for start in range(0, len(manifest), RECORDS_AT_ONCE)
    ]
    return np.concatenate(found)


def _refuse_missing(cache: TeacherCache, space: SpaceView, corpus: str, rows: npt.NDArray[np.int64]) -> None:
    absent = rows[~space.present(rows)]
    if not len(absent):
        return
    refused = space.quarantined()
    quarantined = [row for row in absent.tolist() if row in refused]
    if len(quarantined) == len(absent):
        raise MissingRows(
            f"{len(absent)} texts of corpus {corpus!r} have no vector in {space.slug}: they are quarantined, the "
            f"first, {cache.texts(absent[:1])[0][:60]!r}, because {refused[quarantined[0]]}; set "
            "data.skip_quarantined=true to train without them"
        )
    raise MissingRows(
        f"{len(absent)} of {len(rows)} texts of corpus {corpus!r} have no vector in {space.slug} "
        f"({len(quarantined)} of them quarantined); run `tcache build` with this corpus and teacher to fill "
        "them"
    )


def _probe(cache: TeacherCache, rows: npt.NDArray[np.int64]) -> None:
    """Compare some rows' texts with their keys: a mixed-up cache is noticed before training, not after."""
    places = np.unique(np.linspace(0, len(rows) - 1, min(PROBED_ROWS, len(rows))).astype(np.int64))
    chosen = rows[places]
    texts = cache.texts(chosen)
    stored = [key.tobytes() for key in cache.texts_table.read_keys(chosen)]
    if stored != text_keys(texts) or not np.array_equal(cache.lookup(texts), chosen):
        raise DamagedCache(f"texts of {cache.path} do not match their keys; run `tcache verify --deep`")


class Collator:
    """Records to the tensors a step takes.

    The batch holds `input_ids` and `attention_mask` of V * B encodings (view by view), `vectors` `(B, d_T)`
    and `text_ids` `(B,)`.

    Args:
        tokenizer: the student's.
        prompt: put in front of every text.
        repeat: encode each text this many times (views under different dropout masks).
    """

    def __init__(self, tokenizer: Any, max_length: int, *, prompt: str = "", repeat: int = 1) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.prompt = prompt
        self.repeat = repeat

    def __call__(self, records: Records) -> dict[str, Tensor]:
        texts = [self.prompt + text for text in records.texts] if self.prompt else records.texts
        tokens = self.tokenizer(texts, padding=True, truncation=True, max_length=self.max_length, return_tensors="pt")
        ids, mask = tokens["input_ids"], tokens["attention_mask"]
        return {
            "input_ids": ids.repeat(self.repeat, 1),
            "attention_mask": mask.repeat(self.repeat, 1),
            "vectors": torch.from_numpy(records.vectors),
            "text_ids": torch.from_numpy(records.rows),
        }
