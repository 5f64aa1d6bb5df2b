"""One memory-mapped .npy file, without checksums: the fastest while it is in the page cache."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.peers.base import BATCH, Contender, permutation
from benchmarks.vectors import Float16


class MemoryMap(Contender):
    """`numpy.load(mmap_mode="r")`; an epoch is an exact permutation, a batch one fancy index."""

    def load(self) -> None:
        pass

    def write(self, vectors: Path) -> None:
        pass  # reads the .npy file from which the others are made

    def open(self) -> None:
        self.vectors: Float16 = np.load(self.folder / "vectors.npy", mmap_mode="r")

    def stream(self, epoch: int) -> Iterator[Float16]:
        order = permutation(self.rows, epoch)
        for start in range(0, self.rows, BATCH):
            yield np.asarray(self.vectors[order[start : start + BATCH]])

    def gather(self, rows: npt.NDArray[np.int64]) -> Float16:
        return np.asarray(self.vectors[rows])
