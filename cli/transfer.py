"""`tcache` between caches and other files: export, import, merge."""

from pathlib import Path

import click

from cli.common import common_options, count, duration, emit, progress_bar
from cli.options import (
    PATH,
    STORAGE,
    EncodingChoice,
    cache_argument,
    cache_flag,
    cache_option,
    corpus_of,
    next_run,
    space_option,
    text_key,
)


@click.command()
@cache_argument
@click.option(
    "--format", "form", type=click.Choice(["npy", "parquet", "hf-dataset"]), required=True, help="Format of the output."
)
@click.option("-o", "--output", type=PATH, required=True, help="New file (parquet) or new folder.")
@space_option
@click.option("--corpus", help="Export the records of this corpus, in order.  [default: all distinct texts]")
@common_options
def export(cache: Path, form: str, output: Path, space: str | None, corpus: str | None) -> None:
    """Write the texts and vectors of one space for other tools.

    \b
    Example:
      tcache export my-cache --format parquet --output vectors.parquet
    """
    from teacher_cache.transfer.exporter import export as write

    with progress_bar() as update:
        result = write(
            cache,
            output,
            form,
            space=space,
            corpus=corpus,
            report=lambda p: update("exporting vectors", p.done, p.total, p.space),
        )

    def lines() -> list[str]:
        what = f"corpus {result.corpus}" if result.corpus else "every distinct text"
        missing = f", {result.missing:,} without a vector" if result.missing else ""
        return [
            f"{count(result.rows, 'vector')} of {result.dims} {result.dtype} numbers in {duration(result.seconds)}: "
            f"{what}, space {result.space}",
            f"{result.output}; skipped: {result.quarantined:,} quarantined{missing}",
            *([f"only vectors are exported, not {result.token_columns}"] if result.token_columns else []),
        ]

    emit(result.to_json(), lines)


@click.command(name="import")
@click.argument("source", type=PATH)
@cache_option
@click.option("--corpus", "paths", multiple=True, metavar="FILE", help="Texts of a .npy file. Repeatable.")
@text_key
@click.option("--vector-key", default="label", help="Column of the vectors.")
@click.option("--teacher", metavar="NAME", help="Model of the vectors, if SOURCE does not name it.")
@click.option(
    "--field", "fields", multiple=True, metavar="KEY=VALUE", help="A field of the space, with --teacher. Repeatable."
)
@click.option(
    "--storage",
    type=EncodingChoice(STORAGE),
    help="Encoding of a new space.  [default: that of SOURCE, or float16]",
)
@click.option("--name", help="Name of the corpus in the cache.  [default: that of SOURCE]")
@common_options
def import_(
    source: Path,
    cache: Path,
    paths: tuple[str, ...],
    text_key: str,
    vector_key: str,
    teacher: str | None,
    fields: tuple[str, ...],
    storage: str | None,
    name: str | None,
) -> None:
    """Store vectors that were exported or computed elsewhere.

    SOURCE is what `tcache export` wrote, a .parquet file or a saved dataset with texts and vectors, or a .npy file of
    vectors. Run the same command again to resume after an interruption.

    \b
    Example:
      tcache import vectors.npy --corpus corpus.jsonl --teacher my-model --cache my-cache
    """
    from teacher_cache.transfer.importer import import_vectors

    stated = dict(field.partition("=")[::2] for field in fields)
    if len(stated) < len(fields) or any("=" not in field for field in fields):
        raise click.UsageError("--field takes KEY=VALUE, each KEY once")
    if "-" in paths:
        raise click.UsageError("--corpus is read twice: save standard input to a file and name that file")
    with progress_bar() as update:
        result = import_vectors(
            source,
            cache,
            corpus=corpus_of(paths, text_key) if paths else None,
            text_key=text_key,
            vector_key=vector_key,
            teacher=teacher,
            fields=stated,
            storage=storage,
            name=name,
            report=lambda p: update(p.phase, p.done, p.total, p.space),
        )

    def lines() -> list[str]:
        return [
            f"{count(result.rows, 'vector')}, {count(result.distinct, 'distinct text')}: {result.stored:,} stored, "
            f"{result.held:,} present before, {result.quarantined:,} quarantined, in {duration(result.seconds)}",
            *(f"  quarantined {number:,}: {reason}" for reason, number in result.reasons.items()),
            f"space {result.space}, corpus {result.corpus}, in {result.cache}",
        ]

    emit(result.to_json(), lines, next_run(cache, result.space, result.corpus))


@click.command()
@click.argument("sources", metavar="SOURCE...", type=PATH, nargs=-1, required=True)
@cache_flag("--into", "--cache", "into", help="The cache to merge into; created if it does not exist.")
@common_options
def merge(sources: tuple[Path, ...], into: Path) -> None:
    """Merge caches into one, without a teacher.

    Run the same command again to resume after an interruption.

    \b
    Example:
      tcache merge cache-a cache-b --into merged-cache
    """
    from teacher_cache.transfer.merge import merge as merge_caches

    with progress_bar() as update:
        result = merge_caches(sources, into, report=lambda p: update(p.phase, p.done, p.total, p.space))

    def lines() -> list[str]:
        return [
            f"{count(result.rows, 'distinct text')}, {result.texts:,} new; {count(result.vectors, 'vector')} stored, "
            f"{result.held:,} present before, {result.quarantined:,} quarantined, in {duration(result.seconds)}",
            *([f"token columns of {count(result.token_texts, 'text')} stored"] if result.token_texts else []),
            *(f"skipped: {skipped}" for skipped in result.left_out),
            f"spaces {', '.join(result.spaces) or 'none'}; new corpora {', '.join(result.corpora) or 'none'}; in "
            f"{result.cache}",
        ]

    emit(result.to_json(), lines, f"tcache verify {into} --deep")
