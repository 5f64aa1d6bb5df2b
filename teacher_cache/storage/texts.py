"""The text table: the exact text and key of every row.

Two sharded zarr arrays, `text` (strings) and `keys` (16 bytes per row). They suffice to rebuild the index, and to
check which text a vector belongs to.
"""

import math
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from teacher_cache.errors import DamagedCache, MissingRows
from teacher_cache.storage.column import Column
from teacher_cache.storage.index import Change, Index
from teacher_cache.storage.shards import ShardedArray
from teacher_cache.text_key import KEY_BYTES, text_keys

TEXT_ARRAY = "texts/text"
KEY_ARRAY = "texts/keys"
CHUNK_ROWS = 64
# Rows of one index transaction. The more there are, the more of them share a rewritten page: at 2 million rows, an
# eighth of this takes four times as long.
PUBLISHED_ROWS = 65_536


class TextTable:
    """Reads texts by row; appends new ones."""

    def __init__(self, cache: Path, index: Index) -> None:
        self.index = index
        self.text = Column(index, TEXT_ARRAY, cache / TEXT_ARRAY)
        self.keys = Column(index, KEY_ARRAY, cache / KEY_ARRAY)
        self.shard_rows = self.text.shard_rows

    @staticmethod
    def create(cache: Path, shard_rows: int) -> None:
        chunk = math.gcd(CHUNK_ROWS, shard_rows)
        ShardedArray.create(
            cache / TEXT_ARRAY, width=None, dtype="str", shard_rows=shard_rows, chunk_rows=chunk, compressed=True
        )
        ShardedArray.create(
            cache / KEY_ARRAY,
            width=KEY_BYTES,
            dtype="u1",
            shard_rows=shard_rows,
            chunk_rows=shard_rows,
            compressed=False,
            checksum=False,
        )

    def read(self, rows: npt.NDArray[np.int64]) -> list[str]:
        """Texts of existing rows, in the order of `rows`."""
        return self._read(self.text, rows).tolist()

    def read_keys(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """`(n, 16)` keys of existing rows."""
        return self._read(self.keys, rows)

    @staticmethod
    def _read(column: Column, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        try:
            return column.read(rows)
        except MissingRows as error:
            raise DamagedCache(f"{error}, which is in the table; run `tcache verify`") from None


class TextAppender:
    """Assigns rows to texts and publishes them, many shards per transaction.

    A row number is known at once; readers see the row after it is published, at the latest in `flush`.
    """

    def __init__(self, table: TextTable) -> None:
        self.table = table
        self.next_row = table.index.rows()
        self._texts: list[str] = []  # of rows not yet in a shard
        self._keys: dict[bytes, int] = {}  # of rows not yet published, ascending
        self._records: list[Change] = []  # of shards written but not yet published
        self._drop_unpublished()

    def _drop_unpublished(self) -> None:
        """Remove shards that a killed writer left after the end of the table: `reindex` would include them."""
        arrays = (self.table.text.array, self.table.keys.array)
        first = number = -(-self.next_row // self.table.shard_rows)
        while any(array.shard_path(number).exists() for array in arrays):
            number += 1
        for left in reversed(range(first, number)):  # from the end, so that a kill leaves no gap
            for array in arrays:
                array.shard_path(left).unlink(missing_ok=True)

    def add(self, texts: Sequence[str]) -> npt.NDArray[np.int64]:
        """Row of each text; a new text gets the next row."""
        keys = text_keys(texts)
        rows = self.table.index.find(keys)
        for place in np.flatnonzero(rows < 0).tolist():
            row = self._keys.get(keys[place])
            if row is None:
                row = self._keys[keys[place]] = self.next_row
                self._texts.append(texts[place])
                self.next_row += 1
            rows[place] = row
        while self.next_row // self.table.shard_rows > self._first_row // self.table.shard_rows:
            self._write_shard()
        if len(self._keys) - len(self._texts) >= PUBLISHED_ROWS:
            self._publish()
        return rows

    def flush(self) -> None:
        """Write and publish every row assigned so far."""
        while self._texts:
            self._write_shard()
        if self._keys:
            self._publish()

    @property
    def _first_row(self) -> int:
        return self.next_row - len(self._texts)

    def _write_shard(self) -> None:
        """Write the first shard with pending texts."""
        table = self.table
        number, start = divmod(self._first_row, table.shard_rows)
        count = min(len(self._texts), table.shard_rows - start)
        written = len(self._keys) - len(self._texts)
        texts = np.array(self._texts[:count], dtype=object)
        joined = b"".join(islice(self._keys, written, written + count))
        keys = np.frombuffer(joined, dtype=np.uint8).reshape(-1, KEY_BYTES)
        rows = np.arange(self._first_row, self._first_row + count)
        for column, values in ((table.text, texts), (table.keys, keys)):
            before = column.record(number)
            held = 0 if before is None else int(before.present.sum())
            if held != start:
                raise DamagedCache(
                    f"the index has {held} rows of shard {number} of {column.name}, expected {start}; run "
                    "`tcache verify`"
                )
            self._records += column.write(number, rows, values, 0.0)
        del self._texts[:count]

    def _publish(self) -> None:
        """Commit the shards written so far and their rows."""
        table = self.table
        keys = list(islice(self._keys, len(self._keys) - len(self._texts)))
        for column in (table.text, table.keys):
            column.array.grow(self._first_row)
        table.index.commit(self._records, keys=keys, first_row=self._first_row - len(keys))
        self._records = []
        self._keys = dict(islice(self._keys.items(), len(keys), None))
