"""Encodings of stored vectors, and the check of stored values against the teacher output.

Every row is converted, converted back and compared before it is written. A row that the encoding cannot hold is
returned with a reason and never stored.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from teacher_cache.errors import CacheError

Stored = npt.NDArray[np.generic]

_BLOCK_ROWS = 1024


@dataclass(frozen=True)
class Encoding:
    """How the vectors of one space are stored: cast to a float type.

    Attributes:
        dtype: little-endian numpy dtype on disk.
        compressed: chunks are compressed by blosc (lz4 after a bit shuffle).
        checksum: chunks have a checksum, which every read compares.
        max_cosine_error: largest allowed 1 - cos between a row and its stored values.
        max_norm_error: largest allowed relative error of a row's length.
    """

    name: str
    dtype: str
    compressed: bool
    checksum: bool
    max_cosine_error: float
    max_norm_error: float

    def width(self, dims: int) -> int:
        """Stored numbers of a vector of `dims` numbers."""
        return dims

    def row_bytes(self, dims: int) -> int:
        """Bytes of a vector before compression."""
        return self.width(dims) * np.dtype(self.dtype).itemsize

    def store(self, vectors: npt.NDArray[np.float32]) -> Stored:
        """`(n, d)` float32 as `(n, width(d))` of the stored dtype."""
        with np.errstate(over="ignore"):
            return vectors.astype(self.dtype)

    def restore(self, stored: Stored, out: npt.NDArray[np.floating]) -> None:
        """Inverse of `store`, into `(n, d)` of any float dtype."""
        np.copyto(out, stored, casting="same_kind")

    def is_blank(self, stored: Stored) -> npt.NDArray[np.bool_]:
        """`(n,)`: which stored rows are empty."""
        return np.asarray(np.isnan(stored).all(axis=1))


@dataclass(frozen=True)
class BlockInt8(Encoding):
    """8-bit integers with a float16 scale for every `BLOCK` numbers of a vector.

    x = q * scale with q in [-127, 127] and scale = max |x| / 127 of the block. A stored row is its d integers
    followed by the bytes of its ceil(d / BLOCK) scales, little-endian. A row of zeros is empty.
    """

    BLOCK = 64

    def width(self, dims: int) -> int:
        return dims + 2 * -(-dims // self.BLOCK)

    def store(self, vectors: npt.NDArray[np.float32]) -> Stored:
        rows, dims = vectors.shape
        starts = np.arange(0, dims, self.BLOCK)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            scales = (np.maximum.reduceat(np.abs(vectors), starts, axis=1) / 127).astype("<f2")
            # The quotient exceeds 127 where the scale was rounded down.
            quotient = np.rint(vectors / self._spread(scales, dims)).clip(-127, 127)
            stored = np.empty((rows, self.width(dims)), dtype=self.dtype)
            stored[:, :dims] = np.nan_to_num(quotient, nan=0.0)
        stored[:, dims:] = scales.view(self.dtype)
        return stored

    def restore(self, stored: Stored, out: npt.NDArray[np.floating]) -> None:
        dims = out.shape[1]
        scales = np.ascontiguousarray(stored[:, dims:]).view("<f2")
        if dims % self.BLOCK == 0 and out.flags.c_contiguous:  # broadcasts, without one scale per number
            blocks = (len(stored), dims // self.BLOCK, self.BLOCK)
            factors = scales.astype(np.float32)[:, :, None]
            np.multiply(stored[:, :dims].reshape(blocks), factors, out=out.reshape(blocks), casting="same_kind")
            return
        np.multiply(stored[:, :dims], self._spread(scales, dims), out=out, casting="same_kind")

    def _spread(self, scales: npt.NDArray[np.generic], dims: int) -> npt.NDArray[np.float32]:
        """`(n, dims)`: the scale of every number."""
        return np.repeat(scales.astype(np.float32), self.BLOCK, axis=1)[:, :dims]

    def is_blank(self, stored: Stored) -> npt.NDArray[np.bool_]:
        return np.asarray(~stored.any(axis=1))


# float16 has 11 significant bits: on real vectors 1 - cos stays below 1e-7. The bounds admit rows with many tiny
# numbers, but not rows that overflow or vanish.
ENCODINGS: dict[str, Encoding] = {
    encoding.name: encoding
    for encoding in (
        Encoding("float16", "<f2", True, True, 1e-6, 1e-3),
        Encoding("float16-raw", "<f2", False, False, 1e-6, 1e-3),
        BlockInt8("int8", "|i1", False, True, 1e-4, 1e-2),
        Encoding("float32", "<f4", True, True, 0.0, 0.0),
    )
}


# Older names, which files still hold: caches stay readable by older versions. Also accepted as arguments.
STORED_NAMES = {"float16-raw": "raw", "int8": "compact"}
_CURRENT_NAMES = {stored: name for name, stored in STORED_NAMES.items()}


def stored_name(name: str) -> str:
    """The name of an encoding in files: that of `STORED_NAMES`, or `name` itself."""
    return STORED_NAMES.get(name, name)


def encoding_name(name: str) -> str:
    """Inverse of `stored_name`; a current name is returned as it is."""
    return _CURRENT_NAMES.get(name, name)


def find_encoding(name: str) -> Encoding:
    """The encoding with this name, current or stored; CacheError if there is none."""
    try:
        return ENCODINGS[encoding_name(name)]
    except KeyError:
        raise CacheError(f"unknown encoding {name!r}; expected one of {', '.join(ENCODINGS)}") from None


@dataclass(frozen=True)
class CheckedRows:
    """Converted rows and the result of their check."""

    stored: Stored  # (n, width) of the stored dtype
    cosine_error: npt.NDArray[np.float64]  # (n,): 1 - cos of every row; NaN where the row is quarantined
    quarantined: dict[int, str]  # position -> why the row must not be stored


def combined_error(first: float, second: float) -> float:
    """Bound on 1 - cos after two conversions; their chords, sqrt(2 (1 - cos)), add up at most."""
    return (math.sqrt(first) + math.sqrt(second)) ** 2


def cosine_errors(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """`(n,)`: 1 - cos between the rows of two `(n, d)` arrays; NaN where a row is zero.

    Computed from the chord between the unit vectors: near 1e-8, one minus a dot product is only rounding noise.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        chord = one / np.linalg.norm(one, axis=1)[:, None] - other / np.linalg.norm(other, axis=1)[:, None]
        return np.asarray((chord**2).sum(axis=1) / 2)


def check_rows(vectors: npt.NDArray[np.float32], encoding: Encoding) -> CheckedRows:
    """Convert `(n, d)` float32 vectors and compare every row with its stored values."""
    stored = encoding.store(vectors)
    back = np.empty_like(vectors)
    with np.errstate(invalid="ignore"):
        encoding.restore(stored, back)
    cosine_error = np.empty(len(vectors))
    quarantined: dict[int, str] = {}
    for start in range(0, len(vectors), _BLOCK_ROWS):  # float64 copies: a block at a time
        block = slice(start, start + _BLOCK_ROWS)
        cosine_error[block], reasons = _compare(vectors[block], back[block], encoding)
        quarantined |= {start + row: reason for row, reason in reasons.items()}
    return CheckedRows(stored, cosine_error, quarantined)


def _compare(
    vectors: npt.NDArray[np.float32], stored: npt.NDArray[np.float32], encoding: Encoding
) -> tuple[npt.NDArray[np.float64], dict[int, str]]:
    exact, back = vectors.astype(np.float64), stored.astype(np.float64)
    cosine_error = cosine_errors(exact, back)
    with np.errstate(invalid="ignore"):
        norm, back_norm = np.linalg.norm(exact, axis=1), np.linalg.norm(back, axis=1)
        norm_error = np.abs(back_norm - norm) / norm
        # NaN compares false, so rows that are zero or not finite are invalid.
        valid = (cosine_error <= encoding.max_cosine_error) & (norm_error <= encoding.max_norm_error)
    reasons: dict[int, str] = {}
    for row in np.flatnonzero(~valid).tolist():
        largest = np.abs(exact[row]).max()
        if np.isnan(largest):
            reasons[row] = "NaN in the teacher output"
        elif np.isinf(largest):
            reasons[row] = "infinite value in the teacher output"
        elif largest == 0:
            reasons[row] = "zero vector"
        elif not np.isfinite(back[row]).all():
            reasons[row] = f"overflows {encoding.name}: largest value {largest:.4g}"
        elif back_norm[row] == 0:
            reasons[row] = f"vanishes in {encoding.name}: largest value {largest:.4g}"
        else:
            reasons[row] = (
                f"{encoding.name} would change it too much: 1 - cos {cosine_error[row]:.2g} "
                f"(bound {encoding.max_cosine_error:g}), norm off by {norm_error[row]:.2g} "
                f"(bound {encoding.max_norm_error:g})"
            )
    return np.where(valid, cosine_error, np.nan), reasons
