"""Plots over training steps: logged figures and validation scores."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from distill.report.data import RunRecords
from distill.report.drawing import Key, Panel, Plot, line, needs_log_scale, number_axes
from distill.report.formats import number

STEP = "optimizer step"
# Keys of metrics.jsonl that are not terms of the objective, with their titles.
PROGRESS = ("step", "epoch")
OPTIMIZATION = {"learning_rate": "learning rate of the student", "grad_norm": "norm of the gradient"}
SHARPNESS = {"perturbation_norm": "norm of the perturbation", "perturbation_rise": "rise of the loss to w + eps"}
SHARE = "share of "


class Series(NamedTuple):
    """The points of one run."""

    run: RunRecords
    key: Key
    x: Sequence[float]
    y: Sequence[float]


def curves(runs: Sequence[RunRecords], keys: Mapping[str, Key]) -> Iterator[Plot]:
    """The loss and its terms, learning rate and gradient norm, and the figures of sharpness."""
    logged = dict.fromkeys(name for run in runs for entry in run.metrics for name in entry)
    names = [name for name in logged if name not in PROGRESS]
    sharp = [name for name in names if name in SHARPNESS or name.startswith(SHARE)]
    terms = [name for name in names if name not in (*OPTIMIZATION, *sharp, "loss")]
    shares = {name: f"{name} of the perturbation (0 to 1)" for name in sharp if name.startswith(SHARE)}
    titles = OPTIMIZATION | SHARPNESS | shares
    for name, title, chosen in (
        ("losses", "Loss and its terms", [name for name in ("loss", *terms) if name in names]),
        ("optimization", "Learning rate and gradient", [name for name in OPTIMIZATION if name in names]),
        ("perturbation", "Sharpness", sharp),
    ):
        panels = [
            step_panel(titles.get(metric, metric), [(run, _points(run.metrics, metric)) for run in runs], keys)
            for metric in chosen
        ]
        yield from _plot(name, title, panels, keys)


def validation(runs: Sequence[RunRecords], keys: Mapping[str, Key]) -> Iterator[Plot]:
    """The average over the validation files, and the score of each task."""
    scores = {run.name: [{"step": entry["step"], **entry["validation"]} for entry in run.validation] for run in runs}
    names = dict.fromkeys(name for entries in scores.values() for entry in entries for name in entry)
    panels = [
        step_panel(f"{name} (points of 100)", [(run, _points(scores[run.name], name)) for run in runs], keys)
        for name in names
        if name not in PROGRESS
    ]
    yield from _plot("validation", "Scores on validation files", panels, keys)


def step_panel(
    title: str, points: Sequence[tuple[RunRecords, Sequence[tuple[float, float]]]], keys: Mapping[str, Key]
) -> tuple[Panel, set[str]] | None:
    """A panel of (step, value) points, and the groups in it; None without points."""
    drawn = [
        Series(run, keys[run.group], [step for step, _ in found], [value for _, value in found])
        for run, found in points
        if found
    ]
    if not drawn:
        return None
    description = "; ".join(
        f"{run.name} {number(y[0])} at step {number(x[0])}"
        + (f", {number(y[-1])} at step {number(x[-1])}" if len(x) > 1 else "")
        for run, _, x, y in drawn
    )
    return Panel(title, f"By {STEP}: {description}.", partial(_draw, drawn)), {series.run.group for series in drawn}


def _plot(
    name: str, title: str, panels: Sequence[tuple[Panel, set[str]] | None], keys: Mapping[str, Key]
) -> Iterator[Plot]:
    drawn = [panel for panel in panels if panel is not None]
    groups = {group for _, used in drawn for group in used}
    if drawn:
        legend = [Key(group, key.color, key.dash) for group, key in keys.items() if group in groups]
        yield Plot(name, title, [panel for panel, _ in drawn], legend)


def _points(entries: Sequence[Mapping[str, Any]], metric: str) -> list[tuple[float, float]]:
    found = [(entry["step"], entry.get(metric)) for entry in entries]
    return [(step, value) for step, value in found if isinstance(value, int | float) and math.isfinite(value)]


def _draw(drawn: Sequence[Series], axes: Any) -> None:
    seeds = len({series.run.group for series in drawn}) < len(drawn)
    for _, key, x, y in drawn:
        line(axes, key, x, y, faint=seeds)
    number_axes(axes, STEP, log_y=needs_log_scale([value for series in drawn for value in series.y]), whole_x=True)
