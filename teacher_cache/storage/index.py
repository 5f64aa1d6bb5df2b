"""The LMDB index: the row of every text, and the committed record of every shard.

Readers use the index alone: a shard file without a record does not exist for them, nor does a row whose presence bit
is not set. A commit is one transaction.

All users of an index in a process share one LMDB handle, which is opened lazily and never used after a fork or in a
pickle. The index must not be on a network file system, and readers need write access to its lock file.

A sealed copy has neither limit: the same databases in one file that never changes, written in key order so that its
pages are full. It needs no lock, so any number of machines may read it from any file system.
"""

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from heapq import merge
from itertools import islice
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import numpy.typing as npt

from teacher_cache.errors import CacheError, DamagedCache
from teacher_cache.storage import environment

# Named databases. `keys`: 16-byte text key -> row. `shards`: array name, 0, shard number -> ShardRecord.
# `quarantine`: space, 0, row -> reason. `corpora`, `spaces`: name -> JSON. `meta`: b"rows" -> row count, and in
# a sealed copy b"cache" -> the id of its cache, b"sealed" -> when it was made.
DATABASES = ("meta", "keys", "shards", "corpora", "spaces", "quarantine")
# Records read in one transaction while iterating.
RECORDS_AT_A_TIME = 256
# Entries in one write transaction of a sealed copy; 34 bytes each, in memory until it ends.
SEALED_AT_A_TIME = 2**18

_ROW = struct.Struct("<Q")
_NO_ROW = b"\xff" * 8  # -1 when read as int64
_ORDERED = struct.Struct(">Q")  # big-endian, so that LMDB's byte order is number order
_RECORD = struct.Struct("<16sdQII")


@dataclass(frozen=True)
class Change:
    """One put, or with `value` None one delete."""

    database: str
    key: bytes
    value: bytes | None


@dataclass(frozen=True)
class ShardRecord:
    """Committed record of one shard."""

    digest: bytes  # 16 bytes over the values of the present rows
    worst_error: float  # largest 1 - cos between a stored row and the teacher output; 0 for texts
    size: int  # of the shard file, in bytes
    present: npt.NDArray[np.bool_]  # (shard_rows,)

    def pack(self) -> bytes:
        gaps = np.flatnonzero(~self.present)
        rows = len(self.present)
        first = int(gaps[0]) if len(gaps) else rows
        header = _RECORD.pack(self.digest, self.worst_error, self.size, rows, first)
        # Nearly all shards hold their first rows only, and the presence bits are most of the record.
        return header + np.packbits(self.present).tobytes() if self.present[first:].any() else header

    @classmethod
    def unpack(cls, data: bytes) -> "ShardRecord":
        digest, worst_error, size, rows, first = _RECORD.unpack_from(data)
        bits = np.frombuffer(data, np.uint8, offset=_RECORD.size)
        present = np.unpackbits(bits, count=rows).astype(bool) if len(bits) else np.arange(rows) < first
        return cls(digest, worst_error, size, present)


def shard_key(array: str, number: int) -> bytes:
    return array.encode() + b"\0" + _ORDERED.pack(number)


def quarantine_key(space: str, row: int) -> bytes:
    return space.encode() + b"\0" + _ORDERED.pack(row)


def row_value(row: int) -> bytes:
    return _ROW.pack(row)


class Index:
    """The databases above in one LMDB environment, opened on first use. Threads of a process take turns.

    Args:
        sealed_copy_of: id of the cache, if the folder holds a sealed copy.
    """

    def __init__(self, folder: Path, *, writable: bool, sealed_copy_of: str | None = None) -> None:
        self.folder = folder
        self.writable = writable
        self.sealed_copy_of = sealed_copy_of
        self._shared: environment.Environment | None = None
        self._snapshot: tuple[Any, dict[str, Any]] | None = None

    exists = staticmethod(environment.exists)
    lockable = staticmethod(environment.lockable)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), self.folder, writable=False, sealed_copy_of=self.sealed_copy_of), ()

    def _environment(self) -> environment.Environment:
        if self._shared is not None and self._shared.pid != os.getpid():
            self._release()
        if self._shared is None:
            sealed = self.sealed_copy_of is not None
            self._shared = environment.acquire(self.folder, DATABASES, writable=self.writable, sealed=sealed)
            if self.sealed_copy_of is not None:
                self._check_identity(self.sealed_copy_of)
        return self._shared

    def _check_identity(self, cache: str) -> None:
        found = (self.record("meta", "cache") or b"").decode()
        if found != cache:
            self._release()
            raise CacheError(
                f"the sealed index at {self.folder} belongs to another cache (id {found or 'unknown'}, expected "
                f"{cache or 'unknown'}): run `tcache seal {self.folder.parent}` where the cache is writable"
            )

    def _release(self) -> None:
        shared, self._shared = self._shared, None
        if shared is not None:
            environment.release(shared)

    __del__ = _release

    def close(self) -> None:
        """Release the environment. Reading opens it again; writing ends, as another process may take the lock."""
        self._release()
        self.writable = False

    @contextmanager
    def _reading(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """A read transaction and the databases; DamagedCache if LMDB finds a damaged page."""
        if self._snapshot is not None:
            yield self._snapshot
            return
        shared = self._environment()
        try:
            with environment.lock, shared.begin() as txn:
                yield txn, shared.databases
        except lmdb.Error as error:
            raise DamagedCache(f"the index at {self.folder} cannot be read: {error}; {shared.repair_hint}") from error

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Every read in the block sees the same state, even if a writer commits; other threads wait."""
        with self._reading() as state:
            self._snapshot = state
            try:
                yield
            finally:
                self._snapshot = None

    def copy_sealed(self, path: Path, cache: str, when: str) -> None:
        """Write a snapshot of the index into the empty file `path`, in key order and with full pages.

        It is durable once the caller has synced the file. Meanwhile a writer cannot reuse freed pages, so its file
        grows more.

        Args:
            cache: id of the cache, to compare with `sealed_copy_of`.
            when: time for `as_of`.

        Raises:
            DiskFull: `path` is incomplete; nothing else has changed.
        """
        if self.sealed_copy_of is not None:
            raise CacheError(
                f"{self.folder.parent / 'index.lmdb'} is not writable here, and a sealed copy cannot be sealed again: "
                "run `tcache seal` where the cache is writable"
            )
        identity = [(b"cache", cache.encode()), (b"sealed", when.encode())]
        with self._reading() as (txn, databases):
            try:
                # Address space only: the file takes less than the source does.
                room = 2 * self.folder.joinpath(environment.DATA).stat().st_size + environment.FIRST_MAP_BYTES
                with lmdb.open(
                    str(path), subdir=False, lock=False, sync=False, map_size=room, max_dbs=len(databases)
                ) as copy:
                    for name, database in databases.items():
                        with txn.cursor(db=database) as cursor:
                            entries = merge(cursor, identity) if name == "meta" else iter(cursor)
                            if not _fill(copy, copy.open_db(name.encode()), entries):
                                raise DamagedCache(
                                    f"the index at {self.folder} is damaged: the keys of {name!r} are not in order; "
                                    "`tcache reindex` rebuilds it"
                                )
            except lmdb.Error as error:
                failure = CacheError(f"the index at {self.folder} cannot be sealed: {error}")
                raise environment.lmdb_failure(error, path.parent, failure) from error

    def commit(self, changes: Iterable[Change], *, keys: Sequence[bytes] = (), first_row: int = 0) -> None:
        """Apply all changes in one durable transaction; the map grows as needed.

        Keys of texts are random: the more of them one transaction adds, the more of them share a rewritten page.

        Args:
            keys: of new texts with rows from `first_row` on; the last one becomes the last row of the table.

        Raises:
            DiskFull: no space is left; nothing was changed.
            CacheError: the index is read-only, or LMDB failed; nothing was changed.
        """
        if not self.writable:
            raise CacheError(f'the index at {self.folder} is read-only; open the cache with mode "a"')
        changes = list(changes)
        if keys:
            changes.append(Change("meta", b"rows", row_value(first_row + len(keys))))
        entries = _sorted_entries(keys, first_row)
        shared = self._environment()
        with environment.lock:
            while True:
                try:
                    self._apply(shared, changes, entries)
                    return
                except lmdb.MapFullError:
                    shared.env.set_mapsize(shared.env.info()["map_size"] * 2)
                except lmdb.Error as error:
                    failure = CacheError(
                        f"the index at {self.folder} could not commit: {error}; what was committed before is "
                        "intact: run the same command again"
                    )
                    raise environment.lmdb_failure(error, self.folder, failure) from error

    @staticmethod
    def _apply(shared: environment.Environment, changes: list[Change], entries: list[tuple[bytes, bytes]]) -> None:
        with shared.begin(write=True) as txn:
            with txn.cursor(db=shared.databases["keys"]) as cursor:
                cursor.putmulti(entries)
            for change in changes:
                database = shared.databases[change.database]
                if change.value is None:
                    txn.delete(change.key, db=database)
                else:
                    txn.put(change.key, change.value, db=database)

    def rows(self) -> int:
        """Number of texts in the table."""
        value = self.record("meta", "rows")
        return 0 if value is None else int(_ROW.unpack(value)[0])

    @property
    def as_of(self) -> str:
        """End of a message about missing data: the age of a sealed copy; "" for the live index."""
        if self.sealed_copy_of is None:
            return ""
        when = (self.record("meta", "sealed") or b"an unknown time").decode()
        return f"; read from the index as sealed at {when}: `tcache seal` makes a newer copy"

    def key_count(self) -> int:
        with self._reading() as (txn, databases):
            return int(txn.stat(databases["keys"])["entries"])

    def find(self, keys: Sequence[bytes]) -> npt.NDArray[np.int64]:
        """Row of each key; -1 for unknown keys."""
        with self._reading() as (txn, databases):
            database, get = databases["keys"], txn.get
            values = b"".join([get(key, _NO_ROW, database) for key in keys])
        return np.frombuffer(values, dtype="<i8").astype(np.int64)

    def shard(self, array: str, number: int) -> ShardRecord | None:
        with self._reading() as (txn, databases):
            value = txn.get(shard_key(array, number), db=databases["shards"])
        return None if value is None else ShardRecord.unpack(value)

    def iter_shards(self, array: str) -> Iterator[tuple[int, ShardRecord]]:
        """All shard records of an array in order; no transaction is open between them."""
        for number, value in self._under("shards", array):
            yield number, ShardRecord.unpack(value)

    def quarantined(self, space: str, rows: range | None = None) -> dict[int, str]:
        """Row -> reason of the quarantined rows of a space, optionally within a range."""
        first, stop = (0, None) if rows is None else (rows.start, rows.stop)
        return {row: value.decode() for row, value in self._under("quarantine", space, first, stop)}

    def _under(self, database: str, name: str, first: int = 0, stop: int | None = None) -> Iterator[tuple[int, bytes]]:
        """(number, value) of a name's entries with `first <= number < stop`, in order."""
        prefix = name.encode() + b"\0"
        start = prefix + _ORDERED.pack(first)
        while True:
            with self._reading() as (txn, databases), txn.cursor(db=databases[database]) as cursor:
                found = list(islice(cursor, RECORDS_AT_A_TIME)) if cursor.set_range(start) else []
            for key, value in found:
                if not key.startswith(prefix):
                    return
                (number,) = _ORDERED.unpack_from(key, len(prefix))
                if stop is not None and number >= stop:
                    return
                yield number, value
            if len(found) < RECORDS_AT_A_TIME:
                return
            start = found[-1][0] + b"\0"  # the smallest key after it

    def records(self, database: str) -> dict[str, bytes]:
        """Name -> JSON bytes of all `corpora` or `spaces`."""
        with self._reading() as (txn, databases), txn.cursor(db=databases[database]) as cursor:
            return {key.decode(): value for key, value in cursor}

    def record(self, database: str, name: str) -> bytes | None:
        with self._reading() as (txn, databases):
            value: bytes | None = txn.get(name.encode(), db=databases[database])
        return value


def _sorted_entries(keys: Sequence[bytes], first_row: int) -> list[tuple[bytes, bytes]]:
    """Keys and row values, sorted by the first 8 bytes: neighbors in the tree are written together."""
    if not keys:
        return []
    heads = np.frombuffer(b"".join([key[:8] for key in keys]), dtype=">u8").astype(np.uint64)
    order = np.argsort(heads, kind="stable")
    values = (order + first_row).astype("<u8").view("V8").tolist()
    return list(zip([keys[place] for place in order.tolist()], values, strict=True))


def _fill(copy: Any, database: Any, entries: Iterator[tuple[bytes, bytes]]) -> bool:
    """Append entries, a transaction at a time, so that pages are full. False if they are not in order."""
    while True:
        with copy.begin(write=True) as txn, txn.cursor(db=database) as cursor:
            consumed, added = cursor.putmulti(islice(entries, SEALED_AT_A_TIME), append=True)
        if added < consumed:
            return False
        if consumed < SEALED_AT_A_TIME:
            return True
