"""One array of the table: texts, keys, or the vectors of a space. Only rows in the index exist."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from teacher_cache.errors import MissingRows
from teacher_cache.storage.chunks import Rows
from teacher_cache.storage.index import Change, Index, ShardRecord, quarantine_key, shard_key
from teacher_cache.storage.shards import ShardedArray


class Column:
    """Reads and writes the rows of one array that are in the index.

    Args:
        name: of the array in the index.
        quarantine: name of its quarantined rows in the index; None means `name`.
    """

    def __init__(self, index: Index, name: str, folder: Path, quarantine: str | None = None) -> None:
        self.index = index
        self.name = name
        self.quarantine_name = name if quarantine is None else quarantine
        self.array = ShardedArray(folder)
        self.shard_rows = self.array.shard_rows
        # First absent row of each shard, as far as it is known; few shards have rows after it.
        self._ends = np.zeros(64, dtype=np.int64)
        self._growing = threading.Lock()  # a thread must not replace another's array by a shorter one
        self._gappy: dict[int, ShardRecord] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.index, self.name, self.array.folder, self.quarantine_name)

    def record(self, number: int) -> ShardRecord | None:
        """The current record of a shard; None if it has no rows."""
        return self.index.shard(self.name, number)

    def present_count(self) -> int:
        """Number of present rows."""
        return sum(int(record.present.sum()) for _, record in self.index.iter_shards(self.name))

    def worst_error(self) -> float:
        """Largest 1 - cos between a stored row and the teacher output."""
        return max((record.worst_error for _, record in self.index.iter_shards(self.name)), default=0.0)

    def quarantined(self, rows: range | None = None) -> dict[int, str]:
        """Row -> reason of the quarantined rows, optionally within a range."""
        return self.index.quarantined(self.quarantine_name, rows)

    def missing_rows(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Ascending distinct rows that are neither present nor quarantined."""
        missing = rows[~self.present(rows)]
        if not len(missing):
            return missing
        quarantined = self.quarantined(range(int(missing.min()), int(missing.max()) + 1))
        return np.setdiff1d(missing, np.fromiter(quarantined, dtype=np.int64))

    def present(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """`(n,)`: which rows are present; -1, which stands for an unknown text, is not."""
        shard_of = rows // self.shard_rows
        try:
            mask = rows < self._ends[shard_of]
        except IndexError:
            inside = (rows >= 0) & (rows < self.index.rows())
            if not inside.all():  # rows outside the table must not enlarge the array
                inside[inside] = self.present(rows[inside])
                return inside
            with self._growing:
                short = int(shard_of.max()) + 1 - len(self._ends)
                if short > 0:
                    self._ends = np.pad(self._ends, (0, max(short, len(self._ends))))
            mask = rows < self._ends[shard_of]
        if mask.all() and rows.min(initial=0) >= 0:
            return mask
        mask &= rows >= 0
        unsure = np.flatnonzero(~mask & (rows >= 0))
        for number, places, within in self.array.by_shard(rows[unsure]):
            mask[unsure[places]] = self._presence(number, within)
        return mask

    def _presence(self, number: int, within: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which positions of a shard are present; its record is read again if the known one lacks any of them."""
        known = self._gappy.get(number)
        if known is None or not known.present[within].all():
            newest = self.record(number)
            if newest is None:
                return np.zeros(len(within), dtype=bool)
            if known is None or newest.digest != known.digest:
                # Also if no record is known: those without gaps are not kept, and the file may have been replaced.
                self.array.forget(number)
            known = newest
            gaps = np.flatnonzero(~known.present)
            count = int(gaps[0]) if len(gaps) else self.shard_rows
            self._ends[number] = number * self.shard_rows + count
            self._gappy.pop(number, None)
            if known.present[count:].any():
                self._gappy[number] = known
        return known.present[within]

    def read(self, rows: npt.NDArray[np.int64], out: Rows | None = None) -> Rows:
        """Stored values of rows, in the order of `rows`.

        Args:
            out: returned instead of a new array; contiguous, of the array's dtype.
        """
        present = self.present(rows)
        if not present.all():
            missing = rows[~present]
            raise MissingRows(f"{self.name} lacks {len(missing)} of {len(rows)} rows, the first is row {missing[0]}")
        return self.array.read(rows, out)

    def write(self, number: int, rows: npt.NDArray[np.int64], stored: Rows, worst: float) -> list[Change]:
        """Replace a shard by one with more rows, no longer quarantined; returns the changes to commit.

        The file is durable when this returns; readers see its new rows after the commit.

        Args:
            rows: of the table, in this shard.
            worst: largest 1 - cos between one of them and the teacher output.

        Raises:
            DamagedCache: the shard's older rows are not the values that were written; nothing changes.
        """
        before = self.record(number)
        body = self.array.empty(self.shard_rows)
        present = np.zeros(self.shard_rows, dtype=bool)
        if before is not None:
            present |= before.present
            body[present] = self.array.read_checked(number, before.present, before.digest)
            worst = max(worst, before.worst_error)
        within = rows - number * self.shard_rows
        body[within] = stored
        present[within] = True
        receipt = self.array.write_shard(number, body, present)
        self.array.grow(self.index.rows())  # to the size of the table: once per build
        record = ShardRecord(receipt.digest, worst, receipt.size, present)
        shard = range(number * self.shard_rows, (number + 1) * self.shard_rows)
        released = sorted(self.quarantined(shard).keys() & set(rows.tolist()))
        return [
            Change("shards", shard_key(self.name, number), record.pack()),
            *(Change("quarantine", quarantine_key(self.quarantine_name, row), None) for row in released),
        ]

    def quarantine(self, reasons: dict[int, str]) -> list[Change]:
        """The changes that quarantine rows, by row -> reason."""
        name = self.quarantine_name
        return [Change("quarantine", quarantine_key(name, row), reason.encode()) for row, reason in reasons.items()]
