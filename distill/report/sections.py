"""The tables of a report, in words and numbers with their units."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distill.evaluation.evaluator import NINE
from distill.report.columns import NOTHING, comparison_columns, setting
from distill.report.comparison import Comparison, Figure, Group
from distill.report.data import ReportData, RunRecords, averaged
from distill.report.drawing import number
from distill.report.tables import AVERAGES
from teacher_cache.storage.files import format_bytes

# Figures that tasks give.
SCORED = ("tasks.", "average.")
# More models than these make a table too wide to be read.
MODELS_ACROSS = 6


@dataclass(frozen=True)
class Cell:
    """Text, what stands small below it, and whether it is the best of its row."""

    text: str
    below: str = ""
    best: bool = False


@dataclass(frozen=True)
class Table:
    """Rows begin with a cell that names them.

    Columns but those in `left` are numbers; rows from `summary_from` on are means of those above.
    """

    label: str
    headers: Sequence[str]
    rows: Sequence[tuple[Cell, Sequence[Cell]]]
    left: Sequence[str] = ()
    summary_from: int | None = None

    def turned(self) -> "Table":
        """Columns as rows; what stood below a row's name is in the header."""
        heads = [f"{name.text} ({name.below})" if name.below else name.text for name, _ in self.rows]
        rows = [
            (Cell(header), [cells[place] for _, cells in self.rows]) for place, header in enumerate(self.headers[1:])
        ]
        return Table(self.label, ["model", *heads], rows)

    def known(self) -> "Table":
        """Without the columns that nobody has a value for."""
        kept = [
            place
            for place in range(len(self.headers) - 1)
            if any(cells[place].text != NOTHING for _, cells in self.rows)
        ]
        return replace(
            self,
            headers=[self.headers[0], *(self.headers[place + 1] for place in kept)],
            rows=[(name, [cells[place] for place in kept]) for name, cells in self.rows],
        )


def facts(runs: Sequence[RunRecords]) -> tuple[dict[str, str], Table | None]:
    """What all runs have in common, and a table of what they do not."""
    told = {run.name: _told(run) for run in runs}
    labels = dict.fromkeys(label for found in told.values() for label in found)
    values = {label: [found.get(label, NOTHING) for found in told.values()] for label in labels}
    shared = {label: texts[0] for label, texts in values.items() if len(set(texts)) == 1}
    # A space names its teacher; how that one was asked is too long for a table of many runs.
    others = [label for label in labels if label not in (*shared, "teacher")]
    if "teacher" not in shared:
        shared |= {f"space {found['space']}": found["teacher"] for found in told.values() if "teacher" in found}
    if not others:
        return shared, None
    rows = [(Cell(name), [Cell(found.get(label, NOTHING)) for label in others]) for name, found in told.items()]
    return shared, Table("what the runs differ in", ["run", *others], rows, left=others)


def _told(run: RunRecords) -> dict[str, str]:
    """What was run, in words; what the record does not know is left out."""
    record, objective, sharpness = run.record, run.objective, dict(run.sharpness)
    facts = {"status": run.status}
    space, corpus, student = (record.get(part) or {} for part in ("space", "corpus", "student"))
    if space:
        online = (record.get("teacher") or {}).get("mode") == "online"
        facts["teacher"] = str(space.get("description", "")) + (", asked at every step" if online else "")
        facts["space"] = " + ".join(part["slug"] for part in space.get("spaces", ())) or space.get("slug", "")
        if space.get("storage"):
            facts["space"] += f", kept as {space['storage']}"
    if corpus:
        facts["corpus"] = (
            f"{corpus['name']}: {corpus['records']:,} records, {corpus['distinct']:,} distinct, "
            f"{corpus['held_out']:,} texts held out"
        )
    if student:
        prompt = f"prompt {student['prompt']!r}" if student.get("prompt") else "no prompt"
        facts["student"] = (
            f"{student['name']}: {student['layers']} layers of {student['dim']}, {student['parameters'] / 1e6:.1f} M "
            f"parameters, {student['pooling']} pooling, at most {student['max_length']} tokens, {prompt}"
        )
    preset = [f"preset={objective['preset']}"] if objective.get("preset") else []
    facts["objective"] = _with_options(objective["name"], [*preset, *_options(objective.get("options") or {})])
    facts["sharpness"] = _with_options(sharpness.pop("name"), _options(sharpness))
    for name, value in run.settings.items():
        facts[name] = setting(value)
    facts["seed"] = setting(run.seed)
    if record:
        processes = record.get("processes", 1)
        facts["precision"] = f"{record.get('precision', NOTHING)}" + (
            f", {processes} processes" if processes != 1 else ""
        )
        facts["versions"] = ", ".join(f"{name} {version}" for name, version in record.get("versions", {}).items())
    validation = record.get("validation") or {}
    if validation.get("points"):
        facts["validation"] = (
            f"best at step {validation['best_step']:,}, kept the {validation['keep']}; "
            f"{len(validation['points'])} evaluations in {_duration(validation['seconds'])}"
        )
    if run.status == "finished":
        facts["vectors in"] = "the teacher's space" if record.get("in_teacher_space") else "their own space"
        facts["optimiser steps"] = f"{record['steps']:,}"
    return facts


def _options(options: Mapping[str, Any]) -> list[str]:
    return [f"{name}={setting(value)}" for name, value in options.items()]


def _with_options(name: str, options: Sequence[str]) -> str:
    return f"{name}: {', '.join(options)}" if options else name


def side_by_side(data: ReportData) -> Table | None:
    """The comparison without settings and single tasks, which have tables of their own."""
    if len(data.comparison.rows) < 2:
        return None
    rows = [
        replace(
            group,
            rows=tuple(
                replace(row, figures={name: v for name, v in row.figures.items() if not name.startswith("tasks.")})
                for row in group.rows
            ),
        )
        for group in data.comparison.groups
    ]
    name, *columns = comparison_columns(Comparison(tuple(rows), (), ()))
    if not columns:
        return None
    return Table(
        "the runs side by side",
        ["run", *(column.header for column in columns)],
        [(Cell(label), [Cell(column.cells[place]) for column in columns]) for place, label in enumerate(name.cells)],
    )


def score_table(data: ReportData) -> Table | None:
    """Tasks down, the averages last, and models across; many models down."""
    groups = [group for group in data.comparison.groups if any(name.startswith(SCORED) for name in group.figures)]
    if not groups or not data.tasks:
        return None
    rows = [
        (
            Cell(f"{name} *" if task["domain"] == "in" else name, task["metric"].replace("_", " ")),
            list(_score_cells(data, groups, f"tasks.{name}")),
        )
        for name, task in data.tasks.items()
    ]
    averages = [
        _average_row(data, groups, name, label)
        for name, label in AVERAGES.items()
        if any(f"average.{name}" in group.figures for group in groups)
    ]
    table = Table("scores by task", ["task", *(group.name for group in groups)], [*rows, *averages])
    return replace(table, summary_from=len(rows)) if len(groups) <= MODELS_ACROSS else table.turned()


def _average_row(data: ReportData, groups: Sequence[Group], name: str, label: str) -> tuple[Cell, list[Cell]]:
    """An average says how many tasks it is over: below its name, or below each where the models differ in them."""
    figure = f"average.{name}"
    over = [averaged(group, name, data.tasks) if figure in group.figures else None for group in groups]
    cells = list(_score_cells(data, groups, figure))
    different = {tasks for group, tasks in zip(groups, over, strict=True) if figure in group.figures}
    if len(different) == 1 and None not in different:
        return Cell(f"average {label}", _count(different.pop())), cells
    return Cell(f"average {label}"), [
        replace(cell, below=", ".join(filter(None, (cell.below, _count(tasks)))), best=False)
        if figure in group.figures
        else cell
        for group, tasks, cell in zip(groups, over, cells, strict=True)
    ]


def _count(tasks: Sequence[str] | None) -> str:
    if tasks is None:
        return "not the same tasks in each run"
    return f"{len(tasks)} task{'s' if len(tasks) != 1 else ''}"


def _score_cells(data: ReportData, groups: Sequence[Group], figure: str) -> Iterator[Cell]:
    means = {group.name: group.figures[figure].mean for group in groups if figure in group.figures}
    students = {name: mean for name, mean in means.items() if name not in data.references}
    best = max(students.values(), default=None) if len(students) > 1 else None
    for group in groups:
        share = data.shares.get(group.name, {}).get(figure)
        yield Cell(
            _mean(group.figures.get(figure), 2),
            f"{share:.1f} %" if share is not None else "",
            best is not None and students.get(group.name) == best,
        )


def _mean(figure: Figure | None, digits: int) -> str:
    if figure is None:
        return NOTHING
    spread = f" ± {figure.deviation:.{digits}f}" if figure.deviation is not None else ""
    return f"{figure.mean:.{digits}f}{spread}"


def agreement_table(runs: Sequence[RunRecords]) -> Table | None:
    rows = []
    for run in runs:
        agreement = run.record.get("agreement")
        if run.status == "finished" and agreement:
            cells = [
                Cell(NOTHING if not agreement.get(when) else f"{agreement[when][figure]:.3f}")
                for figure in ("spearman", "overlap")
                for when in ("before", "after", "projected")
            ]
            after = agreement["after"]
            rows.append((Cell(run.name), [*cells, Cell(f"{after['texts']:,}"), Cell(f"{after['neighbours']}")]))
    if not rows:
        return None
    headers = [f"{figure} {when}" for figure in ("Spearman", "overlap") for when in ("before", "after", "projected")]
    return Table("agreement with the teacher", ["run", *headers, "texts", "neighbours"], rows).known()


def cost_table(data: ReportData) -> Table | None:
    rows = []
    figures = {row.name: row.figures for row in data.comparison.rows}
    for run in data.runs:
        cost = run.record.get("cost") or {}
        if run.status != "finished":
            continue
        known = figures[run.name]
        rows.append(
            (
                Cell(run.name),
                [
                    Cell(_unit(cost.get("step_seconds_p50"), "s")),
                    Cell(_unit(cost.get("step_seconds_p90"), "s")),
                    Cell(_unit(cost.get("data_seconds_p50"), "s")),
                    Cell(NOTHING if cost.get("data_wait_share") is None else f"{cost['data_wait_share']:.1%}"),
                    Cell(_duration(run.record.get("seconds"))),
                    Cell(_bytes(cost.get("peak_memory_bytes"))),
                    Cell(_bytes(known.get("student.bytes"))),
                    Cell(_millions(known.get("student.parameters"))),
                    Cell(str(cost.get("device", NOTHING))),
                ],
            )
        )
    for name in data.references:
        known = figures.get(name, {})
        if "student.bytes" in known:
            size = [Cell(_bytes(known["student.bytes"])), Cell(_millions(known.get("student.parameters")))]
            rows.append((Cell(name), [*[Cell(NOTHING)] * 6, *size, Cell(NOTHING)]))
    if not rows:
        return None
    headers = ["s/step, median", "s/step, p90", "wait for a batch", "wait for data", "whole run", "peak memory"]
    return Table("what the runs cost", ["run", *headers, "weights", "parameters", "device"], rows, ["device"]).known()


def disk(runs: Sequence[RunRecords]) -> list[tuple[str, str]]:
    """Each space once: its name, and what it and its whole cache take."""
    found = {}
    for run in runs:
        if run.disk:
            space = run.record["space"].get("slug") or run.record["space"].get("description", "")
            found[space] = f"{_bytes(run.disk['space'])} of a cache of {_bytes(run.disk['cache'])}"
    return list(found.items())


def figure_tables(runs: Sequence[RunRecords]) -> list[Table]:
    """Tasks besides the nine, with all that they say; a table for those that say the same."""
    found: dict[tuple[str, ...], list[tuple[Cell, list[Cell]]]] = {}
    for run in runs:
        for name, task in run.tasks.items():
            if name not in NINE:
                figures = {task["metric"]: task["score"], **task.get("figures", {})}
                # JSON has null for what is no number.
                cells = [Cell(NOTHING if value is None else number(value)) for value in figures.values()]
                found.setdefault(tuple(figures), []).append((Cell(name, run.name), cells))
    return [
        Table(f"further tasks: {', '.join(names)}", ["task", *(name.replace("_", " ") for name in names)], rows)
        for names, rows in found.items()
    ]


def examples(runs: Sequence[RunRecords]) -> Iterator[tuple[str, Table]]:
    """A heading, and the texts that a task shows of a run."""
    for run in runs:
        for task, scored in run.tasks.items():
            for shown, texts in scored.get("examples", {}).items():
                values = [example["value"] for example in texts]
                cells = [Cell(NOTHING if value is None else number(value)) for value in values]
                rows = [(Cell(example["text"]), [cell]) for example, cell in zip(texts, cells, strict=True)]
                title = f"{run.name}, {task}: {shown}"
                yield title, Table(title, ["text", "value"], rows)


def _unit(value: float | None, unit: str) -> str:
    return NOTHING if value is None else f"{value:.3g} {unit}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.1f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


def _bytes(value: float | None) -> str:
    return NOTHING if value is None else format_bytes(value)


def _millions(value: float | None) -> str:
    return NOTHING if value is None else f"{value / 1e6:.2f} M"
