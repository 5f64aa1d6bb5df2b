"""litdata: chunks of 64 MB in a local folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.peers.base import BATCH, Contender
from benchmarks.vectors import Float16, blocks_of

CHUNK = "64MB"


class LitData(Contender):
    """`StreamingDataset(shuffle=True)` of NumPy arrays and `StreamingDataLoader(batch_size=256)`.

    Without worker processes, and with the default item loader: on few cores both are faster than one or two workers,
    tensors as items, and the token loader with a vector a block.
    """

    def load(self) -> None:
        import litdata
        import litdata.streaming.cache

        self.library: Any = litdata

    def write(self, vectors: Path) -> None:
        cache = self.library.streaming.cache.Cache(str(self.folder), chunk_bytes=CHUNK)
        row = 0
        for block in blocks_of(vectors):
            for vector in block:
                cache[row] = vector
                row += 1
        cache.done()
        cache.merge()

    def open(self) -> None:
        self.dataset: Any = self.library.StreamingDataset(str(self.folder), shuffle=True)
        self.loader: Any = self.library.StreamingDataLoader(self.dataset, batch_size=BATCH)

    def stream(self, epoch: int) -> Iterator[Float16]:
        for batch in self.loader:  # shuffles again each time
            yield batch.numpy()

    def gather(self, rows: npt.NDArray[np.int64]) -> Float16:
        return np.stack([self.dataset[row] for row in rows.tolist()])
