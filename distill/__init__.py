"""Train, evaluate and export small embedding models from a teacher cache.

Names are imported on first use: `import distill` loads no heavy library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distill.config import DataConfig as DataConfig
    from distill.config import EvaluationConfig as EvaluationConfig
    from distill.config import ExportConfig as ExportConfig
    from distill.config import ObjectiveConfig as ObjectiveConfig
    from distill.config import RunConfig as RunConfig
    from distill.config import SharpnessConfig as SharpnessConfig
    from distill.config import StudentConfig as StudentConfig
    from distill.config import TeacherConfig as TeacherConfig
    from distill.config import TrainingConfig as TrainingConfig
    from distill.evaluation.base import Report as Report
    from distill.evaluation.base import Task as Task
    from distill.evaluation.evaluator import evaluate as evaluate
    from distill.objectives.base import Needs as Needs
    from distill.objectives.base import Objective as Objective
    from distill.runs.cut import CutResult as CutResult
    from distill.runs.cut import cut as cut
    from distill.runs.run import RunResult as RunResult
    from distill.runs.run import run as run
    from distill.runs.static import StaticResult as StaticResult
    from distill.runs.static import build_static as build_static
    from distill.student.student import Student as Student
    from distill.training.loss import CachedLoss as CachedLoss

# Public name -> module that defines it.
_PUBLIC = {
    "CachedLoss": "distill.training.loss",
    "CutResult": "distill.runs.cut",
    "DataConfig": "distill.config",
    "EvaluationConfig": "distill.config",
    "ExportConfig": "distill.config",
    "Needs": "distill.objectives.base",
    "Objective": "distill.objectives.base",
    "ObjectiveConfig": "distill.config",
    "Report": "distill.evaluation.base",
    "RunConfig": "distill.config",
    "RunResult": "distill.runs.run",
    "SharpnessConfig": "distill.config",
    "Student": "distill.student.student",
    "StaticResult": "distill.runs.static",
    "StudentConfig": "distill.config",
    "Task": "distill.evaluation.base",
    "TeacherConfig": "distill.config",
    "TrainingConfig": "distill.config",
    "cut": "distill.runs.cut",
    "build_static": "distill.runs.static",
    "evaluate": "distill.evaluation.evaluator",
    "run": "distill.runs.run",
}
__all__ = [*_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(_PUBLIC[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
