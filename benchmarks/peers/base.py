"""What every contender can do."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.vectors import Float16

BATCH = 256


class Contender(ABC):
    """Vectors in one library's own format, read in its best reasonable setting.

    Libraries are imported in `load` only: one that is absent raises ImportError there.
    """

    def __init__(self, folder: Path, rows: int, dims: int) -> None:
        self.folder = folder
        self.rows = rows
        self.dims = dims

    @abstractmethod
    def load(self) -> None:
        """Import what is needed; what that takes of memory is not counted."""

    @abstractmethod
    def write(self, vectors: Path) -> None:
        """Put the rows of an .npy file of float16 vectors into the empty folder."""

    @abstractmethod
    def open(self) -> None:
        """Open what `write` left."""

    @abstractmethod
    def stream(self, epoch: int) -> Iterator[Float16]:
        """Every row once, shuffled anew for each epoch, in batches `(256, dims)`; a few may be shorter.

        A batch is read when it is handed out, not when it is first looked at, and stays as it is until the next.
        """

    @abstractmethod
    def gather(self, rows: npt.NDArray[np.int64]) -> Float16:
        """`(n, dims)` vectors of rows in any order."""


class ShardWriter(ABC):
    """A contender that writes sharded zarr arrays."""

    @abstractmethod
    def write_shards(self, vectors: Float16, folder: Path) -> None:
        """Write vectors shard by shard, in the default format, into an empty folder."""


def permutation(rows: int, epoch: int) -> npt.NDArray[np.int64]:
    """A true permutation, another one for each epoch."""
    return np.random.default_rng(epoch).permutation(rows)


def windows(blocks: Iterator[Float16], window: int, epoch: int) -> Iterator[Float16]:
    """Batches out of buffers of `window` rows, each permuted as a whole: the shuffle that people write themselves.

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
