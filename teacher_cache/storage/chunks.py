"""How one inner chunk of an array becomes bytes, and the checksum that tells damage.

Blosc and zstd decode damaged bytes to other values without a word, so every chunk that has a codec carries
zarr's `crc32c` behind it. Chunks of `float16-raw` arrays have neither: they are what a memory map shows, and only their
shard's digest proves them (`tcache verify --deep`).
"""

import struct
from abc import ABC, abstractmethod
from hashlib import blake2b
from typing import Any

import google_crc32c
import numcodecs
import numpy as np
import numpy.typing as npt
from numcodecs import blosc

Rows = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

# zarr's name for byte strings of any length.
BLOBS = "variable_length_bytes"


class ChunkCodec(ABC):
    """Rows of one inner chunk to bytes and back, as zarr's codec chain has it."""

    @abstractmethod
    def encode(self, rows: Rows) -> bytes: ...

    @abstractmethod
    def decode(self, data: Bytes, out: Rows) -> None:
        """Inverse of `encode`, into `out`.

        Raises:
            RuntimeError, ValueError: the bytes are damaged, or are not as many rows as `out`.
        """

    @abstractmethod
    def digest(self, rows: Rows) -> bytes:
        """16 bytes over the values, whatever the compression."""

    @abstractmethod
    def blank(self, rows: int) -> Rows:
        """`rows` rows that hold nothing: NaN, 0, "" or b""."""


class NumberCodec(ChunkCodec):
    """Rows of `width` numbers, as they are, or with a checksum, or through blosc and with a checksum."""

    def __init__(self, dtype: str, width: int, compressor: numcodecs.Blosc | None, *, checksum: bool) -> None:
        self.dtype = np.dtype(dtype)
        self.width = width
        self.compressor = compressor
        self.checksum = checksum

    @property
    def plain(self) -> bool:
        """Whether a chunk is its rows' bytes and nothing else."""
        return self.compressor is None and not self.checksum

    def encode(self, rows: Rows) -> bytes:
        rows = np.ascontiguousarray(rows, dtype=self.dtype)
        data = rows.tobytes() if self.compressor is None else self.compressor.encode(rows)
        return sealed(data) if self.checksum else data

    def decode(self, data: Bytes, out: Rows) -> None:
        body = unsealed(data) if self.checksum else data
        if self.compressor is not None:
            # Not through numcodecs' codec object, whose checks of its arguments take as long as the decoding.
            blosc.decompress(body, out)
            return
        if len(body) != out.nbytes:
            raise ValueError(f"{len(body) / self.width / self.dtype.itemsize:g} rows instead of {len(out)}")
        out[...] = body.view(self.dtype).reshape(out.shape)

    def digest(self, rows: Rows) -> bytes:
        values = np.ascontiguousarray(rows, dtype=self.dtype)
        return blake2b(values.view(np.uint8).data, digest_size=16).digest()

    def blank(self, rows: int) -> Rows:
        return np.full((rows, self.width), np.nan if self.dtype.kind == "f" else 0, dtype=self.dtype)


class TextCodec(ChunkCodec):
    """Strings as zarr's variable-length UTF-8, then zstd and a checksum."""

    dtype = np.dtype(object)

    def __init__(self, level: int) -> None:
        self.compressor = numcodecs.Zstd(level=level)
        self.strings = numcodecs.VLenUTF8()

    def encode(self, rows: Rows) -> bytes:
        return sealed(self.compressor.encode(self.strings.encode(rows)))

    def decode(self, data: Bytes, out: Rows) -> None:
        rows = self.strings.decode(self.compressor.decode(unsealed(data)))
        if len(rows) != len(out):
            raise ValueError(f"{len(rows)} rows instead of {len(out)}")
        out[...] = rows

    def digest(self, rows: Rows) -> bytes:
        return blake2b(bytes(self.strings.encode(rows)), digest_size=16).digest()

    def blank(self, rows: int) -> Rows:
        return np.full(rows, "", dtype=object)


class BytesCodec(ChunkCodec):
    """Byte strings of any length as zarr's `vlen-bytes`, as they are or through blosc, and a checksum.

    Args:
        itemsize: bytes of the numbers that they hold, by which blosc shuffles bits.
    """

    dtype = np.dtype(object)

    def __init__(self, compressor: numcodecs.Blosc | None, itemsize: int) -> None:
        self.compressor = compressor
        self.itemsize = itemsize
        self.blobs = numcodecs.VLenBytes()

    def encode(self, rows: Rows) -> bytes:
        data = self.blobs.encode(rows)
        if self.compressor is None:
            return sealed(data)
        # Blosc takes the size of a number from the buffer.
        numbers = np.frombuffer(data, dtype=f"V{1 if len(data) % self.itemsize else self.itemsize}")
        return sealed(self.compressor.encode(numbers))

    def decode(self, data: Bytes, out: Rows) -> None:
        body = unsealed(data)
        rows = self.blobs.decode(body if self.compressor is None else blosc.decompress(body))
        if len(rows) != len(out):
            raise ValueError(f"{len(rows)} rows instead of {len(out)}")
        out[...] = rows

    def digest(self, rows: Rows) -> bytes:
        # Of the same bytes as one `vlen-bytes` chunk, which would be a copy of a whole shard.
        made = blake2b(struct.pack("<I", len(rows)), digest_size=16)
        for row in rows:
            made.update(struct.pack("<I", len(row)))
            made.update(row)
        return made.digest()

    def blank(self, rows: int) -> Rows:
        return np.full(rows, b"", dtype=object)


def crc32c(data: Bytes | bytes) -> bytes:
    """Four bytes, as zarr stores them."""
    return struct.pack("<I", google_crc32c.value(data))


def sealed(data: Any) -> bytes:
    """A chunk with its checksum behind it."""
    data = bytes(data)
    return data + crc32c(data)


def unsealed(data: Bytes) -> Bytes:
    """The chunk without its checksum.

    Raises:
        ValueError: they do not belong together.
    """
    body = data[:-4]
    if len(data) < 4 or crc32c(body) != data[-4:].tobytes():
        raise ValueError("its checksum does not match")
    return body


def codec_from(metadata: dict[str, Any], chain: list[dict[str, Any]]) -> NumberCodec | TextCodec | BytesCodec:
    """The chunk codec that zarr's metadata describes.

    Raises:
        ValueError: a codec that this module does not read.
    """
    names = [step["name"] for step in chain]
    if metadata["data_type"] == "string" and names == ["vlen-utf8", "zstd", "crc32c"]:
        return TextCodec(chain[1]["configuration"]["level"])
    if metadata["data_type"] == BLOBS and names in (["vlen-bytes", "crc32c"], ["vlen-bytes", "blosc", "crc32c"]):
        return BytesCodec(*_blosc(chain[1]["configuration"])) if len(names) == 3 else BytesCodec(None, 1)
    width = int(metadata["shape"][1])
    dtype = np.dtype(metadata["data_type"]).newbyteorder("<").str
    if names in (["bytes"], ["bytes", "crc32c"]):
        return NumberCodec(dtype, width, None, checksum=len(names) == 2)
    if names == ["bytes", "blosc", "crc32c"]:
        return NumberCodec(dtype, width, _blosc(chain[1]["configuration"])[0], checksum=True)
    raise ValueError(f"codecs {names}")


def _blosc(options: dict[str, Any]) -> tuple[numcodecs.Blosc, int]:
    """The compressor and the size of the numbers that it shuffles."""
    shuffle = {"noshuffle": 0, "shuffle": 1, "bitshuffle": 2}[options["shuffle"]]
    return numcodecs.Blosc(options["cname"], options["clevel"], shuffle, options["blocksize"]), options.get(
        "typesize", 1
    )
