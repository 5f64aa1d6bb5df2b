"""Everything that a report shows, out of the records of the runs: nothing is trained, and scored only on request."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from distill.comparison import PLACES, SEED, Comparison, Row, compare, compare_runs, model_size, reference_row
from distill.config import RunConfig
from distill.errors import ConfigError, RunFolderError
from distill.evaluation.evaluator import NINE
from distill.run_folder import ANALYSES, CONFIG, SCORES, is_run_folder, read_record
from teacher_cache.teachers import TeacherOptions, resolve

METRICS = "metrics.jsonl"
FURTHER = "eval-*.json"
TEACHER, BASELINE, MODEL = "teacher", "before training", "model"
# Settings that a report tells apart from the others, in places of their own.
TOLD_ELSEWHERE = (*PLACES, SEED, "space", "corpus", "student.model", "objective.", "sharpness.")
# What a figure's number is, by the beginning of its name; kept with the figures.
UNITS = {
    "tasks.": "points of 100, see the task's metric",
    "average.": "points of 100, mean over tasks",
    "agreement.": "spearman: Spearman's rho, -1 to 1; overlap: share of neighbours, 0 to 1",
    "cost.step_seconds": "seconds an optimiser step; p50 is the median, p90 the ninth decile",
    "cost.data_seconds": "seconds of waiting for a batch, median",
    "cost.peak_memory_bytes": "bytes",
    "cost.steps": "timed optimiser steps",
    "student.bytes": "bytes of the weights on disk",
    "student.parameters": "numbers",
    "share.": "percent of the teacher's score",
}


@dataclass(frozen=True)
class RunRecords:
    """What a run folder holds, as its files say it.

    Attributes:
        group: of the comparison: runs that differ in their seed alone share one.
        record: `run.json`; empty before the run wrote it.
        settings: dotted keys of the configuration that are not the defaults.
        metrics: lines of `metrics.jsonl`, without those of a validation.
        validation: the others: `step`, `epoch`, `validation` (`average` and scores by task), `seconds`.
        scores: `eval.json`; empty where the student was not scored.
        further: by file name, other scores in the folder: `eval-*.json`, as `distill eval -o` writes them.
        analyses: by name, `analyses/NAME.json`.
        disk: bytes of the whole teacher cache and of the space in it, where it is still there.
    """

    name: str
    folder: str
    status: str
    group: str
    error: str | None
    seed: int | None
    record: Mapping[str, Any]
    settings: Mapping[str, Any]
    objective: Mapping[str, Any]
    sharpness: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    validation: Sequence[Mapping[str, Any]]
    scores: Mapping[str, Any]
    further: Mapping[str, Mapping[str, Any]]
    analyses: Mapping[str, Mapping[str, Any]]
    disk: Mapping[str, int] = field(default_factory=dict)

    @property
    def tasks(self) -> dict[str, Mapping[str, Any]]:
        """Of all the scores, by task; those of `eval.json` come first and stand where two files have a task."""
        found: dict[str, Mapping[str, Any]] = {}
        for record in (self.scores, *self.further.values()):
            for name, task in record.get("tasks", {}).items():
                found.setdefault(name, task)
        return found


@dataclass(frozen=True)
class ReportData:
    """What `report.json` holds and the page shows.

    Attributes:
        comparison: every run and reference in groups, with mean and sample standard deviation over seeds.
        tasks: name -> metric and domain, of every task that some model was scored on.
        shares: group -> figure -> percent of the teacher's score that it keeps; empty without a teacher.
        references: group -> "teacher", "before training" or "model", for those that are no runs.
    """

    comparison: Comparison
    runs: tuple[RunRecords, ...]
    tasks: Mapping[str, Mapping[str, str]]
    shares: Mapping[str, Mapping[str, float]]
    references: Mapping[str, str]

    @property
    def analyses(self) -> list[str]:
        """Names of all that some run was asked."""
        return list(dict.fromkeys(name for run in self.runs for name in run.analyses))

    def to_json(self) -> dict[str, Any]:
        return {
            "runs": [asdict(run) for run in self.runs],
            "references": dict(self.references),
            "tasks": {name: dict(task) for name, task in self.tasks.items()},
            "shares": {name: dict(shares) for name, shares in self.shares.items()},
            "comparison": self.comparison.to_json(),
            "units": UNITS,
        }


def report_data(
    paths: Sequence[str | Path],
    *,
    data: Path | None = None,
    tasks: Sequence[str] | None = None,
    dtype: str = "auto",
    baseline: str | None = None,
    teacher: str | None = None,
    announce: Callable[[str], None] = lambda line: None,
) -> ReportData:
    """Read run folders, folders of these, and models that are no runs.

    A model, a baseline or a teacher may also be the JSON file of its scores, as `distill eval -o` writes it.

    Args:
        data: folder of the tasks' files; what was not scored on them is, and runs keep it.
        baseline: the student before training.
        teacher: whose scores the others are shares of.

    Raises:
        RunFolderError: a path that is neither run, folder of runs, model nor file of scores.
        ConfigError: a model to score, and no data.
        EvaluationError, TeacherError: a file or a model is missing.
    """
    runs = [Path(path) for path in paths if _holds_runs(Path(path))]
    models = [str(path) for path in paths if not _holds_runs(Path(path))]
    asked = [(baseline, BASELINE), (teacher, TEACHER), *((model, MODEL) for model in models)]
    kept = [_kept_reference(Path(model), role) for model, role in asked if model is not None and _is_file(model)]
    unscored = [model for model in models if not _is_file(model)]
    if unscored and data is None:
        raise ConfigError(f"{unscored[0]} is no run: it is scored on tasks; say with --data where their files are")
    comparison = compare_runs(
        runs,
        data=data,
        tasks=tasks,
        dtype=dtype,
        baseline=None if baseline is None or _is_file(baseline) else baseline,
        teacher=None if teacher is None or _is_file(teacher) else teacher,
        announce=announce,
    )
    if kept or unscored:
        scored = [_scored_reference(model, data, tasks, dtype, announce) for model in unscored if data is not None]
        comparison = _with_references(comparison, [*kept, *scored])
    records = tuple(
        _records(row, group.name) for group in comparison.groups for row in group.rows if row.status != "reference"
    )
    references = {
        group.name: group.name.partition(": ")[0] for group in comparison.groups if group.rows[0].status == "reference"
    }
    return ReportData(comparison, records, _tasks(comparison, records), _shares(comparison, references), references)


def _holds_runs(path: Path) -> bool:
    return is_run_folder(path) or any(path.glob(f"*/{CONFIG}"))


def _is_file(model: str) -> bool:
    return Path(model).suffix == ".json" and Path(model).is_file()


def _kept_reference(path: Path, role: str) -> Row:
    scores = read_record(path.parent, path.name) or {}
    if not isinstance(scores.get("tasks"), dict):
        raise RunFolderError(f"{path} holds no scores (no key 'tasks'); name what `distill eval -o` wrote")
    return reference_row(f"{role}: {Path(str(scores.get('model', path.stem))).name}", str(path), scores, {})


def _scored_reference(
    model: str, data: Path, tasks: Sequence[str] | None, dtype: str, announce: Callable[[str], None]
) -> Row:
    from distill.evaluation.scores import score

    announce(f"scoring {model}")
    found = resolve(TeacherOptions(model=model)).folder
    scores = score(TeacherOptions(model=model), data, tasks, dtype, announce)
    size = {} if found is None else model_size(found)
    return reference_row(f"{MODEL}: {Path(model).name}", str(found or model), scores, size)


def _with_references(comparison: Comparison, rows: Sequence[Row]) -> Comparison:
    """The same with more rows before it, and with what else the first comparison warned of."""
    said = compare(comparison.rows).warnings
    wider = compare([*rows, *comparison.rows])
    return replace(wider, warnings=(*wider.warnings, *(line for line in comparison.warnings if line not in said)))


def _records(row: Row, group: str) -> RunRecords:
    folder, config = Path(row.folder), row.config or RunConfig()
    record = read_record(folder) or {}
    differing = config.difference(RunConfig())
    lines = _lines(folder / METRICS)
    return RunRecords(
        name=row.name,
        folder=row.folder,
        status=row.status,
        group=group,
        error=row.error,
        seed=config.training.seed,
        record=record,
        settings={key: mine for key, (mine, _) in differing.items() if not key.startswith(TOLD_ELSEWHERE)},
        objective=asdict(config.objective),
        sharpness={key: value for key, value in asdict(config.sharpness).items() if value is not None},
        metrics=[line for line in lines if "validation" not in line],
        validation=[line for line in lines if "validation" in line],
        scores=(read_record(folder, SCORES) or {}) if row.status == "finished" else {},
        further=_records_in(folder, FURTHER) if row.status == "finished" else {},
        analyses=_records_in(folder / ANALYSES, "*.json"),
        disk=_disk(record),
    )


def _records_in(folder: Path, pattern: str) -> dict[str, dict[str, Any]]:
    """JSON records by file name without its ending."""
    return {path.stem: read_record(folder, path.name) or {} for path in sorted(folder.glob(pattern))}


def _lines(path: Path) -> list[dict[str, Any]]:
    """Of a file of JSON lines; one that was being written when the run was killed is passed over."""
    found: list[dict[str, Any]] = []
    if path.is_file():
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict) and "step" in line:
                found.append(line)
    return found


def _disk(record: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of the cache's files, as their lengths say."""
    cache = Path(record.get("cache", ""))
    if not record.get("cache") or not (cache / "spaces").is_dir():
        return {}
    space = record.get("space", {})
    slugs = [part["slug"] for part in space.get("spaces", ())] or [space.get("slug", "")]
    return {
        "cache": _length(cache),
        "space": sum(_length(cache / "spaces" / slug) for slug in slugs if slug),
    }


def _length(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _tasks(comparison: Comparison, runs: Sequence[RunRecords]) -> dict[str, dict[str, str]]:
    """In the order of the nine, then as first met; what a task measures is said by some run's scores."""
    said: dict[str, Mapping[str, Any]] = {}
    for run in runs:
        for name, task in run.tasks.items():
            said.setdefault(name, task)
    known = {name.removeprefix("tasks."): None for row in comparison.rows for name in row.figures if "tasks." in name}
    ordered = [*(name for name in NINE if name in known), *(name for name in known if name not in NINE)]
    return {
        name: {
            "metric": str(said.get(name, {}).get("metric", "")),
            "domain": str(said.get(name, {}).get("domain") or NINE.get(name, ("", "other"))[1]),
        }
        for name in ordered
    }


def _shares(comparison: Comparison, references: Mapping[str, str]) -> dict[str, dict[str, float]]:
    teacher = next((group for group in comparison.groups if references.get(group.name) == TEACHER), None)
    if teacher is None:
        return {}
    best = {name: figure.mean for name, figure in teacher.figures.items() if name.startswith(("tasks.", "average."))}
    return {
        group.name: {
            name: 100 * group.figures[name].mean / whole
            for name, whole in best.items()
            if whole > 0 and name in group.figures
        }
        for group in comparison.groups
        if group is not teacher
    }
