"""A shard file that is open for reading, and its chunk index."""

import os
from pathlib import Path

import numpy as np

from teacher_cache.errors import DamagedCache
from teacher_cache.storage.chunks import crc32c

EMPTY = 2**64 - 1


class OpenShard:
    """An open shard file and its chunk index.

    Attributes:
        entries: `(chunks, 2)` uint64, offset and length of each inner chunk; both `EMPTY` where none is stored.
        size: of the file, in bytes.
    """

    def __init__(self, path: Path, chunks: int) -> None:
        self.path = path
        trailer = 16 * chunks + 4
        self.file = -1
        try:
            self.file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise DamagedCache(f"{path} is gone; `tcache verify` tells what else is") from None
        try:
            self.size = os.fstat(self.file).st_size
            if self.size < trailer:
                raise DamagedCache(f"{path} is cut short: {self.size} bytes, its chunk index alone takes {trailer}")
            index = os.pread(self.file, trailer, self.size - trailer)
            if crc32c(index[:-4]) != index[-4:]:
                raise DamagedCache(f"{path} is damaged: the checksum of its chunk index does not match")
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
        """Offset and length of an inner chunk.

        Raises:
            DamagedCache: it is not stored.
        """
        offset, length = self.entries[chunk].tolist()
        if offset == EMPTY:
            raise DamagedCache(f"{self.path} does not hold chunk {chunk}, which the index says it does")
        return offset, length

    def chunks_in_order(self, chunk_bytes: int) -> int:
        """How many chunks of that size the file starts with, if it holds nothing else; 0 otherwise."""
        count = int(self.stored.sum())
        in_order = np.stack([np.arange(count) * chunk_bytes, np.full(count, chunk_bytes)], axis=1)
        return count if np.array_equal(self.entries[:count], in_order.astype("<u8")) else 0
