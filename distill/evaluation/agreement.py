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


# Of the ridge heads of `fitted_agreement`: its penalty, as a share of the mean variance of the student's vectors times
# the number of texts.
PENALTIES = tuple(10.0**power for power in range(-5, 1))


@dataclass(frozen=True)
class FittedAgreement:
    """Agreement of a student with its teacher after a linear head was fitted, on texts that it was not fitted to.

    Attributes:
        cosine: mean cosine between the head's output and the teacher's vector, in [-1, 1].
        spearman: as in `Agreement`, between cosines of the head's outputs and of the teacher's vectors.
        fitted: number of texts that the head was fitted to.
        texts: number of texts that the figures are of.
    """

    cosine: float
    spearman: float
    fitted: int
    texts: int


def fitted_agreement(
    student: npt.NDArray[Any], teacher: npt.NDArray[Any], held_out: npt.NDArray[np.bool_]
) -> FittedAgreement:
    """What a student's vectors already know of the teacher's: agreement after a least-squares head.

    The head is a ridge regression with an intercept from the student's `(n, d_s)` vectors to the teacher's `(n, d_T)`;
    its penalty is the one of `PENALTIES` with the smallest leave-one-out error.

    Args:
        held_out: `(n,)` true for the texts that are scored instead of fitted.

    Raises:
        EvaluationError: as `agreement`, which needs more than 11 held-out texts.
    """
    from sklearn.linear_model import RidgeCV

    inputs, outputs = np.asarray(student, dtype=np.float64), np.asarray(teacher, dtype=np.float64)
    chosen = ~held_out
    scale = len(inputs[chosen]) * inputs[chosen].var(axis=0).mean()
    head = RidgeCV(alphas=[max(scale, np.finfo(np.float64).tiny) * share for share in PENALTIES])
    head.fit(inputs[chosen], outputs[chosen])
    predicted = head.predict(inputs[held_out])
    return FittedAgreement(
        cosine=float((unit_rows(predicted) * unit_rows(outputs[held_out])).sum(axis=1).mean()),
        spearman=agreement(predicted, outputs[held_out]).spearman,
        fitted=int(chosen.sum()),
        texts=int(held_out.sum()),
    )
