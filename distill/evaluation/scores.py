"""Scores that stay in the run folder, so that no student is evaluated twice in the same way."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any

from distill.errors import ConfigError
from distill.evaluation.evaluator import evaluate_model, nine_tasks
from distill.run_folder import FINAL, SCORES, read_record
from teacher_cache.storage.files import replacing
from teacher_cache.teachers import TeacherOptions, resolve

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def settled_dtype(dtype: str) -> str:
    """`auto` as bfloat16 where this machine multiplies in it, else float32.

    A rule and no measurement: students that are compared must be scored alike, also on a busy machine.

    Raises:
        ConfigError: neither auto, fp32 nor bf16.
    """
    from distill.arguments import settled_precision

    if dtype == "auto":
        return "bfloat16" if settled_precision("auto") == "bf16" else "float32"
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; expected auto, {' or '.join(DTYPES)}")
    return DTYPES[dtype]


def kept_scores(
    folder: Path, data: Path, names: Sequence[str] | None = None, dtype: str = "auto"
) -> dict[str, Any] | None:
    """The record of `evaluate_run`, if the folder's student was scored on these files in this precision before."""
    record = read_record(folder, SCORES)
    if record is None:
        return None
    asked = _asked(TeacherOptions(model=str(folder / FINAL)), data, names, dtype)
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
        with replacing(folder / SCORES) as file:
            file.write(json.dumps(record | {"model": str(folder)}, indent=2, ensure_ascii=False).encode())
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

    report = evaluate_model(replace(options, dtype=settled_dtype(dtype)), data, names=names, announce=hear)
    return report.to_json() | {"asked": said[-1]} | _asked(options, data, names, dtype)


def _asked(options: TeacherOptions, data: Path, names: Sequence[str] | None, dtype: str) -> dict[str, Any]:
    """What the scores depend on: the model, the precision, and the files of the tasks by name."""
    files = {path.name: path for task in nine_tasks(data, names) for path in task.files()}
    return {
        "dtype": settled_dtype(dtype),
        "weights": resolve(options).space.weights,
        "files": {name: _digest(path) for name, path in sorted(files.items())},
    }


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, lambda: blake2b(digest_size=16)).hexdigest()
