"""Codecs between the rows of one inner chunk and its bytes, with checksums.

Blosc and zstd decode damaged bytes to other values without an error, so every compressed chunk ends with zarr's
`crc32c`. Chunks of `float16-raw` arrays have no checksum, because they are memory-mapped: only the digest of their
shard shows damage (`tcache verify --deep`).
"""

import struct
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


class NumberCodec:
    """Rows of `width` numbers, optionally compressed by blosc, optionally with a checksum.

    Rows of one inner chunk to bytes and back, the same as zarr's codec chain.
    """

    def __init__(self, dtype: str, width: int, compressor: numcodecs.Blosc | None, *, checksum: bool) -> None:
        self.dtype = np.dtype(dtype)
        self.width = width
        self.compressor = compressor
        self.checksum = checksum

    @property
    def plain(self) -> bool:
        """Whether a chunk consists of its rows' bytes alone."""
        return self.compressor is None and not self.checksum

    def encode(self, rows: Rows) -> bytes:
        rows = np.ascontiguousarray(rows, dtype=self.dtype)
        data = rows.tobytes() if self.compressor is None else self.compressor.encode(rows)
        return append_checksum(data) if self.checksum else data

    def decode(self, data: Bytes, out: Rows) -> None:
        """Inverse of `encode`, into `out`; RuntimeError or ValueError if not the bytes of `len(out)` rows."""
        body = strip_checksum(data) if self.checksum else data
        if self.compressor is not None:
            # The argument checks of numcodecs' codec object take as long as the decoding.
            blosc.decompress(body, out)
            return
        if len(body) != out.nbytes:
            raise ValueError(f"{len(body) / self.width / self.dtype.itemsize:g} rows instead of {len(out)}")
        out[...] = body.view(self.dtype).reshape(out.shape)

    def digest(self, rows: Rows) -> bytes:
        """16 bytes over the values, independent of the compression."""
        values = np.ascontiguousarray(rows, dtype=self.dtype)
        return blake2b(values.view(np.uint8).data, digest_size=16).digest()

    def blank(self, rows: int) -> Rows:
        """`rows` empty rows: NaN, 0, "" or b""."""
        return np.full((rows, self.width), np.nan if self.dtype.kind == "f" else 0, dtype=self.dtype)


class VariableLengthCodec:
    """Rows of variable length, optionally compressed, with a checksum.

    Args:
        serializer: zarr's `vlen-utf8` or `vlen-bytes`.
        empty: value of an empty row.
        itemsize: bytes of the numbers in the rows, by which blosc shuffles bits.
    """

    dtype = np.dtype(object)

    def __init__(
        self,
        serializer: numcodecs.VLenUTF8 | numcodecs.VLenBytes,
        empty: str | bytes,
        compressor: numcodecs.Zstd | numcodecs.Blosc | None,
        itemsize: int = 1,
    ) -> None:
        self.serializer = serializer
        self.empty = empty
        self.compressor = compressor
        self.itemsize = itemsize

    def encode(self, rows: Rows) -> bytes:
        data = self.serializer.encode(rows)
        if self.compressor is not None:
            # Blosc takes the size of a number from the buffer.
            itemsize = self.itemsize if len(data) % self.itemsize == 0 else 1
            data = self.compressor.encode(np.frombuffer(data, dtype=f"V{itemsize}"))
        return append_checksum(data)

    def decode(self, data: Bytes, out: Rows) -> None:
        body = strip_checksum(data)
        rows = self.serializer.decode(body if self.compressor is None else self.compressor.decode(body))
        if len(rows) != len(out):
            raise ValueError(f"{len(rows)} rows instead of {len(out)}")
        out[...] = rows

    def digest(self, rows: Rows) -> bytes:
        return blake2b(bytes(self.serializer.encode(rows)), digest_size=16).digest()

    def blank(self, rows: int) -> Rows:
        return np.full(rows, self.empty, dtype=object)


class BytesCodec(VariableLengthCodec):
    """Byte strings of any length, optionally compressed by blosc."""

    def __init__(self, compressor: numcodecs.Blosc | None, itemsize: int) -> None:
        super().__init__(numcodecs.VLenBytes(), b"", compressor, itemsize)

    def digest(self, rows: Rows) -> bytes:
        # The digest of the serialized rows, without a copy of a whole shard.
        digest = blake2b(struct.pack("<I", len(rows)), digest_size=16)
        for row in rows:
            digest.update(struct.pack("<I", len(row)))
            digest.update(row)
        return digest.digest()


def crc32c(data: Bytes | bytes) -> bytes:
    """Checksum of 4 bytes, as zarr stores it."""
    return struct.pack("<I", google_crc32c.value(data))


def append_checksum(data: Any) -> bytes:
    """The data, followed by its checksum."""
    data = bytes(data)
    return data + crc32c(data)


def strip_checksum(data: Bytes) -> Bytes:
    """The data without its checksum, which is compared."""
    body = data[:-4]
    if len(data) < 4 or crc32c(body) != data[-4:].tobytes():
        raise ValueError("its checksum does not match")
    return body


def codec_from(metadata: dict[str, Any], chain: list[dict[str, Any]]) -> NumberCodec | VariableLengthCodec:
    """The chunk codec that zarr's metadata describes.

    Raises:
        ValueError: an unsupported codec.
    """
    names = [step["name"] for step in chain]
    if metadata["data_type"] == "string" and names == ["vlen-utf8", "zstd", "crc32c"]:
        zstd = numcodecs.Zstd(level=chain[1]["configuration"]["level"])
        return VariableLengthCodec(numcodecs.VLenUTF8(), "", zstd)
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
    """The compressor, and the size of the numbers that it shuffles."""
    shuffle = {"noshuffle": 0, "shuffle": 1, "bitshuffle": 2}[options["shuffle"]]
    compressor = numcodecs.Blosc(options["cname"], options["clevel"], shuffle, options["blocksize"])
    return compressor, options.get("typesize", 1)
