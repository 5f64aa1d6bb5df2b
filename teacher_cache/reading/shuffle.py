"""The order of an epoch: a windowed shuffle that is a pure function of seed and epoch.

Blocks of neighbouring records are permuted over the whole corpus, cut into windows, and permuted fully inside
each window. Reading stays nearly sequential while a batch mixes records from all over a window, and nothing is
remembered: the permutation of blocks is computed, not stored, so a corpus of any length takes the same memory.
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

    A balanced Feistel network over the next power of four, walked until it falls into the range (cycle walking:
    Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). Good enough to shuffle, not to encrypt.
    """

    def __init__(self, size: int, random: np.random.Generator) -> None:
        self.size = size
        self._half = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))
        self._mask = np.uint64((1 << int(self._half)) - 1)
        self._keys = random.integers(0, 2**64, size=(_ROUNDS, 1), dtype=np.uint64)

    def __call__(self, numbers: Numbers) -> Numbers:
        """Where each of `numbers`, all in `range(size)`, goes."""
        values = numbers.astype(np.uint64)
        outside = np.arange(len(values))
        while len(outside):
            values[outside] = self._once(values[outside])
            outside = outside[values[outside] >= self.size]
        return values.astype(np.int64)

    def _once(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & self._mask)
        return (left << self._half) | right


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Every bit of the result depends on every bit of the value (the finaliser of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@dataclass(frozen=True)
class WindowedShuffle:
    """The order in which one rank sees records of a corpus, in batches.

    Ranks share the permuted blocks out between them, so that each reads its own part alone. Records that would
    not go round evenly, fewer than there are ranks, are left out of an epoch; other ones in the next.

    Args:
        records: how many the corpus has.
        batch: records in a batch; a batch lies in one window.
        window: records shuffled together.
        seed: two orders with one seed are equal.

    Raises:
        ValueError: fewer records than ranks, or a window smaller than a batch.
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
        """Records of an epoch on this rank."""
        return self.records // self.ranks

    @property
    def _batches(self) -> int:
        """Whole batches of an epoch; a last, smaller one goes with the one before."""
        return max(1, len(self) // self.batch)

    @property
    def windows(self) -> int:
        """Of nearly equal size, so that no epoch ends with a small one."""
        return -(-self._batches // (self.window // self.batch))

    def window_of(self, position: int) -> int:
        """The window that a position of this rank's epoch lies in."""
        if not 0 <= position < len(self):
            raise IndexError(f"position {position} of an epoch of {len(self)} records")
        number = min(position // self.batch, self._batches - 1)
        return ((number + 1) * self.windows - 1) // self._batches

    def bounds(self, window: int) -> tuple[int, int]:
        """Positions `[start, stop)` of a window."""
        start, stop = (number * self._batches // self.windows * self.batch for number in (window, window + 1))
        return start, len(self) if window == self.windows - 1 else stop

    def records_of(self, epoch: int, window: int) -> Numbers:
        """Numbers of the records in a window, ascending."""
        start, stop = (self.rank * len(self) + position for position in self.bounds(window))
        return np.sort(self._in_blocks(epoch, start, stop))

    def permutation(self, epoch: int, window: int) -> Numbers:
        """Position p of a window holds the record `records_of(epoch, window)[permutation[p]]`."""
        start, stop = self.bounds(window)
        return np.random.default_rng((self.seed, epoch, self.rank, window)).permutation(stop - start)

    def _in_blocks(self, epoch: int, start: int, stop: int) -> Numbers:
        """Records at positions `[start, stop)` of the permuted blocks of all ranks.

        The last block of a corpus may be smaller than the others: it has a place of its own among them.
        """
        random = np.random.default_rng((self.seed, epoch))
        blocks, rest = divmod(self.records, BLOCK)
        before_rest = int(random.integers(0, blocks + 1)) * BLOCK
        positions = np.arange(start, stop)
        in_rest = (positions >= before_rest) & (positions < before_rest + rest)
        behind_rest = positions >= before_rest + rest
        numbers = np.where(in_rest, blocks * BLOCK + positions - before_rest, 0)
        if blocks:
            slots, within = np.divmod(positions[~in_rest] - rest * behind_rest[~in_rest], BLOCK)
            if len(slots):
                first = int(slots[0])
                permuted = BlockPermutation(blocks, random)(np.arange(first, int(slots[-1]) + 1))
                numbers[~in_rest] = permuted[slots - first] * BLOCK + within
        return numbers
