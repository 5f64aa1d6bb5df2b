"""One array of the table as the index promises it: what is not promised does not exist.

Texts, keys and the vectors of each space are columns; all are read through here.
"""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from teacher_cache.errors import MissingRows
from teacher_cache.storage.chunks import Rows
from teacher_cache.storage.index import Change, Index, ShardRecord, shard_key
from teacher_cache.storage.shards import ShardedArray


class Column:
    """Reads rows of one array after asking the index for them.

    Args:
        name: of the array in the index.
        folder: of the array.
    """

    def __init__(self, index: Index, name: str, folder: Path) -> None:
        self.index = index
        self.name = name
        self.array = ShardedArray(folder)
        self.shard_rows = self.array.shard_rows
        # First row behind those that each shard holds without a gap: nearly always all that need be looked at.
        self._ends = np.zeros(64, dtype=np.int64)
        self._growing = threading.Lock()  # a thread must not put a shorter one in place of another's
        self._gappy: dict[int, ShardRecord] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"index": self.index, "name": self.name, "folder": self.array.folder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def record(self, number: int) -> ShardRecord | None:
        """What the index promises about one shard now."""
        return self.index.shard(self.name, number)

    def present(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """`(n,)`: which rows of the table are there; -1, which `lookup` says of unknown texts, is not."""
        shard_of = rows // self.shard_rows
        try:
            mask = rows < self._ends[shard_of]
        except IndexError:
            inside = (rows >= 0) & (rows < self.index.rows())
            if not inside.all():  # nothing grows for rows that no table has
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
        """Which places of one shard hold a row, by a record that is fetched again when it may have grown since."""
        known = self._gappy.get(number)
        if known is None or not known.present[within].all():
            newest = self.record(number)
            if newest is None:
                return np.zeros(len(within), dtype=bool)
            if known is None or newest.digest != known.digest:
                # Records without gaps are not kept: the file may be another than the one that was opened.
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
        """Rows of the table, in the order asked for, as they are stored.

        Args:
            out: written into instead of a new array; contiguous, of the array's dtype.

        Raises:
            MissingRows: a row is not there.
            DamagedCache: a shard is not what the index says it is.
        """
        present = self.present(rows)
        if not present.all():
            missing = rows[~present]
            raise MissingRows(f"{self.name} lacks {len(missing)} of {len(rows)} rows asked for, first row {missing[0]}")
        return self.array.read(rows, out)

    def write(self, number: int, rows: npt.NDArray[np.int64], stored: Rows, worst: float) -> Change:
        """Write one shard anew with more rows; durable when this returns, and true once the change is committed.

        Args:
            rows: of the table, in this shard.
            stored: the same rows as they are stored.
            worst: largest 1 - cos of one of them against what the teacher said.

        Raises:
            DamagedCache: the shard's older rows are not what was written; nothing changes.
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
        self.array.grow(self.index.rows())  # the whole table at once: its metadata are written once a build
        record = ShardRecord(receipt.digest, worst, receipt.size, present)
        return Change("shards", shard_key(self.name, number), record.pack())
