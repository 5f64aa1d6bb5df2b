"""Batches prepared in a thread, a few steps ahead."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch.utils.data import Dataset

from distill.data.dataset import ShuffledDataset
from teacher_cache.reading.stream import Batch


class PrefetchedBatches(Dataset[Any]):
    """Collated batches of a `ShuffledDataset`, by the positions that a `StreamingSampler` yields.

    A batch depends only on its positions, so the following ones are predicted, read and tokenized during a step. Any
    other batch can be requested too, and is waited for. As a dataset it prefetches in every loader that is created from
    it, such as the one accelerate creates to resume. torch's own prefetching would need a process, which reads every
    window and holds the buffers of the cache a second time.

    Args:
        following: the positions of the batch after the given one.
        ahead: number of batches to keep ready.
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
        """The batch of these positions; raises the errors of preparing it."""
        wanted = list(positions)
        if not self._pending or self._pending[0][0] != wanted:
            self._cancel()
            self._submit(wanted)
        _, batch = self._pending.popleft()
        while len(self._pending) < self.ahead:
            self._submit(self.following(self._pending[-1][0] if self._pending else wanted))
        return batch.result()

    def close(self) -> None:
        """End the thread, and the dataset's own reading ahead."""
        self._cancel()
        if self._thread is not None:
            self._thread.shutdown()
        self._thread = None
        self.dataset.close()

    def _submit(self, positions: list[int]) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._pending.append((positions, self._thread.submit(_collated, self.dataset, self.collate, positions)))

    def _cancel(self) -> None:
        for _, batch in self._pending:
            batch.cancel()
        self._pending.clear()


def _collated(dataset: ShuffledDataset, collate: Callable[[Batch], Any], positions: list[int]) -> Any:
    return collate(dataset.__getitems__(positions))


def pass_through(batch: Any) -> Any:
    """The batch unchanged: a `collate_fn` for batches that are already collated."""
    return batch
