"""Vectors that no teacher of this process computed: read from where they are, compared, written shard by shard.

What `merge` and `import` have in common. Memory stays flat: row lists live in files without a name, and records
are sorted a million at a time.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from teacher_cache.tokens.token_columns import ATTENTION, StoredTokens, TokenColumns

# What one teacher says of one text twice differs by rounding. all-MiniLM-L6-v2 in bfloat16: up to 1 - cos = 4e-5
# between batches, 1e-4 to float32, lengths by 0.7 %. A prompt of one word moves every vector by 6e-3 or more.
MAX_COSINE_DISTANCE = 1e-3
MAX_LENGTH_DIFFERENCE = 0.05
# Records sorted together; some 60 bytes each.
WINDOW_ROWS = 2**20
_SCANNED = 2**20
_COMPARED = 1024

Vectors = npt.NDArray[np.floating[Any]]
RowList = npt.NDArray[np.int64]


def disagreeing(held: Vectors, given: Vectors) -> npt.NDArray[np.intp]:
    """Places `(m,)` at which two `(n, d)` arrays do not hold the same vector, rounding aside."""
    wrong = [np.empty(0, dtype=np.intp)]
    for start in range(0, len(held), _COMPARED):  # in float64, so not all at once
        ours, theirs = (part[start : start + _COMPARED].astype(np.float64) for part in (held, given))
        lengths, others = np.linalg.norm(ours, axis=1), np.linalg.norm(theirs, axis=1)
        near = np.abs(lengths - others) <= MAX_LENGTH_DIFFERENCE * np.maximum(lengths, others)
        same = (cosine_errors(ours, theirs) <= MAX_COSINE_DISTANCE) & near
        same |= (ours == theirs).all(axis=1)  # a zero vector has no direction
        wrong.append(np.flatnonzero(~same) + start)
    return np.concatenate(wrong)


def difference(held: npt.NDArray[Any], given: npt.NDArray[Any]) -> str:
    """How far two `(d,)` vectors are apart, for a message."""
    ours, theirs = held.astype(np.float64), given.astype(np.float64)
    lengths = np.linalg.norm(ours), np.linalg.norm(theirs)
    cosine = float(ours @ theirs) / float(lengths[0] * lengths[1] or 1.0)
    return (
        f"1 - cos {1 - cosine:.2g} (the same teacher stays within {MAX_COSINE_DISTANCE:g}), lengths "
        f"{lengths[0]:.4g} and {lengths[1]:.4g}"
    )


def excerpt(text: str) -> str:
    """The beginning of a text, for a message."""
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


@contextmanager
def unnamed_file(near: Path) -> Iterator[IO[bytes]]:
    """A file on the disk of a cache, which need not be there yet; it goes with its process, however that ends."""
    folder = next(parent for parent in (near.absolute(), *near.absolute().parents) if parent.is_dir())
    with tempfile.TemporaryFile(dir=folder) as file:
        yield file


def mapped(file: IO[bytes], dtype: str, *width: int) -> npt.NDArray[Any]:
    """What was written to a file, as rows; read by the page, never loaded."""
    file.flush()
    if not file.tell():
        return np.empty((0, *width), dtype=dtype)
    flat: npt.NDArray[Any] = np.memmap(file, dtype=dtype, mode="r")
    return flat.reshape(-1, *width)


def grouped(values: npt.NDArray[Any], limit: int, window: int) -> Iterator[RowList]:
    """Places of `values` `(n,)`, all below `limit`, in ascending order of value, a window of values at a time.

    Equal values come together, in the order in which they stand.
    """
    kind = values.dtype.type
    for low in range(0, limit, window):
        high = min(low + window, limit) - 1
        found = []
        for start in range(0, len(values), _SCANNED):
            part = values[start : start + _SCANNED]
            found.append(np.flatnonzero((part >= kind(low)) & (part <= kind(high))) + start)
        places = np.concatenate(found) if found else np.empty(0, dtype=np.int64)
        if len(places):
            yield places[np.argsort(values[places], kind="stable")]


class CheckedVectors:
    """Reads a space whose vectors are to be copied: nothing leaves a shard that is not what was written.

    A copy gets a new digest, which would vouch for damage.
    """

    def __init__(self, view: SpaceView) -> None:
        self.view = view
        self._checked: dict[int, bytes] = {}

    def gather(self, rows: RowList, dtype: npt.DTypeLike = np.float32) -> Vectors:
        """`(n, dims)` vectors of rows that are present.

        Raises:
            DamagedCache: one of their shards is not what its digest says.
            MissingRows: a row has no vector any more.
        """
        _prove(self.view.column, rows, self._checked)
        return self.view.gather(rows, dtype=dtype)


class ProvenTokens:
    """Reads token columns that are to be copied, as `CheckedVectors` does vectors."""

    def __init__(self, tokens: TokenColumns) -> None:
        self.tokens = tokens
        self._checked: dict[str, dict[int, bytes]] = {array: {} for array in tokens.columns}

    def gather_stored(self, rows: RowList, attention: bool) -> list[StoredTokens]:
        """Token columns of rows that have them.

        Raises:
            DamagedCache: one of their shards is not what its digest says.
            MissingRows: a row has lost them.
        """
        for array, column in self.tokens.columns.items():
            if attention or array != ATTENTION:
                _prove(column, rows, self._checked[array])
        return self.tokens.gather_stored(rows, attention)


def _prove(column: Column, rows: RowList, checked: dict[int, bytes]) -> None:
    """Compare the shards of rows with their digests, each once; `checked` remembers."""
    for number in np.unique(rows // column.shard_rows).tolist():
        record = column.record(number)
        if record is not None and checked.get(number) != record.digest:
            column.array.forget(number)  # a writer may have replaced the file since it was opened
            column.array.read_checked(number, record.present, record.digest)
            checked[number] = record.digest


def checked_texts(table: TextTable, rows: RowList) -> tuple[list[str], npt.NDArray[np.uint8]]:
    """Texts and `(n, 16)` keys of rows.

    Raises:
        DamagedCache: a text is not the one its key was made of.
    """
    texts, keys = table.read(rows), table.read_keys(rows)
    made = np.frombuffer(b"".join(text_keys(texts)), dtype=np.uint8).reshape(keys.shape)
    wrong = np.flatnonzero((made != keys).any(axis=1))
    if len(wrong):
        raise DamagedCache(
            f"{table.text.array.folder} is damaged: row {rows[wrong[0]]} holds {excerpt(texts[wrong[0]])}, which its "
            "key was not made of; `tcache verify --deep` tells what else"
        )
    return texts, keys


@dataclass
class Filled:
    """What became of the given vectors, in rows.

    Attributes:
        stored: written now.
        held: the space had one.
        refused: row -> why the number format could not hold it.
    """

    stored: int
    held: int
    refused: dict[int, str]


def fill(
    view: SpaceView,
    rows: RowList,
    table_rows: int,
    read: Callable[[RowList], npt.NDArray[np.float32]],
    *,
    error: float = 0.0,
    has: Callable[[RowList], npt.NDArray[np.bool_]] | None = None,
    report: Callable[[int, int], None],
) -> Filled:
    """Give vectors to the rows that have none, one write to a shard; a vector that is there stays.

    Args:
        rows: `(n,)` row of each record; of several records of one row the first counts.
        read: vectors of records, by their place in `rows`.
        error: largest 1 - cos of a vector against what its teacher said, as far as it is known.
        has: which records have a vector at all; None means every one.
        report: called with records done and n.
    """
    filled = Filled(0, 0, {})
    shard_rows = view.vectors.shard_rows
    done = 0
    for records in grouped(rows, table_rows, max(WINDOW_ROWS // shard_rows, 1) * shard_rows):
        targets = rows[records]
        for part in np.split(np.arange(len(records)), np.flatnonzero(np.diff(targets // shard_rows)) + 1):
            done += len(part)
            wanted = part[np.append(True, np.diff(targets[part]) > 0)]
            if has is not None:
                wanted = wanted[has(records[wanted])]
            present = view.present(targets[wanted])
            filled.held += int(present.sum())
            wanted = wanted[~present]
            if len(wanted):
                into = targets[wanted]
                number, vectors = int(into[0]) // shard_rows, read(records[wanted])
                stored, refused = view.write(number, into, vectors, error=error)
                filled.stored += stored
                filled.refused |= refused
            report(done, len(rows))
    return filled
