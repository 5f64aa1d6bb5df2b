"""Step time and peak memory of TALAS, of sentence-transformers' MSELoss and of the paper's own training loop.

    python benchmarks/step.py --model FOLDER --corpus FILE.csv [--text-key COLUMN] [--steps N] [--warm-up N]
        [--rounds R] [--only talas,mse,...] [--quick] [--json FILE]

Contenders, each in float32 and, but for the paper's, in the precision that `training.precision=auto` chooses here:

- talas, talas+asam, talas+cheap: `DistillTrainer` over a cache, as `distill run` trains; "cheap" is `norm-one-view` at
  every second step. A thread reads and tokenizes a batch while the one before is computed.
- mse: `SentenceTransformerTrainer` with `MSELoss`: transformer, pooling, `Dense` to the targets' width with identity
  activation; texts and targets from a data set on disk. Its collator tokenizes between two steps.
- paper, paper+asam: `benchmarks/paper_loop.py`; texts and targets in memory, tokenized between two steps.

All have the same student with dropout, the same distinct texts in the same batches of 32, truncated at the same length;
the same 1,024-wide targets (random unit vectors); the student's learning rate, schedule, weight decay, seeds and
threads. A TALAS step encodes every text twice, a step of MSELoss once. The others pad a batch to its longest text; a
run packs it. Both trainers have the fused AdamW and clip no gradient; the paper's loop has the default `AdamW`.

In each round every contender trains from the start in this process, in another order and on other batches. A step
lasts from the end of the previous one to its own end, with the wait for its batch. Cheap sharpness alternates with
plain steps, so a figure is the mean of two successive steps; the figure of a round is the median of those. Ratios are
taken within a round; their median is reported. Memory is measured in a new process that has trained two steps of two
texts before: the highest resident memory over the batches of a round less the resident memory before the model was
loaded; the median of three processes, because what the heap keeps of freed blocks varies by a tenth.
"""

import argparse
import gc
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers.utils import logging

from benchmarks.step_contenders import BATCH, CYCLE, METHODS, OURS, PAPERS, WIDTH, Contender, Task, prepare, take
from distill.config import StudentConfig, resolve_precision
from distill.student.student import Student, student_shape

STEPS, WARM_UP, ROUNDS = 20, 4, 5
# Most processes per contender for its memory.
PROCESSES = 3

Figures = dict[str, Any]
# By contender, "seconds" and "processor" of a step.
Round = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Comparison:
    """A ratio of two contenders.

    Attributes:
        bar: highest allowed ratio; None only reports it.
    """

    what: str
    mine: str
    theirs: str
    bar: float | None


STEP_COMPARISONS = (
    Comparison("TALAS to sentence-transformers' MSELoss", "talas", "mse", 1.0),
    Comparison("TALAS with ASAM to the paper's loop", "talas+asam", "paper+asam", 0.35),
    Comparison("TALAS without to the paper's loop", "talas", "paper", None),
    Comparison("price of ASAM", "talas+asam", "talas", 1.9),
    Comparison("price of cheap sharpness", "talas+cheap", "talas", 1.35),
)
MEMORY_COMPARISONS = (
    Comparison("TALAS to sentence-transformers' MSELoss", "talas", "mse", 1.0),
    Comparison("TALAS without to the paper's loop", "talas", "paper", 1.0),
    Comparison("TALAS with ASAM to the paper's loop", "talas+asam", "paper+asam", 1.0),
)


def in_rounds(tasks: Sequence[Task], rounds: int) -> Iterator[Round]:
    """Step times by contender for each round; rounds start with another contender and have other batches."""
    gc.collect()
    gc.freeze()  # keeps garbage collection of the libraries out of the steps
    try:
        for number in range(rounds):
            start = number % len(tasks)
            found: Round = {}
            for task in (*tasks[start:], *tasks[:start]):
                found[task.contender.name] = take(replace(task, seed=task.seed + number)).figures()
            yield found
    finally:
        gc.unfreeze()


def peaks_in_new_processes(tasks: Sequence[Task], rounds: int) -> Iterator[dict[str, int]]:
    """Bytes by contender, each in a process forked from a server with the libraries; on the rounds' batches."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["distill.bench.timed_run", "sentence_transformers"])
    for number in range(min(rounds, PROCESSES)):
        found = {}
        for task in tasks:
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                peak = pool.submit(peak_of_child, replace(task, seed=task.seed + number), torch.get_num_threads())
                found[task.contender.name] = peak.result()
        yield found


def peak_of_child(task: Task, threads: int) -> int:
    torch.set_num_threads(threads)
    quiet()
    take(replace(task, steps=CYCLE, warm_up=0, batch=2))  # makes the libraries' code resident
    return take(task).peak


def quiet() -> None:
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def contenders(only: Sequence[str] | None) -> list[Contender]:
    """The methods in each of their precisions."""
    best = resolve_precision("auto")
    chosen = [method for method in METHODS if only is None or method in only]
    return [
        Contender(method, precision)
        for method in chosen
        for precision in dict.fromkeys(("fp32",) if method in PAPERS else ("fp32", best))
    ]


def summary(rounds: Sequence[Round]) -> Round:
    """Medians over rounds."""
    return {
        name: {figure: median(one[name][figure] for one in rounds) for figure in ("seconds", "processor")}
        for name in rounds[0]
    }


def pairs(comparison: Comparison, medians: Round) -> list[tuple[str, str]]:
    """Contenders to compare: both in float32, then each in its faster precision; two of ours in equal precisions."""

    def of(method: str) -> dict[str, str]:
        names = (name for name in medians if name.split()[0] == method)
        return {name.split()[1]: name for name in names}

    mine, theirs = of(comparison.mine), of(comparison.theirs)
    if not mine or not theirs:
        return []
    if comparison.theirs in OURS:
        return [(name, theirs[precision]) for precision, name in mine.items()]

    def fastest(names: dict[str, str]) -> str:
        return min(names.values(), key=lambda name: medians[name]["seconds"])

    return list(dict.fromkeys([(mine["fp32"], theirs["fp32"]), (fastest(mine), fastest(theirs))]))


def step_ratios(rounds: Sequence[Round]) -> list[Figures]:
    """Ratios of steps: medians, least and most over the rounds, and whether the clock's meets its bar."""
    found, medians = [], summary(rounds)
    for comparison in STEP_COMPARISONS:
        for mine, theirs in pairs(comparison, medians):
            wall = [one[mine]["seconds"] / one[theirs]["seconds"] for one in rounds]
            processor = [one[mine]["processor"] / one[theirs]["processor"] for one in rounds]
            ratios = {"ratio": median(wall), "least": min(wall), "most": max(wall), "processor": median(processor)}
            found.append(
                asdict(comparison) | {"mine": mine, "theirs": theirs} | ratios | _met(comparison, ratios["ratio"])
            )
    return found


def memory_ratios(peaks: dict[str, int], medians: Round) -> list[Figures]:
    """Ratios of peaks."""
    found = []
    for comparison in MEMORY_COMPARISONS:
        for mine, theirs in pairs(comparison, medians):
            ratio = peaks[mine] / peaks[theirs]
            found.append(
                asdict(comparison) | {"mine": mine, "theirs": theirs, "ratio": ratio} | _met(comparison, ratio)
            )
    return found


def _met(comparison: Comparison, ratio: float) -> dict[str, bool | None]:
    return {"met": None if comparison.bar is None else ratio <= comparison.bar}


def measured(options: argparse.Namespace) -> Figures:
    """All rounds, peaks and ratios."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        texts = prepare(options.corpus, options.text_key, folder)
        needed = (options.warm_up + options.steps) * BATCH
        if texts < needed:
            raise SystemExit(f"{options.corpus}: {texts:,} distinct texts, the steps need {needed:,}; lower --steps")
        length = Student.load(StudentConfig(str(options.model))).max_length
        tasks = [
            Task(one, options.model, folder, length, options.steps, options.warm_up) for one in contenders(options.only)
        ]
        rounds = []
        for number, one in enumerate(in_rounds(tasks, options.rounds), start=1):
            rounds.append(one)
            line = ", ".join(f"{name} {1e3 * of['seconds']:.0f} ms" for name, of in one.items())
            print(f"round {number}: {line}", flush=True)
        process_peaks = list(peaks_in_new_processes(tasks, options.rounds))
    medians = summary(rounds)
    peaks = {name: int(median(one[name] for one in process_peaks)) for name in medians}
    return {
        "model": options.model.name,
        "texts": texts,
        "batch": BATCH,
        "width": WIDTH,
        "threads": torch.get_num_threads(),
        "steps": options.steps,
        "rounds": rounds,
        "peaks": process_peaks,
        "contenders": {name: of | {"peak_bytes": peaks[name]} for name, of in medians.items()},
        "step": step_ratios(rounds),
        "memory": memory_ratios(peaks, medians),
    }


def show(found: Figures) -> None:
    print(
        f"{found['model']}, {found['texts']:,} distinct texts, batches of {found['batch']}, targets "
        f"{found['width']} wide, {found['threads']} threads, {len(found['rounds'])} rounds of {found['steps']} steps"
    )
    print(f"{'':18} {'ms/step':>10} {'CPU ms':>13} {'peak MB':>9}")
    for name, of in found["contenders"].items():
        print(f"{name:18} {1e3 * of['seconds']:10.0f} {1e3 * of['processor']:13.0f} {of['peak_bytes'] / 1e6:9,.0f}")
    for one in found["step"]:
        print(
            f"step, {one['what']}: {one['mine']} / {one['theirs']} {one['ratio']:.2f} ({one['least']:.2f} to "
            f"{one['most']:.2f}), CPU time {one['processor']:.2f}{verdict(one)}"
        )
    for one in found["memory"]:
        print(f"peak memory, {one['what']}: {one['mine']} / {one['theirs']} {one['ratio']:.2f}{verdict(one)}")


def verdict(answer: Figures) -> str:
    if answer["bar"] is None:
        return ""
    return f"; bar {answer['bar']:.2f}: {'met' if answer['met'] else 'missed'}"


def main(arguments: list[str] | None = None) -> None:
    options = _arguments(arguments)
    quiet()
    found = measured(options)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))
    show(found)


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a sentence-transformers folder, mean-pooled")
    parser.add_argument("--corpus", type=Path, required=True, help="a CSV file")
    parser.add_argument("--text-key", default="text", help="its column")
    parser.add_argument("--steps", type=int, default=STEPS, help="timed ones of a contender in a round")
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="steps before them")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", type=lambda names: tuple(names.split(",")), help=f"of {','.join(METHODS)}")
    parser.add_argument("--quick", action="store_true", help=f"one round of {CYCLE} steps")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.warm_up, options.rounds = CYCLE, CYCLE, 1
    if options.steps < CYCLE or options.steps % CYCLE or options.warm_up < 0 or options.rounds < 1:
        parser.error(f"--steps goes in cycles of {CYCLE}, and there is at least one of them and one round")
    unknown = sorted(set(options.only or ()) - set(METHODS))
    if unknown:
        parser.error(f"--only {unknown[0]}: expected some of {', '.join(METHODS)}")
    if torch.cuda.is_available():
        parser.error("it compares steps on a processor; hide the GPU with CUDA_VISIBLE_DEVICES=")
    if (pooling := student_shape(StudentConfig(str(options.model))).pooling) != "mean":
        parser.error(f"--model is pooled by {pooling}; the paper's loop supports mean pooling only")
    return options


if __name__ == "__main__":
    main()
