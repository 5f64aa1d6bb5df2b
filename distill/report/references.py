"""Models in a comparison that are not runs: the student before training, the teacher, and others."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from distill.config import RunConfig
from distill.errors import ConfigError, RunFolderError
from distill.evaluation.base import Progress
from distill.run_folder import CONFIG, read_record, recorded_space
from distill.student.cut_spec import trained_student
from teacher_cache.teachers import TeacherOptions, resolve
from teacher_cache.teachers.folder import ModelFolder, weight_files
from teacher_cache.teachers.settings import options_for_space

# Roles of references.
TEACHER, BASELINE, MODEL = "teacher", "before training", "model"


@dataclass(frozen=True)
class Reference:
    """A model that is not a run, with its scores."""

    role: str
    model: str
    source: str
    scores: Mapping[str, Any]
    size: Mapping[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def load_references(
    models: Sequence[tuple[str, str]],
    folders: Sequence[Path],
    data: Path | None,
    tasks: Sequence[str] | None,
    dtype: str,
    progress: Progress,
) -> list[Reference]:
    """Read or compute the scores of models; those of saved scores come first."""
    # Scored models before the baseline and the teacher.
    ordered = sorted(models, key=lambda one: (not _is_file(one[1]), not _is_file(one[1]) and one[0] != MODEL))
    for _, model in ordered:
        if not _is_file(model) and data is None:
            raise ConfigError(f"{model} is not a run: name the folder of the tasks' files to score it on (`data`)")
    return [
        _read(role, Path(model))
        if data is None or _is_file(model)
        else _score(role, model, folders, data, tasks, dtype, progress)
        for role, model in ordered
    ]


def _is_file(model: str) -> bool:
    return Path(model).suffix == ".json" and Path(model).is_file()


def _read(role: str, path: Path) -> Reference:
    scores = read_record(path.parent, path.name) or {}
    if not isinstance(scores.get("tasks"), dict):
        raise RunFolderError(f"{path} holds no scores (no key 'tasks'); name a file that `distill eval -o` wrote")
    return Reference(role, str(scores.get("model", path.stem)), str(path), scores)


def _score(
    role: str,
    model: str,
    folders: Sequence[Path],
    data: Path,
    tasks: Sequence[str] | None,
    dtype: str,
    progress: Progress,
) -> Reference:
    from distill.evaluation.scores import score

    progress(f"scoring {model}", 0, 0, "")
    options = TeacherOptions(model=model)
    warnings: tuple[str, ...] = ()
    if role == BASELINE:
        options, warnings = _student_options(model, folders)
    elif role == TEACHER:
        options, warnings = _teacher_options(model, folders)
    folder = resolve(options).folder
    size = {} if folder is None else model_size(folder)
    return Reference(role, model, str(folder or model), score(options, data, tasks, dtype, progress), size, warnings)


def _student_options(model: str, folders: Sequence[Path]) -> tuple[TeacherOptions, tuple[str, ...]]:
    """Pooling, prompt and maximum length of the first run that was trained from this model."""
    wanted = Path(model).expanduser().resolve()
    for folder in folders:
        record = read_record(folder)
        if record and _student_path(folder) == wanted:
            student = record["student"]
            options = {key: student[key] for key in ("pooling", "prompt", "max_length")}
            return TeacherOptions(model=model, backend="transformer", **options), ()
    return TeacherOptions(model=model), (f"no run was trained from {model}; it was scored with its own settings",)


def _student_path(folder: Path) -> Path:
    """The model that a run was trained from."""
    return Path(trained_student(RunConfig.load(folder / CONFIG).student, folder).model).expanduser().resolve()


def _teacher_options(model: str, folders: Sequence[Path]) -> tuple[TeacherOptions, tuple[str, ...]]:
    """The settings of the first run's space that is of this model."""
    spaces = [recorded_space(record) for record in map(read_record, folders) if record]
    weights = resolve(TeacherOptions(model=model)).space.weights
    for space in spaces:
        if space is not None and space.weights == weights:
            # Precision and normalization are those of the evaluation.
            return replace(options_for_space(space, TeacherOptions(model=model)), dtype="auto", normalize=None), ()
    return TeacherOptions(model=model), (f"no run was trained on vectors of {model}; it is not their teacher",)


def model_size(folder: Path) -> dict[str, float]:
    """`bytes` of a model's weights on disk and, if they are safetensors, `parameters`."""
    from safetensors import safe_open

    files = [path for part in ModelFolder.open(folder).parts for path in weight_files(part)]
    size = {"bytes": float(sum(path.stat().st_size for path in files))}
    if any(path.suffix != ".safetensors" for path in files):
        return size
    parameters = 0
    for path in files:
        with safe_open(path, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                parameters += math.prod(tensors.get_slice(name).get_shape())
    return size | {"parameters": float(parameters)}
