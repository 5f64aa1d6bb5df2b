"""What sweeps of tiny runs share."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from distill.runs import sweep as sweep_module
from distill.runs.launch import Launcher
from tests.distill.tiny_sweeps import InThreads


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def launcher(workers: str, parallel: int, gpus_per_run: float | None) -> Iterator[Launcher]:
        yield InThreads(1)

    monkeypatch.setattr(sweep_module, "launcher", launcher)
    monkeypatch.setattr("distill.runs.job._print", lambda line: None)  # a process writes to its log


@pytest.fixture
def base(toy_cache: Path, tiny_student: Path) -> dict[str, Any]:
    """Three steps of 50 records on "sentences"."""
    return {
        "cache": str(toy_cache),
        "corpus": "sentences",
        "student": {"model": str(tiny_student)},
        "objective": {"name": "talas"},
        "data": {"window": 256},
        "training": {
            "max_steps": 3,
            "per_device_train_batch_size": 50,
            "precision": "fp32",
            "learning_rate": 1e-3,
            "logging_steps": 1,
        },
    }
