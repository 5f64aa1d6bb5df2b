"""`tcache` on a cache as a whole: checked, mended, indexed anew, cleared, sealed, converted."""

from pathlib import Path
from typing import Any

import click

from cli.common import common_options, emit, progress_bar, size
from cli.options import STORAGE, EncodingChoice, cache_argument, corpus_of, optional_teacher, space_option, teacher_of


@click.command()
@cache_argument
@click.option("--deep", is_flag=True, help="Read every value: digests, finiteness, lengths, key = hash of text.")
@optional_teacher
@click.option("--every", type=click.IntRange(1), help="Rows of which --teacher encodes one again.")
@common_options
def verify(cache: Path, deep: bool, every: int | None, **teacher: Any) -> None:
    """Check every promise of the index; exit 3 when one is broken. With --teacher, some rows are encoded again."""
    from teacher_cache.maintenance.verify import verify as check

    asked = [name for name, value in teacher.items() if value not in (None, False, "auto")]
    if (every is not None or asked) and teacher["model"] is None:
        raise click.UsageError("--every, and how a teacher is asked, need --teacher")
    with progress_bar() as update:
        verdict = check(
            cache,
            deep=deep,
            teacher=teacher_of(teacher) if teacher["model"] else None,
            every=every,
            report=lambda done, total: update("checking shards", done, total, ""),
        )

    def lines() -> list[str]:
        told = [f"damage ({damage.kind}, {damage.rows:,} rows): {damage.where}" for damage in verdict.damage]
        depth = "every value read" if verdict.deep else "records and sizes; --deep reads every value"
        if verdict.asked:
            depth += f"; {verdict.asked:,} rows encoded again, 1 - cos at most {verdict.largest_difference:.2g}"
        told.append(f"{'ok' if verdict.ok else 'DAMAGED'}: {verdict.rows:,} rows, {verdict.shards:,} shards ({depth})")
        if verdict.leftovers:
            told.append(f"harmless leftovers of interrupted writes: {', '.join(verdict.leftovers)}")
        return told

    mendable = any(damage.kind != "damaged_cache" for damage in verdict.damage)
    emit(verdict.to_json(), lines, f"tcache repair {cache}" if mendable else "")
    if not verdict.ok:
        click.get_current_context().exit(3)


@click.command()
@cache_argument
@click.option("--corpus", "paths", metavar="FILE", multiple=True, help="Where lost texts are; may be repeated.")
@click.option("--text-key", default="text", show_default=True, help="Key or column of the text in those files.")
@common_options
def repair(cache: Path, paths: tuple[str, ...], text_key: str) -> None:
    """Mend what a deep check finds; exit 3 when something is left. Damaged files are kept in CACHE/damaged."""
    from teacher_cache.maintenance.repair import repair as mend

    with progress_bar() as update:
        result = mend(
            cache,
            corpus_of(paths, text_key) if paths else None,
            report=lambda done, total: update("checking shards", done, total, ""),
        )

    def lines() -> list[str]:
        told = [
            f"{word} ({mend.kind}, {mend.rows:,} rows): {mend.where}\n  {mend.action}"
            for word, mends in (("mended", result.mended), ("NOT mended", result.unmended))
            for mend in mends
        ]
        counts = f"{len(result.mended):,} mended, {len(result.unmended):,} not"
        return [*told, f"{counts}; {result.missing:,} rows are missing now"]

    emit(result.to_json(), lines, "tcache build with the same corpus, teacher and --columns" if result.missing else "")
    if not result.ok:
        click.get_current_context().exit(3)


@click.command()
@cache_argument
@common_options
def reindex(cache: Path) -> None:
    """Make a lost index again from the shards; exit 3 when something had to be left out."""
    from teacher_cache.maintenance.rebuild import reindex as make

    with progress_bar() as update:
        result = make(cache, report=lambda done, total: update("reading shards", done, total, ""))

    def lines() -> list[str]:
        told = [f"LEFT OUT: {left.where}: {left.why}" for left in result.left_out]
        told += [f"space {slug}: {count:,} vectors" for slug, count in result.spaces.items()]
        told += [f"space {slug}: tokens of {count:,} texts" for slug, count in result.tokens.items()]
        told += [f"corpus {name}" for name in result.corpora]
        return [*told, f"a new index of {result.rows:,} texts{f'; the one before {result.old}' if result.old else ''}"]

    emit(result.to_json(), lines, f"tcache verify {cache} --teacher T" if result.ok else f"tcache repair {cache}")
    if not result.ok:
        click.get_current_context().exit(3)


@click.command()
@cache_argument
@click.option("--space", "spaces", metavar="S", multiple=True, help="A space to drop; may be repeated.")
@click.option("--corpus", "corpora", metavar="NAME", multiple=True, help="A corpus to drop; may be repeated.")
@click.option("--dry-run", is_flag=True, help="Only tell.")
@common_options
def gc(cache: Path, spaces: tuple[str, ...], corpora: tuple[str, ...], dry_run: bool) -> None:
    """Remove leftovers, damaged files, old copies, and the spaces and corpora that are named."""
    from teacher_cache.maintenance.gc import reclaim

    result = reclaim(cache, spaces=spaces, corpora=corpora, dry_run=dry_run)

    def lines() -> list[str]:
        told = [f"{freed.what} {freed.where}: {size(freed.bytes)}" for freed in result.freed]
        told += [f"kept: {kept}" for kept in result.kept]
        return [*told, f"{size(result.bytes)} {'would be freed' if dry_run else 'freed'}"]

    emit(result.to_json(), lines)


@click.command()
@cache_argument
@common_options
def seal(cache: Path) -> None:
    """Copy the index for those who may not write to it: other machines, read-only mounts, other users."""
    from teacher_cache.maintenance.seal import seal as copy

    sealed = copy(cache)
    emit(
        sealed.to_json(),
        lambda: [f"{sealed.rows:,} rows sealed at {sealed.sealed}: {sealed.path}, {size(sealed.bytes)}"],
    )


@click.command()
@cache_argument
@click.option("--storage", type=EncodingChoice(STORAGE), required=True, help="The new number format.")
@space_option
@common_options
def convert(cache: Path, storage: str, space: str | None) -> None:
    """Store a space in another number format, without the teacher."""
    from teacher_cache.transfer.convert import convert as store_as

    with progress_bar() as update:
        result = store_as(cache, storage, space, lambda done, total: update("converting vectors", done, total, ""))

    def lines() -> list[str]:
        if not result.rows:
            return [f"space {result.space} is stored as {storage} already"]
        return [
            f"{result.rows:,} vectors of {result.space}: {result.storage_before} -> {result.storage}, "
            f"{size(result.bytes_before)} -> {size(result.bytes)}, 1 - cos at most {result.worst_error:.2g}",
            *([f"{result.token_columns} stay as they are stored"] if result.token_columns else []),
        ]

    emit(result.to_json(), lines, f"tcache gc {cache} frees what readers no longer need")
