"""The report as a self-contained HTML file, with its data as JSON and its plots as PNG files."""

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

from distill.errors import ConfigError, RunFolderError
from distill.report import sections
from distill.report.bench import bench_tables
from distill.report.columns import notes
from distill.report.data import FURTHER, ReportData, RunRecords
from distill.report.drawing import Plot, png, svg
from distill.report.plots import plots
from distill.run_folder import RECORD, SCORES, is_run_folder, read_record
from teacher_cache.errors import optional_import
from teacher_cache.storage.files import atomic_write

TEMPLATE = "report.html.j2"
# Keys that identify the JSON file of a report.
REPORT = {"runs", "references", "comparison", "units"}
# Analysis -> its heading, and how to read its plots.
ANALYSES = {
    "compression": (
        "Compression",
        "Scores of vectors that are truncated, scaled to length 1 and stored in fewer bits.",
    ),
    "margin": (
        "Robustness margin",
        "Each point is a checkpoint: the distance of its vectors from the teacher's, and its score. Hollow points are "
        "excluded from the fit. The margin is the error at which the line reaches the teacher's score.",
    ),
    "curvature": (
        "Curvature",
        "How steeply the loss rises around the weights, on the same training texts at every checkpoint. Smaller is "
        "flatter.",
    ),
    "layers": (
        "Layers",
        "Similarity of two layers on the same texts, 1 for equal cosines, and how much training changed each layer.",
    ),
    "map": ("Map", "The teacher's and the student's vector of each text, connected by a thin line."),
}


def write_report(data: ReportData, output: Path) -> list[Path]:
    """Write `output`, its data as `NAME.json`, and the plots in `NAME_files/`; equal data give equal bytes.

    Plots of an earlier report that this one does not have are removed. Returns the files, the HTML first.
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
    json_path = output.with_suffix(".json")
    for path, text in ((json_path, record), (output, page)):
        with atomic_write(path) as file:
            file.write(text.encode())
    return [output, json_path, *pictures]


def check_page(output: Path) -> None:
    """Check the name of the page before anything is read or scored."""
    if output.suffix not in (".html", ".htm"):
        raise ConfigError(f"the report {output} is an HTML file: choose a name that ends in .html")
    path = output.with_suffix(".json")
    try:
        held = read_record(path.parent, path.name)
        taken = path.exists() and not (isinstance(held, dict) and held.keys() >= REPORT)
    except RunFolderError:
        taken = True
    # Files that a run writes later, or that a report reads as its scores.
    reserved = path.name in (RECORD, SCORES) or path.match(FURTHER)
    if taken or (reserved and is_run_folder(output.parent)):
        raise ConfigError(
            f"the report's data would replace {path}, which is not a report's: choose another name than {output.name}"
        )


def html(data: ReportData, drawn: Mapping[str, Sequence[Plot]]) -> str:
    """The page."""
    with optional_import("a report"):
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup

    shared, differing = sections.facts(data.runs)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters["dash"] = {"-": "none", "--": "6 3", ":": "1.5 2.5", "-.": "6 2 1.5 2"}.get
    template = environment.from_string(resources.files("distill.report").joinpath(TEMPLATE).read_text(encoding="utf-8"))
    names = [run.name for run in data.runs] or list(data.references) or ["step costs"]
    return template.render(
        title=", ".join(names) if len(names) <= 4 else f"{len(names)} runs",
        data=data,
        notes=notes(data.comparison),
        shared=shared,
        differing=differing,
        side_by_side=sections.side_by_side(data),
        scores=sections.score_table(data),
        figures=sections.figure_tables(data.runs),
        examples=list(sections.examples(data.runs)),
        agreement=sections.agreement_table(data.runs),
        # Name, heading, how to read the plots, conclusions by run.
        analyses=[(name, *ANALYSES.get(name, (name, "")), _conclusions(name, data.runs)) for name in data.analyses],
        cost=sections.cost_table(data),
        bench=bench_tables(data.bench),
        disk=sections.disk(data.runs),
        plots=drawn,
        svg=lambda panel, name: Markup(svg(panel, name)),
        color=lambda key: "currentColor" if key.color is None else f"var(--mark-{key.color})",
    )


def _conclusions(name: str, runs: Sequence[RunRecords]) -> list[tuple[str, str]]:
    return [(run.name, str(run.analyses[name].get("conclusion", ""))) for run in runs if name in run.analyses]
