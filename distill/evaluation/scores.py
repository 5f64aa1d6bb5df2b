"""Scores that are saved in the run folder, so that no student is evaluated twice in the same way."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from distill.evaluation.base import Progress, Task, no_progress
from distill.evaluation.encoders import resolved_dtype
from distill.evaluation.evaluator import evaluate_model, nine_tasks
from distill.run_folder import FINAL, SCORES, read_record
from teacher_cache.storage.files import atomic_write, digest
from teacher_cache.teachers import TeacherOptions, resolve


def resolved_options(options: TeacherOptions) -> TeacherOptions:
    """The options with "auto" precision resolved by `resolved_dtype`; a model without files has its own."""
    return options if resolve(options).space.dtype != "auto" else replace(options, dtype=resolved_dtype("auto"))


def provenance(options: TeacherOptions, tasks: Sequence[Task] = ()) -> dict[str, Any]:
    """What scores depend on: `dtype`, the `weights`' digest, and digests of the tasks' `files` by name."""
    space = resolve(options).space
    return {"dtype": space.dtype, "weights": space.weights, "files": file_digests(tasks)}


def file_digests(tasks: Sequence[Task]) -> dict[str, str]:
    """Digests of the tasks' files by name, or by path if two files have the same name."""
    paths = sorted({path for task in tasks for path in task.files() if path.is_file()})
    names = Counter(path.name for path in paths)
    return {path.name if names[path.name] == 1 else str(path): digest(path).hex() for path in paths}


def finite(value: Any) -> Any:
    """A JSON value with null in place of NaN and infinity, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def saved_scores(
    folder: Path, data: Path, names: Sequence[str] | None = None, dtype: str = "auto"
) -> dict[str, Any] | None:
    """The record of `evaluate_run`, or None if the run's student was not scored on these files in this precision."""
    record = read_record(folder, SCORES)
    if record is None:
        return None
    options = TeacherOptions(model=str(folder / FINAL), dtype=resolved_dtype(dtype))
    wanted = provenance(options, nine_tasks(data, names))
    files = wanted.pop("files")
    same = all(record.get(key) == value for key, value in wanted.items())
    return record if same and files.items() <= record.get("files", {}).items() else None


def evaluate_run(
    folder: Path, data: Path, names: Sequence[str] | None = None, dtype: str = "auto", progress: Progress = no_progress
) -> dict[str, Any]:
    """The record of `score` for a finished run's student, read from `eval.json` if it was scored, else saved there."""
    record = saved_scores(folder, data, names, dtype)
    if record is None:
        record = score(TeacherOptions(model=str(folder / FINAL)), data, names, dtype, progress)
        with atomic_write(folder / SCORES) as file:
            record |= {"model": str(folder)}
            file.write(json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False).encode())
    return record


def score(
    options: TeacherOptions,
    data: Path,
    names: Sequence[str] | None = None,
    dtype: str = "auto",
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """The JSON record of an evaluation, with `asked`, how the model encodes, and its `provenance`."""
    lines: list[str] = []
    options = replace(options, dtype=resolved_dtype(dtype))
    report = evaluate_model(options, data, names=names, announce=lines.append, progress=progress)
    record: dict[str, Any] = finite(report.to_json())
    return record | {"asked": lines[-1]} | provenance(options, nine_tasks(data, names))
