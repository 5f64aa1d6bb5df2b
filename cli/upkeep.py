"""Commands of `tcache` on a whole cache: verify, repair, reindex, gc, seal and convert."""

from pathlib import Path
from typing import Any

import click

from cli.common import common_options, count, emit, progress_bar, size
from cli.options import (
    STORAGE,
    EncodingChoice,
    cache_argument,
    corpus_of,
    optional_teacher,
    space_option,
    teacher_of,
    text_key,
)


@click.command()
@cache_argument
@click.option("--deep", is_flag=True, help="Read every value: digests, finiteness, lengths, key = hash of text.")
@optional_teacher
@click.option(
    "--every",
    type=click.IntRange(1),
    help="With --teacher: encode one row in N again.  [default: about 1,000 rows in all]",
)
@common_options
def verify(cache: Path, deep: bool, every: int | None, **teacher: Any) -> None:
    """Check a cache against its index.

    With --teacher, some rows are encoded again. The exit code is 3 if there is damage.

    \b
    Example:
      tcache verify my-cache --deep
    """
    from teacher_cache.maintenance.check import verify as check

    given = [name for name, value in teacher.items() if value not in (None, False, "auto")]
    if (every is not None or given) and teacher["model"] is None:
        raise click.UsageError("--every and the teacher options need --teacher")
    with progress_bar() as update:
        result = check(
            cache,
            deep=deep,
            teacher=teacher_of(teacher) if teacher["model"] else None,
            every=every,
            report=lambda done, total: update("checking shards", done, total, ""),
        )

    def lines() -> list[str]:
        printed = [f"damage ({damage.kind}, {count(damage.rows, 'row')}): {damage.where}" for damage in result.damage]
        depth = "every value read" if result.deep else "records and sizes; --deep reads every value"
        if result.reencoded:
            depth += (
                f"; {count(result.reencoded, 'row')} encoded again, 1 - cos at most {result.largest_difference:.2g}"
            )
        counts = f"{count(result.rows, 'row')}, {count(result.shards, 'shard')}"
        printed.append(f"{'ok' if result.ok else 'DAMAGED'}: {counts} ({depth})")
        if result.leftovers:
            printed.append(f"files of interrupted writes, harmless: {', '.join(result.leftovers)}")
        return printed

    repairable = any(damage.kind != "damaged_cache" for damage in result.damage)
    emit(result.to_json(), lines, f"tcache repair {cache}" if repairable else "")
    if not result.ok:
        click.get_current_context().exit(3)


@click.command()
@cache_argument
@click.option("--corpus", "paths", metavar="FILE", multiple=True, help="File with lost texts. Repeatable.")
@text_key
@common_options
def repair(cache: Path, paths: tuple[str, ...], text_key: str) -> None:
    """Repair what a deep check finds.

    Damaged files are moved to CACHE/damaged. The exit code is 3 if damage remains.

    \b
    Example:
      tcache repair my-cache --corpus corpus.jsonl
    """
    from teacher_cache.maintenance.repair import repair as run

    with progress_bar() as update:
        result = run(
            cache,
            corpus_of(paths, text_key) if paths else None,
            report=lambda done, total: update("checking shards", done, total, ""),
        )

    def lines() -> list[str]:
        printed = [
            f"{word} ({action.kind}, {count(action.rows, 'row')}): {action.where}\n  {action.action}"
            for word, actions in (("repaired", result.repaired), ("NOT repaired", result.unrepaired))
            for action in actions
        ]
        counts = f"{len(result.repaired):,} repaired, {len(result.unrepaired):,} not"
        return [*printed, f"{counts}; {count(result.missing, 'row')} to encode"]

    emit(result.to_json(), lines, "tcache build with the same corpus, teacher and --columns" if result.missing else "")
    if not result.ok:
        click.get_current_context().exit(3)


@click.command()
@cache_argument
@common_options
def reindex(cache: Path) -> None:
    """Rebuild a lost index from the shards.

    The exit code is 3 if something was left out.

    \b
    Example:
      tcache reindex my-cache
    """
    from teacher_cache.maintenance.rebuild import reindex as run

    with progress_bar() as update:
        result = run(cache, report=lambda done, total: update("reading shards", done, total, ""))

    def lines() -> list[str]:
        return [
            *(f"LEFT OUT: {left.where}: {left.why}" for left in result.left_out),
            *(f"space {slug}: {count(vectors, 'vector')}" for slug, vectors in result.spaces.items()),
            *(f"space {slug}: tokens of {count(texts, 'text')}" for slug, texts in result.tokens.items()),
            *(f"corpus {name}" for name in result.corpora),
            f"new index of {count(result.rows, 'text')}"
            + (f"; the old one was moved to {result.old}" if result.old else ""),
        ]

    emit(result.to_json(), lines, f"tcache verify {cache} --teacher T" if result.ok else f"tcache repair {cache}")
    if not result.ok:
        click.get_current_context().exit(3)


@click.command()
@cache_argument
@click.option("--space", "spaces", metavar="S", multiple=True, help="Space to drop. Repeatable.")
@click.option("--corpus", "corpora", metavar="NAME", multiple=True, help="Corpus to drop. Repeatable.")
@click.option("--dry-run", is_flag=True, help="Print what would be removed, and remove nothing.")
@common_options
def gc(cache: Path, spaces: tuple[str, ...], corpora: tuple[str, ...], dry_run: bool) -> None:
    """Remove unneeded files, and the spaces and corpora you name.

    Unneeded are temporary files, damaged files and old copies.

    \b
    Example:
      tcache gc my-cache --dry-run
    """
    from teacher_cache.maintenance.gc import reclaim

    result = reclaim(cache, spaces=spaces, corpora=corpora, dry_run=dry_run)

    def lines() -> list[str]:
        return [
            *(f"{freed.what} {freed.where}: {size(freed.bytes)}" for freed in result.freed),
            *(f"kept: {kept}" for kept in result.kept),
            f"{size(result.bytes)} {'would be freed' if dry_run else 'freed'}",
        ]

    emit(result.to_json(), lines)


@click.command()
@cache_argument
@common_options
def seal(cache: Path) -> None:
    """Copy the index for readers that may not write to it.

    These are other machines, read-only mounts and other users.

    \b
    Example:
      tcache seal my-cache
    """
    from teacher_cache.maintenance.seal import seal as copy

    sealed = copy(cache)
    line = f"{count(sealed.rows, 'row')} sealed at {sealed.sealed}: {sealed.path}, {size(sealed.bytes)}"
    emit(sealed.to_json(), lambda: [line])


@click.command()
@cache_argument
@click.option("--storage", type=EncodingChoice(STORAGE), required=True, help="The new encoding.")
@space_option
@common_options
def convert(cache: Path, storage: str, space: str | None) -> None:
    """Store a space in another encoding, without the teacher.

    \b
    Example:
      tcache convert my-cache --storage int8
    """
    from teacher_cache.transfer.convert import convert as run

    with progress_bar() as update:
        result = run(cache, storage, space, lambda done, total: update("converting vectors", done, total, ""))

    def lines() -> list[str]:
        if not result.rows:
            return [f"space {result.space} is stored as {storage} already"]
        return [
            f"{count(result.rows, 'vector')} of {result.space}: {result.storage_before} -> {result.storage}, "
            f"{size(result.bytes_before)} -> {size(result.bytes)}, 1 - cos at most {result.worst_error:.2g}",
            *([f"{result.token_columns} stay as they are stored"] if result.token_columns else []),
        ]

    emit(result.to_json(), lines, f"tcache gc {cache} frees what readers no longer need")
