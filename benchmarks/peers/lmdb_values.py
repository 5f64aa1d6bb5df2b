"""LMDB with one vector per value."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.peers.base import BATCH, Contender, permutation
from benchmarks.vectors import Float16, blocks_of


class LmdbValues(Contender):
    """Keys are big-endian row numbers; a batch of an exact permutation is 256 look-ups.

    They are faster than one `getmulti`.
    """

    def load(self) -> None:
        import lmdb

        self.library: Any = lmdb

    def write(self, vectors: Path) -> None:
        size = 8 * self.rows * self.dims + 2**26  # an upper bound: pages of 4 KiB hold whole values
        row = 0
        with self.library.open(str(self.folder), map_size=size) as environment:
            for block in blocks_of(vectors):
                with environment.begin(write=True) as transaction:
                    for vector in block:
                        transaction.put(row.to_bytes(8, "big"), vector.tobytes(), append=True)
                        row += 1

    def open(self) -> None:
        environment = self.library.open(str(self.folder), readonly=True, lock=False, readahead=False)
        self.transaction: Any = environment.begin(buffers=True)

    def stream(self, epoch: int) -> Iterator[Float16]:
        order = permutation(self.rows, epoch)
        for start in range(0, self.rows, BATCH):
            yield self.gather(order[start : start + BATCH])

    def gather(self, rows: npt.NDArray[np.int64]) -> Float16:
        get = self.transaction.get
        values = b"".join([get(row.to_bytes(8, "big")) for row in rows.tolist()])
        return np.frombuffer(values, dtype=np.float16).reshape(len(rows), self.dims)
