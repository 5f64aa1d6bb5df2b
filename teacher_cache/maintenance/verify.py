"""Check every promise of the index.

Quick: records against files and their sizes, presence against the table, counts against each other, row lists
against the table. Deep: every stored value is read once; digests, finite numbers, lengths of vectors, that each
key is the hash of its text, that each corpus has the fingerprint of its texts. With a teacher, one row in so many
is encoded again and compared.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from teacher_cache.building.workers import EncodeWorker
from teacher_cache.errors import DamagedCache
from teacher_cache.maintenance.inspection import Damage, Inspection, listed, restored
from teacher_cache.space import LABELS
from teacher_cache.storage.chunks import Rows
from teacher_cache.storage.codec import cosine_errors
from teacher_cache.storage.files import TEMPORARY_SUFFIX
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.view import SpaceView
from teacher_cache.teachers import resolve
from teacher_cache.teachers.base import TeacherOptions

# Largest 1 - cos between a stored row and what its teacher says again: bfloat16 differs by up to 4e-5 with the
# batch it is computed in, `int8` storage by up to 1e-4.
SAME_COSINE = 1e-3
# Rows that are encoded again unless `every` says otherwise.
ASKED_ROWS = 1000
_BATCH_ROWS = 1024


@dataclass(frozen=True)
class Verdict:
    """The outcome.

    Attributes:
        shards: shard records checked.
        leftovers: files of interrupted writes, harmless and named for completeness.
        asked: rows that the teacher was asked for again.
        largest_difference: largest 1 - cos among those; None when none was asked.
    """

    damage: list[Damage]
    shards: int
    rows: int
    deep: bool
    leftovers: list[str]
    asked: int = 0
    largest_difference: float | None = None

    @property
    def ok(self) -> bool:
        return not self.damage

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


def verify(
    path: str | Path,
    *,
    deep: bool = False,
    teacher: TeacherOptions | None = None,
    every: int | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Verdict:
    """Check a cache; reads only, and may run beside a writer.

    Args:
        deep: read every value.
        teacher: encode one row in `every` again and compare; a deep check.
        every: None asks for about `ASKED_ROWS` rows.
        report: called after every shard with how many are done and how many there are.

    Raises:
        CacheNotFound, FormatVersionError: it cannot even be opened.
        SpaceMismatch, SpaceNotFound: no stored space is that of the teacher; the message names what differs.
        TeacherError: the teacher cannot be found or run.
    """
    try:
        cache = TeacherCache.open(path)
        rows = cache.rows  # the index itself is opened by the first look into it
    except DamagedCache as error:
        return Verdict([Damage("damaged_cache", str(error), 0)], 0, 0, deep, [])
    with cache:
        asked = None if teacher is None else AskedAgain(cache, teacher, every)
        deep = deep or asked is not None
        inspection = Inspection(cache, deep=deep, seen=None if asked is None else asked.see, report=report)
        damage: list[Damage] = []
        try:
            for found in inspection.damage():
                damage.append(found)
            damage += [] if asked is None else asked.damage()
        except DamagedCache as error:  # of the index, without which nothing more can be said
            damage.append(Damage("damaged_cache", str(error), 0))
        return Verdict(
            damage,
            inspection.done,
            rows,
            deep,
            leftovers(cache.path),
            *((0, None) if asked is None else (asked.rows, asked.largest)),
        )


def leftovers(path: Path) -> list[str]:
    """What interrupted writes have left, relative to the cache's folder."""
    return sorted(str(found.relative_to(path)) for found in path.rglob(f"*{TEMPORARY_SUFFIX}"))


class AskedAgain:
    """One row in so many of a space, encoded again.

    Attributes:
        rows: asked for so far.
        largest: 1 - cos among those.
    """

    def __init__(self, cache: TeacherCache, teacher: TeacherOptions, every: int | None) -> None:
        """Find the teacher's space; nothing is loaded.

        Raises:
            SpaceMismatch, SpaceNotFound: the cache does not have it.
        """
        spec = resolve(teacher)
        view = cache.find_space(spec.space)
        if view is None:
            fields = {name: value for name, value in spec.space.to_json().items() if name not in LABELS}
            if spec.space.dtype == "auto":
                del fields["dtype"]
            view = cache.space(fields)
        self.view = view
        self.every = every or max(1, view.present_count() // ASKED_ROWS)
        self.rows = 0
        self.largest: float | None = None
        self._cache = cache
        self._worker = EncodeWorker(spec.with_dtype(view.space.dtype))
        self._waiting: list[tuple[int, str, npt.NDArray[np.float32]]] = []
        self._different: dict[int, float] = {}

    def see(self, view: SpaceView, rows: npt.NDArray[np.int64], values: Rows) -> None:
        """Take note of those of the rows that are to be compared; `values` are as they are stored."""
        if view.slug != self.view.slug:
            return
        chosen = np.flatnonzero(rows % self.every == 0)
        if not len(chosen):
            return
        try:
            texts = self._cache.texts(rows[chosen])
        except DamagedCache:
            return  # told as damage of the text table
        vectors = restored(view, values[chosen])
        self._waiting += zip(rows[chosen].tolist(), texts, vectors, strict=True)
        while len(self._waiting) >= _BATCH_ROWS:
            self._compare()

    def _compare(self) -> None:
        batch, self._waiting = self._waiting[:_BATCH_ROWS], self._waiting[_BATCH_ROWS:]
        rows, texts, stored = zip(*batch, strict=True)
        now = self._worker.encode(list(texts)).vectors.astype(np.float64)
        then = np.stack(stored).astype(np.float64)
        difference = cosine_errors(now, then)
        self.rows += len(batch)
        self.largest = float(np.nanmax([self.largest or 0.0, *difference]))
        for row, found in zip(rows, difference.tolist(), strict=True):
            if not found <= SAME_COSINE:  # NaN is no agreement
                self._different[row] = found

    def damage(self) -> Iterator[Damage]:
        """The verdict, after the last row."""
        while self._waiting:
            self._compare()
        if self._different:
            yield Damage(
                "teacher",
                f"space {self.view.slug}: {len(self._different)} of {self.rows} rows differ from what the teacher "
                f"says now by 1 - cos of up to {max(self._different.values()):.2g} (bound {SAME_COSINE:g}): "
                f"{listed('row', sorted(self._different))}",
                len(self._different),
                self.view.array_name,
            )
