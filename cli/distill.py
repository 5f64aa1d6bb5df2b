"""`distill`: train, evaluate and try out students."""

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.analyses import analyze, report
from cli.bench import bench
from cli.common import CONTEXT, Commands, cache_option, check_output, common_options, emit, meta, progress_bar, say
from cli.evaluation import evaluate
from cli.planning import plan

if TYPE_CHECKING:
    from distill.report.comparison import Comparison
    from distill.training.callbacks import TrainingProgress


@click.group(cls=Commands, context_settings=CONTEXT)
@click.version_option(package_name="teacher-cache")
def main() -> None:
    """Train small embedding models from a teacher cache."""


main.add_command(analyze)
main.add_command(report)
main.add_command(evaluate)
main.add_command(plan)
main.add_command(bench)


class RunCommand(click.Command):
    """`run` with one option for each setting of `training`, read from the configuration itself."""

    @cached_property
    def training_options(self) -> list[click.Parameter]:
        from dataclasses import fields

        from distill.config import TrainingConfig

        return [
            click.Option(
                [f"--{field.name.replace('_', '-')}", field.name],
                metavar=str(getattr(field.type, "__name__", field.type)).upper(),
                help=f"[default: {field.default}]",
            )
            for field in fields(TrainingConfig)
            if field.name != "arguments"
        ]

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), *self.training_options]


@main.command(cls=RunCommand)
@click.argument("config", required=False, metavar="[RUN.yaml]", type=click.Path(path_type=Path))
@cache_option
@click.option("--student", "--model-name-or-path", "--model-name", "student", help="Local folder or hub id.")
@click.option("--objective", help="A name of `distill list objectives`.")
@click.option("--sharpness", help="A name of `distill list sharpness`.")
@click.option("--output-dir", help="The run folder.")
@click.option("--space", help="Embedding space of the cache; needed when it has several.")
@click.option("--corpus", help="Corpus of the cache; needed when it has several.")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Any setting, such as data.window=4096.")
@click.option("--resume", is_flag=True, help="Refuse to begin anew when there is nothing to go on from.")
@click.option("--print-config", is_flag=True, help="Print the resolved configuration and stop.")
@common_options
@click.pass_context
def run(
    ctx: click.Context,
    /,
    config: Path | None,
    cache: Path,
    sets: tuple[str, ...],
    resume: bool,
    print_config: bool,
    **flags: str | None,
) -> None:
    """Train one student. Run the same command again to go on after anything.

    Settings of `training` are flags under their names in transformers' TrainingArguments; all others are set
    with --set.
    """
    from dataclasses import replace

    from distill.config import RunConfig

    keys = {"student": "student.model", "objective": "objective.name", "sharpness": "sharpness.name"}
    top = {"output_dir", "space", "corpus"}
    given = [
        f"{keys.get(flag, flag if flag in top else f'training.{flag}')}={value}"
        for flag, value in flags.items()
        if value is not None
    ]
    if ctx.get_parameter_source("cache") != click.core.ParameterSource.DEFAULT:
        given.append(f"cache={cache}")
    resolved = RunConfig.load(config, [*given, *sets])  # what is said in more words wins
    resolved = replace(resolved, cache=resolved.cache or str(cache))
    if print_config:
        click.echo(resolved.to_yaml(), nl=False)
        return

    from distill.runs.run import run as train

    with progress_bar() as update:
        result = train(
            resolved,
            resume=resume,
            announce=say,
            report=lambda p: update("training steps", p.step, p.steps, training_line(p)),
        )

    def lines() -> list[str]:
        told = []
        if result.finished_before:
            told.append(f"{result.output_dir} already holds this run, finished; nothing to do")
        if result.resumed_from:
            told.append(f"went on from step {result.resumed_from:,}")
        loss = "" if result.loss is None else f", last loss {result.loss:.4f}"
        share = result.data_wait_share
        waited = "" if share is None else f", {share:.1%} of the steps' time waited for data"
        told.append(f"{result.steps:,} steps in {result.seconds:.0f} s{loss}{waited}")
        told += agreement_lines(result.agreement)
        told.append(f"student: {result.final}")
        return told

    emit(result.to_json(), lines, f"distill eval {result.final} --data DIR")


def agreement_lines(agreement: dict[str, Any] | None) -> list[str]:
    if agreement is None:
        return []
    before, after, projected = agreement["before"], agreement["after"], agreement["projected"]
    told = [
        f"agreement with the teacher on {after['texts']} held-out texts, before -> after: Spearman of pairwise "
        f"cosines {before['spearman']:.3f} -> {after['spearman']:.3f}, overlap of the {after['neighbours']} nearest "
        f"neighbours {before['overlap']:.3f} -> {after['overlap']:.3f}"
    ]
    if projected is not None:
        told.append(f"  projected into its space: {projected['spearman']:.3f} and {projected['overlap']:.3f}")
    return told


def training_line(progress: "TrainingProgress") -> str:
    loss = "-" if progress.loss is None else f"{progress.loss:.4f}"
    return f"epoch {progress.epoch:.2f}, loss {loss}"


@main.command()
@click.argument("config", metavar="SWEEP.yaml", type=click.Path(path_type=Path))
@click.option("--dry-run", is_flag=True, help="Check and name the runs, start none.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the table here, in Markdown.")
@common_options
@click.pass_context
def sweep(ctx: click.Context, /, config: Path, dry_run: bool, output: Path | None) -> None:
    """Train many students on one cache, a list or a grid of runs, and compare them.

    Run the same command again to go on after anything: what is finished stays as it is.
    """
    from distill.runs.sweep import SweepConfig
    from distill.runs.sweep import sweep as run_all

    check_output(output)
    settings = SweepConfig.load(config)
    if dry_run:
        names = [planned.name for planned in settings.plan()]
        emit(names, lambda: [*names, f"{len(names)} runs in {settings.output_dir}"])
        return
    with progress_bar() as update:
        result = run_all(
            settings,
            announce=say,
            report=lambda p: update("runs", p.done, p.total, ", ".join(p.running) or "none running"),
        )
    show_comparison(result.comparison, result.to_json(), output)
    ctx.exit(1 if result.failed else 0)


@main.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option("--data", type=click.Path(path_type=Path), help="Score what was not, on the tasks' files in here.")
@click.option("--tasks", help="Comma list; all nine by default.")
@click.option("--dtype", default="auto", show_default=True, help="Of the scoring: auto, fp32 or bf16.")
@click.option("--baseline", metavar="MODEL", help="Also score the student before training.")
@click.option("--teacher", metavar="MODEL", help="Also score the teacher.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the table here, in Markdown.")
@common_options
def compare(runs: tuple[Path, ...], tasks: str | None, output: Path | None, **asked: Any) -> None:
    """One table of runs: their scores, agreement, cost and size, and the settings in which they differ.

    RUN is a run folder, or a folder of run folders. Runs that differ in their seed alone share a line.
    """
    from distill.report.comparison import compare_runs

    check_output(output)
    with progress_bar() as progress:
        comparison = compare_runs(runs, tasks=tasks.split(",") if tasks else None, progress=progress, **asked)
    show_comparison(comparison, comparison.to_json(), output)


def show_comparison(comparison: "Comparison", record: dict[str, Any], output: Path | None) -> None:
    """The table on the console, or its figures as JSON, and in a file."""
    from distill.report.columns import comparison_columns, markdown, notes, print_comparison

    columns, below = comparison_columns(comparison), notes(comparison)
    if not meta("json"):
        print_comparison(columns)
    emit(record, lambda: below)
    if output is not None:
        output.write_text(markdown(columns, below), encoding="utf-8")


@main.command()
@click.option(
    "--output-dir",
    type=click.Path(path_type=Path),
    default=Path("distill-demo"),
    show_default=True,
    help="Where the cache and the run are left.",
)
@common_options
def demo(output_dir: Path) -> None:
    """The whole path on one small corpus, offline: a teacher, its cache, a better student. Under 3 minutes."""
    from distill.runs.demo import run_demo

    with progress_bar() as update:
        result = run_demo(
            output_dir,
            announce=say,
            report=lambda p: update("training steps", p.step, p.steps, training_line(p)),
        )

    emit(
        result.to_json(),
        lambda: [
            f"cache: {result.cache} ({result.build['distinct']:,} texts, {result.build['encoded']:,} encoded by the "
            "teacher just now)",
            f"run: {result.run['output_dir']} ({result.run['steps']} steps)",
            *agreement_lines(result.run["agreement"]),
            f"student: {result.run['final']}",
        ],
        f"tcache info {result.cache}; then your own: tcache build CORPUS.jsonl --teacher T --cache C",
    )


@main.command(name="list")
@click.argument(
    "kind", type=click.Choice(["objectives", "sharpness", "teachers", "families", "tasks", "analyses", "exports"])
)
@common_options
def list_names(kind: str) -> None:
    """The names that flags and settings take."""
    from distill.runs.listing import names

    found = names(kind)
    emit(found, lambda: found)
