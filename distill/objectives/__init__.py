"""The table of objectives: one method a file here, one line a method below."""

import difflib
from importlib import import_module
from typing import TYPE_CHECKING

from distill.errors import ConfigError
from teacher_cache.errors import MissingDependency

if TYPE_CHECKING:
    from distill.objectives.base import Objective

OBJECTIVES: dict[str, str] = {
    "cdm": "distill.objectives.cdm:CDM",
    "distillcse": "distill.objectives.distillcse:DistillCSE",
    "dskd": "distill.objectives.dskd:DSKD",
    "emo": "distill.objectives.emo:EMO",
    "jasper": "distill.objectives.jasper:Jasper",
    "leaf": "distill.objectives.leaf:Leaf",
    "rkd": "distill.objectives.rkd:RKD",
    "simcse": "distill.objectives.simcse:SimCSE",
    "talas": "distill.objectives.talas:Talas",
}


def load_objective(name: str) -> "type[Objective]":
    """The class behind a name of `OBJECTIVES`, or behind "package.module:Class", which needs no line there.

    Raises:
        ConfigError: an unknown name, a module or class that is not there, or a class that is no `Objective`.
        MissingDependency: torch is not installed.
    """
    address = OBJECTIVES.get(name, name)
    module_name, colon, class_name = address.partition(":")
    if not (module_name and colon and class_name):
        near = difflib.get_close_matches(name.lower(), OBJECTIVES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(OBJECTIVES))}."
        raise ConfigError(
            f"objective: no method is called {name!r}; {hint} A method of your own is 'package.module:Class'"
        )
    try:
        from distill.objectives.base import Objective

        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name == "torch":
            raise MissingDependency(f"objective {name!r} needs torch: pip install 'teacher-cache[train]'") from error
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        raise ConfigError(
            f"objective: found no module {module_name!r} for {name!r}; check its spelling and the Python path"
        ) from error
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, Objective)):
        raise ConfigError(
            f"objective: {name!r} must name a subclass of distill.objectives.base.Objective, "
            f"{module_name!r} has {found!r} there"
        )
    return found
