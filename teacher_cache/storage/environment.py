"""One LMDB handle per file and process, shared by everything in the process and closed with its last user.

LMDB allows one handle of a file per process. It is never used after a fork, which would corrupt the reader table.
"""

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lmdb

from teacher_cache.errors import CacheError, CacheNotFound, DamagedCache, DiskFull
from teacher_cache.storage.files import DISK_FULL_HINT

DATA = "data.mdb"
LOCK = "lock.mdb"
FIRST_MAP_BYTES = 64 * 2**20
MAX_READERS = 1024
# LMDB may leave out pages at the end that one transaction took and freed: at most this many, fewer in a small index.
UNWRITTEN_PAGES = 16

# Held while an environment is opened, read, written or closed. One lock for all of them: the garbage collector may
# close one while another is read, and separate locks would be taken in no fixed order.
lock = threading.RLock()
# When a forked child closes its copy of a handle, it removes the parent's open transactions from the reader table.
# So a fork waits until no other thread has a transaction.
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


class Environment:
    """The LMDB handle of an index in this process, closed when its last `Index` releases it.

    Users are counted because LMDB must close a file before it is opened again, and garbage collection may be late.
    """

    def __init__(self, folder: Path, names: Sequence[str], *, writable: bool, sealed: bool) -> None:
        self.folder = folder
        self.names = names
        self.sealed = sealed
        self.repair_hint = f"`tcache {'seal' if sealed else 'reindex'}` rebuilds it"
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
                self.env.reader_check()  # killed readers would keep old pages in use
            self.databases = {name: self.env.open_db(name.encode(), create=writable) for name in self.names}
        except lmdb.ReadonlyError as error:
            raise not_allowed(self.folder) from error
        except lmdb.Error as error:
            message = f"the index at {self.folder} cannot be opened: {error}; {self.repair_hint}"
            raise lmdb_failure(error, self.folder, DamagedCache(message)) from error
        self.writable = writable

    def _check_length(self) -> None:
        """Check the file's size: reading a mapped page past its end would kill the process."""
        size = os.stat(self.folder / DATA).st_size
        page = self.env.stat()["psize"]
        pages = self.env.info()["last_pgno"] + 1
        expected = pages * page
        if size < expected - min(UNWRITTEN_PAGES, max(4, pages // 8)) * page:
            self.env.close()
            raise DamagedCache(
                f"the index at {self.folder} is truncated: {size} bytes, expected {expected}; {self.repair_hint}"
            )

    def make_writable(self) -> None:
        """Open the file again for writing, for all users in this process."""
        if not self.writable:
            self.env.close()
            self._open(writable=True)

    def begin(self, *, write: bool = False) -> Any:
        """A transaction. Hold `lock`: the map moves when it grows."""
        try:
            return self.env.begin(write=write)
        except lmdb.MapResizedError:  # another process has grown the file since it was opened here
            self.env.set_mapsize(0)
            return self.env.begin(write=write)
        except lmdb.ReadersFullError as error:
            raise CacheError(
                f"the index at {self.folder} already has {MAX_READERS} readers, its maximum; a copy made by "
                "`tcache seal` has no maximum"
            ) from error


# By device and inode of data.mdb: a path has many spellings and may later name another file.
_environments: dict[tuple[int, int], Environment] = {}


def acquire(folder: Path, names: Sequence[str], *, writable: bool, sealed: bool) -> Environment:
    """This process's environment of `folder`; return it with `release`. A sealed file never changes: it has no lock."""
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
            f"no sealed copy of the index at {folder}: `tcache seal` makes one, where the cache is writable"
            if sealed
            else f"no index at {folder}: not a teacher cache, or its index was deleted"
        )
    # On a read-only file system LMDB would read without the lock, while another machine may write.
    if not sealed and not lockable(folder):
        raise not_allowed(folder)


def _known(folder: Path) -> Environment | None:
    try:
        found = _environments.get(_file_of(folder))
    except FileNotFoundError:
        return None
    if found is not None and found.pid != os.getpid():
        found.env.close()  # inherited by fork: closes this process's copy only
        return None
    return found


def exists(folder: Path) -> bool:
    return (folder / DATA).is_file()


def lockable(folder: Path) -> bool:
    """Whether this process may write to the lock file, which also readers of the index write to."""
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
        f"no permission to write to {folder / LOCK}, which reading the index needs: run `tcache seal {folder.parent}` "
        "where it is writable; the sealed copy is then read here"
    )


def lmdb_failure(error: lmdb.Error, folder: Path, other: CacheError) -> CacheError:
    """A `DiskFull` if the disk of the folder is full, otherwise `other`."""
    # lmdb has no exception for an exceeded quota.
    if isinstance(error, lmdb.DiskError) or os.strerror(errno.EDQUOT) in str(error):
        return DiskFull(f"no space left on the disk of {folder}; {DISK_FULL_HINT}")
    return other
