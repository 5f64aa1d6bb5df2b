"""Members of a kind by name: a table of strings, or an address of one's own; and how they take their options."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TypeVar

from distill.errors import ConfigError

Kind = TypeVar("Kind")


def load_class(name: str, table: Mapping[str, str], noun: str, base: type[Kind]) -> type[Kind]:
    """The class behind a name of `table`, or behind "package.module:Class", which needs no line there.

    Args:
        noun: what a member is, for messages: "analysis".
        base: whose subclass it must be.

    Raises:
        ConfigError: an unknown name, a module or class that is not there, or a class that is no `base`.
    """
    module_name, colon, class_name = table.get(name, name).partition(":")
    if not (module_name and colon and class_name):
        near = difflib.get_close_matches(name.lower(), table, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(table))};"
        raise ConfigError(f"{noun}: none is called {name!r}; {hint} One of your own is 'package.module:Class'")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        raise ConfigError(
            f"{noun}: found no module {module_name!r} for {name!r}; check its spelling and the Python path"
        ) from error
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(
            f"{noun}: {name!r} must name a subclass of {base.__module__}.{base.__qualname__}, {module_name!r} has "
            f"{found!r} there"
        )
    return found


def construct(make: Callable[..., Kind], who: str, *arguments: Any, options: Mapping[str, Any], **given: Any) -> Kind:
    """`make(*arguments, **options, **given)`, where the options are a user's.

    Args:
        who: begins the message: "objective talas".

    Raises:
        ConfigError: `make` has no such option, with the nearest that it has, or cannot use it.
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
