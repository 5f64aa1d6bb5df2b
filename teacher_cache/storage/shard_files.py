"""Reads of shard files: the chunk index, positioned reads, and a memory map of a whole uncompressed array.

Bytes in the page cache are read at once. The others are read by many threads, because a disk, and a network disk
even more, serves many requests in the time of one (docs/decisions/0011-reading.md).
"""

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from teacher_cache.errors import DamagedCache
from teacher_cache.storage.chunks import NumberCodec, Rows, crc32c

THREADS = 32
EMPTY = 2**64 - 1  # offset and length of a chunk that is not stored
# Only on Linux; elsewhere nothing counts as cached.
_NO_WAIT = getattr(os, "RWF_NOWAIT", None)
_INITIAL_SHARDS = 64
_OPENED_AT_ONCE = 32
_MAP_FIXED = 0x10  # the same on Linux and macOS; not among Python's constants

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong]

Read = tuple[int, int, Any]  # file descriptor, offset, writable buffer


def read_threads() -> ThreadPoolExecutor:
    """Threads for reads from disk; one pool per process, because threads do not survive a fork."""
    return _thread_pool(os.getpid())


@lru_cache(maxsize=1)
def _thread_pool(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="read")


def read_all(reads: Sequence[Read]) -> None:
    """Fill every buffer; EOFError if a file ends before its buffer is full."""
    for place, read in enumerate(reads):
        if not read_cached(*read):
            pending = [read_threads().submit(_read, remaining) for remaining in reads[place:]]
            try:
                for future in pending:
                    future.result()
            finally:  # also after an error: the caller may reuse the buffers
                for future in pending:
                    future.cancel()
                wait(pending)
            return


def read_cached(file: int, offset: int, buffer: Any) -> bool:
    """Fill the buffer if all its bytes are in the page cache; False if not."""
    if _NO_WAIT is None:
        return False
    try:
        return os.preadv(file, [buffer], offset, _NO_WAIT) == memoryview(buffer).nbytes
    except OSError:  # not cached, or not supported by the file system
        return False


def _read(read: Read) -> None:
    file, offset, buffer = read
    left = memoryview(buffer).cast("B")
    while left.nbytes:
        count = os.preadv(file, [left], offset)
        if count == 0:
            raise EOFError
        left, offset = left[count:], offset + count


def consecutive_runs(numbers: npt.NDArray[np.int64], *, cut: int | None = None) -> list[tuple[int, int]]:
    """Slices `[start, stop)` of consecutive numbers in a non-empty array; also cut before multiples of `cut`."""
    ends = numbers[1:] - numbers[:-1] != 1
    if cut is not None:
        ends |= numbers[1:] % cut == 0
    first = np.concatenate([[0], np.flatnonzero(ends) + 1]).tolist()
    return list(pairwise([*first, len(numbers)]))


class OpenShard:
    """An open shard file and its chunk index."""

    def __init__(self, path: Path, chunks: int) -> None:
        self.path = path
        trailer = 16 * chunks + 4
        self.file = -1
        try:
            self.file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise DamagedCache(f"{path} is missing; `tcache verify` lists all damage") from None
        try:
            self.size = os.fstat(self.file).st_size
            if self.size < trailer:
                raise DamagedCache(f"{path} is truncated: {self.size} bytes, its chunk index alone takes {trailer}")
            index = os.pread(self.file, trailer, self.size - trailer)
            if crc32c(index[:-4]) != index[-4:]:
                raise DamagedCache(f"{path} is damaged: the checksum of its chunk index does not match")
            # Offset and length of each inner chunk; both `EMPTY` where none is stored.
            self.entries = np.frombuffer(index[:-4], dtype="<u8").reshape(chunks, 2)
            self.stored = self.entries[:, 0] != EMPTY
            ends = self.entries[self.stored].sum(axis=1)
            if len(ends) and int(ends.max()) > self.size - trailer:
                raise DamagedCache(f"{path} is damaged: its chunk index points past the end of the file")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)

    __del__ = close

    def entry(self, chunk: int) -> tuple[int, int]:
        """Offset and length of a stored inner chunk."""
        offset, length = self.entries[chunk].tolist()
        if offset == EMPTY:
            raise DamagedCache(f"{self.path} lacks chunk {chunk}, which is in the index")
        return offset, length

    def leading_chunks(self, chunk_bytes: int) -> int:
        """Number of stored chunks if they are the first ones, in order and of that size; otherwise 0."""
        count = int(self.stored.sum())
        in_order = np.stack([np.arange(count) * chunk_bytes, np.full(count, chunk_bytes)], axis=1)
        return count if np.array_equal(self.entries[:count], in_order.astype("<u8")) else 0


class ShardMap:
    """Memory map of an uncompressed array: its shards mapped side by side, as one matrix.

    A gather over hundreds of shards is then one indexing operation, as over a single .npy file. The reserved range
    takes addresses, not memory; parts without a mapped shard are never read.

    Attributes:
        matrix: `(shards * shard_rows, width)`; row r of the array is row r here once its shard is mapped.
    """

    def __init__(self, codec: NumberCodec, shard_rows: int, chunk_rows: int) -> None:
        self.codec = codec
        self.shard_rows = shard_rows
        self.chunk_rows = chunk_rows
        self.row_bytes = codec.width * codec.dtype.itemsize
        self._reserve(_INITIAL_SHARDS)

    @staticmethod
    def supports(codec: NumberCodec, shard_rows: int) -> bool:
        """Whether shards of this size begin at page boundaries."""
        return shard_rows * codec.width * codec.dtype.itemsize % mmap.PAGESIZE == 0

    def _reserve(self, shards: int) -> None:
        size = shards * self.shard_rows * self.row_bytes
        region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
        self.matrix: Rows = np.frombuffer(region, dtype=self.codec.dtype).reshape(-1, self.codec.width)
        # One after the last mapped row of each shard; 0 where the shard is not mapped.
        self._ends: npt.NDArray[np.int64] = np.zeros(shards, dtype=np.int64)

    def forget(self, number: int) -> None:
        """Map the shard's file again before it is read next."""
        if number < len(self._ends):
            self._ends[number] = 0

    def map_rows(self, rows: npt.NDArray[np.int64], open_shards: Callable[[list[int]], list[OpenShard]]) -> bool:
        """Map the shards of these rows; False if a shard does not hold its chunks in row order."""
        shard_of = rows // self.shard_rows
        try:
            outside = rows >= self._ends[shard_of]
        except IndexError:
            self._reserve(max(int(shard_of.max()) + 1, 2 * len(self._ends)))
            outside = rows >= self._ends[shard_of]
        if not outside.any():
            return True
        unmapped = np.unique(shard_of[outside]).tolist()
        for start in range(0, len(unmapped), _OPENED_AT_ONCE):
            numbers = unmapped[start : start + _OPENED_AT_ONCE]
            if not all(map(self._map_shard, numbers, open_shards(numbers))):
                return False
        outside = rows >= self._ends[shard_of]
        if outside.any():
            row = int(rows[outside][0])
            (shard,) = open_shards([row // self.shard_rows])
            raise DamagedCache(f"{shard.path} lacks row {row} of the array, which is in the index")
        return True

    def _map_shard(self, number: int, shard: OpenShard) -> bool:
        chunks = shard.leading_chunks(self.chunk_rows * self.row_bytes)
        if not chunks:
            return False
        size = chunks * self.chunk_rows * self.row_bytes
        address = self.matrix.ctypes.data + number * self.shard_rows * self.row_bytes
        flags = mmap.MAP_SHARED | _MAP_FIXED
        if _libc.mmap(address, size, mmap.PROT_READ, flags, shard.file, 0) != address:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(shard.path))
        self._ends[number] = number * self.shard_rows + chunks * self.chunk_rows
        return True
