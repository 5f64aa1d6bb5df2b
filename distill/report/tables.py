"""The table of scores on the console."""

from collections.abc import Mapping

from rich.table import Table

from distill.evaluation.base import Report, TaskScore
from distill.report.formats import NOTHING, optional
from teacher_cache.storage.units import format_count

AVERAGES = {"in_domain": "in-domain", "out_of_domain": "out-of-domain", "all": "all"}

# (name, value) of a task's further figure -> mark and footnote.
NOTES = {
    ("converged", 0.0): ("†", "the classifier stopped at its iteration limit"),
    ("constant", 1.0): ("‡", "every cosine is the same: undefined, counted as 0"),
}


def task_table(reports: Mapping[str, Report]) -> Table:
    """A row per task and per average, a column per model, one decimal.

    Tasks are in the order of the first report that has them; a missing score is a dash. The number of tasks of an
    average is in its own column, or in the cells if the models differ. Tasks that count in no average have none.
    """
    table = Table()
    table.add_column("task")
    table.add_column("metric")
    for model in reports:
        table.add_column(model, justify="right")
    tasks = {name: task for report in reports.values() for name, task in report.tasks.items()}
    for name, task in tasks.items():
        table.add_row(
            f"{name} *" if task.domain == "in" else name,
            task.metric.replace("_", " "),
            *(_cell(report.tasks.get(name)) for report in reports.values()),
        )
    counted = any(task.domain != "apart" for task in tasks.values())
    table.add_section()
    for key, label in AVERAGES.items() if counted else ():
        averages = [report.averages[key] for report in reports.values()]
        counts = {average.tasks for average in averages}
        same = len(counts) == 1
        table.add_row(
            f"average {label}",
            format_count(counts.pop(), "task") if same else "",
            *(
                optional("{:.1f}".format, average.score) + ("" if same else f" ({format_count(average.tasks, 'task')})")
                for average in averages
            ),
        )
    table.caption = "; ".join(_notes(reports))
    return table


def _cell(task: TaskScore | None) -> str:
    if task is None:
        return NOTHING
    marks = [mark for (name, value), (mark, _) in NOTES.items() if task.extra.get(name) == value]
    return f"{task.score:.1f}{''.join(marks)}"


def _notes(reports: Mapping[str, Report]) -> list[str]:
    """The footnotes of the marks in the table."""
    tasks = [task for report in reports.values() for task in report.tasks.values()]
    notes = ["* in-domain"] if any(task.domain == "in" for task in tasks) else []
    notes += [
        f"{mark} {text}"
        for (name, value), (mark, text) in NOTES.items()
        if any(task.extra.get(name) == value for task in tasks)
    ]
    return notes
