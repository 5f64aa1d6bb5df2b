"""Sweeps whose runs are in threads."""

import json
from pathlib import Path
from typing import Any

import yaml

from distill.runs.job import work
from distill.runs.launch import Job, Launcher


class InThreads(Launcher):
    """Does the work of a run's process in a thread."""

    def _start(self, job: Job) -> str | None:
        work(json.loads(json.dumps(job.content)))
        return None

    def _stop(self) -> None:
        pass


def write_sweep(folder: Path, base: dict[str, Any], **settings: Any) -> Path:
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({"output_dir": str(folder / "sweep"), "base": base} | settings, sort_keys=False))
    return path
