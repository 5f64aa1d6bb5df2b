"""zarr-python, reading the files of our cache."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.own import Own
from benchmarks.peers.base import Contender, ShardWriter, permutation, windows
from benchmarks.vectors import Float16

WINDOW_ROWS = 16_384


class ZarrPython(Contender, ShardWriter):
    """Whole shards in random order, two in a buffer that is permuted; a gather is one orthogonal selection."""

    def load(self) -> None:
        import zarr

        self.library: Any = zarr

    def write(self, vectors: Path) -> None:
        own = Own(self.folder, self.rows, self.dims)
        own.load()
        own.write(vectors)

    def open(self) -> None:
        (path,) = self.folder.glob("cache/spaces/*/vectors*.zarr")
        self.array: Any = self.library.open_array(str(path), mode="r")

    def stream(self, epoch: int) -> Iterator[Float16]:
        rows = self.array.shards[0]
        starts = rows * permutation(-(-self.rows // rows), epoch)
        return windows((self.array[start : start + rows] for start in starts.tolist()), WINDOW_ROWS, epoch)

    def gather(self, rows: npt.NDArray[np.int64]) -> Float16:
        return np.asarray(self.array.oindex[rows])

    def write_shards(self, vectors: Float16, folder: Path) -> None:
        """Shards and codecs of the default encoding, one shard per call; zarr-python does not sync."""
        from zarr.codecs import BloscCodec, Crc32cCodec

        from teacher_cache.table.layout import SHARD_ROWS
        from teacher_cache.table.view import CHUNK_ROWS

        array = self.library.create_array(
            store=str(folder / "vectors.zarr"),
            shape=vectors.shape,
            shards=(SHARD_ROWS, self.dims),
            chunks=(CHUNK_ROWS, self.dims),
            dtype="float16",
            compressors=[BloscCodec(cname="lz4", clevel=5, shuffle="bitshuffle", typesize=2), Crc32cCodec()],
        )
        for start in range(0, len(vectors), SHARD_ROWS):
            array[start : start + SHARD_ROWS] = vectors[start : start + SHARD_ROWS]
