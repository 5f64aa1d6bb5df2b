"""The data of a report, read from the records of runs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from distill.config import RunConfig
from distill.evaluation.base import Progress, no_progress
from distill.evaluation.evaluator import NINE
from distill.evaluation.scores import finite
from distill.report.comparison import PATHS, SEED, Comparison, Group, Row, compare_runs
from distill.report.references import TEACHER
from distill.run_folder import ANALYSES, CONFIG, FINAL, SCORES, is_run_folder, read_record
from teacher_cache.teachers import TeacherOptions, resolve

METRICS = "metrics.jsonl"
FURTHER = "eval-*.json"
# Settings that a report shows elsewhere.
SHOWN_ELSEWHERE = (*PATHS, SEED, "space", "corpus", "student.model", "objective.", "sharpness.")
# Units by prefix of a figure's name, for readers of the JSON.
UNITS = {
    "tasks.": "points of 100, see the task's metric",
    "average.": "points of 100, mean over tasks",
    "agreement.": "spearman: Spearman's rho, -1 to 1; overlap: share of nearest neighbors, 0 to 1",
    "cost.step_seconds": "seconds per optimizer step; p50 is the median, p90 the 90th percentile",
    "cost.data_seconds": "median seconds of waiting for a batch",
    "cost.data_wait_share": "share of the step time spent waiting for data, 0 to 1",
    "cost.peak_memory_bytes": "bytes",
    "cost.steps": "number of timed optimizer steps",
    "student.bytes": "bytes of the weights on disk",
    "student.parameters": "number of parameters",
    "share.": "percent of the teacher's score",
}


@dataclass(frozen=True)
class RunRecords:
    """The records in a run folder.

    Attributes:
        record: `run.json`; empty if the run has not written it yet.
        settings: non-default values of the configuration by dotted key.
        metrics: lines of `metrics.jsonl`, without those of a validation.
        validation: lines of a validation: `step`, `epoch`, `validation` (`average` and scores by task), `seconds`.
        scores: `eval.json`; empty if the student was not scored.
        further: other scores by file name: `eval-*.json`, written by `distill eval -o`.
        disk: bytes of the teacher cache and of its space, if it still exists.
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
        """All scores by task; those of `eval.json` take precedence."""
        found: dict[str, Mapping[str, Any]] = {}
        for record in (self.scores, *self.further.values()):
            for name, task in record.get("tasks", {}).items():
                found.setdefault(name, task)
        return found


@dataclass(frozen=True)
class ReportData:
    """The contents of `report.json` and of the page.

    Attributes:
        tasks: name -> metric and domain, of every task with a score.
        shares: group -> figure -> percent of the teacher's score; empty without a teacher; averages only if they are
            over the same tasks as the teacher's.
        references: group -> "teacher", "before training" or "model".
    """

    comparison: Comparison
    runs: tuple[RunRecords, ...]
    tasks: Mapping[str, Mapping[str, str]]
    shares: Mapping[str, Mapping[str, float]]
    references: Mapping[str, str]
    bench: Mapping[str, Any] = field(default_factory=dict)

    @property
    def analyses(self) -> list[str]:
        """Names of all analyses with a result."""
        return list(dict.fromkeys(name for run in self.runs for name in run.analyses))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; null for NaN and infinity, such as the gradient norm of a skipped step."""
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
    """Read run folders, folders of these, and models that are not runs.

    Args:
        data: folder of the tasks' files; what was not scored on them is, and runs save their scores.
        baseline, teacher: see `compare_runs`; figures have their share of the teacher's.
    """
    comparison = compare_runs(
        [Path(path) for path in paths if _holds_runs(Path(path))],
        data=data,
        tasks=tasks,
        dtype=dtype,
        baseline=baseline,
        teacher=teacher,
        models=[str(path) for path in paths if not _holds_runs(Path(path))],
        progress=progress,
    )
    runs = tuple(
        _records(row, group.name) for group in comparison.groups if not group.is_reference for row in group.rows
    )
    stale = [line for run in runs for line in _stale(run)]
    comparison = replace(comparison, warnings=(*comparison.warnings, *stale))
    references = {group.name: group.name.partition(": ")[0] for group in comparison.groups if group.is_reference}
    known = _tasks(comparison, [*(run.tasks for run in runs), *(row.tasks for row in comparison.rows)])
    return ReportData(comparison, runs, known, _shares(comparison, references, known), references)


def _holds_runs(path: Path) -> bool:
    return is_run_folder(path) or any(path.glob(f"*/{CONFIG}"))


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
        settings={key: mine for key, (mine, _) in differing.items() if not key.startswith(SHOWN_ELSEWHERE)},
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
    """JSON records by file name without suffix."""
    return {path.stem: read_record(folder, path.name) or {} for path in sorted(folder.glob(pattern))}


def _stale(run: RunRecords) -> list[str]:
    """Warnings about analyses and scores of another student than the exported one."""
    lines = []
    step = (run.record.get("exported") or {}).get("step", run.record.get("steps"))
    for name, record in run.analyses.items():
        if None not in (step, record.get("step")) and record["step"] != step:
            lines.append(
                f"{run.name}: {ANALYSES}/{name}.json is of step {record['step']:,}, but the student of step {step:,}; "
                "run `distill analyze` again"
            )
    scores = {Path(SCORES).stem: run.scores, **run.further}
    recorded = {name: record["weights"] for name, record in scores.items() if record.get("weights")}
    weights = resolve(TeacherOptions(model=str(Path(run.folder) / FINAL))).space.weights if recorded else None
    for name, scored in recorded.items():
        if scored != weights:
            lines.append(f"{run.name}: {name}.json is of other weights than the student's; run `distill eval` again")
    return lines


def _lines(path: Path) -> list[dict[str, Any]]:
    """Records of a file of JSON lines; a line that was incomplete when the run was killed is skipped."""
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
    """Sizes of the files of the cache and of its space."""
    cache = Path(record.get("cache", ""))
    if not record.get("cache") or not (cache / "spaces").is_dir():
        return {}
    space = record.get("space", {})
    slugs = [part["slug"] for part in space.get("spaces", ())] or [space.get("slug", "")]
    return {"cache": _size(cache), "space": sum(_size(cache / "spaces" / slug) for slug in slugs if slug)}


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _tasks(comparison: Comparison, scores: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Metric and domain of every task, the nine first, from the first scores that have it."""
    records: dict[str, Mapping[str, Any]] = {}
    for tasks in scores:
        for name, task in tasks.items():
            records.setdefault(name, task)
    known = {name.removeprefix("tasks."): None for row in comparison.rows for name in row.figures if "tasks." in name}
    ordered = [*(name for name in NINE if name in known), *(name for name in known if name not in NINE)]
    return {
        name: {
            "metric": str(records.get(name, {}).get("metric", "")),
            "domain": str(records.get(name, {}).get("domain") or NINE.get(name, ("", "other"))[1]),
        }
        for name in ordered
    }


def averaged(group: Group, average: str, tasks: Mapping[str, Mapping[str, str]]) -> tuple[str, ...] | None:
    """The tasks of a group's average; None if its runs differ in them."""
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
    """Percent of the teacher's scores, and of averages over the same tasks."""
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
