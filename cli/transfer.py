"""`tcache` between caches and the files of others: export, import, merge."""

from pathlib import Path

import click

from cli.common import cache_option, common_options, emit, progress_bar
from cli.options import STORAGE, EncodingChoice, cache_argument, corpus_of, space_option, trains_on


@click.command()
@cache_argument
@click.option("--format", "form", type=click.Choice(["npy", "parquet", "hf-dataset"]), required=True)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="New file (parquet) or folder; appears whole.",
)
@space_option
@click.option("--corpus", help="Its records, in order; without it every distinct text that has a vector.")
@common_options
def export(cache: Path, form: str, output: Path, space: str | None, corpus: str | None) -> None:
    """Write the texts and vectors of one space for other tools."""
    from teacher_cache.transfer.exporter import export as write

    with progress_bar() as update:
        result = write(
            cache,
            output,
            form,
            space=space,
            corpus=corpus,
            report=lambda p: update("exporting", p.done, p.total, p.space),
        )

    def lines() -> list[str]:
        what = f"corpus {result.corpus}" if result.corpus else "every distinct text"
        left_out = f"{result.quarantined:,} quarantined" + (
            f", {result.missing:,} without one" if result.missing else ""
        )
        return [
            f"{result.rows:,} vectors of {result.dims} {result.dtype} numbers in {result.seconds:.1f} s: {what}, space "
            f"{result.space}",
            f"{result.output}; left out: {left_out}",
            *([f"vectors alone are exported, not {result.token_columns}"] if result.token_columns else []),
        ]

    emit(result.to_json(), lines)


@click.command(name="import")
@click.argument("source", type=click.Path(path_type=Path))
@cache_option
@click.option("--corpus", "paths", multiple=True, metavar="FILE", help="Texts of a .npy file; may be repeated.")
@click.option("--text-key", default="text", show_default=True, help="Key or column of the text.")
@click.option("--vector-key", default="label", show_default=True, help="Column of the vectors.")
@click.option("--teacher", metavar="NAME", help="What the vectors are, where SOURCE does not say it itself.")
@click.option("--field", "fields", multiple=True, metavar="KEY=VALUE", help="More about --teacher; may be repeated.")
@click.option("--storage", type=EncodingChoice(STORAGE), help="Number format of a new space.")
@click.option("--name", help="Name of the corpus in the cache.")
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
    """Bring in vectors that were computed elsewhere, or exported. Run it again to go on after anything."""
    from teacher_cache.transfer.importer import import_vectors

    stated = dict(field.partition("=")[::2] for field in fields)
    if len(stated) < len(fields) or any("=" not in field for field in fields):
        raise click.UsageError("--field takes KEY=VALUE, each KEY once")
    if "-" in paths:
        raise click.UsageError("--corpus is read twice: save standard input to a file and name that")
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
            f"{result.rows:,} vectors, {result.distinct:,} distinct texts: {result.stored:,} stored, "
            f"{result.held:,} there before, {result.quarantined:,} quarantined, in {result.seconds:.1f} s",
            *(f"  quarantined {count:,}: {reason}" for reason, count in result.reasons.items()),
            f"space {result.space}, corpus {result.corpus}, in {result.cache}",
        ]

    emit(
        result.to_json(),
        lines,
        trains_on(cache, result.space, result.corpus),
    )


@click.command()
@click.argument("sources", metavar="SOURCE...", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--into", type=click.Path(path_type=Path), required=True, help="The cache; made if need be.")
@common_options
def merge(sources: tuple[Path, ...], into: Path) -> None:
    """Join caches without a teacher. Run it again to go on after anything."""
    from teacher_cache.transfer.merge import merge as join

    with progress_bar() as update:
        result = join(sources, into, report=lambda p: update(p.phase, p.done, p.total, p.space))

    def lines() -> list[str]:
        return [
            f"{result.rows:,} distinct texts, {result.texts:,} of them new; {result.vectors:,} vectors stored, "
            f"{result.held:,} there before, {result.quarantined:,} quarantined, in {result.seconds:.1f} s",
            *([f"token columns of {result.token_texts:,} texts stored"] if result.token_texts else []),
            *(f"left out: {left_out}" for left_out in result.left_out),
            f"spaces {', '.join(result.spaces) or 'none'}; new corpora {', '.join(result.corpora) or 'none'}; in "
            f"{result.cache}",
        ]

    emit(result.to_json(), lines, f"tcache verify {into} --deep")
