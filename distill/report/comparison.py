"""Runs side by side: their figures, with mean and spread over seeds, and the settings in which they differ."""

import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from distill.config import RunConfig
from distill.errors import ConfigError, RunFolderError
from distill.evaluation.base import Progress, no_progress
from distill.run_folder import CONFIG, FINAL, SCORES, is_finished, is_run_folder, read_record, recorded_space
from teacher_cache.teachers import TeacherOptions, resolve
from teacher_cache.teachers.folder import ModelFolder, weight_files
from teacher_cache.teachers.settings import options_for_space

SEED = "training.seed"
# Where a run lies says nothing about it; what it was trained on is compared by digests.
PLACES = ("cache", "output_dir")
# What runs must have in common for their figures to be compared: key of `Row.sources` -> in words.
COMMON = {
    "space": "read different spaces",
    "corpus": "read different corpora",
    "precision": "were trained in different precisions",
    "device": "were timed on different devices",
    "dtype": "were scored in different precisions",
    "files": "were scored on different files",
}
# Of these, the ones that seeds of one group share.
SAME_RUN = ("space", "corpus", "precision", "student")
NAMED = 3


@dataclass(frozen=True)
class Row:
    """One run, or one model that is no run.

    Attributes:
        status: "finished", "failed", "unfinished", or "reference" for a model that is no run.
        error: of a failed run, in one line.
        figures: by dotted name, such as `tasks.stsb`, `average.all`, `agreement.after.spearman`,
            `cost.step_seconds_p50`, `student.bytes`; those that are known.
        sources: what the figures rest on, for people and to tell apart.
    """

    name: str
    folder: str
    status: str
    config: RunConfig | None = None
    error: str | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "config"}


@dataclass(frozen=True)
class Figure:
    """Mean and sample standard deviation over n runs; no deviation of one."""

    mean: float
    deviation: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Figure":
        deviation = statistics.stdev(values) if len(values) > 1 else None
        return cls(statistics.fmean(values), deviation, len(values))


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seed."""

    name: str
    rows: tuple[Row, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def figures(self) -> dict[str, Figure]:
        """Over the runs that have the figure, in the order of the first that does."""
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
    """What a table shows.

    Attributes:
        differing: dotted keys in which the groups differ.
        warnings: in which respects the figures should not be compared, a line each.
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
    """The run folders among `paths`, and those directly inside the others.

    Raises:
        RunFolderError: a path is neither.
    """
    found: dict[Path, None] = {}
    for path in paths:
        inside = [path] if is_run_folder(path) else sorted(p.parent for p in path.glob(f"*/{CONFIG}"))
        if not inside:
            raise RunFolderError(f"{path} is no run folder and holds none (no {CONFIG}); name what `distill run` wrote")
        found.update(dict.fromkeys(inside))
    return list(found)


def read_row(folder: Path, name: str | None = None, config: RunConfig | None = None, error: str | None = None) -> Row:
    """What a run folder says; one that is not there yet says nothing.

    Args:
        config: of a run that may have failed before it wrote its own.

    Raises:
        RunFolderError, ConfigError: a record is not JSON, or the configuration cannot be read.
    """
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
    progress: Progress = no_progress,
) -> Comparison:
    """Compare the runs in these folders, or in folders of these.

    Args:
        data: folder of the tasks' files; finished runs that were not scored on them are, and keep it.
        baseline: a model that is scored as a student of the runs would be: the student before training.
        teacher: a model that is scored as the runs' teacher was asked.

    Raises:
        RunFolderError: a path that holds no run.
        ConfigError: a model to score, and no data.
        EvaluationError, TeacherError: a file or a model is missing.
    """
    folders = run_folders(paths)
    if data is None and (baseline is not None or teacher is not None):
        raise ConfigError("a baseline or a teacher is scored on tasks; say with --data where their files are")
    names = _told_apart(folders)
    references, warnings = [], []
    if data is not None:
        from distill.evaluation.scores import evaluate_run, score

        for folder, name in zip(folders, names, strict=True):
            if is_finished(folder):
                progress(f"scoring {name}", 0, 0, "")
                evaluate_run(folder, data, tasks, dtype, progress)
        for model, role, asked in ((baseline, "before training", _as_student), (teacher, "teacher", _as_teacher)):
            if model is not None:
                progress(f"scoring {model}", 0, 0, "")
                options, warning = asked(model, folders)
                warnings += warning
                found = resolve(options).folder
                size = {} if found is None else model_size(found)
                scores = score(options, data, tasks, dtype, progress)
                references.append(reference_row(f"{role}: {Path(model).name}", str(found or model), scores, size))
    compared = compare([*references, *(read_row(f, name) for f, name in zip(folders, names, strict=True))])
    return replace(compared, warnings=(*compared.warnings, *warnings))


def reference_row(name: str, folder: str, scores: Mapping[str, Any], size: Mapping[str, float]) -> Row:
    """A model that is no run: the student before training, or the teacher."""
    return Row(
        name=name,
        folder=folder,
        status="reference",
        figures=dict(_scored(scores)) | {f"student.{key}": value for key, value in size.items()},
        sources=_sources({}, scores),
    )


def compare(rows: Sequence[Row]) -> Comparison:
    """Group the rows by everything but their seed, and say what is different between groups."""
    groups: list[list[Row]] = []
    for row in rows:
        for group in groups:
            if all(_another_seed(row, other) and _same_sources(row, other) for other in group):
                group.append(row)
                break
        else:
            groups.append([row])
    configs = [group[0].config for group in groups]
    first = next((config for config in configs if config is not None), None)
    hidden = PLACES if all(len(group) == 1 for group in groups) else (*PLACES, SEED)
    differences = [first.difference(config) if first and config else {} for config in configs]
    # Dotted key -> its value in the first run, in the order of a configuration's sections.
    found = {key: mine for one in differences for key, (mine, _) in one.items() if key not in hidden}
    sections = [section.name for section in fields(RunConfig)]
    common = {key: found[key] for key in sorted(found, key=lambda key: sections.index(key.partition(".")[0]))}
    settings = [
        {key: one[key][1] if key in one else mine for key, mine in common.items()} if config else {}
        for config, one in zip(configs, differences, strict=True)
    ]
    named = [
        Group(name, tuple(group), chosen)
        for name, group, chosen in zip(_group_names(groups), groups, settings, strict=True)
    ]
    return Comparison(tuple(named), tuple(common), tuple(_warnings([row for group in groups for row in group])))


def model_size(folder: Path) -> dict[str, float]:
    """`bytes` of a model's weights on disk and, where they are safetensors, `parameters`.

    Raises:
        TeacherError: the folder holds no model.
    """
    from safetensors import safe_open

    files = [path for part in ModelFolder.open(folder).parts for path in weight_files(part)]
    size = {"bytes": float(sum(path.stat().st_size for path in files))}
    if any(path.suffix != ".safetensors" for path in files):
        return size
    parameters = 0
    for path in files:
        with safe_open(path, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                parameters += math.prod(tensors.get_slice(name).get_shape())
    return size | {"parameters": float(parameters)}


def _told_apart(folders: Sequence[Path]) -> list[str]:
    """The folders' names, and where two are called the same, their paths."""
    names = [folder.resolve().name for folder in folders]
    return [name if names.count(name) == 1 else str(folder) for folder, name in zip(folders, names, strict=True)]


def _as_student(model: str, folders: Sequence[Path]) -> tuple[TeacherOptions, list[str]]:
    """Pooling, prompt and maximum length of the first run that began with this model."""
    wanted = Path(model).expanduser().resolve()
    for folder in folders:
        record = read_record(folder)
        if record and Path(RunConfig.load(folder / CONFIG).student.model).expanduser().resolve() == wanted:
            student = record["student"]
            options = {key: student[key] for key in ("pooling", "prompt", "max_length")}
            return TeacherOptions(model=model, backend="transformer", **options), []
    return TeacherOptions(model=model), [f"no run began with {model}; it was asked as its own files say"]


def _as_teacher(model: str, folders: Sequence[Path]) -> tuple[TeacherOptions, list[str]]:
    """As the first run's space says, if that is this model's."""
    spaces = [recorded_space(record) for record in map(read_record, folders) if record]
    weights = resolve(TeacherOptions(model=model)).space.weights
    for space in spaces:
        if space is not None and space.weights == weights:
            # Precision and length of the vectors are those of the scoring.
            return replace(options_for_space(space, TeacherOptions(model=model)), dtype="auto", normalize=None), []
    return TeacherOptions(model=model), [f"no run was trained on what {model} said; it is not their teacher"]


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
        "space": _labelled(record.get("space", {}), "slug"),
        "corpus": _labelled(record.get("corpus", {}), "name"),
        "student": record.get("student", {}).get("weights"),
        "precision": record.get("precision"),
        "device": (record.get("cost") or {}).get("device"),
        "dtype": scores.get("dtype"),
        "files": None if "files" not in scores else json.dumps(scores["files"], sort_keys=True),
    }
    return {key: value for key, value in found.items() if value}


def _labelled(part: Mapping[str, Any], label: str) -> str:
    return f"{part[label]} ({part['fingerprint'][:8]})" if part else ""


def _another_seed(one: Row, other: Row) -> bool:
    """Whether the seed is what two runs differ in; the same run twice says nothing of the spread."""
    if one.config is None or other.config is None:
        return False
    return one.config.difference(other.config).keys() - set(PLACES) == {SEED}


def _same_sources(one: Row, other: Row) -> bool:
    """A run that failed before its record was written has none to differ in."""
    shared = [key for key in SAME_RUN if key in one.sources and key in other.sources]
    return all(one.sources[key] == other.sources[key] for key in shared)


def _group_names(groups: Sequence[Sequence[Row]]) -> list[str]:
    """What the names of a group's runs begin with, without the seed; a name that two would have is the first run's."""
    names = [_common(sorted(Path(row.name).name for row in group)) for group in groups]
    return [
        name if name and names.count(name) == 1 else group[0].name for name, group in zip(names, groups, strict=True)
    ]


def _common(names: Sequence[str]) -> str:
    """What sorted names begin with."""
    first, last = names[0], names[-1]
    length = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first if len(names) == 1 else re.sub(r"(?:[-_.]+(?:seed|s)[-_.=]*\d*|[-_.=]+)$", "", first[:length])


def _warnings(rows: Sequence[Row]) -> Iterator[str]:
    for key, said in COMMON.items():
        by_value: dict[str, list[str]] = {}
        for row in rows:
            if key in row.sources:
                by_value.setdefault(row.sources[key], []).append(row.name)
        if len(by_value) > 1:
            parts = [f"{'' if key == 'files' else f'{value}: '}{_few(names)}" for value, names in by_value.items()]
            yield f"the runs {said}: {'; '.join(parts)}"


def _few(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")
