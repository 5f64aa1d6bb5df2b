"""The order of training: a windowed shuffle that is a pure function of seed and epoch.

Blocks of neighbouring records are permuted, a window of blocks is gathered, and the records inside the window
are permuted fully. Reading stays nearly sequential on disk while a batch mixes records from all over the
window. Nothing is remembered but (epoch, position), so a run resumes at the exact record.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import Sampler

BLOCK = 64
WINDOW = 65_536


class StreamingSampler(Sampler[list[int]]):
    """Batches of record numbers in `[0, records)`, every record once an epoch.

    Ranks of one run take turns at the batches of one common order, so they are disjoint; batches that do not
    go round evenly are left out, so that no rank waits for another.

    Args:
        records: how many records there are.
        batch: records in a batch; the last, smaller batch is left out when `drop_last`, because losses that
            compare the texts of a batch with each other change scale with its size.
        window: records shuffled together; at least `batch`.
        seed: two runs with one seed see one order.
    """

    def __init__(
        self,
        records: int,
        batch: int,
        *,
        window: int = WINDOW,
        seed: int = 0,
        drop_last: bool = False,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        if records < 1 or batch < 1 or window < batch or not 0 <= rank < ranks:
            raise ValueError(
                f"expected records >= 1, 1 <= batch <= window and 0 <= rank < ranks; found records "
                f"{records}, batch {batch}, window {window}, rank {rank} of {ranks}"
            )
        self.records = records
        self.batch = batch
        self.window = window
        self.seed = seed
        self.drop_last = drop_last
        self.rank = rank
        self.ranks = ranks
        self.epoch = 0
        self._skip = 0
        self._position = 0

    def __len__(self) -> int:
        """Batches of an epoch on this rank, however many of them are skipped."""
        batches = self.records // self.batch if self.drop_last else -(-self.records // self.batch)
        return batches // self.ranks

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self._skip, self._position = epoch, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """`epoch` and `position`: batches of it that this rank has handed out."""
        return {"epoch": self.epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on behind the first `position` batches of `epoch`."""
        self.epoch = int(state["epoch"])
        self._skip = self._position = int(state["position"])

    def __iter__(self) -> Iterator[list[int]]:
        skip, self._skip = self._skip, 0
        self._position = skip
        for number, records in enumerate(self._batches()):
            turn, whose = divmod(number, self.ranks)
            if turn >= len(self):
                return
            if whose == self.rank and turn >= skip:
                self._position = turn + 1
                yield records

    def _batches(self) -> Iterator[list[int]]:
        """All batches of this epoch, over all ranks."""
        random = np.random.default_rng((self.seed, self.epoch))
        blocks = random.permutation(-(-self.records // BLOCK))
        blocks_a_window = max(1, self.window // BLOCK)
        left = np.empty(0, dtype=np.int64)
        for start in range(0, len(blocks), blocks_a_window):
            first = blocks[start : start + blocks_a_window].astype(np.int64) * BLOCK
            window = (first[:, None] + np.arange(BLOCK)).ravel()
            window = random.permutation(window[window < self.records])
            window = np.concatenate([left, window])
            whole = len(window) // self.batch * self.batch
            yield from window[:whole].reshape(-1, self.batch).tolist()
            left = window[whole:]
        if len(left) and not self.drop_last:
            yield left.tolist()
