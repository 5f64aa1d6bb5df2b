"""Batches made in a thread, a few ahead of the step that takes them."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch.utils.data import Dataset

from distill.data.dataset import ShuffledDataset
from teacher_cache.reading.stream import Batch


class PrefetchedBatches(Dataset[Any]):
    """Collated batches of a `ShuffledDataset`, by the positions that a `StreamingSampler` hands out.

    Positions alone say what a batch holds, so the next ones are foreseen, read and tokenized while the step is
    computed. Any other batch can be asked for too, and is waited for. It is a dataset, so that a loader that is made
    anew of it, as accelerate makes one to resume, reads ahead as well. torch's loader would need a process for this,
    which reads every window and holds the cache's buffers a second time.

    Args:
        following: the positions of the batch behind that of the given ones.
        ahead: batches that are kept ready.
    """

    def __init__(
        self,
        dataset: ShuffledDataset,
        collate: Callable[[Batch], Any],
        following: Callable[[Sequence[int]], list[int]],
        ahead: int,
    ) -> None:
        self.dataset = dataset
        self.collate = collate
        self.following = following
        self.ahead = ahead
        self._pending: deque[tuple[list[int], Future[Any]]] = deque()
        self._thread: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, position: int) -> Any:
        return self.__getitems__([position])

    def __getitems__(self, positions: Sequence[int]) -> Any:
        """The batch of these positions; what went wrong while it was made is raised here."""
        wanted = list(positions)
        if not self._pending or self._pending[0][0] != wanted:
            self._forget()
            self._begin(wanted)
        _, batch = self._pending.popleft()
        while len(self._pending) < self.ahead:
            self._begin(self.following(self._pending[-1][0] if self._pending else wanted))
        return batch.result()

    def close(self) -> None:
        """End the thread, and the reading ahead below it."""
        self._forget()
        if self._thread is not None:
            self._thread.shutdown()
        self._thread = None
        self.dataset.close()

    def _begin(self, positions: list[int]) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._pending.append((positions, self._thread.submit(_made, self.dataset, self.collate, positions)))

    def _forget(self) -> None:
        for _, batch in self._pending:
            batch.cancel()
        self._pending.clear()


def _made(dataset: ShuffledDataset, collate: Callable[[Batch], Any], positions: list[int]) -> Any:
    return collate(dataset.__getitems__(positions))


def pass_through(batch: Any) -> Any:
    """What collates a batch that is collated."""
    return batch
