"""The contenders, one library per file."""

from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.peers.base import Contender


@dataclass(frozen=True)
class Entry:
    """One contender of the table below.

    Attributes:
        target: "module:class".
        data: folder of its data; contenders with the same folder share the data that the first one writes.
        options: of its constructor.
    """

    target: str
    data: str
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, root: Path, rows: int, dims: int) -> Contender:
        module, _, name = self.target.partition(":")
        contender: Contender = getattr(import_module(module), name)(root / self.data, rows, dims, **self.options)
        return contender


MEMORY_MAP = "memory map"
HF_MAP, HF_ARROW, HF_ITERABLE = "datasets, map", "datasets, map, Arrow", "datasets, iterable"
MOSAICML, LITDATA = "MosaicML streaming", "litdata"
ZARR = "zarr-python"
DEFAULT, DEFAULT_64K = "ours, float16", "ours, float16, window 64k"
RAW, RAW_64K = "ours, float16-raw", "ours, float16-raw, window 64k"
# A column that repeats one shard, so that many rows fit on a small disk.
REPEATED_DEFAULT, REPEATED_RAW = "ours, float16, repeated shard", "ours, float16-raw, repeated shard"

# A window holds 16,384 rows unless named otherwise.
OURS = (DEFAULT, DEFAULT_64K, RAW, RAW_64K)
# Data loaders for training; ours is compared with the fastest of them.
STREAMERS = (HF_MAP, HF_ARROW, HF_ITERABLE, MOSAICML, LITDATA)

CONTENDERS = {
    MEMORY_MAP: Entry("benchmarks.peers.memory_map:MemoryMap", "npy"),
    DEFAULT: Entry("benchmarks.own:Own", "own-float16", {"storage": "float16", "window": 16_384}),
    DEFAULT_64K: Entry("benchmarks.own:Own", "own-float16", {"storage": "float16", "window": 65_536}),
    RAW: Entry("benchmarks.own:Own", "own-raw", {"storage": "float16-raw", "window": 16_384}),
    RAW_64K: Entry("benchmarks.own:Own", "own-raw", {"storage": "float16-raw", "window": 65_536}),
    HF_MAP: Entry("benchmarks.peers.huggingface:MapStyle", "datasets"),
    HF_ARROW: Entry("benchmarks.peers.huggingface:MapStyleArrow", "datasets"),
    HF_ITERABLE: Entry("benchmarks.peers.huggingface:Iterable", "datasets"),
    MOSAICML: Entry("benchmarks.peers.mosaicml:MosaicML", "mosaicml"),
    LITDATA: Entry("benchmarks.peers.lightning:LitData", "litdata"),
    "Lance": Entry("benchmarks.peers.lance_table:Lance", "lance"),
    "parquet": Entry("benchmarks.peers.parquet:Parquet", "parquet"),
    "LMDB values": Entry("benchmarks.peers.lmdb_values:LmdbValues", "lmdb"),
    ZARR: Entry("benchmarks.peers.zarr_python:ZarrPython", "own-float16"),
}
REPEATED = {
    REPEATED_DEFAULT: Entry(
        "benchmarks.own:RepeatedShard", "repeated-float16", {"storage": "float16", "window": 16_384}
    ),
    REPEATED_RAW: Entry("benchmarks.own:RepeatedShard", "repeated-raw", {"storage": "float16-raw", "window": 16_384}),
}
