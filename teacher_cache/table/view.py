"""One embedding space of a cache: a column of the table, read lazily, written a shard at a time."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from teacher_cache.errors import DamagedCache, MissingRows
from teacher_cache.space import EmbeddingSpace
from teacher_cache.storage.codec import (
    Encoding,
    Stored,
    check_rows,
    encoding_name,
    find_encoding,
    joint_error,
    stored_name,
)
from teacher_cache.storage.column import Column
from teacher_cache.storage.index import Change, Index, quarantine_key
from teacher_cache.storage.shards import ShardedArray
from teacher_cache.tokens.token_columns import TokenColumns, TokenRecord

SPACES = "spaces"
VECTORS = "vectors.zarr"
# Rows of one inner chunk: small enough to decode for a single row, large enough to compress.
CHUNK_ROWS = 64
_ARRAY = re.compile(r"vectors(-[a-z0-9]+)?\.zarr")


@dataclass(frozen=True)
class SpaceRecord:
    """What the index knows of one embedding space.

    Attributes:
        array: folder of the vectors inside the space's; another one after a conversion of the number format.
        tokens, seconds: what encoding has cost so far, for foretelling the rest.
        columns: what is kept token by token; None where that is nothing.
    """

    space: EmbeddingSpace
    storage: str
    tokens: int = 0
    seconds: float = 0.0
    array: str = VECTORS
    columns: TokenRecord | None = None

    @property
    def name(self) -> str:
        """Of the space's folder in the index."""
        return f"{SPACES}/{self.space.slug}"

    @property
    def array_name(self) -> str:
        """Of the vectors in the index."""
        return self.name if self.array == VECTORS else f"{self.name}/{self.array}"

    def to_json(self) -> bytes:
        record: dict[str, Any] = {
            "space": self.space.to_json(),
            "fingerprint": self.space.fingerprint,
            "storage": stored_name(self.storage),
            "array": self.array,
            "tokens": self.tokens,
            "seconds": self.seconds,
        }
        if self.columns is not None:
            record["columns"] = self.columns.to_json()
        return json.dumps(record, indent=2, ensure_ascii=False).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "SpaceRecord":
        record = json.loads(data)
        space = EmbeddingSpace.from_json(record["space"])
        array = record.get("array", VECTORS)
        if not _ARRAY.fullmatch(array):
            raise DamagedCache(f"space {space.slug} names its vectors {array!r}, which may lie outside of its folder")
        columns = TokenRecord.from_json(record["columns"]) if record.get("columns") else None
        return cls(space, encoding_name(record["storage"]), record["tokens"], record["seconds"], array, columns)


def create_vectors(folder: Path, encoding: Encoding, dims: int, shard_rows: int) -> ShardedArray:
    """An empty array for vectors of that many numbers in that format."""
    return ShardedArray.create(
        folder,
        width=encoding.width(dims),
        dtype=encoding.dtype,
        shard_rows=shard_rows,
        chunk_rows=math.gcd(CHUNK_ROWS, shard_rows),
        compressed=encoding.compressed,
        checksum=encoding.checksum,
    )


class SpaceView:
    """One embedding space of a cache, read lazily. Holds no teacher and cannot call one."""

    def __init__(self, cache: Path, index: Index, record: SpaceRecord) -> None:
        self.index = index
        self.record = record
        self.folder = cache / SPACES / record.space.slug
        self.space = record.space
        self.slug = record.space.slug
        self.array_name = record.array_name
        self.encoding: Encoding = find_encoding(record.storage)
        self.column = Column(index, self.array_name, self.folder / record.array)
        self.vectors = self.column.array

    @property
    def dims(self) -> int:
        return self.space.dims

    @cached_property
    def tokens(self) -> TokenColumns | None:
        """What the teacher said token by token; None where that was never asked for.

        Raises:
            DamagedCache: it was, and the metadata of an array are gone.
        """
        columns = self.record.columns
        return None if columns is None else TokenColumns(self.folder, self.record.name, self.index, columns)

    def present(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """`(n,)`: which rows have a vector."""
        return self.column.present(rows)

    def present_count(self) -> int:
        """How many rows have a vector."""
        return sum(int(record.present.sum()) for _, record in self.index.iter_shards(self.array_name))

    def worst_error(self) -> float:
        """Largest 1 - cos of a stored vector against what the teacher said."""
        return max((record.worst_error for _, record in self.index.iter_shards(self.array_name)), default=0.0)

    def quarantined(self, rows: range | None = None) -> dict[int, str]:
        """Row -> why its vector was refused; of all rows, or of a range."""
        return self.index.quarantined(self.slug, rows)

    def gather(
        self,
        rows: npt.NDArray[np.int64],
        out: Any | None = None,
        *,
        dtype: npt.DTypeLike = np.float32,
    ) -> npt.NDArray[np.floating]:
        """`(n, dims)` vectors of n rows, in the order asked for.

        Args:
            out: written into instead of a new array: a float array, or a torch tensor in main memory.
            dtype: float16, float32 or float64, of a new array.

        Raises:
            MissingRows: a row has no vector in this space.
            DamagedCache: a shard is not what the index says it is.
        """
        rows = np.asarray(rows, dtype=np.int64)
        into = np.empty((len(rows), self.dims), dtype=dtype) if out is None else _array_of(out)
        if into.shape != (len(rows), self.dims) or into.dtype.kind != "f":
            raise ValueError(f"expected {(len(rows), self.dims)} floats to write into, found {into.shape} {into.dtype}")
        if into.dtype == self.vectors.dtype and into.flags.c_contiguous:
            self.gather_stored(rows, into)
        else:
            self.encoding.restore(self.gather_stored(rows), into)
        return into

    def gather_stored(self, rows: npt.NDArray[np.int64], out: Stored | None = None) -> Stored:
        """`(n, encoding.width(dims))` rows as they are stored, for `encoding.restore`; otherwise like `gather`."""
        try:
            return self.column.read(rows, out)
        except MissingRows:
            raise self._missing(rows) from None

    def _missing(self, rows: npt.NDArray[np.int64]) -> MissingRows:
        missing = rows[~self.present(rows)]
        return MissingRows(
            f"space {self.slug} has no vector for {len(missing)} of {len(rows)} rows asked for, first row "
            f"{missing[0]}; `tcache build` with the same teacher fills it{self.index.as_of}"
        )

    def missing_rows(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Rows that have no vector and were not refused one."""
        missing = rows[~self.present(rows)]
        if not len(missing):
            return missing
        refused = self.quarantined(range(int(missing.min()), int(missing.max()) + 1))
        return np.setdiff1d(missing, np.fromiter(refused, dtype=np.int64), assume_unique=True)

    def write(
        self,
        number: int,
        rows: npt.NDArray[np.int64],
        vectors: npt.NDArray[np.float32],
        *,
        tokens: int = 0,
        seconds: float = 0.0,
        error: float = 0.0,
        also: Sequence[Change] = (),
    ) -> tuple[int, dict[int, str]]:
        """Store the vectors of some rows of one shard, durable and published when this returns.

        Rows that the number format cannot hold, and non-finite ones, are quarantined with a reason. The first
        write to a new space publishes the space too.

        Args:
            tokens, seconds: what these vectors have cost, for `tcache plan`.
            error: largest 1 - cos of one of them against what the teacher said; vectors out of a cache have some.
            also: what becomes true in the same moment, such as what `TokenColumns.write` gave.

        Returns:
            How many were stored, and row -> reason for the others.

        Raises:
            DamagedCache: the shard's older rows are not what was written; nothing changes.
        """
        checked = check_rows(vectors, self.encoding)
        good = np.array([place not in checked.refused for place in range(len(rows))], dtype=bool)
        refused = {int(rows[place]): reason for place, reason in checked.refused.items()}
        changes = [
            Change("quarantine", quarantine_key(self.slug, row), reason.encode()) for row, reason in refused.items()
        ]
        stored = rows[good]
        shard = range(number * self.vectors.shard_rows, (number + 1) * self.vectors.shard_rows)
        changes += [
            Change("quarantine", quarantine_key(self.slug, row), None)
            for row in sorted(self.quarantined(shard).keys() & set(stored.tolist()))
        ]
        if len(stored):
            worst = joint_error(error, float(checked.cosine_error[good].max()))
            changes.append(self.column.write(number, stored, checked.stored[good], worst))
        published = self.index.record("spaces", self.slug)
        before = self.record if published is None else SpaceRecord.from_json(published)
        now = replace(
            before,
            tokens=before.tokens + tokens,
            seconds=before.seconds + seconds,
            # A view that was opened before the columns were made knows of none.
            columns=max(before.columns, self.record.columns, key=lambda known: len(known.arrays) if known else 0),
        )
        if published is None or now != before:
            changes.append(Change("spaces", self.slug.encode(), now.to_json()))
        self.index.commit([*changes, *also])
        return len(stored), refused


def _array_of(out: Any) -> npt.NDArray[Any]:
    """The memory of an array or tensor as an array."""
    if not isinstance(out, np.ndarray) and not hasattr(out, "data_ptr"):  # a list would be copied, not filled
        raise ValueError(f"expected an array or tensor to write into, found {type(out).__name__}")
    return np.asarray(out)
