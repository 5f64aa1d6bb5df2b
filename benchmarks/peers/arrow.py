"""Vectors as Arrow columns of fixed-size lists, and back without a copy of each row."""

from typing import Any

import numpy as np

from benchmarks.vectors import Float16


def lists(block: Float16) -> Any:
    """A fixed-size list array of `(n, dims)` vectors."""
    import pyarrow

    return pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(block.reshape(-1)), block.shape[1])


def numbers(column: Any) -> Float16:
    """`(n, dims)` of a column or array of fixed-size lists."""
    import pyarrow

    if isinstance(column, pyarrow.ChunkedArray):
        column = column.combine_chunks()
    values: Float16 = column.flatten().to_numpy(zero_copy_only=False)
    return np.asarray(values).reshape(len(column), -1)
