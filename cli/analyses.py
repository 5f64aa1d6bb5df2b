"""`distill analyze` and `distill report`: questions about trained runs, and one page of all results."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from cli.common import common_options, count, emit, print_status, progress_bar
from cli.options import PATH, output_option, run_arguments, scoring_options, set_option, split_commas


@click.command()
@run_arguments
@click.option(
    "--analyses",
    "names",
    callback=split_commas,
    metavar="NAME[,NAME...]",
    help="Names from `distill list analyses`.  [default: all that have what they need]",
)
@click.option("--data", type=PATH, help="Folder of the task files.")
@click.option("--retrieval", type=PATH, help="Folder of a retrieval collection in BEIR's layout.")
@click.option("--teacher", metavar="MODEL", help="The teacher of the runs, for texts that their cache lacks.")
@click.option("--cache", type=PATH, help="The cache of the runs, if it was moved.  [default: the one each run names]")
@click.option("--trust-remote-code", is_flag=True, help="Run Python code from the folders of the runs' models.")
@set_option("An option of an analysis, such as curvature.texts=64.")
@common_options
def analyze(runs: tuple[Path, ...], names: tuple[str, ...] | None, sets: tuple[str, ...], **options: Any) -> None:
    """Analyze trained runs.

    RUN is a run folder, or a folder of run folders. Each result is stored in the run folder, where `distill report`
    finds it. Finished results are printed also if another analysis fails.

    \b
    Example:
      distill analyze runs/ --analyses curvature --data task-files
    """
    records: dict[str, dict[str, Any]] = {}

    def lines() -> list[str]:
        return [f"{run}: {name}: {one['conclusion']}" for run, found in records.items() for name, one in found.items()]

    try:
        with progress_bar() as update:
            update("loading", 0, 0, "")
            from distill.analyses.base import analyze as analyze_run
            from distill.config.reading import read_overrides
            from distill.report.comparison import run_folders

            overrides = read_overrides(sets, {})
            for run in run_folders(runs):
                saved = records.setdefault(str(run), {}).__setitem__
                analyze_run(
                    run, names, options=overrides, announce=print_status, progress=update, saved=saved, **options
                )
    finally:
        if any(records.values()):
            emit(records, lines, f"distill report {' '.join(map(str, runs))}")


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--bench", type=PATH, metavar="FILE", help="Measurements of `distill bench -o FILE.json`.")
@output_option("The page; data and plots are written next to it.", default=Path("report.html"))
@scoring_options
@click.option("--baseline", metavar="MODEL|SCORES", help="The student before training, or its scores.")
@click.option("--teacher", metavar="MODEL|SCORES", help="The teacher, or its scores.")
@common_options
def report(runs: tuple[str, ...], bench: Path | None, output: Path, **options: Any) -> None:
    """Write one HTML page about runs: scores, curves, analyses, cost.

    RUN is a run folder, a folder of run folders, or any other model. SCORES is a file of `distill eval -o`. The page
    opens from disk and needs no network.

    \b
    Example:
      distill report runs/ --data task-files --output report.html
    """
    from distill.report.bench import read_bench
    from distill.report.data import report_data
    from distill.report.html import check_page, write_report

    check_page(output)
    if not runs and bench is None:
        raise click.UsageError("nothing to report: name runs, or measurements with --bench")
    measured = {} if bench is None else read_bench(bench)
    with progress_bar() as update:
        update("reading runs", 0, 0, "")
        data = replace(report_data(runs, progress=update, **options), bench=measured)
        update("drawing plots", 0, 0, "")
        page, beside, *pictures = write_report(data, output)
    plots = [f"plots: {count(len(pictures), 'PNG file')} in {pictures[0].parent}"] if pictures else []
    emit(data.to_json(), lambda: [f"report: {page}", f"data: {beside}", *plots])
