"""Positioned reads: at once what the system has in memory, many at a time what has to come from the disk.

A disk, and a network disk all the more, answers many requests in the time of one. A page fault waits for each
in turn, so cold bytes are read by threads (docs/decisions/0011-reading.md).
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

THREADS = 32
# Absent outside Linux, where everything counts as cold.
_NO_WAIT = getattr(os, "RWF_NOWAIT", None)

Read = tuple[int, int, Any]  # file descriptor, offset, writable buffer


def threads() -> ThreadPoolExecutor:
    """Threads for what waits for a disk; of this process, as a fork inherits none."""
    return _pool(os.getpid())


@lru_cache(maxsize=1)
def _pool(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="read")


def read_all(reads: Sequence[Read]) -> None:
    """Fill every buffer.

    Raises:
        EOFError: a file ends before its buffer is full.
    """
    for place, read in enumerate(reads):
        if not in_memory(*read):
            pending = [threads().submit(_read, one) for one in reads[place:]]
            try:
                for future in pending:
                    future.result()
            finally:  # after an error, too: the buffers are the caller's again
                for future in pending:
                    future.cancel()
                wait(pending)
            return


def in_memory(file: int, offset: int, buffer: Any) -> bool:
    """Fill the buffer if all of it can be had without waiting for a disk."""
    if _NO_WAIT is None:
        return False
    try:
        return os.preadv(file, [buffer], offset, _NO_WAIT) == memoryview(buffer).nbytes
    except OSError:  # not in memory, or a file system that cannot tell
        return False


def _read(read: Read) -> None:
    file, offset, buffer = read
    left = memoryview(buffer).cast("B")
    while left.nbytes:
        count = os.preadv(file, [left], offset)
        if count == 0:
            raise EOFError
        left, offset = left[count:], offset + count


def runs(numbers: npt.NDArray[np.int64], *, cut: int | None = None) -> list[tuple[int, int]]:
    """Places `[start, stop)` of numbers, one at least, that follow one another; cut before multiples of `cut`."""
    ends = numbers[1:] - numbers[:-1] != 1
    if cut is not None:
        ends |= numbers[1:] % cut == 0
    first = np.concatenate([[0], np.flatnonzero(ends) + 1]).tolist()
    return list(pairwise([*first, len(numbers)]))
