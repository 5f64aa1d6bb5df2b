"""Scores that stay in the run folder, so that no student is evaluated twice in the same way."""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from distill.evaluation.base import Task
from distill.evaluation.encoders import resolved_dtype
from distill.evaluation.evaluator import evaluate_model, nine_tasks
from distill.run_folder import FINAL, SCORES, read_record
from teacher_cache.storage.files import atomic_write, digest
from teacher_cache.teachers import TeacherOptions, resolve


def settled(options: TeacherOptions) -> TeacherOptions:
    """The same in one precision in place of "auto", as `resolved_dtype` says; a model without files has its own."""
    if resolve(options).space.dtype != "auto":
        return options
    return replace(options, dtype=resolved_dtype("auto"))


def depends_on(options: TeacherOptions, tasks: Sequence[Task] = ()) -> dict[str, Any]:
    """What scores depend on: `dtype`, the `weights`' digest, and digests of the tasks' `files` by name.

    Args:
        options: as the model is evaluated, its precision settled.
    """
    space = resolve(options).space
    return {"dtype": space.dtype, "weights": space.weights, "files": digests(tasks)}


def digests(tasks: Sequence[Task]) -> dict[str, str]:
    """Of the tasks' files, by name; by path where two collections' files are called the same."""
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


def kept_scores(
    folder: Path, data: Path, names: Sequence[str] | None = None, dtype: str = "auto"
) -> dict[str, Any] | None:
    """The record of `evaluate_run`, if the folder's student was scored on these files in this precision before."""
    record = read_record(folder, SCORES)
    if record is None:
        return None
    options = TeacherOptions(model=str(folder / FINAL), dtype=resolved_dtype(dtype))
    asked = depends_on(options, nine_tasks(data, names))
    files = asked.pop("files")
    same = all(record.get(key) == value for key, value in asked.items())
    return record if same and files.items() <= record.get("files", {}).items() else None


def evaluate_run(
    folder: Path,
    data: Path,
    names: Sequence[str] | None = None,
    dtype: str = "auto",
    announce: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Score the student of a finished run, unless it was, and keep `eval.json` in its folder.

    Returns:
        What `score` returns.

    Raises:
        EvaluationError, TeacherError: a file or the student is missing.
        RunFolderError: an `eval.json` that is none.
    """
    record = kept_scores(folder, data, names, dtype)
    if record is None:
        record = score(TeacherOptions(model=str(folder / FINAL)), data, names, dtype, announce)
        with atomic_write(folder / SCORES) as file:
            record |= {"model": str(folder)}
            file.write(json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False).encode())
    return record


def score(
    options: TeacherOptions,
    data: Path,
    names: Sequence[str] | None = None,
    dtype: str = "auto",
    announce: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """The JSON of an evaluation, with what it depends on: `asked`, `dtype`, `weights`, `files`.

    Raises:
        EvaluationError, TeacherError: a file or the model is missing.
    """
    said: list[str] = []

    def hear(line: str) -> None:
        said.append(line)
        announce(line)

    options = replace(options, dtype=resolved_dtype(dtype))
    report = evaluate_model(options, data, names=names, announce=hear)
    record: dict[str, Any] = finite(report.to_json())
    return record | {"asked": said[-1]} | depends_on(options, nine_tasks(data, names))
