"""Drawing of plots: each panel as an SVG in the page's colors, all panels of a plot as one PNG."""

import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from distill.report.formats import number
from teacher_cache.errors import optional_import

INK, GRID, PAPER = "#1c2127", "#d9dde2", "#ffffff"
# Okabe and Ito's colors, which color-blind readers can distinguish, without yellow, which is invisible on white, and
# black, the color of references.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
DASHES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D")
# Points: a panel fits the width of a phone, so that its text is readable without zooming.
WIDTH, HEIGHT = 252.0, 176.0
# Height of a row of a panel with one row per task or method, and of its axis.
ROW_HEIGHT, AXIS_HEIGHT = 18.0, 44.0
PNG_COLUMNS, PNG_DPI = 3, 160
POINTS_AN_INCH = 72.0
# Ratio of the largest to the smallest value above which an axis is logarithmic.
LOGARITHMIC = 20.0
# Distances of two ticks, times a power of ten.
STEPS = (1, 2, 5, 10)


@dataclass(frozen=True)
class Key:
    """An entry of a legend; `color` None is the ink, for references."""

    label: str
    color: int | None
    dash: str = "-"
    marker: str = ""

    @property
    def hex(self) -> str:
        return INK if self.color is None else COLORS[self.color]


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    description: str
    draw: Callable[[Any], None]
    height: float = HEIGHT


@dataclass(frozen=True)
class Plot:
    """Panels that share a legend; `name` is that of its PNG."""

    name: str
    title: str
    panels: Sequence[Panel]
    keys: Sequence[Key] = field(default=())


def legend_key(place: int, label: str) -> Key:
    """The key of the n-th item; after the last color, the colors repeat with another dash."""
    again = place // len(COLORS) % len(DASHES)
    return Key(label, place % len(COLORS), DASHES[again], MARKERS[again])


def line(axes: Any, key: Key, x: Sequence[float], y: Sequence[float], *, faint: bool = False) -> None:
    """A line, with markers if it has few points."""
    marker, alpha = key.marker or "o" if len(x) <= 12 else "", 0.45 if faint else 1.0
    axes.plot(x, y, color=key.hex, linestyle=key.dash, marker=marker, markersize=3.5, alpha=alpha)


def needs_log_scale(values: Sequence[float]) -> bool:
    return min(values, default=0) > 0 and max(values) > LOGARITHMIC * min(values)


def number_axes(axes: Any, x: str, y: str = "", *, log_y: bool = False, whole_x: bool = False) -> None:
    """Set labels, few ticks and short tick labels."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if axes.get_xscale() == "linear":
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=STEPS, integer=whole_x, min_n_ticks=1))
    if log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=7))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=STEPS))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))


def rows_height(rows: int) -> float:
    """Height of a panel with this many rows."""
    return AXIS_HEIGHT + ROW_HEIGHT * rows


def name_rows(axes: Any, names: Sequence[str]) -> None:
    """Label rows 0 to n - 1, from top to bottom."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)


def svg(panel: Panel, name: str) -> str:
    """The panel as an `<svg>` element with the page's colors and no fixed size."""
    with _style() as figure_of:
        figure = figure_of(WIDTH, panel.height)
        panel.draw(figure.subplots())
        text = io.StringIO()
        none = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(text, format="svg", transparent=True, metadata=none)
    drawn = text.getvalue()
    inside = drawn[drawn.index(">", drawn.index("<svg")) + 1 :]
    inside = re.sub(r"<g id=\"[^\"]*\">", "<g>", inside)
    # Ids must be unique in the page.
    inside = re.sub(r"(?<=\sid=\")", f"{name}-", inside)
    inside = re.sub(r"(?<=url\(#)|(?<=href=\"#)", f"{name}-", inside)
    inside = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", inside)
    for place, color in enumerate(COLORS):
        inside = inside.replace(color, f"var(--mark-{place})")
    inside = inside.replace(INK, "currentColor").replace(GRID, "var(--grid)").replace(PAPER, "var(--paper)")
    return (
        f'<svg viewBox="0 0 {WIDTH:g} {panel.height:g}" role="img" aria-labelledby="{name}-title {name}-description">'
        f'<title id="{name}-title">{escape(panel.title)}</title><desc id="{name}-description">'
        f"{escape(panel.description)}</desc>{inside.strip()}"
    )


def png(plot: Plot, path: Path) -> None:
    """Write all panels and the legend, on white."""
    from matplotlib.lines import Line2D

    columns = min(PNG_COLUMNS, len(plot.panels))
    rows = -(-len(plot.panels) // columns)
    heights = [max(panel.height for panel in plot.panels[row * columns : (row + 1) * columns]) for row in range(rows)]
    legend_rows = -(-len(plot.keys) // columns)
    title = 20.0
    with _style() as figure_of:
        figure = figure_of(columns * WIDTH, sum(heights) + rows * title + legend_rows * 16.0 + 8.0)
        grid = figure.subplots(rows, columns, squeeze=False, height_ratios=heights)
        for axes, panel in zip(grid.flat, plot.panels, strict=False):
            panel.draw(axes)
            axes.set_title(panel.title, fontsize=9)
        for axes in list(grid.flat)[len(plot.panels) :]:
            axes.set_axis_off()
        if plot.keys:
            handles = [
                Line2D([], [], color=key.hex, linestyle=key.dash or "none", marker=key.marker) for key in plot.keys
            ]
            labels, wide = [key.label for key in plot.keys], min(columns * 2, len(plot.keys))
            figure.legend(handles, labels, loc="outside upper left", ncols=wide, frameon=False)
        figure.savefig(path, format="png", dpi=PNG_DPI, metadata={"Software": None})


@contextmanager
def _style() -> Iterator[Callable[[float, float], Any]]:
    """A function that makes figures of a width and a height in points, without pyplot."""
    with optional_import("a plot"):
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    style: Mapping[str, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "report",
        "text.parse_math": False,  # names of runs may contain $
        "font.family": "DejaVu Sans",
        "font.size": 8.5,
        "axes.labelsize": 8.5,
        "text.color": INK,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "axes.linewidth": 0.6,
        "xtick.color": INK,
        "ytick.color": INK,
        "xtick.major.width": 0.6,
        "ytick.major.width": 0.6,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": GRID,
        "grid.linewidth": 0.6,
        "lines.linewidth": 1.5,
    }
    with rc_context(dict(style)), warnings.catch_warnings():
        # The browser's fonts have glyphs that matplotlib's lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield lambda width, height: Figure(
            figsize=(width / POINTS_AN_INCH, height / POINTS_AN_INCH), layout="constrained"
        )
