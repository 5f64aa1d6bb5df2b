"""Building and reading a cache end to end: cost per row by size.

    python benchmarks/ingest.py [--quick] [--json FILE] [--scratch FOLDER] [--rows N[,N...]]

Texts of about 60 bytes are in one file of JSON lines; the teacher is `toy`, so that the store's cost is visible. Each
build and each reading is a new process. Reported are:

- texts: reading the file, hashing, storing texts and keys, publishing the corpus;
- teacher: fetching the texts again and encoding them;
- vectors: checking, compressing and committing them;
- peak resident memory and its anonymous part: pages of mapped files belong to the system, which reclaims them;
- reading texts and vectors of 100,000 random rows, 256 at a time, from a cache that was just opened.

The baseline is a plain loop over the same file and teacher that writes one .npy file of float16: no look-up, no digest,
no commit, no resuming. Rounds are interleaved, figures are medians; the largest size is built once.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from shutil import rmtree
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.resources import PeakMemory, bytes_below
from teacher_cache.building.build import Progress, build
from teacher_cache.building.workers import EncodedBatches, LocalWorkers
from teacher_cache.corpus.corpus import Corpus
from teacher_cache.table.cache import TeacherCache
from teacher_cache.teachers import load_teacher, resolve
from teacher_cache.teachers.base import TeacherOptions, TeacherSpec

SIZES = (20_000, 200_000, 2_000_000)
QUICK_SIZES = (5_000, 20_000)
ROUNDS = 3
BUILT_ONCE = 1_000_000
SERVED = 100_000
BATCH = 256
TOY = TeacherOptions(model="toy")
WORDS = ("a", "teacher", "of", "texts", "and", "the", "student", "who", "learns", "from", "its", "cache", "each", "day")
PHASES = ("texts", "teacher", "vectors")


def write_corpus(path: Path, rows: int) -> None:
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for start in range(0, rows, 10_000):
            picks = rng.integers(0, len(WORDS), (min(10_000, rows - start), 11)).tolist()
            for number, pick in enumerate(picks, start=start):
                file.write(json.dumps({"text": f"{number} " + " ".join([WORDS[word] for word in pick])}) + "\n")


class TimedWorkers(LocalWorkers):
    """Local workers that record the waiting time for them."""

    seconds = 0.0

    def encode(self, spec: TeacherSpec, batches: Iterable[list[str]]) -> EncodedBatches:
        started = time.perf_counter()
        for answer in super().encode(spec, batches):
            self.seconds += time.perf_counter() - started
            yield answer
            started = time.perf_counter()


def build_cache(corpus: Path, cache: Path) -> dict[str, Any]:
    """One build; seconds of each phase and peak memory."""
    with tempfile.TemporaryDirectory(dir=cache.parent) as folder:  # a first build does the imports
        few = Path(folder) / "few.txt"
        few.write_text("one text\nanother\n")
        build(Corpus.open(few), TOY, Path(folder) / "cache")
    workers = TimedWorkers()
    read: list[float] = []

    def note(progress: Progress) -> None:
        if progress.phase == "encoding" and not read:
            read.append(time.perf_counter())

    with PeakMemory() as memory:
        started = time.perf_counter()
        build(Corpus.open(corpus), TOY, cache, workers=workers, report=note)
        ended = time.perf_counter()
    texts = read[0] - started
    vectors = ended - read[0] - workers.seconds
    return {
        "seconds": ended - started,
        "texts": texts,
        "teacher": workers.seconds,
        "vectors": vectors,
        "resident": memory.peak,
        "anonymous": memory.anonymous,
    }


def bare_loop(corpus: Path, target: Path) -> dict[str, Any]:
    """The same file and teacher without a cache."""
    spec = resolve(TOY)
    with PeakMemory() as memory:
        started = time.perf_counter()
        teacher = load_teacher(spec)
        with corpus.open() as lines:
            rows = sum(1 for _ in lines)
        out = np.lib.format.open_memmap(target, mode="w+", dtype=np.float16, shape=(rows, spec.space.dims))
        done = 0
        batch: list[str] = []
        with corpus.open() as lines:
            for line in lines:
                batch.append(json.loads(line)["text"])
                if len(batch) == 1024 or done + len(batch) == rows:
                    out[done : done + len(batch)] = teacher.encode(batch)
                    done += len(batch)
                    batch = []
        out.flush()
        ended = time.perf_counter()
    return {"seconds": ended - started, "resident": memory.peak, "anonymous": memory.anonymous}


def serve(cache: Path) -> dict[str, Any]:
    """Texts and vectors of random rows."""
    with PeakMemory() as memory:
        started = time.perf_counter()
        with TeacherCache.open(cache) as table:
            view = table.space()
            rows = np.random.default_rng(1).integers(0, table.rows, SERVED)
            for start in range(0, SERVED, BATCH):
                some = rows[start : start + BATCH]
                if len(table.texts(some)) != len(view.gather(some)):
                    raise RuntimeError("texts and vectors differ in number")
        ended = time.perf_counter()
    return {"seconds": ended - started, "resident": memory.peak, "anonymous": memory.anonymous}


TASKS: dict[str, Any] = {"build": build_cache, "bare": bare_loop, "serve": serve}


def in_a_process(*arguments: str | Path) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).resolve()), "--task", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def measure(rows: int, scratch: Path) -> dict[str, Any]:
    corpus, cache, bare = scratch / "corpus.jsonl", scratch / "cache", scratch / "bare.npy"
    write_corpus(corpus, rows)
    builds, bares, serves = [], [], []
    for _ in range(1 if rows >= BUILT_ONCE else ROUNDS):
        rmtree(cache, ignore_errors=True)
        builds.append(in_a_process("build", corpus, cache))
        bares.append(in_a_process("bare", corpus, bare))
        serves.append(in_a_process("serve", cache))
    return {
        "rows": rows,
        "corpus_bytes": corpus.stat().st_size / rows,
        "build": {name: median(one[name] for one in builds) for name in builds[0]},
        "bare": {name: median(one[name] for one in bares) for name in bares[0]},
        "serve": {name: median(one[name] for one in serves) for name in serves[0]},
        "disk": {
            name: bytes_below(cache / part) / rows
            for name, part in (
                ("texts", "texts/text"),
                ("keys", "texts/keys"),
                ("index", "index.lmdb"),
                ("vectors", "spaces"),
                ("corpus", "corpora"),
                ("all", "."),
            )
        },
    }


def table(figures: Sequence[dict[str, Any]]) -> list[str]:
    def line(title: str, values: Iterable[float], encoding: str = ",.2f") -> str:
        return f"{title:<38}" + "".join(f"{value:>14{encoding}}" for value in values)

    def per_row(part: str, name: str) -> list[float]:
        return [1e6 * of[part][name] / (SERVED if part == "serve" else of["rows"]) for of in figures]

    lines = [
        line("rows", [of["rows"] for of in figures], ",.0f"),
        line("build, seconds", [of["build"]["seconds"] for of in figures]),
        line("build, microseconds a row", per_row("build", "seconds")),
        *[line(f"  of these, {phase}", per_row("build", phase)) for phase in PHASES],
        line("bare loop, microseconds a row", per_row("bare", "seconds")),
        line("build / bare loop", [of["build"]["seconds"] / of["bare"]["seconds"] for of in figures]),
        line("serving, microseconds a row", per_row("serve", "seconds")),
    ]
    for part in ("build", "bare", "serve"):
        for name in ("resident", "anonymous"):
            lines.append(line(f"{part}, peak MB {name}", [of[part][name] / 1e6 for of in figures], ",.0f"))
    lines.append(line("corpus file, bytes a row", [of["corpus_bytes"] for of in figures], ",.1f"))
    for name in figures[0]["disk"]:
        lines.append(line(f"on disk, bytes a row: {name}", [of["disk"][name] for of in figures], ",.1f"))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="smaller sizes")
    parser.add_argument("--rows", help="other sizes, ascending: N[,N...]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there too")
    parser.add_argument("--scratch", type=Path, metavar="FOLDER", help="where to write; by default the system's own")
    parser.add_argument("--task", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        name, *paths = options.task
        print(json.dumps(TASKS[name](*map(Path, paths))))
        return
    sizes: tuple[int, ...] = QUICK_SIZES if options.quick else SIZES
    if options.rows:
        sizes = tuple(int(rows) for rows in options.rows.split(","))
    figures = []
    for rows in sizes:
        with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
            figures.append(measure(rows, Path(scratch)))
    print("\n".join(table(figures)))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2))
    small, large = figures[0], figures[-1]
    cost = [1e6 * of["build"]["seconds"] / of["rows"] for of in (small, large)]
    print(
        f"{large['rows']:,} rows built in {large['build']['seconds']:.1f} s, {cost[1]:.1f} microseconds a row, "
        f"{cost[1] / cost[0]:.2f} times that of {small['rows']:,} rows"
    )


if __name__ == "__main__":
    main()
