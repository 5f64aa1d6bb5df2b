"""Windowed shuffle: the order of an epoch as a pure function of seed and epoch.

Blocks of consecutive records are permuted over the whole corpus, split into windows, and shuffled inside each window.
Reads stay nearly sequential, while a batch mixes records from all over a window. The permutation of blocks is
computed, not stored, so memory does not depend on the size of the corpus.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BLOCK = 64
WINDOW = 16_384
_ROUNDS = 4

Numbers = npt.NDArray[np.int64]


class BlockPermutation:
    """A pseudo-random permutation of `range(size)` in constant memory.

    A balanced Feistel network over the next power of four, repeated until the value is in the range (cycle walking:
    Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). For shuffling, not for encryption.
    """

    def __init__(self, size: int, random: np.random.Generator) -> None:
        self.size = size
        self._half = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))
        self._mask = np.uint64((1 << int(self._half)) - 1)
        self._keys = random.integers(0, 2**64, size=(_ROUNDS, 1), dtype=np.uint64)

    def __call__(self, numbers: Numbers) -> Numbers:
        """Images of `numbers`, which are in `range(size)`."""
        values = numbers.astype(np.uint64)
        outside = np.arange(len(values))
        while len(outside):
            values[outside] = self._encrypt(values[outside])
            outside = outside[values[outside] >= self.size]
        return values.astype(np.int64)

    def _encrypt(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return (left << self._half) | right


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Hash in which every output bit depends on every input bit (the finalizer of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@dataclass(frozen=True)
class WindowedShuffle:
    """Order in which one rank reads the records of a corpus, in batches.

    Each rank reads its own part of the permuted blocks. If the records do not divide evenly among the ranks, an epoch
    omits the remainder, fewer records than ranks; the next epoch omits others.

    Args:
        batch: records per batch; a batch is inside one window.
        window: records shuffled together.
        seed: equal seeds give equal orders.

    Raises:
        ValueError: there are fewer records than ranks, or a window is smaller than a batch.
    """

    records: int
    batch: int
    window: int = WINDOW
    seed: int = 0
    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        if not (1 <= self.batch <= self.window and 0 <= self.rank < self.ranks <= self.records):
            raise ValueError(
                f"expected 1 <= batch <= window and 0 <= rank < ranks <= records; found records {self.records}, "
                f"batch {self.batch}, window {self.window}, rank {self.rank} of {self.ranks}"
            )

    def __len__(self) -> int:
        """Records per epoch on this rank."""
        return self.records // self.ranks

    @property
    def _batches(self) -> int:
        """Full batches per epoch; the remainder is added to the last window."""
        return max(1, len(self) // self.batch)

    @property
    def windows(self) -> int:
        """Windows per epoch, of nearly equal size."""
        return -(-self._batches // (self.window // self.batch))

    def window_of(self, position: int) -> int:
        """Number of the window that holds a position of this rank's epoch."""
        if not 0 <= position < len(self):
            raise IndexError(f"position {position} is outside an epoch of {len(self)} records")
        number = min(position // self.batch, self._batches - 1)
        return ((number + 1) * self.windows - 1) // self._batches

    def bounds(self, window: int) -> tuple[int, int]:
        """Positions `[start, stop)` of a window."""
        start, stop = (number * self._batches // self.windows * self.batch for number in (window, window + 1))
        return start, len(self) if window == self.windows - 1 else stop

    def records_of(self, epoch: int, window: int) -> Numbers:
        """Record numbers of a window, ascending."""
        start, stop = (self.rank * len(self) + position for position in self.bounds(window))
        return np.sort(self._block_records(epoch, start, stop))

    def permutation(self, epoch: int, window: int) -> Numbers:
        """Shuffled order of a window: position p holds the record `records_of(epoch, window)[permutation[p]]`."""
        start, stop = self.bounds(window)
        return np.random.default_rng((self.seed, epoch, self.rank, window)).permutation(stop - start)

    def _block_records(self, epoch: int, start: int, stop: int) -> Numbers:
        """Records at positions `[start, stop)` of the permuted blocks of all ranks.

        The last block of a corpus can be smaller than the others, so its position is drawn separately.
        """
        random = np.random.default_rng((self.seed, epoch))
        blocks, rest = divmod(self.records, BLOCK)
        before_rest = int(random.integers(0, blocks + 1)) * BLOCK
        positions = np.arange(start, stop)
        in_rest = (positions >= before_rest) & (positions < before_rest + rest)
        after_rest = positions >= before_rest + rest
        numbers = np.where(in_rest, blocks * BLOCK + positions - before_rest, 0)
        if blocks:
            slots, within = np.divmod(positions[~in_rest] - rest * after_rest[~in_rest], BLOCK)
            if len(slots):
                first = int(slots[0])
                permuted = BlockPermutation(blocks, random)(np.arange(first, int(slots[-1]) + 1))
                numbers[~in_rest] = permuted[slots - first] * BLOCK + within
        return numbers
