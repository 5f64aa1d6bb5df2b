"""All methods in turns, round by round, and what the rounds say together."""

import gc
import multiprocessing
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from statistics import median
from typing import Any

import numpy as np
import torch

from distill.bench.beds import Bed, beds
from distill.bench.settings import BASELINE, ONLINE, BenchSettings, Method
from distill.bench.turn import PARTS, Turn, take_turn
from distill.config import RunConfig, resolve_precision
from distill.errors import ConfigError
from distill.training.measurement import DATA, StepTime, cycle_means
from teacher_cache.errors import KnownError

LIBRARIES = ("teacher-cache", "torch", "transformers")
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Progress:
    """How far a bench is; handed to the caller's callback before every turn."""

    method: str
    lengths: int | str
    done: int
    turns: int


@dataclass
class Row:
    """A method on one set of texts.

    Attributes:
        turns: one a round.
        cycle: steps whose mean is a figure, the same for all rows of a table.
        alone: its turn in a process of its own, for memory.
        failed: why it could not be measured; "" where it was.
    """

    method: Method
    config: RunConfig | None
    turns: list[Turn] = field(default_factory=list)
    cycle: int = 1
    alone: Turn | None = None
    failed: str = ""


@dataclass(frozen=True)
class BenchResult:
    """What was measured where; `to_json` has the names that scripts rely on.

    Attributes:
        device: name of the GPU, or the processor with its threads.
        cycle: successive steps whose mean is one figure, that medians and quantiles are taken of.
        tables: one for each of the lengths: `lengths`, `tokens` and `positions` a batch, and `rows`.
    """

    settings: dict[str, Any]
    device: str
    precision: str
    baseline: str
    cycle: int
    versions: dict[str, str]
    tables: list[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        return {"kind": "bench", **asdict(self)}


def bench(settings: BenchSettings, *, report: Callable[[Progress], None] = lambda progress: None) -> BenchResult:
    """Measure every method on every set of texts.

    In each round every method is made anew and takes its steps, one method after the other, on the very same
    batches; each round begins with another method. One method is in memory at a time.

    Sharpness that has no ascent at some steps makes every figure the mean over a cycle of steps
    (`BenchSettings.cycle`), in all rows, so that they are means over the same batches; timed steps are rounded up to
    whole cycles.

    Raises:
        KnownError: settings, cache, student or teacher that cannot be used, or not one method that can be measured.
    """
    settings.check()
    cycle = settings.cycle()
    settings = replace(settings, steps=-(-settings.steps // cycle) * cycle)
    methods, base = settings.rows(), settings.run_config()
    precision = resolve_precision(settings.precision)
    if settings.memory_cap is not None:
        _cap(settings.memory_cap)
    alone = settings.alone and not torch.cuda.is_available()
    turns = len(methods) * len(settings.lengths) * (settings.rounds + alone)
    names = [method.name for method in methods]
    baseline = BASELINE if BASELINE in names else names[0]
    tables, done, started = [], 0, time.monotonic()
    with beds(settings) as made, _libraries_left_alone():
        for bed in made:
            rows = [_row(method, base, bed, cycle) for method in methods]
            for turn, row in _order(rows, settings.rounds, alone):
                report(Progress(row.method.name, bed.lengths, done, turns))
                done += 1
                if turn and _is_over(started, settings.minutes):  # never in round 0
                    break
                if not row.failed and row.config is not None:
                    _measure(row, turn, row.config, settings)
            tables.append(_table(rows, bed, baseline))
    failures = [row["failed"] for table in tables for row in table["rows"]]
    if all(failures):
        raise ConfigError(f"no method could be measured; the first, {names[0]}: {failures[0]}")
    versions = {"python": platform.python_version()} | {name: version(name) for name in LIBRARIES}
    return BenchResult(settings.to_json(), _device(), precision, baseline, cycle, versions, tables)


@contextmanager
def _libraries_left_alone() -> Iterator[None]:
    """What was there before the turns is not searched for garbage between them: that takes most of a second."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _is_over(started: float, minutes: float | None) -> bool:
    return minutes is not None and time.monotonic() - started > 60 * minutes


def _row(method: Method, base: RunConfig, bed: Bed, cycle: int) -> Row:
    try:
        config = bed.configured(method.configured(base), method.teacher == ONLINE)
        config.check()
    except KnownError as error:
        return Row(method, None, failed=_line(error))
    return Row(method, config, cycle=cycle)


def _order(rows: Sequence[Row], rounds: int, alone: bool) -> Iterator[tuple[int | None, Row]]:
    """Rounds of rows; None is the turn in a process of its own."""
    if alone:
        yield from ((None, row) for row in rows)
    for number in range(rounds):
        first = number * len(rows) // rounds
        yield from ((number, row) for row in (*rows[first:], *rows[:first]))


def _measure(row: Row, turn: int | None, config: RunConfig, settings: BenchSettings) -> None:
    try:
        if turn is None:
            row.alone = _in_own_process(config, settings.warm_up)
        else:
            row.turns.append(take_turn(config, settings.warm_up))
    except BrokenProcessPool:  # a RuntimeError too
        row.failed = "its process was killed: out of memory?"
    except (KnownError, RuntimeError, MemoryError) as error:
        row.failed = _out_of_memory(error, settings) or _line(error)


def _in_own_process(config: RunConfig, warm_up: int) -> Turn:
    """A turn whose process has held nothing else; a server that has the libraries forks it."""
    kind = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(kind)
    if kind == "forkserver":
        context.set_forkserver_preload(["distill.bench.turn"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_turn_of_child, config, warm_up, torch.get_num_threads()).result()


def _turn_of_child(config: RunConfig, warm_up: int, threads: int) -> Turn:
    torch.set_num_threads(threads)
    return take_turn(config, warm_up)


def _out_of_memory(error: BaseException, settings: BenchSettings) -> str:
    """What to say where memory was the reason, in whatever it was wrapped; "" where it was not."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch.OutOfMemoryError | MemoryError):
            cap = settings.memory_cap
            return OUT_OF_MEMORY + ("" if cap is None else f" at {cap / 1e9:.1f} GB")
        cause = cause.__cause__ or cause.__context__
    return ""


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _cap(cap: int) -> None:
    if not torch.cuda.is_available():
        raise ConfigError("--memory-cap caps a CUDA GPU, and there is none here; leave it out")
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total))


def _device() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"cpu, {torch.get_num_threads()} threads"


def _table(rows: Sequence[Row], bed: Bed, baseline: str) -> dict[str, Any]:
    known = {row.method.name: row for row in rows}
    steps = next((turn.steps for row in rows for turn in row.turns), ())
    return {
        "lengths": bed.lengths,
        "tokens": float(np.mean([step.tokens for step in steps])) if steps else None,
        "positions": float(np.mean([step.positions for step in steps])) if steps else None,
        "rows": [_summary(row, known[baseline]) for row in rows],
    }


def _summary(row: Row, baseline: Row) -> dict[str, Any]:
    """Medians over the cycles of all timed steps; a ratio is the median over the rounds of their medians' ratios."""
    method = row.method
    told: dict[str, Any] = {"method": method.name, "teacher": method.teacher, "failed": row.failed or None}
    if row.failed or not row.turns:
        return told
    steps = [step for turn in row.turns for step in turn.steps]

    def figures(seconds: Callable[[StepTime], float]) -> list[float]:
        return cycle_means(map(seconds, steps), row.cycle)

    own, whole = figures(_own), figures(FIGURES["with_data"])
    memory = _memory(row)
    return told | {
        "step_ms_p50": 1e3 * median(own),
        "step_ms_p90": 1e3 * float(np.quantile(own, 0.9)),
        "with_data_ms_p50": 1e3 * median(whole),
        "with_data_ms_p90": 1e3 * float(np.quantile(whole, 0.9)),
        "processor_ms_p50": None if torch.cuda.is_available() else 1e3 * median(figures(FIGURES["processor"])),
        "parts_ms": {part: 1e3 * median(figures(_part(part))) for part in PARTS},
        "steps": len(steps),
        "rounds": len(row.turns),
        "tokens_per_second": sum(step.tokens for step in steps) / sum(step.seconds for step in steps),
        "peak_bytes": None if memory is None else memory.peak,
        "loaded_bytes": None if memory is None else memory.loaded,
        "weights_bytes": row.turns[0].weights,
        "cache_bytes_a_sample": row.turns[0].stored,
        "teacher_bytes": row.turns[0].teacher,
        "ratio": _ratios(row, baseline),
    }


def _own(step: StepTime) -> float:
    """A step without the wait for its batch, with what an online teacher takes."""
    return step.seconds - step.parts[DATA]


def _part(name: str) -> Callable[[StepTime], float]:
    return lambda step: step.parts[name]


# What has a ratio to the baseline, in seconds of a step.
FIGURES: dict[str, Callable[[StepTime], float]] = {
    "step": _own,
    "with_data": lambda step: step.seconds,
    "processor": lambda step: step.processor_seconds,
}


def _memory(row: Row) -> Turn | None:
    """The turn that tells a row's memory: on a processor, that of a process of its own."""
    if row.alone is not None or not torch.cuda.is_available():
        return row.alone
    return max(row.turns, key=lambda turn: turn.peak, default=None)


def _ratios(row: Row, baseline: Row) -> dict[str, float] | None:
    """To the baseline, of the same round; least and most tell how the rounds differ."""
    if baseline.failed or not baseline.turns:
        return None
    ratios: dict[str, float] = {}
    for name, seconds in FIGURES.items():
        rounds = [
            median(cycle_means(map(seconds, mine.steps), row.cycle))
            / median(cycle_means(map(seconds, its.steps), row.cycle))
            for mine, its in zip(row.turns, baseline.turns, strict=False)
        ]
        ratios |= {name: median(rounds), f"{name}_least": min(rounds), f"{name}_most": max(rounds)}
    mine, its = _memory(row), _memory(baseline)
    return ratios | ({"memory": mine.peak / its.peak} if mine is not None and its is not None and its.peak else {})
