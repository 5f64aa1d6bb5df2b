"""Measurements of all methods, interleaved in rounds, and their summary."""

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

from distill.bench.settings import BASELINE, ONLINE, BenchSettings, Method
from distill.bench.timed_run import PARTS, Measurement, measure_run
from distill.bench.workloads import Workload, workloads
from distill.config import RunConfig, resolve_precision
from distill.errors import ConfigError
from distill.training.measurement import DATA, StepTime, cycle_means
from teacher_cache.errors import KnownError

LIBRARIES = ("teacher-cache", "torch", "transformers")
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Progress:
    """Progress of a bench, passed to the caller's callback before every measurement."""

    method: str
    lengths: int | str
    done: int
    total: int


@dataclass
class Row:
    """A method on one workload.

    Attributes:
        measurements: one per round.
        cycle: steps that every figure is averaged over, the same for all rows of a table.
        own_process: the measurement in a new process, for memory.
        failed: why it could not be measured, or "".
    """

    method: Method
    config: RunConfig | None
    measurements: list[Measurement] = field(default_factory=list)
    cycle: int = 1
    own_process: Measurement | None = None
    failed: str = ""


@dataclass(frozen=True)
class BenchResult:
    """All figures of a bench.

    Attributes:
        device: name of the GPU, or the CPU with its threads.
        cycle: successive steps that are averaged before medians and quantiles are taken.
        tables: one for each of the lengths: `lengths`, `tokens` and `positions` per batch, and `rows`.
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
    """Measure every method on every workload.

    In each round every method is built anew and takes its steps, one method after the other, on the same batches;
    each round starts with another method. One method is in memory at a time.

    If some sharpness has no ascent at some steps, every figure of all rows is the mean over a cycle of steps
    (`BenchSettings.cycle`), so that all are means over the same batches; timed steps are rounded up to whole cycles.

    Raises:
        KnownError: unusable settings, cache, student or teacher, or no method that can be measured.
    """
    settings.check()
    cycle = settings.cycle()
    settings = replace(settings, steps=-(-settings.steps // cycle) * cycle)
    methods, base = settings.rows(), settings.run_config()
    precision = resolve_precision(settings.precision)
    if settings.memory_cap is not None:
        _cap_gpu_memory(settings.memory_cap)
    own_process = settings.own_process and not torch.cuda.is_available()
    total = len(methods) * len(settings.lengths) * (settings.rounds + own_process)
    names = [method.name for method in methods]
    baseline = BASELINE if BASELINE in names else names[0]
    tables, done, start = [], 0, time.monotonic()
    with workloads(settings) as created, _gc_frozen():
        for workload in created:
            rows = [_row(method, base, workload, cycle) for method in methods]
            for number, row in _schedule(rows, settings.rounds, own_process):
                report(Progress(row.method.name, workload.lengths, done, total))
                done += 1
                # The first round is always completed.
                if number and settings.minutes is not None and time.monotonic() - start > 60 * settings.minutes:
                    break
                if not row.failed and row.config is not None:
                    _measure(row, number, row.config, settings)
            tables.append(_table(rows, workload, baseline))
    failures = [row["failed"] for table in tables for row in table["rows"]]
    if all(failures):
        raise ConfigError(f"no method could be measured; the first, {names[0]}: {failures[0]}")
    versions = {"python": platform.python_version()} | {name: version(name) for name in LIBRARIES}
    return BenchResult(settings.to_json(), _device(), precision, baseline, cycle, versions, tables)


@contextmanager
def _gc_frozen() -> Iterator[None]:
    """Exclude existing objects from garbage collection between measurements, which would take most of a second."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _row(method: Method, base: RunConfig, workload: Workload, cycle: int) -> Row:
    try:
        config = workload.configure(method.configure(base), method.teacher == ONLINE)
        config.check()
    except KnownError as error:
        return Row(method, None, failed=_one_line(error))
    return Row(method, config, cycle=cycle)


def _schedule(rows: Sequence[Row], rounds: int, own_process: bool) -> Iterator[tuple[int | None, Row]]:
    """The round and row of each measurement; the round is None for those in a new process."""
    if own_process:
        yield from ((None, row) for row in rows)
    for number in range(rounds):
        first = number * len(rows) // rounds
        yield from ((number, row) for row in (*rows[first:], *rows[:first]))


def _measure(row: Row, number: int | None, config: RunConfig, settings: BenchSettings) -> None:
    try:
        if number is None:
            row.own_process = _measure_in_new_process(config, settings.warm_up)
        else:
            row.measurements.append(measure_run(config, settings.warm_up))
    except BrokenProcessPool:  # a RuntimeError too
        row.failed = "its process was killed: out of memory?"
    except (KnownError, RuntimeError, MemoryError) as error:
        row.failed = _out_of_memory(error, settings) or _one_line(error)


def _measure_in_new_process(config: RunConfig, warm_up: int) -> Measurement:
    """Measure in a process without other allocations, forked from a server that has imported the libraries."""
    kind = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(kind)
    if kind == "forkserver":
        context.set_forkserver_preload(["distill.bench.timed_run"])
    with ProcessPoolExecutor(
        1, mp_context=context, initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
    ) as pool:
        return pool.submit(measure_run, config, warm_up).result()


def _out_of_memory(error: BaseException, settings: BenchSettings) -> str:
    """The message if memory ran out, also as the cause of another error; otherwise ""."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch.OutOfMemoryError | MemoryError):
            cap = settings.memory_cap
            return OUT_OF_MEMORY + ("" if cap is None else f" at {cap / 1e9:.1f} GB")
        cause = cause.__cause__ or cause.__context__
    return ""


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _cap_gpu_memory(cap: int) -> None:
    if not torch.cuda.is_available():
        raise ConfigError("`memory_cap` is for a CUDA GPU, and there is none; leave it out")
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total))


def _device() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"cpu, {torch.get_num_threads()} threads"


def _table(rows: Sequence[Row], workload: Workload, baseline: str) -> dict[str, Any]:
    by_name = {row.method.name: row for row in rows}
    steps = next((measured.steps for row in rows for measured in row.measurements), ())
    return {
        "lengths": workload.lengths,
        "tokens": float(np.mean([step.tokens for step in steps])) if steps else None,
        "positions": float(np.mean([step.positions for step in steps])) if steps else None,
        "rows": [_summary(row, by_name[baseline]) for row in rows],
    }


def _summary(row: Row, baseline: Row) -> dict[str, Any]:
    """Figures of a row: medians over the cycles of all timed steps; ratios are medians over the rounds' ratios."""
    method = row.method
    summary: dict[str, Any] = {"method": method.name, "teacher": method.teacher, "failed": row.failed or None}
    if row.failed or not row.measurements:
        return summary
    steps = [step for measured in row.measurements for step in measured.steps]

    def figures(seconds: Callable[[StepTime], float]) -> list[float]:
        return cycle_means(map(seconds, steps), row.cycle)

    own, whole = figures(FIGURES["step"]), figures(FIGURES["with_data"])
    memory = _memory(row)
    return summary | {
        "step_ms_p50": 1e3 * median(own),
        "step_ms_p90": 1e3 * float(np.quantile(own, 0.9)),
        "with_data_ms_p50": 1e3 * median(whole),
        "with_data_ms_p90": 1e3 * float(np.quantile(whole, 0.9)),
        "processor_ms_p50": None if torch.cuda.is_available() else 1e3 * median(figures(FIGURES["processor"])),
        "parts_ms": {
            part: 1e3 * median(cycle_means([step.parts[part] for step in steps], row.cycle)) for part in PARTS
        },
        "steps": len(steps),
        "rounds": len(row.measurements),
        "tokens_per_second": sum(step.tokens for step in steps) / sum(step.seconds for step in steps),
        "peak_bytes": None if memory is None else memory.peak,
        "loaded_bytes": None if memory is None else memory.loaded,
        "weights_bytes": row.measurements[0].weights,
        "cache_bytes_a_sample": row.measurements[0].stored,
        "teacher_bytes": row.measurements[0].teacher,
        "ratio": _ratios(row, baseline),
    }


# Figures with a ratio to the baseline, in seconds of a step.
FIGURES: dict[str, Callable[[StepTime], float]] = {
    # Without the wait for data, with the online teacher.
    "step": lambda step: step.seconds - step.parts[DATA],
    "with_data": lambda step: step.seconds,
    "processor": lambda step: step.processor_seconds,
}


def _memory(row: Row) -> Measurement | None:
    """The measurement of a row's memory: on a CPU the one in a new process."""
    if row.own_process is not None or not torch.cuda.is_available():
        return row.own_process
    return max(row.measurements, key=lambda measured: measured.peak, default=None)


def _ratios(row: Row, baseline: Row) -> dict[str, float] | None:
    """Ratios to the baseline within each round: median, least and most over the rounds."""
    if baseline.failed or not baseline.measurements:
        return None
    ratios: dict[str, float] = {}
    for name, seconds in FIGURES.items():
        medians = [
            [median(cycle_means(map(seconds, measured.steps), row.cycle)) for measured in measurements]
            for measurements in (row.measurements, baseline.measurements)
        ]
        rounds = [own / base for own, base in zip(*medians, strict=False)]
        ratios |= {name: median(rounds), f"{name}_least": min(rounds), f"{name}_most": max(rounds)}
    own, base = _memory(row), _memory(baseline)
    return ratios | ({"memory": own.peak / base.peak} if own is not None and base is not None and base.peak else {})
