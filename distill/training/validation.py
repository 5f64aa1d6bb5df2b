"""Scores of a student on validation files during training, which select the best checkpoint."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from distill.config import EvaluationConfig
from distill.errors import ConfigError
from distill.evaluation.base import Encoder, Task
from distill.evaluation.evaluator import NINE, Evaluator, nine_tasks
from distill.evaluation.scores import file_digests

# Of the nine tasks, those whose validation file cannot select a checkpoint, and why.
UNUSABLE = {
    "banking77": "its validation file is part of its training file",
    "tweet": "its validation file is part of its training file",
    "sts12": "its validation file is the training split",
}


class Validation:
    """Scores a student on the validation files of labeled tasks; test files are never opened.

    Attributes:
        tasks: each scored on `NAME_validation.csv`.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = list(tasks)
        self._evaluator = Evaluator(self.tasks)

    @classmethod
    def from_config(cls, config: EvaluationConfig) -> "Validation | None":
        """The validation of a configuration; None without a folder. No file is read yet.

        Raises:
            ConfigError: a task's validation file cannot select a checkpoint.
            EvaluationError: a task is unknown, or files are missing.
            MissingDependency: scikit-learn or SciPy is absent.
        """
        if not config.data:
            return None
        unfit = [name for name in config.tasks or () if name in UNUSABLE]
        if unfit:
            usable = ", ".join(name for name in NINE if name not in UNUSABLE)
            raise ConfigError(
                f"evaluation.tasks names {unfit[0]}, but {UNUSABLE[unfit[0]]}, so it cannot select a checkpoint; "
                f"use some of {usable}"
            )
        names = config.tasks or [name for name in NINE if name not in UNUSABLE]
        return cls(nine_tasks(Path(config.data), names, split="validation"))

    def read(self) -> dict[str, str]:
        """Digests by file name; reads every file, so that a malformed one is refused before training.

        Raises:
            EvaluationError: a file is malformed.
        """
        for task in self.tasks:
            task.inputs()
        return file_digests(self.tasks)

    def __call__(self, student: Encoder) -> dict[str, float]:
        """`average` over the tasks, the score of each task by name, and `seconds`.

        The random number generators of the training are restored.
        """
        with _preserved_random_state():
            report = self._evaluator(student)
        scores = {name: task.score for name, task in report.tasks.items()}
        average = report.averages["all"].score
        if average is None:
            raise ConfigError("no task of evaluation.tasks counts in an average; name one that does")
        return scores | {"average": average, "seconds": round(report.seconds, 3)}


def points(log: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The evaluations in a log of Trainer, as in `metrics.jsonl`.

    Returns:
        Of each `step`, `epoch`, `validation` (`average` and the score of each task, times 100) and `seconds`.
    """
    return [point(line["step"], line) for line in log if "eval_average" in line]


def point(step: int, figures: Mapping[str, Any]) -> dict[str, Any]:
    """One evaluation from Trainer's metrics, whose names begin with "eval_"."""
    scores = {name.removeprefix("eval_"): value for name, value in figures.items() if name.startswith("eval_")}
    seconds, average = scores.pop("seconds"), scores.pop("average")
    return {
        "step": step,
        "epoch": figures["epoch"],
        "validation": {"average": average, **scores},
        "seconds": seconds,
    }


def best(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The point with the highest average, the earliest of equal ones; Trainer selects the same."""
    return dict(max(found, key=lambda one: one["validation"]["average"]))


def format_point(one: Mapping[str, Any]) -> str:
    """An evaluation in one line."""
    scores = ", ".join(f"{name} {score:.2f}" for name, score in one["validation"].items())
    return f"validation at step {one['step']:,} (epoch {one['epoch']:.2f}): {scores}; took {one['seconds']:.1f} s"


@contextmanager
def _preserved_random_state() -> Iterator[None]:
    import torch

    python, numbers = random.getstate(), np.random.get_state()
    device = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(device):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numbers)
