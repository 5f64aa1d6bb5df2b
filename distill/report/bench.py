"""What `distill bench` measured, as tables and plots: its record read, told and drawn."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from distill.errors import RunFolderError
from distill.report.columns import NOTHING, Column, markdown
from distill.report.drawing import Key, Panel, Plot, number, number_axes
from distill.report.sections import Cell, Table
from distill.run_folder import read_record
from teacher_cache.storage.files import format_bytes

CORPUS = "corpus"
DATA = "data"
# Parts of a step, in the order in which they are drawn.
PARTS = {
    "teacher": "teacher",
    "first_pass": "first pass",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimiser",
    DATA: "wait for data",
}
# In the page's ink: memory has no parts, and the parts of a step have all the colors.
MEMORY = Key("peak memory", None)
BAR_HEIGHT, AXIS_HEIGHT = 18.0, 44.0
# Of the widest bar, room to its right for the ratio.
ROOM = 1.28

Row = Mapping[str, Any]


def read_bench(path: Path) -> dict[str, Any]:
    """The record of a JSON file that `distill bench -o` wrote.

    Raises:
        RunFolderError: it holds something else, or is not there.
    """
    record = read_record(path.parent, path.name)
    if not isinstance(record, dict) or record.get("kind") != "bench":
        raise RunFolderError(f"{path} holds no measurements; name what `distill bench -o FILE.json` wrote")
    return record


def columns(table: Mapping[str, Any]) -> list[Column]:
    """Of one set of texts: time, memory and bytes by method; figures that no row has are left out."""
    return _known(
        table["rows"],
        {
            "ms/step": lambda row: _ms(row["step_ms_p50"]),
            "p90": lambda row: _ms(row["step_ms_p90"]),
            "time ratio": lambda row: _ratio(row, "step"),
            "with data": lambda row: _ms(row["with_data_ms_p50"]),
            "p90 with data": lambda row: _ms(row["with_data_ms_p90"]),
            "CPU ms": lambda row: _ms(row["processor_ms_p50"]),
            "CPU ratio": lambda row: NOTHING if row["processor_ms_p50"] is None else _ratio(row, "processor"),
            "peak memory": lambda row: _bytes(row["peak_bytes"]),
            "memory ratio": lambda row: _ratio(row, "memory"),
            "weights": lambda row: _bytes(row["weights_bytes"]),
            "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
            "cache/text": lambda row: _bytes(row["cache_bytes_a_sample"]),
            "teacher": lambda row: _bytes(row["teacher_bytes"]),
        },
    )


def part_columns(table: Mapping[str, Any]) -> list[Column]:
    """Medians of a step's parts in milliseconds."""
    return _known(
        table["rows"],
        {
            f"{label} ms": partial(lambda part, row: _ms(row["parts_ms"][part] or None), part)
            for part, label in PARTS.items()
        },
    )


def _known(rows: Sequence[Row], cells: Mapping[str, Callable[[Row], str]]) -> list[Column]:
    told = [
        Column(header, tuple(NOTHING if row["failed"] else tell(row) for row in rows)) for header, tell in cells.items()
    ]
    method = Column("method", tuple(row["method"] for row in rows), right=False)
    return [method, *(column for column in told if any(cell != NOTHING for cell in column.cells))]


def heading(table: Mapping[str, Any]) -> str:
    """Which texts."""
    if table["lengths"] == CORPUS:
        return "The corpus's own lengths"
    return f"{table['lengths']} tokens a text"


def notes(table: Mapping[str, Any], record: Mapping[str, Any]) -> Iterator[str]:
    """Where it was measured and how, and which rows could not be."""
    settings = record["settings"]
    teacher = settings["random_weights"] or settings["teacher"]
    told = [record["device"], record["precision"], f"student {Path(settings['student']).name}"]
    told += [f"teacher {Path(teacher).name}"] if teacher else []
    told += ["training.memory low"] if settings["memory"] == "low" else []
    told += [" ".join(settings["sets"])] if settings["sets"] else []
    told.append(f"batches of {settings['batch_size']}")
    if table["tokens"]:
        share = table["tokens"] / table["positions"]
        told.append(f"{table['tokens']:,.0f} tokens a batch, {share:.0%} of its positions")
    yield ", ".join(told)
    steps = {(row["steps"], row["rounds"]) for row in table["rows"] if not row["failed"]}
    if steps:
        fewest, most = min(steps), max(steps)
        counted = f"{most[0]}" if fewest == most else f"{fewest[0]} to {most[0]}"
        cycle = record.get("cycle", 1)
        means = "" if cycle == 1 else f", each figure the mean of {cycle} in a row, as not every one has an ascent"
        yield (
            f"medians of {counted} steps in {most[1]} rounds{means}; ratios (×) to {record['baseline']}, of the same "
            "round; a step counts an online teacher, and not the wait for data"
        )
    for row in table["rows"]:
        if row["failed"]:
            yield f"{row['method']}: {row['failed']}"


def as_markdown(record: Mapping[str, Any]) -> str:
    """Every table with its parts and notes below it."""
    told = []
    for table in record["tables"]:
        told += [f"### {heading(table)}", "", markdown(columns(table))]
        told.append(markdown(part_columns(table), list(notes(table, record))))
    return "\n".join(told)


@dataclass(frozen=True)
class Measured:
    """One set of texts on the page; `plot` is the name of its plot, which there may be none of."""

    heading: str
    plot: str
    tables: Sequence[Table]
    notes: Sequence[str]


def bench_tables(record: Mapping[str, Any]) -> list[Measured]:
    """By set of texts; none of an empty record."""
    return [
        Measured(
            heading(table),
            _name(place),
            [_table(heading(table), told) for told in (columns(table), part_columns(table))],
            list(notes(table, record)),
        )
        for place, table in enumerate(record.get("tables", ()))
    ]


def _name(place: int) -> str:
    return f"bench-{place}"


def _table(label: str, told: Sequence[Column]) -> Table:
    name, *others = told
    rows = [(Cell(text), [Cell(column.cells[place]) for column in others]) for place, text in enumerate(name.cells)]
    return Table(label, ["method", *(column.header for column in others)], rows)


def bench_plots(record: Mapping[str, Any]) -> Iterator[Plot]:
    """Time by part and memory of every method, a bar each, and behind it how many times the baseline's it is."""
    for place, table in enumerate(record.get("tables", ())):
        rows = [row for row in table["rows"] if not row["failed"]]
        if not rows:
            continue
        used = [part for part in PARTS if any(row["parts_ms"][part] for row in rows)]
        keys = {part: Key(PARTS[part], number_, "", "s") for number_, part in enumerate(PARTS) if part in used}
        bars = [[(keys[part], row["parts_ms"][part]) for part in used] for row in rows]
        panels = [_panel("time of a step (ms)", rows, bars, "with_data", "with_data_ms_p50")]
        memory = [row for row in rows if row["peak_bytes"] is not None]
        if memory:
            peaks = [[(MEMORY, row["peak_bytes"] / 1e9)] for row in memory]
            panels.append(_panel("peak memory (GB)", memory, peaks, "memory", "peak_bytes"))
        yield Plot(_name(place), heading(table), panels, [*keys.values()])


def _panel(
    title: str, rows: Sequence[Row], bars: Sequence[Sequence[tuple[Key, float]]], ratio: str, figure: str
) -> Panel:
    labels = [_times(row, ratio) for row in rows]
    said = "; ".join(
        f"{row['method']} {_bytes(row[figure]) if figure.endswith('bytes') else _ms(row[figure])} {label}".strip()
        for row, label in zip(rows, labels, strict=True)
    )
    names = [row["method"] for row in rows]
    height = AXIS_HEIGHT + BAR_HEIGHT * len(rows)
    return Panel(title, said, partial(_draw, names, bars, labels, title), height)


def _draw(
    names: Sequence[str], bars: Sequence[Sequence[tuple[Key, float]]], labels: Sequence[str], title: str, axes: Any
) -> None:
    widest = 0.0
    for place, parts in enumerate(bars):
        left = 0.0
        for key, value in parts:
            alpha = 0.6 if key.color is None else 1.0
            axes.barh(place, value, left=left, height=0.62, color=key.hex, alpha=alpha, linewidth=0)
            left += value
        axes.annotate(labels[place], (left, place), (3, 0), textcoords="offset points", va="center", fontsize=7)
        widest = max(widest, left)
    axes.set_xlim(0, widest * ROOM or 1.0)
    number_axes(axes, title)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)


def _times(row: Row, name: str) -> str:
    found = (row["ratio"] or {}).get(name)
    return "" if found is None else f"×{number(round(found, 2))}"


def _ms(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _ratio(row: Row, name: str) -> str:
    found = (row["ratio"] or {}).get(name)
    return NOTHING if found is None else f"{found:.2f}"


def _bytes(value: float | None) -> str:
    return NOTHING if value is None else format_bytes(value)
