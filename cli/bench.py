"""`distill bench`: what every method costs."""

import json
from pathlib import Path
from typing import Any

import click

from cli.common import check_output, common_options, emit, meta, progress_bar


def read_size(ctx: click.Context, option: click.Parameter, value: str | None) -> int | None:
    """Bytes, as 15GB or 15GiB."""
    if value is None:
        return None
    from distill.errors import ConfigError
    from distill.plan.devices import parse_bytes

    try:
        return parse_bytes(value)
    except ConfigError:
        raise click.BadParameter(f"{value!r} is no size such as 15GB or 15GiB") from None


def read_lengths(ctx: click.Context, option: click.Parameter, value: str | None) -> tuple[int | str, ...] | None:
    """Numbers of tokens, and "corpus"."""
    if value is None:
        return None
    parts = [part.strip() for part in value.split(",")]
    if not all(part == "corpus" or part.isdecimal() for part in parts):
        raise click.BadParameter(f"{value!r} is no list of token counts such as 32,64, or 'corpus'")
    return tuple(part if part == "corpus" else int(part) for part in parts)


@click.command()
@click.option("--cache", type=click.Path(path_type=Path), help="Teacher cache to train from.")
@click.option("--space", help="Embedding space of the cache; needed when it has several.")
@click.option("--corpus", help="Corpus of the cache; needed when it has several.")
@click.option("--student", default="shape:bert-base", show_default=True, help="Local folder, or shape:NAME.")
@click.option("--teacher", metavar="MODEL", help="The cache's teacher, for the rows that ask it at every step.")
@click.option("--teacher-device", help="Where it runs; by default where the student does.")
@click.option(
    "--random-weights",
    metavar="NAME",
    help="In place of the cache's teacher, random weights and answers of these sizes: shape:NAME, a model such as "
    "Qwen3-Embedding-4B, or a model folder.",
)
@click.option(
    "--methods",
    help="Comma list of OBJECTIVE[/PRESET][+SHARPNESS][@online]; by default every method, token-level ones with the "
    "teacher cached and online.",
)
@click.option(
    "--lengths",
    callback=read_lengths,
    metavar="N[,N...]|corpus",
    help="Tokens of every text, specials included, or the corpus's own.  [default: corpus with --cache, else 64]",
)
@click.option("--batch-size", type=int, default=32, show_default=True)
@click.option("--precision", type=click.Choice(["auto", "fp16", "bf16", "fp32"]), default="auto", show_default=True)
@click.option("--memory", type=click.Choice(["default", "low"]), default="default", show_default=True)
@click.option(
    "--memory-cap",
    callback=read_size,
    metavar="SIZE",
    help="Of the GPU, such as 15GB: what does not fit is told as a row.",
)
@click.option(
    "--steps",
    type=int,
    default=5,
    show_default=True,
    help="Timed steps of a method in a round, rounded up to whole cycles of its sharpness.",
)
@click.option("--warm-up", type=int, default=3, show_default=True, help="Steps before them that are not timed.")
@click.option("--rounds", type=int, default=3, show_default=True)
@click.option("--minutes", type=float, help="Take no further turns after this long, once the first round is whole.")
@click.option("--no-memory", is_flag=True, help="Leave out the turns that measure memory on a processor.")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Any setting of a run, for all rows.")
@click.option(
    "-o",
    "--output",
    "outputs",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Also write the table here, in Markdown, or with the ending .json the figures. Repeatable.",
)
@common_options
def bench(
    cache: Path | None,
    teacher: str | None,
    random_weights: str | None,
    methods: str | None,
    lengths: tuple[int | str, ...] | None,
    no_memory: bool,
    outputs: tuple[Path, ...],
    **given: Any,
) -> None:
    """Time and memory of every method's training step, measured in turns, beside TALAS's.

    The steps are those of `distill run`. Each method is made anew in every round, so that one is in memory at a time.
    """
    from distill.bench.measure import bench as measure
    from distill.bench.settings import DEFAULT_METHODS, BenchSettings
    from distill.report.bench import as_markdown

    for output in outputs:
        check_output(output)
    settings = BenchSettings(
        cache="" if cache is None else str(cache),
        teacher=teacher or "",
        random_weights=random_weights or "",
        methods=DEFAULT_METHODS if methods is None else tuple(methods.split(",")),
        lengths=lengths or ((64,) if cache is None else ("corpus",)),
        alone=not no_memory,
        **given,
    )
    with progress_bar() as update:
        result = measure(settings, report=lambda p: update("turns", p.done, p.turns, f"{p.method}, {p.lengths}"))
    record = result.to_json()
    for output in outputs:
        text = json.dumps(record, indent=2, ensure_ascii=False) if output.suffix == ".json" else as_markdown(record)
        output.write_text(text, encoding="utf-8")
    if not meta("json"):
        show_bench(record)
    kept = next((output for output in outputs if output.suffix == ".json"), None)
    emit(record, list, "" if kept is None else f"distill report RUN... --bench {kept}")


def show_bench(record: dict[str, Any]) -> None:
    """The tables on the console, each with its notes."""
    from distill.report.bench import columns, heading, notes, part_columns
    from distill.report.columns import print_comparison

    for table in record["tables"]:
        click.echo(heading(table))
        print_comparison(columns(table))
        print_comparison(part_columns(table))
        for note in notes(table, record):
            click.echo(note)
