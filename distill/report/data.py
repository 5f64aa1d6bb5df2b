"""Everything that a report shows, out of the records of the runs: nothing is trained, and scored only on request."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from distill.config import RunConfig
from distill.errors import ConfigError, RunFolderError
from distill.evaluation.base import Progress, no_progress
from distill.evaluation.evaluator import NINE
from distill.evaluation.scores import finite, score
from distill.report.comparison import (
    PLACES,
    SEED,
    Comparison,
    Group,
    Row,
    compare,
    compare_runs,
    model_size,
    reference_row,
)
from distill.run_folder import ANALYSES, CONFIG, FINAL, SCORES, is_run_folder, read_record
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
    "cost.data_wait_share": "0 to 1: of the time of all steps, what was waited for data",
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
        shares: group -> figure -> percent of the teacher's score that it keeps; empty without a teacher, and of an
            average only where it is over the same tasks as the teacher's.
        references: group -> "teacher", "before training" or "model", for those that are no runs.
        bench: the record of `distill bench`; empty where none was given.
    """

    comparison: Comparison
    runs: tuple[RunRecords, ...]
    tasks: Mapping[str, Mapping[str, str]]
    shares: Mapping[str, Mapping[str, float]]
    references: Mapping[str, str]
    bench: Mapping[str, Any] = field(default_factory=dict)

    @property
    def analyses(self) -> list[str]:
        """Names of all that some run was asked."""
        return list(dict.fromkeys(name for run in self.runs for name in run.analyses))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; null is a figure that is no number, such as the gradient of a step that was skipped."""
        record: dict[str, Any] = {
            "runs": [asdict(run) for run in self.runs],
            "references": dict(self.references),
            "tasks": {name: dict(task) for name, task in self.tasks.items()},
            "shares": {name: dict(shares) for name, shares in self.shares.items()},
            "comparison": self.comparison.to_json(),
            "units": UNITS,
        }
        if self.bench:
            record["bench"] = dict(self.bench)
        return dict(finite(record))


@dataclass(frozen=True)
class Reference:
    """A model that is no run.

    Attributes:
        model: as it was named when it was scored.
        place: its folder, or the file of its scores.
    """

    role: str
    model: str
    place: str
    scores: Mapping[str, Any]
    size: Mapping[str, float] = field(default_factory=dict)


def report_data(
    paths: Sequence[str | Path],
    *,
    data: Path | None = None,
    tasks: Sequence[str] | None = None,
    dtype: str = "auto",
    baseline: str | None = None,
    teacher: str | None = None,
    progress: Progress = no_progress,
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
        progress=progress,
    )
    scored = [_scored_reference(model, data, tasks, dtype, progress) for model in unscored if data is not None]
    comparison = _with_references(comparison, [*kept, *scored])
    records = tuple(
        _records(row, group.name) for group in comparison.groups for row in group.rows if row.status != "reference"
    )
    stale = [line for run in records for line in _stale(run)]
    comparison = replace(comparison, warnings=(*comparison.warnings, *stale))
    references = {
        group.name: group.name.partition(": ")[0] for group in comparison.groups if group.rows[0].status == "reference"
    }
    said = [*(run.tasks for run in records), *(reference.scores["tasks"] for reference in (*kept, *scored))]
    known = _tasks(comparison, said)
    return ReportData(comparison, records, known, _shares(comparison, references, known), references)


def _holds_runs(path: Path) -> bool:
    return is_run_folder(path) or any(path.glob(f"*/{CONFIG}"))


def _is_file(model: str) -> bool:
    return Path(model).suffix == ".json" and Path(model).is_file()


def _kept_reference(path: Path, role: str) -> Reference:
    scores = read_record(path.parent, path.name) or {}
    if not isinstance(scores.get("tasks"), dict):
        raise RunFolderError(f"{path} holds no scores (no key 'tasks'); name what `distill eval -o` wrote")
    return Reference(role, str(scores.get("model", path.stem)), str(path), scores)


def _scored_reference(model: str, data: Path, tasks: Sequence[str] | None, dtype: str, progress: Progress) -> Reference:
    progress(f"scoring {model}", 0, 0, "")
    found = resolve(TeacherOptions(model=model)).folder
    scores = score(TeacherOptions(model=model), data, tasks, dtype, progress)
    size = {} if found is None else model_size(found)
    return Reference(MODEL, model, str(found or model), scores, size)


def _with_references(comparison: Comparison, references: Sequence[Reference]) -> Comparison:
    """The same with more rows before it, and with what else the first comparison warned of."""
    said = compare(comparison.rows).warnings
    names = _told_apart(references)
    files = {name for row in comparison.rows for name in json.loads(row.sources.get("files", "{}"))}
    rows = [
        reference_row(name, one.place, _on_files(one.scores, files), one.size)
        for name, one in zip(names, references, strict=True)
    ]
    wider = compare([*rows, *comparison.rows])
    unsaid = [
        f"{name} does not say in which precision it was scored; score it again with `distill eval -o`"
        for name, one in zip(names, references, strict=True)
        if "dtype" not in one.scores
    ]
    return replace(
        wider,
        # A group is called by the end of a path, which takes a reference's role from its name.
        groups=tuple(
            replace(group, name=group.rows[0].name) if group.rows[0].status == "reference" else group
            for group in wider.groups
        ),
        warnings=(*wider.warnings, *(line for line in comparison.warnings if line not in said), *unsaid),
    )


def _told_apart(references: Sequence[Reference]) -> list[str]:
    """Role and the model's name, or more of where it is for those that would be called the same."""
    names = [f"{one.role}: {Path(one.model).name}" for one in references]
    for longer in ([one.model for one in references], [one.place for one in references]):
        names = [
            name if names.count(name) == 1 else f"{one.role}: {more}"
            for name, one, more in zip(names, references, longer, strict=True)
        ]
    return names


def _on_files(scores: Mapping[str, Any], known: set[str]) -> Mapping[str, Any]:
    """The scores as if on no other files than the runs': tasks that only a reference has are compared with nothing."""
    common = {name: digest for name, digest in scores.get("files", {}).items() if name in known}
    if not known:
        return scores
    return {key: value for key, value in scores.items() if key != "files"} | ({"files": common} if common else {})


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


def _stale(run: RunRecords) -> list[str]:
    """Of answers and scores that another student gave than the one that the folder holds now."""
    lines = []
    step = (run.record.get("exported") or {}).get("step", run.record.get("steps"))
    for name, record in run.analyses.items():
        if None not in (step, record.get("step")) and record["step"] != step:
            lines.append(
                f"{run.name}: {ANALYSES}/{name}.json is of step {record['step']:,}, and the student of step {step:,}; "
                "ask again with `distill analyze`"
            )
    scores = {Path(SCORES).stem: run.scores, **run.further}
    asked = {name: record["weights"] for name, record in scores.items() if record.get("weights")}
    weights = resolve(TeacherOptions(model=str(Path(run.folder) / FINAL))).space.weights if asked else None
    for name, scored in asked.items():
        if scored != weights:
            lines.append(
                f"{run.name}: {name}.json is of other weights than the student has; score it again with `distill eval`"
            )
    return lines


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


def _tasks(comparison: Comparison, scores: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """In the order of the nine, then as first met; what a task measures is said by some model's scores."""
    said: dict[str, Mapping[str, Any]] = {}
    for tasks in scores:
        for name, task in tasks.items():
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


def averaged(group: Group, average: str, tasks: Mapping[str, Mapping[str, str]]) -> tuple[str, ...] | None:
    """The tasks that a group's average is over; None where its runs differ in them."""
    domain = {"in_domain": "in", "out_of_domain": "out"}.get(average)
    counted = [
        name for name, task in tasks.items() if (task["domain"] == domain if domain else task["domain"] != "apart")
    ]
    over = {
        tuple(name for name in counted if f"tasks.{name}" in row.figures)
        for row in group.rows
        if f"average.{average}" in row.figures
    }
    return over.pop() if len(over) == 1 else None


def _shares(
    comparison: Comparison, references: Mapping[str, str], tasks: Mapping[str, Mapping[str, str]]
) -> dict[str, dict[str, float]]:
    """Of a score, and of an average over the very tasks that the teacher's is over."""
    teacher = next((group for group in comparison.groups if references.get(group.name) == TEACHER), None)
    if teacher is None:
        return {}
    best = {name: figure.mean for name, figure in teacher.figures.items() if name.startswith(("tasks.", "average."))}

    def same_tasks(group: Group, figure: str) -> bool:
        kind, _, name = figure.partition(".")
        if kind != "average":
            return True
        over = averaged(group, name, tasks)
        return over is not None and over == averaged(teacher, name, tasks)

    return {
        group.name: {
            name: 100 * group.figures[name].mean / whole
            for name, whole in best.items()
            if whole > 0 and name in group.figures and same_tasks(group, name)
        }
        for group in comparison.groups
        if group is not teacher
    }
