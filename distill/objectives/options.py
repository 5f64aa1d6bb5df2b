"""Checks of options; the error names what was expected and what was found."""

import math
from collections.abc import Collection, Mapping

from distill.errors import ConfigError


def check(option: str, value: object, expected: str, fits: bool, *, of: str = "objective option") -> None:
    """Raise `ConfigError` unless `fits`; `of` begins the message."""
    if not fits:
        raise ConfigError(f"{of} {option}: expected {expected}, found {value!r}")


def check_positive(option: str, value: object, *, of: str = "objective option") -> None:
    """Check for a number above 0."""
    fits = _is_number(value) and 0 < value < math.inf  # type: ignore[operator]
    check(option, value, "a number above 0", fits, of=of)


def check_weight(option: str, value: object, *, of: str = "objective option") -> None:
    """Check for a number of at least 0."""
    fits = _is_number(value) and 0 <= value < math.inf  # type: ignore[operator]
    check(option, value, "a number >= 0", fits, of=of)


def check_weights(weights: Mapping[str, object], required: Collection[str] = ()) -> None:
    """Check for numbers of at least 0, at least one of `required` (default: all) above 0."""
    for option, weight in weights.items():
        check_weight(option, weight)
    required = required or list(weights)
    check("*_weight", dict(weights), f"{' or '.join(required)} above 0", any(weights[name] for name in required))


def check_choice(option: str, value: object, choices: Collection[str], *, of: str = "objective option") -> None:
    """Check for one of these names."""
    check(option, value, f"one of {', '.join(choices)}", value in choices, of=of)


def check_count(
    option: str, value: object, low: int, high: int | None, reason: str = "", *, of: str = "objective option"
) -> None:
    """Check for an integer from `low` to `high`; `reason` explains the bound."""
    expected = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
    fits = isinstance(value, int) and not isinstance(value, bool) and low <= value <= (value if high is None else high)
    check(option, value, f"{expected} ({reason})" if reason else expected, fits, of=of)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
