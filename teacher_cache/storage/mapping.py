"""All shards of a plain array mapped side by side, so that the array is one matrix in memory.

One range of addresses is reserved for the whole array and each shard file is mapped at its place in it: a gather
over hundreds of shards is then one indexing operation, as over a single .npy file (docs/decisions/0011-reading.md).
The range costs addresses, not memory; places where no shard is mapped are never looked at.
"""

import ctypes
import mmap
import os
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from teacher_cache.errors import DamagedCache
from teacher_cache.storage.chunks import NumberCodec, Rows
from teacher_cache.storage.opened import OpenShard

_FIRST_SHARDS = 64
_AT_A_TIME = 32
_MAP_FIXED = 0x10  # on Linux and macOS alike; not among Python's constants

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_longlong,
]


class ShardMap:
    """The matrix of an array whose shards are plain rows of numbers.

    Attributes:
        matrix: `(places * shard_rows, width)`; row r of the array is row r here once its shard is mapped.
    """

    def __init__(self, codec: NumberCodec, shard_rows: int, chunk_rows: int) -> None:
        self.codec = codec
        self.shard_rows = shard_rows
        self.chunk_rows = chunk_rows
        self.row_bytes = codec.width * codec.dtype.itemsize
        self._reserve(_FIRST_SHARDS)

    @staticmethod
    def fits(codec: NumberCodec, shard_rows: int) -> bool:
        """Whether shards begin at whole pages when they lie side by side."""
        return shard_rows * codec.width * codec.dtype.itemsize % mmap.PAGESIZE == 0

    def _reserve(self, shards: int) -> None:
        size = shards * self.shard_rows * self.row_bytes
        region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
        self.matrix: Rows = np.frombuffer(region, dtype=self.codec.dtype).reshape(-1, self.codec.width)
        # First row of the array behind the mapped ones of each shard; 0 where the shard is not mapped.
        self._ends: npt.NDArray[np.int64] = np.zeros(shards, dtype=np.int64)

    def forget(self, number: int) -> None:
        """Map the shard's file anew before it is read next."""
        if number < len(self._ends):
            self._ends[number] = 0

    def reach(self, rows: npt.NDArray[np.int64], open_shards: Callable[[list[int]], list[OpenShard]]) -> bool:
        """Map what is needed for these rows of the array; False where a shard does not lie in row order.

        Raises:
            DamagedCache: a shard does not hold a row.
        """
        shard_of = rows // self.shard_rows
        try:
            outside = rows >= self._ends[shard_of]
        except IndexError:
            self._reserve(max(int(shard_of.max()) + 1, 2 * len(self._ends)))
            outside = rows >= self._ends[shard_of]
        if not outside.any():
            return True
        unmapped = np.unique(shard_of[outside]).tolist()
        for start in range(0, len(unmapped), _AT_A_TIME):
            numbers = unmapped[start : start + _AT_A_TIME]
            if not all(map(self._attach, numbers, open_shards(numbers))):
                return False
        outside = rows >= self._ends[shard_of]
        if outside.any():
            row = int(rows[outside][0])
            (shard,) = open_shards([row // self.shard_rows])
            raise DamagedCache(f"{shard.path} does not hold row {row} of the array, which the index says it does")
        return True

    def _attach(self, number: int, shard: OpenShard) -> bool:
        chunks = shard.chunks_in_order(self.chunk_rows * self.row_bytes)
        if not chunks:
            return False
        size = chunks * self.chunk_rows * self.row_bytes
        place = self.matrix.ctypes.data + number * self.shard_rows * self.row_bytes
        flags = mmap.MAP_SHARED | _MAP_FIXED
        if _libc.mmap(place, size, mmap.PROT_READ, flags, shard.file, 0) != place:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(shard.path))
        self._ends[number] = number * self.shard_rows + chunks * self.chunk_rows
        return True
