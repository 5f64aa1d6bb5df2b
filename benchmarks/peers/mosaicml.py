"""MosaicML streaming: MDS shards of 64 MB in a local folder."""

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.peers.base import BATCH, Contender
from benchmarks.vectors import Float16, blocks_of


class MosaicML(Contender):
    """`StreamingDataset(shuffle=True, batch_size=256)`, its default algorithm `py1e`, iterated and stacked.

    In the training process itself: on few cores a DataLoader's worker processes are slower.
    """

    def load(self) -> None:
        # It imports its image data sets and torchvision, whose published wheel does not load with a torch without
        # CUDA. No images are read here.
        sys.modules.setdefault("streaming.vision", ModuleType("streaming.vision"))
        import streaming

        self.library: Any = streaming

    def write(self, vectors: Path) -> None:
        columns = {"vector": f"ndarray:float16:{self.dims}"}
        with self.library.MDSWriter(out=str(self.folder), columns=columns) as writer:
            for block in blocks_of(vectors):
                for vector in block:
                    writer.write({"vector": vector})

    def open(self) -> None:
        self.library.base.util.clean_stale_shared_memory()  # of an interrupted run
        self.dataset: Any = self.library.StreamingDataset(local=str(self.folder), shuffle=True, batch_size=BATCH)

    def stream(self, epoch: int) -> Iterator[Float16]:
        samples = iter(self.dataset)  # each call starts the next epoch
        while batch := [sample["vector"] for sample in islice(samples, BATCH)]:
            yield np.stack(batch)

    def gather(self, rows: npt.NDArray[np.int64]) -> Float16:
        return np.stack([self.dataset[row]["vector"] for row in rows.tolist()])
