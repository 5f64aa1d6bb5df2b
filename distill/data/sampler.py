"""A torch batch sampler of positions in shuffled epochs."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import Sampler

from teacher_cache.reading.shuffle import WindowedShuffle


class StreamingSampler(Sampler[list[int]]):
    """Batches of positions in a shuffled epoch, for a `ShuffledDataset` of the same order.

    Position p of epoch e is the number `e * len(order) + p`, which alone determines the record, in any process. The
    state is only (epoch, position), so a run resumes at the exact batch.

    Args:
        order: of this rank.
        drop_last: leave out the smaller last batch, because the scale of losses that compare the texts of a batch
            depends on its size.
    """

    def __init__(self, order: WindowedShuffle, *, drop_last: bool = False) -> None:
        self.order = order
        self.drop_last = drop_last
        self.epoch = 0
        self._skip = 0
        self._position = 0

    def __len__(self) -> int:
        """Batches in an epoch on this rank, skipped ones included."""
        records, batch = len(self.order), self.order.batch
        return records // batch if self.drop_last else -(-records // batch)

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self._skip, self._position = epoch, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """`epoch`, and `position`: the number of its batches that this rank has yielded."""
        return {"epoch": self.epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration start after the first `position` batches of `epoch`."""
        self.epoch = int(state["epoch"])
        self._skip = self._position = int(state["position"])

    def following(self, batch: Sequence[int]) -> list[int]:
        """The batch after the given one; after the last batch of an epoch, the first of the next epoch."""
        epoch, position = divmod(batch[0], len(self.order))
        number = position // self.order.batch + 1
        return self._batch(epoch, number) if number < len(self) else self._batch(epoch + 1, 0)

    def _batch(self, epoch: int, number: int) -> list[int]:
        records, start = len(self.order), number * self.order.batch
        begin = epoch * records
        return list(range(begin + start, begin + min(start + self.order.batch, records)))

    def __iter__(self) -> Iterator[list[int]]:
        skip, self._skip = self._skip, 0
        self._position = skip
        for number in range(skip, len(self)):
            self._position = number + 1
            yield self._batch(self.epoch, number)
