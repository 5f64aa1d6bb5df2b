"""`distill bench`: measure the cost of every method."""

import json
from pathlib import Path
from typing import Any

import click

from cli.common import common_options, emit, is_set, progress_bar
from cli.options import PATH, corpus_option, default_cache_if_any, output_option, set_option, space_option, split_commas


def read_size(ctx: click.Context, option: click.Parameter, value: str | None) -> int | None:
    """Bytes from text such as 15GB or 15GiB."""
    if value is None:
        return None
    from distill.errors import ConfigError
    from distill.plan.devices import parse_bytes

    try:
        return parse_bytes(value)
    except ConfigError:
        raise click.BadParameter(f"{value!r} is not a size such as 15GB or 15GiB") from None


def read_lengths(ctx: click.Context, option: click.Parameter, value: str | None) -> tuple[int | str, ...] | None:
    """Numbers of tokens, and "corpus", from a comma list."""
    parts = split_commas(ctx, option, value)
    if parts is None:
        return None
    if not all(part == "corpus" or part.isdecimal() for part in parts):
        raise click.BadParameter(f"{value!r} is not a list of token counts such as 32,64, or 'corpus'")
    return tuple(part if part == "corpus" else int(part) for part in parts)


@click.command()
@click.option(
    "--cache",
    type=PATH,
    help="Teacher cache to train from.  [default: without --random-weights, $TCACHE_HOME or ~/.cache/tcache]",
)
@space_option
@corpus_option
@click.option("--student", default="shape:bert-base", help="Local folder, or shape:NAME with random weights.")
@click.option("--teacher", metavar="MODEL", help="The cache's teacher, for methods that run it at every step.")
@click.option("--teacher-device", help="Device of the teacher.  [default: that of the student]")
@click.option(
    "--random-weights",
    metavar="NAME",
    help="In place of a cache, a teacher with random weights and vectors of this size: shape:NAME, a model such as "
    "Qwen3-Embedding-4B, or a model folder.",
)
@click.option(
    "--methods",
    callback=split_commas,
    metavar="METHOD[,METHOD...]",
    help="Each OBJECTIVE[/PRESET][+SHARPNESS][@online].  [default: every method, token-level methods with the teacher "
    "cached and online]",
)
@click.option(
    "--lengths",
    callback=read_lengths,
    metavar="N[,N...]|corpus",
    help="Tokens of every text, with special tokens, or those of the corpus.  [default: corpus with a cache, else 64]",
)
@click.option("--batch-size", type=int, default=32, help="Texts in a batch.")
@click.option(
    "--precision", type=click.Choice(["auto", "fp16", "bf16", "fp32"]), default="auto", help="Precision of training."
)
@click.option(
    "--memory",
    type=click.Choice(["default", "low"]),
    default="default",
    help="low recomputes states in the backward pass.",
)
@click.option("--memory-cap", callback=read_size, metavar="SIZE", help="Limit of the GPU's memory, such as 15GB.")
@click.option("--steps", type=int, default=5, help="Timed steps of a method in a round, rounded up to whole cycles.")
@click.option("--warm-up", type=int, default=3, help="Steps before the timed ones.")
@click.option("--rounds", type=int, default=3, help="Rounds over all methods.")
@click.option("--minutes", type=float, help="Start no further turns after this time, once the first round is complete.")
@click.option("--no-memory", is_flag=True, help="Do not measure memory on a CPU.")
@set_option("Any setting of a run, for all methods.")
@output_option(
    "Also write the table to this file, in Markdown, or the figures if it ends in .json. Repeatable.", multiple=True
)
@common_options
def bench(
    cache: Path | None,
    teacher: str | None,
    random_weights: str | None,
    methods: tuple[str, ...] | None,
    lengths: tuple[int | str, ...] | None,
    no_memory: bool,
    output: tuple[Path, ...],
    **given: Any,
) -> None:
    """Measure time and memory of every method's training step.

    The steps are those of `distill run`. Methods take turns in rounds, and only one is in memory at a time.

    \b
    Example:
      distill bench --random-weights bge-m3 --methods talas,leaf --output bench.json
    """
    with progress_bar() as update:
        update("loading", 0, 0, "")
        from distill.bench.measure import bench as measure
        from distill.bench.settings import DEFAULT_METHODS, BenchSettings
        from distill.report.bench import as_markdown

        folder = str(cache) if cache is not None else "" if random_weights else default_cache_if_any() or ""
        settings = BenchSettings(
            cache=folder,
            teacher=teacher or "",
            random_weights=random_weights or "",
            methods=DEFAULT_METHODS if methods is None else methods,
            lengths=lengths or (("corpus",) if folder else (64,)),
            own_process=not no_memory,
            **given,
        )
        result = measure(settings, report=lambda p: update("measurements", p.done, p.total, f"{p.method}, {p.lengths}"))
    record = result.to_json()
    for path in output:
        text = json.dumps(record, indent=2, ensure_ascii=False) if path.suffix == ".json" else as_markdown(record)
        path.write_text(text, encoding="utf-8")
    if not is_set("json"):
        show_bench(record)
    kept = next((path for path in output if path.suffix == ".json"), None)
    emit(record, list, "" if kept is None else f"distill report RUN... --bench {kept}")


def show_bench(record: dict[str, Any]) -> None:
    """Print the tables, each with its notes."""
    from distill.report.bench import columns, heading, notes, part_columns
    from distill.report.columns import print_comparison

    for table in record["tables"]:
        click.echo(heading(table))
        print_comparison(columns(table))
        print_comparison(part_columns(table))
        for note in notes(table, record):
            click.echo(note)
