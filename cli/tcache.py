"""`tcache`: make, look into and check teacher caches."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cli.common import CONTEXT, Commands, asking_options, cache_option, common_options, emit, progress_bar, say, size

if TYPE_CHECKING:
    from teacher_cache.corpus import Corpus
    from teacher_cache.teachers.base import TeacherOptions

Body = TypeVar("Body", bound=Callable[..., Any])
STORAGE = ("float16", "raw", "compact", "float32")


@click.group(cls=Commands, context_settings=CONTEXT)
@click.version_option(package_name="teacher-cache")
def main() -> None:
    """Run a text-embedding teacher once per text and keep what it said."""


def teacher_options(body: Body) -> Body:
    """Every flag that says which teacher and how it is asked; None means as its own files say."""
    switches = (
        click.option(
            "--teacher",
            "--model-name-or-path",
            "--model-name",
            "model",
            required=True,
            metavar="T",
            help="Known short name, hub id, local folder, or 'toy'.",
        ),
        asking_options,
        click.option("--backend", help="Force a back end (see `distill list teachers`)."),
        click.option("--normalize/--no-normalize", default=None, help="Store vectors of unit length or not."),
        click.option("--dims", type=click.IntRange(1), help="Keep the first numbers of a vector only."),
        click.option("--dtype", default="auto", show_default=True, help="auto, bf16, fp16 or fp32."),
        click.option(
            "--batch-tokens",
            "--max-tokens-per-batch",
            default="auto",
            show_default=True,
            help="Padded tokens in one forward pass.",
        ),
    )
    for switch in reversed(switches):
        body = switch(body)
    return body


def corpus_options(body: Body) -> Body:
    body = click.option(
        "--text-key",
        default="text",
        show_default=True,
        help="Key or column of the text; two for pairs: 'a,b'.",
    )(body)
    return click.argument("paths", metavar="CORPUS...", nargs=-1, required=True)(body)


space_option = click.option("--space", help="Slug, fingerprint or teacher; needed when the cache has several spaces.")


def _teacher(given: dict[str, Any]) -> "TeacherOptions":
    from teacher_cache.teachers.base import TeacherOptions

    tokens = given.pop("batch_tokens")
    if tokens != "auto" and not tokens.isdigit():
        raise click.BadParameter(f"{tokens!r} is neither a number nor 'auto'", param_hint="--batch-tokens")
    return TeacherOptions(batch_tokens=None if tokens == "auto" else int(tokens), **given)


def _corpus(paths: tuple[str, ...], text_key: str) -> "Corpus":
    from teacher_cache.corpus import Corpus

    return Corpus.open(paths, text_key)


@main.command()
@corpus_options
@teacher_options
@cache_option
@click.option("--name", help="Name of the corpus in the cache; by default that of the first file.")
@click.option("--storage", type=click.Choice(STORAGE), help="Number format of a new space; float16 by default.")
@click.option("--workers", default="local", show_default=True, help="local, ray or ray:N.")
@common_options
def build(
    paths: tuple[str, ...],
    text_key: str,
    cache: Path,
    name: str | None,
    storage: str | None,
    workers: str,
    **teacher: Any,
) -> None:
    """Fill the missing rows of one embedding space. Run it again to go on after anything."""
    from teacher_cache.build import Progress
    from teacher_cache.build import build as fill
    from teacher_cache.workers import parse_workers

    announced = False
    with progress_bar() as update:

        def report(progress: Progress) -> None:
            nonlocal announced
            if progress.phase == "reading":
                update("reading records", progress.done, 0, "")
                return
            if not announced:
                announced = True
                cached = progress.cached
                distinct = cached + progress.total
                say(progress.space)
                say(
                    f"{distinct:,} distinct texts, {cached:,} cached ({cached / max(distinct, 1):.0%}), "
                    f"{progress.total:,} to encode"
                )
            detail = (
                f"{progress.tokens_per_second:,.0f} tokens/s, {size(progress.bytes)}, "
                f"{progress.quarantined} quarantined"
            )
            update("encoding texts", progress.done, progress.total, detail)

        result = fill(
            _corpus(paths, text_key),
            _teacher(teacher),
            cache,
            name=name,
            workers=parse_workers(workers),
            storage=storage,
            report=report,
        )

    def lines() -> list[str]:
        told = [
            f"{result.rows:,} rows, {result.distinct:,} distinct: {result.cached:,} cached, {result.encoded:,} "
            f"encoded in {result.seconds:.1f} s ({result.truncated:,} truncated, {result.repaired:,} repaired, "
            f"{result.quarantined:,} quarantined)",
        ]
        told += [f"  quarantined {count:,}: {reason}" for reason, count in result.reasons.items()]
        told += [
            f"  {name.replace('_', ' ')}: {count:,}"
            for name, count in result.counts.items()
            if count and name != "records"
        ]
        told.append(f"space {result.space}, corpus {result.corpus}, in {result.cache}")
        return told

    emit(result.to_json(), lines, f"distill run --cache {cache} --student MODEL --output-dir RUN")


@main.command()
@corpus_options
@teacher_options
@cache_option
@click.option("--probe", is_flag=True, help="Load the teacher and time it on a few texts.")
@common_options
def plan(paths: tuple[str, ...], text_key: str, cache: Path, probe: bool, **teacher: Any) -> None:
    """Rows, tokens, gigabytes and hours of a build, without building."""
    from teacher_cache.plan import plan as foretell

    result = foretell(_corpus(paths, text_key), _teacher(teacher), cache, probe=probe)

    def lines() -> list[str]:
        hours = "unknown (--probe times it)" if result.hours is None else f"{result.hours:.2f} h, {result.basis}"
        return [
            result.description,
            f"{result.rows:,} rows, {result.distinct:,} distinct, {result.cached:,} cached, {result.missing:,} to "
            "encode",
            f"about {result.tokens:,} tokens ({result.truncated:.1%} of the texts longer than the maximum)",
            "size: " + ", ".join(f"{size(count)} as {form}" for form, count in result.bytes.items()),
            f"time: {hours}",
        ]

    emit(result.to_json(), lines, "tcache build with the same arguments")


@main.command()
@click.argument("cache", type=click.Path(path_type=Path))
@common_options
def info(cache: Path) -> None:
    """What is in a cache."""
    from teacher_cache.info import describe

    record = describe(cache)

    def lines() -> list[str]:
        told = [f"{cache}: {record['rows']:,} distinct texts"]
        for name, corpus in record["corpora"].items():
            told.append(f"corpus {name}: {corpus['rows']:,} rows, {corpus['distinct']:,} distinct")
        for slug, space in record["spaces"].items():
            told.append(
                f"space {slug}: {space['present']:,} vectors of {space['dim']} as {space['storage']}, "
                f"{size(space['bytes'])}, {space['quarantined']:,} quarantined"
            )
            told.append(f"  {space['description']}")
            told += [
                f"  quarantined row {refused['row']}, {refused['text'][:60]!r}: {refused['reason']}"
                for refused in space["quarantined_rows"][:5]
            ]
        return told

    emit(record, lines)


@main.command()
@click.argument("cache", type=click.Path(path_type=Path))
@click.argument("texts", metavar="TEXT...", nargs=-1, required=True)
@space_option
@common_options
def get(cache: Path, texts: tuple[str, ...], space: str | None) -> None:
    """Look texts up: their rows and what the teacher said."""
    from teacher_cache.info import look_up

    found = look_up(cache, texts, space)

    def lines() -> list[str]:
        told = []
        for entry in found:
            if entry["vector"] is None:
                told.append(f"{entry['text']!r}: {entry['why']}")
                continue
            head = ", ".join(f"{value:.4f}" for value in entry["vector"][:6])
            told.append(
                f"{entry['text']!r}: row {entry['row']}, {len(entry['vector'])} numbers, length "
                f"{entry['norm']:.4f}: {head}, ..."
            )
        return told

    emit(found, lines)
    if any(entry["vector"] is None for entry in found):
        click.get_current_context().exit(1)


@main.command()
@click.argument("cache", type=click.Path(path_type=Path))
@click.option("--deep", is_flag=True, help="Read every value: digests, finiteness, key = hash of text.")
@common_options
def verify(cache: Path, deep: bool) -> None:
    """Check every promise of the index; exit 3 when one is broken."""
    from teacher_cache.verify import verify as check

    verdict = check(cache, deep=deep)

    def lines() -> list[str]:
        told = [f"damage ({damage.kind}, {damage.rows:,} rows): {damage.where}" for damage in verdict.damage]
        depth = "every value read" if deep else "records and sizes; --deep reads every value"
        told.append(f"{'ok' if verdict.ok else 'DAMAGED'}: {verdict.rows:,} rows, {verdict.shards:,} shards ({depth})")
        if verdict.leftovers:
            told.append(f"harmless leftovers of interrupted writes: {', '.join(verdict.leftovers)}")
        return told

    emit(verdict.to_json(), lines)
    if not verdict.ok:
        click.get_current_context().exit(3)


@main.command()
@click.argument("cache", type=click.Path(path_type=Path))
@click.option("--storage", type=click.Choice(STORAGE), required=True, help="The new number format.")
@space_option
@common_options
def convert(cache: Path, storage: str, space: str | None) -> None:
    """Store a space in another number format, without the teacher."""
    from teacher_cache.convert import convert as store_as

    with progress_bar() as update:
        result = store_as(cache, storage, space, lambda done, total: update("converting vectors", done, total, ""))

    def lines() -> list[str]:
        if not result.rows:
            return [f"space {result.space} is stored as {storage} already"]
        return [
            f"{result.rows:,} vectors of {result.space}: {result.storage_before} -> {result.storage}, "
            f"{size(result.bytes_before)} -> {size(result.bytes)}, 1 - cos at most {result.worst_error:.2g}"
        ]

    emit(result.to_json(), lines, f"tcache gc {cache} frees what readers no longer need")


@main.command()
@common_options
def doctor() -> None:
    """Check this machine: libraries, devices, memory, and a small build from end to end."""
    from teacher_cache.doctor import examine

    findings = examine()
    emit(
        [finding.to_json() for finding in findings],
        lambda: [f"{finding.mark} {finding.what}: {finding.detail}" for finding in findings],
    )
    if not all(finding.ok for finding in findings):
        click.get_current_context().exit(3)
