"""Zarr v3 shards, written whole and read by chunk.

The arrays are plain zarr v3 with the sharding codec: zarr-python opens them without us, and makes their
metadata here. Their shards are written and read by this module, because a shard has to appear on disk whole
or not at all (temporary file, fsync, rename, fsync of the folder), and because zarr-python takes ten to a
hundred times as long to gather scattered rows (docs/decisions/0008-shards.md).

A shard is replaced, never changed in place: whoever has the old file open keeps reading it.
"""

import errno
import json
import mmap
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

import google_crc32c
import numcodecs
import numpy as np
import numpy.typing as npt

from teacher_cache.errors import DamagedCache, DiskFull, FormatVersionError

EMPTY = 2**64 - 1
TEMPORARY_SUFFIX = ".writing"
# Shards kept mapped by one reader. A mapping costs address space and a file handle, not memory.
OPEN_SHARDS = 256

Rows = npt.NDArray[Any]


@contextmanager
def replacing(path: Path) -> Iterator[Any]:
    """A binary file that becomes `path` when the block ends well and leaves no trace when it does not.

    The data and the folder's entry are durable when the block has ended.

    Raises:
        DiskFull: no space was left; nothing was replaced.
    """
    make_folder(path.parent)
    temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(
                f"no space left on the disk of {path.parent}; what was committed before is intact: free some "
                "space and run the same command again"
            ) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, their names durable."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class ChunkCodec(ABC):
    """How one inner chunk becomes bytes."""

    @abstractmethod
    def encode(self, rows: Rows) -> bytes: ...

    @abstractmethod
    def decode(self, data: memoryview) -> Rows:
        """Inverse of `encode`.

        Raises:
            RuntimeError, ValueError: the bytes are damaged.
        """

    @abstractmethod
    def digest(self, rows: Rows) -> bytes:
        """16 bytes over the values, whatever the compression."""

    @abstractmethod
    def blank(self, rows: int) -> Rows:
        """`rows` rows that hold nothing."""


class FixedCodec(ChunkCodec):
    """Rows of `width` numbers, as they are or through a numcodecs compressor and a checksum."""

    def __init__(self, dtype: str, width: int, compressor: Any | None) -> None:
        self.dtype = np.dtype(dtype)
        self.width = width
        self.compressor = compressor

    def encode(self, rows: Rows) -> bytes:
        rows = np.ascontiguousarray(rows, dtype=self.dtype)
        return rows.tobytes() if self.compressor is None else _sealed(self.compressor.encode(rows))

    def decode(self, data: memoryview) -> Rows:
        raw = data if self.compressor is None else self.compressor.decode(_unsealed(data))
        return np.frombuffer(raw, dtype=self.dtype).reshape(-1, self.width)

    def digest(self, rows: Rows) -> bytes:
        values = np.ascontiguousarray(rows, dtype=self.dtype)
        return blake2b(values.view(np.uint8).data, digest_size=16).digest()

    def blank(self, rows: int) -> Rows:
        return np.full((rows, self.width), np.nan if self.dtype.kind == "f" else 0, dtype=self.dtype)


class TextCodec(ChunkCodec):
    """Strings as zarr's variable-length UTF-8, then zstd and a checksum."""

    def __init__(self, compressor: Any) -> None:
        self.compressor = compressor
        self.strings = numcodecs.VLenUTF8()

    def encode(self, rows: Rows) -> bytes:
        return _sealed(self.compressor.encode(self.strings.encode(rows)))

    def decode(self, data: memoryview) -> Rows:
        return np.asarray(self.strings.decode(self.compressor.decode(_unsealed(data))), dtype=object)

    def digest(self, rows: Rows) -> bytes:
        return blake2b(bytes(self.strings.encode(rows)), digest_size=16).digest()

    def blank(self, rows: int) -> Rows:
        return np.full(rows, "", dtype=object)


def _crc32c(data: memoryview | bytes) -> bytes:
    # The library takes no memoryview, but an array over one, which copies nothing.
    return struct.pack("<I", google_crc32c.value(np.frombuffer(data, dtype=np.uint8)))


def _sealed(data: Any) -> bytes:
    """A compressed chunk with zarr's `crc32c` behind it: blosc and zstd decode damage to other values."""
    data = bytes(data)
    return data + _crc32c(data)


def _unsealed(data: memoryview) -> memoryview:
    body, checksum = data[:-4], data[-4:]
    if len(data) < 4 or _crc32c(body) != bytes(checksum):
        raise ValueError("its checksum does not match")
    return body


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


class OpenShard:
    """One mapped shard file and its chunk index."""

    def __init__(self, path: Path, chunks: int, chunk_rows: int, codec: ChunkCodec) -> None:
        self.path = path
        self.chunk_rows = chunk_rows
        self.codec = codec
        trailer = 16 * chunks + 4
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < trailer:
                    raise DamagedCache(f"{path} is cut short: {size} bytes, its chunk index alone takes {trailer}")
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise DamagedCache(f"{path} is gone; `tcache verify` tells what else is") from None
        self.view = memoryview(self.map)
        index = bytes(self.view[size - trailer :])
        if _crc32c(index[:-4]) != index[-4:]:
            raise DamagedCache(f"{path} is damaged: the checksum of its chunk index does not match")
        self.entries = np.frombuffer(index[:-4], dtype="<u8").reshape(chunks, 2)
        ends = self.entries[self.entries[:, 0] != EMPTY].sum(axis=1)
        if len(ends) and int(ends.max()) > size - trailer:
            raise DamagedCache(f"{path} is damaged: its chunk index points past the end of the file")

    def chunk(self, number: int) -> Rows:
        """The decoded rows of one inner chunk.

        Raises:
            DamagedCache: the chunk is not stored or does not decode.
        """
        start, length = (int(value) for value in self.entries[number])
        if start == EMPTY:
            raise DamagedCache(f"{self.path} does not hold chunk {number}, which the index says it does")
        try:
            rows = self.codec.decode(self.view[start : start + length])
        except (RuntimeError, ValueError) as error:
            raise DamagedCache(f"{self.path}, chunk {number}, does not decode: {error}") from error
        if len(rows) != self.chunk_rows:
            raise DamagedCache(f"{self.path}, chunk {number}: {len(rows)} rows instead of {self.chunk_rows}")
        return rows

    @cached_property
    def contiguous(self) -> Rows | None:
        """`(rows, width)` view of the whole shard without a copy, where it is uncompressed and in order."""
        codec = self.codec
        if not isinstance(codec, FixedCodec) or codec.compressor is not None:
            return None
        stored = int((self.entries[:, 0] != EMPTY).sum())
        size = self.chunk_rows * codec.width * codec.dtype.itemsize
        in_order = np.stack([np.arange(stored) * size, np.full(stored, size)], axis=1)
        if not np.array_equal(self.entries[:stored], in_order.astype("<u8")):
            return None
        return codec.decode(self.view[: stored * size])


class ShardedArray:
    """A zarr v3 array of shape `(rows, width)` numbers or `(rows,)` strings, cut into shards of rows.

    Thread-compatible for reading within one process; never shared by fork: mappings are per instance and an
    instance that is pickled comes back with none.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.metadata: dict[str, Any] = json.loads((folder / "zarr.json").read_bytes())
            grid = self.metadata["chunk_grid"]["configuration"]["chunk_shape"]
            (sharding,) = self.metadata["codecs"]
            inner = sharding["configuration"]
            if sharding["name"] != "sharding_indexed" or inner.get("index_location", "end") != "end":
                raise KeyError("sharding_indexed with its index at the end")
            self.shard_rows = int(grid[0])
            self.chunk_rows = int(inner["chunk_shape"][0])
            self.strings = self.metadata["data_type"] == "string"
            self.codec = _codec_from(self.metadata, inner["codecs"])
        except FileNotFoundError:
            raise DamagedCache(f"{folder / 'zarr.json'} is gone; `tcache verify` tells what else is") from None
        except (KeyError, ValueError, TypeError) as error:
            raise FormatVersionError(
                f"{folder / 'zarr.json'} is not a sharded zarr v3 array that this version reads: {error}"
            ) from error
        self.chunks = self.shard_rows // self.chunk_rows
        self._open: dict[int, tuple[bytes, OpenShard]] = {}

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
    ) -> Self:
        """Make an empty array; `width` None makes one of strings.

        Missing rows of a float array read as NaN in zarr-python, so that nobody takes them for vectors.
        """
        import zarr
        from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec

        compressors: list[Any] = []
        if compressed and width is None:
            compressors = [ZstdCodec(level=3), Crc32cCodec()]
        elif compressed:
            itemsize = np.dtype(dtype).itemsize
            compressors = [
                BloscCodec(cname="lz4", clevel=5, shuffle="bitshuffle", typesize=itemsize),
                Crc32cCodec(),
            ]
        tail = () if width is None else (width,)
        zarr.create_array(
            store=str(folder),
            shape=(0, *tail),
            shards=(shard_rows, *tail),
            chunks=(chunk_rows, *tail),
            dtype=dtype,
            fill_value=float("nan") if np.dtype(dtype).kind == "f" and width is not None else None,
            compressors=compressors,
            overwrite=True,
        )
        metadata = (folder / "zarr.json").read_bytes()
        with replacing(folder / "zarr.json") as file:  # the same again, durable this time
            file.write(metadata)
        sync_folder(folder.parent)
        return cls(folder)

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["folder"])  # type: ignore[misc]

    def shard_path(self, number: int) -> Path:
        return self.folder / "c" / (f"{number}" if self.strings else f"{number}/0")

    def grow(self, rows: int) -> None:
        """Say in the metadata that the array has at least `rows` rows; shards are not touched."""
        path = self.folder / "zarr.json"
        self.metadata = json.loads(path.read_bytes())  # another instance may have grown it further
        if self.rows < rows:
            self.metadata["shape"][0] = rows
            with replacing(path) as file:
                file.write(json.dumps(self.metadata, indent=2).encode())

    @property
    def rows(self) -> int:
        return int(self.metadata["shape"][0])

    def write_shard(self, number: int, rows: Rows, present: npt.NDArray[np.bool_]) -> ShardReceipt:
        """Put one whole shard in place of whatever was there.

        Args:
            rows: `(n, width)` or `(n,)` with n <= shard_rows; what stands in absent rows is not kept.
            present: `(n,)`, which of them are real.
        """
        body = self.codec.blank(self.shard_rows)
        kept = np.flatnonzero(present)
        body[kept] = rows[kept]
        used = self._stored_chunks(kept)
        index = np.full((self.chunks, 2), EMPTY, dtype="<u8")
        offset = 0
        with replacing(self.shard_path(number)) as file:
            for chunk in used:
                data = self.codec.encode(body[chunk * self.chunk_rows : (chunk + 1) * self.chunk_rows])
                index[chunk] = (offset, len(data))
                offset += file.write(data)
            entries = index.tobytes()
            offset += file.write(entries + _crc32c(entries))
        return ShardReceipt(self.codec.digest(body[kept]), offset)

    def _stored_chunks(self, kept: npt.NDArray[np.intp]) -> list[int]:
        """Chunks worth storing. Uncompressed arrays keep those in between, so that a shard is one view."""
        chunks = np.unique(kept // self.chunk_rows).tolist()
        if isinstance(self.codec, FixedCodec) and self.codec.compressor is None and chunks:
            return list(range(chunks[-1] + 1))
        return list(chunks)

    def open_shard(self, number: int, tag: bytes) -> OpenShard:
        """The mapped shard; `tag` is the digest its record promises, so that a replaced file is noticed."""
        known = self._open.get(number)
        if known is not None and known[0] == tag:
            return known[1]
        shard = OpenShard(self.shard_path(number), self.chunks, self.chunk_rows, self.codec)
        while len(self._open) >= OPEN_SHARDS:
            self._open.pop(next(iter(self._open)))
        self._open[number] = (tag, shard)
        return shard

    def read_shard(self, number: int, present: npt.NDArray[np.bool_], tag: bytes) -> Rows:
        """The present rows of one shard, in row order."""
        return self.read_rows(number, np.flatnonzero(present), tag)

    def read_checked(self, number: int, present: npt.NDArray[np.bool_], digest: bytes) -> Rows:
        """The present rows of a shard that is to be written anew with more.

        A new digest would vouch for whatever is merged into it, so the old rows must still have theirs.

        Raises:
            DamagedCache: they are not the values that were written.
        """
        rows = self.read_shard(number, present, digest)
        if self.codec.digest(rows) != digest:
            raise DamagedCache(
                f"{self.shard_path(number)} does not hold the values that were written, so nothing is added to it; "
                "`tcache verify --deep` tells what else is damaged"
            )
        return rows

    def by_shard(
        self, rows: npt.NDArray[np.int64]
    ) -> Iterator[tuple[int, npt.NDArray[np.intp], npt.NDArray[np.int64]]]:
        """Rows of the array, in any order, shard by shard: (shard, places in `rows`, places in the shard)."""
        shard_of = rows // self.shard_rows
        for number in np.unique(shard_of).tolist():
            places = np.flatnonzero(shard_of == number)
            yield number, places, rows[places] - number * self.shard_rows

    def read_rows(self, number: int, within: npt.NDArray[np.intp], tag: bytes) -> Rows:
        """Rows of one shard by their place in it, in the order asked for; each chunk is decoded once."""
        shard = self.open_shard(number, tag)
        whole = shard.contiguous
        if whole is not None:
            if len(within) and int(within.max()) >= len(whole):
                raise DamagedCache(f"{shard.path} holds {len(whole)} rows, the index says it has more")
            return whole[within]
        chunk_of = within // self.chunk_rows
        out: Rows | None = None
        for chunk in np.unique(chunk_of).tolist():
            wanted = np.flatnonzero(chunk_of == chunk)
            rows = shard.chunk(chunk)
            if out is None:
                out = np.empty((len(within), *rows.shape[1:]), dtype=rows.dtype)
            out[wanted] = rows[within[wanted] - chunk * self.chunk_rows]
        return out if out is not None else self.codec.blank(0)


def _codec_from(metadata: dict[str, Any], chain: list[dict[str, Any]]) -> ChunkCodec:
    """The chunk codec that zarr's metadata describes.

    Raises:
        ValueError: a codec that this module does not read.
    """
    names = [step["name"] for step in chain]
    if metadata["data_type"] == "string" and names == ["vlen-utf8", "zstd", "crc32c"]:
        return TextCodec(numcodecs.Zstd(level=chain[1]["configuration"]["level"]))
    width = int(metadata["shape"][1])
    dtype = np.dtype(metadata["data_type"]).newbyteorder("<").str
    if names == ["bytes"]:
        return FixedCodec(dtype, width, None)
    if names == ["bytes", "blosc", "crc32c"]:
        options = chain[1]["configuration"]
        shuffle = {"noshuffle": 0, "shuffle": 1, "bitshuffle": 2}[options["shuffle"]]
        blosc = numcodecs.Blosc(options["cname"], options["clevel"], shuffle, options["blocksize"])
        return FixedCodec(dtype, width, blosc)
    raise ValueError(f"codecs {names}")
