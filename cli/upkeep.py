"""Commands of `tcache` on a whole cache: verify, repair, reindex, gc, seal and convert."""

from pathlib import Path
from typing import Any

import click

from cli.common import common_options, emit, progress_bar, size
from cli.options import STORAGE, EncodingChoice, cache_argument, corpus_of, optional_teacher, space_option, teacher_of

DAMAGE_EXIT_CODE = 3


def exit_unless(ok: bool) -> None:
    """End the command with the exit code of a failed check."""
    if not ok:
        click.get_current_context().exit(DAMAGE_EXIT_CODE)


@click.command()
@cache_argument
@click.option("--deep", is_flag=True, help="Read every value: digests, finiteness, lengths, key = hash of text.")
@optional_teacher
@click.option("--every", type=click.IntRange(1), help="With --teacher: encode one row in this many again.")
@common_options
def verify(cache: Path, deep: bool, every: int | None, **teacher: Any) -> None:
    """Check a cache against its index; exit 3 on damage. With --teacher, some rows are encoded again."""
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
        damage = [f"damage ({found.kind}, {found.rows:,} rows): {found.where}" for found in result.damage]
        depth = "every value read" if result.deep else "records and sizes; --deep reads every value"
        if result.reencoded:
            depth += f"; {result.reencoded:,} rows encoded again, 1 - cos at most {result.largest_difference:.2g}"
        summary = f"{'ok' if result.ok else 'DAMAGED'}: {result.rows:,} rows, {result.shards:,} shards ({depth})"
        leftovers = ", ".join(result.leftovers)
        return [*damage, summary, *([f"files of interrupted writes, harmless: {leftovers}"] if leftovers else [])]

    repairable = any(damage.kind != "damaged_cache" for damage in result.damage)
    emit(result.to_json(), lines, f"tcache repair {cache}" if repairable else "")
    exit_unless(result.ok)


@click.command()
@cache_argument
@click.option("--corpus", "paths", metavar="FILE", multiple=True, help="File with lost texts; may be repeated.")
@click.option("--text-key", default="text", show_default=True, help="Key or column of the text in those files.")
@common_options
def repair(cache: Path, paths: tuple[str, ...], text_key: str) -> None:
    """Repair what a deep check finds; exit 3 if damage remains. Damaged files are moved to CACHE/damaged."""
    from teacher_cache.maintenance.repair import repair as run

    with progress_bar() as update:
        result = run(
            cache,
            corpus_of(paths, text_key) if paths else None,
            report=lambda done, total: update("checking shards", done, total, ""),
        )

    def lines() -> list[str]:
        actions = [
            f"{word} ({action.kind}, {action.rows:,} rows): {action.where}\n  {action.action}"
            for word, actions in (("repaired", result.repaired), ("NOT repaired", result.unrepaired))
            for action in actions
        ]
        counts = f"{len(result.repaired):,} repaired, {len(result.unrepaired):,} not"
        return [*actions, f"{counts}; {result.missing:,} rows are missing now"]

    emit(result.to_json(), lines, "tcache build with the same corpus, teacher and --columns" if result.missing else "")
    exit_unless(result.ok)


@click.command()
@cache_argument
@common_options
def reindex(cache: Path) -> None:
    """Rebuild a lost index from the shards; exit 3 if something was left out."""
    from teacher_cache.maintenance.rebuild import reindex as run

    with progress_bar() as update:
        result = run(cache, report=lambda done, total: update("reading shards", done, total, ""))

    def lines() -> list[str]:
        return [
            *(f"LEFT OUT: {left.where}: {left.why}" for left in result.left_out),
            *(f"space {slug}: {count:,} vectors" for slug, count in result.spaces.items()),
            *(f"space {slug}: tokens of {count:,} texts" for slug, count in result.tokens.items()),
            *(f"corpus {name}" for name in result.corpora),
            f"new index of {result.rows:,} texts{f'; the old one was moved to {result.old}' if result.old else ''}",
        ]

    emit(result.to_json(), lines, f"tcache verify {cache} --teacher T" if result.ok else f"tcache repair {cache}")
    exit_unless(result.ok)


@click.command()
@cache_argument
@click.option("--space", "spaces", metavar="S", multiple=True, help="A space to drop; may be repeated.")
@click.option("--corpus", "corpora", metavar="NAME", multiple=True, help="A corpus to drop; may be repeated.")
@click.option("--dry-run", is_flag=True, help="Print what would be removed, remove nothing.")
@common_options
def gc(cache: Path, spaces: tuple[str, ...], corpora: tuple[str, ...], dry_run: bool) -> None:
    """Remove temporary and damaged files, old copies, and the spaces and corpora you name."""
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
    """Copy the index for readers that may not write to it: other machines, read-only mounts, other users."""
    from teacher_cache.maintenance.seal import seal as copy

    sealed = copy(cache)
    emit(
        sealed.to_json(),
        lambda: [f"{sealed.rows:,} rows sealed at {sealed.sealed}: {sealed.path}, {size(sealed.bytes)}"],
    )


@click.command()
@cache_argument
@click.option("--storage", type=EncodingChoice(STORAGE), required=True, help="The new encoding.")
@space_option
@common_options
def convert(cache: Path, storage: str, space: str | None) -> None:
    """Store a space in another encoding, without the teacher."""
    from teacher_cache.transfer.convert import convert as run

    with progress_bar() as update:
        result = run(cache, storage, space, lambda done, total: update("converting vectors", done, total, ""))

    def lines() -> list[str]:
        if not result.rows:
            return [f"space {result.space} is stored as {storage} already"]
        return [
            f"{result.rows:,} vectors of {result.space}: {result.storage_before} -> {result.storage}, "
            f"{size(result.bytes_before)} -> {size(result.bytes)}, 1 - cos at most {result.worst_error:.2g}",
            *([f"{result.token_columns} stay as they are stored"] if result.token_columns else []),
        ]

    emit(result.to_json(), lines, f"tcache gc {cache} frees what readers no longer need")
