"""Comparison of runs: figures with mean and deviation over seeds, and the settings that differ."""

import json
import os
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from distill.config import RunConfig
from distill.errors import RunFolderError
from distill.evaluation.base import Progress, no_progress
from distill.report.references import BASELINE, MODEL, TEACHER, Reference, load_references, model_size
from distill.run_folder import CONFIG, FINAL, SCORES, is_finished, is_run_folder, read_record

SEED = "training.seed"
# Settings that are not compared: digests tell whether space and corpus are the same.
PATHS = ("cache", "output_dir")
# What runs must have in common for their figures to be compared: key of `Row.sources` -> warning.
COMMON = {
    "space": "read different spaces",
    "corpus": "read different corpora",
    "precision": "were trained in different precisions",
    "device": "were timed on different devices",
    "dtype": "were scored in different precisions",
    "files": "were scored on different files",
}
# Sources that the seeds of one group share.
SHARED_BY_SEEDS = ("space", "corpus", "precision", "student")
# Names of runs in a warning.
MOST_NAMES = 3


@dataclass(frozen=True)
class Row:
    """One run, or one reference.

    Attributes:
        figures: known figures by dotted name, such as `tasks.stsb`, `average.all`, `agreement.after.spearman`,
            `cost.step_seconds_p50`, `student.bytes`.
        sources: what the figures depend on, by keys such as those of `COMMON`.
        tasks: records of a reference's scores by task.
    """

    name: str
    folder: str
    status: str
    config: RunConfig | None = None
    error: str | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    tasks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key not in ("config", "tasks")}


@dataclass(frozen=True)
class Figure:
    """Mean and sample standard deviation over n runs; the deviation of one is None."""

    mean: float
    deviation: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Figure":
        deviation = statistics.stdev(values) if len(values) > 1 else None
        return cls(statistics.fmean(values), deviation, len(values))


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed, or one reference."""

    name: str
    rows: tuple[Row, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_reference(self) -> bool:
        return self.rows[0].status == "reference"

    @property
    def figures(self) -> dict[str, Figure]:
        """Over the runs that have the figure."""
        names = dict.fromkeys(name for row in self.rows for name in row.figures)
        return {name: Figure.of([row.figures[name] for row in self.rows if name in row.figures]) for name in names}

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "runs": [row.name for row in self.rows],
            "settings": dict(self.settings),
            "figures": {name: asdict(figure) for name, figure in self.figures.items()},
        }


@dataclass(frozen=True)
class Comparison:
    """Groups of runs and references.

    Attributes:
        differing: dotted keys of the settings in which the groups differ.
        warnings: why figures should not be compared, a line each.
    """

    groups: tuple[Group, ...]
    differing: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def rows(self) -> list[Row]:
        return [row for group in self.groups for row in group.rows]

    def to_json(self) -> dict[str, Any]:
        return {
            "groups": [group.to_json() for group in self.groups],
            "runs": [row.to_json() for row in self.rows],
            "differing": list(self.differing),
            "warnings": list(self.warnings),
        }


def run_folders(paths: Sequence[Path]) -> list[Path]:
    """The run folders among `paths`, and those directly inside the others."""
    found: dict[Path, None] = {}
    for path in paths:
        inside = [path] if is_run_folder(path) else sorted(p.parent for p in path.glob(f"*/{CONFIG}"))
        if not inside:
            raise RunFolderError(
                f"{path} is not a run folder and holds none (no {CONFIG}); name a folder that `distill run` wrote"
            )
        found.update(dict.fromkeys(inside))
    return list(found)


def read_row(folder: Path, name: str | None = None, config: RunConfig | None = None, error: str | None = None) -> Row:
    """The row of a run folder, without figures if the run is not finished."""
    record = read_record(folder) or {}
    finished = is_finished(folder)
    scores = (read_record(folder, SCORES) or {}) if finished else {}
    return Row(
        name=name or folder.name,
        folder=str(folder),
        status="failed" if error else "finished" if finished else "unfinished",
        config=config or RunConfig.load(folder / CONFIG),
        error=error,
        figures=dict(_figures(folder, record, scores)) if finished else {},
        sources=_sources(record, scores),
    )


def compare_runs(
    paths: Sequence[Path],
    *,
    data: Path | None = None,
    tasks: Sequence[str] | None = None,
    dtype: str = "auto",
    baseline: str | None = None,
    teacher: str | None = None,
    models: Sequence[str] = (),
    progress: Progress = no_progress,
) -> Comparison:
    """Compare the runs in these folders, or in folders of these.

    A model may also be the JSON file of its scores that `distill eval -o` wrote.

    Args:
        data: folder of the tasks' files; finished runs that were not scored on them are, and their scores are saved.
        baseline: the student before training, scored like a student of the runs.
        teacher: the runs' teacher, scored with the settings of their space.
        models: further models, scored with their own settings.
    """
    folders = run_folders(paths)
    names = unique_names([folder.resolve().name for folder in folders], list(map(str, folders)))
    named = [(BASELINE, baseline), (TEACHER, teacher), *((MODEL, model) for model in models)]
    wanted = [(role, model) for role, model in named if model is not None]
    references = load_references(wanted, folders, data, tasks, dtype, progress)
    if data is not None:
        from distill.evaluation.scores import evaluate_run

        for folder, name in zip(folders, names, strict=True):
            if is_finished(folder):
                progress(f"scoring {name}", 0, 0, "")
                evaluate_run(folder, data, tasks, dtype, progress)
    rows = [read_row(folder, name) for folder, name in zip(folders, names, strict=True)]
    files = {name for row in rows for name in json.loads(row.sources.get("files", "{}"))}
    reference_names = unique_names(
        [f"{one.role}: {Path(one.model).name}" for one in references],
        [f"{one.role}: {one.model}" for one in references],
        [f"{one.role}: {one.source}" for one in references],
    )
    named_references = list(zip(reference_names, references, strict=True))
    compared = compare([*(_reference_row(name, one, files) for name, one in named_references), *rows])
    warnings = [line for reference in references for line in reference.warnings]
    warnings += [
        f"the scores of {name} have no precision; score it again with `distill eval -o`"
        for name, one in named_references
        if "dtype" not in one.scores
    ]
    return replace(compared, warnings=(*compared.warnings, *warnings))


def unique_names(names: Sequence[str], *longer: Sequence[str]) -> list[str]:
    """The names, with longer ones in place of those that are not unique."""
    unique = list(names)
    for candidates in longer:
        unique = [name if unique.count(name) == 1 else other for name, other in zip(unique, candidates, strict=True)]
    return unique


def _reference_row(name: str, reference: Reference, files: set[str]) -> Row:
    """The row of a reference."""
    scores = dict(reference.scores)
    if files and "files" in scores:
        common = {file: digest for file, digest in scores.pop("files").items() if file in files}
        scores |= {"files": common} if common else {}
    return Row(
        name=name,
        folder=reference.source,
        status="reference",
        figures=dict(_scored(scores)) | {f"student.{key}": value for key, value in reference.size.items()},
        sources=_sources({}, scores),
        tasks=scores["tasks"],
    )


def compare(rows: Sequence[Row]) -> Comparison:
    """Group rows that differ only in their seed, with the settings and sources that differ between groups."""
    groups: list[list[Row]] = []
    for row in rows:
        for group in groups:
            if all(_differ_in_seed(row, other) for other in group):
                group.append(row)
                break
        else:
            groups.append([row])
    configs = [group[0].config for group in groups]
    first = next((config for config in configs if config is not None), None)
    hidden = PATHS if all(len(group) == 1 for group in groups) else (*PATHS, SEED)
    differences = [first.difference(config) if first and config else {} for config in configs]
    # Dotted key -> its value in the first run, in the order of the configuration's sections.
    found = {key: mine for one in differences for key, (mine, _) in one.items() if key not in hidden}
    sections = [section.name for section in fields(RunConfig)]
    common = {key: found[key] for key in sorted(found, key=lambda key: sections.index(key.partition(".")[0]))}
    settings = [
        {key: one[key][1] if key in one else mine for key, mine in common.items()} if config else {}
        for config, one in zip(configs, differences, strict=True)
    ]
    named = tuple(map(Group, _group_names(groups), map(tuple, groups), settings))
    return Comparison(named, tuple(common), tuple(_warnings([row for group in groups for row in group])))


def _figures(folder: Path, record: Mapping[str, Any], scores: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    yield from _scored(scores)
    for when in ("before", "after", "projected"):
        agreement = (record.get("agreement") or {}).get(when) or {}
        for name in ("spearman", "overlap"):
            if name in agreement:
                yield f"agreement.{when}.{name}", agreement[name]
    for name, value in (record.get("cost") or {}).items():
        if isinstance(value, int | float):
            yield f"cost.{name}", value
    for name, value in model_size(folder / FINAL).items():
        yield f"student.{name}", value


def _scored(scores: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, task in scores.get("tasks", {}).items():
        yield f"tasks.{name}", task["score"]
    for name, value in scores.get("average", {}).items():
        if value is not None:
            yield f"average.{name}", value


def _sources(record: Mapping[str, Any], scores: Mapping[str, Any]) -> dict[str, str]:
    found = {
        "space": _labeled(record.get("space", {}), "slug"),
        "corpus": _labeled(record.get("corpus", {}), "name"),
        "student": record.get("student", {}).get("weights"),
        "precision": record.get("precision"),
        "device": (record.get("cost") or {}).get("device"),
        "dtype": scores.get("dtype"),
        "files": None if "files" not in scores else json.dumps(scores["files"], sort_keys=True),
    }
    return {key: value for key, value in found.items() if value}


def _labeled(part: Mapping[str, Any], label: str) -> str:
    return f"{part[label]} ({part['fingerprint'][:8]})" if part else ""


def _differ_in_seed(one: Row, other: Row) -> bool:
    """Whether two runs differ only in their seed, in settings and recorded sources; equal seeds are not a sample."""
    if one.config is None or other.config is None:
        return False
    shared = [key for key in SHARED_BY_SEEDS if key in one.sources and key in other.sources]
    same_sources = all(one.sources[key] == other.sources[key] for key in shared)
    return same_sources and one.config.difference(other.config).keys() - set(PATHS) == {SEED}


def _group_names(groups: Sequence[Sequence[Row]]) -> list[str]:
    """The common prefix of the names in a group, without the seed; the first run's name if that is not unique."""
    names, first_names = [], [group[0].name for group in groups]
    for group in groups:
        # Of characters, not of path components.
        prefix = os.path.commonprefix([Path(row.name).name for row in group])  # noqa: RUF071
        names.append(
            re.sub(r"(?:[-_.]+(?:seed|s)[-_.=]*\d*|[-_.=]+)$", "", prefix) if len(group) > 1 else group[0].name
        )
    return [name or first for name, first in zip(unique_names(names, first_names), first_names, strict=True)]


def _warnings(rows: Sequence[Row]) -> Iterator[str]:
    for key, warning in COMMON.items():
        by_value: dict[str, list[str]] = {}
        for row in rows:
            if key in row.sources:
                by_value.setdefault(row.sources[key], []).append(row.name)
        if len(by_value) > 1:
            parts = []
            for value, names in by_value.items():
                more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
                parts.append(f"{'' if key == 'files' else f'{value}: '}{', '.join(names[:MOST_NAMES])}{more}")
            yield f"the runs {warning}: {'; '.join(parts)}"
