"""A process's handle of an LMDB file: opened once, shared by all who use it there, closed with the last.

LMDB allows one handle of a file in a process. It is never used across a fork: a handle that crosses one corrupts
its readers' table.
"""

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lmdb

from teacher_cache.errors import CacheError, CacheNotFound, DamagedCache, DiskFull

DATA = "data.mdb"
LOCK = "lock.mdb"
FIRST_MAP_BYTES = 64 * 2**20
MAX_READERS = 1024
# LMDB need not write pages at the end that were freed in the transaction that took them: so many in a large index,
# fewer in a small one.
UNWRITTEN_PAGES = 16

# Held while an environment is opened, read, written or closed. One for all of them: the garbage collector may close
# one in the middle of reading another, and a lock for each would be taken in no fixed order.
lock = threading.RLock()
# A forked child closes its copy of a handle, which strikes every transaction open in it off the table of readers,
# the parent's: a fork waits until no other thread has one.
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


class Environment:
    """A process's one handle of an index; it closes when the last `Index` that uses it lets go.

    Counted, not left to the garbage collector: LMDB must have closed before the same file is opened again.
    """

    def __init__(self, folder: Path, names: Sequence[str], *, writable: bool, sealed: bool) -> None:
        self.folder = folder
        self.names = names
        self.sealed = sealed
        self.mended_by = f"`tcache {'seal' if sealed else 'reindex'}` makes it anew"
        self.pid = os.getpid()
        self.users = 0
        self._open(writable=writable)

    def _open(self, *, writable: bool) -> None:
        try:
            self.env = lmdb.open(
                str(self.folder),
                map_size=FIRST_MAP_BYTES,
                readonly=not writable,
                create=writable,
                lock=not self.sealed,
                max_dbs=len(self.names),
                max_readers=MAX_READERS,
                meminit=False,
            )
            self._check_length()
            if not self.sealed:
                self.env.reader_check()  # readers that were killed would keep old pages from being used again
            self.databases = {name: self.env.open_db(name.encode(), create=writable) for name in self.names}
        except lmdb.ReadonlyError as error:
            raise not_allowed(self.folder) from error
        except lmdb.Error as error:
            if is_disk_full(error):
                raise disk_full(self.folder) from error
            raise DamagedCache(f"the index at {self.folder} cannot be opened: {error}; {self.mended_by}") from error
        self.writable = writable

    def _check_length(self) -> None:
        """Pages that are mapped behind the end of the file would end the process, not raise anything."""
        size = os.stat(self.folder / DATA).st_size
        page = self.env.stat()["psize"]
        pages = self.env.info()["last_pgno"] + 1
        expected = pages * page
        if size < expected - min(UNWRITTEN_PAGES, max(4, pages // 8)) * page:
            self.env.close()
            raise DamagedCache(
                f"the index at {self.folder} is cut short: {size} bytes, expected {expected}; {self.mended_by}"
            )

    def make_writable(self) -> None:
        """Open again for a writer; readers in this process come along."""
        if not self.writable:
            self.env.close()
            self._open(writable=True)

    def begin(self, *, write: bool = False) -> Any:
        """A transaction; hold the lock, as a map that grows moves."""
        try:
            return self.env.begin(write=write)
        except lmdb.MapResizedError:  # another process has grown the file since it was opened here
            self.env.set_mapsize(0)
            return self.env.begin(write=write)
        except lmdb.ReadersFullError as error:
            raise CacheError(
                f"{MAX_READERS} others are reading the index at {self.folder}, and it has room for no more; a copy "
                "that `tcache seal` makes takes any number"
            ) from error


# By device and file number of data.mdb, as a path has many spellings and may come to mean another file.
_environments: dict[tuple[int, int], Environment] = {}


def acquire(folder: Path, names: Sequence[str], *, writable: bool, sealed: bool) -> Environment:
    """This process's environment of the databases in `folder`; give it back with `release`.

    Args:
        sealed: it never changes, so it needs no lock.

    Raises:
        CacheNotFound: there is nothing to read.
        DamagedCache: it cannot be opened.
        CacheError: its lock file may not be written to.
    """
    with lock:
        known = _known(folder)
        if known is None:
            if not writable:
                _check_readable(folder, sealed=sealed)
            known = Environment(folder, names, writable=writable, sealed=sealed)
            _environments[_file_of(folder)] = known
        elif writable:
            known.make_writable()
        known.users += 1
        return known


def _check_readable(folder: Path, *, sealed: bool) -> None:
    if not exists(folder):
        raise CacheNotFound(
            f"no sealed copy of the index at {folder}: `tcache seal` makes one, where the cache is written"
            if sealed
            else f"no index at {folder}: not a teacher cache, or its index was deleted"
        )
    # On a read-only file system LMDB would go without the lock, and somebody may write on the other side of it.
    if not sealed and not lockable(folder):
        raise not_allowed(folder)


def _known(folder: Path) -> Environment | None:
    try:
        found = _environments.get(_file_of(folder))
    except FileNotFoundError:
        return None
    if found is not None and found.pid != os.getpid():
        found.env.close()  # inherited by fork: only this process's copy of the handle goes
        return None
    return found


def exists(folder: Path) -> bool:
    return (folder / DATA).is_file()


def lockable(folder: Path) -> bool:
    """Whether this process may write to the lock file, as even a reader of a live index does."""
    file = folder / LOCK
    return os.access(file if file.exists() else folder, os.W_OK)


def _file_of(folder: Path) -> tuple[int, int]:
    status = os.stat(folder / DATA)
    return status.st_dev, status.st_ino


def release(environment: Environment) -> None:
    with lock:
        environment.users -= 1
        if environment.users == 0:
            environment.env.close()
            for file in [file for file, known in _environments.items() if known is environment]:
                del _environments[file]


def not_allowed(folder: Path) -> CacheError:
    return CacheError(
        f"not allowed to write to {folder / LOCK}, as even a reader of the index must: run `tcache seal "
        f"{folder.parent}` where that is allowed, and its copy is read here"
    )


def is_disk_full(error: lmdb.Error) -> bool:
    # A quota has no class of its own.
    return isinstance(error, lmdb.DiskError) or os.strerror(errno.EDQUOT) in str(error)


def disk_full(folder: Path) -> DiskFull:
    return DiskFull(
        f"no space left on the disk of {folder}; what was committed before is intact: free some space and "
        "run the same command again"
    )
