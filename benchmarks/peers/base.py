"""Interface of a contender."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.vectors import Float16

BATCH = 256


class Contender(ABC):
    """Vectors in one library's own format, read in its best reasonable setting.

    Libraries are imported in `load` only, which raises ImportError for one that is not installed.
    """

    def __init__(self, folder: Path, rows: int, dims: int) -> None:
        self.folder = folder
        self.rows = rows
        self.dims = dims

    @abstractmethod
    def load(self) -> None:
        """Import libraries; their memory is not counted."""

    @abstractmethod
    def write(self, vectors: Path) -> None:
        """Write the rows of an .npy file of float16 vectors to the empty folder."""

    @abstractmethod
    def open(self) -> None:
        """Open the data of `write`."""

    @abstractmethod
    def stream(self, epoch: int) -> Iterator[Float16]:
        """Every row once, in batches `(256, dims)`, some shorter, in another random order for each epoch.

        A batch is read before it is yielded, and does not change until the next one.
        """

    @abstractmethod
    def gather(self, rows: npt.NDArray[np.int64]) -> Float16:
        """`(n, dims)` vectors of rows in any order."""


class ShardWriter(ABC):
    """A contender that writes sharded zarr arrays."""

    @abstractmethod
    def write_shards(self, vectors: Float16, folder: Path) -> None:
        """Write vectors shard by shard, in the default encoding, to an empty folder."""


def permutation(rows: int, epoch: int) -> npt.NDArray[np.int64]:
    """A random permutation, different for each epoch."""
    return np.random.default_rng(epoch).permutation(rows)


def windows(blocks: Iterator[Float16], window: int, epoch: int) -> Iterator[Float16]:
    """Batches from buffers of `window` rows, each permuted as a whole, as in a shuffle buffer.

    A buffer is filled with whole blocks; its last batch may be shorter.
    """
    random = np.random.default_rng(epoch)
    waiting: list[Float16] = []
    for block in blocks:
        waiting.append(block)
        if sum(map(len, waiting)) >= window:
            yield from _batches(np.concatenate(waiting), random)
            waiting.clear()
    if waiting:
        yield from _batches(np.concatenate(waiting), random)


def _batches(buffer: Float16, random: np.random.Generator) -> Iterator[Float16]:
    order = random.permutation(len(buffer))
    for start in range(0, len(buffer), BATCH):
        yield buffer[order[start : start + BATCH]]
