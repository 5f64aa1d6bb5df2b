"""What a build asks for next, and what has come back and is not true yet."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from teacher_cache.errors import SpaceMismatch, TeacherError
from teacher_cache.storage.index import Change
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.intake import difference, disagreeing, excerpt
from teacher_cache.table.view import SpaceView
from teacher_cache.teachers import token_shape
from teacher_cache.teachers.base import Encoded, TeacherSpec
from teacher_cache.tokens.request import TokenRequest
from teacher_cache.tokens.token_columns import StoredTokens, TokenColumns

# What a worker may say of a batch token by token, in float32: two batches of it are in memory, with Ray two an actor.
BATCH_BYTES = 128 * 2**20
# Bytes of a text that make one token, rather too few: batches are cut before anything is tokenized.
TOKEN_BYTES = 3


@dataclass
class OpenShard:
    """Vectors of one shard that are not committed yet, and what of its token shards is durable and not true yet."""

    waiting: int
    rows: list[npt.NDArray[np.int64]] = field(default_factory=list)
    vectors: list[npt.NDArray[np.float32]] = field(default_factory=list)
    written: list[Change] = field(default_factory=list)
    tokens: dict[int, "OpenTokens"] = field(default_factory=dict)

    @property
    def begun(self) -> bool:
        return bool(self.rows or self.written or any(part.begun for part in self.tokens.values()))


@dataclass
class OpenTokens:
    """Token columns of one shard of theirs that are not written yet, by row."""

    waiting: int
    stored: dict[int, StoredTokens] = field(default_factory=dict)
    errors: dict[int, float] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)

    @property
    def begun(self) -> bool:
        return bool(self.stored or self.refused)

    def take(self, columns: TokenColumns, rows: npt.NDArray[np.int64], encoded: Encoded, spec: TeacherSpec) -> "Taken":
        """Convert what the teacher said of rows to what is stored, at once: it takes half the memory or less."""
        if encoded.by_token is None or len(encoded.by_token) != len(rows):
            raise TeacherError(f"{spec.space.teacher} was asked for tokens of {len(rows)} texts and gave none")
        attention = spec.request is not None and spec.request.attention is not None
        checked = columns.check(encoded.by_token, attention=attention)
        # Of texts that lack their vector or their attention alone.
        states_there, all_there = columns.present(rows), columns.present(rows, attention)
        taken = Taken()
        self.waiting -= len(rows)
        for place, row in enumerate(rows.tolist()):
            if all_there[place]:
                continue
            if place in checked.refused:
                self.refused[row] = checked.refused[place]
                taken.refused.add(row)
                continue
            self.stored[row] = stored = checked.stored[place]
            self.errors[row] = checked.errors[place]
            taken.texts += 1
            taken.bytes += len(stored.attention or b"") if states_there[place] else stored.bytes
        return taken

    def write(self, columns: TokenColumns, number: int) -> list[Change]:
        """Make durable what is there, and let go of it."""
        changes = columns.write(number, self.stored, self.errors, self.refused) if self.begun else []
        self.stored, self.errors, self.refused = {}, {}, {}
        return changes


@dataclass
class Taken:
    """What came of one batch's tokens: how many texts and bytes will be written, and the rows that were refused."""

    texts: int = 0
    bytes: int = 0
    refused: set[int] = field(default_factory=set)


def new_vectors(
    table: TeacherCache, view: SpaceView, rows: npt.NDArray[np.int64], vectors: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """The rows that have no vector yet, and theirs; those that are there stay.

    Raises:
        SpaceMismatch: one that is there is not what the teacher says now.
    """
    held = view.present(rows)
    if held.any():
        stored, said = view.gather(rows[held]), vectors[held]
        wrong = disagreeing(stored, said)
        if len(wrong):
            place = wrong[0]
            (text,) = table.texts(rows[held][place : place + 1])
            raise SpaceMismatch(
                f"the teacher says something else of {excerpt(text)} than space {view.slug} holds: "
                f"{difference(stored[place], said[place])}; its token columns would be another teacher's: build into "
                "another cache"
            )
    return rows[~held], vectors[~held]


def missing_by_shard(
    view: SpaceView, used: npt.NDArray[np.bool_], request: TokenRequest | None
) -> Iterator[npt.NDArray[np.int64]]:
    """The used rows that lack a column that is wanted and were not refused it, ascending, a shard at a time.

    A text whose vector was refused is not asked for its tokens either.
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
    """Texts of the missing rows, part by part; within a part sorted by length, so batches pad little.

    Args:
        batch_rows: the rows of each batch by its number, noted before its texts are handed out.
        size: most texts of a batch; where tokens are asked for, `BATCH_BYTES` bounds it too.
    """
    shape = None if spec.request is None else token_shape(spec)
    layers = 0 if spec.request is None else len(spec.request.attention or ())
    handed_out = 0
    for rows in parts:
        texts = table.texts(rows)
        order = np.argsort([len(text) for text in texts], kind="stable")
        start = 0
        while start < len(rows):
            chosen = order[start : start + size]
            if shape is not None:
                sizes = np.array([len(texts[place].encode()) for place in chosen.tolist()])
                tokens = np.minimum(spec.space.max_length, 2 + sizes / TOKEN_BYTES)
                said = np.cumsum(4 * tokens * (shape.width + layers * tokens))
                chosen = chosen[: max(1, int(np.searchsorted(said, BATCH_BYTES, side="right")))]
            batch_rows[handed_out] = rows[chosen]
            handed_out += 1
            start += len(chosen)
            yield [texts[place] for place in chosen.tolist()]
