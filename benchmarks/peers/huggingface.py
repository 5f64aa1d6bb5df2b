"""Hugging Face datasets: one Arrow file of fixed-size lists, memory-mapped as `datasets` does."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.peers.arrow import lists, numbers
from benchmarks.peers.base import BATCH, Contender
from benchmarks.vectors import Float16, blocks_of

WRITER_ROWS = 1000  # rows of an Arrow record batch, the library's default
SHARDS = 64
BUFFER_ROWS = 16_384


class _Datasets(Contender):
    def load(self) -> None:
        import datasets

        datasets.disable_progress_bars()
        self.library: Any = datasets

    def write(self, vectors: Path) -> None:
        import pyarrow

        schema = pyarrow.schema([("vector", pyarrow.list_(pyarrow.float16(), self.dims))])
        with pyarrow.ipc.new_stream(str(self.folder / "data.arrow"), schema) as writer:
            for block in blocks_of(vectors):
                writer.write_table(pyarrow.table([lists(block)], schema=schema), max_chunksize=WRITER_ROWS)

    def open(self) -> None:
        self.dataset: Any = self.library.Dataset.from_file(str(self.folder / "data.arrow"))


class MapStyle(_Datasets):
    """`with_format("numpy")`, `.shuffle(seed)` and `.iter(256)`, as documented."""

    def stream(self, epoch: int) -> Iterator[Float16]:
        formatted = self.dataset.with_format("numpy", dtype=np.float16)
        for batch in formatted.shuffle(seed=epoch, keep_in_memory=True).iter(batch_size=BATCH):
            yield batch["vector"]

    def gather(self, rows: npt.NDArray[np.int64]) -> Float16:
        found: Float16 = self.dataset.with_format("numpy", dtype=np.float16)[rows]["vector"]
        return found


class MapStyleArrow(_Datasets):
    """As `MapStyle`, in Arrow format, with the numbers of the list column taken as one array."""

    def stream(self, epoch: int) -> Iterator[Float16]:
        shuffled = self.dataset.with_format("arrow").shuffle(seed=epoch, keep_in_memory=True)
        for batch in shuffled.iter(batch_size=BATCH):
            yield numbers(batch["vector"])

    def gather(self, rows: npt.NDArray[np.int64]) -> Float16:
        return numbers(self.dataset.with_format("arrow")[rows]["vector"])


class Iterable(MapStyle):
    """`to_iterable_dataset(64 shards)`, `.shuffle(buffer of 16,384)` and `.iter(256)`, in Arrow format: the fastest."""

    def stream(self, epoch: int) -> Iterator[Float16]:
        shards = self.dataset.to_iterable_dataset(num_shards=SHARDS)
        shuffled = shards.shuffle(seed=epoch, buffer_size=BUFFER_ROWS).with_format("arrow")
        for batch in shuffled.iter(batch_size=BATCH):
            yield numbers(batch["vector"])
