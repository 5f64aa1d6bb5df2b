"""Checks of objectives' options: one line says what was expected and what was found."""

import math
from collections.abc import Collection

from distill.errors import ConfigError


def check(option: str, value: object, expected: str, fits: bool) -> None:
    """Raise `ConfigError` unless the option's value fits."""
    if not fits:
        raise ConfigError(f"objective option {option}: expected {expected}, found {value!r}")


def check_positive(option: str, value: object) -> None:
    """A number above 0."""
    check(option, value, "a number above 0", _is_number(value) and 0 < value < math.inf)  # type: ignore[operator]


def check_weight(option: str, value: object) -> None:
    """A number of at least 0."""
    check(option, value, "a number >= 0", _is_number(value) and 0 <= value < math.inf)  # type: ignore[operator]


def check_choice(option: str, value: object, choices: Collection[str]) -> None:
    """One of these names."""
    check(option, value, f"one of {', '.join(choices)}", value in choices)


def check_count(option: str, value: object, low: int, high: int | None, of: str = "") -> None:
    """A whole number from `low` to `high`; `of` says where the bound comes from."""
    upper = f" to {high}" if high is not None else " on"
    fits = isinstance(value, int) and not isinstance(value, bool) and low <= value <= (value if high is None else high)
    check(option, value, f"a whole number from {low}{upper}{f' ({of})' if of else ''}", fits)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
