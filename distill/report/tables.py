"""Tables of scores for the console."""

from collections.abc import Mapping

from rich.table import Table

from distill.evaluation.base import Report, TaskScore

AVERAGES = {"in_domain": "in-domain", "out_of_domain": "out-of-domain", "all": "all"}

# Further figures of a task that a reader must know of: (name, value) -> mark and footnote.
NOTES = {
    ("converged", 0.0): ("†", "the classifier stopped at its iteration limit"),
    ("constant", 1.0): ("‡", "every cosine is the same: undefined, counted as 0"),
}


def task_table(reports: Mapping[str, Report]) -> Table:
    """One row a task and one for each of the three averages, one column a model, one decimal.

    Tasks come in the order of the first report that has them; a task that a model did not run is a dash. An
    average says over how many tasks it goes in its row's name, or in the cell where the models differ; there is none
    over tasks that count in none.
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
            _tasks(counts.pop()) if same else "",
            *(
                ("-" if average.score is None else f"{average.score:.1f}")
                + ("" if same else f" ({_tasks(average.tasks)})")
                for average in averages
            ),
        )
    table.caption = "; ".join(_notes(reports))
    return table


def _tasks(count: int) -> str:
    return f"{count} task" if count == 1 else f"{count} tasks"


def _cell(task: TaskScore | None) -> str:
    if task is None:
        return "-"
    marks = [mark for (name, value), (mark, _) in NOTES.items() if task.extra.get(name) == value]
    return f"{task.score:.1f}{''.join(marks)}"


def _notes(reports: Mapping[str, Report]) -> list[str]:
    """The footnotes that the table's marks refer to."""
    tasks = [task for report in reports.values() for task in report.tasks.values()]
    notes = ["* in-domain"] if any(task.domain == "in" for task in tasks) else []
    notes += [
        f"{mark} {text}"
        for (name, value), (mark, text) in NOTES.items()
        if any(task.extra.get(name) == value for task in tasks)
    ]
    return notes
