"""Rows as Arrow tables, for Parquet files and saved datasets."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from teacher_cache.errors import CorpusError
from teacher_cache.transfer.base import Block, Origin

# The losses of sentence-transformers use column `label` as the target and every other column as an input text, so
# there is no column of keys.
TEXT_COLUMN = "text"
LABEL = "label"
READ_ROWS = 1024


def schema(origin: Origin) -> Any:
    """The Arrow schema of exported rows."""
    import pyarrow

    number = pyarrow.float16() if origin.dtype == "<f2" else pyarrow.float32()
    return pyarrow.schema([(TEXT_COLUMN, pyarrow.string()), (LABEL, pyarrow.list_(number, origin.space.dims))])


def batch(block: Block, schema: Any) -> Any:
    """One Arrow record batch."""
    import pyarrow

    numbers = pyarrow.array(np.ascontiguousarray(block.vectors).reshape(-1))
    vectors = pyarrow.FixedSizeListArray.from_arrays(numbers, block.vectors.shape[1])
    return pyarrow.RecordBatch.from_arrays([pyarrow.array(block.texts, pyarrow.string()), vectors], schema=schema)


def check_column(column: str, names: Sequence[str], source: Path) -> None:
    """Raise a CorpusError if a source has no column of this name."""
    if column not in names:
        raise CorpusError(
            f"{source}: no column {column!r}, found {', '.join(names)}; name that of the vectors with `vector_key`"
        )


def matrices(tables: Iterator[Any], column: str, where: str) -> Iterator[npt.NDArray[Any]]:
    """`(n, d)` arrays from the chunks of a column of float lists without nulls, all of one length."""
    row = 0
    for table in tables:
        chunks = table.column(column)
        for chunk in getattr(chunks, "chunks", [chunks]):
            if len(chunk):
                yield _matrix(chunk, column, where, row)
            row += len(chunk)


def _matrix(chunk: Any, column: str, where: str, row: int) -> npt.NDArray[Any]:
    import pyarrow.compute
    import pyarrow.types as kinds

    kind = chunk.type
    lists = kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind)
    if not lists or not kinds.is_floating(kind.value_type):
        raise CorpusError(
            f"{where}: column {column!r} is {kind}, expected lists of floats; name another with `vector_key`"
        )
    numbers = chunk.flatten()
    if chunk.null_count or numbers.null_count:
        raise CorpusError(f"{where}: column {column!r} has a null in rows {row + 1} to {row + len(chunk)}")
    lengths = pyarrow.compute.list_value_length(chunk).to_numpy(zero_copy_only=False)
    if (lengths != lengths[0]).any():
        other = int(np.flatnonzero(lengths != lengths[0])[0])
        raise CorpusError(
            f"{where}: row {row + other + 1} has a vector of {lengths[other]} numbers, row {row + 1} one of "
            f"{lengths[0]}"
        )
    matrix: npt.NDArray[Any] = numbers.to_numpy(zero_copy_only=False).reshape(len(chunk), -1)
    return matrix
