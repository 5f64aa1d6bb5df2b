"""One embedding space of a cache: a column of the table, read lazily, written a shard at a time."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from teacher_cache.errors import MissingRows
from teacher_cache.space import EmbeddingSpace
from teacher_cache.storage.codec import NumberFormat, check_rows, number_format
from teacher_cache.storage.index import Change, Index, ShardRecord, quarantine_key, shard_key
from teacher_cache.storage.shards import ShardedArray

SPACES = "spaces"


@dataclass(frozen=True)
class SpaceRecord:
    """What the index knows of one embedding space.

    Attributes:
        tokens, seconds: what encoding has cost so far, for foretelling the rest.
    """

    space: EmbeddingSpace
    storage: str
    tokens: int = 0
    seconds: float = 0.0

    def to_json(self) -> bytes:
        record = {
            "space": self.space.to_json(),
            "fingerprint": self.space.fingerprint,
            "storage": self.storage,
            "tokens": self.tokens,
            "seconds": self.seconds,
        }
        return json.dumps(record, indent=2, ensure_ascii=False).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "SpaceRecord":
        record = json.loads(data)
        space = EmbeddingSpace.from_json(record["space"])
        return cls(space, record["storage"], record["tokens"], record["seconds"])


class SpaceView:
    """One embedding space of a cache, read lazily. Holds no teacher and cannot call one."""

    def __init__(self, cache: Path, index: Index, record: SpaceRecord) -> None:
        self.index = index
        self.record = record
        self.space = record.space
        self.slug = record.space.slug
        self.array_name = f"{SPACES}/{self.slug}"
        self.form: NumberFormat = number_format(record.storage)
        self.vectors = ShardedArray(cache / self.array_name / "vectors.zarr")
        self._records: dict[int, ShardRecord] = {}

    @property
    def dims(self) -> int:
        return self.space.dims

    def _record(self, number: int, within: npt.NDArray[np.int64]) -> ShardRecord | None:
        """The shard's record, fetched again when it may have grown since."""
        if number < 0:  # -1 is what `lookup` says of a text that the table does not have
            return None
        record = self._records.get(number)
        if record is None or not record.present[within].all():
            record = self.index.shard(self.array_name, number)
            if record is not None:
                self._records[number] = record
        return record

    def present(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """`(n,)`: which rows have a vector."""
        mask = np.zeros(len(rows), dtype=bool)
        for number, places, within in self.vectors.by_shard(rows):
            record = self._record(number, within)
            if record is not None:
                mask[places] = record.present[within]
        return mask

    def present_count(self) -> int:
        """How many rows have a vector."""
        return sum(int(r.present.sum()) for r in self.index.shards(self.array_name).values())

    def quarantined(self) -> dict[int, str]:
        """Row -> why its vector was refused."""
        return self.index.quarantined(self.slug)

    def gather(
        self, rows: npt.NDArray[np.int64], out: npt.NDArray[np.float32] | None = None
    ) -> npt.NDArray[np.float32]:
        """`(n, dims)` float32 vectors of n rows, in the order asked for.

        Args:
            out: written into instead of a new array.

        Raises:
            MissingRows: a row has no vector in this space.
            DamagedCache: a shard is not what the index says it is.
        """
        rows = np.asarray(rows, dtype=np.int64)
        if out is None:
            out = np.empty((len(rows), self.dims), dtype=np.float32)
        for number, places, within in self.vectors.by_shard(rows):
            record = self._record(number, within)
            if record is None or not record.present[within].all():
                raise self._missing(rows)
            out[places] = self.vectors.read_rows(number, within, record.digest)
        return out

    def _missing(self, rows: npt.NDArray[np.int64]) -> MissingRows:
        missing = rows[~self.present(rows)]
        return MissingRows(
            f"space {self.slug} has no vector for {len(missing)} of {len(rows)} rows asked for, first row "
            f"{missing[0]}; `tcache build` with the same teacher fills it"
        )

    def missing_rows(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Rows that have no vector and were not refused one."""
        missing = rows[~self.present(rows)]
        if not len(missing):
            return missing
        refused = np.fromiter(self.quarantined(), dtype=np.int64)
        return np.setdiff1d(missing, refused, assume_unique=True)

    def write(
        self, number: int, rows: npt.NDArray[np.int64], vectors: npt.NDArray[np.float32]
    ) -> tuple[int, dict[int, str]]:
        """Store the vectors of some rows of one shard, durable and published when this returns.

        Rows that the number format cannot hold, and non-finite ones, are quarantined with a reason. The first
        write to a new space publishes the space too.

        Returns:
            How many were stored, and row -> reason for the others.

        Raises:
            DamagedCache: the shard's older rows are not what was written; nothing changes.
        """
        shard_rows = self.vectors.shard_rows
        checked = check_rows(vectors, self.form)
        good = np.array([place not in checked.refused for place in range(len(rows))], dtype=bool)
        refused = {int(rows[place]): reason for place, reason in checked.refused.items()}
        changes = [
            Change("quarantine", quarantine_key(self.slug, row), reason.encode()) for row, reason in refused.items()
        ]
        if good.any():
            before = self.index.shard(self.array_name, number)
            body = np.zeros((shard_rows, self.dims), dtype=self.form.dtype)
            present = np.zeros(shard_rows, dtype=bool)
            worst = float(checked.cosine_error[good].max())
            if before is not None:
                present |= before.present
                body[present] = self.vectors.read_checked(number, before.present, before.digest)
                worst = max(worst, before.worst_error)
            within = rows[good] - number * shard_rows
            body[within] = checked.stored[good]
            present[within] = True
            receipt = self.vectors.write_shard(number, body, present)
            self.vectors.grow(number * shard_rows + int(np.flatnonzero(present)[-1]) + 1)
            record = ShardRecord(receipt.digest, worst, receipt.size, present)
            changes.append(Change("shards", shard_key(self.array_name, number), record.pack()))
        if self.index.record("spaces", self.slug) is None:
            changes.append(Change("spaces", self.slug.encode(), self.record.to_json()))
        self.index.commit(changes)
        return int(good.sum()), refused

    def add_cost(self, tokens: int, seconds: float) -> None:
        """Remember what encoding cost, for `tcache plan`."""
        record = SpaceRecord(
            self.space, self.record.storage, self.record.tokens + tokens, self.record.seconds + seconds
        )
        self.index.commit([Change("spaces", self.slug.encode(), record.to_json())])
        self.record = record
