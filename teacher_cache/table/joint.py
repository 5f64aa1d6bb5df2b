"""Several embedding spaces of the same rows read as one, to train a student on two or more teachers.

A joint vector concatenates the unit vectors of the k spaces, divided by sqrt(k): it has unit length, and the cosine of
two joint vectors is the mean of the spaces' cosines.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from teacher_cache.errors import CacheError
from teacher_cache.storage.codec import Encoding, Stored, find_encoding
from teacher_cache.table.view import SpaceView


class JointSpace:
    """Read-only view of two or more spaces of one cache.

    Attributes:
        dims: sum of the spaces' dims.

    Raises:
        CacheError: fewer than two spaces, or the same space twice.
    """

    def __init__(self, spaces: Sequence[SpaceView]) -> None:
        slugs = [space.slug for space in spaces]
        if len(set(slugs)) < max(2, len(slugs)):
            raise CacheError(f"expected two or more different spaces, found {slugs}")
        self.spaces = tuple(spaces)
        self.slug = "+".join(slugs)
        self.dims = sum(space.dims for space in spaces)
        self.encoding: Encoding = find_encoding("float32")
        self.tokens = None

    def present(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """`(n,)` bool, true for rows that have a vector in every space."""
        return np.asarray(np.logical_and.reduce([space.present(rows) for space in self.spaces]))

    def quarantined(self) -> dict[int, str]:
        """Row -> reason of its quarantine in one of the spaces."""
        return {row: reason for space in reversed(self.spaces) for row, reason in space.quarantined().items()}

    def gather(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """`(n, dims)` float32 joint vectors of n rows.

        Raises:
            MissingRows: a row has no vector in one of the spaces.
        """
        joint = np.empty((len(rows), self.dims), dtype=np.float32)
        self.gather_stored(rows, joint)
        return joint

    def gather_stored(self, rows: npt.NDArray[np.int64], out: Stored) -> Stored:
        """`gather` into `out`; the stored form of a joint vector is float32."""
        scale = np.float32(1 / np.sqrt(len(self.spaces)))
        begin = 0
        for space in self.spaces:
            part = space.gather(rows)
            part *= scale / np.linalg.norm(part, axis=1, keepdims=True)
            out[:, begin : begin + space.dims] = part
            begin += space.dims
        return out
