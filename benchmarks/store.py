"""The store compared with a memory map, datasets, MosaicML streaming, litdata, Lance, parquet, LMDB and zarr.

    python benchmarks/store.py [stream gather memory shuffle write size ...] [--quick] [--json FILE] [--markdown FILE]

All hold the same random float16 vectors of unit length, in 100 contiguous sources. Each runs in its own process;
rounds are interleaved, figures are medians, ratios medians of the rounds' ratios. Libraries that are not installed are
skipped (`pip install 'teacher-cache[bench]'`, in an environment without the `train` extra).

- stream: rows per second of a shuffled epoch in batches of 256, files in the page cache; its peak memory.
- gather: milliseconds for 256 random rows; hot, and cold: in fresh processes, with the files' pages dropped.
- memory: peak resident memory of our stream with a tenth of the rows, all, and ten times as many.
- shuffle: same-source pairs in a batch, relative to a true permutation.
- write: rows per second of whole shards in the default encoding; ours synced to disk, zarr-python's not.
- size: of real vectors (`--vectors FILE.npy`) in every encoding, relative to float32, and their errors.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.contender import Streamed
from benchmarks.contest import Contest, Process, Size, print_status
from benchmarks.own import format_size
from benchmarks.peers import CONTENDERS, DEFAULT, DEFAULT_64K, HF_ITERABLE, RAW, RAW_64K, REPEATED, ZARR
from benchmarks.resources import cool
from benchmarks.store_report import main_figure, markdown, ratios
from teacher_cache.storage.codec import ENCODINGS
from teacher_cache.table.layout import SHARD_ROWS

LIBRARIES = ("numpy", "zarr", "numcodecs", "lmdb", "datasets", "pyarrow", "mosaicml-streaming", "litdata", "pylance")
# The other contenders gather in the same way as one of these.
GATHERERS = tuple(name for name in CONTENDERS if name not in (DEFAULT_64K, RAW_64K, HF_ITERABLE))
WRITTEN_SHARDS = 16
# Per process; few, because pages that it has mapped cannot be dropped.
COLD_GATHERS = 2
Figures = dict[str, Any]


class Store:
    """The measures.

    Args:
        rounds: of each measure.
        seconds: after which an epoch is stopped; its rate is that of the part it read.
        gathers: in a hot round, at most.
    """

    def __init__(self, contest: Contest, rounds: int, seconds: float, gathers: int, vectors: list[Path]) -> None:
        self.contest = contest
        self.rows = contest.size.rows
        self.count = rounds
        self.seconds = seconds
        self.gathers = gathers
        self.files = vectors

    def stream(self) -> Figures:
        def ask(process: Process, number: int) -> Figures:
            return process.request("stream", epoch=number + 1, limit=self.seconds if number >= 0 else 2.0)

        found = self.contest.rounds(CONTENDERS, self.count, ask)
        return {
            name: {
                "rates": [Streamed(**answer["streamed"]).rate(self.rows) for answer in answers],
                **{key: max(answer[key] for answer in answers) for key in answers[0] if key != "streamed"},
                "bytes": self.contest.bytes[name],
            }
            for name, answers in found.items()
        }

    def gather(self) -> Figures:
        def ask(process: Process, number: int) -> Figures:
            # The warm-up round is longer: it also maps pages for the later ones.
            times = self.gathers if number >= 0 else 5 * self.gathers
            return process.request("gather", seed=number + 1, times=times, limit=5.0)

        hot = self.contest.rounds(GATHERERS, self.count, ask)
        cold: dict[str, list[Figures]] = {}
        for number in range(self.count):
            for name in self.contest.wanted(GATHERERS):
                with self.contest.noting(name):
                    cold.setdefault(name, []).append(self._cold(name, number))
        return {
            "hot": {name: _latency(answers) for name, answers in hot.items()},
            "cold": {
                name: {**_latency(answers), "resident": max(answer["resident"] for answer in answers)}
                for name, answers in cold.items()
                if len(answers) == self.count
            },
        }

    def _cold(self, name: str, number: int) -> Figures:
        """Gathers in a fresh process; before each, all pages that it has not touched are dropped."""
        taken: list[float] = []
        resident: list[float] = []
        with self.contest.running(name) as process:
            process.request("touch")
            for turn in range(COLD_GATHERS):
                resident.append(cool(self.contest.data(name)))
                answer = process.request("gather", seed=COLD_GATHERS * number + turn, times=1, limit=60.0)
                taken += answer["milliseconds"]
        return {"milliseconds": taken, "resident": max(resident)}

    def memory(self) -> Figures:
        """Each epoch in a fresh process; the largest cache repeats one shard."""
        largest = 10 * self.rows // SHARD_ROWS * SHARD_ROWS
        runs = [(self.rows // 10, DEFAULT), (self.rows // 10, RAW), (self.rows, DEFAULT), (self.rows, RAW)]
        runs += [(largest, name) for name in REPEATED]
        found: Figures = {}
        for rows, name in runs:
            for wanted in self.contest.wanted([name]):
                peaks = []
                with self.contest.noting(wanted):
                    for number in range(self.count):
                        with self.contest.running(wanted, rows) as process:
                            peaks.append(process.request("stream", epoch=number, limit=600.0))
                    keys = ("peak", "anonymous_growth", "file_growth")
                    found.setdefault(wanted, {})[str(rows)] = {
                        "torch": any(answer["torch"] for answer in peaks),
                        **{key: float(np.median([answer[key] for answer in peaks])) for key in keys},
                    }
        return found

    def shuffle(self) -> Figures:
        def ask(process: Process, number: int) -> Figures:
            return process.request("shuffle", epoch=number + 1, limit=self.seconds) if number >= 0 else {}

        return {name: answer for name, (answer,) in self.contest.rounds(CONTENDERS, 1, ask).items()}

    def write(self) -> Figures:
        rows = min(self.rows, WRITTEN_SHARDS * SHARD_ROWS)
        found = self.contest.rounds(
            [DEFAULT, ZARR], self.count, lambda process, _: process.request("write_shards", rows=rows)
        )
        return {
            name: {
                "rates": [answer["rows"] / answer["seconds"] for answer in answers],
                "bytes": answers[0]["bytes"],
                "rows": rows,
            }
            for name, answers in found.items()
        }

    def size(self) -> Figures:
        if not self.files:
            print_status("size: no --vectors FILE.npy, nothing to measure")
        found: Figures = {}
        for path in self.files:
            vectors = np.load(path, mmap_mode="r")[: self.rows]
            found[path.name] = {"rows": len(vectors), "dims": vectors.shape[1], "formats": {}}
            for storage in ENCODINGS:
                with tempfile.TemporaryDirectory(dir=self.contest.folder) as folder:
                    found[path.name]["formats"][storage] = format_size(vectors, storage, Path(folder))
        return found


MEASURES = ("stream", "gather", "memory", "shuffle", "write", "size")


def _latency(answers: list[Figures]) -> Figures:
    """Milliseconds: the median of each round, the 95th percentile of all."""
    everything = [taken for answer in answers for taken in answer["milliseconds"]]
    return {
        "medians": [float(np.median(answer["milliseconds"])) for answer in answers],
        "p95": float(np.percentile(everything, 95)),
        "gathers": len(everything),
    }


def machine() -> Figures:
    """Description of this machine."""
    versions = {}
    for library in LIBRARIES:
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            versions[library] = "absent"
    return {"cores": os.cpu_count(), "python": platform.python_version(), "versions": versions}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measures", nargs="*", metavar="MEASURE", help=f"of {', '.join(MEASURES)}; default: all")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dims", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="after which an epoch is stopped")
    parser.add_argument("--quick", action="store_true", help="20,000 rows, 2 rounds of at most 2 seconds")
    parser.add_argument(
        "--only", action="append", default=[], metavar="PART", help="only contenders whose name contains this"
    )
    parser.add_argument("--folder", type=Path, help="for the data; complete data in it are reused")
    parser.add_argument("--vectors", type=Path, action="append", default=[], metavar="FILE.npy", help="for `size`")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    if unknown := set(options.measures) - set(MEASURES):
        parser.error(f"unknown measure {min(unknown)!r}: choose from {', '.join(MEASURES)}")
    if options.quick:
        options.rows, options.rounds, options.seconds = min(options.rows, 20_000), 2, 2.0
    with tempfile.TemporaryDirectory() as temporary:
        contest = Contest(options.folder or Path(temporary), Size(options.rows, options.dims), tuple(options.only))
        store = Store(contest, options.rounds, options.seconds, 20 if options.quick else 100, options.vectors)
        results: Figures = {"rows": options.rows, "dims": options.dims, "rounds": options.rounds, **machine()}
        for measure in options.measures or MEASURES:
            print_status(f"{measure} ...")
            results[measure] = getattr(store, measure)()
        results["missing"] = contest.missing
    results["ratios"] = ratios(results)
    text = markdown(results)
    print(text)
    if options.markdown:
        options.markdown.write_text(text)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    print(main_figure(results["ratios"]))


if __name__ == "__main__":
    main()
