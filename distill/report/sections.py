"""The tables of a report."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from distill.evaluation.evaluator import NINE
from distill.report.columns import Column, comparison_columns, known_columns, mean_and_deviation
from distill.report.comparison import Comparison, Group
from distill.report.data import ReportData, RunRecords, averaged
from distill.report.formats import NOTHING, millions, number, optional, setting
from distill.report.tables import AVERAGES
from teacher_cache.storage.units import format_bytes, format_count, format_duration

# Prefixes of figures that are scores.
SCORED = ("tasks.", "average.")
# Models up to which a table has a column for each.
MODELS_ACROSS = 6


@dataclass(frozen=True)
class Cell:
    """Text, a small line below it, and whether it is the best of its row."""

    text: str
    below: str = ""
    best: bool = False


@dataclass(frozen=True)
class Table:
    """Each row starts with a cell that names it.

    Columns are right-aligned except those in `left`; rows from `summary_from` on are averages.
    """

    label: str
    headers: Sequence[str]
    rows: Sequence[tuple[Cell, Sequence[Cell]]]
    left: Sequence[str] = ()
    summary_from: int | None = None

    def transposed(self) -> "Table":
        """Columns as rows; the line below a row's name is in the header."""
        heads = [f"{name.text} ({name.below})" if name.below else name.text for name, _ in self.rows]
        rows = [
            (Cell(header), [cells[place] for _, cells in self.rows]) for place, header in enumerate(self.headers[1:])
        ]
        return Table(self.label, ["model", *heads], rows)

    @classmethod
    def of_columns(cls, label: str, columns: Sequence[Column]) -> "Table":
        """A table whose rows are named by the first column."""
        names, *others = columns
        rows = [(Cell(name), [Cell(column.cells[row]) for column in others]) for row, name in enumerate(names.cells)]
        left = [column.header for column in others if not column.right]
        return cls(label, [column.header for column in columns], rows, left)


def facts(runs: Sequence[RunRecords]) -> tuple[dict[str, str], Table | None]:
    """The facts that all runs share, and a table of the others."""
    facts = {run.name: _facts(run) for run in runs}
    labels = dict.fromkeys(label for found in facts.values() for label in found)
    values = {label: [found.get(label, NOTHING) for found in facts.values()] for label in labels}
    shared = {label: texts[0] for label, texts in values.items() if len(set(texts)) == 1}
    # The description of a teacher is too long for a table of many runs.
    others = [label for label in labels if label not in (*shared, "teacher")]
    if "teacher" not in shared:
        shared |= {f"space {found['space']}": found["teacher"] for found in facts.values() if "teacher" in found}
    if not others:
        return shared, None
    rows = [(Cell(name), [Cell(found.get(label, NOTHING)) for label in others]) for name, found in facts.items()]
    return shared, Table("what the runs differ in", ["run", *others], rows, left=others)


def _facts(run: RunRecords) -> dict[str, str]:
    """Settings and results of a run, as text, as far as they are recorded."""
    record, objective, sharpness = run.record, run.objective, dict(run.sharpness)
    facts = {"status": run.status}
    space, corpus, student = (record.get(part) or {} for part in ("space", "corpus", "student"))
    if space:
        online = (record.get("teacher") or {}).get("mode") == "online"
        facts["teacher"] = str(space.get("description", "")) + (", run at every step" if online else "")
        facts["space"] = " + ".join(part["slug"] for part in space.get("spaces", ())) or space.get("slug", "")
        if space.get("storage"):
            facts["space"] += f", stored as {space['storage']}"
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
        several = f", {processes} processes" if processes != 1 else ""
        facts["precision"] = f"{record.get('precision', NOTHING)}{several}"
        facts["versions"] = ", ".join(f"{name} {version}" for name, version in record.get("versions", {}).items())
    validation = record.get("validation") or {}
    if validation.get("points"):
        facts["validation"] = (
            f"best at step {validation['best_step']:,}, kept the {validation['keep']}; "
            f"{len(validation['points'])} evaluations in {format_duration(validation['seconds'])}"
        )
    if run.status == "finished":
        facts["vectors in"] = "the teacher's space" if record.get("in_teacher_space") else "their own space"
        facts["optimizer steps"] = f"{record['steps']:,}"
    return facts


def _options(options: Mapping[str, Any]) -> list[str]:
    return [f"{name}={setting(value)}" for name, value in options.items()]


def _with_options(name: str, options: Sequence[str]) -> str:
    return f"{name}: {', '.join(options)}" if options else name


def side_by_side(data: ReportData) -> Table | None:
    """The comparison without settings and single tasks, which are in other tables."""
    if len(data.comparison.rows) < 2:
        return None
    groups = []
    for group in data.comparison.groups:
        figures = [{k: v for k, v in row.figures.items() if not k.startswith("tasks.")} for row in group.rows]
        rows = [replace(row, figures=kept) for row, kept in zip(group.rows, figures, strict=True)]
        groups.append(replace(group, rows=tuple(rows)))
    columns = comparison_columns(Comparison(tuple(groups), (), ()))
    return Table.of_columns("the runs side by side", columns) if len(columns) > 1 else None


def score_table(data: ReportData) -> Table | None:
    """A row per task and average, a column per model; transposed for many models."""
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
    return replace(table, summary_from=len(rows)) if len(groups) <= MODELS_ACROSS else table.transposed()


def _average_row(data: ReportData, groups: Sequence[Group], name: str, label: str) -> tuple[Cell, list[Cell]]:
    """An average, with its number of tasks below its name, or below each score if the models differ in them."""
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
    return "not the same tasks in each run" if tasks is None else format_count(len(tasks), "task")


def _score_cells(data: ReportData, groups: Sequence[Group], figure: str) -> Iterator[Cell]:
    means = {group.name: group.figures[figure].mean for group in groups if figure in group.figures}
    students = {name: mean for name, mean in means.items() if name not in data.references}
    best = max(students.values(), default=None) if len(students) > 1 else None
    for group in groups:
        share = data.shares.get(group.name, {}).get(figure)
        yield Cell(
            NOTHING if (found := group.figures.get(figure)) is None else mean_and_deviation(found, 2),
            f"{share:.1f} %" if share is not None else "",
            best is not None and students.get(group.name) == best,
        )


def agreement_table(runs: Sequence[RunRecords]) -> Table | None:
    agreements = {
        run.name: agreement for run in runs if run.status == "finished" and (agreement := run.record.get("agreement"))
    }
    if not agreements:
        return None
    cells: dict[str, Callable[[Mapping[str, Any]], str]] = {
        f"{label} {when}": partial(_agreement, figure, when)
        for figure, label in (("spearman", "Spearman"), ("overlap", "overlap"))
        for when in ("before", "after", "projected")
    }
    cells |= {
        "texts": lambda agreement: f"{agreement['after']['texts']:,}",
        "neighbors": lambda agreement: f"{agreement['after']['neighbours']}",
    }
    columns = [Column("run", tuple(agreements)), *known_columns(list(agreements.values()), cells)]
    return Table.of_columns("agreement with the teacher", columns)


def _agreement(figure: str, when: str, agreement: Mapping[str, Any]) -> str:
    return f"{agreement[when][figure]:.3f}" if agreement.get(when) else NOTHING


def cost_table(data: ReportData) -> Table | None:
    """Costs of the finished runs, and sizes of the references."""
    figures = {row.name: row.figures for row in data.comparison.rows}
    costs: dict[str, Mapping[str, Any]] = {
        run.name: {"seconds": run.record.get("seconds"), **(run.record.get("cost") or {}), **figures[run.name]}
        for run in data.runs
        if run.status == "finished"
    }
    costs |= {name: figures[name] for name in data.references if "student.bytes" in figures.get(name, {})}
    if not costs:
        return None
    cells: dict[str, tuple[str, Callable[[Any], str]]] = {
        "s/step, median": ("step_seconds_p50", "{:.3g} s".format),
        "s/step, p90": ("step_seconds_p90", "{:.3g} s".format),
        "wait for a batch": ("data_seconds_p50", "{:.3g} s".format),
        "wait for data": ("data_wait_share", "{:.1%}".format),
        "whole run": ("seconds", format_duration),
        "peak memory": ("peak_memory_bytes", format_bytes),
        "weights": ("student.bytes", format_bytes),
        "parameters": ("student.parameters", millions),
        "device": ("device", str),
    }
    writers = {header: partial(_optional_figure, name, write) for header, (name, write) in cells.items()}
    columns = known_columns(list(costs.values()), writers)
    columns = [replace(column, right=column.header != "device") for column in columns]
    return Table.of_columns("what the runs cost", [Column("run", tuple(costs)), *columns])


def _optional_figure(name: str, write: Callable[[Any], str], figures: Mapping[str, Any]) -> str:
    return optional(write, figures.get(name))


def disk(runs: Sequence[RunRecords]) -> list[tuple[str, str]]:
    """Name of each space, and its size and that of its cache."""
    found = {}
    for run in runs:
        if run.disk:
            space = run.record["space"].get("slug") or run.record["space"].get("description", "")
            found[space] = f"{format_bytes(run.disk['space'])} of a cache of {format_bytes(run.disk['cache'])}"
    return list(found.items())


def figure_tables(runs: Sequence[RunRecords]) -> list[Table]:
    """All figures of the tasks besides the nine; a table for tasks with the same figures."""
    found: dict[tuple[str, ...], list[tuple[Cell, list[Cell]]]] = {}
    for run in runs:
        for name, task in run.tasks.items():
            if name not in NINE:
                figures = {task["metric"]: task["score"], **task.get("figures", {})}
                # NaN is null in JSON.
                cells = [Cell(optional(number, value)) for value in figures.values()]
                found.setdefault(tuple(figures), []).append((Cell(name, run.name), cells))
    return [
        Table(f"further tasks: {', '.join(names)}", ["task", *(name.replace("_", " ") for name in names)], rows)
        for names, rows in found.items()
    ]


def examples(runs: Sequence[RunRecords]) -> Iterator[tuple[str, Table]]:
    """Headings, and the example texts of tasks."""
    for run in runs:
        for task, scored in run.tasks.items():
            for kind, texts in scored.get("examples", {}).items():
                rows = [(Cell(example["text"]), [Cell(optional(number, example["value"]))]) for example in texts]
                title = f"{run.name}, {task}: {kind}"
                yield title, Table(title, ["text", "value"], rows)
