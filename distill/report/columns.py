"""The table of a comparison: on the console as wide as it is, in Markdown whole."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from distill.evaluation.evaluator import NINE
from distill.report.comparison import Comparison, Figure, Group
from distill.report.tables import AVERAGES
from teacher_cache.storage.files import format_bytes

# Name of a figure -> its column's header and how it is written.
FIGURES = {
    "agreement.before.spearman": ("Spearman before", "ratio"),
    "agreement.after.spearman": ("Spearman", "ratio"),
    "agreement.projected.spearman": ("Spearman projected", "ratio"),
    "agreement.before.overlap": ("overlap before", "ratio"),
    "agreement.after.overlap": ("overlap", "ratio"),
    "agreement.projected.overlap": ("overlap projected", "ratio"),
    "cost.step_seconds_p50": ("s/step", "seconds"),
    "cost.data_seconds_p50": ("s/batch", "seconds"),
    "cost.data_wait_share": ("wait for data", "percent"),
    "cost.peak_memory_bytes": ("peak memory", "bytes"),
    "student.parameters": ("parameters", "count"),
    "student.bytes": ("size", "bytes"),
}
NOTHING = "-"
# Characters between two columns' texts.
BETWEEN = 3


@dataclass(frozen=True)
class Column:
    """One column, as text; `right` aligns it to the right."""

    header: str
    cells: tuple[str, ...]
    right: bool = True

    @property
    def width(self) -> int:
        """Characters of the widest cell or word of the header."""
        return max(len(text) for text in (*self.header.split(), *self.cells))


def comparison_columns(comparison: Comparison) -> list[Column]:
    """The name, how many runs, the settings that differ, and every figure that some run has."""
    groups = comparison.groups
    columns = [Column("run", tuple(group.name for group in groups), right=False)]
    if any(len(group.rows) > 1 or _status(group) for group in groups):
        columns.append(Column("runs", tuple(_count(group) for group in groups)))
    for key, header in zip(comparison.differing, short_keys(comparison.differing), strict=True):
        columns.append(Column(header, tuple(setting(group.settings.get(key)) for group in groups), right=False))
    figures = [group.figures for group in groups]
    for name, header, kind in _figures({name for known in figures for name in known}):
        columns.append(Column(header, tuple(_cell(known.get(name), kind) for known in figures)))
    return columns


def notes(comparison: Comparison) -> list[str]:
    """What a reader of the table must know: what failed and why, and what cannot be compared."""
    lines = [f"{row.name} failed: {row.error}" for row in comparison.rows if row.error]
    lines += [f"{row.name} is unfinished" for row in comparison.rows if row.status == "unfinished"]
    return lines + [f"warning: {line}" for line in comparison.warnings]


def print_comparison(columns: Sequence[Column]) -> None:
    """On a terminal as wide as it is, elsewhere in one piece."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_width(columns))
    for table in console_tables(columns, console.width):
        console.print(table)


def console_tables(columns: Sequence[Column], width: int) -> Iterator[Table]:
    """One table, or where it would be wider than `width` several, each beginning with the first column."""
    name, *others = columns
    while others:
        chosen = [others.pop(0)]
        while others and _width([name, *chosen, others[0]]) <= width:
            chosen.append(others.pop(0))
        table = Table()
        for column in (name, *chosen):
            table.add_column(column.header, justify="right" if column.right else "left", width=column.width)
        for cells in zip(*(column.cells for column in (name, *chosen)), strict=True):
            table.add_row(*cells)
        yield table


def markdown(columns: Sequence[Column], notes: Sequence[str] = ()) -> str:
    """The whole table in Markdown, a list of notes below it."""
    rows = [[column.header for column in columns], ["---:" if column.right else "---" for column in columns]]
    rows += [[cell.replace("|", "\\|") for cell in cells] for cells in zip(*(c.cells for c in columns), strict=True)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, *(["", *(f"- {note}" for note in notes)] if notes else []), ""])


def short_keys(keys: Sequence[str]) -> list[str]:
    """The shortest endings by which dotted keys are told apart: `objective.name`, `seed`."""
    return [next((short for short in _endings(key) if _only(short, keys)), key) for key in keys]


def setting(value: Any) -> str:
    """A value of a configuration in a few characters; one that was left to its default is a dash."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return " ".join(map(setting, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _width(columns: Sequence[Column]) -> int:
    return sum(column.width + BETWEEN for column in columns) + 1


def _endings(key: str) -> Iterator[str]:
    words = key.split(".")
    # A name or a model says nothing without whose it is.
    for count in range(2 if words[-1] in ("name", "model") and len(words) > 1 else 1, len(words) + 1):
        yield ".".join(words[-count:])


def _only(short: str, keys: Sequence[str]) -> bool:
    return sum(key == short or key.endswith(f".{short}") for key in keys) == 1


def _figures(known: set[str]) -> Iterator[tuple[str, str, str]]:
    """`(name, header, kind)` of the figures that are known, in the table's order."""
    tasks = [name.removeprefix("tasks.") for name in known if name.startswith("tasks.")]
    for task in sorted(tasks, key=[*NINE, *sorted(set(tasks) - set(NINE))].index):
        yield f"tasks.{task}", f"{task} *" if NINE.get(task, ("", ""))[1] == "in" else task, "score"
    for name, label in AVERAGES.items():
        if f"average.{name}" in known:
            yield f"average.{name}", f"average {label}", "score"
    for name, (header, kind) in FIGURES.items():
        if name in known:
            yield name, header, kind


def _status(group: Group) -> str:
    missing = {row.status for row in group.rows} & {"failed", "unfinished"}
    return " and ".join(sorted(missing))


def _count(group: Group) -> str:
    """How many runs; where some did not end well, how many did."""
    if group.rows[0].status == "reference":
        return NOTHING
    good = sum(row.status == "finished" for row in group.rows)
    status = _status(group)
    if not status:
        return str(good)
    return status if len(group.rows) == 1 else f"{good} of {len(group.rows)}, {status}"


def _cell(figure: Figure | None, kind: str) -> str:
    if figure is None:
        return NOTHING
    spread = kind in ("score", "ratio", "seconds") and figure.deviation is not None
    return _number(figure.mean, kind) + (f" ± {_number(figure.deviation or 0.0, kind)}" if spread else "")


def _number(value: float, kind: str) -> str:
    if kind == "bytes":
        return format_bytes(value)
    if kind == "count":
        return f"{value / 1e6:.2f} M"
    if kind == "percent":
        return f"{value:.1%}"
    return f"{value:.{ {'score': 2, 'ratio': 3, 'seconds': 4}[kind] }f}"
