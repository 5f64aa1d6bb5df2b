"""Bytes, durations and counts as text."""


def format_bytes(count: float) -> str:
    """Bytes in powers of 1,000: `512 B`, `1.5 kB`, `2.0 MB`, `3.14 GB`."""
    units = ("B", "kB", "MB", "GB", "TB")
    power = 0
    while count >= 1000 and power < len(units) - 1:
        count /= 1000
        power += 1
    return f"{count:.{min(2, (power + 1) // 2)}f} {units[power]}"


def format_duration(seconds: float) -> str:
    """Seconds in the unit that fits: `0.4 s`, `12 min`, `1.5 h`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def format_count(number: float, noun: str, plural: str = "") -> str:
    """The number with its noun: `1 row`, `2,000 rows`; `plural` unless it is the noun with an "s"."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"
