"""The plots of a report: learning curves, scores, measurements and analyses."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from distill.report.analysis_plots import draw_analysis
from distill.report.bench import bench_plots
from distill.report.comparison import Figure
from distill.report.curves import curves, validation
from distill.report.data import ReportData
from distill.report.drawing import Key, Panel, Plot, legend_key, name_rows, number_axes, rows_height
from distill.report.references import BASELINE, TEACHER

MARKERS = {TEACHER: "|", BASELINE: "o"}
OTHER_MARKER = "x"


def plots(data: ReportData) -> dict[str, list[Plot]]:
    """Plots by section: "scores", "curves", "validation", "bench" and names of analyses; those with data."""
    groups = dict.fromkeys(run.group for run in data.runs)
    keys = {name: legend_key(place, name) for place, name in enumerate(groups)}
    found = {
        "scores": list(_scores(data, keys)),
        "curves": list(curves(data.runs, keys)),
        "validation": list(validation(data.runs, keys)),
        "bench": list(bench_plots(data.bench)),
        **{name: list(draw_analysis(name, data.runs, keys)) for name in data.analyses},
    }
    return {name: drawn for name, drawn in found.items() if drawn}


def _scores(data: ReportData, keys: Mapping[str, Key]) -> Iterator[Plot]:
    """Scores of all models on all tasks, runs in color and references in ink."""
    marks = {name: Key(name, key.color, "", key.marker) for name, key in keys.items()}
    marks |= {name: Key(name, None, "", MARKERS.get(role, OTHER_MARKER)) for name, role in data.references.items()}
    rows = [
        (marks[group.name], scores)
        for group in data.comparison.groups
        if (scores := {task: group.figures[f"tasks.{task}"] for task in data.tasks if f"tasks.{task}" in group.figures})
    ]
    if not rows:
        return
    description = "; ".join(
        f"{key.label}: " + ", ".join(f"{task} {figure.mean:.1f}" for task, figure in scores.items())
        for key, scores in rows
    )
    tasks = list(data.tasks)
    draw = partial(_draw_scores, tasks, rows)
    panel = Panel("score of each task (points of 100)", description, draw, rows_height(len(tasks)))
    yield Plot("scores", "Scores by task", [panel], [key for key, _ in rows])


def _draw_scores(tasks: Sequence[str], rows: Sequence[tuple[Key, Mapping[str, Figure]]], axes: Any) -> None:
    for key, scores in rows:
        reference = key.color is None
        axes.errorbar(
            [figure.mean for figure in scores.values()],
            [tasks.index(task) for task in scores],
            xerr=[figure.deviation or 0.0 for figure in scores.values()],
            color=key.hex,
            linestyle="none",
            marker=key.marker,
            markersize=11 if key.marker == "|" else 5,
            markeredgewidth=1.4 if reference else 0.0,
            markerfacecolor="none" if reference else key.hex,
            elinewidth=1.2 if any(figure.deviation for figure in scores.values()) else 0.0,
            zorder=2 if reference else 3,
        )
    number_axes(axes, "score")
    name_rows(axes, tasks)
