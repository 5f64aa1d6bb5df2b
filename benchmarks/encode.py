"""Time of `tcache build` to encode texts, compared with sentence-transformers on the same texts and model.

    python benchmarks/encode.py --model FOLDER --corpus FILE.csv [--texts N] [--rounds R] [--quick] [--json FILE]

In every round each contender runs once in this process, each time starting with another one:

- sentence_transformers: `SentenceTransformer(model).encode` of the distinct texts, in float32, with its defaults.
- encode_fp32, encode_auto: the teacher of a build on the same texts, in float32 and in the dtype that `--dtype auto`
  chooses, in the order and batches of a build, without loading and without measuring the dtype.
- save: the whole job by hand: read the file, load the model, encode, `numpy.save`.
- build_fp32, build_auto: the whole job by `tcache build` into a new cache: reading, index, loading (with auto the
  measurement, which loads the model twice), encoding, float16 shards, commit.

Ratios are computed within a round, of encoding to sentence_transformers and of builds to save; the median is printed.
Cosines are the smallest over all texts to the float32 vectors of sentence-transformers.
"""

import argparse
import csv
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from teacher_cache.building.build import BATCH_ROWS, build
from teacher_cache.corpus.corpus import Corpus
from teacher_cache.teachers import TeacherOptions, load_teacher, resolve, resolve_dtype
from teacher_cache.teachers.base import Teacher

QUICK_TEXTS = 64
SEED = 42
WARM_UP = 64
PEER, BY_HAND = "sentence_transformers", "save"
# Contender -> its baseline.
BASELINES = {
    PEER: PEER,
    "encode_fp32": PEER,
    "encode_auto": PEER,
    BY_HAND: BY_HAND,
    "build_fp32": BY_HAND,
    "build_auto": BY_HAND,
}

Vectors = npt.NDArray[np.float32]
Figures = dict[str, Any]


def main(arguments: list[str] | None = None) -> None:
    args = _arguments(arguments)
    found = measure(args.model, args.corpus, args.text_key, args.texts, args.rounds)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2))
    print_results(found)


def measure(model: Path, corpus: Path, column: str, texts: int | None, rounds: int) -> Figures:
    """Times of all rounds, their summary, and the smallest cosines."""
    chosen = sample(distinct(corpus, column), texts)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        part = folder / "corpus.csv"
        with part.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([[column], *([text] for text in chosen)])
        contenders, dtype = load_contenders(model, part, column, chosen, folder)
        vectors: dict[str, Vectors] = {}
        seconds = [one_round(contenders, number, vectors) for number in range(rounds)]
    return {
        "model": model.name,
        "texts": len(chosen),
        "threads": torch.get_num_threads(),
        "auto": dtype,
        "rounds": seconds,
        "contenders": summary(seconds),
        "cosines": {name: smallest_cosine(vectors[name], vectors[PEER]) for name in ("encode_fp32", "encode_auto")},
    }


def load_contenders(
    model: Path, part: Path, column: str, texts: list[str], folder: Path
) -> tuple[dict[str, Callable[[], Vectors | None]], str]:
    """The contenders after a warm-up, and the dtype chosen by auto."""
    from sentence_transformers import SentenceTransformer

    def options(dtype: str) -> TeacherOptions:
        return TeacherOptions(model=str(model), device="cpu", dtype=dtype)

    def by_hand() -> None:
        read = distinct(part, column)
        np.save(folder / "vectors.npy", SentenceTransformer(str(model), device="cpu").encode(read))

    def built(dtype: str) -> Callable[[], None]:
        def run() -> None:
            with tempfile.TemporaryDirectory(dir=folder) as cache:
                build(Corpus.open(part, text_key=column), options(dtype), Path(cache) / "cache")

        return run

    peer = SentenceTransformer(str(model), device="cpu")
    resolved = resolve_dtype(resolve(options("auto")), [])
    full, best = load_teacher(resolve(options("float32"))), load_teacher(resolved)
    for encode in (peer.encode, full.encode, best.encode):
        encode(texts[:WARM_UP])
    return {
        PEER: lambda: np.asarray(peer.encode(texts)),
        "encode_fp32": lambda: encode_like_build(full, texts),
        "encode_auto": lambda: encode_like_build(best, texts),
        BY_HAND: by_hand,
        "build_fp32": built("float32"),
        "build_auto": built("auto"),
    }, resolved.space.dtype


def encode_like_build(teacher: Teacher, texts: Sequence[str]) -> Vectors:
    """Vectors in the order of `texts`, encoded as a build does: sorted by length, in batches."""
    order = np.argsort([len(text) for text in texts], kind="stable")
    out = np.empty((len(texts), teacher.space.dims), dtype=np.float32)
    for start in range(0, len(texts), BATCH_ROWS):
        places = order[start : start + BATCH_ROWS]
        out[places] = teacher.encode_counted([texts[place] for place in places.tolist()]).vectors
    return out


def one_round(
    contenders: dict[str, Callable[[], Vectors | None]], number: int, vectors: dict[str, Vectors]
) -> dict[str, dict[str, float]]:
    names, found = list(contenders), {}
    start = number % len(names)
    for name in (*names[start:], *names[:start]):
        started, used = time.perf_counter(), time.process_time()
        output = contenders[name]()
        found[name] = {"seconds": time.perf_counter() - started, "processor": time.process_time() - used}
        if output is not None:
            vectors[name] = output
    return found


def summary(rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians over rounds; `speedup` is relative to the baseline of a contender."""
    found = {}
    for name, other in BASELINES.items():
        found[name] = {figure: median(one[name][figure] for one in rounds) for figure in ("seconds", "processor")}
        found[name]["speedup"] = median(one[other]["seconds"] / one[name]["seconds"] for one in rounds)
        found[name]["processor_speedup"] = median(one[other]["processor"] / one[name]["processor"] for one in rounds)
    return found


def smallest_cosine(a: Vectors, b: Vectors) -> float:
    first, second = a.astype(np.float64), b.astype(np.float64)
    norms = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return float(np.min(np.sum(first * second, axis=1) / norms))


def distinct(corpus: Path, column: str) -> list[str]:
    """Distinct texts of one column of a CSV file."""
    with corpus.open(encoding="utf-8-sig", newline="") as file:
        return list(dict.fromkeys(row[column] for row in csv.DictReader(file) if row[column]))


def sample(texts: list[str], count: int | None) -> list[str]:
    """A random sample of the texts, in their order."""
    if count is None or count >= len(texts):
        return texts
    return [texts[i] for i in np.sort(np.random.default_rng(SEED).choice(len(texts), count, replace=False)).tolist()]


def print_results(found: Figures) -> None:
    print(
        f"{found['model']}, {found['texts']:,} distinct texts, {found['threads']} threads, {len(found['rounds'])} "
        f"rounds; auto is {found['auto']}"
    )
    print(f"{'':22} {'seconds':>9} {'times as fast':>14} {'processor s':>12} {'times as fast':>14}")
    for name, figures in found["contenders"].items():
        print(
            f"{name:22} {figures['seconds']:9.1f} {figures['speedup']:14.2f} {figures['processor']:12.1f} "
            f"{figures['processor_speedup']:14.2f}"
        )
    contenders, cosines = found["contenders"], found["cosines"]
    print(
        f"smallest cosine to sentence-transformers: fp32 {cosines['encode_fp32']:.7f}, auto "
        f"{cosines['encode_auto']:.5f}"
    )
    print(
        f"encoding {found['texts']:,} texts is {contenders['encode_fp32']['speedup']:.2f} times as fast as "
        f"sentence-transformers at float32, {contenders['encode_auto']['speedup']:.2f} times in {found['auto']} "
        f"(smallest cosine {cosines['encode_auto']:.5f}); a whole build {contenders['build_fp32']['speedup']:.2f} and "
        f"{contenders['build_auto']['speedup']:.2f} times as fast as encode and save"
    )


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a sentence-transformers folder")
    parser.add_argument("--corpus", type=Path, required=True, help="a CSV file")
    parser.add_argument("--text-key", default="text", help="column of the texts")
    parser.add_argument("--texts", type=int, help="number of distinct texts to draw at random; all by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help=f"one round of {QUICK_TEXTS} texts")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    if args.quick:
        args.texts, args.rounds = args.texts or QUICK_TEXTS, 1
    return args


if __name__ == "__main__":
    main()
