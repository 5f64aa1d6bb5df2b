"""Frees disk space: temporary files, damaged files, old copies, and the spaces and corpora that a user names.

Nothing outside the cache's folder is touched. A symbolic link is removed itself, never its target.

The index does not shrink. Its free pages are used again, texts are never removed from it, and a dropped space frees
hardly anything in it; readers that have the old file open would never see a smaller one.
"""

import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from teacher_cache.errors import CorpusNotFound, SpaceNotFound
from teacher_cache.maintenance.repair import DAMAGED
from teacher_cache.maintenance.walk import subfolders
from teacher_cache.storage.files import TEMPORARY_SUFFIX, atomic_write, sync_path
from teacher_cache.storage.index import Change, quarantine_key, shard_key
from teacher_cache.storage.manifest import CORPORA
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.layout import CORPUS_JSON, INDEX, SPACE_JSON
from teacher_cache.table.view import SPACES, SpaceRecord
from teacher_cache.tokens.token_columns import TOKEN_ARRAYS


@dataclass(frozen=True)
class Freed:
    """Something that is removed, or would be.

    Attributes:
        what: "leftover", "damaged", "unpublished space", "old array", "old row list", "space" or "corpus".
        where: file or folder, relative to the cache.
        bytes: of its files; 0 for a symbolic link.
    """

    what: str
    where: str
    bytes: int


@dataclass(frozen=True)
class ReclaimReport:
    """What was removed.

    Attributes:
        kept: orphans that hold too much to be removed without being named, with the reason.
    """

    freed: list[Freed]
    kept: list[str]
    dry_run: bool

    @property
    def bytes(self) -> int:
        return sum(freed.bytes for freed in self.freed)

    def to_json(self) -> dict[str, Any]:
        return {"bytes": self.bytes, **asdict(self)}


def reclaim(
    path: str | Path, *, spaces: Sequence[str] = (), corpora: Sequence[str] = (), dry_run: bool = False
) -> ReclaimReport:
    """Remove what no reader needs, and the named spaces and corpora.

    Args:
        spaces: to drop, by any name that `TeacherCache.space` takes. Texts and other spaces stay.
        corpora: to drop. Their texts stay, because row numbers never change.

    Raises:
        SpaceNotFound, CorpusNotFound: no such space or corpus; nothing was removed.
    """
    with TeacherCache.open(path, "r+") as cache:
        slugs = [_slug(cache, space) for space in spaces]
        for name in corpora:
            if name not in cache.corpora() and name not in [folder.name for folder in subfolders(cache.path / CORPORA)]:
                raise CorpusNotFound(
                    f"no corpus {name!r} in {cache.path}; it has: {', '.join(sorted(cache.corpora())) or 'none'}"
                )
        sweep = _Sweep(cache, dry_run)
        sweep.temporary_files()
        for slug in dict.fromkeys(slugs):
            sweep.drop_space(slug)
        for name in dict.fromkeys(corpora):
            sweep.drop_corpus(name)
        sweep.orphans_of_spaces(dropped=slugs)
        sweep.orphans_of_corpora(dropped=corpora)
        return ReclaimReport(sweep.freed, sweep.kept, dry_run)


def forget_corpus(path: str | Path, name: str) -> None:
    """Drop a corpus and nothing else. Its texts stay, because row numbers never change."""
    with TeacherCache.open(path, "r+") as cache:
        _Sweep(cache, dry_run=False).drop_corpus(name)


def _slug(cache: TeacherCache, name: str) -> str:
    """The slug of a space by any of its names, or the name of a folder of vectors that the index does not know."""
    try:
        return cache.space_record(name).space.slug
    except SpaceNotFound:
        if name in [folder.name for folder in subfolders(cache.path / SPACES)]:
            return name
        raise


class _Sweep:
    """Removes files of a cache that is open for writing."""

    def __init__(self, cache: TeacherCache, dry_run: bool) -> None:
        self.cache = cache
        self.root = cache.path.resolve()
        self.dry_run = dry_run
        self.freed: list[Freed] = []
        self.kept: list[str] = []

    def temporary_files(self) -> None:
        """Remove files of interrupted writes, which no process uses while this one has the lock, and damaged files."""
        for folder, names, files in os.walk(self.cache.path):
            if Path(folder) == self.cache.path:
                names[:] = [name for name in names if name not in (DAMAGED, INDEX)]
            for name in [*names, *files]:
                if name.endswith(TEMPORARY_SUFFIX):
                    self._remove("leftover", Path(folder) / name)
            names[:] = [name for name in names if not name.endswith(TEMPORARY_SUFFIX)]
        self._remove("damaged", self.cache.path / DAMAGED)

    def drop_space(self, slug: str) -> None:
        """Remove a space from the index in one transaction, then its folder."""
        index, record = self.cache.index, self.cache.space_records().get(slug)
        folder = self.cache.path / SPACES / slug
        if record is not None and not self.dry_run:
            arrays = {record.array, *(array.name for array in folder.glob("vectors*.zarr")), *TOKEN_ARRAYS}
            arrays |= {array.name for array in folder.glob("alignment-*.zarr")}
            names = [replace(record, array=array).array_name for array in sorted(arrays)]
            quarantined = [
                Change("quarantine", quarantine_key(name, row), None)
                for name in (slug, *names)
                for row in index.quarantined(name)
            ]
            index.commit([*self._without(names), *quarantined, Change("spaces", slug.encode(), None)])
        self._remove("space", folder)

    def drop_corpus(self, name: str) -> None:
        """Remove a corpus from the index, then its manifest."""
        if not self.dry_run:
            self.cache.index.commit([Change("corpora", name.encode(), None)])
        self._remove("corpus", self.cache.path / CORPORA / name)

    def _without(self, arrays: Sequence[str]) -> list[Change]:
        """Changes that remove the shards of some arrays from the index."""
        index = self.cache.index
        return [
            Change("shards", shard_key(name, number), None) for name in arrays for number, _ in index.iter_shards(name)
        ]

    def orphans_of_spaces(self, *, dropped: Sequence[str]) -> None:
        """Remove spaces and token columns that were never published, and arrays that were converted."""
        known = self.cache.space_records()
        for folder in subfolders(self.cache.path / SPACES):
            slug = folder.name
            if slug in dropped or slug.endswith(TEMPORARY_SUFFIX):
                continue
            if slug in known:
                self._old_arrays(known[slug], folder)
                continue
            shards = sum(1 for _ in folder.glob("vectors*.zarr/c/*/0"))
            if not shards:
                self._remove("unpublished space", folder)
                continue
            self.kept.append(
                f"{folder.relative_to(self.cache.path)}: {shards} shards of vectors that the index does not know; "
                f"`tcache gc {self.cache.path} --space {slug}` removes them"
            )

    def _old_arrays(self, record: SpaceRecord, folder: Path) -> None:
        """Remove the arrays of a space that its record does not name."""
        named = {record.array, *(record.columns.arrays if record.columns is not None else ())}
        found = [*sorted(folder.glob("vectors*.zarr")), *(folder / array for array in TOKEN_ARRAYS)]
        old = [array for array in found if array.name not in named and os.path.lexists(array)]
        if old and not self.dry_run:
            if folder.resolve().is_relative_to(self.root):
                # `reindex` reads this file. A conversion killed after its commit has not updated it, and a build killed
                # before its first commit has named arrays that were never published.
                with atomic_write(folder / SPACE_JSON) as file:
                    file.write(record.to_json())
            self.cache.index.commit(self._without([replace(record, array=array.name).array_name for array in old]))
        for array in old:
            self._remove("old array", array)

    def orphans_of_corpora(self, *, dropped: Sequence[str]) -> None:
        """Remove manifests and domains that no corpus uses; a folder with any other file stays."""
        known = self.cache.corpora()
        for folder in subfolders(self.cache.path / CORPORA):
            name = folder.name
            if name in dropped or name.endswith(TEMPORARY_SUFFIX):
                continue
            used = set()
            if name in known:
                files = (known[name].file(self.cache.path), known[name].domains_file(self.cache.path))
                used = {CORPUS_JSON, *(file.name for file in files if file is not None)}
            lists = {file.name for kind in ("rows*", "domains*") for file in folder.glob(kind)} | {CORPUS_JSON}
            if name not in known and set(os.listdir(folder)) <= lists:
                self._remove("old row list", folder)
                continue
            for file in sorted(lists - used):
                if not file.endswith(TEMPORARY_SUFFIX):
                    self._remove("old row list", folder / file)

    def _remove(self, what: str, path: Path) -> None:
        """Remove a file or folder if it exists."""
        if not os.path.lexists(path):
            return
        where = str(path.relative_to(self.cache.path))
        if not path.parent.resolve().is_relative_to(self.root):
            self.kept.append(f"{where}: a symbolic link leads out of the cache's folder; remove it yourself")
            return
        self.freed.append(Freed(what, where, _bytes(path)))
        if self.dry_run:
            return
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            renamed = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
            os.rename(path, renamed)  # a temporary file from here on, even if a kill interrupts the rest
            shutil.rmtree(renamed)
        sync_path(path.parent)


def _bytes(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; 0 for a link."""
    if path.is_symlink():
        return 0
    if not path.is_dir():
        return path.stat().st_size
    return sum(_bytes(entry) for entry in path.iterdir())
