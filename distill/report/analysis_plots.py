"""Plots of the results of analyses."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from distill.report.curves import step_panel
from distill.report.data import RunRecords
from distill.report.drawing import HEIGHT, INK, Key, Panel, Plot, line, number_axes
from distill.report.formats import number

PRECISIONS = ("float32", "int8", "binary")
SIDES = {"teacher": "--", "student": "-", "asymmetric": ":"}
TEACHER = Key("teacher", None, "--")
BEFORE = Key("before training", None, ":")
METHODS = {"tsne": "t-SNE", "pca": "PCA"}
POINTS = {"teacher": Key("teacher", None, "", "o"), "student": Key("student", 1, "", "o")}
HEATMAP_HEIGHT, MAP_HEIGHT = 236.0, 252.0
# Layers up to which a matrix has its values as text and a tick for every layer.
FEW_LAYERS = 8
PAIR = 2

# Runs with their results of an analysis.
Results = Sequence[tuple[RunRecords, Mapping[str, Any]]]


def draw_analysis(name: str, runs: Sequence[RunRecords], keys: Mapping[str, Key]) -> Iterator[Plot]:
    """The plots of one analysis for all runs; an analysis that is not in `DRAWN` has none."""
    results = [(run, run.analyses[name]["result"]) for run in runs if run.analyses.get(name, {}).get("result")]
    if results and name in DRAWN:
        yield from DRAWN[name](results, keys)


def _compression(results: Results, keys: Mapping[str, Key]) -> Iterator[Plot]:
    panels = []
    used: dict[str, None] = {}
    for run, result in results:
        for task in result["tasks"]:
            curves = [(side, *of_precision) for side, curve in task["curves"].items() for of_precision in curve.items()]
            used |= dict.fromkeys(name for side, precision, _ in curves for name in (side, precision))
            description = "; ".join(
                f"{side} {precision}: "
                + ", ".join(f"{point['score']:.1f} at {number(point['bytes'])} bytes" for point in points)
                for side, precision, points in curves
            )
            title = f"{run.name}: {_words(task['metric'])} on {task['task']} (points of 100)"
            panels.append(Panel(title, description, partial(_draw_compression, curves)))
    legend = [
        *(Key(name, color, "", "o") for color, name in enumerate(PRECISIONS) if name in used),
        *(Key(side, None, dash) for side, dash in SIDES.items() if side in used),
    ]
    if panels:
        yield Plot("compression", "Score by size of a vector", panels, legend)


def _draw_compression(curves: Sequence[tuple[str, str, Sequence[Mapping[str, Any]]]], axes: Any) -> None:
    for side, precision, points in curves:
        key = Key(side, PRECISIONS.index(precision) if precision in PRECISIONS else None, SIDES.get(side, "-"), "o")
        ordered = sorted(points, key=lambda point: point["bytes"])
        line(axes, key, [point["bytes"] for point in ordered], [point["score"] for point in ordered])
    axes.set_xscale("log", base=2)
    number_axes(axes, "bytes a vector")


def _curvature(results: Results, keys: Mapping[str, Key]) -> Iterator[Plot]:
    figures = {
        "largest eigenvalue, student's parameters": lambda point: _eigenvalue(point.get("student")),
        "largest eigenvalue, student and heads": lambda point: _eigenvalue(point.get("with_heads")),
        "sharpness: rise of the loss": lambda point: (point.get("sharpness") or {}).get("rise"),
        "adaptive sharpness: rise of the loss": lambda point: (point.get("adaptive_sharpness") or {}).get("rise"),
        "loss without dropout": lambda point: point.get("value"),
    }
    found = []
    for title, figure in figures.items():
        values = [(run, [(point["step"], figure(point)) for point in result["points"]]) for run, result in results]
        known = [(run, [(step, value) for step, value in points if value is not None]) for run, points in values]
        found.append(step_panel(title, known, keys))
    panels = [panel for panel, _ in filter(None, found)]
    if panels:
        yield Plot("curvature", "Curvature of the loss (no unit)", panels, _keys_of(results, keys))


def _eigenvalue(found: Mapping[str, Any] | None) -> float | None:
    """The value of Lanczos's method, which needs fewer steps than power iteration."""
    method = (found or {}).get("lanczos") or (found or {}).get("power")
    value = method.get("value") if isinstance(method, Mapping) else method
    return None if value is None else float(value)


def _margin(results: Results, keys: Mapping[str, Key]) -> Iterator[Plot]:
    by_task: dict[str, list[tuple[RunRecords, Mapping[str, Any]]]] = {}
    for run, result in results:
        title = f"{_words(str(result['metric']))} on {result['task']} (points of 100)"
        by_task.setdefault(title, []).append((run, result))
    panels = []
    for title, chosen in by_task.items():
        description = "; ".join(
            f"{run.name}: "
            + ", ".join(f"{point['score']:.1f} at error {point['error']:.3f}" for point in result["points"])
            + ("; no margin" if result.get("margin") is None else f"; margin {result['margin']:.3f}")
            for run, result in chosen
        )
        panels.append(Panel(title, description, partial(_draw_margin, chosen, keys), HEIGHT))
    legend = [Key(key.label, key.color, "-", "o") for key in _keys_of(results, keys)]
    yield Plot("margin", "Score against approximation error", panels, [*legend, TEACHER])


def _draw_margin(chosen: Results, keys: Mapping[str, Key], axes: Any) -> None:
    for run, result in chosen:
        key, margin = keys[run.group], result.get("margin")
        for fitted in (True, False):
            points = [point for point in result["points"] if point["fitted"] is fitted]
            x, y = [point["error"] for point in points], [point["score"] for point in points]
            fill = "full" if fitted else "none"
            axes.plot(x, y, color=key.hex, linestyle="", marker="o", markersize=4.5, fillstyle=fill)
        if result.get("fit"):
            errors = [point["error"] for point in result["points"]]
            if margin is not None and margin > 0:
                errors.append(margin)
            ends = [min(errors), max(errors)]
            fit = [result["fit"]["intercept"] + result["fit"]["slope"] * end for end in ends]
            axes.plot(ends, fit, color=key.hex, linewidth=1.1)
    for score in sorted({result["teacher_score"] for _, result in chosen}):
        axes.axhline(score, color=TEACHER.hex, linestyle=TEACHER.dash, linewidth=1.1)
    number_axes(axes, "approximation error (distance of unit vectors)")


def _layers(results: Results, keys: Mapping[str, Key]) -> Iterator[Plot]:
    """Similarity to the teacher and drift of all runs, and the matrices of each run."""
    names = [str(name) for name in max((result["layers"] for _, result in results), key=len)]
    after = [(run.name, keys[run.group], result) for run, result in results]
    similarity = [(f"{n} before", replace(key, dash=BEFORE.dash), r["before"]["to_teacher"]) for n, key, r in after]
    similarity += [(f"{n} after", key, r["after"]["to_teacher"]) for n, key, r in after]
    panels = [
        _layer_panel("similarity to the teacher (CKA, no unit)", names, similarity),
        _layer_panel("drift: 1 - cosine with before training", names, [(n, key, r["drift"]) for n, key, r in after]),
    ]
    yield Plot("layers", "Change of the layers in training", panels, [*_keys_of(results, keys), BEFORE])
    # Runs that started from the same student share its matrix.
    matrices: dict[str, tuple[list[str], str, Mapping[str, Any]]] = {}
    for side in ("before", "after"):
        for run, result in results:
            same = json.dumps([side, run.name if side == "after" else result["before"]["between"]])
            matrices.setdefault(same, ([], side, result))[0].append(run.name)
    yield Plot("layers-between", "Likeness between layers", [_matrix_panel(*one) for one in matrices.values()])


def _matrix_panel(runs: Sequence[str], side: str, result: Mapping[str, Any]) -> Panel:
    names, matrix = [str(name) for name in result["layers"]], result[side]["between"]
    description = "; ".join(
        f"{name}: {', '.join(f'{value:.2f}' for value in row)}" for name, row in zip(names, matrix, strict=True)
    )
    title = f"{', '.join(runs)}: layers {side} training (CKA, no unit)"
    return Panel(title, description, partial(_draw_matrix, names, matrix), HEATMAP_HEIGHT)


def _layer_panel(title: str, names: Sequence[str], lines: Sequence[tuple[str, Key, Sequence[float]]]) -> Panel:
    description = "; ".join(
        f"{label}: " + ", ".join(f"{name} {value:.3f}" for name, value in zip(names, values, strict=False))
        for label, _, values in lines
    )
    draw = partial(_draw_layers, names, [(key, values) for _, key, values in lines])
    return Panel(title, f"By layer: {description}.", draw)


def _draw_matrix(names: Sequence[str], matrix: Sequence[Sequence[float]], axes: Any) -> None:
    lowest = min(0.0, min(map(min, matrix)))
    axes.pcolormesh(matrix, cmap="cividis", vmin=lowest, vmax=1.0)
    if len(names) <= FEW_LAYERS:
        for row, values in enumerate(matrix):
            for column, value in enumerate(values):
                # Light on dark colors; not the page's ink, which depends on its theme.
                color = "#fefefe" if (value - lowest) / (1 - lowest) < 0.55 else "#010101"
                size = 8.5 if len(names) <= 5 else 7.0
                middle = {"ha": "center", "va": "center", "fontsize": size}
                axes.text(column + 0.5, row + 0.5, f"{value:.2f}", color=color, **middle)
    ticks = [(place + 0.5, name) for place, name in _layer_ticks(names)]
    axes.set_xticks(*zip(*ticks, strict=True))
    axes.set_yticks(*zip(*ticks, strict=True))
    axes.set_xlabel("layer")
    axes.set_ylabel("layer")
    axes.set_aspect("equal")
    axes.invert_yaxis()
    axes.grid(False)
    axes.tick_params(length=0)
    axes.spines[["left", "bottom"]].set_visible(False)


def _draw_layers(names: Sequence[str], lines: Sequence[tuple[Key, Sequence[float]]], axes: Any) -> None:
    for key, values in lines:
        line(axes, key, range(len(values)), values)
    number_axes(axes, "layer")
    axes.set_xticks(*zip(*_layer_ticks(names), strict=True))


def _layer_ticks(names: Sequence[str]) -> list[tuple[int, str]]:
    """All of few layers, every other of many."""
    short = ["emb" if name == "embeddings" else name for name in names]
    return list(enumerate(short))[:: 1 if len(names) <= FEW_LAYERS else 2]


def _map(results: Results, keys: Mapping[str, Key]) -> Iterator[Plot]:
    panels = []
    for run, result in results:
        points, method = result["points"], METHODS.get(result["method"], result["method"])
        texts = len({point["text"] for point in points})
        description = f"The teacher's and the student's vectors of {texts} texts, projected onto a plane by {method}."
        title = f"{run.name}: {texts} texts by {method} (no unit)"
        panels.append(Panel(title, description, partial(_draw_map, points), MAP_HEIGHT))
    yield Plot("map", "Teacher and student on one plane", panels, list(POINTS.values()))


def _draw_map(points: Sequence[Mapping[str, Any]], axes: Any) -> None:
    from matplotlib.collections import LineCollection

    pairs: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        pairs.setdefault(point["text"], []).append((point["x"], point["y"]))
    lines = [pair for pair in pairs.values() if len(pair) == PAIR]
    axes.add_collection(LineCollection(lines, colors=INK, linewidths=0.4, alpha=0.4))
    for side, key in POINTS.items():
        x, y = zip(*((point["x"], point["y"]) for point in points if point["of"] == side), strict=True)
        fill = "none" if key.color is None else "full"
        axes.plot(x, y, color=key.hex, linestyle="", marker="o", markersize=3, markeredgewidth=0.7, fillstyle=fill)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_aspect("equal", adjustable="datalim")
    axes.grid(False)
    axes.spines[["left", "bottom"]].set_visible(False)


def _keys_of(results: Results, keys: Mapping[str, Key]) -> list[Key]:
    return [keys[group] for group in dict.fromkeys(run.group for run, _ in results)]


def _words(name: str) -> str:
    return name.replace("_", " ")


# Analysis -> its plots; of other analyses only the conclusion is shown.
DRAWN: Mapping[str, Callable[[Results, Mapping[str, Key]], Iterator[Plot]]] = {
    "compression": _compression,
    "curvature": _curvature,
    "layers": _layers,
    "map": _map,
    "margin": _margin,
}
