"""Random vectors that every contender stores, and a search for the rows of a batch."""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

Float16 = npt.NDArray[np.float16]

BLOCK_ROWS = 8192
SOURCES = 100
# A row is identified by its first four float16 numbers: 64 bits.
KEY_VALUES = 4


def random_vectors(rows: int, dims: int, seed: int = 0) -> Iterator[Float16]:
    """Blocks `(<= 8192, dims)` of random vectors of unit length, the same for the same seed."""
    for number, start in enumerate(range(0, rows, BLOCK_ROWS)):
        random = np.random.default_rng((seed, number))
        block = random.standard_normal((min(BLOCK_ROWS, rows - start), dims), dtype=np.float32)
        block /= np.linalg.norm(block, axis=1, keepdims=True)
        yield block.astype(np.float16)


def write_vectors(path: Path, rows: int, dims: int, seed: int = 0) -> None:
    """Write an .npy file of `random_vectors`."""
    vectors = np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=(rows, dims))
    start = 0
    for block in random_vectors(rows, dims, seed):
        vectors[start : start + len(block)] = block
        start += len(block)
    vectors.flush()


def blocks_of(path: Path) -> Iterator[Float16]:
    """The blocks of an .npy file, in order."""
    vectors = np.load(path, mmap_mode="r")
    for start in range(0, len(vectors), BLOCK_ROWS):
        yield np.array(vectors[start : start + BLOCK_ROWS])


class RowFinder:
    """Finds the rows of the .npy file in a batch, by the first numbers of each vector.

    It shows in which order a contender returns rows, which no contender reports.
    """

    def __init__(self, path: Path) -> None:
        keys = np.concatenate([_keys(block) for block in blocks_of(path)])
        self._rows = np.argsort(keys, kind="stable")
        self._keys = keys[self._rows]
        if (self._keys[1:] == self._keys[:-1]).any():
            raise ValueError(f"two rows of {path} begin with the same {KEY_VALUES} numbers: take more --dims")

    def find(self, batch: Float16) -> npt.NDArray[np.int64]:
        """`(n,)` row numbers.

        Raises:
            ValueError: a vector is not in the file.
        """
        keys = _keys(batch)
        places = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        if (self._keys[places] != keys).any():
            raise ValueError(f"{int((self._keys[places] != keys).sum())} of {len(batch)} vectors are not in the file")
        return self._rows[places]


def _keys(block: Float16) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(block[:, :KEY_VALUES]).view(np.uint64)[:, 0]


def source_of(rows: npt.NDArray[np.int64], total: int) -> npt.NDArray[np.int64]:
    """The source of each row, one of 100 equal and contiguous ones."""
    return rows * SOURCES // total


def same_source_pairs(sources: npt.NDArray[np.int64]) -> int:
    """Pairs of rows in a batch with the same source."""
    counts = np.bincount(sources)
    return int((counts * (counts - 1)).sum()) // 2


@lru_cache
def expected_pairs(batch: int, total: int) -> float:
    """Expected same-source pairs of `batch` rows drawn without replacement, as in a true permutation."""
    sizes = np.bincount(source_of(np.arange(total), total))
    within = float((sizes * (sizes - 1)).sum()) / (total * (total - 1))
    return batch * (batch - 1) / 2 * within
