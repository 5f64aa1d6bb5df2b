"""Zarr v3 shards, written whole and read by chunk: the one reader and writer of them.

The arrays are plain zarr v3 with the sharding codec: zarr-python opens them without us, and makes their
metadata here. Their shards are written and read by this module, because a shard has to appear on disk whole
or not at all (temporary file, fsync, rename, fsync of the folder), and because zarr-python takes ten to a
hundred times as long to gather scattered rows (docs/decisions/0008-shards.md).

A shard is replaced, never changed in place: whoever has the old file open keeps reading it.
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
from teacher_cache.storage.files import atomic_write, sync_folder
from teacher_cache.storage.mapping import ShardMap
from teacher_cache.storage.opened import EMPTY, OpenShard
from teacher_cache.storage.positioned import in_memory, read_all, runs, threads

# Shard files that one array keeps open.
OPEN_SHARDS = max(32, min(2048, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8))
# Chunks read at a time: enough requests to keep a disk busy, little enough to stay in the processor's cache.
READ_CHUNKS = 32
# Shards to open that are worth waking the threads for.
THREADS_FROM = 4
# Bytes that blosc compresses at a time of an array of byte strings.
BLOB_BLOCK = 16_384
# Neighbouring rows that are worth a read of their own; fewer are copied out of the map.
RUN_ROWS = 8


@dataclass(frozen=True)
class ShardReceipt:
    """What was written.

    Attributes:
        digest: 16 bytes over the values of the present rows, in row order. It does not cover absent rows or
            compression, so a shard that later gained rows still proves the rows promised before.
        size: of the file, in bytes.
    """

    digest: bytes
    size: int


class ShardedArray:
    """A zarr v3 array of shape `(rows, width)` numbers or `(rows,)` texts or byte strings, cut into shards of rows.

    Threads take turns. Neither files nor mappings survive a pickle; both are safe across a fork.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        mended = "`tcache repair` writes it anew"
        try:
            self.metadata: dict[str, Any] = json.loads((folder / "zarr.json").read_bytes())
        except FileNotFoundError:
            raise DamagedCache(f"{folder / 'zarr.json'} is gone; {mended}") from None
        except ValueError as error:
            raise DamagedCache(f"{folder / 'zarr.json'} cannot be read: {error}; {mended}") from error
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
        plain = isinstance(self.codec, NumberCodec) and self.codec.plain
        self._map = (
            ShardMap(self.codec, self.shard_rows, self.chunk_rows)
            if isinstance(self.codec, NumberCodec) and plain and ShardMap.fits(self.codec, self.shard_rows)
            else None
        )
        self._lock = threading.RLock()
        self._buffer = np.empty(0, dtype=np.uint8)
        self._row = self.empty(1)
        _arrays.add(self)

    @classmethod
    def create(
        cls,
        folder: Path,
        *,
        width: int | None,
        dtype: str,
        shard_rows: int,
        chunk_rows: int,
        compressed: bool,
        checksum: bool = True,
    ) -> Self:
        """Make an empty array; `width` None makes one of strings.

        Missing rows of a float array read as NaN in zarr-python, so that nobody takes them for vectors.

        Args:
            compressed: chunks go through blosc (lz4 after a bit shuffle), strings through zstd.
            checksum: chunks that are not compressed carry a checksum; compressed ones always do.
        """
        from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec

        compressors: list[Any] = []
        if compressed and width is None:
            compressors.append(ZstdCodec(level=3))
        elif compressed:
            itemsize = np.dtype(dtype).itemsize
            compressors.append(BloscCodec(cname="lz4", clevel=5, shuffle="bitshuffle", typesize=itemsize))
        if compressed or checksum:
            compressors.append(Crc32cCodec())
        fill = float("nan") if np.dtype(dtype).kind == "f" and width is not None else None
        return cls._make(folder, () if width is None else (width,), dtype, fill, shard_rows, chunk_rows, compressors)

    @classmethod
    def create_blobs(cls, folder: Path, *, shard_rows: int, chunk_rows: int, itemsize: int, compressed: bool) -> Self:
        """Make an empty array of byte strings of any length; missing rows read as b"" in zarr-python.

        Args:
            itemsize: bytes of the numbers that they hold.
            compressed: chunks go through blosc (lz4 after a bit shuffle); they carry a checksum either way.
        """
        from zarr.codecs import BloscCodec, Crc32cCodec

        # Blosc's own choice of a block is so large that it gives up on token states, which these save 5 % of.
        blosc = BloscCodec(cname="lz4", clevel=5, shuffle="bitshuffle", typesize=itemsize, blocksize=BLOB_BLOCK)
        compressors = [*([blosc] if compressed else []), Crc32cCodec()]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*VariableLengthBytes.*does not have a Zarr V3 specification")
            return cls._make(folder, (), BLOBS, None, shard_rows, chunk_rows, compressors)

    @classmethod
    def _make(
        cls,
        folder: Path,
        tail: tuple[int, ...],
        dtype: str,
        fill: float | None,
        shard_rows: int,
        chunk_rows: int,
        compressors: list[Any],
    ) -> Self:
        import zarr

        zarr.create_array(
            store=str(folder),
            shape=(0, *tail),
            shards=(shard_rows, *tail),
            chunks=(chunk_rows, *tail),
            dtype=dtype,
            fill_value=fill,
            compressors=compressors,
            overwrite=True,
        )
        metadata = (folder / "zarr.json").read_bytes()
        with atomic_write(folder / "zarr.json") as file:  # the same again, durable this time
            file.write(metadata)
        sync_folder(folder.parent)
        return cls(folder)

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["folder"])  # type: ignore[misc]

    @property
    def rows(self) -> int:
        return int(self.metadata["shape"][0])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the rows that `read` gives."""
        return self.codec.dtype

    def empty(self, rows: int) -> Rows:
        """An array for that many rows, its values arbitrary."""
        return np.empty((rows, *self._tail), dtype=self.dtype)

    def shard_path(self, number: int) -> Path:
        return self.folder / "c" / (f"{number}/0" if self._tail else f"{number}")

    # Writing

    def grow(self, rows: int) -> None:
        """Say in the metadata that the array has at least `rows` rows; shards are not touched."""
        path = self.folder / "zarr.json"
        self.metadata = json.loads(path.read_bytes())  # another instance may have grown it further
        if self.rows < rows:
            self.metadata["shape"][0] = rows
            with atomic_write(path) as file:
                file.write(json.dumps(self.metadata, indent=2).encode())

    def write_shard(self, number: int, rows: Rows, present: npt.NDArray[np.bool_]) -> ShardReceipt:
        """Put one whole shard in place of whatever was there.

        Args:
            rows: `(n, width)` or `(n,)` with n <= shard_rows; what stands in absent rows is not kept.
            present: `(n,)`, which of them are real.
        """
        kept = np.flatnonzero(present)
        if len(kept) == self.shard_rows:
            body = values = np.ascontiguousarray(rows, dtype=self.dtype)
        else:
            body = self.codec.blank(self.shard_rows)
            values = body[kept] = rows[kept]
        index = np.full((self.chunks, 2), EMPTY, dtype="<u8")
        offset = 0
        with atomic_write(self.shard_path(number)) as file:
            for chunk in self._stored_chunks(kept):
                data = self.codec.encode(body[chunk * self.chunk_rows : (chunk + 1) * self.chunk_rows])
                index[chunk] = (offset, len(data))
                offset += file.write(data)
            entries = index.tobytes()
            offset += file.write(entries + crc32c(entries))
        self.forget(number)
        return ShardReceipt(self.codec.digest(values), offset)

    def _stored_chunks(self, kept: npt.NDArray[np.intp]) -> list[int]:
        """Chunks worth storing. Plain arrays keep those in between, so that a shard is one matrix."""
        chunks = np.unique(kept // self.chunk_rows).tolist()
        if isinstance(self.codec, NumberCodec) and self.codec.plain and chunks:
            return list(range(chunks[-1] + 1))
        return list(chunks)

    # Reading

    def open_shard(self, number: int) -> OpenShard:
        """The shard's file, which stays open; its index is read and checked once.

        Raises:
            DamagedCache: the file is gone, or is not a whole shard.
        """
        (shard,) = self.open_shards([number])
        return shard

    def open_shards(self, numbers: Sequence[int]) -> list[OpenShard]:
        """At most `OPEN_SHARDS` different ones; those that are not open yet all at once, as a disk likes it."""
        closed = [number for number in dict.fromkeys(numbers) if number not in self._open]
        paths = map(self.shard_path, closed)
        opening = threads().map if len(closed) >= THREADS_FROM else map
        opened = dict(zip(closed, opening(OpenShard, paths, repeat(self.chunks)), strict=False))
        shards = []
        for number in numbers:  # the ones that were not asked for longest come first, and are closed first
            shard = self._open.pop(number, None) or opened[number]
            self._open[number] = shard
            shards.append(shard)
        while len(self._open) > OPEN_SHARDS:
            self._open.pop(next(iter(self._open))).close()
        return shards

    def forget(self, number: int) -> None:
        """Look at the shard's file anew when it is read next: it was replaced."""
        with self._lock:
            shard = self._open.pop(number, None)
            if shard is not None:
                shard.close()
            if self._map is not None:
                self._map.forget(number)

    def by_shard(
        self, rows: npt.NDArray[np.int64]
    ) -> Iterator[tuple[int, npt.NDArray[np.intp], npt.NDArray[np.int64]]]:
        """Rows of the array, in any order, shard by shard: (shard, places in `rows`, places in the shard)."""
        shard_of = rows // self.shard_rows
        for number in np.unique(shard_of).tolist():
            places = np.flatnonzero(shard_of == number)
            yield number, places, rows[places] - number * self.shard_rows

    def read_shard(self, number: int, present: npt.NDArray[np.bool_]) -> Rows:
        """The present rows of one shard, in row order."""
        return self.read(np.flatnonzero(present) + number * self.shard_rows)

    def read_checked(self, number: int, present: npt.NDArray[np.bool_], digest: bytes) -> Rows:
        """The present rows of a shard that is to be written anew with more.

        A new digest would vouch for whatever is merged into it, so the old rows must still have theirs.

        Raises:
            DamagedCache: they are not the values that were written.
        """
        rows = self.read_shard(number, present)
        if self.codec.digest(rows) != digest:
            raise DamagedCache(
                f"{self.shard_path(number)} does not hold the values that were written, so nothing is added to it; "
                "`tcache verify --deep` tells what else is damaged"
            )
        return rows

    def read(self, rows: npt.NDArray[np.int64], out: Rows | None = None) -> Rows:
        """Rows of the array, in the order asked for; each chunk is read and decoded once.

        Args:
            rows: `(n,)`, any order, repeats allowed.
            out: written into, and given back; C-contiguous, `(n, width)` or `(n,)` of the array's dtype.

        Raises:
            DamagedCache: a shard is gone or damaged, or does not hold a row.
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
        """Rows that lie on disk as they are: scattered warm ones out of the map, others by reads of their own."""
        if not mapped.reach(rows, self.open_shards):
            self._read_chunks(rows, out)  # written by other hands, in another order
            return
        ends = rows[1:] - rows[:-1] != 1
        if (np.count_nonzero(ends) + 1) * RUN_ROWS > len(rows) and self._warm(mapped, rows):
            np.take(mapped.matrix, rows, axis=0, out=out, mode="clip")  # other modes buffer the result
            return
        spans = runs(rows, cut=self.shard_rows)
        for done in range(0, len(spans), OPEN_SHARDS):  # so that no file is closed before it is read
            group = spans[done : done + OPEN_SHARDS]
            places = [divmod(int(rows[start]), self.shard_rows) for start, _ in group]
            opened = self.open_shards([number for number, _ in places])
            self._fill(
                [
                    (shard, within * mapped.row_bytes, out[start:stop])
                    for shard, (_, within), (start, stop) in zip(opened, places, group, strict=True)
                ]
            )

    def _warm(self, mapped: ShardMap, rows: npt.NDArray[np.int64]) -> bool:
        """Whether a row out of the middle is in memory, so that the others probably are."""
        number, within = divmod(int(rows[len(rows) // 2]), self.shard_rows)
        return in_memory(self.open_shard(number).file, within * mapped.row_bytes, self._row)

    def _read_chunks(self, rows: npt.NDArray[np.int64], out: Rows) -> None:
        """Rows that lie in chunks to be decoded, chunk by chunk in the order of the array."""
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
        """The bytes of inner chunks, counted over the whole array; each valid until the next is asked for."""
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
            raise DamagedCache(f"{short.path} was cut short while it was read; `tcache verify` tells more") from None


_arrays: weakref.WeakSet[ShardedArray] = weakref.WeakSet()


def _renew_locks() -> None:
    """A thread that held one when the process forked does not exist in the child."""
    for array in _arrays:
        array._lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_locks)
