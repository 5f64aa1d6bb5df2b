"""The LMDB index: which text has which row, and the truth about what is complete.

Readers believe this and nothing else: a shard file without a record here does not exist, and a row whose
presence bit is not set does not either. Everything a build promises becomes true in one transaction.

The environment is opened lazily in each process and dropped when the object is pickled: an LMDB handle that
crosses a fork corrupts its readers' table. It must not lie on a network file system.
"""

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import numpy.typing as npt

from teacher_cache.errors import CacheNotFound, DamagedCache, DiskFull

# Named databases. `keys`: 16-byte text key -> row. `shards`: array name, 0, shard number -> ShardRecord.
# `quarantine`: space, 0, row -> reason. `corpora`, `spaces`: name -> JSON. `meta`: b"rows" -> row count.
DATABASES = ("meta", "keys", "shards", "corpora", "spaces", "quarantine")
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
        bytes: size of the shard file.
        present: `(shard_rows,)` bool.
    """

    digest: bytes
    worst_error: float
    bytes: int
    present: npt.NDArray[np.bool_]

    def pack(self) -> bytes:
        return _RECORD.pack(self.digest, self.worst_error, self.bytes) + np.packbits(self.present).tobytes()

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


class Index:
    """One LMDB environment with the databases above."""

    def __init__(self, folder: Path, *, writable: bool) -> None:
        self.folder = folder
        self.writable = writable
        self._env: Any = None
        self._databases: dict[str, Any] = {}
        self._pid = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "writable": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["folder"], writable=state["writable"])  # type: ignore[misc]

    def _environment(self) -> Any:
        if self._env is not None and self._pid == os.getpid():
            return self._env
        if not self.writable and not (self.folder / "data.mdb").exists():
            raise CacheNotFound(f"no index at {self.folder}: not a teacher cache, or its index was deleted")
        try:
            env = lmdb.open(
                str(self.folder),
                map_size=FIRST_MAP_BYTES,
                readonly=not self.writable,
                create=self.writable,
                max_dbs=len(DATABASES),
                max_readers=MAX_READERS,
                meminit=False,
            )
            self._databases = {name: env.open_db(name.encode(), create=self.writable) for name in DATABASES}
        except lmdb.Error as error:
            if _is_disk_full(error):
                raise _disk_full(self.folder) from error
            raise DamagedCache(f"the index at {self.folder} cannot be opened: {error}") from error
        self._env, self._pid = env, os.getpid()
        return env

    def close(self) -> None:
        """Close this process's handle; a copy inherited by fork is only forgotten, closing it is the owner's."""
        if self._env is not None and self._pid == os.getpid():
            self._env.close()
        self._env = None
        self._databases = {}

    @contextmanager
    def _reading(self) -> Iterator[Any]:
        env = self._environment()
        try:
            txn = env.begin(buffers=False)
        except lmdb.MapResizedError:  # the writer has grown the file since we opened it
            env.set_mapsize(0)
            txn = env.begin(buffers=False)
        with txn:
            yield txn

    def commit(self, changes: Iterable[Change]) -> None:
        """Apply all changes in one durable transaction, growing the map as often as it takes.

        Raises:
            DiskFull: nothing of the transaction happened.
        """
        changes = list(changes)
        env = self._environment()
        while True:
            try:
                with env.begin(write=True) as txn:
                    for change in changes:
                        database = self._databases[change.database]
                        if change.value is None:
                            txn.delete(change.key, db=database)
                        else:
                            txn.put(change.key, change.value, db=database)
                return
            except lmdb.MapFullError:
                env.set_mapsize(env.info()["map_size"] * 2)
            except lmdb.Error as error:
                if _is_disk_full(error):
                    raise _disk_full(self.folder) from error
                raise

    def rows(self) -> int:
        """How many texts the table has."""
        with self._reading() as txn:
            value = txn.get(b"rows", db=self._databases["meta"])
        return 0 if value is None else int(_ROW.unpack(value)[0])

    def key_count(self) -> int:
        with self._reading() as txn:
            return int(txn.stat(self._databases["keys"])["entries"])

    def find(self, keys: Sequence[bytes]) -> npt.NDArray[np.int64]:
        """Row of each key, -1 where the text is not in the table."""
        rows = np.full(len(keys), -1, dtype=np.int64)
        with self._reading() as txn:
            database = self._databases["keys"]
            for place, key in enumerate(keys):
                value = txn.get(key, db=database)
                if value is not None:
                    rows[place] = _ROW.unpack(value)[0]
        return rows

    def shard(self, array: str, number: int) -> ShardRecord | None:
        with self._reading() as txn:
            value = txn.get(shard_key(array, number), db=self._databases["shards"])
        return None if value is None else ShardRecord.unpack(value)

    def shards(self, array: str) -> dict[int, ShardRecord]:
        """Every shard record of one array, by shard number."""
        return {
            _ORDERED.unpack(key)[0]: ShardRecord.unpack(value) for key, value in self._under("shards", array)
        }

    def quarantined(self, space: str) -> dict[int, str]:
        """Row -> reason, for rows whose vector was refused."""
        return {_ORDERED.unpack(key)[0]: value.decode() for key, value in self._under("quarantine", space)}

    def _under(self, database: str, name: str) -> list[tuple[bytes, bytes]]:
        prefix = name.encode() + b"\0"
        found = []
        with self._reading() as txn, txn.cursor(db=self._databases[database]) as cursor:
            if cursor.set_range(prefix):
                for key, value in cursor:
                    if not key.startswith(prefix):
                        break
                    found.append((key[len(prefix) :], value))
        return found

    def records(self, database: str) -> dict[str, bytes]:
        """All of `corpora` or `spaces`: name -> JSON bytes."""
        with self._reading() as txn, txn.cursor(db=self._databases[database]) as cursor:
            return {key.decode(): value for key, value in cursor}

    def record(self, database: str, name: str) -> bytes | None:
        with self._reading() as txn:
            value: bytes | None = txn.get(name.encode(), db=self._databases[database])
        return value


def _is_disk_full(error: lmdb.Error) -> bool:
    return isinstance(error, lmdb.DiskError) or "No space left" in str(error)


def _disk_full(folder: Path) -> DiskFull:
    return DiskFull(
        f"no space left on the disk of {folder}; what was committed before is intact: free some space and run "
        "the same command again"
    )
