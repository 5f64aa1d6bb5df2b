"""`tcache`: make teacher caches and look into them; what it does with whole caches is in `upkeep`, `transfer`."""

from pathlib import Path
from typing import Any

import click

from cli import transfer, upkeep
from cli.common import CONTEXT, Commands, cache_option, common_options, emit, progress_bar, say, size
from cli.options import (
    STORAGE,
    TOKEN_STORAGE,
    EncodingChoice,
    cache_argument,
    column_options,
    corpus_of,
    corpus_options,
    space_option,
    teacher_of,
    teacher_options,
    tokens_of,
    trains_on,
)

# Those of teacher_cache.tokens.alignment, which imports more than --help needs.
ALIGNMENTS = ("offset", "mined_types", "mined_dp", "dtw_mean", "dtw_strict")


@click.group(cls=Commands, context_settings=CONTEXT)
@click.version_option(package_name="teacher-cache")
def main() -> None:
    """Run a text-embedding teacher once per text and keep what it said."""


@main.command()
@corpus_options
@teacher_options
@cache_option
@click.option("--name", help="Name of the corpus in the cache; by default that of the first file.")
@click.option("--storage", type=EncodingChoice(STORAGE), help="Number format of a new space; float16 by default.")
@column_options
@click.option(
    "--token-storage", type=EncodingChoice(TOKEN_STORAGE), help="Number format of new token states; float16 by default."
)
@click.option("--workers", default="local", show_default=True, help="local, ray or ray:N.")
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
    """Fill the missing rows of one embedding space. Run it again to go on after anything."""
    from teacher_cache.building.build import Progress
    from teacher_cache.building.build import build as fill
    from teacher_cache.building.workers import parse_workers

    tokens = tokens_of(columns, attention_layers)
    if token_storage is not None and tokens is None:
        raise click.UsageError("--token-storage goes with --columns vectors,tokens")
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
        told = [
            f"{result.rows:,} rows, {result.distinct:,} distinct: {result.cached:,} cached, {result.encoded:,} "
            f"encoded in {result.seconds:.1f} s ({result.truncated:,} truncated, {result.repaired:,} repaired, "
            f"{result.quarantined:,} quarantined)",
        ]
        if tokens is not None:
            told.append(
                f"  {' and '.join(result.columns[1:])} of {result.token_texts:,} texts, {size(result.token_bytes)} "
                "before compression"
            )
        told += [f"  quarantined {count:,}: {reason}" for reason, count in result.reasons.items()]
        told += [
            f"  {name.replace('_', ' ')}: {count:,}"
            for name, count in result.counts.items()
            if count and name != "records"
        ]
        told.append(f"space {result.space}, corpus {result.corpus}, in {result.cache}")
        return told

    emit(result.to_json(), lines, trains_on(cache, result.space, result.corpus))


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
    """Rows, tokens, gigabytes and hours of a build, without building."""
    from teacher_cache.building.plan import plan as foretell

    tokens = tokens_of(columns, attention_layers)
    result = foretell(corpus_of(paths, text_key, domain_key), teacher_of(teacher), cache, tokens=tokens, probe=probe)

    def lines() -> list[str]:
        hours = "unknown (--probe times it)" if result.hours is None else f"{result.hours:.2f} h, {result.basis}"
        return [
            result.description,
            f"{result.rows:,} rows, {result.distinct:,} distinct, {result.cached:,} cached, {result.missing:,} to "
            "encode",
            f"about {result.tokens:,} tokens ({result.truncated:.1%} of the texts longer than the maximum)",
            "size: " + ", ".join(f"{size(count)} as {encoding}" for encoding, count in result.bytes.items()),
            *(
                [
                    "token columns: "
                    + ", ".join(f"{size(count)} as {encoding}" for encoding, count in result.token_bytes.items())
                ]
                if result.token_bytes
                else []
            ),
            f"time: {hours}",
        ]

    emit(result.to_json(), lines, "tcache build with the same arguments")


@main.command()
@cache_argument
@click.option("--student", required=True, metavar="MODEL", help="Whose tokens: a model folder, hub id or known name.")
@click.option("--method", type=click.Choice(ALIGNMENTS), default="offset", show_default=True)
@space_option
@click.option("--corpus", help="Name of the corpus, where the cache has several.")
@click.option("--prompt", default="", help="Text put in front of the student's texts.")
@click.option("--max-length", type=click.IntRange(1), help="Tokens that the student reads; at most 256 by default.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the model.")
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
    """Map the teacher's tokens onto a student's, once for all runs. Only the student's tokenizer is loaded."""
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
        told = [
            f"{result.rows:,} distinct texts: {result.cached:,} aligned before, {result.aligned:,} now in "
            f"{result.seconds:.1f} s"
        ]
        if result.student_tokens:
            told.append(f"{result.mapped / result.student_tokens:.1%} of the student's tokens have a counterpart")
        if result.without_tokens:
            told.append(f"{result.without_tokens:,} texts have no token columns and were left out")
        told.append(f"space {result.space}, corpus {result.corpus}: {result.array}")
        return told

    emit(result.to_json(), lines)


@main.command()
@cache_argument
@common_options
def info(cache: Path) -> None:
    """What is in a cache."""
    from teacher_cache.maintenance.info import describe

    record = describe(cache)

    def lines() -> list[str]:
        told = [f"{cache}: {record['rows']:,} distinct texts"]
        for name, corpus in record["corpora"].items():
            told.append(f"corpus {name}: {corpus['rows']:,} rows, {corpus['distinct']:,} distinct")
            told += [f"  domain {domain}: {count:,} rows" for domain, count in corpus["domains"].items()]
        for slug, space in record["spaces"].items():
            told.append(
                f"space {slug}: {space['present']:,} vectors of {space['dim']} as {space['storage']}, "
                f"{size(space['bytes'])}, {space['quarantined']:,} quarantined"
            )
            told.append(f"  {space['description']}")
            for name, column in space["columns"].items():
                kind = (
                    f"of {column['width']} as {column['storage']}"
                    if name == "tokens"
                    else f"of layer{'s' * (len(column['layers']) > 1)} {', '.join(map(str, column['layers']))}"
                )
                told.append(
                    f"  {name} {kind} of {column['present']:,} texts, {size(column['bytes'])}, "
                    f"{column['quarantined']:,} quarantined"
                )
            told += [
                f"  quarantined row {refused['row']}, {refused['text'][:60]!r}: {refused['reason']}"
                for refused in space["quarantined_rows"][:5]
            ]
        return told

    emit(record, lines)


@main.command()
@cache_argument
@click.argument("texts", metavar="TEXT...", nargs=-1, required=True)
@space_option
@common_options
def get(cache: Path, texts: tuple[str, ...], space: str | None) -> None:
    """Look texts up: their rows and what the teacher said."""
    from teacher_cache.maintenance.info import look_up

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
@common_options
def doctor() -> None:
    """Check this machine: libraries, devices, memory, and a small build from end to end."""
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
