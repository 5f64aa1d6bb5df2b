"""Names of the files in a run folder, and its records."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from distill.errors import RunFolderError
from teacher_cache.space import EmbeddingSpace
from teacher_cache.teachers.folder import RUN_RECORD as RECORD
from teacher_cache.teachers.folder import STUDENT as FINAL

CONFIG = "config.yaml"
SCORES = "eval.json"
# Folder with one record per analysis.
ANALYSES = "analyses"

__all__ = [
    "ANALYSES",
    "CONFIG",
    "FINAL",
    "RECORD",
    "SCORES",
    "is_finished",
    "is_run_folder",
    "read_record",
    "recorded_space",
]


def is_run_folder(folder: Path) -> bool:
    """Whether the folder has a configuration of a run."""
    return (folder / CONFIG).is_file()


def is_finished(folder: Path) -> bool:
    """Whether the run finished and its student exists."""
    return (folder / FINAL).is_dir() and (read_record(folder) or {}).get("status") == "finished"


def read_record(folder: Path, name: str = RECORD) -> dict[str, Any] | None:
    """A JSON record of the folder; None if it does not exist."""
    path = folder / name
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise RunFolderError(f"{path} is not JSON: {error}; remove it, or choose another folder") from error
    return record


def recorded_space(record: Mapping[str, Any]) -> EmbeddingSpace | None:
    """The space in the record of a run; None if there are several."""
    known = record.get("space", {})
    names = [field.name for field in fields(EmbeddingSpace)]
    return EmbeddingSpace(**{name: known[name] for name in names}) if known.keys() >= set(names) else None
