"""Runs, or only trainers, of a tiny student on the toy cache."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from distill.config import RunConfig
from distill.data.collator import Collator
from distill.data.dataset import CachedDataset
from distill.objectives.base import Objective
from distill.student.student import Student
from distill.training.assembly import Assembly
from distill.training.callbacks import TrainingProgress
from distill.training.trainer import DistillTrainer
from teacher_cache.table.cache import TeacherCache


def tiny_config(cache: Path, student: Path, folder: Path, *overrides: str) -> RunConfig:
    """A run with 7 batches per epoch on "few", in float32, of TALAS without sharpness; `overrides` come last."""
    return RunConfig.load(
        None,
        [
            f"cache={cache}",
            f"student.model={student}",
            f"output_dir={folder}",
            "corpus=few",
            "objective.name=talas",
            "sharpness.name=none",
            "data.window=64",
            "training.per_device_train_batch_size=9",
            "training.learning_rate=1e-3",
            "training.head_learning_rate=5e-3",
            "training.max_steps=12",
            "training.save_steps=1000",
            "training.logging_steps=1",
            "training.precision=fp32",
            *overrides,
        ],
    )


@dataclass
class Parts:
    """The parts of a run; each may be replaced before the trainer is built."""

    config: RunConfig
    student: Student
    objective: Objective
    dataset: CachedDataset
    collator: Collator
    assembly: Assembly

    def trainer(self, kind: type[DistillTrainer] = DistillTrainer, **options: Any) -> DistillTrainer:
        assembly = replace(self.assembly, config=self.config, student=self.student, objective=self.objective)
        return assembly.trainer(kind, self.dataset, self.collator, **options)


def parts(config: RunConfig, held_out: np.ndarray[Any, Any] | None = None) -> Parts:
    """The parts as `run` builds them; two calls give equal weights."""
    assembly = Assembly.load(config, TeacherCache.open(config.cache))
    dataset, collator = assembly.dataset(held_out), assembly.collator()
    return Parts(config, assembly.student, assembly.objective, dataset, collator, assembly)


class Stopped(Exception):
    """Raised by `stop_at`."""


def stop_at(step: int) -> Callable[[TrainingProgress], None]:
    """A progress callback that raises `Stopped` after a step, before it is saved."""

    def report(progress: TrainingProgress) -> None:
        if progress.step == step:
            raise Stopped

    return report


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
