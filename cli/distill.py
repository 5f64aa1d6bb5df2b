"""`distill`: train, evaluate and compare students."""

import inspect
import re
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.analyses import analyze, report
from cli.bench import bench
from cli.common import (
    CONTEXT,
    Commands,
    Update,
    common_options,
    count,
    duration,
    emit,
    is_set,
    print_status,
    progress_bar,
)
from cli.cut import cut
from cli.evaluation import evaluate
from cli.options import (
    PATH,
    cache_flag,
    corpus_option,
    is_given,
    recipe_option,
    run_arguments,
    scoring_options,
    set_option,
    space_option,
    table_output,
)
from cli.planning import plan
from cli.static import static

if TYPE_CHECKING:
    from distill.report.comparison import Comparison
    from distill.runs.halving import SearchResult
    from distill.runs.sweep import SweepConfig, SweepProgress
    from distill.training.callbacks import TrainingProgress

# A cache that a file of settings may name too.
configured_cache = cache_flag("--cache", help="Folder of the teacher cache, in place of the one in the file.")


@click.group(name="distill", cls=Commands, context_settings=CONTEXT)
@click.version_option(package_name="teacher-cache")
def main() -> None:
    """Train small embedding models from a teacher cache."""


main.add_command(analyze)
main.add_command(report)
main.add_command(cut)
main.add_command(evaluate)
main.add_command(plan)
main.add_command(bench)
main.add_command(static)


class RunCommand(click.Command):
    """`run` with one option for each setting of `training`, read from its dataclass."""

    @cached_property
    def training_options(self) -> list[click.Parameter]:
        from distill.config import TrainingConfig

        described = attribute_descriptions(TrainingConfig.__doc__ or "")
        return [
            click.Option(
                [f"--{field.name.replace('_', '-')}", field.name],
                metavar=str(getattr(field.type, "__name__", field.type)).upper(),
                help=f"{described.get(field.name, 'A setting of training.')}  [default: {field.default}]",
            )
            for field in fields(TrainingConfig)
            if field.name != "arguments"
        ]

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        parameters = super().get_params(ctx)
        common = [parameter.name for parameter in parameters].index("json")
        return [*parameters[:common], *self.training_options, *parameters[common:]]


def attribute_descriptions(docstring: str) -> dict[str, str]:
    """Name -> description, on one line, from the "Attributes:" section of a docstring."""
    section = inspect.cleandoc(docstring).partition("Attributes:\n")[2]
    found = re.findall(r"^ {4}(\w[\w, ]*): (.*(?:\n {5,}.*)*)", section, re.MULTILINE)
    described = {name: " ".join(text.split()) for names, text in found for name in names.split(", ")}
    return {name: text[:1].upper() + text[1:] for name, text in described.items()}


@main.command(cls=RunCommand)
@click.argument("config", required=False, metavar="[RUN.yaml]", type=PATH)
@configured_cache
@click.option("--student", "--model-name-or-path", "--model-name", "student", help="Local folder or hub id.")
@recipe_option
@click.option("--objective", help="Name from `distill list objectives`.  [default: cosine]")
@click.option("--sharpness", help="Name from `distill list sharpness`.  [default: none]")
@click.option("--output-dir", help="The run folder.")
@space_option
@corpus_option
@set_option("Any setting, such as data.window=4096.")
@click.option("--resume", is_flag=True, help="Fail if there is no checkpoint to resume from.")
@click.option("--print-config", is_flag=True, help="Print the resolved configuration and exit.")
@common_options
def run(
    config: Path | None,
    cache: Path,
    sets: tuple[str, ...],
    resume: bool,
    print_config: bool,
    **flags: str | None,
) -> None:
    """Train one student.

    Settings come from the recipe, then from RUN.yaml, then from flags, then from --set. The flags of the training
    settings have the names of transformers' TrainingArguments where those exist. Run the same command again to resume
    after an interruption.

    \b
    Example:
      distill run --cache my-cache --student MODEL --output-dir my-run --learning-rate 3e-5
    """
    from distill.config import RunConfig

    keys = {"student": "student.model", "objective": "objective.name", "sharpness": "sharpness.name"}
    top = {"output_dir", "space", "corpus", "recipe"}
    given = [
        f"{keys.get(flag, flag if flag in top else f'training.{flag}')}={value}"
        for flag, value in flags.items()
        if value is not None
    ]
    if is_given("cache"):
        given.append(f"cache={cache}")
    resolved = RunConfig.load(config, [*given, *sets])
    resolved = replace(resolved, cache=resolved.cache or str(cache))
    if print_config:
        click.echo(resolved.to_yaml(), nl=False)
        return

    with progress_bar() as update:
        update("loading the student", 0, 0, "")
        from distill.runs.run import run as train

        result = train(resolved, resume=resume, announce=print_status, report=lambda p: show_step(update, p))

    def lines() -> list[str]:
        printed = []
        if result.finished_before:
            printed.append(f"{result.output_dir} already holds this run, finished; nothing to do")
        if result.resumed_from:
            printed.append(f"resumed from step {result.resumed_from:,}")
        loss = "" if result.loss is None else f", last loss {result.loss:.4f}"
        share = result.data_wait_share
        waited = "" if share is None else f", {share:.1%} of the step time spent waiting for data"
        printed.append(f"{count(result.steps, 'step')} in {duration(result.seconds)}{loss}{waited}")
        return [*printed, *agreement_lines(result.agreement), f"student: {result.final}"]

    emit(result.to_json(), lines, f"distill eval {result.final} --data DIR")


def show_step(update: Update, progress: "TrainingProgress") -> None:
    """Show a training step, and after the last one the phase that follows."""
    loss = "-" if progress.loss is None else f"{progress.loss:.4f}"
    update("training steps", progress.step, progress.steps, f"epoch {progress.epoch:.2f}, loss {loss}")
    if progress.step == progress.steps:
        update("evaluating and exporting the student", 0, 0, "")


def agreement_lines(agreement: dict[str, Any] | None) -> list[str]:
    """The agreement with the teacher before and after training."""
    if agreement is None:
        return []
    before, after, projected = agreement["before"], agreement["after"], agreement["projected"]
    lines = [
        f"agreement with the teacher on {after['texts']} held-out texts, before -> after: Spearman of pairwise "
        f"cosines {before['spearman']:.3f} -> {after['spearman']:.3f}, overlap of the {after['neighbours']} nearest "
        f"neighbors {before['overlap']:.3f} -> {after['overlap']:.3f}"
    ]
    if projected is not None:
        lines.append(f"  projected into its space: {projected['spearman']:.3f} and {projected['overlap']:.3f}")
    return lines


@main.command()
@click.argument("config", metavar="SWEEP.yaml", type=PATH)
@configured_cache
@click.option("--dry-run", is_flag=True, help="Check the runs and print their names, but start none.")
@table_output
@common_options
def sweep(config: Path, cache: Path, dry_run: bool, output: Path | None) -> None:
    """Train a list or a grid of students and compare them.

    With `search` in the file, successive halving chooses the best of them on validation files.

    Run the same command again to resume: finished runs are skipped, failed runs are tried again. The exit code is 1
    when a run failed.

    \b
    Example:
      distill sweep sweep.yaml --output table.md
    """
    from distill.runs.halving import plan_search, search
    from distill.runs.sweep import SweepConfig
    from distill.runs.sweep import sweep as run_all

    settings = SweepConfig.load(config)
    if is_given("cache") or not settings.base.get("cache"):
        settings = replace(settings, base={**settings.base, "cache": str(cache)})
    if dry_run:
        plan = settings.plan() if settings.search is None else plan_search(settings)
        names = [planned.name for planned in plan]
        emit(names, lambda: [*names, *planned_lines(settings, len(names))])
        return
    with progress_bar() as update:
        update("checking the runs", 0, 0, "")

        def report(progress: "SweepProgress") -> None:
            update("runs", progress.done, progress.total, ", ".join(progress.running) or "none running")

        found = None if settings.search is None else search(settings, announce=print_status, report=report)
        result = found or run_all(settings, announce=print_status, report=report)
    show_comparison(result.comparison, result.to_json(), output, found)
    click.get_current_context().exit(1 if result.failed else 0)


@main.command()
@run_arguments
@scoring_options
@click.option("--baseline", metavar="MODEL", help="Also score this model, the student before training.")
@click.option("--teacher", metavar="MODEL", help="Also score the teacher.")
@table_output
@common_options
def compare(runs: tuple[Path, ...], output: Path | None, **options: Any) -> None:
    """Print runs in one table: scores, agreement, cost, size, settings.

    RUN is a run folder, or a folder of run folders. Runs that differ only in their seed share a line. A setting has a
    column if it differs between lines.

    \b
    Example:
      distill compare runs/ --data task-files
    """
    from distill.report.comparison import compare_runs

    with progress_bar() as update:
        update("reading runs", 0, 0, "")
        comparison = compare_runs(runs, progress=update, **options)
    show_comparison(comparison, comparison.to_json(), output)


def show_comparison(
    comparison: "Comparison", record: dict[str, Any], output: Path | None, search: "SearchResult | None" = None
) -> None:
    """Print the table, after that of a search, or their figures as JSON, and write them to a file."""
    from distill.report.columns import comparison_columns, markdown, notes, print_comparison
    from distill.report.search import search_columns, search_notes

    tables = [(comparison_columns(comparison), notes(comparison))]
    if search is not None:
        columns = search_columns(search.record, search.candidates, comparison)
        tables.insert(0, (columns, search_notes(search.record)))
    if not is_set("json"):
        for columns, _ in tables:
            print_comparison(columns)
    emit(record, lambda: [line for _, below in tables for line in below])
    if output is not None:
        output.write_text("\n".join(markdown(columns, below) for columns, below in tables), encoding="utf-8")


def planned_lines(config: "SweepConfig", runs: int) -> list[str]:
    """What a sweep trains."""
    if config.search is None:
        return [f"{count(runs, 'run')} in {config.output_dir}"]
    lines = []
    for share in config.search.stages:
        kept = config.search.kept(runs)
        lines.append(f"{share:.0%} of the steps: {count(runs, 'candidate')}; {kept} to keep")
        runs = kept
    seeds = max(1, len(config.search.seeds))
    return [*lines, f"then {count(runs, 'finalist')} with {count(seeds, 'seed')}, in {config.output_dir}"]


@main.command()
@click.option("--output-dir", type=PATH, default=Path("distill-demo"), help="Folder for the cache and the run.")
@common_options
def demo(output_dir: Path) -> None:
    """Build a cache and train a student, offline, in about a minute.

    The corpus is part of the package and the teacher comes with the `demo` extra.

    \b
    Example:
      distill demo --output-dir distill-demo
    """
    with progress_bar() as update:
        update("encoding texts", 0, 0, "")
        from distill.runs.demo import run_demo

        result = run_demo(output_dir, announce=print_status, report=lambda p: show_step(update, p))

    emit(
        result.to_json(),
        lambda: [
            f"corpus: {result.corpus}",
            f"teacher: {result.teacher}",
            f"cache: {result.cache} ({count(result.build['distinct'], 'text')}, {result.build['encoded']:,} encoded "
            "now)",
            f"student before training: {result.student}",
            f"run: {result.run['output_dir']} ({count(result.run['steps'], 'step')})",
            *agreement_lines(result.run["agreement"]),
            f"trained student: {result.run['final']}",
        ],
        f"tcache info {result.cache}; then your own corpus: tcache build CORPUS.jsonl --teacher T --cache C",
    )


@main.command(name="list")
@click.argument(
    "kind",
    type=click.Choice(
        [
            "objectives",
            "presets",
            "sharpness",
            "teachers",
            "families",
            "tasks",
            "analyses",
            "exports",
            "shapes",
            "encodings",
            "recipes",
        ]
    ),
)
@common_options
def list_names(kind: str) -> None:
    """List the names that flags and settings take.

    \b
    Example:
      distill list objectives
    """
    from distill.runs.listing import describe

    found = dict(sorted(describe(kind).items()))
    width = max(map(len, found))
    emit(list(found), lambda: [f"{name:<{width}}  {description}" for name, description in found.items()])
