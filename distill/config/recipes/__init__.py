"""Recipes: named settings that ship with the package, one YAML file each in this folder.

A recipe sets how a student is trained: objective, sharpness, training, data and export, never paths. The settings of a
run override it.
"""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from distill.config.reading import read_yaml
from distill.errors import ConfigError
from distill.registry import suggestion

RECOMMENDED = "recommended"
DESCRIPTION = "description"
# What a recipe may set.
SECTIONS = ("student", "teacher", "objective", "sharpness", "training", "data", "export")


def recipes() -> dict[str, str]:
    """Name of every recipe of the package -> its description, one line."""
    return {name: str(_read(name)[DESCRIPTION]) for name in _names()}


def read_recipe(name: str) -> dict[str, Any]:
    """The settings of a recipe.

    Args:
        name: of a recipe of the package, or the path of a YAML file.

    Raises:
        ConfigError: there is none, or it sets something else than how a student is trained.
    """
    values = _read(name)
    values.pop(DESCRIPTION, None)
    for section in values:
        if section not in SECTIONS:
            raise ConfigError(
                f"recipe {name!r} sets {section}; a recipe sets only {', '.join(SECTIONS)}: put {section} in the run's "
                "own settings"
            )
    return values


def with_recipe(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings on top of those of the recipe that they name under "recipe", if any.

    Options of an objective, or of a sharpness, belong to its name: settings with another name replace those of the
    recipe.
    """
    own = {key: value for key, value in values.items() if key != "recipe"}
    name = values.get("recipe")
    if name is None:
        return own
    if not isinstance(name, str):
        raise ConfigError(f"recipe is {name!r}; expected one name, of `distill list recipes`")
    merged = read_recipe(name)
    for section in ("objective", "sharpness"):
        chosen = own.get(section)
        if isinstance(chosen, Mapping) and "name" in chosen and chosen["name"] != merged.get(section, {}).get("name"):
            merged.pop(section, None)
    return _merged(merged, own)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values, those of `above` where both have one."""
    merged = dict(below)
    for key, value in above.items():
        inner = merged.get(key)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        merged[key] = _merged(inner or {}, value) if both else value
    return merged


def _names() -> list[str]:
    return sorted(path.name.removesuffix(".yaml") for path in files(__name__).iterdir() if path.name.endswith(".yaml"))


def _read(name: str) -> dict[str, Any]:
    if name.endswith((".yaml", ".yml")):
        return read_yaml(Path(name))
    if name not in _names():
        raise ConfigError(
            f"recipe: none is called {name!r}; {suggestion(name, _names())} Your own recipe is the path of a YAML file"
        )
    return read_yaml(Path(str(files(__name__) / f"{name}.yaml")))
