"""Layers: similarity of a student's layers to each other and to the teacher, and how much training changed them.

Of the pooled states e of n texts in layers 0 to L, 0 being the embedding layer, with R_l the `(n, n)` cosines of layer
l and C(R) those cosines off the diagonal, centered:

    between[l][m] = <C(R_l), C(R_m)> / (||C(R_l)|| ||C(R_m)||)      to_teacher[l]: R_m of the teacher's vectors
    gaps[l]       = mean over all n^2 pairs of (R_(l+1) - R_l)^2
    drift[l]      = 1 - mean over texts of cos(e_l before, e_l after)
    kept[l]       = the similarity of `between`, of layer l before and after

The similarity is debiased linear CKA of unit states (Kornblith et al. 2019; Song et al. 2012; Nguyen et al. 2021): 1
for equal cosines, 0 on average for unrelated states. The plain cosine of two matrices of cosines is near 1 for any two
layers, as all states of a layer share a direction, and CKA without the correction grows with the dimensions even for
unrelated states. Widths may differ, and rotations do not matter, so `kept` near 1 with a large `drift` is a layer that
was rotated, not reordered. `gaps` is what TALAS's layer term (LASD) minimizes.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from distill.analyses.base import Analysis, int_option
from distill.analyses.trained_run import TrainedRun
from distill.errors import EvaluationError
from distill.evaluation.base import unit_rows

# Cosines of float32 states are accurate to about 1e-6: with smaller centered ones a layer does not distinguish texts.
SMALLEST_SPREAD = 1e-6
FEWEST_TEXTS = 4

Matrix = npt.NDArray[np.float64]


class Layers(Analysis):
    """Compares a run's student before and after training, layer by layer."""

    name: ClassVar[str] = "layers"

    def __init__(self, *, texts: int = 256, **options: Any) -> None:
        """
        Args:
            texts: at most this many, at least 4; memory grows with its square, times the layers.
        """
        super().__init__(**options)
        self.texts = int_option("layers.texts", texts, FEWEST_TEXTS)

    def __call__(self, run: TrainedRun) -> dict[str, Any]:
        """The figures above, as lists from the embedding layer to the last layer."""
        rows, held_out = run.sample_rows(self.texts)
        texts = run.cache.texts(rows)
        self.progress("encoding layers", 0, 2, "before training")
        before = run.initial().student.encode_layers(texts)
        self.progress("encoding layers", 1, 2, "after training")
        after = run.load().student.encode_layers(texts)
        return compare_layers(before, after, run.space.gather(rows)) | {"held_out": held_out}

    @staticmethod
    def conclusion(result: Mapping[str, Any]) -> str:
        names, drift = result["layers"], result["drift"]
        moved = int(np.argmax(drift))
        before, after = result["before"]["to_teacher"][-1], result["after"]["to_teacher"][-1]
        return (
            f"Training changed layer {names[moved]} most (drift {drift[moved]:.3f}, similarity before and after "
            f"{result['kept'][moved]:.2f}) and changed the last layer's similarity to the teacher from {before:.2f} to "
            f"{after:.2f} (CKA over {result['texts']} {'held-out' if result['held_out'] else 'training'} texts)."
        )


def compare_layers(before: npt.NDArray[Any], after: npt.NDArray[Any], teacher: npt.NDArray[Any]) -> dict[str, Any]:
    """The result of the analysis.

    Args:
        before: `(L + 1, n, d_s)` pooled states, and `after` of the same texts.
        teacher: `(n, d_T)`.
    """
    texts = len(teacher)
    if texts < FEWEST_TEXTS:
        raise EvaluationError(f"layers are compared on at least {FEWEST_TEXTS} texts; there are {texts}")
    teacher_cosines = centered_cosines(teacher)
    sides = {"before": before, "after": after}
    centered = {side: np.stack([centered_cosines(layer) for layer in states]) for side, states in sides.items()}
    units = {side: np.stack([unit_rows(layer) for layer in states]) for side, states in sides.items()}
    names = ["embeddings", *(str(number) for number in range(1, len(before)))]
    constant = {
        side: [names[place] for place in np.flatnonzero(~values.any((1, 2)))] for side, values in centered.items()
    }
    drift = 1 - np.einsum("lnd,lnd->ln", units["before"], units["after"]).mean(1)
    kept = np.diag(cka(centered["before"], centered["after"]))
    result: dict[str, Any] = {"texts": texts, "layers": names}
    for side, values in centered.items():
        result[side] = {
            "between": _rounded(cka(values, values)),
            "to_teacher": _rounded(cka(values, teacher_cosines[None])[:, 0]),
            "gaps": _rounded(np.array([_gap(*pair) for pair in zip(units[side][:-1], units[side][1:], strict=True)])),
            "constant": constant[side],
        }
    return result | {"drift": _rounded(np.maximum(drift, 0)), "kept": _rounded(kept)}


def centered_cosines(vectors: npt.NDArray[Any]) -> Matrix:
    """`(n, n)` cosines of n >= 4 vectors, centered so that their products estimate HSIC without bias.

    Rows and columns sum to 0, and the diagonal is 0, since the similarity of a text to itself is excluded (U-centering
    of Szekely and Rizzo 2014). All 0 if all pairs of texts have the same cosine.
    """
    count = len(vectors)
    units = unit_rows(vectors)
    cosines: Matrix = units @ units.T
    np.fill_diagonal(cosines, 0)
    sums = cosines.sum(1)
    cosines -= (sums[:, None] + sums[None, :]) / (count - 2)
    cosines += sums.sum() / ((count - 1) * (count - 2))
    np.fill_diagonal(cosines, 0)
    if np.sqrt(np.mean(cosines**2)) < SMALLEST_SPREAD:
        cosines[:] = 0
    return cosines


def cka(first: Matrix, second: Matrix) -> Matrix:
    """`(a, b)` debiased CKA of `(a, n, n)` and `(b, n, n)` centered cosines; 0 where one is all 0."""
    return unit_rows(first.reshape(len(first), -1)) @ unit_rows(second.reshape(len(second), -1)).T


def _gap(lower: Matrix, upper: Matrix) -> float:
    """Mean squared difference of two layers' cosines, with the diagonal's zeros, as in LASD."""
    return float(np.mean((upper @ upper.T - lower @ lower.T) ** 2))


def _rounded(values: npt.NDArray[Any]) -> Any:
    return (np.round(values, 6) + 0.0).tolist()  # no -0.0
