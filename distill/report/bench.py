"""Tables and plots of the measurements of `distill bench`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from distill.errors import RunFolderError
from distill.report.columns import Column, known_columns, markdown
from distill.report.drawing import Key, Panel, Plot, name_rows, number_axes, rows_height
from distill.report.formats import NOTHING, number, optional
from distill.report.sections import Table
from distill.run_folder import read_record
from teacher_cache.storage.units import format_bytes

CORPUS = "corpus"
DATA = "data"
# Parts of a step, in drawing order.
PARTS = {
    "teacher": "teacher",
    "first_pass": "first pass",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    DATA: "wait for data",
}
# In the page's ink: memory has no parts, and the parts of a step have all the colors.
MEMORY = Key("peak memory", None)
# Width of the axes, relative to the widest bar; the rest is for its label.
MARGIN = 1.28

Row = Mapping[str, Any]


def read_bench(path: Path) -> dict[str, Any]:
    """The record of a JSON file that `distill bench -o` wrote."""
    record = read_record(path.parent, path.name)
    if not isinstance(record, dict) or record.get("kind") != "bench":
        raise RunFolderError(f"{path} holds no measurements; name a file that `distill bench -o FILE.json` wrote")
    return record


def columns(table: Mapping[str, Any]) -> list[Column]:
    """Time, memory and bytes by method, on one set of texts, without figures that no method has."""
    return _columns(
        table["rows"],
        {
            "ms/step": lambda row: _ms(row["step_ms_p50"]),
            "p90": lambda row: _ms(row["step_ms_p90"]),
            "time ratio": lambda row: _ratio(row, "step"),
            "with data": lambda row: _ms(row["with_data_ms_p50"]),
            "p90 with data": lambda row: _ms(row["with_data_ms_p90"]),
            "CPU ms": lambda row: _ms(row["processor_ms_p50"]),
            "CPU ratio": lambda row: NOTHING if row["processor_ms_p50"] is None else _ratio(row, "processor"),
            "peak memory": lambda row: optional(format_bytes, row["peak_bytes"]),
            "memory ratio": lambda row: _ratio(row, "memory"),
            "weights": lambda row: optional(format_bytes, row["weights_bytes"]),
            "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
            "cache/text": lambda row: optional(format_bytes, row["cache_bytes_a_sample"]),
            "teacher": lambda row: optional(format_bytes, row["teacher_bytes"]),
        },
    )


def part_columns(table: Mapping[str, Any]) -> list[Column]:
    """Median milliseconds of the parts of a step."""
    return _columns(
        table["rows"],
        {
            f"{label} ms": partial(lambda part, row: _ms(row["parts_ms"][part] or None), part)
            for part, label in PARTS.items()
        },
    )


def _columns(rows: Sequence[Row], cells: Mapping[str, Callable[[Row], str]]) -> list[Column]:
    def measured(cell: Callable[[Row], str], row: Row) -> str:
        return NOTHING if row["failed"] else cell(row)

    columns = known_columns(rows, {header: partial(measured, cell) for header, cell in cells.items()})
    return [Column("method", tuple(row["method"] for row in rows), right=False), *columns]


def heading(table: Mapping[str, Any]) -> str:
    """Heading of one set of texts."""
    return "The corpus's own lengths" if table["lengths"] == CORPUS else f"{table['lengths']} tokens per text"


def notes(table: Mapping[str, Any], record: Mapping[str, Any]) -> Iterator[str]:
    """How and where it was measured, and the errors of methods that failed."""
    settings = record["settings"]
    teacher = settings["random_weights"] or settings["teacher"]
    setup = [record["device"], record["precision"], f"student {Path(settings['student']).name}"]
    setup += [f"teacher {Path(teacher).name}"] if teacher else []
    setup += ["training.memory low"] if settings["memory"] == "low" else []
    setup += [" ".join(settings["sets"])] if settings["sets"] else []
    setup.append(f"batches of {settings['batch_size']}")
    if table["tokens"]:
        share = table["tokens"] / table["positions"]
        setup.append(f"{table['tokens']:,.0f} tokens per batch, {share:.0%} of its positions")
    yield ", ".join(setup)
    steps = {(row["steps"], row["rounds"]) for row in table["rows"] if not row["failed"]}
    if steps:
        fewest, most = min(steps), max(steps)
        counted = f"{most[0]}" if fewest == most else f"{fewest[0]} to {most[0]}"
        cycle = record.get("cycle", 1)
        means = "" if cycle == 1 else f", each figure the mean of {cycle} consecutive ones, as not all have an ascent"
        yield (
            f"medians of {counted} steps in {most[1]} rounds{means}; ratios (×) to {record['baseline']} in the same "
            "round; a step includes an online teacher, but not the wait for data"
        )
    for row in table["rows"]:
        if row["failed"]:
            yield f"{row['method']}: {row['failed']}"


def as_markdown(record: Mapping[str, Any]) -> str:
    """All tables with their parts and notes."""
    parts = []
    for table in record["tables"]:
        parts += [f"### {heading(table)}", "", markdown(columns(table))]
        parts.append(markdown(part_columns(table), list(notes(table, record))))
    return "\n".join(parts)


@dataclass(frozen=True)
class Measured:
    """One set of texts on the page; `plot` is the name of its plot, if it has one."""

    heading: str
    plot: str
    tables: Sequence[Table]
    notes: Sequence[str]


def bench_tables(record: Mapping[str, Any]) -> list[Measured]:
    """The tables of each set of texts; none of an empty record."""
    return [
        Measured(
            heading(table),
            f"bench-{number}",
            [Table.of_columns(heading(table), each) for each in (columns(table), part_columns(table))],
            list(notes(table, record)),
        )
        for number, table in enumerate(record.get("tables", ()))
    ]


def bench_plots(record: Mapping[str, Any]) -> Iterator[Plot]:
    """Bars of time by part and of memory for every method, labeled with the ratio to the baseline."""
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
        yield Plot(f"bench-{place}", heading(table), panels, [*keys.values()])


def _panel(
    title: str, rows: Sequence[Row], bars: Sequence[Sequence[tuple[Key, float]]], ratio: str, figure: str
) -> Panel:
    labels = [_times(row, ratio) for row in rows]
    description = "; ".join(
        f"{row['method']} {(format_bytes if figure.endswith('bytes') else _ms)(row[figure])} {label}".strip()
        for row, label in zip(rows, labels, strict=True)
    )
    names = [row["method"] for row in rows]
    return Panel(title, description, partial(_draw, names, bars, labels, title), rows_height(len(rows)))


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
    axes.set_xlim(0, widest * MARGIN or 1.0)
    number_axes(axes, title)
    name_rows(axes, names)


def _times(row: Row, name: str) -> str:
    found = (row["ratio"] or {}).get(name)
    return "" if found is None else f"×{number(round(found, 2))}"


def _ms(value: float | None) -> str:
    return optional(lambda ms: f"{ms:,.0f}" if ms >= 100 else f"{ms:.1f}", value)


def _ratio(row: Row, name: str) -> str:
    return optional("{:.2f}".format, (row["ratio"] or {}).get(name))
