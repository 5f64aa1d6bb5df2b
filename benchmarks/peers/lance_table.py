"""Lance: one table of fixed-size lists."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.peers.arrow import lists, numbers
from benchmarks.peers.base import Contender, permutation, windows
from benchmarks.vectors import Float16, blocks_of

BLOCK_ROWS = 1024
WINDOW_ROWS = 16_384


class Lance(Contender):
    """Blocks of 1,024 rows, read in random order into a buffer of 16,384 rows that is permuted; `take` gathers.

    `take` of 256 rows of an exact permutation is about ten times slower.
    """

    def load(self) -> None:
        import lance

        self.library: Any = lance

    def write(self, vectors: Path) -> None:
        import pyarrow

        schema = pyarrow.schema([("vector", pyarrow.list_(pyarrow.float16(), self.dims))])
        batches = (pyarrow.record_batch([lists(block)], schema=schema) for block in blocks_of(vectors))
        self.library.write_dataset(pyarrow.RecordBatchReader.from_batches(schema, batches), str(self.folder / "table"))

    def open(self) -> None:
        self.dataset: Any = self.library.dataset(str(self.folder / "table"))

    def stream(self, epoch: int) -> Iterator[Float16]:
        order = permutation(-(-self.rows // BLOCK_ROWS), epoch)
        return windows(map(self._block, order.tolist()), WINDOW_ROWS, epoch)

    def _block(self, number: int) -> Float16:
        return numbers(self.dataset.to_table(offset=number * BLOCK_ROWS, limit=BLOCK_ROWS)["vector"])

    def gather(self, rows: npt.NDArray[np.int64]) -> Float16:
        return numbers(self.dataset.take(rows.tolist())["vector"])
