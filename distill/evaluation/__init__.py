"""Evaluation of encoders: tasks, the vectors they need, and agreement with a teacher."""

from typing import TYPE_CHECKING

from distill.registry import load_class

if TYPE_CHECKING:
    from distill.evaluation.base import Task

# A kind of task is one file in this folder and one line here; "package.module:Class" needs no line.
TASKS: dict[str, str] = {
    "classification": "distill.evaluation.classification:Classification",
    "pairs": "distill.evaluation.pairs:PairClassification",
    "retrieval": "distill.evaluation.retrieval:Retrieval",
    "sts": "distill.evaluation.sts:TextualSimilarity",
    "agreement": "distill.evaluation.label_free:Agreement",
    "approximation": "distill.evaluation.label_free:Approximation",
}


def load_task(kind: str) -> "type[Task]":
    """The class of a kind of task, by its name in `TASKS` or as "package.module:Class"."""
    from distill.evaluation.base import Task

    return load_class(kind, TASKS, "kind of task", Task)  # type: ignore[type-abstract]
