"""Evaluation of encoders: kinds of task by name, the nine tasks, agreement with a teacher."""

from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING

from distill.errors import EvaluationError

if TYPE_CHECKING:
    from distill.evaluation.base import Task

# A kind of task is one file in this folder and one line here; "package.module:Class" needs no line.
TASKS: dict[str, str] = {
    "classification": "distill.evaluation.classification:Classification",
    "pairs": "distill.evaluation.pairs:PairClassification",
    "sts": "distill.evaluation.sts:TextualSimilarity",
}


def load_task(kind: str) -> "type[Task]":
    """The class of a kind of task, by its name in `TASKS` or as "package.module:Class".

    Raises:
        EvaluationError: no such kind, module or class, or the class is not a `Task`.
        MissingDependency: the kind needs a library that is not installed.
    """
    from distill.evaluation.base import Task

    target = TASKS.get(kind, kind)
    module_name, colon, class_name = target.partition(":")
    if not colon:
        nearest = get_close_matches(kind, TASKS, n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise EvaluationError(
            f"no kind of task is called {kind!r}: {hint}Known: {', '.join(TASKS)}, or package.module:Class"
        )
    try:
        found = getattr(import_module(module_name), class_name)
    except ModuleNotFoundError as error:
        # A library that is missing inside the named module is not a misspelt module.
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise
        raise EvaluationError(f"task {target!r}: there is no module {error.name!r}") from error
    except AttributeError as error:
        raise EvaluationError(f"task {target!r}: {module_name} has no class {class_name!r}") from error
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise EvaluationError(f"task {target!r} is not a subclass of distill.evaluation.base.Task")
    return found
