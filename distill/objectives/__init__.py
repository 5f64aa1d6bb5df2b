"""Objectives by name; each method is one file here and one line in the table."""

from typing import TYPE_CHECKING

from distill.registry import load_class
from teacher_cache.errors import optional_import

if TYPE_CHECKING:
    from distill.objectives.base import Objective

OBJECTIVES: dict[str, str] = {
    "cdm": "distill.objectives.cdm:CDM",
    "cosine": "distill.objectives.cosine:Cosine",
    "distillcse": "distill.objectives.distillcse:DistillCSE",
    "dskd": "distill.objectives.dskd:DSKD",
    "emo": "distill.objectives.emo:EMO",
    "jasper": "distill.objectives.jasper:Jasper",
    "leaf": "distill.objectives.leaf:Leaf",
    "rkd": "distill.objectives.rkd:RKD",
    "simcse": "distill.objectives.simcse:SimCSE",
    "talas": "distill.objectives.talas:Talas",
    "two-stage": "distill.objectives.two_stage:TwoStage",
}


def load_objective(name: str) -> "type[Objective]":
    """The class of a name in `OBJECTIVES`, or of "package.module:Class"."""
    with optional_import(f"objective {name!r}"):
        from distill.objectives.base import Objective

        return load_class(name, OBJECTIVES, "objective", Objective)  # type: ignore[type-abstract]
