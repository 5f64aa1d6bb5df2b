"""Give disk space back: leftovers, what was set aside as damaged, old copies, and what a user drops.

Nothing outside the cache's folder is touched. A symbolic link is removed itself, never what it leads to.

The index is not made smaller. Its pages are used again, texts are never taken out of it, and a dropped space frees
hardly anything in it; whoever has the old file open would never see a new one.
"""

import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from teacher_cache.errors import CorpusNotFound, SpaceNotFound
from teacher_cache.maintenance.repair import DAMAGED
from teacher_cache.storage.files import TEMPORARY_SUFFIX, atomic_write, sync_folder
from teacher_cache.storage.index import Change, quarantine_key, shard_key
from teacher_cache.storage.manifest import CORPORA
from teacher_cache.table.cache import CORPUS_JSON, INDEX, SPACE_JSON, TeacherCache
from teacher_cache.table.view import SPACES
from teacher_cache.tokens.token_columns import TOKEN_ARRAYS


@dataclass(frozen=True)
class Freed:
    """One thing that is removed, or would be.

    Attributes:
        what: "leftover", "damaged", "unpublished space", "old array", "old row list", "space" or "corpus".
        where: file or folder, relative to the cache's.
        bytes: of its files; 0 of a symbolic link.
    """

    what: str
    where: str
    bytes: int


@dataclass(frozen=True)
class ReclaimReport:
    """What was removed.

    Attributes:
        kept: what looks like a leftover and is too much to be one, with the reason.
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
    """Remove what no reader needs, and the spaces and corpora that are named.

    Args:
        spaces: to be dropped, by any name that `TeacherCache.space` takes. Texts and other spaces stay.
        corpora: to be dropped; their texts stay, as row numbers never change.
        dry_run: remove nothing, only tell.

    Raises:
        CacheNotFound, FormatVersionError, DamagedCache, CacheLocked: it cannot be opened for writing.
        SpaceNotFound, CorpusNotFound: no such space or corpus; nothing was removed.
    """
    with TeacherCache.open(path, "r+") as cache:
        slugs = [_slug(cache, space) for space in spaces]
        for name in corpora:
            if name not in cache.corpora() and name not in _names(cache.path / CORPORA):
                raise CorpusNotFound(
                    f"no corpus {name!r} in {cache.path}; it has: {', '.join(sorted(cache.corpora())) or 'none'}"
                )
        sweep = _Sweep(cache, dry_run)
        sweep.leftovers()
        for slug in dict.fromkeys(slugs):
            sweep.drop_space(slug)
        for name in dict.fromkeys(corpora):
            sweep.drop_corpus(name)
        sweep.old_in_spaces(dropped=slugs)
        sweep.old_in_corpora(dropped=corpora)
        return ReclaimReport(sweep.freed, sweep.kept, dry_run)


def forget_corpus(path: str | Path, name: str) -> None:
    """Drop a corpus and nothing else; its texts stay, as row numbers never change.

    Raises:
        CacheNotFound, FormatVersionError, DamagedCache, CacheLocked: it cannot be opened for writing.
    """
    with TeacherCache.open(path, "r+") as cache:
        _Sweep(cache, dry_run=False).drop_corpus(name)


def _slug(cache: TeacherCache, name: str) -> str:
    """The slug of a space by any of its names, or a folder of that name that the index does not know."""
    try:
        return cache.space_record(name).space.slug
    except SpaceNotFound:
        if name in _names(cache.path / SPACES):
            return name
        raise


class _Sweep:
    """One pass over a cache that is open for writing."""

    def __init__(self, cache: TeacherCache, dry_run: bool) -> None:
        self.cache = cache
        self.root = cache.path.resolve()
        self.dry_run = dry_run
        self.freed: list[Freed] = []
        self.kept: list[str] = []

    def leftovers(self) -> None:
        """Files of interrupted writes, which are nobody's while we hold the lock; and what was set aside."""
        for folder, names, files in os.walk(self.cache.path):
            if Path(folder) == self.cache.path:
                names[:] = [name for name in names if name not in (DAMAGED, INDEX)]
            for name in [*names, *files]:
                if name.endswith(TEMPORARY_SUFFIX):
                    self._remove("leftover", Path(folder) / name)
            names[:] = [name for name in names if not name.endswith(TEMPORARY_SUFFIX)]
        if os.path.lexists(self.cache.path / DAMAGED):
            self._remove("damaged", self.cache.path / DAMAGED)

    def drop_space(self, slug: str) -> None:
        """Forget a space in one transaction, then remove its folder."""
        index, record = self.cache.index, self.cache.space_records().get(slug)
        if record is not None and not self.dry_run:
            folder = self.cache.path / SPACES / slug
            arrays = {record.array, *(array.name for array in folder.glob("vectors*.zarr"))}
            names = [replace(record, array=array).array_name for array in sorted(arrays)]
            names += [f"{record.name}/{array}" for array in TOKEN_ARRAYS]
            names += [f"{record.name}/{array.name}" for array in sorted(folder.glob("alignment-*.zarr"))]
            changes = [change for name in names for change in self._forgotten(name)]
            changes += [
                Change("quarantine", quarantine_key(name, row), None)
                for name in (slug, *names)
                for row in index.quarantined(name)
            ]
            index.commit([*changes, Change("spaces", slug.encode(), None)])
        self._remove("space", self.cache.path / SPACES / slug)

    def _forgotten(self, array: str) -> list[Change]:
        """What takes the shards of an array out of the index."""
        return [Change("shards", shard_key(array, number), None) for number, _ in self.cache.index.iter_shards(array)]

    def drop_corpus(self, name: str) -> None:
        """Forget a corpus, then remove its row list."""
        if not self.dry_run:
            self.cache.index.commit([Change("corpora", name.encode(), None)])
        self._remove("corpus", self.cache.path / CORPORA / name)

    def old_in_spaces(self, *, dropped: Sequence[str]) -> None:
        """Spaces and token columns that were never published, and arrays that a conversion has left."""
        known = self.cache.space_records()
        for slug in _names(self.cache.path / SPACES):
            folder = self.cache.path / SPACES / slug
            if slug in dropped or slug.endswith(TEMPORARY_SUFFIX):
                continue
            if slug in known:
                columns = known[slug].columns
                named = {known[slug].array, *(columns.arrays if columns is not None else ())}
                found = [*sorted(folder.glob("vectors*.zarr")), *(folder / array for array in TOKEN_ARRAYS)]
                old = [array for array in found if array.name not in named and os.path.lexists(array)]
                if old and not self.dry_run and folder.resolve().is_relative_to(self.root):
                    # A conversion that was killed after its commit has not said so here, where a lost index would
                    # be made again from; a build that was killed before its first one has said too much.
                    with atomic_write(folder / SPACE_JSON) as file:
                        file.write(known[slug].to_json())
                if not self.dry_run:
                    gone = [replace(known[slug], array=array.name).array_name for array in old]
                    self.cache.index.commit([change for name in gone for change in self._forgotten(name)])
                for array in old:
                    self._remove("old array", array)
                continue
            shards = sum(1 for _ in folder.glob("vectors*.zarr/c/*/0"))
            if shards:
                self.kept.append(
                    f"{folder.relative_to(self.cache.path)}: {shards} shards of vectors that the index does not know; "
                    f"`tcache gc {self.cache.path} --space {slug}` removes them"
                )
            else:
                self._remove("unpublished space", folder)

    def old_in_corpora(self, *, dropped: Sequence[str]) -> None:
        """Row and domain lists that no corpus uses any more; a folder that holds anything else stays."""
        known = self.cache.corpora()
        for name in _names(self.cache.path / CORPORA):
            folder = self.cache.path / CORPORA / name
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
                if os.path.lexists(folder / file) and not file.endswith(TEMPORARY_SUFFIX):
                    self._remove("old row list", folder / file)

    def _remove(self, what: str, path: Path) -> None:
        where = str(path.relative_to(self.cache.path))
        if not path.parent.resolve().is_relative_to(self.root):
            self.kept.append(f"{where}: a symbolic link leads out of the cache's folder; remove it by hand")
            return
        if not os.path.lexists(path):
            return
        self.freed.append(Freed(what, where, _bytes(path)))
        if self.dry_run:
            return
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            going = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
            os.rename(path, going)  # from here on a leftover, however far a kill lets us get
            shutil.rmtree(going)
        sync_folder(path.parent)


def _bytes(path: Path) -> int:
    """Of a file, or of everything below a folder; links count nothing."""
    if path.is_symlink():
        return 0
    if not path.is_dir():
        return path.stat().st_size
    return sum(_bytes(entry) for entry in path.iterdir())


def _names(folder: Path) -> list[str]:
    """Folders in a folder, links to folders among them."""
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []
