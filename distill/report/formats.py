"""Values as short text."""

import math
from collections.abc import Callable
from typing import Any

# Text for a missing value.
NOTHING = "-"


def optional(write: Callable[[float], str], value: float | None) -> str:
    """`write(value)`, or a dash for None."""
    return NOTHING if value is None else write(value)


def number(value: float) -> str:
    """At most four significant digits, with thousands separators."""
    if not math.isfinite(value):
        return NOTHING
    if value and (abs(value) < 1e-3 or abs(value) >= 1e7):
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def millions(count: float) -> str:
    return f"{count / 1e6:.2f} M"


def setting(value: Any) -> str:
    """A value of a configuration; a dash for None."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return " ".join(map(setting, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
