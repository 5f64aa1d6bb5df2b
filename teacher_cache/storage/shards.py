"""Zarr v3 shards, written whole and read chunk by chunk; no other module reads or writes them.

The arrays are plain zarr v3 with the sharding codec, so zarr-python opens them; it also makes their metadata. Shards
are written here because a shard must appear on disk whole or not at all (temporary file, fsync, rename, fsync of the
folder), and read here because zarr-python takes ten to a hundred times as long to gather scattered rows
(docs/decisions/0008-shards.md).

A shard is replaced, never changed in place: a process that has the old file open keeps reading it.
"""

import json
import os
import resource
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from teacher_cache.errors import DamagedCache, FormatVersionError
from teacher_cache.storage.chunks import BLOBS, Bytes, NumberCodec, Rows, codec_from, crc32c
from teacher_cache.storage.files import atomic_write, sync_path
from teacher_cache.storage.shard_files import (
    EMPTY,
    OpenShard,
    ShardMap,
    consecutive_runs,
    read_all,
    read_cached,
    read_threads,
)

# Shard files that one array keeps open.
OPEN_SHARDS = max(32, min(2048, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8))
# Chunks read at a time: enough requests to keep a disk busy, few enough to stay in the processor's cache.
READ_CHUNKS = 32
# Fewest shards to open that are opened by threads.
THREADS_FROM = 4
# Bytes that blosc compresses at a time in an array of byte strings.
BLOB_BLOCK = 16_384
# Fewest neighboring rows that get a read of their own; shorter runs are copied out of the memory map.
RUN_ROWS = 8


@dataclass(frozen=True)
class ShardReceipt:
    """Digest and size in bytes of a written shard.

    The digest is over the values of the present rows, in row order. Absent rows and compression do not count, so it
    also checks the older rows of a shard that gets more.
    """

    digest: bytes
    size: int


class ShardedArray:
    """A zarr v3 array of shape `(rows, width)` numbers or `(rows,)` texts or byte strings, cut into shards of rows.

    Threads take turns. A pickle leaves out files and maps; both are safe across a fork.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        repair = "`tcache repair` writes it again"
        try:
            self.metadata: dict[str, Any] = json.loads((folder / "zarr.json").read_bytes())
        except FileNotFoundError:
            raise DamagedCache(f"{folder / 'zarr.json'} is missing; {repair}") from None
        except ValueError as error:
            raise DamagedCache(f"{folder / 'zarr.json'} cannot be read: {error}; {repair}") from error
        try:
            grid = self.metadata["chunk_grid"]["configuration"]["chunk_shape"]
            (sharding,) = self.metadata["codecs"]
            inner = sharding["configuration"]
            if sharding["name"] != "sharding_indexed" or inner.get("index_location", "end") != "end":
                raise KeyError("sharding_indexed with its index at the end")
            self.shard_rows = int(grid[0])
            self.chunk_rows = int(inner["chunk_shape"][0])
            self.codec = codec_from(self.metadata, inner["codecs"])
        except (KeyError, ValueError, TypeError) as error:
            raise FormatVersionError(
                f"{folder / 'zarr.json'} is not a sharded zarr v3 array that this version reads: {error}"
            ) from error
        self.chunks = self.shard_rows // self.chunk_rows
        self._tail: tuple[int, ...] = (self.codec.width,) if isinstance(self.codec, NumberCodec) else ()
        self._open: dict[int, OpenShard] = {}
        plain = self.codec if isinstance(self.codec, NumberCodec) and self.codec.plain else None
        self._plain = plain is not None
        self._map: ShardMap | None = None
        if plain is not None and ShardMap.supports(plain, self.shard_rows):
            self._map = ShardMap(plain, self.shard_rows, self.chunk_rows)
        self._lock = threading.RLock()
        self._buffer = np.empty(0, dtype=np.uint8)
        self._row = self.empty(1)
        _arrays.add(self)

    @classmethod
    def create(
        cls,
        folder: Path,
        *,
        dtype: str,
        width: int | None = None,
        shard_rows: int,
        chunk_rows: int,
        compressed: bool,
        checksum: bool = True,
        itemsize: int | None = None,
    ) -> Self:
        """Create an empty array.

        In zarr-python, missing rows of a float array read as NaN, so that they are not taken for vectors.

        Args:
            dtype: of numbers, "str" or `BLOBS`.
            width: numbers per row; None for strings and byte strings.
            compressed: by blosc (lz4 after a bit shuffle), strings by zstd.
            checksum: of chunks that are not compressed; compressed chunks always have one.
            itemsize: bytes of the numbers in byte strings.
        """
        import zarr
        from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec

        tail = () if width is None else (width,)
        compressors: list[Any] = []
        if compressed and dtype == "str":
            compressors.append(ZstdCodec(level=3))
        elif compressed:
            # With its default block size, which is much larger, blosc leaves token states uncompressed; this saves 5 %.
            compressors.append(
                BloscCodec(
                    cname="lz4",
                    clevel=5,
                    shuffle="bitshuffle",
                    typesize=itemsize or np.dtype(dtype).itemsize,
                    blocksize=BLOB_BLOCK if dtype == BLOBS else 0,
                )
            )
        if compressed or checksum:
            compressors.append(Crc32cCodec())
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*VariableLengthBytes.*does not have a Zarr V3 specification")
            zarr.create_array(
                store=str(folder),
                shape=(0, *tail),
                shards=(shard_rows, *tail),
                chunks=(chunk_rows, *tail),
                dtype=dtype,
                fill_value=float("nan") if width is not None and np.dtype(dtype).kind == "f" else None,
                compressors=compressors,
                overwrite=True,
            )
        metadata = (folder / "zarr.json").read_bytes()
        with atomic_write(folder / "zarr.json") as file:  # zarr-python does not fsync it
            file.write(metadata)
        sync_path(folder.parent)
        return cls(folder)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder,)

    @property
    def rows(self) -> int:
        return int(self.metadata["shape"][0])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the rows that `read` returns."""
        return self.codec.dtype

    def empty(self, rows: int) -> Rows:
        """An uninitialized array of this many rows."""
        return np.empty((rows, *self._tail), dtype=self.dtype)

    def shard_path(self, number: int) -> Path:
        return self.folder / "c" / (f"{number}/0" if self._tail else f"{number}")

    # Writing

    def grow(self, rows: int) -> None:
        """Raise the number of rows in the metadata to `rows`; shards are not changed."""
        path = self.folder / "zarr.json"
        self.metadata = json.loads(path.read_bytes())  # another instance may have raised it further
        if self.rows < rows:
            self.metadata["shape"][0] = rows
            with atomic_write(path) as file:
                file.write(json.dumps(self.metadata, indent=2).encode())

    def write_shard(self, number: int, rows: Rows, present: npt.NDArray[np.bool_]) -> ShardReceipt:
        """Write or replace one shard.

        Args:
            rows: `(n, width)` or `(n,)` with n <= shard_rows; absent rows are not stored.
            present: `(n,)`, which rows to store.
        """
        kept = np.flatnonzero(present)
        if len(kept) == self.shard_rows:
            body = values = np.ascontiguousarray(rows, dtype=self.dtype)
        else:
            body = self.codec.blank(self.shard_rows)
            values = body[kept] = rows[kept]
        chunks = np.unique(kept // self.chunk_rows).tolist()
        if self._plain and chunks:  # also those before them, so that a shard is one matrix
            chunks = range(chunks[-1] + 1)
        index = np.full((self.chunks, 2), EMPTY, dtype="<u8")
        offset = 0
        with atomic_write(self.shard_path(number)) as file:
            for chunk in chunks:
                data = self.codec.encode(body[chunk * self.chunk_rows : (chunk + 1) * self.chunk_rows])
                index[chunk] = (offset, len(data))
                offset += file.write(data)
            entries = index.tobytes()
            offset += file.write(entries + crc32c(entries))
        self.forget(number)
        return ShardReceipt(self.codec.digest(values), offset)

    # Reading

    def open_shard(self, number: int) -> OpenShard:
        """The shard's file, which stays open; its chunk index is read and checked once."""
        (shard,) = self.open_shards([number])
        return shard

    def open_shards(self, numbers: Sequence[int]) -> list[OpenShard]:
        """At most `OPEN_SHARDS` different shards; those not yet open are opened in parallel."""
        closed = [number for number in dict.fromkeys(numbers) if number not in self._open]
        paths = map(self.shard_path, closed)
        opening = read_threads().map if len(closed) >= THREADS_FROM else map
        opened = dict(zip(closed, opening(OpenShard, paths, repeat(self.chunks)), strict=False))
        shards = []
        for number in numbers:  # the least recently used come first, and are closed first
            shard = self._open.pop(number, None) or opened[number]
            self._open[number] = shard
            shards.append(shard)
        while len(self._open) > OPEN_SHARDS:
            self._open.pop(next(iter(self._open))).close()
        return shards

    def forget(self, number: int) -> None:
        """Open the shard's file again before the next read, because it was replaced."""
        with self._lock:
            shard = self._open.pop(number, None)
            if shard is not None:
                shard.close()
            if self._map is not None:
                self._map.forget(number)

    def by_shard(
        self, rows: npt.NDArray[np.int64]
    ) -> Iterator[tuple[int, npt.NDArray[np.intp], npt.NDArray[np.int64]]]:
        """(shard, positions in `rows`, positions in the shard) for each shard of `rows`, which are in any order."""
        shard_of = rows // self.shard_rows
        for number in np.unique(shard_of).tolist():
            places = np.flatnonzero(shard_of == number)
            yield number, places, rows[places] - number * self.shard_rows

    def read_shard(self, number: int, present: npt.NDArray[np.bool_]) -> Rows:
        """The present rows of a shard, in row order."""
        return self.read(np.flatnonzero(present) + number * self.shard_rows)

    def read_checked(self, number: int, present: npt.NDArray[np.bool_], digest: bytes) -> Rows:
        """The present rows of a shard, compared with their digest: a new digest would hide any damage."""
        rows = self.read_shard(number, present)
        if self.codec.digest(rows) != digest:
            raise DamagedCache(
                f"{self.shard_path(number)} does not hold the values that were written, so nothing is added to it; "
                "`tcache verify --deep` lists all damage"
            )
        return rows

    def read(self, rows: npt.NDArray[np.int64], out: Rows | None = None) -> Rows:
        """Rows of the array, in the order of `rows`; each chunk is read and decoded once.

        Args:
            rows: `(n,)`, any order, repeats allowed.
            out: returned instead of a new array; C-contiguous, `(n, width)` or `(n,)` of the array's dtype.
        """
        if out is None:
            out = self.empty(len(rows))
        elif out.dtype != self.dtype or out.shape != (len(rows), *self._tail) or not out.flags.c_contiguous:
            raise ValueError(f"expected a contiguous array {(len(rows), *self._tail)} of {self.dtype} to read into")
        if not len(rows):
            return out
        with self._lock:
            if self._map is not None:
                self._read_plain(self._map, rows, out)
            else:
                self._read_chunks(rows, out)
        return out

    def _read_plain(self, mapped: ShardMap, rows: npt.NDArray[np.int64], out: Rows) -> None:
        """Rows of a plain array: scattered cached rows out of the map, others by one read for each run."""
        if not mapped.map_rows(rows, self.open_shards):
            self._read_chunks(rows, out)  # written by another program, in another order
            return
        ends = rows[1:] - rows[:-1] != 1
        if (np.count_nonzero(ends) + 1) * RUN_ROWS > len(rows) and self._is_cached(mapped, rows):
            np.take(mapped.matrix, rows, axis=0, out=out, mode="clip")  # the default mode buffers the result
            return
        runs = consecutive_runs(rows, cut=self.shard_rows)
        for done in range(0, len(runs), OPEN_SHARDS):  # so that no file is closed before it is read
            group = runs[done : done + OPEN_SHARDS]
            places = [divmod(int(rows[start]), self.shard_rows) for start, _ in group]
            opened = self.open_shards([number for number, _ in places])
            reads = zip(opened, places, group, strict=True)
            self._fill([(shard, within * mapped.row_bytes, out[slice(*run)]) for shard, (_, within), run in reads])

    def _is_cached(self, mapped: ShardMap, rows: npt.NDArray[np.int64]) -> bool:
        """Whether the middle row is in the page cache, so that the others probably are."""
        number, within = divmod(int(rows[len(rows) // 2]), self.shard_rows)
        return read_cached(self.open_shard(number).file, within * mapped.row_bytes, self._row)

    def _read_chunks(self, rows: npt.NDArray[np.int64], out: Rows) -> None:
        """Read rows chunk by chunk, in the order of the array."""
        step = np.diff(rows)
        order = None if (step >= 0).all() else np.argsort(rows, kind="stable")
        ascending = rows if order is None else rows[order]
        distinct = bool((step > 0).all()) if order is None else bool((np.diff(ascending) > 0).all())
        chunk_of = ascending // self.chunk_rows
        within = ascending - chunk_of * self.chunk_rows
        first = np.flatnonzero(np.diff(chunk_of, prepend=-1))
        chunks = chunk_of[first].tolist()
        bounds = [*first.tolist(), len(rows)]
        scratch = self.empty(self.chunk_rows)
        for place, (shard, data) in enumerate(self._chunks(chunks)):
            start, stop = bounds[place], bounds[place + 1]
            try:
                if order is None and distinct and stop - start == self.chunk_rows:
                    self.codec.decode(data, out[start:stop])
                    continue
                self.codec.decode(data, scratch)
            except (RuntimeError, ValueError) as error:
                number = chunks[place] % self.chunks
                raise DamagedCache(
                    f"{shard.path}, chunk {number} (rows {chunks[place] * self.chunk_rows} to "
                    f"{(chunks[place] + 1) * self.chunk_rows - 1}), does not decode: {error}"
                ) from error
            out[slice(start, stop) if order is None else order[start:stop]] = scratch[within[start:stop]]

    def _chunks(self, chunks: list[int]) -> Iterator[tuple[OpenShard, Bytes]]:
        """The shard and bytes of each inner chunk, numbered over the whole array; valid until the next one."""
        step = min(READ_CHUNKS, OPEN_SHARDS)
        for done in range(0, len(chunks), step):
            group = chunks[done : done + step]
            opened = self.open_shards([chunk // self.chunks for chunk in group])
            entries = [shard.entry(chunk % self.chunks) for shard, chunk in zip(opened, group, strict=True)]
            ends = list(accumulate(length for _, length in entries))
            if len(self._buffer) < ends[-1]:
                self._buffer = np.empty(ends[-1], dtype=np.uint8)
            reads = [
                (shard, offset, self._buffer[end - length : end])
                for shard, (offset, length), end in zip(opened, entries, ends, strict=True)
            ]
            self._fill(reads)
            for shard, _, data in reads:
                yield shard, data

    @staticmethod
    def _fill(reads: Sequence[tuple[OpenShard, int, Rows]]) -> None:
        try:
            read_all([(shard.file, offset, buffer) for shard, offset, buffer in reads])
        except EOFError:
            short = next(shard for shard, _, _ in reads if os.fstat(shard.file).st_size < shard.size)
            raise DamagedCache(
                f"{short.path} was truncated while it was read; `tcache verify` lists all damage"
            ) from None


_arrays: weakref.WeakSet[ShardedArray] = weakref.WeakSet()


def _renew_locks() -> None:
    """Give a forked child new locks: the thread that held one in the parent does not exist there."""
    for array in _arrays:
        array._lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_locks)
