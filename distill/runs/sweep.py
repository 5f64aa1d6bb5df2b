"""Sweeps: many runs over one cache, from a list of settings, a grid, or a grid over a list.

All runs are resolved and checked before the first one starts. Each is an ordinary run in its own process. Running the
same sweep again skips finished runs, resumes interrupted ones and retries failed ones.
"""

import itertools
import json
import math
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from distill.config import RunConfig
from distill.config.reading import build_config, put, read_yaml
from distill.errors import ConfigError
from distill.report.columns import short_keys
from distill.report.comparison import Comparison, compare, read_row
from distill.report.formats import setting
from distill.run_folder import is_finished
from distill.runs.launch import Job, launcher
from teacher_cache.building.workers import parse_workers
from teacher_cache.errors import KnownError

LONGEST_NAME = 100
SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]*")


@dataclass(frozen=True)
class Entry:
    """One run of a sweep's list; `set` maps dotted keys to values."""

    name: str = ""
    set: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SearchConfig:
    """Successive halving (arXiv 1502.07943): all candidates are trained briefly, the best of them for longer.

    Attributes:
        stages: for each stage the share of a candidate's steps to train it for; increasing, and the last is 1.
        keep: share of a stage's candidates that go on, rounded down, at least one.
        seeds: the finalists are trained with each; none keeps their runs of the last stage.
        samples: candidates to draw at random from all; None takes all.
        sample_seed: of this draw.
    """

    stages: tuple[float, ...] = (0.1, 0.3, 1.0)
    keep: float = 0.34
    seeds: tuple[int, ...] = ()
    samples: int | None = None
    sample_seed: int = 0

    def check(self) -> None:
        """Check the values.

        Raises:
            ConfigError: a value is out of range.
        """
        stages = self.stages
        if not stages or sorted({*stages}) != list(stages) or not stages[0] > 0 or stages[-1] != 1:
            raise ConfigError(f"search.stages is {[*stages]}; expected increasing shares above 0, the last one 1")
        if not 0 < self.keep < 1:
            raise ConfigError(f"search.keep is {self.keep:g}; expected more than 0 and less than 1")
        if len({*self.seeds}) < len(self.seeds) or min(self.seeds, default=0) < 0:
            raise ConfigError(f"search.seeds is {[*self.seeds]}; expected different numbers of at least 0")
        if self.samples is not None and self.samples < 1:
            raise ConfigError(f"search.samples is {self.samples}; expected at least 1, or null for all candidates")

    def kept(self, candidates: int) -> int:
        """How many of a stage's candidates go on."""
        return max(1, math.floor(self.keep * candidates + 1e-9))  # 0.29 * 100 is 28.999...


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep."""

    name: str
    config: RunConfig

    @property
    def folder(self) -> Path:
        return Path(self.config.output_dir)

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.name}.log")


@dataclass(frozen=True)
class SweepConfig:
    """The settings of a sweep's YAML file.

    Attributes:
        output_dir: folder of the run folders, which are named after the runs.
        base: the run configuration that every run starts from.
        grid: dotted key -> list of values; every combination is a run.
        runs: a list of runs; the grid is applied to each.
        data: folder of the tasks' files; None scores no students.
        tasks: names of tasks; None is all nine.
        dtype: precision of the scoring: "auto", "fp32" or "bf16".
        parallel: runs at once with `workers: local`.
        workers: "local", "ray" or "ray:N" for N runs at once.
        gpus_per_run: with Ray, the share of one GPU per run.
        search: makes the runs candidates, of which `distill.runs.halving.search` chooses one on validation files.
    """

    output_dir: str = ""
    base: Mapping[str, Any] = field(default_factory=dict)
    grid: Mapping[str, Any] = field(default_factory=dict)
    runs: tuple[Entry, ...] = ()
    data: str | None = None
    tasks: tuple[str, ...] | None = None
    dtype: str = "auto"
    parallel: int = 1
    workers: str = "local"
    gpus_per_run: float | None = None
    search: SearchConfig | None = None

    @classmethod
    def load(cls, path: str | Path) -> "SweepConfig":
        """Read a YAML file.

        Raises:
            ConfigError: the file cannot be read, a key is unknown or a value has the wrong type.
        """
        values = read_yaml(Path(path))
        runs = values.pop("runs", None) or []
        if not isinstance(runs, list):
            raise ConfigError(f"runs is {runs!r}; expected a list of runs, each with name and set")
        search = values.pop("search", None)
        config: SweepConfig = build_config(cls, values, "")
        entries = tuple(build_config(Entry, entry, f"runs[{place}].") for place, entry in enumerate(runs))
        chosen = None if search is None else build_config(SearchConfig, search, "search.")
        return replace(config, runs=entries, search=chosen)

    def plan(self) -> list[PlannedRun]:
        """All runs, resolved and checked, in the order of the file.

        Raises:
            KnownError: an invalid setting, two equal runs, or a missing cache, student or task file.
        """
        self._check()
        points = [(entry, point) for entry in self.runs or (Entry(),) for point in self._points()]
        search = self.search
        if search is not None and search.samples is not None and search.samples < len(points):
            drawn = random.Random(search.sample_seed).sample(range(len(points)), search.samples)
            points = [points[place] for place in sorted(drawn)]
        names = _names([(entry.name, {} if entry.name else entry.set, point) for entry, point in points])
        planned = [
            PlannedRun(name, self._resolved(name, dict(entry.set) | point))
            for name, (entry, point) in zip(names, points, strict=True)
        ]
        check_each(planned)
        if search is not None:
            _check_candidates(planned)
        if self.data is not None:
            from distill.evaluation.encoders import resolved_dtype
            from distill.evaluation.evaluator import nine_tasks

            resolved_dtype(self.dtype)
            nine_tasks(Path(self.data), self.tasks)
        return planned

    def _check(self) -> None:
        if not self.output_dir:
            raise ConfigError("output_dir is not set; set it to a folder for the run folders")
        if not self.grid and not self.runs:
            raise ConfigError("nothing to run: give a grid, a list of runs, or both")
        if self.search is not None:
            self.search.check()
        parse_workers(self.workers)
        if self.parallel < 1:
            raise ConfigError(f"parallel is {self.parallel}; expected at least 1")
        if self.parallel > 1 and self.workers != "local":
            raise ConfigError(f"parallel is for workers: local; write workers: ray:{self.parallel} for as many on Ray")
        if self.gpus_per_run is not None:
            if self.workers == "local":
                raise ConfigError("gpus_per_run is for workers: ray; with workers: local runs share GPUs by parallel")
            if not 0 < self.gpus_per_run <= 1:
                raise ConfigError(f"gpus_per_run is {self.gpus_per_run:g}; expected more than 0 and at most 1")
        if self.data is None and self.tasks is not None:
            raise ConfigError("tasks are set, but no data to score on; set data, or leave tasks out")
        twice = [name for name, count in Counter(entry.name for entry in self.runs).items() if name and count > 1]
        if twice:
            raise ConfigError(f"two runs are named {twice[0]!r}; give each its own name")
        for entry in self.runs:
            for key in sorted(entry.set.keys() & self.grid.keys()):
                raise ConfigError(f"run {entry.name or 'without a name'} and the grid both set {key}; leave one out")
        for key, values in self.grid.items():
            if not isinstance(values, list) or not values:
                raise ConfigError(f"grid.{key} is {values!r}; expected a list of values")

    def _points(self) -> Iterator[dict[str, Any]]:
        for values in itertools.product(*self.grid.values()):
            yield dict(zip(self.grid, values, strict=True))

    def _resolved(self, name: str, changes: Mapping[str, Any]) -> RunConfig:
        values = deepcopy(dict(self.base))
        try:
            if "output_dir" in values or "output_dir" in changes:
                raise ConfigError("the sweep sets output_dir; leave it out")
            for key, value in changes.items():
                put(values, key.replace("-", "_"), deepcopy(value))
            config = RunConfig.from_values(values)
            config = replace(config, output_dir=str(Path(self.output_dir) / name))
            config.check()
            if not config.cache:
                raise ConfigError("cache is not set; set it in base")
        except KnownError as error:
            raise ConfigError(f"run {name}: {error}") from error
        return config


@dataclass(frozen=True)
class SweepProgress:
    """The number of ended runs, of all runs, and the names of those that are running."""

    done: int
    total: int
    running: tuple[str, ...]


@dataclass(frozen=True)
class SweepResult:
    """The result of a sweep.

    Attributes:
        finished_before: number of runs that were finished, and scored, before this call.
        failed: name of a failed run -> its error in one line.
        seconds: of this call.
    """

    output_dir: str
    finished_before: int
    failed: Mapping[str, str]
    seconds: float
    comparison: Comparison

    def to_json(self) -> dict[str, Any]:
        return {
            "output_dir": self.output_dir,
            "finished_before": self.finished_before,
            "failed": dict(self.failed),
            "seconds": self.seconds,
            **self.comparison.to_json(),
        }


def sweep(
    config: SweepConfig,
    *,
    announce: Callable[[str], None] = lambda line: None,
    report: Callable[[SweepProgress], None] = lambda progress: None,
) -> SweepResult:
    """Train all unfinished runs and compare all runs. A failed run does not stop the others.

    Args:
        announce: called with a line for every run that ends.
        report: called when a run starts or ends.

    Raises:
        KnownError: an error found before the first run starts.
    """
    if config.search is not None:
        raise ConfigError("search is set; call distill.runs.halving.search, or leave it out to train every run")
    start = time.monotonic()
    planned = config.plan()
    finished_before, failed = train_all(config, planned, data=config.data, announce=announce, report=report)
    rows = [read_row(one.folder, one.name, one.config, failed.get(one.name)) for one in planned]
    return SweepResult(
        output_dir=config.output_dir,
        finished_before=finished_before,
        failed=failed,
        seconds=round(time.monotonic() - start, 3),
        comparison=compare(rows),
    )


def train_all(
    config: SweepConfig,
    planned: Sequence[PlannedRun],
    *,
    data: str | None,
    announce: Callable[[str], None] = lambda line: None,
    report: Callable[[SweepProgress], None] = lambda progress: None,
) -> tuple[int, dict[str, str]]:
    """Train the unfinished ones of some runs and, with `data`, score all.

    Args:
        config: the launcher, the names of the tasks and the precision of the scoring.

    Returns:
        The number of runs that were finished, and scored, before, and the error of each failed run by name.
    """
    waiting = [one for one in planned if not _is_done(one, data, config.tasks, config.dtype)]
    finished_before = len(planned) - len(waiting)
    if finished_before:
        announce(f"{finished_before} of {len(planned)} runs are already finished")
    failed: dict[str, str] = {}
    if waiting:
        since: dict[str, float] = {}
        done = finished_before
        scoring = {"data": data, "tasks": config.tasks, "dtype": config.dtype}
        jobs = [Job(one.name, {"config": asdict(one.config), **scoring}, one.log) for one in waiting]
        with (
            launcher(config.workers, config.parallel, config.gpus_per_run) as started,
            closing(started.run(jobs)) as events,
        ):
            report(SweepProgress(done, len(planned), ()))
            for event in events:
                if event.ended:
                    seconds = time.monotonic() - since.pop(event.name)
                    done += 1
                    if event.error is not None:
                        failed[event.name] = event.error
                    announce(
                        f"{event.name} {f'failed: {event.error}' if event.error else f'finished in {seconds:.0f} s'}"
                    )
                else:
                    since[event.name] = time.monotonic()
                report(SweepProgress(done, len(planned), tuple(since)))
    return finished_before, failed


def _is_done(planned: PlannedRun, data: str | None, tasks: Sequence[str] | None, dtype: str) -> bool:
    """Whether the folder has this run, finished and, with `data`, scored."""
    if not is_finished(planned.folder):
        return False
    from distill.evaluation.scores import saved_scores
    from distill.runs.run import run

    run(planned.config)  # compares settings and digests; a finished run is not trained again
    return data is None or saved_scores(planned.folder, Path(data), tasks, dtype) is not None


def check_each(planned: Sequence[PlannedRun]) -> None:
    """Check each run, and that no two are equal.

    Raises:
        ConfigError: a run cannot be trained, or two have equal settings.
    """
    from distill.runs.run import check_run

    names: dict[str, str] = {}
    for one in planned:
        settings = replace(one.config, output_dir="").to_yaml()
        if settings in names:
            raise ConfigError(f"runs {names[settings]} and {one.name} have equal settings; remove one")
        names[settings] = one.name
    for one in planned:
        try:
            check_run(one.config)
        except KnownError as error:
            raise ConfigError(f"run {one.name}: {error}") from error


def _check_candidates(planned: Sequence[PlannedRun]) -> None:
    """Check that the runs can be ranked by the same validation scores."""
    first = planned[0]
    for one in planned:
        if not one.config.evaluation.data:
            raise ConfigError(
                "a search ranks its candidates on validation files: set evaluation.data in base to their folder"
            )
        if one.config.evaluation != first.config.evaluation:
            raise ConfigError(
                f"runs {first.name} and {one.name} differ in evaluation; candidates are ranked by the same scores, so "
                "set it in base only"
            )
        if one.config.training.seed != first.config.training.seed:
            raise ConfigError(
                f"runs {first.name} and {one.name} differ in training.seed, so a search would choose a lucky seed; "
                "leave it out and set search.seeds"
            )


def _names(points: Sequence[tuple[str, Mapping[str, Any], Mapping[str, Any]]]) -> list[str]:
    """A folder name for each `(given name, settings of the list, point of the grid)`."""
    names: list[str] = []
    for given, chosen, point in points:
        if given and not SAFE.fullmatch(given):
            raise ConfigError(
                f"run {given!r} is not a valid folder name; use letters, digits and . _ = + -, a letter or digit first"
            )
        settings = {**chosen, **point}
        parts = [given] if given else []
        for key, short in zip(settings, short_keys(list(settings)), strict=True):
            label = "" if short.endswith((".name", ".model")) else f"{_safe(short)}="
            parts.append(label + _safe(settings[key]))
        names.append("-".join(parts))
    twice = {name for name, count in Counter(names).items() if count > 1}
    return [
        _with_digest(name, {"name": given, **chosen, **point}) if name in twice or len(name) > LONGEST_NAME else name
        for name, (given, chosen, point) in zip(names, points, strict=True)
    ]


def _safe(value: Any) -> str:
    text = Path(value).name if isinstance(value, str) and "/" in value else setting(value)
    return re.sub(r"[^A-Za-z0-9._=+-]+", "_", text).strip("_.") or "none"


def _with_digest(name: str, settings: Mapping[str, Any]) -> str:
    digest = blake2b(json.dumps(settings, sort_keys=True, default=str).encode(), digest_size=4).hexdigest()
    return f"{name[:LONGEST_NAME]}-{digest}"
