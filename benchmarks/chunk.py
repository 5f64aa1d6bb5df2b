"""Time of a streamed chunk by step: read, checksum, decompression, and the whole read of the store.

    python benchmarks/chunk.py [--rows 1000000] [--dims 384] [--quick] [--json FILE]

Chunks of the default encoding, in the page cache, read in windows of a shuffled epoch as in training. Prints
microseconds per chunk of 64 rows that each step adds, medians of interleaved rounds. The last line is the rest: the
store's own bookkeeping.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import google_crc32c
import numpy as np
import numpy.typing as npt
from numcodecs import blosc

from benchmarks.own import publish_rows, space_of, write_rows
from teacher_cache.reading.shuffle import WindowedShuffle
from teacher_cache.storage.shard_files import read_all
from teacher_cache.storage.shards import READ_CHUNKS
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.view import CHUNK_ROWS, SpaceView

WINDOWS = 20
ROUNDS = 7


def write_random(folder: Path, rows: int, dims: int) -> None:
    random = np.random.default_rng(0)

    def block(count: int) -> npt.NDArray[np.float16]:
        vectors = random.standard_normal((count, dims), dtype=np.float32)
        return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), dtype=np.float16)

    with TeacherCache.open(folder, "a") as cache:
        shard_rows = cache.shard_rows
        blocks = (block(min(shard_rows, rows - start)) for start in range(0, rows, shard_rows))
        write_rows(cache, space_of(dims), "float16", blocks)
        publish_rows(cache, rows)


def parts(view: SpaceView, order: WindowedShuffle) -> dict[str, float]:
    """Microseconds per chunk that each step adds."""
    array = view.vectors
    windows = [order.records_of(0, number) for number in range(min(WINDOWS, order.windows))]
    out = array.empty(order.window + order.batch)
    chunks = [np.unique(rows // CHUNK_ROWS).tolist() for rows in windows]
    buffers = np.empty((READ_CHUNKS, 2 * out[:CHUNK_ROWS].nbytes), dtype=np.uint8)
    groups: list[list[tuple[int, int, Any]]] = []
    for numbers in chunks:
        for start in range(0, len(numbers), READ_CHUNKS):
            group = numbers[start : start + READ_CHUNKS]
            shards = array.open_shards([number // array.chunks for number in group])
            entries = [shard.entry(number % array.chunks) for shard, number in zip(shards, group, strict=True)]
            reads = zip(shards, entries, buffers, strict=False)
            groups.append([(shard.file, offset, buffer[:size]) for shard, (offset, size), buffer in reads])
    places = [out[start : start + CHUNK_ROWS] for start in range(0, READ_CHUNKS * CHUNK_ROWS, CHUNK_ROWS)]

    def steps(checksum: bool, decompress: bool) -> None:
        for group in groups:
            read_all(group)
            if checksum:
                for _, _, data in group:
                    google_crc32c.value(data[:-4])
            if decompress:
                for (_, _, data), place in zip(group, places, strict=False):
                    blosc.decompress(data[:-4], place)

    def whole() -> None:
        for rows in windows:
            array.read(rows, out[: len(rows)])

    runs: dict[str, Callable[[], None]] = {
        "read": lambda: steps(False, False),
        "checksum": lambda: steps(True, False),
        "decompress": lambda: steps(True, True),
        "everything else": whole,
    }
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(-1, ROUNDS):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            if turn >= 0:
                taken[name].append(1e6 * (time.perf_counter() - started) / sum(map(len, chunks)))
    reached = [statistics.median(times) for times in taken.values()]
    return dict(zip(runs, np.diff([0.0, *reached]).tolist(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dims", type=int, default=384)
    parser.add_argument("--quick", action="store_true", help="50,000 rows")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = 50_000 if given.quick else given.rows
    with tempfile.TemporaryDirectory() as folder:
        write_random(Path(folder) / "cache", rows, given.dims)
        with TeacherCache.open(Path(folder) / "cache") as cache:
            found = parts(cache.space(), WindowedShuffle(rows, 256))
    whole = sum(found.values())
    record = {"rows": rows, "dims": given.dims, "microseconds": found}
    if given.json:
        given.json.write_text(json.dumps(record, indent=2))
    print(f"{whole:.1f} us per chunk, {CHUNK_ROWS / whole:.2f} million rows per second")
    for name, value in found.items():
        print(f"{name}: {value:.1f} us per chunk, {value / whole:.2f} of the whole")


if __name__ == "__main__":
    main()
