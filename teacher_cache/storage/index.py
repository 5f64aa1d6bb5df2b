"""The LMDB index: which text has which row, and the truth about what is complete.

Readers believe this and nothing else: a shard file without a record here does not exist, and a row whose
presence bit is not set does not either. Everything a build promises becomes true in one transaction.

LMDB allows one handle of an index in a process: whoever opens the same one there, to read or to write, shares
it. It is opened lazily in each process and never used across a fork or a pickle: a handle that crosses a fork
corrupts its readers' table. It must not lie on a network file system.
"""

import errno
import os
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import numpy.typing as npt

from teacher_cache.errors import CacheError, CacheNotFound, DamagedCache, DiskFull

# Named databases. `keys`: 16-byte text key -> row. `shards`: array name, 0, shard number -> ShardRecord.
# `quarantine`: space, 0, row -> reason. `corpora`, `spaces`: name -> JSON. `meta`: b"rows" -> row count.
DATABASES = ("meta", "keys", "shards", "corpora", "spaces", "quarantine")
DATA = "data.mdb"
FIRST_MAP_BYTES = 64 * 2**20
MAX_READERS = 1024

_ROW = struct.Struct("<Q")
_ORDERED = struct.Struct(">Q")  # big-endian, so that LMDB's byte order is number order
_RECORD = struct.Struct("<16sdQ")


@dataclass(frozen=True)
class Change:
    """One put, or with `value` None one delete."""

    database: str
    key: bytes
    value: bytes | None


@dataclass(frozen=True)
class ShardRecord:
    """What the index promises about one shard.

    Attributes:
        digest: 16 bytes over the values of the present rows.
        worst_error: largest 1 - cos of a stored row against what the teacher said; 0 for texts.
        size: of the shard file, in bytes.
        present: `(shard_rows,)` bool.
    """

    digest: bytes
    worst_error: float
    size: int
    present: npt.NDArray[np.bool_]

    def pack(self) -> bytes:
        return _RECORD.pack(self.digest, self.worst_error, self.size) + np.packbits(self.present).tobytes()

    @classmethod
    def unpack(cls, data: bytes) -> "ShardRecord":
        digest, worst_error, size = _RECORD.unpack_from(data)
        present = np.unpackbits(np.frombuffer(data, np.uint8, offset=_RECORD.size)).astype(bool)
        return cls(digest, worst_error, size, present)


def shard_key(array: str, number: int) -> bytes:
    return array.encode() + b"\0" + _ORDERED.pack(number)


def quarantine_key(space: str, row: int) -> bytes:
    return space.encode() + b"\0" + _ORDERED.pack(row)


def row_value(row: int) -> bytes:
    return _ROW.pack(row)


class _Environment:
    """A process's one handle of an index; it closes when the last `Index` that uses it lets go.

    Counted, not left to the garbage collector: LMDB must have closed before the same file is opened again.
    """

    def __init__(self, folder: Path, *, writable: bool) -> None:
        self.folder = folder
        self.pid = os.getpid()
        self.users = 0
        # A grown map moves: no transaction of another thread may be open then.
        self.lock = threading.RLock()
        self._open(writable=writable)

    def _open(self, *, writable: bool) -> None:
        try:
            self.env = lmdb.open(
                str(self.folder),
                map_size=FIRST_MAP_BYTES,
                readonly=not writable,
                create=writable,
                max_dbs=len(DATABASES),
                max_readers=MAX_READERS,
                meminit=False,
            )
            self.env.reader_check()  # readers that were killed would keep old pages from being used again
            self.databases = {name: self.env.open_db(name.encode(), create=writable) for name in DATABASES}
        except lmdb.ReadonlyError as error:
            raise CacheError(
                f"not allowed to open the index at {self.folder}: {error}; even a reader writes to its lock.mdb"
            ) from error
        except lmdb.Error as error:
            if _is_disk_full(error):
                raise _disk_full(self.folder) from error
            raise DamagedCache(f"the index at {self.folder} cannot be opened: {error}") from error
        self.writable = writable

    def make_writable(self) -> None:
        """Open again for a writer; readers in this process come along."""
        with self.lock:
            if not self.writable:
                self.env.close()
                self._open(writable=True)

    def begin(self, *, write: bool = False) -> Any:
        """A transaction; hold the lock."""
        try:
            return self.env.begin(write=write)
        except lmdb.MapResizedError:  # another process has grown the file since it was opened here
            self.env.set_mapsize(0)
            return self.env.begin(write=write)


# By device and file number of data.mdb, as a path has many spellings and may come to mean another file.
_environments: dict[tuple[int, int], _Environment] = {}
_registry = threading.RLock()  # the garbage collector may close one index while another is being opened


def _acquire(folder: Path, *, writable: bool) -> _Environment:
    """This process's environment of the index in `folder`; give it back with `_release`."""
    with _registry:
        known = _known(folder)
        if known is None:
            if not writable and not Index.exists(folder):
                raise CacheNotFound(f"no index at {folder}: not a teacher cache, or its index was deleted")
            known = _Environment(folder, writable=writable)
            _environments[_file_of(folder)] = known
        elif writable:
            known.make_writable()
        known.users += 1
        return known


def _known(folder: Path) -> _Environment | None:
    try:
        found = _environments.get(_file_of(folder))
    except FileNotFoundError:
        return None
    if found is not None and found.pid != os.getpid():
        found.env.close()  # inherited by fork: only this process's copy of the handle goes
        return None
    return found


def _file_of(folder: Path) -> tuple[int, int]:
    status = os.stat(folder / DATA)
    return status.st_dev, status.st_ino


def _release(environment: _Environment) -> None:
    with _registry:
        environment.users -= 1
        if environment.users == 0:
            environment.env.close()
            for file in [file for file, known in _environments.items() if known is environment]:
                del _environments[file]


class Index:
    """One LMDB environment with the databases above. Threads of a process take turns."""

    def __init__(self, folder: Path, *, writable: bool) -> None:
        self.folder = folder
        self.writable = writable
        self._shared: _Environment | None = None
        self._snapshot: tuple[Any, dict[str, Any]] | None = None

    @staticmethod
    def exists(folder: Path) -> bool:
        return (folder / DATA).is_file()

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["folder"], writable=False)  # type: ignore[misc]

    def _environment(self) -> _Environment:
        if self._shared is not None and self._shared.pid != os.getpid():
            self._let_go()
        if self._shared is None:
            self._shared = _acquire(self.folder, writable=self.writable)
        return self._shared

    def _let_go(self) -> None:
        shared, self._shared = self._shared, None
        if shared is not None:
            _release(shared)

    __del__ = _let_go

    def close(self) -> None:
        """Let go of the environment. Reading opens it again; writing is over: the lock may be another's."""
        self._let_go()
        self.writable = False

    @contextmanager
    def _reading(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """A read transaction and the databases."""
        if self._snapshot is not None:
            yield self._snapshot
            return
        shared = self._environment()
        with shared.lock, shared.begin() as txn:
            yield txn, shared.databases

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Every read of this thread's block sees the same state, whatever a writer commits meanwhile."""
        with self._reading() as state:
            self._snapshot = state
            try:
                yield
            finally:
                self._snapshot = None

    def commit(self, changes: Iterable[Change]) -> None:
        """Apply all changes in one durable transaction, growing the map as often as it takes.

        Raises:
            DiskFull: nothing of the transaction happened.
            CacheError: nor did it then; the index is open for reading only, or LMDB refused.
        """
        if not self.writable:
            raise CacheError(f'the index at {self.folder} is not open for writing; open the cache with mode "a"')
        changes = list(changes)
        shared = self._environment()
        with shared.lock:
            while True:
                try:
                    self._apply(shared, changes)
                    return
                except lmdb.MapFullError:
                    shared.env.set_mapsize(shared.env.info()["map_size"] * 2)
                except lmdb.Error as error:
                    if _is_disk_full(error):
                        raise _disk_full(self.folder) from error
                    raise CacheError(
                        f"the index at {self.folder} refused a commit: {error}; what was committed before is "
                        "intact: run the same command again"
                    ) from error

    @staticmethod
    def _apply(shared: _Environment, changes: list[Change]) -> None:
        with shared.begin(write=True) as txn:
            for change in changes:
                database = shared.databases[change.database]
                if change.value is None:
                    txn.delete(change.key, db=database)
                else:
                    txn.put(change.key, change.value, db=database)

    def rows(self) -> int:
        """How many texts the table has."""
        with self._reading() as (txn, databases):
            value = txn.get(b"rows", db=databases["meta"])
        return 0 if value is None else int(_ROW.unpack(value)[0])

    def key_count(self) -> int:
        with self._reading() as (txn, databases):
            return int(txn.stat(databases["keys"])["entries"])

    def find(self, keys: Sequence[bytes]) -> npt.NDArray[np.int64]:
        """Row of each key, -1 where the text is not in the table."""
        rows = np.full(len(keys), -1, dtype=np.int64)
        with self._reading() as (txn, databases):
            database = databases["keys"]
            for place, key in enumerate(keys):
                value = txn.get(key, db=database)
                if value is not None:
                    rows[place] = _ROW.unpack(value)[0]
        return rows

    def shard(self, array: str, number: int) -> ShardRecord | None:
        with self._reading() as (txn, databases):
            value = txn.get(shard_key(array, number), db=databases["shards"])
        return None if value is None else ShardRecord.unpack(value)

    def shards(self, array: str) -> dict[int, ShardRecord]:
        """Every shard record of one array, by shard number."""
        return {_ORDERED.unpack(key)[0]: ShardRecord.unpack(value) for key, value in self._under("shards", array)}

    def quarantined(self, space: str) -> dict[int, str]:
        """Row -> reason, for rows whose vector was refused."""
        return {_ORDERED.unpack(key)[0]: value.decode() for key, value in self._under("quarantine", space)}

    def _under(self, database: str, name: str) -> list[tuple[bytes, bytes]]:
        prefix = name.encode() + b"\0"
        found = []
        with self._reading() as (txn, databases), txn.cursor(db=databases[database]) as cursor:
            if cursor.set_range(prefix):
                for key, value in cursor:
                    if not key.startswith(prefix):
                        break
                    found.append((key[len(prefix) :], value))
        return found

    def records(self, database: str) -> dict[str, bytes]:
        """All of `corpora` or `spaces`: name -> JSON bytes."""
        with self._reading() as (txn, databases), txn.cursor(db=databases[database]) as cursor:
            return {key.decode(): value for key, value in cursor}

    def record(self, database: str, name: str) -> bytes | None:
        with self._reading() as (txn, databases):
            value: bytes | None = txn.get(name.encode(), db=databases[database])
        return value


def _is_disk_full(error: lmdb.Error) -> bool:
    # A quota has no class of its own.
    return isinstance(error, lmdb.DiskError) or os.strerror(errno.EDQUOT) in str(error)


def _disk_full(folder: Path) -> DiskFull:
    return DiskFull(
        f"no space left on the disk of {folder}; what was committed before is intact: free some space and "
        "run the same command again"
    )
