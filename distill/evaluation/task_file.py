"""Tasks of a YAML file that names their files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distill.config.reading import read_yaml
from distill.errors import ConfigError, EvaluationError
from distill.evaluation import load_task
from distill.evaluation.base import Task, require_known


def read_task_file(path: Path) -> list[Task]:
    """The tasks of a YAML file, a mapping from their names to their settings.

    A task has a `kind` of `distill.evaluation.TASKS` or "package.module:Class", the files of its kind (`train` and
    `test`, or `file`) or the `folder` that holds them under their default names, and may have `columns`, the kind's
    columns with the files' names for them, and a `domain`. Paths are relative to the YAML file.
    """
    path = Path(path)
    tasks = [_task(path, str(name), entry) for name, entry in read_yaml(path).items()]
    if not tasks:
        raise EvaluationError(f"{path}: no task in it; expected 'NAME: {{kind: sts, file: FILE.csv}}' for each")
    missing = [str(file) for task in tasks for file in task.files() if not file.exists()]
    if missing:
        raise EvaluationError(f"{path}: missing {', '.join(missing)}; paths are relative to the YAML file's folder")
    return tasks


def _task(path: Path, name: str, entry: Any) -> Task:
    where = f"{path}: task {name!r}"
    if not isinstance(entry, Mapping) or not isinstance(entry.get("kind"), str):
        raise EvaluationError(f"{where}: expected a mapping with a kind, found {entry!r}")
    try:
        kind = load_task(entry["kind"])
    except ConfigError as error:
        raise EvaluationError(f"{where}: {error}") from error
    require_known(entry, ("kind", "domain", "folder", "columns", *kind.layout), f"{where}: unknown key")
    columns = entry.get("columns", {})
    if not isinstance(columns, Mapping):
        raise EvaluationError(f"{where}: columns is {columns!r}, expected the kind's columns with the files' names")
    for key in {"domain", "folder", *kind.layout} & set(entry):
        if not isinstance(entry[key], str):
            raise EvaluationError(f"{where}: {key} is {entry[key]!r}, expected a text")
    absent = [part for part in kind.layout if part not in entry]
    if "folder" not in entry and (absent or not kind.layout):
        wanted = f"{' and '.join(absent)}, or the folder" if absent else "the folder"
        raise EvaluationError(f"{where}: its files are not given; add {wanted}")
    # Only the given keys: a user's class may take no more than a name and a folder.
    given: dict[str, Any] = {"domain": entry["domain"]} if "domain" in entry else {}
    if files := {part: path.parent / entry[part] for part in kind.layout if part in entry}:
        given["files"] = files
    if columns:
        given["columns"] = {str(column): str(name) for column, name in columns.items()}
    try:
        return kind(name, path.parent / entry.get("folder", "."), **given)
    except EvaluationError as error:
        raise EvaluationError(f"{path}: {error}") from error
