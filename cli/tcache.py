"""`tcache`: build teacher caches and read them. `upkeep` and `transfer` have the commands for a cache as a whole."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli import transfer, upkeep
from cli.common import CONTEXT, Commands, common_options, count, duration, emit, print_status, progress_bar, size
from cli.options import (
    STORAGE,
    TOKEN_STORAGE,
    EncodingChoice,
    cache_argument,
    cache_option,
    column_options,
    corpus_of,
    corpus_option,
    corpus_options,
    is_given,
    max_length,
    next_run,
    space_option,
    teacher_of,
    teacher_options,
    tokens_of,
    trust_remote_code,
)

if TYPE_CHECKING:
    from teacher_cache.building.build import Progress

# Those of teacher_cache.tokens.alignment, which imports more than --help needs.
ALIGNMENTS = ("offset", "mined_types", "mined_dp", "dtw_mean", "dtw_strict")


@click.group(name="tcache", cls=Commands, context_settings=CONTEXT)
@click.version_option(package_name="teacher-cache")
def main() -> None:
    """Run a text-embedding teacher once per text and store its vectors."""


@main.command()
@corpus_options
@teacher_options
@cache_option
@click.option("--name", help="Name of the corpus in the cache.  [default: that of the first file]")
@click.option("--storage", type=EncodingChoice(STORAGE), help="Encoding of a new space.  [default: float16]")
@column_options
@click.option(
    "--token-storage", type=EncodingChoice(TOKEN_STORAGE), help="Encoding of new token states.  [default: float16]"
)
@click.option("--workers", default="local", help="What runs the teacher: local, ray or ray:N.")
@common_options
def build(
    paths: tuple[str, ...],
    text_key: str,
    domain_key: str | None,
    cache: Path,
    name: str | None,
    storage: str | None,
    columns: str,
    attention_layers: str | None,
    token_storage: str | None,
    workers: str,
    **teacher: Any,
) -> None:
    """Encode the texts of a corpus that have no vector yet.

    CORPUS is a file, a glob, a folder that `datasets` saved, or - for standard input. Run the same command again to
    resume after an interruption.

    \b
    Example:
      tcache build corpus.jsonl --teacher bge-m3 --cache my-cache
    """
    from teacher_cache.building.build import build as build_cache
    from teacher_cache.building.workers import parse_workers

    tokens = tokens_of(columns, attention_layers)
    if token_storage is not None and tokens is None:
        raise click.UsageError("--token-storage goes with --columns vectors,tokens")
    announced = False
    with progress_bar() as update:

        def report(progress: "Progress") -> None:
            nonlocal announced
            if progress.phase == "reading":
                update("reading records", progress.done, 0, "")
                return
            if progress.phase == "loading":
                update("loading the teacher", 0, 0, "")
                return
            if not announced:
                announced = True
                distinct = progress.cached + progress.total
                print_status(progress.space)
                print_status(
                    f"{count(distinct, 'distinct text')}, {progress.cached:,} cached "
                    f"({progress.cached / max(distinct, 1):.0%}), {progress.total:,} to encode"
                )
            if progress.total and not progress.done:
                update("loading the teacher", 0, 0, "")
                return
            detail = (
                f"{progress.tokens_per_second:,.0f} tokens/s, {size(progress.bytes)}, "
                f"{progress.quarantined} quarantined"
            )
            update("encoding texts", progress.done, progress.total, detail)

        result = build_cache(
            corpus_of(paths, text_key, domain_key),
            teacher_of(teacher),
            cache,
            name=name,
            workers=parse_workers(workers),
            storage=storage,
            tokens=tokens,
            token_storage=token_storage,
            report=report,
        )

    def lines() -> list[str]:
        printed = [
            f"{count(result.rows, 'row')}, {result.distinct:,} distinct: {result.cached:,} cached, {result.encoded:,} "
            f"encoded in {duration(result.seconds)} ({result.truncated:,} truncated, {result.repaired:,} repaired, "
            f"{result.quarantined:,} quarantined)",
        ]
        if tokens is not None:
            printed.append(
                f"  {' and '.join(result.columns[1:])} of {count(result.token_texts, 'text')}, "
                f"{size(result.token_bytes)} before compression"
            )
        printed += [f"  quarantined {number:,}: {reason}" for reason, number in result.reasons.items()]
        printed += [
            f"  {what.replace('_', ' ')}: {number:,}"
            for what, number in result.counts.items()
            if number and what != "records"
        ]
        return [*printed, f"space {result.space}, corpus {result.corpus}, in {result.cache}"]

    emit(result.to_json(), lines, next_run(cache, result.space, result.corpus))


@main.command()
@corpus_options
@teacher_options
@cache_option
@column_options
@click.option("--probe", is_flag=True, help="Load the teacher and time it on a few texts.")
@common_options
def plan(
    paths: tuple[str, ...],
    text_key: str,
    domain_key: str | None,
    cache: Path,
    columns: str,
    attention_layers: str | None,
    probe: bool,
    **teacher: Any,
) -> None:
    """Estimate the rows, tokens, bytes and hours of a build.

    Nothing is written to the cache. The files of a hub model are downloaded.

    \b
    Example:
      tcache plan corpus.jsonl --teacher bge-m3 --probe
    """
    from teacher_cache.building.plan import plan as estimate

    tokens = tokens_of(columns, attention_layers)
    with progress_bar() as update:
        update("timing the teacher" if probe else "reading records", 0, 0, "")
        result = estimate(
            corpus_of(paths, text_key, domain_key), teacher_of(teacher), cache, tokens=tokens, probe=probe
        )

    def sizes(of_encodings: dict[str, int]) -> str:
        return ", ".join(f"{size(number)} as {encoding}" for encoding, number in of_encodings.items())

    def lines() -> list[str]:
        if result.hours is None:
            time = "unknown (--probe measures it)"
        else:
            time = f"{duration(3600 * result.hours)}, {result.basis}"
        return [
            result.description,
            f"{count(result.rows, 'row')}, {result.distinct:,} distinct, {result.cached:,} cached, {result.missing:,} "
            "to encode",
            f"about {count(result.tokens, 'token')} ({result.truncated:.1%} of the texts longer than the maximum)",
            f"size: {sizes(result.bytes)}",
            *([f"token columns: {sizes(result.token_bytes)}"] if result.token_bytes else []),
            f"time: {time}",
        ]

    emit(result.to_json(), lines, "tcache build with the same arguments")


@main.command()
@cache_argument
@click.option("--student", required=True, metavar="MODEL", help="Model folder, hub id or known name.")
@click.option(
    "--method",
    type=click.Choice(ALIGNMENTS),
    metavar=f"[{'|'.join(ALIGNMENTS)}]",
    default="offset",
    help="How tokens are matched.",
)
@space_option
@corpus_option
@click.option("--prompt", default="", help="Text in front of the student's texts.")
@max_length
@trust_remote_code
@common_options
def align(
    cache: Path,
    student: str,
    method: str,
    space: str | None,
    corpus: str | None,
    prompt: str,
    max_length: int | None,
    trust_remote_code: bool,
) -> None:
    """Map the teacher's tokens to a student's tokens.

    The alignment is stored in the cache for all later runs. Only the student's tokenizer is loaded. Without
    --max-length a text has at most 256 tokens, or fewer if the student's files say so.

    \b
    Example:
      tcache align my-cache --student sentence-transformers/all-MiniLM-L6-v2
    """
    from teacher_cache.building.align import align_corpus

    with progress_bar() as update:
        result = align_corpus(
            cache,
            student,
            method,
            space=space,
            corpus=corpus,
            prompt=prompt,
            max_length=max_length,
            trust_remote_code=trust_remote_code,
            report=lambda done, total: update("aligning texts", done, total, ""),
        )

    def lines() -> list[str]:
        printed = [
            f"{count(result.rows, 'distinct text')}: {result.cached:,} aligned before, {result.aligned:,} now in "
            f"{duration(result.seconds)}"
        ]
        if result.student_tokens:
            printed.append(f"{result.mapped / result.student_tokens:.1%} of the student's tokens have a counterpart")
        if result.without_tokens:
            printed.append(f"skipped {count(result.without_tokens, 'text')} without token columns")
        return [*printed, f"space {result.space}, corpus {result.corpus}: {result.array}"]

    emit(result.to_json(), lines)


@main.command()
@cache_argument
@common_options
def info(cache: Path) -> None:
    """Print the corpora and spaces of a cache.

    \b
    Example:
      tcache info my-cache
    """
    from teacher_cache.maintenance.info import describe

    record = describe(cache)

    def lines() -> list[str]:
        printed = [f"{cache}: {count(record['rows'], 'distinct text')}"]
        for name, corpus in record["corpora"].items():
            printed.append(f"corpus {name}: {count(corpus['rows'], 'row')}, {corpus['distinct']:,} distinct")
            printed += [f"  domain {domain}: {count(number, 'row')}" for domain, number in corpus["domains"].items()]
        for slug, space in record["spaces"].items():
            printed.append(
                f"space {slug}: {count(space['present'], 'vector')} of {space['dim']} as {space['storage']}, "
                f"{size(space['bytes'])}, {space['quarantined']:,} quarantined"
            )
            printed.append(f"  {space['description']}")
            printed += [_column_line(name, column) for name, column in space["columns"].items()]
            printed += [
                f"  quarantined row {row['row']}, {row['text'][:60]!r}: {row['reason']}"
                for row in space["quarantined_rows"][:5]
            ]
        return printed

    emit(record, lines)


def _column_line(name: str, column: dict[str, Any]) -> str:
    if name == "tokens":
        kind = f"of {column['width']} as {column['storage']}"
    else:
        kind = f"of layer{'s' * (len(column['layers']) > 1)} {', '.join(map(str, column['layers']))}"
    return (
        f"  {name} {kind} of {count(column['present'], 'text')}, {size(column['bytes'])}, "
        f"{column['quarantined']:,} quarantined"
    )


@main.command()
@click.argument("words", metavar="[CACHE] TEXT...", nargs=-1, required=True)
@cache_option
@space_option
@common_options
def get(words: tuple[str, ...], cache: Path, space: str | None) -> None:
    """Look up texts: their rows and vectors.

    A single argument is a text. Of several, the first is the cache, unless --cache is given. The exit code is 1 when a
    text has no vector.

    \b
    Example:
      tcache get my-cache "how do I reset my password?"
    """
    from teacher_cache.maintenance.info import look_up

    texts = words
    if len(words) > 1 and not is_given("cache"):
        cache, texts = Path(words[0]), words[1:]
    found = look_up(cache, texts, space)

    def line(entry: dict[str, Any]) -> str:
        if entry["vector"] is None:
            return f"{entry['text']!r}: {entry['why']}"
        head = ", ".join(f"{value:.4f}" for value in entry["vector"][:6])
        return (
            f"{entry['text']!r}: row {entry['row']}, {count(len(entry['vector']), 'number')}, length "
            f"{entry['norm']:.4f}: {head}, ..."
        )

    emit(found, lambda: [line(entry) for entry in found])
    if any(entry["vector"] is None for entry in found):
        click.get_current_context().exit(1)


@main.command()
@common_options
def doctor() -> None:
    """Check this machine: libraries, devices and a small build.

    \b
    Example:
      tcache doctor
    """
    from teacher_cache.maintenance.doctor import examine

    findings = examine()
    emit(
        [finding.to_json() for finding in findings],
        lambda: [f"{finding.mark} {finding.what}: {finding.detail}" for finding in findings],
    )
    if not all(finding.ok for finding in findings):
        click.get_current_context().exit(3)


for command in (
    upkeep.verify,
    upkeep.repair,
    upkeep.reindex,
    upkeep.gc,
    upkeep.seal,
    upkeep.convert,
    transfer.export,
    transfer.import_,
    transfer.merge,
):
    main.add_command(command)
