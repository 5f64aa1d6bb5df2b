"""The report as one HTML file that needs nothing else, beside it the same as JSON and the plots as PNG."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from distill.errors import ConfigError, RunFolderError
from distill.report import sections
from distill.report.bench import bench_tables
from distill.report.columns import notes
from distill.report.data import FURTHER, ReportData, RunRecords
from distill.report.drawing import Key, Plot, png, svg
from distill.report.plots import plots
from distill.run_folder import RECORD, SCORES, is_run_folder, read_record
from teacher_cache.errors import optional_import
from teacher_cache.storage.files import atomic_write

TEMPLATE = "report.html.j2"
# Keys by which a report's JSON is told from other files.
REPORT = {"runs", "references", "comparison", "units"}
# Analysis -> its heading, and how its plots are read.
ANALYSES = {
    "compression": (
        "Compression",
        "Vectors cut to their first numbers, scaled to length 1 and stored in fewer bits, scored on the same task.",
    ),
    "margin": (
        "Robustness margin",
        "Each point is a checkpoint: how far its vectors are from the teacher's, and what it scores. Hollow points are "
        "left out of the line. Where the line meets the teacher's score is the error that costs nothing.",
    ),
    "curvature": (
        "Curvature",
        "How steeply the loss rises around the weights, on the same training texts at every checkpoint. Smaller is "
        "flatter.",
    ),
    "layers": (
        "Layers",
        "How alike two layers order the same texts, 1 being the same order, and how far training moved each of them.",
    ),
    "map": ("Map", "Each text twice, where the teacher and where the student puts it; a thin line joins the two."),
}


@dataclass(frozen=True)
class Drawing:
    """A plot on the page."""

    plot: Plot
    panels: Sequence[tuple[str, str]]  # title, SVG


@dataclass(frozen=True)
class Answer:
    """An analysis of one or more runs."""

    name: str
    title: str
    read: str
    conclusions: Sequence[tuple[str, str]]
    drawings: Sequence[Drawing]


def write_report(data: ReportData, output: Path) -> list[Path]:
    """Write `output`, its namesake with `.json`, and the plots in `NAME_files/`; the same data give the same bytes.

    Plots that an earlier report left there and this one does not have are removed.

    Returns:
        The files, the HTML first.

    Raises:
        ConfigError: see `check_page`.
        MissingDependency: matplotlib or Jinja is absent.
    """
    check_page(output)
    drawn = plots(data)
    folder = output.with_name(f"{output.stem}_files")
    pictures = {folder / f"{output.stem}-{plot.name}.png": plot for found in drawn.values() for plot in found}
    page = html(data, drawn)
    record = json.dumps(data.to_json(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if pictures:
        folder.mkdir(exist_ok=True)
    for path in folder.glob("*.png"):
        if path.name.startswith(f"{output.stem}-") and path not in pictures:
            path.unlink()
    for path, plot in pictures.items():
        png(plot, path)
    beside = output.with_suffix(".json")
    for path, text in ((beside, record), (output, page)):
        with atomic_write(path) as file:
            file.write(text.encode())
    return [output, beside, *pictures]


def check_page(output: Path) -> None:
    """Refuse a name for the page before anything is read, drawn or scored.

    Raises:
        ConfigError: it does not end in .html, or the JSON beside it would replace what is no report's.
    """
    if output.suffix not in (".html", ".htm"):
        raise ConfigError(f"the report {output} is an HTML file: give it a name that ends in .html")
    beside = output.with_suffix(".json")
    try:
        held = read_record(beside.parent, beside.name)
        taken = beside.exists() and not (isinstance(held, dict) and held.keys() >= REPORT)
    except RunFolderError:
        taken = True
    # A run that has not written them yet will, and other scores in its folder are read as its own.
    records = beside.name in (RECORD, SCORES) or beside.match(FURTHER)
    if taken or (records and is_run_folder(output.parent)):
        raise ConfigError(
            f"the report's data would be written to {beside}, which is no report's: give {output.name} another name"
        )


def html(data: ReportData, drawn: Mapping[str, Sequence[Plot]]) -> str:
    """The page.

    Raises:
        MissingDependency: matplotlib or Jinja is absent.
    """
    with optional_import("a report"):
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup

    def drawings(name: str) -> list[Drawing]:
        return [
            Drawing(
                plot,
                [(panel.title, Markup(svg(panel, f"{plot.name}-{place}"))) for place, panel in enumerate(plot.panels)],
            )
            for plot in drawn.get(name, ())
        ]

    shared, differing = sections.facts(data.runs)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters["dash"] = {"-": "none", "--": "6 3", ":": "1.5 2.5", "-.": "6 2 1.5 2"}.get
    template = environment.from_string(resources.files("distill.report").joinpath(TEMPLATE).read_text(encoding="utf-8"))
    return template.render(
        title=_title(data),
        data=data,
        notes=notes(data.comparison),
        shared=shared,
        differing=differing,
        side_by_side=sections.side_by_side(data),
        scores=sections.score_table(data),
        score_drawings=drawings("scores"),
        figures=sections.figure_tables(data.runs),
        examples=list(sections.examples(data.runs)),
        agreement=sections.agreement_table(data.runs),
        curves=drawings("curves"),
        validation=drawings("validation"),
        answers=[
            Answer(name, *ANALYSES.get(name, (name, "")), _conclusions(name, data.runs), drawings(name))
            for name in data.analyses
        ],
        cost=sections.cost_table(data),
        bench=bench_tables(data.bench),
        bench_drawings={drawing.plot.name: drawing for drawing in drawings("bench")},
        disk=sections.disk(data.runs),
        color=_color,
    )


def _color(key: Key) -> str:
    return "currentColor" if key.color is None else f"var(--mark-{key.color})"


def _title(data: ReportData) -> str:
    names = [run.name for run in data.runs] or list(data.references) or ["what a step costs"]
    return ", ".join(names) if len(names) <= 4 else f"{len(names)} runs"


def _conclusions(name: str, runs: Sequence[RunRecords]) -> list[tuple[str, str]]:
    return [(run.name, str(run.analyses[name].get("conclusion", ""))) for run in runs if name in run.analyses]
