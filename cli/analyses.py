"""`distill analyze` and `distill report`: questions about trained runs, and all that is known of them."""

from pathlib import Path
from typing import Any

import click

from cli.common import check_output, common_options, emit, progress_bar, say


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option("--analyses", help="Comma list; by default all that the runs and what is given allow.")
@click.option("--data", type=click.Path(path_type=Path), help="Folder of the tasks' files.")
@click.option("--retrieval", type=click.Path(path_type=Path), help="Folder of a collection in BEIR layout.")
@click.option("--teacher", metavar="MODEL", help="The runs' teacher, for texts that their cache lacks.")
@click.option("--cache", type=click.Path(path_type=Path), help="The runs' cache, where it is not where it was.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the runs' models.")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="An option, such as curvature.texts=64.")
@common_options
def analyze(runs: tuple[Path, ...], analyses: str | None, sets: tuple[str, ...], **given: Any) -> None:
    """Look into trained runs; each answer is kept in the run folder, where `distill report` finds it.

    RUN is a run folder, or a folder of run folders. What was made is printed, also if another analysis or run fails.
    """
    from distill.analyses.base import analyze as look_into
    from distill.config.reading import read_overrides
    from distill.report.comparison import run_folders

    names, options = analyses.split(",") if analyses else None, read_overrides(sets, {})
    records: dict[str, dict[str, Any]] = {}

    def lines() -> list[str]:
        return [f"{run}: {name}: {one['conclusion']}" for run, found in records.items() for name, one in found.items()]

    try:
        for run in run_folders(runs):
            made = records.setdefault(str(run), {})
            look_into(run, names, options=options, announce=say, made=made.__setitem__, **given)
    finally:  # what was made is kept, and told, whatever comes of the next
        if any(records.values()):
            emit(records, lines, f"distill report {' '.join(map(str, runs))}")


@click.command()
@click.argument("runs", nargs=-1, metavar="RUN...")
@click.option(
    "--bench", type=click.Path(path_type=Path), metavar="FILE", help="What `distill bench` measured, as JSON."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("report.html"),
    show_default=True,
    help="The page; the data and the plots are written beside it.",
)
@click.option("--data", type=click.Path(path_type=Path), help="Score what was not, on the tasks' files in here.")
@click.option("--tasks", help="Comma list; all nine by default.")
@click.option("--dtype", default="auto", show_default=True, help="Of the scoring: auto, fp32 or bf16.")
@click.option("--baseline", metavar="MODEL|SCORES", help="The student before training, or its scores.")
@click.option("--teacher", metavar="MODEL|SCORES", help="The teacher, or its scores: what the others are shares of.")
@common_options
def report(runs: tuple[str, ...], bench: Path | None, output: Path, tasks: str | None, **asked: Any) -> None:
    """One page about runs: scores, learning curves, analyses, cost. It opens from disk and needs nothing else.

    RUN is a run folder, a folder of run folders, or any other model. SCORES is a file of `distill eval -o`.
    """
    from dataclasses import replace

    from distill.report.bench import read_bench
    from distill.report.data import report_data
    from distill.report.html import check_page, write_report

    check_output(output)
    check_page(output)
    if not runs and bench is None:
        raise click.UsageError("nothing to report: name runs, or measurements with --bench")
    measured = {} if bench is None else read_bench(bench)
    with progress_bar() as progress:
        data = report_data(runs, tasks=tasks.split(",") if tasks else None, progress=progress, **asked)
    data = replace(data, bench=measured)
    page, beside, *pictures = write_report(data, output)
    plots = [f"plots: {len(pictures)} PNG files in {pictures[0].parent}"] if pictures else []
    emit(data.to_json(), lambda: [f"report: {page}", f"data: {beside}", *plots])
