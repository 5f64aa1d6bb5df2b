"""Semantic textual similarity: Spearman correlation of the cosine with human scores."""

import math
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from distill.evaluation.base import PairTask
from teacher_cache.errors import optional_import

with optional_import("Spearman's correlation"):
    from scipy.stats import spearmanr


class TextualSimilarity(PairTask):
    """Spearman's rho over the whole file, `NAME_test.csv`, with a column `score`.

    STS12 is one concatenated file, so its score is not a mean over its sources. If all cosines are equal, as for an
    encoder that gives each text the same vector, rho is undefined: the score is 0 and the further figure `constant`
    is 1.
    """

    metric: ClassVar[str] = "spearman"
    columns: ClassVar[tuple[str, ...]] = ("sentence1", "sentence2", "score")

    @staticmethod
    def parse(cell: str) -> float:
        try:
            value = float(cell)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ValueError(f"{cell!r}, expected a number")
        return value

    def rate(self, cosines: npt.NDArray[Any]) -> dict[str, float]:
        rho = spearman(cosines, self.values)
        return {self.metric: 0.0 if rho is None else 100 * rho, "constant": float(rho is None)}


def spearman(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> float | None:
    """Spearman's rho of two `(n,)` arrays, average ranks for ties; None if either is constant."""
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return float(spearmanr(first, second).statistic)
