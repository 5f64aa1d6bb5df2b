"""Time, memory and scores of `distill eval` on the nine tasks, compared with sentence-transformers.

    python benchmarks/evaluation.py --model FOLDER --data DIR [--dtype D] [--texts N] [--rounds R] [--whole] [--quick]
        [--json FILE]

Every round runs each contender in its own process, one after another:

- sentence_transformers: `SentenceTransformer(model).encode` of the distinct texts, in float32 with its defaults. Only
  this call is timed, after a warm-up, without imports and loading.
- encode_fp32, encode_auto: the encoder of `distill eval` on the same texts, timed in the same way.
- distill_eval: the whole command, from the start of its process to its end, with `--dtype`.

Ratios are within a round; the median over rounds is reported. The scores of sentence-transformers' vectors are computed
by the same tasks, without its Normalize module, since classifiers are trained on vectors before it. Memory is the peak
resident memory of a process. `--texts` takes a random share of the rows of every file, so that about that many distinct
texts remain: scores of few rows are more sensitive to rounding.
"""

import argparse
import csv
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from distill.evaluation.base import Task
from distill.evaluation.encoders import encode_all
from distill.evaluation.evaluator import Evaluator, nine_tasks
from distill.training.measurement import peak_memory

QUICK_TEXTS = 300
FEWEST_ROWS = 20
SEED = 42
WARM_UP = 32
PEER, WHOLE = "sentence_transformers", "distill_eval"

# Model, data, names of tasks and `--dtype` -> JSON of its time, memory and scores.
Contender = Callable[[Path, Path, list[str] | None, str], dict[str, Any]]


def main(arguments: list[str] | None = None) -> None:
    options = _arguments(arguments)
    names = options.tasks.split(",") if options.tasks else None
    if options.contender:
        json.dump(
            CONTENDERS[options.contender](options.model, options.data, names, options.dtype), options.answer.open("w")
        )
        return
    chosen = [
        "--model",
        str(options.model),
        "--dtype",
        options.dtype,
        *(["--tasks", options.tasks] if options.tasks else []),
    ]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        data = (
            options.data if options.texts is None else sampled(nine_tasks(options.data, names), options.texts, folder)
        )
        contenders = [PEER, WHOLE] if options.whole else list(CONTENDERS)
        rounds = [
            run_round(contenders, number, [*chosen, "--data", str(data)], folder) for number in range(options.rounds)
        ]
        texts = len(distinct_texts(nine_tasks(data, names)))
    found = {
        "model": options.model.name,
        "texts": texts,
        "dtype": options.dtype,
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "rounds": rounds,
    }
    found |= summary(rounds)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))
    show(found)


def run_round(names: list[str], number: int, chosen: list[str], folder: Path) -> dict[str, Any]:
    """Results of all contenders; each round starts with another one."""
    start = number % len(names)
    order = [*names[start:], *names[:start]]
    return {name: in_a_process(name, chosen, folder / "answer.json") for name in order}


def in_a_process(name: str, chosen: list[str], answer: Path) -> dict[str, Any]:
    """A contender's result; the whole process is timed unless it timed itself."""
    command = [sys.executable, str(Path(__file__).resolve()), *chosen, "--contender", name, "--answer", str(answer)]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr}")
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = now.ru_utime - used.ru_utime + now.ru_stime - used.ru_stime
    return {"seconds": seconds, "processor": processor, **json.loads(answer.read_text())}


def distinct_texts(tasks: Sequence[Task]) -> list[str]:
    """Distinct texts in the order in which an evaluation encodes them."""
    return list(dict.fromkeys(one.text for task in tasks for one in task.inputs()))


def sampled(tasks: Sequence[Task], texts: int, folder: Path) -> Path:
    """Write the tasks' files with a random share of their rows, so that about `texts` distinct texts remain."""
    share = texts / len(distinct_texts(tasks))
    random = np.random.default_rng(SEED)
    for path in (path for task in tasks for path in task.files()):
        with path.open(encoding="utf-8-sig", newline="") as file:
            header, *rows = [row for row in csv.reader(file) if row]
        count = min(len(rows), max(FEWEST_ROWS, round(share * len(rows))))
        with (folder / path.name).open("w", encoding="utf-8", newline="") as file:
            kept = np.sort(random.choice(len(rows), count, replace=False)).tolist()
            csv.writer(file).writerows([header, *(rows[row] for row in kept)])
    return folder


@dataclass(frozen=True)
class Encoding:
    """Encoded texts with the time of encoding; an encoder that looks vectors up."""

    rows: dict[str, int]
    vectors: npt.NDArray[np.float32]
    seconds: float
    processor: float

    @classmethod
    def timed(cls, texts: list[str], encode: Callable[[list[str]], npt.NDArray[np.float32]]) -> "Encoding":
        encode(texts[:WARM_UP])
        started, used = time.perf_counter(), time.process_time()
        vectors = encode(texts)
        seconds, processor = time.perf_counter() - started, time.process_time() - used
        return cls({text: row for row, text in enumerate(texts)}, vectors, seconds, processor)

    def encode(self, texts: Sequence[str], /) -> npt.NDArray[np.float32]:
        return self.vectors[[self.rows[text] for text in texts]]

    def to_json(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "processor": self.processor, "peak": peak_memory()}


def sentence_transformers(model: Path, data: Path, names: list[str] | None, dtype: str) -> dict[str, Any]:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Normalize

    tasks = nine_tasks(data, names)
    parts = [module for module in SentenceTransformer(str(model)) if not isinstance(module, Normalize)]
    encoding = Encoding.timed(distinct_texts(tasks), SentenceTransformer(modules=parts).encode)
    answer = encoding.to_json()
    return answer | {"tasks": Evaluator(tasks)(encoding).to_json()["tasks"]}


def own_encoder(precision: str) -> Contender:
    def run(model: Path, data: Path, names: list[str] | None, dtype: str) -> dict[str, Any]:
        from distill.evaluation.encoders import resolved_dtype
        from teacher_cache.teachers import TeacherOptions, load_teacher, resolve

        dtype_name = resolved_dtype(precision)
        encoder = load_teacher(resolve(TeacherOptions(model=str(model), normalize=False, dtype=dtype_name)))
        encoding = Encoding.timed(distinct_texts(nine_tasks(data, names)), lambda texts: encode_all(encoder, texts))
        return encoding.to_json() | {"dtype": dtype_name}

    return run


def distill_eval(model: Path, data: Path, names: list[str] | None, dtype: str) -> dict[str, Any]:
    from cli.distill import main as distill

    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "scores.json"
        arguments = ["eval", str(model), "--data", str(data), "--dtype", dtype, "-o", str(output)]
        distill([*arguments, *(["--tasks", ",".join(names)] if names else [])], standalone_mode=False)
        return {"peak": peak_memory(), "tasks": json.loads(output.read_text())["tasks"]}


CONTENDERS: dict[str, Contender] = {
    PEER: sentence_transformers,
    "encode_fp32": own_encoder("fp32"),
    "encode_auto": own_encoder("auto"),
    WHOLE: distill_eval,
}


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over rounds, and the largest difference of each score in any round."""
    contenders = {}
    for name in rounds[0]:
        contenders[name] = {
            figure: median(one[name][figure] for one in rounds) for figure in ("seconds", "processor", "peak")
        }
        for figure in ("seconds", "processor"):
            ratio = median(one[name][figure] / one[PEER][figure] for one in rounds)
            contenders[name][f"{figure}_ratio"] = ratio
    tasks = {}
    for task, score in rounds[0][PEER]["tasks"].items():
        pairs = [(one[PEER]["tasks"][task]["score"], one[WHOLE]["tasks"][task]["score"]) for one in rounds]
        peer, whole = max(pairs, key=lambda pair: abs(pair[1] - pair[0]))
        tasks[task] = {"metric": score["metric"], PEER: peer, WHOLE: whole, "difference": whole - peer}
    return {"contenders": contenders, "tasks": tasks, "auto": rounds[0].get("encode_auto", {}).get("dtype")}


def show(found: dict[str, Any]) -> None:
    print(
        f"{found['model']}, {found['texts']:,} distinct texts, {len(found['rounds'])} rounds; distill eval in "
        f"{found['dtype']}" + (f"; auto is {found['auto']}" if found["auto"] else "")
    )
    print(f"{'':22} {'seconds':>9} {'ratio':>6} {'processor s':>12} {'ratio':>6} {'peak MiB':>9}")
    for name, figures in found["contenders"].items():
        print(
            f"{name:22} {figures['seconds']:9.1f} {figures['seconds_ratio']:6.2f} {figures['processor']:12.1f} "
            f"{figures['processor_ratio']:6.2f} {figures['peak'] / 2**20:9.0f}"
        )
    for task, scores in found["tasks"].items():
        print(
            f"{task:12} {scores['metric']:18} sentence_transformers {scores[PEER]:7.3f}  distill_eval "
            f"{scores[WHOLE]:7.3f}  difference {scores['difference']:+.3f}"
        )
    whole = found["contenders"][WHOLE]
    worst = max(found["tasks"], key=lambda task: abs(found["tasks"][task]["difference"]))
    print(
        f"distill eval of {found['texts']:,} distinct texts: {whole['seconds'] / 60:.1f} minutes, peak "
        f"{whole['peak'] / 2**20:.0f} MiB, {whole['seconds_ratio']:.2f} x the time of sentence-transformers' own "
        f"float32 encode (processor time {whole['processor_ratio']:.2f} x); largest difference of a score "
        f"{abs(found['tasks'][worst]['difference']):.3f} ({worst})"
    )


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a sentence-transformers folder")
    parser.add_argument("--data", type=Path, required=True, help="folder of the nine tasks' files")
    parser.add_argument("--tasks", help="comma list; all nine by default")
    parser.add_argument("--dtype", default="fp32", help="of distill eval: auto, fp32 or bf16")
    parser.add_argument("--texts", type=int, help="about this many distinct texts, a share of the rows of every file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--whole", action="store_true", help="only sentence-transformers and the whole distill eval")
    parser.add_argument("--quick", action="store_true", help=f"one round of about {QUICK_TEXTS} texts")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--contender", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.quick:
        options.texts, options.rounds = options.texts or QUICK_TEXTS, 1
    return options


if __name__ == "__main__":
    main()
