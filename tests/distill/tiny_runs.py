"""Runs of a tiny student on the toy cache, whole or only their trainer."""

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
    """A run of 7 batches an epoch on "few", in float32, without sharpness; `overrides` come last."""
    return RunConfig.load(
        None,
        [
            f"cache={cache}",
            f"student.model={student}",
            f"output_dir={folder}",
            "corpus=few",
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
    """What a run is made of; each may be replaced before there is a trainer."""

    config: RunConfig
    student: Student
    objective: Objective
    dataset: CachedDataset
    collator: Collator
    assembly: Assembly

    def trainer(self, kind: type[DistillTrainer] = DistillTrainer, **options: Any) -> DistillTrainer:
        made = replace(self.assembly, config=self.config, student=self.student, objective=self.objective)
        return made.trainer(kind, self.dataset, self.collator, **options)


def parts(config: RunConfig, held_out: np.ndarray[Any, Any] | None = None) -> Parts:
    """As `run` makes them; two calls give equal weights. The cache's handles live as long as the dataset."""
    made = Assembly.load(config, TeacherCache.open(config.cache))
    return Parts(config, made.student, made.objective, made.dataset(held_out), made.collator(), made)


class Stopped(Exception):
    """A run that was stopped from outside."""


def stop_at(step: int) -> Callable[[TrainingProgress], None]:
    """A progress callback that ends the run behind that step, before it is saved."""

    def report(progress: TrainingProgress) -> None:
        if progress.step == step:
            raise Stopped

    return report


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
