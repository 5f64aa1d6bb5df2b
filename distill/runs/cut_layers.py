"""Which layers of a model to keep: candidates, scored without labels and without training."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from distill.evaluation.agreement import FittedAgreement, fitted_agreement
from distill.student.cut_spec import CutSpec
from distill.student.cutting import cut_layers, first_and_last, layer_candidates
from distill.student.student import Student
from distill.student.vocabulary import BATCH
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.joint import JointSpace
from teacher_cache.table.view import SpaceView

# Cached texts that candidates are scored on; every HELD_OUT-th of them is not fitted.
SCORED_TEXTS = 2500
HELD_OUT = 5
LEAST_SCORED = 100


@dataclass(frozen=True)
class Candidate:
    """A set of layers, with its score before training; None without a cache."""

    name: str
    layers: tuple[int, ...]
    score: FittedAgreement | None


@dataclass(frozen=True)
class CachedTexts:
    """Texts of a corpus in a cache with their teacher vectors, some of them to choose layers on."""

    cache: TeacherCache
    rows: npt.NDArray[np.int64]
    scored: npt.NDArray[np.int64]
    space: SpaceView | JointSpace

    @classmethod
    def of(
        cls,
        cache: TeacherCache,
        space: SpaceView | JointSpace,
        corpus: str | None,
        without: npt.NDArray[np.int64] | None = None,
    ) -> "CachedTexts":
        """The distinct texts of a corpus; those that are scored are spread evenly over the ones with a vector.

        Args:
            without: rows that must not be scored.
        """
        rows = cache.corpus(corpus).distinct_rows(cache.rows)
        usable = rows[space.present(rows)]
        usable = np.setdiff1d(usable, list(space.quarantined()), assume_unique=True)
        if without is not None:
            usable = np.setdiff1d(usable, without, assume_unique=True)
        places = np.linspace(0, len(usable) - 1, min(SCORED_TEXTS, len(usable))).astype(np.int64)
        return cls(cache, rows, usable[places], space)

    def batches(self) -> Iterator[Sequence[str]]:
        for start in range(0, len(self.rows), BATCH):
            yield self.cache.texts(self.rows[start : start + BATCH])

    @property
    def can_score(self) -> bool:
        """Whether there are texts enough to fit a head and score it."""
        return len(self.scored) >= LEAST_SCORED

    def score(self, student: Student) -> FittedAgreement:
        """Agreement of a student's vectors with the teacher's."""
        held_out = np.arange(len(self.scored)) % HELD_OUT == HELD_OUT - 1
        return fitted_agreement(student.encode(self.cache.texts(self.scored)), self.space.gather(self.scored), held_out)


def choose_layers(
    spec: CutSpec, student: Student, scoring: CachedTexts | None, announce: Callable[[str], None]
) -> tuple[Candidate, ...]:
    """The sets of layers that were compared, the best one first."""
    count = student.shape.layers
    if spec.layers is not None:
        return (Candidate("given", spec.layers, None),)
    if spec.depth in (None, count):
        return (Candidate("all", tuple(range(count)), None),)
    if scoring is None:
        announce("the first layers and the last one are kept: no cache, or one with too few texts, to choose them with")
        return (Candidate("first and last", first_and_last(count, spec.depth), None),)
    found = []
    for name, layers in layer_candidates(count, spec.depth).items():
        score = scoring.score(cut_layers(student, layers))
        found.append(Candidate(name, layers, score))
        announce(
            f"layers {','.join(map(str, layers))} ({name}): agreement with the teacher before training, mean cosine "
            f"{score.cosine:.3f}, Spearman {score.spearman:.3f}"
        )
    return tuple(sorted(found, key=_error))


def _error(candidate: Candidate) -> float:
    """What candidates are ordered by.

    Of the two figures, the mean cosine orders them as scores after training do (docs/decisions/0024-cut.md).
    """
    return 2.0 if candidate.score is None else 1.0 - candidate.score.cosine
