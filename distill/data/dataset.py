"""Records of a cached corpus, by number or in the order of shuffled epochs.

Row numbers come from the manifest, texts and teacher output from the cache; no teacher or corpus file is needed.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from distill.errors import ConfigError, RunFolderError
from teacher_cache.errors import DamagedCache, MissingRows
from teacher_cache.reading.shuffle import WindowedShuffle
from teacher_cache.reading.stream import Batch, WindowedReader
from teacher_cache.storage.manifest import Manifest
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.joint import JointSpace
from teacher_cache.table.view import SpaceView
from teacher_cache.text_key import text_keys

# Rows whose text is compared with its key when a dataset is opened.
CHECKED_ROWS = 64
RECORDS_AT_ONCE = 2**20
# Number of batches whose texts are sorted by length together.
GROUPED_BATCHES = 50


class CachedDataset(Dataset[Batch]):
    """A corpus in one embedding space, by record number without the excluded records.

    Pickles without open handles: each data-loading process opens the cache again.

    Args:
        left_out: rows to exclude from training; records with these texts are skipped. They need no vector.
        pairs: return the second text of each record too.
        tokens: "states" returns token states too, "attention" attention maps as well.

    Raises:
        MissingRows: a text of the corpus has no vector, or no tokens if requested, in the space.
        ConfigError: `pairs` for a corpus with one column, or all records are excluded.
        DamagedCache: a text does not match its key.
    """

    def __init__(
        self,
        cache: TeacherCache,
        space: SpaceView | JointSpace,
        manifest: Manifest,
        *,
        left_out: npt.NDArray[np.int64] | None = None,
        pairs: bool = False,
        tokens: str | None = None,
    ) -> None:
        if pairs:
            check_pairs(manifest)
        self.cache_path = cache.path
        self.space_slugs = [one.slug for one in space.spaces] if isinstance(space, JointSpace) else [space.slug]
        self.corpus_name = manifest.record.name
        self.fingerprint = manifest.record.fingerprint
        self.pairs = pairs
        self.tokens = tokens
        self._open: tuple[TeacherCache, SpaceView | JointSpace, Manifest] | None = (cache, space, manifest)
        self._process = os.getpid()
        rows = manifest.distinct_rows(cache.rows)
        excluded = np.zeros(0, dtype=np.int64)
        if left_out is not None and len(left_out):
            rows = np.setdiff1d(rows, left_out, assume_unique=True)
            excluded = _records_with(left_out, manifest, cache.rows)
        _check_vectors(cache, space, self.corpus_name, rows)
        if tokens is not None:
            _check_tokens(cache, space, self.corpus_name, rows, attention=tokens == "attention")
        _check_keys(cache, rows)
        # Number of included records before each excluded one: `places_of` is one binary search.
        self._before_excluded = excluded - np.arange(len(excluded))
        self.records = len(manifest) - len(excluded)
        if self.records == 0:
            raise ConfigError(
                f"every record of corpus {self.corpus_name!r} has a text that is held out or quarantined, none is left "
                "to train on; set data.held_out=0, or build a larger corpus"
            )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": None}

    def handles(self) -> tuple[TeacherCache, SpaceView | JointSpace, Manifest]:
        """Cache, space and manifest, opened in this process."""
        if self._open is None or self._process != os.getpid():  # a lock may have been held during the fork
            cache = TeacherCache.open(self.cache_path)
            manifest = cache.corpus(self.corpus_name)
            if manifest.record.fingerprint != self.fingerprint:
                raise RunFolderError(
                    f"corpus {self.corpus_name!r} of {self.cache_path} was built again while it was read; start again"
                )
            spaces = [cache.space(slug) for slug in self.space_slugs]
            self._open = (cache, spaces[0] if len(spaces) == 1 else JointSpace(spaces), manifest)
            self._process = os.getpid()
        return self._open

    def __len__(self) -> int:
        return self.records

    def __getitem__(self, record: int) -> Batch:
        return self.__getitems__([record])

    def __getitems__(self, records: Sequence[int]) -> Batch:
        """The records with these numbers, in order; DataLoader requests whole batches this way."""
        cache, space, _ = self.handles()
        numbers = np.asarray(records, dtype=np.int64)
        rows = self.rows_of(numbers)
        first = np.ascontiguousarray(rows[:, 0])
        wanted = np.concatenate([first, rows[:, 1]]) if self.pairs else first
        tokens = None
        if self.tokens is not None and space.tokens is not None:
            tokens = space.tokens.gather_stored(first, attention=self.tokens == "attention")
        return Batch(cache.texts(wanted), first, space.gather(first), self.places_of(numbers), tokens)

    def rows_of(self, records: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """`(n, k)` rows of the texts of records."""
        return self.handles()[2].rows_of(self.places_of(records))

    def first_rows(self) -> npt.NDArray[np.int64]:
        """Ascending distinct rows of the first texts of the records."""
        seen = np.zeros(self.handles()[0].rows, dtype=bool)
        for start in range(0, len(self), RECORDS_AT_ONCE):
            seen[self.rows_of(np.arange(start, min(start + RECORDS_AT_ONCE, len(self))))[:, 0]] = True
        return np.flatnonzero(seen)

    def places_of(self, records: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """`(n,)` numbers in the whole corpus of records numbered without the excluded ones."""
        return records + np.searchsorted(self._before_excluded, records, side="right")


class ShuffledDataset(Dataset[Batch]):
    """The records of a dataset by their position in shuffled epochs, as `StreamingSampler` counts them.

    Each loading process reads a window at a time, ahead of use. Any position can be requested.

    Args:
        by_length: batch texts of similar length.
    """

    def __init__(self, dataset: CachedDataset, order: WindowedShuffle, *, by_length: bool = False) -> None:
        self.dataset = dataset
        self.order = order
        self.by_length = by_length
        self._reader: WindowedReader | None = None
        self._process = 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_reader": None}

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, position: int) -> Batch:
        return self.__getitems__([position])

    def __getitems__(self, positions: Sequence[int]) -> Batch:
        """The records at the positions of one batch."""
        if self._reader is None or self._process != os.getpid():  # threads do not survive a fork
            self._process = os.getpid()
            cache, space, _ = self.dataset.handles()
            self._reader = WindowedReader(
                cache,
                space,
                self.order,
                self.dataset.rows_of,
                texts=2 if self.dataset.pairs else 1,
                grouped=GROUPED_BATCHES if self.by_length else 0,
                tokens=self.dataset.tokens,
            )
        epoch = positions[0] // len(self.order)
        batch = self._reader.read(epoch, np.asarray(positions, dtype=np.int64) - epoch * len(self.order))
        return replace(batch, records=self.dataset.places_of(batch.records))

    def close(self) -> None:
        """Stop reading ahead."""
        if self._reader is not None and self._process == os.getpid():
            self._reader.close()
        self._reader = None


def check_pairs(manifest: Manifest) -> None:
    """Check that the records of a corpus have two texts.

    Raises:
        ConfigError: they have one.
    """
    if len(manifest.record.columns) < 2:
        raise ConfigError(
            f"views=pair needs two texts per record, but corpus {manifest.record.name!r} has only the "
            f"column {manifest.record.columns[0]!r}; build it with `tcache build ... --text-key FIRST,SECOND`"
        )


def _records_with(texts: npt.NDArray[np.int64], manifest: Manifest, table_rows: int) -> npt.NDArray[np.int64]:
    """Ascending numbers of the records with one of these rows; reads part of a long corpus at a time."""
    wanted = np.zeros(table_rows, dtype=bool)
    wanted[texts] = True
    found = [
        start + np.flatnonzero(wanted[manifest.rows[start : start + RECORDS_AT_ONCE]].any(axis=1))
        for start in range(0, len(manifest), RECORDS_AT_ONCE)
    ]
    return np.concatenate(found)


def _check_vectors(
    cache: TeacherCache, space: SpaceView | JointSpace, corpus: str, rows: npt.NDArray[np.int64]
) -> None:
    absent = rows[~space.present(rows)]
    if len(absent):
        place = f"of corpus {corpus!r} have no vector in {space.slug}"
        raise _missing(cache, absent, len(rows), place, space.quarantined(), "tcache build")


def _check_tokens(
    cache: TeacherCache, space: SpaceView | JointSpace, corpus: str, rows: npt.NDArray[np.int64], *, attention: bool
) -> None:
    command = f"tcache build --columns vectors,tokens{',attention' * attention}"
    if space.tokens is None:
        raise MissingRows(f"space {space.slug} has no tokens; `{command}` with this corpus and teacher adds them")
    absent = rows[~space.tokens.present(rows, attention)]
    if len(absent):
        place = f"of corpus {corpus!r} have no {'attention' if attention else 'tokens'} in {space.slug}"
        raise _missing(cache, absent, len(rows), place, space.tokens.quarantined(), command)


def _missing(
    cache: TeacherCache,
    absent: npt.NDArray[np.int64],
    total: int,
    place: str,
    reasons: Mapping[int, str],
    command: str,
) -> MissingRows:
    """The error about absent rows: to skip them if all are quarantined, otherwise to compute them."""
    quarantined = [row for row in absent.tolist() if row in reasons]
    if len(quarantined) == len(absent):
        return MissingRows(
            f"{len(absent)} texts {place}: they are quarantined, the first, {cache.texts(absent[:1])[0][:60]!r}, "
            f"because {reasons[quarantined[0]]}; set data.skip_quarantined=true to train without them"
        )
    return MissingRows(
        f"{len(absent)} of {total} texts {place} ({len(quarantined)} of them quarantined); run `{command}` with this "
        "corpus and teacher to compute them"
    )


def _check_keys(cache: TeacherCache, rows: npt.NDArray[np.int64]) -> None:
    """Compare the texts of some rows with their keys, to find a damaged cache before training."""
    places = np.unique(np.linspace(0, len(rows) - 1, min(CHECKED_ROWS, len(rows))).astype(np.int64))
    chosen = rows[places]
    texts = cache.texts(chosen)
    stored = [key.tobytes() for key in cache.texts_table.read_keys(chosen)]
    if stored != text_keys(texts) or not np.array_equal(cache.lookup(texts), chosen):
        raise DamagedCache(f"texts of {cache.path} do not match their keys; run `tcache verify {cache.path} --deep`")
