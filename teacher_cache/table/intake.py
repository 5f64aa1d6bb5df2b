"""Vectors that were not computed here: comparison with those of the cache, checked copies, writing shard by shard.

Used by `merge` and `import`. Memory does not grow with the data: row numbers are in anonymous files, and records are
sorted a million at a time.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from teacher_cache.errors import DamagedCache
from teacher_cache.storage.codec import cosine_errors
from teacher_cache.storage.column import Column
from teacher_cache.storage.texts import TextTable
from teacher_cache.table.view import SpaceView
from teacher_cache.text_key import text_keys
from teacher_cache.tokens.token_columns import ATTENTION, StoredTokens

# Two outputs of one teacher for one text differ by rounding. all-MiniLM-L6-v2 in bfloat16: up to 1 - cos = 4e-5
# between batches, 1e-4 to float32, lengths by 0.7 %. A prompt of one word moves every vector by 6e-3 or more.
MAX_COSINE_DISTANCE = 1e-3
MAX_LENGTH_DIFFERENCE = 0.05
# Records sorted together; about 60 bytes each.
WINDOW_ROWS = 2**20
_SCANNED = 2**20
_COMPARED = 1024

Vectors = npt.NDArray[np.floating[Any]]
Rows = npt.NDArray[np.int64]


def differing_rows(first: Vectors, second: Vectors) -> npt.NDArray[np.intp]:
    """`(m,)`: rows in which two `(n, d)` arrays differ by more than rounding."""
    found = [np.empty(0, dtype=np.intp)]
    for start in range(0, len(first), _COMPARED):  # float64 copies: a block at a time
        a, b = (vectors[start : start + _COMPARED].astype(np.float64) for vectors in (first, second))
        lengths, other_lengths = np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1)
        equal = np.abs(lengths - other_lengths) <= MAX_LENGTH_DIFFERENCE * np.maximum(lengths, other_lengths)
        equal &= cosine_errors(a, b) <= MAX_COSINE_DISTANCE
        equal |= (a == b).all(axis=1)  # also zero vectors, which have no cosine
        found.append(np.flatnonzero(~equal) + start)
    return np.concatenate(found)


def describe_difference(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> str:
    """The difference between two `(d,)` vectors, for a message."""
    a, b = first.astype(np.float64), second.astype(np.float64)
    lengths = np.linalg.norm(a), np.linalg.norm(b)
    cosine = float(a @ b) / float(lengths[0] * lengths[1] or 1.0)
    return (
        f"1 - cos {1 - cosine:.2g} (for the same teacher at most {MAX_COSINE_DISTANCE:g}), lengths {lengths[0]:.4g} "
        f"and {lengths[1]:.4g}"
    )


def excerpt(text: str) -> str:
    """The beginning of a text, for a message."""
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def anonymous_file(near: Path) -> IO[bytes]:
    """A temporary file without a name on the disk of a cache, which need not exist yet."""
    folder = next(parent for parent in (near.absolute(), *near.absolute().parents) if parent.is_dir())
    return tempfile.TemporaryFile(dir=folder)


def map_file(file: IO[bytes], dtype: str, *width: int) -> npt.NDArray[Any]:
    """The content of a file as a memory-mapped `(n, *width)` array."""
    file.flush()
    if not file.tell():
        return np.empty((0, *width), dtype=dtype)
    flat: npt.NDArray[Any] = np.memmap(file, dtype=dtype, mode="r")
    return flat.reshape(-1, *width)


def sorted_windows(values: npt.NDArray[Any], limit: int, window: int) -> Iterator[Rows]:
    """Positions of `(n,)` values below `limit`, stably sorted by value, a range of `window` values at a time."""
    kind = values.dtype.type
    for low in range(0, limit, window):
        high = min(low + window, limit) - 1
        found = [np.empty(0, dtype=np.int64)]
        for start in range(0, len(values), _SCANNED):
            part = values[start : start + _SCANNED]
            found.append(np.flatnonzero((part >= kind(low)) & (part <= kind(high))) + start)
        positions = np.concatenate(found)
        if len(positions):
            yield positions[np.argsort(values[positions], kind="stable")]


def by_shard(rows: Rows, table_rows: int, shard_rows: int) -> Iterator[Rows]:
    """Positions of `(n,)` rows of the table, one shard at a time, in ascending order of row."""
    window = max(WINDOW_ROWS // shard_rows, 1) * shard_rows
    for positions in sorted_windows(rows, table_rows, window):
        yield from np.split(positions, np.flatnonzero(np.diff(rows[positions] // shard_rows)) + 1)


class CheckedReader:
    """Reads the vectors and token columns of a space to copy, after comparing each shard with its digest.

    A copy gets a new digest, which would hide damage.
    """

    def __init__(self, view: SpaceView) -> None:
        self.view = view
        self._digests: dict[tuple[str, int], bytes] = {}  # of the shards compared so far

    def gather(self, rows: Rows, dtype: npt.DTypeLike = np.float32) -> Vectors:
        """`(n, dims)` vectors of present rows; DamagedCache if a shard does not match its digest."""
        self._check(self.view.column, rows)
        return self.view.gather(rows, dtype=dtype)

    def gather_tokens(self, rows: Rows, attention: bool) -> list[StoredTokens]:
        """Token columns of rows that have them; raises as `gather`."""
        tokens = self.view.tokens
        assert tokens is not None
        for array, column in tokens.columns.items():
            if attention or array != ATTENTION:
                self._check(column, rows)
        return tokens.gather_stored(rows, attention)

    def _check(self, column: Column, rows: Rows) -> None:
        for number in np.unique(rows // column.shard_rows).tolist():
            record = column.record(number)
            if record is not None and self._digests.get((column.name, number)) != record.digest:
                column.array.forget(number)  # a writer may have replaced the file
                column.array.read_checked(number, record.present, record.digest)
                self._digests[column.name, number] = record.digest


def checked_texts(table: TextTable, rows: Rows) -> tuple[list[str], npt.NDArray[np.uint8]]:
    """Texts and `(n, 16)` keys of rows; DamagedCache if a text does not match its key."""
    texts, keys = table.read(rows), table.read_keys(rows)
    computed = np.frombuffer(b"".join(text_keys(texts)), dtype=np.uint8).reshape(keys.shape)
    wrong = np.flatnonzero((computed != keys).any(axis=1))
    if len(wrong):
        raise DamagedCache(
            f"{table.text.array.folder} is damaged: the text of row {rows[wrong[0]]}, {excerpt(texts[wrong[0]])}, does "
            "not match its key; `tcache verify --deep` lists all damage"
        )
    return texts, keys


@dataclass
class Filled:
    """Rows that `fill` stored, rows that already had a vector, and row -> why the encoding cannot hold its vector."""

    stored: int
    held: int
    quarantined: dict[int, str]


def fill(
    view: SpaceView,
    rows: Rows,
    table_rows: int,
    read: Callable[[Rows], npt.NDArray[np.float32]],
    *,
    error: float = 0.0,
    has: Callable[[Rows], npt.NDArray[np.bool_]] | None = None,
    report: Callable[[int, int], None],
) -> Filled:
    """Write vectors of rows that have none, each shard once; existing vectors are not changed.

    Args:
        rows: `(n,)` row of each record; of several records with one row the first is used.
        read: vectors of records, by their position in `rows`.
        error: largest 1 - cos between a vector and the teacher output, as far as known.
        has: which records have a vector; None for all.
        report: called with records done and n.
    """
    filled = Filled(0, 0, {})
    shard_rows = view.vectors.shard_rows
    done = 0
    for records in by_shard(rows, table_rows, shard_rows):
        done += len(records)
        wanted = records[np.append(True, np.diff(rows[records]) > 0)]
        if has is not None:
            wanted = wanted[has(wanted)]
        present = view.present(rows[wanted])
        filled.held += int(present.sum())
        wanted = wanted[~present]
        if len(wanted):
            into = rows[wanted]
            stored, quarantined = view.write(int(into[0]) // shard_rows, into, read(wanted), error=error)
            filled.stored += stored
            filled.quarantined |= quarantined
        report(done, len(rows))
    return filled
