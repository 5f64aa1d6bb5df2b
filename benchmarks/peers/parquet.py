"""Parquet through pyarrow."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.peers.base import Contender, permutation, windows
from benchmarks.vectors import Float16, blocks_of

GROUP_ROWS = 1024
WINDOW_ROWS = 16_384


class Parquet(Contender):
    """Row groups of 1,024, read in random order into a buffer of 16,384 rows that is permuted.

    A vector is one fixed-size binary value, uncompressed: lists take longer to put together, and random numbers
    do not compress.
    """

    def load(self) -> None:
        import pyarrow
        import pyarrow.parquet

        self.arrow: Any = pyarrow
        self.library: Any = pyarrow.parquet

    def write(self, vectors: Path) -> None:
        kind = self.arrow.binary(2 * self.dims)
        schema = self.arrow.schema([("vector", kind)])
        options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
        with self.library.ParquetWriter(self.folder / "vectors.parquet", schema, **options) as writer:
            for block in blocks_of(vectors):
                values = self.arrow.FixedSizeBinaryArray.from_buffers(
                    kind, len(block), [None, self.arrow.py_buffer(block)]
                )
                writer.write_table(self.arrow.table([values], schema=schema), row_group_size=GROUP_ROWS)

    def open(self) -> None:
        self.file: Any = self.library.ParquetFile(self.folder / "vectors.parquet", memory_map=True)

    def _group(self, number: int) -> Float16:
        values = self.file.read_row_group(number, use_threads=False)["vector"].combine_chunks()
        buffer = np.frombuffer(values.buffers()[1], dtype=np.float16)
        return buffer[values.offset * self.dims :][: len(values) * self.dims].reshape(-1, self.dims)

    def stream(self, epoch: int) -> Iterator[Float16]:
        groups = permutation(self.file.num_row_groups, epoch)
        return windows(map(self._group, groups.tolist()), WINDOW_ROWS, epoch)

    def gather(self, rows: npt.NDArray[np.int64]) -> Float16:
        out = np.empty((len(rows), self.dims), dtype=np.float16)
        group_of = rows // GROUP_ROWS
        for number in np.unique(group_of).tolist():
            places = np.flatnonzero(group_of == number)
            out[places] = self._group(number)[rows[places] % GROUP_ROWS]
        return out
