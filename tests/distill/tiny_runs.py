"""Runs of a tiny student on the toy cache, whole or only their trainer."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import set_seed

from distill.config import RunConfig
from distill.data.dataset import CachedDataset, Collator
from distill.objectives import load_objective
from distill.objectives.base import Objective, TeacherShape
from distill.sharpness import build_sharpness
from distill.student import Student
from distill.trainer import Distillation, DistillTrainer, TrainingProgress
from teacher_cache.cache import TeacherCache


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
    """What a run is made of."""

    config: RunConfig
    student: Student
    objective: Objective
    dataset: CachedDataset
    collator: Collator

    def trainer(self, kind: type[DistillTrainer] = DistillTrainer, **options: Any) -> DistillTrainer:
        model = Distillation(self.student, self.objective)
        sharpness = build_sharpness(self.config.sharpness.name, model.named_parameters())
        return kind(model, self.config, self.dataset, self.collator, sharpness, **options)


def parts(config: RunConfig, held_out: np.ndarray[Any, Any] | None = None) -> Parts:
    """As `run` makes them; two calls give equal weights. The cache's handles live as long as the dataset."""
    cache = TeacherCache.open(config.cache)
    space = cache.space(config.space)
    student = Student.load(config.student)
    set_seed(config.training.seed)
    kind: Any = load_objective(config.objective.name)
    objective: Objective = kind(student.shape, TeacherShape(space.dims), **config.objective.options)
    pairs = objective.views == "pair"
    dataset = CachedDataset(cache, space, cache.corpus(config.corpus), left_out=held_out, pairs=pairs)
    repeat = 1 if pairs else objective.needs.views
    collator = Collator(student.tokenizer, student.max_length, prompt=student.prompt, repeat=repeat)
    return Parts(config, student, objective, dataset, collator)


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
