"""Members of a kind by name, such as objectives: their classes, options and descriptions."""

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any, TypeVar

from distill.errors import ConfigError

Kind = TypeVar("Kind")


def load_class(name: str, table: Mapping[str, str], noun: str, base: type[Kind]) -> type[Kind]:
    """The class of a name in `table`, or of "package.module:Class".

    Args:
        noun: the kind, for messages: "analysis".
        base: the class must be a subclass of it.
    """
    module_name, colon, class_name = table.get(name, name).partition(":")
    if not (module_name and colon and class_name):
        hint = suggestion(name, sorted(table))
        raise ConfigError(f"{noun}: none is called {name!r}; {hint} Your own class is 'package.module:Class'")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, but an import in it fails
        raise ConfigError(
            f"{noun}: found no module {module_name!r} for {name!r}; check its spelling and the Python path"
        ) from error
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(
            f"{noun}: {name!r} must name a subclass of {base.__module__}.{base.__qualname__}; {module_name} "
            + (f"has no {class_name!r}" if found is None else f"has {found!r} there")
        )
    return found


def description(member: Any) -> str:
    """One line on a class or function: the first line of its docstring."""
    return (inspect.getdoc(member) or "").partition("\n")[0]


def suggestion(name: str, known: Collection[str]) -> str:
    """The nearest known name as a question, or the list of known names."""
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)};"


def construct(make: Callable[..., Kind], who: str, *arguments: Any, options: Mapping[str, Any], **given: Any) -> Kind:
    """`make(*arguments, **options, **given)`, with options of a user.

    Args:
        who: begins the message: "objective talas".
    """
    try:
        return make(*arguments, **options, **given)
    except TypeError as error:
        known = [
            name
            for name, option in inspect.signature(make).parameters.items()
            if option.kind is inspect.Parameter.KEYWORD_ONLY and name not in given
        ]
        unknown = [name for name in options if name not in known]
        if not unknown:
            raise ConfigError(f"{who} cannot use its options: {error}") from error
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"its options: {', '.join(known) or 'none'}"
        raise ConfigError(f"{who} has no option {unknown[0]!r}; {hint}") from error
