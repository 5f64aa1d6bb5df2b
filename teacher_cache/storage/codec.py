"""Number formats of stored vectors, and the check that what is stored is what the teacher said.

Every row is cast, cast back and compared before it is written. A row that the format cannot hold is handed
back with a reason; it is never stored silently.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from teacher_cache.errors import CacheError


@dataclass(frozen=True)
class NumberFormat:
    """How the numbers of one space are stored.

    Attributes:
        dtype: little-endian numpy dtype on disk.
        compressed: chunks go through blosc (lz4 after a bit shuffle) or are left as they are.
        max_cosine_error: largest allowed 1 - cos between a row and what is read back.
        max_norm_error: largest allowed relative error of a row's length.
    """

    name: str
    dtype: str
    compressed: bool
    max_cosine_error: float
    max_norm_error: float

    @property
    def bytes_per_value(self) -> int:
        return np.dtype(self.dtype).itemsize


# float16 keeps 11 significant bits: on real vectors 1 - cos stays below 1e-7. The bounds leave room for
# rows with many tiny entries, not for rows that overflow or vanish.
FORMATS = {
    "float16": NumberFormat("float16", "<f2", True, 1e-6, 1e-3),
    "raw": NumberFormat("raw", "<f2", False, 1e-6, 1e-3),
}

_BLOCK_ROWS = 1024


def number_format(name: str) -> NumberFormat:
    """The format of that name.

    Raises:
        CacheError: no such format.
    """
    try:
        return FORMATS[name]
    except KeyError:
        raise CacheError(f"unknown number format {name!r}; known: {', '.join(FORMATS)}") from None


@dataclass(frozen=True)
class Checked:
    """Rows as they will be stored, with the verdict on each.

    Attributes:
        stored: `(n, d)` in the format's dtype.
        cosine_error: `(n,)` float64, 1 - cos of every row; NaN where the row is refused.
        refused: row position -> why it must not be stored.
    """

    stored: npt.NDArray[np.generic]
    cosine_error: npt.NDArray[np.float64]
    refused: dict[int, str]


def check_rows(vectors: npt.NDArray[np.float32], form: NumberFormat) -> Checked:
    """Cast `(n, d)` float32 vectors to the format and compare every row with what will be read back."""
    with np.errstate(over="ignore"):
        stored = vectors.astype(form.dtype)
    cosine_error = np.empty(len(vectors))
    refused: dict[int, str] = {}
    for start in range(0, len(vectors), _BLOCK_ROWS):  # in float64, so not all at once
        block = slice(start, start + _BLOCK_ROWS)
        cosine_error[block], reasons = _compare(vectors[block], stored[block], form)
        refused |= {start + row: reason for row, reason in reasons.items()}
    return Checked(stored, cosine_error, refused)


def _compare(
    vectors: npt.NDArray[np.float32], stored: npt.NDArray[np.generic], form: NumberFormat
) -> tuple[npt.NDArray[np.float64], dict[int, str]]:
    exact, back = vectors.astype(np.float64), stored.astype(np.float64)
    with np.errstate(invalid="ignore"):
        norm, back_norm = np.linalg.norm(exact, axis=1), np.linalg.norm(back, axis=1)
        # 1 - cos from the chord between the unit vectors: subtracting a dot product from 1 would leave
        # only rounding noise at 1e-8.
        chord = exact / norm[:, None] - back / back_norm[:, None]
        cosine_error = (chord**2).sum(axis=1) / 2
        norm_error = np.abs(back_norm - norm) / norm
        # NaN compares false, so a row that is not finite or has no length is not good.
        good = (cosine_error <= form.max_cosine_error) & (norm_error <= form.max_norm_error)
    reasons: dict[int, str] = {}
    for row in np.flatnonzero(~good).tolist():
        largest = np.abs(exact[row]).max()
        if np.isnan(largest):
            reasons[row] = "the teacher gave NaN"
        elif np.isinf(largest):
            reasons[row] = "the teacher gave an infinite value"
        elif largest == 0:
            reasons[row] = "the teacher gave a zero vector"
        elif not np.isfinite(back[row]).all():
            reasons[row] = f"overflows {form.name}: largest value {largest:.4g}"
        elif back_norm[row] == 0:
            reasons[row] = f"vanishes in {form.name}: largest value {largest:.4g}"
        else:
            reasons[row] = (
                f"{form.name} would change it too much: 1 - cos {cosine_error[row]:.2g} "
                f"(bound {form.max_cosine_error:g}), norm off by {norm_error[row]:.2g} "
                f"(bound {form.max_norm_error:g})"
            )
    return np.where(good, cosine_error, np.nan), reasons
