"""Token columns of a space: what its teacher said of each text token by token, in arrays of byte strings.

A row of `tokens.zarr` is T last hidden states in the number format, one of `pieces.zarr` T pieces as int32, one of
`attention.zarr` T importances and z maps of T by T as float16. States and pieces of a row are published together;
attention may come later, or never.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from teacher_cache.errors import CacheError, DamagedCache, MissingRows, TeacherError
from teacher_cache.storage.chunks import Rows
from teacher_cache.storage.codec import ENCODINGS, Encoding, check_rows, encoding_name, stored_name
from teacher_cache.storage.column import Column
from teacher_cache.storage.index import Change, Index, quarantine_key
from teacher_cache.storage.shards import ShardedArray
from teacher_cache.tokens.request import TextTokens, TokenRequest, TokenShape

STATES = "tokens.zarr"
PIECES = "pieces.zarr"
ATTENTION = "attention.zarr"

TOKEN_ARRAYS = (STATES, PIECES, ATTENTION)

# Rows of one inner chunk: a single text costs little to read, and blosc has enough to compress.
CHUNK_ROWS = 8
# What a shard may take before compression, of texts of that many tokens.
SHARD_BYTES = 64 * 2**20
USUAL_TOKENS = 32
# Hidden states have a few numbers that are far larger than the rest, which cost the others of their block precision:
# half a step of every number of the worst block is 1 - cos = 5e-4, and one token must not cost a text its states.
TOKEN_ENCODINGS: dict[str, Encoding] = {
    "float16": ENCODINGS["float16"],
    "float16-raw": ENCODINGS["float16-raw"],
    "int8": replace(ENCODINGS["int8"], max_cosine_error=5e-4),
}
_PIECE = np.dtype("<i4")
_HALF = np.dtype("<f2")
# Tokens that are converted and compared at a time.
_CHECKED_TOKENS = 4096


@dataclass(frozen=True)
class TokenRecord:
    """What the index knows of the token columns of one space.

    Attributes:
        attention: layers whose maps are kept, counted from 1 and ascending; None where there is no attention.
    """

    shape: TokenShape
    storage: str
    attention: tuple[int, ...] | None = None

    @classmethod
    def wanted(
        cls, shape: TokenShape, request: TokenRequest, storage: str | None, held: "TokenRecord | None"
    ) -> "TokenRecord":
        """What a request means for a space that holds those columns, or none.

        Args:
            request: with `attention=()` for the layers that are held, or the last one.
            storage: None takes the format that is held, or float16.
        """
        layers = request.attention
        if layers is not None and not layers:
            layers = (held.attention if held is not None else None) or (shape.layers,)
        if storage is None:
            storage = "float16" if held is None else held.storage
        return cls(shape, encoding_name(storage), layers)

    @property
    def encoding(self) -> Encoding:
        return token_encoding(self.storage)

    @property
    def arrays(self) -> tuple[str, ...]:
        """Folders inside the space's."""
        return (STATES, PIECES) if self.attention is None else (STATES, PIECES, ATTENTION)

    def state_bytes(self) -> int:
        """Of one token's state, before compression."""
        return self.encoding.row_bytes(self.shape.width)

    def token_bytes(self) -> int:
        """Of one token's state and piece, before compression."""
        return self.state_bytes() + 4 * _PIECE.itemsize

    def attention_bytes(self, tokens: int) -> int:
        """Of the attention of a text of that many tokens, before compression."""
        return 0 if self.attention is None else _HALF.itemsize * tokens * (1 + len(self.attention) * tokens)

    def shard_rows(self, of_table: int) -> int:
        """Rows of a shard: the largest part of the table's that stays small with texts of a usual length."""
        text_bytes = USUAL_TOKENS * self.token_bytes() + self.attention_bytes(USUAL_TOKENS)
        wanted = max(1, SHARD_BYTES // text_bytes)
        return next(rows for rows in range(min(wanted, of_table), 0, -1) if of_table % rows == 0)

    def describe(self) -> str:
        layers = self.attention
        maps = "" if layers is None else f", attention of layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"
        return f"tokens of {self.shape.width} as {self.storage}{maps}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"storage": stored_name(self.storage)}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "TokenRecord":
        layers = record["attention"]
        storage = encoding_name(record["storage"])
        return cls(TokenShape(**record["shape"]), storage, None if layers is None else tuple(layers))


def token_encoding(name: str) -> Encoding:
    """The number format of token states of that name.

    Raises:
        CacheError: states are not kept in such a format.
    """
    try:
        return TOKEN_ENCODINGS[encoding_name(name)]
    except KeyError:
        raise CacheError(
            f"unknown encoding {name!r} of token states; expected one of {', '.join(TOKEN_ENCODINGS)}"
        ) from None


def checked_layers(layers: Sequence[int], shape: TokenShape) -> tuple[int, ...]:
    """Layers whose attention is asked for, if the model has them.

    Raises:
        TeacherError: it does not, or they do not ascend.
    """
    known = tuple(layers)
    if not known or sorted(set(known)) != list(known) or known[0] < 1 or known[-1] > shape.layers:
        raise TeacherError(
            f"attention layers {','.join(map(str, known)) or 'none'}: expected ascending numbers from 1 to "
            f"{shape.layers}, the layers of this teacher"
        )
    return known


def create_array(folder: Path, record: TokenRecord, array: str, shard_rows: int) -> ShardedArray:
    """An empty array of that name; all of one space have shards of as many rows."""
    return ShardedArray.create_blobs(
        folder,
        shard_rows=shard_rows,
        chunk_rows=math.gcd(CHUNK_ROWS, shard_rows),
        itemsize={STATES: np.dtype(record.encoding.dtype), PIECES: _PIECE, ATTENTION: _HALF}[array].itemsize,
        compressed=record.encoding.compressed or array != STATES,
    )


@dataclass(frozen=True, slots=True)
class StoredTokens:
    """The token columns of one text as they are stored.

    Attributes:
        attention: None where it was not asked for.
    """

    states: bytes
    pieces: bytes
    attention: bytes | None = None

    @property
    def tokens(self) -> int:
        return len(self.pieces) // (4 * _PIECE.itemsize)

    @property
    def bytes(self) -> int:
        return len(self.states) + len(self.pieces) + len(self.attention or b"")


@dataclass
class CheckedTokens:
    """Texts as they will be stored, with the verdict on each.

    Attributes:
        stored: by place, of the texts that are not refused.
        errors: by place, a bound on the largest 1 - cos of a token's state.
        quarantined: place -> why the text must not be stored.
    """

    stored: dict[int, StoredTokens]
    errors: dict[int, float]
    quarantined: dict[int, str]


class TokenColumns:
    """Reads and writes the token columns of one space.

    Attributes:
        record: widths, number format and attention layers.
        columns: by the name of their array.
    """

    def __init__(self, folder: Path, name: str, index: Index, record: TokenRecord) -> None:
        """Open the columns of a space.

        Args:
            folder: of the space.
            name: of the space's folder in the index.
        """
        self.index = index
        self.record = record
        self.encoding = record.encoding
        self.columns = {array: Column(index, f"{name}/{array}", folder / array) for array in record.arrays}
        self.shard_rows = self.columns[STATES].shard_rows
        self._name = name

    # Reading

    def present(self, rows: npt.NDArray[np.int64], attention: bool = False) -> npt.NDArray[np.bool_]:
        """`(n,)`: which rows have states and pieces, and if asked attention too."""
        there = self.columns[STATES].present(rows) & self.columns[PIECES].present(rows)
        if not attention:
            return there
        maps = self.columns.get(ATTENTION)
        return np.zeros(len(rows), dtype=bool) if maps is None else there & maps.present(rows)

    def present_count(self, array: str = STATES) -> int:
        """How many rows an array has."""
        name = self.columns[array].name
        return sum(int(record.present.sum()) for _, record in self.index.iter_shards(name))

    def worst_error(self) -> float:
        """Largest 1 - cos of a stored state against what the teacher said."""
        name = self.columns[STATES].name
        return max((record.worst_error for _, record in self.index.iter_shards(name)), default=0.0)

    def quarantined(self, array: str = STATES, rows: range | None = None) -> dict[int, str]:
        """Row -> why its tokens were refused; of all rows, or of a range."""
        return self.index.quarantined(self.columns[array].name, rows)

    def missing_rows(self, rows: npt.NDArray[np.int64], attention: bool = False) -> npt.NDArray[np.int64]:
        """Ascending rows that lack states, or if asked attention, and were not refused them."""
        lacking = [self._unanswered(rows, self.columns[STATES])]
        if attention and ATTENTION in self.columns:
            lacking.append(self._unanswered(rows, self.columns[ATTENTION]))
        return np.unique(np.concatenate(lacking))

    def _unanswered(self, rows: npt.NDArray[np.int64], column: Column) -> npt.NDArray[np.int64]:
        missing = rows[~column.present(rows)]
        if not len(missing):
            return missing
        refused = self.index.quarantined(column.name, range(int(missing.min()), int(missing.max()) + 1))
        return np.setdiff1d(missing, np.fromiter(refused, dtype=np.int64))

    def gather(self, rows: npt.NDArray[np.int64], attention: bool = False) -> list[TextTokens]:
        """What the teacher said of n texts, in the order asked for.

        Raises:
            MissingRows: a row lacks a column that is asked for.
            DamagedCache: a shard is not what the index says it is.
        """
        return [self.restore(stored) for stored in self.gather_stored(rows, attention)]

    def gather_stored(self, rows: npt.NDArray[np.int64], attention: bool = False) -> list[StoredTokens]:
        """The same as it is stored, for `restore`."""
        rows = np.asarray(rows, dtype=np.int64)
        if not len(rows):
            return []
        arrays = (STATES, PIECES, ATTENTION) if attention else (STATES, PIECES)
        try:
            parts = [self.columns[array].read(rows) for array in arrays]
        except (KeyError, MissingRows):
            raise self._missing(rows, attention) from None
        return [StoredTokens(*row) for row in zip(*parts, strict=True)]

    def gather_pieces(self, rows: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int32]]:
        """`(T, 4)` pieces of n texts alone, a hundredth of what their states take."""
        rows = np.asarray(rows, dtype=np.int64)
        try:
            return [_pieces(blob) for blob in self.columns[PIECES].read(rows)]
        except MissingRows:
            raise self._missing(rows, attention=False) from None

    def _missing(self, rows: npt.NDArray[np.int64], attention: bool) -> MissingRows:
        missing = rows[~self.present(rows, attention)]
        what, columns = ("attention", "vectors,tokens,attention") if attention else ("tokens", "vectors,tokens")
        return MissingRows(
            f"{self._name} has no {what} for {len(missing)} of {len(rows)} rows asked for, first row "
            f"{missing[0] if len(missing) else '?'}; `tcache build --columns {columns}` with the same teacher fills it"
            f"{self.index.as_of}"
        )

    def restore(self, stored: StoredTokens, states: npt.NDArray[np.floating] | None = None) -> TextTokens:
        """One text out of its stored bytes.

        Args:
            states: `(T, width)` to write the states into instead of a new float32 array.

        Raises:
            DamagedCache: the columns of the text do not go together.
        """
        self._require(stored)
        into = np.empty((stored.tokens, self.record.shape.width), dtype=np.float32) if states is None else states
        self.encoding.restore(self._states(stored.states), into)
        if stored.attention is None:
            return TextTokens(into, _pieces(stored.pieces))
        halves = np.frombuffer(stored.attention, dtype=_HALF).astype(np.float32)
        maps = halves[stored.tokens :].reshape(-1, stored.tokens, stored.tokens)
        return TextTokens(into, _pieces(stored.pieces), halves[: stored.tokens], maps)

    def _states(self, blob: bytes) -> Rows:
        return np.frombuffer(blob, dtype=self.encoding.dtype).reshape(-1, self.encoding.width(self.record.shape.width))

    def _require(self, stored: StoredTokens) -> None:
        wrong = self.wrong(stored)
        if wrong:
            raise DamagedCache(f"{self._name}: {wrong}; `tcache verify --deep` tells where")

    def wrong(self, stored: StoredTokens) -> str:
        """Why the columns of a text do not go together; "" if they do."""
        tokens = stored.tokens
        if not tokens or len(stored.pieces) % (4 * _PIECE.itemsize):
            return f"{len(stored.pieces)} bytes of pieces, expected a multiple of {4 * _PIECE.itemsize}"
        if len(stored.states) != tokens * self.record.state_bytes():
            return f"{tokens} pieces, but states of {len(stored.states) / self.record.state_bytes():g} tokens"
        if stored.attention is not None and len(stored.attention) != self.record.attention_bytes(tokens):
            return f"{tokens} pieces, but {len(stored.attention)} bytes of attention, which are not for as many"
        return ""

    def finite(self, stored: StoredTokens) -> bool:
        """Whether every number of a text is one; of columns that go together."""
        said = self.restore(stored)
        parts = [said.states, *(part for part in (said.importance, said.attention) if part is not None)]
        return all(bool(np.isfinite(part).all()) for part in parts)

    # Writing

    def check(self, said: Sequence[TextTokens], *, attention: bool) -> CheckedTokens:
        """Convert what the teacher said of n texts to what is stored, and compare.

        Raises:
            TeacherError: it is not what its configuration promised.
        """
        checked = CheckedTokens({}, {}, {})
        sound = []
        for place, text in enumerate(said):
            self._require_shape(text, attention)
            if not len(text.pieces):
                checked.quarantined[place] = "tokens: none"
            elif attention and not all(np.isfinite(part).all() for part in (text.importance, text.attention)):  # type: ignore[arg-type]
                checked.quarantined[place] = "tokens: attention is not finite"
            else:
                sound.append(place)
        group: list[int] = []
        tokens = 0
        for place in sound:
            group.append(place)
            tokens += len(said[place].pieces)
            if tokens >= _CHECKED_TOKENS:
                self._check(said, group, checked, attention)
                group, tokens = [], 0
        if group:
            self._check(said, group, checked, attention)
        return checked

    def _require_shape(self, text: TextTokens, attention: bool) -> None:
        tokens, width = len(text.pieces), self.record.shape.width
        found = [text.pieces.shape, text.states.shape]
        expected: list[tuple[int, ...]] = [(tokens, 4), (tokens, width)]
        if attention:
            found += [() if part is None else part.shape for part in (text.importance, text.attention)]
            expected += [(tokens,), (len(self.record.attention or ()), tokens, tokens)]
        if found != expected:
            raise TeacherError(f"the teacher gave tokens of shapes {found}, its configuration promised {expected}")

    def _check(self, said: Sequence[TextTokens], places: list[int], checked: CheckedTokens, attention: bool) -> None:
        together = np.concatenate([said[place].states for place in places])
        stored = self.encoding.store(together)
        errors = _error_bounds(together, stored, self.encoding)
        begin = 0
        for place in places:
            text = said[place]
            end = begin + len(text.pieces)
            reasons: dict[int, str] = {}
            if not errors[begin:end].max() <= self.encoding.max_cosine_error:
                exact = check_rows(together[begin:end], self.encoding)
                reasons, errors[begin:end] = exact.quarantined, exact.cosine_error
            if reasons:
                checked.quarantined[place] = f"tokens: {next(iter(reasons.values()))}"
            else:
                maps = None
                if attention and text.importance is not None and text.attention is not None:
                    maps = np.concatenate([text.importance, text.attention.ravel()]).astype(_HALF).tobytes()
                checked.stored[place] = StoredTokens(
                    stored[begin:end].tobytes(), text.pieces.astype(_PIECE).tobytes(), maps
                )
                checked.errors[place] = float(errors[begin:end].max())
            begin = end

    def write(
        self,
        number: int,
        stored: dict[int, StoredTokens],
        errors: dict[int, float],
        refused: dict[int, str],
    ) -> list[Change]:
        """Write some rows of one shard, durable when this returns; what makes them true is given back.

        A column that a row has already stays as it is.

        Args:
            stored, errors, refused: by row of the table, as `check` says by place.

        Raises:
            DamagedCache: the shard's older rows are not what was written; nothing changes.
        """
        changes: list[Change] = []
        shard = range(number * self.shard_rows, (number + 1) * self.shard_rows)
        known = {array: self.index.quarantined(column.name, shard) for array, column in self.columns.items()}
        for array, column in self.columns.items():
            blobs = {row: _part(text, array) for row, text in stored.items()}
            rows = np.array(sorted(row for row, blob in blobs.items() if blob is not None), dtype=np.int64)
            rows = rows[~column.present(rows)]
            if len(rows):
                values = np.empty(len(rows), dtype=object)
                values[:] = [blobs[row] for row in rows.tolist()]
                worst = max(errors[row] for row in rows.tolist()) if array == STATES else 0.0
                changes.append(column.write(number, rows, values, worst))
                changes += [
                    Change("quarantine", quarantine_key(column.name, row), None)
                    for row in rows.tolist()
                    if row in known[array]
                ]
            given_up = np.array(sorted(refused) if array != PIECES else [], dtype=np.int64)
            changes += [
                Change("quarantine", quarantine_key(column.name, row), refused[row].encode())
                for row in given_up[~column.present(given_up)].tolist()
            ]
        return changes


def _error_bounds(states: npt.NDArray[np.float32], stored: Rows, encoding: Encoding) -> npt.NDArray[np.floating]:
    """`(n,)`: a bound on 1 - cos between the rows of `(n, d)` states and what is read back; NaN or infinite if not.

    |x - y|^2 = (|x| - |y|)^2 + 2 |x| |y| (1 - cos), all in float32: a tenth of the time of `check_rows`. It bounds the
    error of the length too, whose square is far below what a format may do to it.
    """
    back = np.empty_like(states)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        encoding.restore(stored, back)
        lengths = np.einsum("ij,ij->i", states, states) * np.einsum("ij,ij->i", back, back)
        back -= states
        return np.asarray(np.einsum("ij,ij->i", back, back) / (2 * np.sqrt(lengths)))


def _part(text: StoredTokens, array: str) -> bytes | None:
    return {STATES: text.states, PIECES: text.pieces, ATTENTION: text.attention}[array]


def _pieces(blob: bytes) -> npt.NDArray[np.int32]:
    return np.frombuffer(blob, dtype=_PIECE).reshape(-1, 4)
