"""Dataclasses from YAML files and `key=value` overrides, with errors that name the key."""

import difflib
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Union

import yaml

from distill.errors import ConfigError


def read_yaml(path: Path) -> dict[str, Any]:
    """Keys and values of a YAML file.

    Raises:
        ConfigError: the file cannot be read, is not YAML or is not a mapping.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"configuration {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration {path} is not YAML: {_yaml_problem(error)}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"configuration {path}: expected keys and values, found a {type(values).__name__}")
    return values


def read_overrides(
    overrides: Sequence[str], values: dict[str, Any], read: Callable[[str, str], Any] | None = None
) -> dict[str, Any]:
    """Set `a.b=value` texts in nested `values`, which are returned.

    Args:
        read: converts key and text to a value; None reads the text as YAML.

    Raises:
        ConfigError: a text is not of that form, or its value is not YAML.
    """
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"override {override!r} is not of the form key=value")
        key = key.strip().replace("-", "_")
        put(values, key, (read or yaml_value)(key, text))
    return values


def yaml_value(key: str, text: str) -> Any:
    """The value of an override of `key`.

    Raises:
        ConfigError: the text is not YAML.
    """
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {key}: {text!r} is not a YAML value: {_yaml_problem(error)}") from error


def _yaml_problem(error: Exception) -> str:
    """What is wrong, on which line, and that line."""
    mark = getattr(error, "problem_mark", None)
    if mark is None or mark.buffer is None:
        return " ".join(str(error).split())
    lines = mark.buffer.rstrip("\0\n ").split("\n")
    number = min(mark.line, len(lines) - 1)
    return f"line {number + 1}: {error.problem} near {lines[number].strip()!r}"  # type: ignore[attr-defined]


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The members of a union type, or the type itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in nested `values`.

    Raises:
        ConfigError: a part of the key is a value, not a group of keys.
    """
    *parents, last = key.split(".")
    for parent in parents:
        inner = values.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"override {key}: {parent} is {inner!r}, not a group of keys")
        values = inner
    values[last] = value


def build_config(kind: type, values: Mapping[str, Any], prefix: str, known: Sequence[str] = ()) -> Any:
    """A dataclass, and the dataclasses in it, from keys and values.

    Args:
        prefix: of the keys in messages.
        known: all dotted keys of the configuration; empty is those of `kind`.

    Raises:
        ConfigError: a key is unknown, or a value has the wrong type.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{prefix.rstrip('.')}: expected keys and values, found {values!r}")
    known = known or list(_dotted_keys(kind, prefix))
    hints = {f.name: typing.get_type_hints(kind)[f.name] for f in fields(kind)}
    given: dict[str, Any] = {}
    for key, value in values.items():
        if key not in hints:
            raise ConfigError(f"no setting {f'{prefix}{key}'!r}; {_suggestion(str(key), prefix, list(hints), known)}")
        if is_dataclass(hints[key]):
            given[key] = build_config(typing.cast(type, hints[key]), value, f"{prefix}{key}.", known)
        else:
            given[key] = _convert(value, hints[key], f"{prefix}{key}")
    return kind(**given)


def _dotted_keys(kind: type, prefix: str) -> Iterator[str]:
    hints = typing.get_type_hints(kind)
    for one in fields(kind):
        if is_dataclass(hints[one.name]):
            yield from _dotted_keys(hints[one.name], f"{prefix}{one.name}.")
        else:
            yield f"{prefix}{one.name}"


def _suggestion(key: str, prefix: str, siblings: Sequence[str], known: Sequence[str]) -> str:
    """The same name in other groups, else the nearest in any, in this group first, or one that ends with it."""
    names: dict[str, list[str]] = {}
    for dotted in known:
        names.setdefault(dotted.rpartition(".")[2], []).append(dotted)
    if key in names:
        return f"did you mean {' or '.join(names[key])}?"
    if near := difflib.get_close_matches(key, {*siblings, *names}, n=1):
        return f"did you mean {prefix + near[0] if near[0] in siblings else ' or '.join(names[near[0]])}?"
    if longer := [dotted for name in names if name.endswith(f"_{key}") for dotted in names[name]]:
        return f"did you mean {' or '.join(longer)}?"
    return f"known here: {', '.join(siblings)}"


def _convert(value: Any, hint: Any, key: str) -> Any:
    """`value` in the field's type: 1e-4, which YAML reads as a string, becomes a float."""
    options = alternatives(hint)
    if value is None and type(None) in options:
        return None
    if value is None and str in options:
        return ""  # `prompt:` without a value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    for option in options:
        origin = typing.get_origin(option) or option
        if origin is Mapping and isinstance(value, Mapping):
            return dict(value)
        if origin is tuple and isinstance(value, list | tuple):
            member = typing.get_args(option)[0]
            if member is not str:
                return tuple(_convert(one, member, f"{key}[{place}]") for place, one in enumerate(value))
            if all(isinstance(one, str) for one in value):
                return tuple(value)
        if (origin is bool and isinstance(value, bool)) or (origin is int and is_number and isinstance(value, int)):
            return value
        if origin is float and (is_number or isinstance(value, str)):
            try:
                return float(value)
            except ValueError:
                continue
        if origin is str and (is_number or isinstance(value, str)):
            return str(value)  # also a folder called 2024
    names = {
        type(None): "null",
        Mapping: "keys and values",
        tuple: "a list of numbers",
        tuple[str, ...]: "a list of names",
    }
    kinds = [option if option in names else typing.get_origin(option) or option for option in options]
    raise ConfigError(f"{key} is {value!r}; expected {' or '.join(names.get(kind, kind.__name__) for kind in kinds)}")
