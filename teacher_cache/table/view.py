"""One embedding space of a cache: a column of the table, read lazily, written one shard at a time."""

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from teacher_cache.errors import DamagedCache, MissingRows
from teacher_cache.space import EmbeddingSpace
from teacher_cache.storage.codec import (
    Encoding,
    Stored,
    check_rows,
    combined_error,
    encoding_name,
    find_encoding,
    stored_name,
)
from teacher_cache.storage.column import Column
from teacher_cache.storage.index import Change, Index
from teacher_cache.storage.shards import ShardedArray
from teacher_cache.text_key import text_keys

if TYPE_CHECKING:  # imported where a space has token columns, and only then
    from teacher_cache.tokens.token_columns import TokenColumns, TokenRecord

SPACES = "spaces"
VECTORS = "vectors.zarr"
# Rows of one inner chunk: small enough to decode for a single row, large enough to compress.
CHUNK_ROWS = 64
_ARRAY = re.compile(r"vectors(-[a-z0-9]+)?\.zarr")


@dataclass(frozen=True)
class SpaceRecord:
    """Index record of one embedding space.

    Attributes:
        storage: name of the encoding of its vectors.
        array: folder of the vectors inside the space's folder; a new one after `tcache convert`.
        tokens, seconds: total cost of encoding so far; `tcache plan` estimates the rest from it.
        columns: token columns of the space, if any.
    """

    space: EmbeddingSpace
    storage: str
    tokens: int = 0
    seconds: float = 0.0
    array: str = VECTORS
    columns: "TokenRecord | None" = None

    @property
    def name(self) -> str:
        """Name of the space in the index."""
        return f"{SPACES}/{self.space.slug}"

    @property
    def array_name(self) -> str:
        """Name of the vectors in the index."""
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
        columns = None
        if record.get("columns"):
            from teacher_cache.tokens.token_columns import TokenRecord

            columns = TokenRecord.from_json(record["columns"])
        return cls(space, encoding_name(record["storage"]), record["tokens"], record["seconds"], array, columns)


def create_vectors(folder: Path, encoding: Encoding, dims: int, shard_rows: int) -> ShardedArray:
    """Create an empty array for `dims`-dimensional vectors in an encoding."""
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
    """One embedding space of a cache: vectors by text or by row, read from disk on access. Never runs a teacher.

    Example:
        >>> space = TeacherCache.open("cache").space()
        >>> space["a text"].shape, space[["a text", "another"]].shape
        ((384,), (2, 384))
    """

    def __init__(self, cache: Path, index: Index, record: SpaceRecord) -> None:
        self.index = index
        self.record = record
        self.folder = cache / SPACES / record.space.slug
        self.space = record.space
        self.slug = record.space.slug
        self.array_name = record.array_name
        self.encoding: Encoding = find_encoding(record.storage)
        self.column = Column(index, self.array_name, self.folder / record.array, quarantine=self.slug)
        self.vectors = self.column.array

    @property
    def dims(self) -> int:
        return self.space.dims

    @cached_property
    def tokens(self) -> "TokenColumns | None":
        """Token columns of the space; None if it has none.

        Raises:
            DamagedCache: the metadata of an array are missing.
        """
        if self.record.columns is None:
            return None
        from teacher_cache.tokens.token_columns import TokenColumns

        return TokenColumns(self.folder, self.record.name, self.index, self.record.columns)

    def present(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """`(n,)` bool, true for rows that have a vector."""
        return self.column.present(as_rows(rows))

    def present_count(self) -> int:
        """Number of rows that have a vector."""
        return self.column.present_count()

    def worst_error(self) -> float:
        """Largest 1 - cos between a stored vector and the teacher output."""
        return self.column.worst_error()

    def quarantined(self, rows: range | None = None) -> dict[int, str]:
        """Row -> reason of its quarantine; of all rows, or of a range."""
        return self.column.quarantined(rows)

    def __len__(self) -> int:
        return self.present_count()

    def __bool__(self) -> bool:  # an empty space is still a space
        return True

    def __contains__(self, text: object) -> bool:
        return isinstance(text, str) and bool(self.present(self._lookup([text]))[0])

    def __repr__(self) -> str:
        return f"<SpaceView {self.slug!r}: {len(self):,} vectors of {self.dims} dims, {self.encoding.name}>"

    def __getitem__(self, texts: str | Sequence[str]) -> npt.NDArray[np.float32]:
        """`(dims,)` float32 vector of a text, or `(n, dims)` vectors of a sequence of n texts.

        Raises:
            MissingRows: also a KeyError; a text has no vector in this space.
        """
        if isinstance(texts, str):
            return self[[texts]][0]
        rows = self._lookup(texts)
        missing = np.flatnonzero(~self.present(rows))
        if len(missing):
            raise MissingRows(
                f"space {self.slug} has no vector for {len(missing)} of {len(rows)} texts, first "
                f"{texts[missing[0]]!r}; `space.get` returns what there is, `cache.get_or_encode` encodes the "
                f"rest{self.index.as_of}"
            )
        return self.gather(rows)

    def get(self, texts: str | Sequence[str], missing: Any = None) -> Any:
        """Vectors of texts, with a default for texts that have none.

        Args:
            missing: value for a text without a vector. For a sequence of texts, a number fills that text's row.

        Returns:
            For one text its `(dims,)` float32 vector, or `missing`. For n texts an `(n, dims)` float32 array if
            `missing` is a number or a vector, and a list of n vectors or None if `missing` is None.
        """
        if isinstance(texts, str):
            rows = self._lookup([texts])
            return self.gather(rows)[0] if self.present(rows)[0] else missing
        rows = self._lookup(texts)
        present = self.present(rows)
        vectors = np.zeros((len(rows), self.dims), dtype=np.float32)
        vectors[present] = self.gather(rows[present])
        if missing is None:
            return [vector if there else None for vector, there in zip(vectors, present.tolist(), strict=True)]
        vectors[~present] = missing
        return vectors

    def _lookup(self, texts: Sequence[str]) -> npt.NDArray[np.int64]:
        return self.index.find(text_keys(as_texts(texts)))

    def gather(
        self,
        rows: npt.ArrayLike,
        out: Any | None = None,
        *,
        dtype: npt.DTypeLike = np.float32,
    ) -> Any:
        """`(n, dims)` vectors of n rows, in the order given.

        Args:
            rows: `(n,)` integers.
            out: array or tensor to write into and return: any float numpy array, or a torch tensor of any float
                dtype on any device.
            dtype: float16, float32 or float64, of a new array.

        Raises:
            MissingRows: a row has no vector in this space.
            DamagedCache: a shard does not match its index record.
            TypeError, ValueError: `rows` is not a 1-D array of integers, or `out` has another shape or dtype.
        """
        rows = as_rows(rows)
        if out is not None and _is_foreign(out):
            return _copied(self.gather(rows), out)
        into = np.empty((len(rows), self.dims), dtype=dtype) if out is None else _array_of(out)
        if into.shape != (len(rows), self.dims) or into.dtype.kind != "f":
            raise ValueError(f"expected {(len(rows), self.dims)} floats to write into, found {into.shape} {into.dtype}")
        if into.dtype == self.vectors.dtype and into.flags.c_contiguous:
            self.gather_stored(rows, into)
        else:
            self.encoding.restore(self.gather_stored(rows), into)
        return into if out is None else out

    def gather_stored(self, rows: npt.NDArray[np.int64], out: Stored | None = None) -> Stored:
        """`(n, encoding.width(dims))` stored rows, to be decoded by `encoding.restore`; otherwise like `gather`."""
        try:
            return self.column.read(rows, out)
        except MissingRows:
            raise self._missing(rows) from None

    def _missing(self, rows: npt.NDArray[np.int64]) -> MissingRows:
        missing = rows[~self.present(rows)]
        count = self.index.rows()
        if int(missing.max()) >= count:
            return MissingRows(f"row {missing.max()} is outside the table of {count} rows{self.index.as_of}")
        return MissingRows(
            f"space {self.slug} has no vector for {len(missing)} of {len(rows)} rows, first row "
            f"{missing[0]}; `tcache build` with the same teacher fills it{self.index.as_of}"
        )

    def missing_rows(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Rows without a vector that are not quarantined either."""
        return self.column.missing_rows(as_rows(rows))

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
        """Write vectors of one shard; they are durable and committed on return.

        Non-finite rows, and rows that the encoding cannot hold, are quarantined with a reason. The first write to a
        new space also commits the space.

        Args:
            number: of the shard.
            rows: `(n,)` rows of the table, all in this shard.
            vectors: `(n, dims)`.
            tokens, seconds: cost of these vectors, for `tcache plan`.
            error: largest 1 - cos between one of them and the teacher output; not 0 for vectors read from a cache.
            also: index changes to commit in the same transaction, such as those of `TokenColumns.write`.

        Returns:
            Number of rows stored, and row -> reason for the quarantined ones.

        Raises:
            DamagedCache: the shard's existing rows do not match their digest; nothing is changed.
        """
        checked = check_rows(vectors, self.encoding)
        good = np.array([place not in checked.quarantined for place in range(len(rows))], dtype=bool)
        refused = {int(rows[place]): reason for place, reason in checked.quarantined.items()}
        changes = self.column.quarantine(refused)
        stored = rows[good]
        if len(stored):
            worst = combined_error(error, float(checked.cosine_error[good].max()))
            changes += self.column.write(number, stored, checked.stored[good], worst)
        published = self.index.record("spaces", self.slug)
        before = self.record if published is None else SpaceRecord.from_json(published)
        now = replace(
            before,
            tokens=before.tokens + tokens,
            seconds=before.seconds + seconds,
            # A view opened before the columns were created has none.
            columns=max(before.columns, self.record.columns, key=lambda known: len(known.arrays) if known else 0),
        )
        if published is None or now != before:
            changes.append(Change("spaces", self.slug.encode(), now.to_json()))
        self.index.commit([*changes, *also])
        return len(stored), refused


def as_rows(rows: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """`rows` as a 1-D int64 array.

    Raises:
        TypeError: not integers, such as a bool mask or floats.
        ValueError: not one-dimensional.
    """
    given = np.asarray(rows)
    if given.ndim != 1:
        raise ValueError(f"expected a 1-D array of row numbers, found {given.ndim} dimensions, shape {given.shape}")
    if given.dtype.kind not in "iu" and given.size:
        hint = "; use np.flatnonzero(mask) for a mask" if given.dtype.kind == "b" else ""
        raise TypeError(f"expected integer row numbers, found {given.dtype}{hint}")
    return given.astype(np.int64, copy=False)


def as_texts(texts: Sequence[str]) -> Sequence[str]:
    """`texts`, if it is a sequence of strings and not one string.

    Raises:
        TypeError: it is one string, or an item is not a string.
    """
    if isinstance(texts, str | bytes):
        raise TypeError(f"expected a sequence of texts, found one {type(texts).__name__}: put it in a list")
    if not isinstance(texts, Iterable):
        raise TypeError(f"expected texts, found {type(texts).__name__}; `space.gather` reads rows by number")
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"expected texts, found {type(text).__name__} at position {place}")
    return texts


def _array_of(out: Any) -> npt.NDArray[Any]:
    """The memory of an array or tensor, as an array."""
    if not isinstance(out, np.ndarray) and not hasattr(out, "data_ptr"):  # a list would be copied, not filled
        raise ValueError(f"expected an array or tensor to write into, found {type(out).__name__}")
    return np.asarray(out)


def _is_foreign(out: Any) -> bool:
    """Whether numpy cannot view the memory of a torch tensor."""
    return hasattr(out, "data_ptr") and (out.device.type != "cpu" or str(out.dtype) == "torch.bfloat16")


def _copied(vectors: npt.NDArray[np.float32], out: Any) -> Any:
    """A torch tensor that numpy has no dtype for, or that is on another device, filled with vectors."""
    import torch

    if out.shape != vectors.shape or not out.dtype.is_floating_point:
        raise ValueError(f"expected {vectors.shape} floats to write into, found {tuple(out.shape)} {out.dtype}")
    return out.copy_(torch.from_numpy(vectors))
