"""The table of a comparison, for the console and in Markdown."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from distill.evaluation.evaluator import NINE
from distill.report.comparison import Comparison, Figure, Group
from distill.report.formats import NOTHING, millions, setting
from distill.report.tables import AVERAGES
from teacher_cache.storage.units import format_bytes

# Name of a figure -> header and format of its column.
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
# Formats whose cells have a deviation, with their decimals.
DECIMALS = {"score": 2, "ratio": 3, "seconds": 4}
# Characters between two columns' texts.
BETWEEN = 3

Item = TypeVar("Item")


@dataclass(frozen=True)
class Column:
    """Header and cells of one column; `right` aligns it to the right."""

    header: str
    cells: tuple[str, ...]
    right: bool = True

    @property
    def width(self) -> int:
        """Characters of the widest cell or word of the header."""
        return max(len(text) for text in (*self.header.split(), *self.cells))


def known_columns(items: Sequence[Item], cells: Mapping[str, Callable[[Item], str]]) -> list[Column]:
    """Columns of text by header, without those that have only dashes."""
    columns = [Column(header, tuple(map(cell, items))) for header, cell in cells.items()]
    return [column for column in columns if any(cell != NOTHING for cell in column.cells)]


def comparison_columns(comparison: Comparison) -> list[Column]:
    """Name, number of runs, the settings that differ, and all known figures."""
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
    """Errors of failed runs, unfinished runs, and warnings."""
    lines = [f"{row.name} failed: {row.error}" for row in comparison.rows if row.error]
    lines += [f"{row.name} is unfinished" for row in comparison.rows if row.status == "unfinished"]
    return lines + [f"warning: {line}" for line in comparison.warnings]


def print_comparison(columns: Sequence[Column]) -> None:
    """Print the columns: in several tables if a terminal is too narrow, elsewhere in one."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_width(columns))
    for table in console_tables(columns, console.width):
        console.print(table)


def console_tables(columns: Sequence[Column], width: int) -> Iterator[Table]:
    """One table, or several that are at most `width` wide and start with the first column."""
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
    """The table in Markdown, followed by a list of notes."""
    rows = [[column.header for column in columns], ["---:" if column.right else "---" for column in columns]]
    rows += [[cell.replace("|", "\\|") for cell in cells] for cells in zip(*(c.cells for c in columns), strict=True)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, *(["", *(f"- {note}" for note in notes)] if notes else []), ""])


def short_keys(keys: Sequence[str]) -> list[str]:
    """The shortest unique suffixes of dotted keys: `objective.name`, `seed`."""
    found = []
    for key in keys:
        words = key.split(".")
        # "name" and "model" are unclear without the section.
        least = 2 if words[-1] in ("name", "model") and len(words) > 1 else 1
        endings = [".".join(words[-count:]) for count in range(least, len(words) + 1)]
        unique = (short for short in endings if sum(f".{other}".endswith(f".{short}") for other in keys) == 1)
        found.append(next(unique, key))
    return found


def _width(columns: Sequence[Column]) -> int:
    return sum(column.width + BETWEEN for column in columns) + 1


def _figures(known: set[str]) -> Iterator[tuple[str, str, str]]:
    """`(name, header, format)` of the known figures, in the table's order."""
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
    """Statuses of the runs that are not finished."""
    missing = {row.status for row in group.rows} & {"failed", "unfinished"}
    return " and ".join(sorted(missing))


def _count(group: Group) -> str:
    """The number of runs, and how many of them are finished."""
    if group.is_reference:
        return NOTHING
    good = sum(row.status == "finished" for row in group.rows)
    status = _status(group)
    if not status:
        return str(good)
    return status if len(group.rows) == 1 else f"{good} of {len(group.rows)}, {status}"


def _cell(figure: Figure | None, kind: str) -> str:
    if figure is None:
        return NOTHING
    if kind in DECIMALS:
        return mean_and_deviation(figure, DECIMALS[kind])
    return {"bytes": format_bytes, "count": millions, "percent": "{:.1%}".format}[kind](figure.mean)


def mean_and_deviation(figure: Figure, decimals: int) -> str:
    """`MEAN ± DEVIATION`, or the mean of a single run."""
    spread = f" ± {figure.deviation:.{decimals}f}" if figure.deviation is not None else ""
    return f"{figure.mean:.{decimals}f}{spread}"
