"""The parts of a run, created in one order, so that equal seeds give equal weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from distill.config import RunConfig
from distill.data.collator import Collator
from distill.data.dataset import CachedDataset
from distill.objectives.base import Objective
from distill.student.student import Student
from distill.training.head_init import fit_heads
from distill.training.method import build_objective, build_sharpness
from distill.training.targets import Targets
from distill.training.trainer import Distillation, DistillTrainer
from teacher_cache.storage.manifest import Manifest
from teacher_cache.table.cache import TeacherCache

AnyTrainer = TypeVar("AnyTrainer", bound=DistillTrainer)


@dataclass(frozen=True)
class Assembly:
    """Student, objective and training data of a run.

    Attributes:
        skipped: ascending rows that `data.skip_quarantined` skips.
    """

    config: RunConfig
    targets: Targets
    manifest: Manifest
    student: Student
    objective: Objective
    skipped: npt.NDArray[np.int64]

    @classmethod
    def load(cls, config: RunConfig, cache: TeacherCache) -> Self:
        """Load the student's weights, and initialize the objective's from the run's seed."""
        from transformers import set_seed

        targets, manifest = Targets(config, cache), cache.corpus(config.corpus)
        student = Student.load(config.student)
        set_seed(config.training.seed)  # before the first random weight
        objective = build_objective(config, student.shape, targets)
        targets.check(objective, manifest)
        return cls(config, targets, manifest, student, objective, targets.skipped_rows(objective))

    def dataset(self, held_out: npt.NDArray[np.int64] | None = None) -> CachedDataset:
        """The training records.

        Args:
            held_out: rows to exclude, in addition to `skipped`.
        """
        left_out = self.skipped if held_out is None else np.union1d(held_out, self.skipped)
        return self.targets.dataset(self.manifest, self.objective, left_out)

    def fit_heads(self, model: Distillation, dataset: CachedDataset) -> int:
        """Start the heads by least squares if `training.head_init` says so; returns the texts of the fit, or 0."""
        if self.config.training.head_init != "least_squares":
            return 0
        return fit_heads(model, dataset, self.config.training.seed)

    def collator(self) -> Collator:
        """The collator of these records; loads an online teacher."""
        return self.targets.collator(self.manifest, self.objective, self.student)

    def trainer(
        self, kind: Callable[..., AnyTrainer], dataset: CachedDataset, collator: Collator, **options: Any
    ) -> AnyTrainer:
        """A trainer of student and objective with sharpness; `options` are further ones of its class."""
        transform = self.targets.transform()
        if transform is not None:
            transform.fit(dataset)
        model = Distillation(self.student, self.objective, transform)
        return kind(model, self.config, dataset, collator, build_sharpness(self.config, model), **options)
