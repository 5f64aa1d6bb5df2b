"""What a build encodes next, and its results that are not committed yet."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from teacher_cache.errors import SpaceMismatch, TeacherError
from teacher_cache.storage.index import Change
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.intake import describe_difference, differing_rows, excerpt
from teacher_cache.table.view import SpaceView
from teacher_cache.teachers import token_shape
from teacher_cache.teachers.base import Encoded, TeacherSpec
from teacher_cache.tokens.request import TokenRequest
from teacher_cache.tokens.token_columns import StoredTokens, TokenColumns

# Most float32 token output of a batch. Two batches are in memory at once, with Ray two for each actor.
BATCH_BYTES = 128 * 2**20
# Bytes of text per token, estimated low: batches are cut before anything is tokenized.
TOKEN_BYTES = 3


@dataclass
class BuildCounts:
    """Counts of one build; `quarantined` are the rows that lack a requested column."""

    encoded: int = 0
    quarantined: set[int] = field(default_factory=set)
    truncated: int = 0
    repaired: int = 0
    tokens: int = 0
    token_texts: int = 0
    token_bytes: int = 0

    @property
    def stored(self) -> int:
        return self.encoded - len(self.quarantined)

    def add(self, encoded: Encoded) -> None:
        """Add one batch."""
        self.encoded += len(encoded.vectors)
        self.truncated += int(encoded.truncated.sum())
        self.repaired += int(encoded.repaired.sum())
        self.tokens += int(encoded.tokens.sum())


@dataclass
class PendingShard:
    """Uncommitted vectors, and unwritten token shards by number, of one shard; `waiting` rows are not encoded yet."""

    waiting: int
    rows: list[npt.NDArray[np.int64]] = field(default_factory=list)
    vectors: list[npt.NDArray[np.float32]] = field(default_factory=list)
    written: list[Change] = field(default_factory=list)  # durable token shards, committed together with the vectors
    tokens: dict[int, "PendingTokens"] = field(default_factory=dict)

    @property
    def has_data(self) -> bool:
        return bool(self.rows or self.written or any(part.has_data for part in self.tokens.values()))


@dataclass
class PendingTokens:
    """Token columns of one token shard that are not written yet, by row; `waiting` as in `PendingShard`."""

    waiting: int
    stored: dict[int, StoredTokens] = field(default_factory=dict)
    errors: dict[int, float] = field(default_factory=dict)
    quarantined: dict[int, str] = field(default_factory=dict)

    @property
    def has_data(self) -> bool:
        return bool(self.stored or self.quarantined)

    def add(
        self,
        columns: TokenColumns,
        rows: npt.NDArray[np.int64],
        encoded: Encoded,
        spec: TeacherSpec,
        counts: BuildCounts,
    ) -> None:
        """Add the tokens of one batch in their storage encoding, at most half their memory, and count them."""
        if encoded.by_token is None or len(encoded.by_token) != len(rows):
            raise TeacherError(f"{spec.space.teacher} returned no token columns for {len(rows)} texts")
        attention = spec.request is not None and spec.request.attention is not None
        checked = columns.check(encoded.by_token, attention=attention)
        # Some texts lack only their vector or only their attention.
        has_states, has_all = columns.present(rows), columns.present(rows, attention)
        self.waiting -= len(rows)
        for place, row in enumerate(rows.tolist()):
            if has_all[place]:
                continue
            if place in checked.quarantined:
                self.quarantined[row] = checked.quarantined[place]
                counts.quarantined.add(row)
                continue
            self.stored[row] = stored = checked.stored[place]
            self.errors[row] = checked.errors[place]
            counts.token_texts += 1
            counts.token_bytes += len(stored.attention or b"") if has_states[place] else stored.bytes

    def write(self, columns: TokenColumns, number: int) -> list[Change]:
        """Write the tokens to token shard `number`, clear them, and return the changes to commit."""
        changes = columns.write(number, self.stored, self.errors, self.quarantined) if self.has_data else []
        self.stored, self.errors, self.quarantined = {}, {}, {}
        return changes


def new_vectors(
    table: TeacherCache, view: SpaceView, rows: npt.NDArray[np.int64], vectors: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Rows that have no vector yet, and their vectors."""
    present = view.present(rows)
    if present.any():
        stored, encoded = view.gather(rows[present]), vectors[present]
        wrong = differing_rows(stored, encoded)
        if len(wrong):
            place = wrong[0]
            (text,) = table.texts(rows[present][place : place + 1])
            raise SpaceMismatch(
                f"the teacher's vector of {excerpt(text)} differs from the one in space {view.slug}: "
                f"{describe_difference(stored[place], encoded[place])}; its token columns would be another teacher's: "
                "build into another cache"
            )
    return rows[~present], vectors[~present]


def missing_by_shard(
    view: SpaceView, used: npt.NDArray[np.bool_], request: TokenRequest | None
) -> Iterator[npt.NDArray[np.int64]]:
    """Used rows that lack a requested column and are not quarantined, ascending, one array per shard.

    Rows without a vector because it was quarantined get no tokens either.
    """
    shard_rows = view.vectors.shard_rows
    for first in range(0, len(used), shard_rows):
        rows = first + np.flatnonzero(used[first : first + shard_rows])
        missing = view.missing_rows(rows)
        if request is not None and view.tokens is not None:
            lacking = view.tokens.missing_rows(rows[view.present(rows)], attention=request.attention is not None)
            missing = np.union1d(missing, lacking)
        if len(missing):
            yield missing


def batches(
    table: TeacherCache,
    parts: Iterator[npt.NDArray[np.int64]],
    batch_rows: dict[int, npt.NDArray[np.int64]],
    spec: TeacherSpec,
    size: int,
) -> Iterator[list[str]]:
    """Batches of texts of the missing rows, part by part; sorted by length within a part, to reduce padding.

    Args:
        batch_rows: filled with the rows of each batch, by batch number, before its texts are yielded.
        size: most texts of a batch. Batches with tokens are also bounded by `BATCH_BYTES`.
    """
    shape = None if spec.request is None else token_shape(spec)
    layers = 0 if spec.request is None else len(spec.request.attention or ())
    number = 0
    for rows in parts:
        texts = table.texts(rows)
        order = np.argsort([len(text) for text in texts], kind="stable")
        start = 0
        while start < len(rows):
            chosen = order[start : start + size]
            if shape is not None:
                sizes = np.array([len(texts[place].encode()) for place in chosen.tolist()])
                tokens = np.minimum(spec.space.max_length, 2 + sizes / TOKEN_BYTES)
                token_bytes = np.cumsum(4 * tokens * (shape.width + layers * tokens))
                chosen = chosen[: max(1, int(np.searchsorted(token_bytes, BATCH_BYTES, side="right")))]
            batch_rows[number] = rows[chosen]
            number += 1
            start += len(chosen)
            yield [texts[place] for place in chosen.tolist()]
