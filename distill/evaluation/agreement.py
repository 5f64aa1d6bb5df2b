"""Agreement of a student's cosines with its teacher's, measured without labels."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from distill.errors import EvaluationError
from distill.evaluation.base import unit_rows
from distill.evaluation.sts import spearman

# Cosines of float32 vectors are accurate to about 1e-7. Rounded, cosines of duplicates and of rotated vectors tie,
# independent of the order of summation.
DECIMALS = 6


@dataclass(frozen=True)
class Agreement:
    """Two figures that are 1 if student and teacher agree on everything.

    Attributes:
        spearman: rho between the two models' cosines of all n (n - 1) / 2 pairs, in [-1, 1]; 0 if the student gives
            every pair the same cosine.
        overlap: mean share, in [0, 1], of a text's nearest neighbors that the two models have in common. Chance level
            is `neighbours / (texts - 1)`.
        neighbours: number of nearest neighbors of each text, itself excluded.
    """

    spearman: float
    overlap: float
    neighbours: int
    texts: int


def agreement(student: npt.NDArray[Any], teacher: npt.NDArray[Any], neighbours: int = 10) -> Agreement:
    """Agreement of the `(n, d_s)` and `(n, d_T)` vectors of the same n texts.

    Texts that tie for the last places among the nearest neighbors share those places equally, so the figures do not
    depend on the order of the texts. Memory is about 80 n^2 bytes: a few thousand texts are enough and fit.

    Raises:
        EvaluationError: the two have different numbers of texts, or at most `neighbours` + 1; a vector is not finite;
            or the teacher gives every pair the same cosine.
    """
    count = len(student)
    if student.ndim != 2 or teacher.ndim != 2 or len(teacher) != count:
        raise EvaluationError(
            f"agreement: student {student.shape}, teacher {teacher.shape}; expected (n, d) of the same texts"
        )
    if not 1 <= neighbours < count - 1:
        raise EvaluationError(
            f"agreement: {neighbours} nearest neighbors of {count} texts; expected at least 1 neighbor and more than "
            "neighbors + 1 texts"
        )
    student_cosines = _cosines(student, "student")
    teacher_cosines = _cosines(teacher, "teacher")
    pairs = np.triu_indices(count, k=1)
    if np.ptp(teacher_cosines[pairs]) == 0:
        raise EvaluationError(f"agreement: the teacher gives all {count} texts the same cosine to one another")
    rho = spearman(student_cosines[pairs], teacher_cosines[pairs])
    shared = np.minimum(_neighbor_weights(student_cosines, neighbours), _neighbor_weights(teacher_cosines, neighbours))
    return Agreement(
        spearman=0.0 if rho is None else rho,
        overlap=float(shared.sum()) / (count * neighbours),
        neighbours=neighbours,
        texts=count,
    )


def _cosines(vectors: npt.NDArray[Any], model: str) -> npt.NDArray[np.float64]:
    """`(n, n)` cosines, rounded to the accuracy of float32 vectors."""
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        raise EvaluationError(f"agreement: {np.count_nonzero(~finite)} {model} vectors hold NaN or infinity")
    units = unit_rows(vectors)
    cosines: npt.NDArray[np.float64] = units @ units.T
    return np.round(cosines, DECIMALS, out=cosines)


def _neighbor_weights(cosines: npt.NDArray[np.float64], neighbors: int) -> npt.NDArray[np.float64]:
    """`(n, n)` weight of text j among the nearest `neighbors` of text i: 1, 0, or a share of tied last places."""
    others = cosines.copy()
    np.fill_diagonal(others, -np.inf)
    last = np.partition(others, -neighbors, axis=1)[:, [-neighbors]]
    above = others > last
    tied = others == last
    left = neighbors - above.sum(axis=1, keepdims=True)
    weights: npt.NDArray[np.float64] = above + tied * (left / tied.sum(axis=1, keepdims=True))
    return weights
