"""Classification: macro-F1 of a logistic regression on frozen vectors."""

import warnings
from collections.abc import Mapping
from functools import cached_property
from typing import ClassVar

from distill.errors import EvaluationError
from distill.evaluation.base import Task, Vectors
from teacher_cache.errors import optional_import

with optional_import("a classification task"):
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import accuracy_score, f1_score

MAX_ITER = 200


class Classification(Task):
    """A logistic regression is fitted to `NAME_train.csv` and scored on `NAME_test.csv`; columns `text` and `label`.

    Labels are whole numbers, or names if the first one is not a number.

    The settings are those of the TALAS evaluation: scikit-learn's LogisticRegression with lbfgs, C = 1, at most 200
    iterations, features neither scaled nor normalized. Further figures: `accuracy`, and `converged`, which is 0 if the
    fit stopped at its iteration limit; its score counts, as in the published numbers.
    """

    metric: ClassVar[str] = "macro_f1"
    layout: ClassVar[Mapping[str, str]] = {"train": "{name}_train.csv", "test": "{name}_{split}.csv"}
    columns: ClassVar[tuple[str, ...]] = ("text", "label")

    @cached_property
    def parts(self) -> list[tuple[list[str], list[int | str]]]:
        """Texts and labels of the training file, then of the scored one."""
        first = next(self.rows(self.files()[0], {"label": str}))[0]
        label = class_number if is_number(first) else class_name
        parts = []
        for path in self.files():
            rows = list(self.rows(path, {"text": str, "label": label}))
            parts.append(([text for text, _ in rows], [label for _, label in rows]))
        if len(set(parts[0][1])) < 2:
            raise EvaluationError(f"{self.files()[0]}: one class only, a classifier needs at least two")
        return parts

    def texts(self) -> list[str]:
        return [text for texts, _ in self.parts for text in texts]

    def score(self, vectors: Vectors) -> dict[str, float]:
        (train_texts, train_labels), (texts, labels) = self.parts
        classifier = LogisticRegression(random_state=42, max_iter=MAX_ITER)
        converged = True
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ConvergenceWarning)
            classifier.fit(vectors(train_texts), train_labels)
        for warning in caught:
            if issubclass(warning.category, ConvergenceWarning):
                converged = False
            else:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        predicted = classifier.predict(vectors(texts))
        return {
            self.metric: 100 * float(f1_score(labels, predicted, average="macro")),
            "accuracy": 100 * float(accuracy_score(labels, predicted)),
            "converged": float(converged),
        }


def is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def class_number(cell: str) -> int:
    try:
        return int(cell)
    except ValueError:
        raise ValueError(f"{cell!r}, expected a whole number") from None


def class_name(cell: str) -> str:
    if not cell.strip():
        raise ValueError(f"{cell!r}, expected the name of a class")
    return cell
