"""Pair classification: average precision of the cosine."""

from typing import Any, ClassVar

import numpy.typing as npt

from distill.evaluation.base import PairTask
from teacher_cache.errors import optional_import

with optional_import("a task of labeled pairs"):
    from sklearn.metrics import average_precision_score


class PairClassification(PairTask):
    """Average precision of ranking the pairs labeled 1 above those labeled 0 by their cosine; `NAME_test.csv`.

    AP = sum over thresholds n of (R_n - R_(n-1)) P_n, without interpolation, P and R being precision and recall among
    the pairs whose cosine is at least the n-th distinct one. No threshold is tuned on the scored pairs. A constant
    cosine gives the share of positives.
    """

    metric: ClassVar[str] = "average_precision"
    columns: ClassVar[tuple[str, ...]] = ("sentence1", "sentence2", "label")

    @staticmethod
    def parse(cell: str) -> float:
        if cell not in ("0", "1"):
            raise ValueError(f"{cell!r}, expected 0 or 1")
        return float(cell)

    def rate(self, cosines: npt.NDArray[Any]) -> dict[str, float]:
        return {self.metric: 100 * float(average_precision_score(self.values, cosines))}
