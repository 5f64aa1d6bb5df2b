"""Token columns of a space: the token-level teacher output of each text, in arrays of byte strings.

A row of `tokens.zarr` holds T encoded last hidden states, a row of `pieces.zarr` T pieces as int32, and a row of
`attention.zarr` T importances and z maps of T x T as float16. States and pieces of a row are committed together;
attention is optional and may be added later.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from teacher_cache.errors import CacheError, DamagedCache, MissingRows, TeacherError
from teacher_cache.storage.chunks import BLOBS, Rows
from teacher_cache.storage.codec import ENCODINGS, Encoding, check_rows, encoding_name, stored_name
from teacher_cache.storage.column import Column
from teacher_cache.storage.index import Change, Index
from teacher_cache.storage.shards import ShardedArray
from teacher_cache.tokens.request import TextTokens, TokenRequest, TokenShape

STATES = "tokens.zarr"
PIECES = "pieces.zarr"
ATTENTION = "attention.zarr"

TOKEN_ARRAYS = (STATES, PIECES, ATTENTION)
# Attributes of `StoredTokens` by array.
_FIELDS = {STATES: "states", PIECES: "pieces", ATTENTION: "attention"}

# Rows of one inner chunk: one text is cheap to read, and blosc has enough data to compress.
CHUNK_ROWS = 8
# Largest size of a shard before compression, if its texts have `USUAL_TOKENS` tokens.
SHARD_BYTES = 64 * 2**20
USUAL_TOKENS = 32
# Hidden states have a few very large numbers, which cost the others in their int8 block precision: an error of half a
# step in every number of the worst block is 1 - cos = 5e-4. One such token must not quarantine its text.
TOKEN_ENCODINGS: dict[str, Encoding] = {
    "float16": ENCODINGS["float16"],
    "float16-raw": ENCODINGS["float16-raw"],
    "int8": replace(ENCODINGS["int8"], max_cosine_error=5e-4),
}
_PIECE = np.dtype("<i4")
_HALF = np.dtype("<f2")
# Tokens converted and compared at a time.
_CHECKED_TOKENS = 4096


@dataclass(frozen=True)
class TokenRecord:
    """Definition of the token columns of a space."""

    shape: TokenShape
    storage: str  # encoding of the states
    attention: tuple[int, ...] | None = None  # layers of the maps, counted from 1 and ascending; None without attention

    @classmethod
    def resolve(
        cls, shape: TokenShape, request: TokenRequest, storage: str | None, held: "TokenRecord | None"
    ) -> "TokenRecord":
        """The token columns that a request needs.

        Args:
            request: `attention=()` means the layers of `held`, by default the last layer.
            storage: None means the encoding of `held`, by default float16.
            held: the existing token columns of the space.
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
        return (STATES, PIECES) if self.attention is None else TOKEN_ARRAYS

    def state_bytes(self) -> int:
        """Bytes of one token's state before compression."""
        return self.encoding.row_bytes(self.shape.width)

    def token_bytes(self) -> int:
        """Bytes of one token's state and piece before compression."""
        return self.state_bytes() + 4 * _PIECE.itemsize

    def attention_bytes(self, tokens: int) -> int:
        """Bytes of the attention of a text with `tokens` tokens before compression."""
        return 0 if self.attention is None else _HALF.itemsize * tokens * (1 + len(self.attention) * tokens)

    def shard_rows(self, table_shard_rows: int) -> int:
        """Rows of a shard: the largest divisor of the table's shard rows with at most `SHARD_BYTES`."""
        text_bytes = USUAL_TOKENS * self.token_bytes() + self.attention_bytes(USUAL_TOKENS)
        most = min(table_shard_rows, max(1, SHARD_BYTES // text_bytes))
        return next(rows for rows in range(most, 0, -1) if table_shard_rows % rows == 0)

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
    """The encoding of token states with this name, current or stored; CacheError if there is none."""
    try:
        return TOKEN_ENCODINGS[encoding_name(name)]
    except KeyError:
        known = ", ".join(TOKEN_ENCODINGS)
        raise CacheError(f"unknown encoding {name!r} of token states; expected one of {known}") from None


def checked_layers(layers: Sequence[int], shape: TokenShape) -> tuple[int, ...]:
    """The layers as a tuple; TeacherError if the model lacks one, or they are not ascending."""
    if not layers or sorted(set(layers)) != list(layers) or layers[0] < 1 or layers[-1] > shape.layers:
        raise TeacherError(
            f"attention layers {','.join(map(str, layers)) or 'none'}: expected ascending numbers from 1 to "
            f"{shape.layers}, the layers of this teacher"
        )
    return tuple(layers)


def create_array(folder: Path, record: TokenRecord, array: str, shard_rows: int) -> ShardedArray:
    """Create an empty array named `array`; all arrays of a space have the same shard rows."""
    return ShardedArray.create(
        folder,
        dtype=BLOBS,
        shard_rows=shard_rows,
        chunk_rows=math.gcd(CHUNK_ROWS, shard_rows),
        itemsize={STATES: np.dtype(record.encoding.dtype), PIECES: _PIECE, ATTENTION: _HALF}[array].itemsize,
        compressed=record.encoding.compressed or array != STATES,
    )


@dataclass(frozen=True, slots=True)
class StoredTokens:
    """The stored token columns of one text; `attention` is None if it was not read."""

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
    """Converted token columns and the result of their check, by position."""

    stored: dict[int, StoredTokens]  # of the valid texts
    errors: dict[int, float]  # a bound on the largest 1 - cos of their states
    quarantined: dict[int, str]  # why a text must not be stored


class TokenColumns:
    """Reads and writes the token columns of one space; `columns` are by the name of their array."""

    def __init__(self, folder: Path, name: str, index: Index, record: TokenRecord) -> None:
        """Open the columns of the space in `folder`; `name` is that of its folder in the index."""
        self.index = index
        self.record = record
        self.encoding = record.encoding
        self.columns = {array: Column(index, f"{name}/{array}", folder / array) for array in record.arrays}
        self.shard_rows = self.columns[STATES].shard_rows
        self._name = name

    # Reading

    def present(self, rows: npt.NDArray[np.int64], attention: bool = False) -> npt.NDArray[np.bool_]:
        """`(n,)`: which rows have states and pieces, and optionally attention."""
        present = self.columns[STATES].present(rows) & self.columns[PIECES].present(rows)
        if not attention:
            return present
        maps = self.columns.get(ATTENTION)
        return np.zeros(len(rows), dtype=bool) if maps is None else present & maps.present(rows)

    def present_count(self, array: str = STATES) -> int:
        """Number of rows of an array."""
        return self.columns[array].present_count()

    def worst_error(self) -> float:
        """Largest 1 - cos between a stored state and the teacher output."""
        return self.columns[STATES].worst_error()

    def quarantined(self, array: str = STATES, rows: range | None = None) -> dict[int, str]:
        """Row -> reason of the quarantined rows of an array, optionally within a range."""
        return self.columns[array].quarantined(rows)

    def missing_rows(self, rows: npt.NDArray[np.int64], attention: bool = False) -> npt.NDArray[np.int64]:
        """Ascending rows without states, or optionally attention, that are not quarantined."""
        arrays = (STATES, ATTENTION) if attention and ATTENTION in self.columns else (STATES,)
        return np.unique(np.concatenate([self.columns[array].missing_rows(rows) for array in arrays]))

    def gather(self, rows: npt.NDArray[np.int64], attention: bool = False) -> list[TextTokens]:
        """Token-level teacher output of n texts, in the order of `rows`.

        Raises:
            MissingRows: a row lacks a requested column.
            DamagedCache: a shard does not match the index.
        """
        return [self.restore(stored) for stored in self.gather_stored(rows, attention)]

    def gather_stored(self, rows: npt.NDArray[np.int64], attention: bool = False) -> list[StoredTokens]:
        """As `gather`, but the stored bytes, for `restore`."""
        rows = np.asarray(rows, dtype=np.int64)
        if not len(rows):
            return []
        arrays = TOKEN_ARRAYS if attention else (STATES, PIECES)
        try:
            parts = [self.columns[array].read(rows) for array in arrays]
        except (KeyError, MissingRows):
            raise self._missing(rows, attention) from None
        return [StoredTokens(*row) for row in zip(*parts, strict=True)]

    def gather_pieces(self, rows: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int32]]:
        """`(T, 4)` pieces of n texts; about a hundredth of the size of their states."""
        rows = np.asarray(rows, dtype=np.int64)
        try:
            return [_pieces(blob) for blob in self.columns[PIECES].read(rows)]
        except MissingRows:
            raise self._missing(rows, attention=False) from None

    def _missing(self, rows: npt.NDArray[np.int64], attention: bool) -> MissingRows:
        missing = rows[~self.present(rows, attention)]
        what, columns = ("attention", "vectors,tokens,attention") if attention else ("tokens", "vectors,tokens")
        return MissingRows(
            f"{self._name} has no {what} for {len(missing)} of {len(rows)} rows, the first is row "
            f"{missing[0] if len(missing) else '?'}; `tcache build --columns {columns}` with the same teacher adds them"
            f"{self.index.as_of}"
        )

    def restore(self, stored: StoredTokens, states: npt.NDArray[np.floating] | None = None) -> TextTokens:
        """Decode the token columns of one text, optionally into `(T, width)` states instead of a new float32 array."""
        problem = self.inconsistency(stored)
        if problem:
            raise DamagedCache(f"{self._name}: {problem}; `tcache verify --deep` lists all damage")
        into = np.empty((stored.tokens, self.record.shape.width), dtype=np.float32) if states is None else states
        self.encoding.restore(self._states(stored.states), into)
        if stored.attention is None:
            return TextTokens(into, _pieces(stored.pieces))
        halves = np.frombuffer(stored.attention, dtype=_HALF).astype(np.float32)
        maps = halves[stored.tokens :].reshape(-1, stored.tokens, stored.tokens)
        return TextTokens(into, _pieces(stored.pieces), halves[: stored.tokens], maps)

    def _states(self, blob: bytes) -> Rows:
        return np.frombuffer(blob, dtype=self.encoding.dtype).reshape(-1, self.encoding.width(self.record.shape.width))

    def inconsistency(self, stored: StoredTokens) -> str:
        """Why the columns of a text are inconsistent; "" if they are not."""
        tokens = stored.tokens
        if not tokens or len(stored.pieces) % (4 * _PIECE.itemsize):
            return f"{len(stored.pieces)} bytes of pieces, expected a multiple of {4 * _PIECE.itemsize}"
        if len(stored.states) != tokens * self.record.state_bytes():
            return f"{tokens} pieces, but states of {len(stored.states) / self.record.state_bytes():g} tokens"
        if stored.attention is not None and len(stored.attention) != self.record.attention_bytes(tokens):
            return f"{tokens} pieces, but {len(stored.attention)} bytes of attention, which are not of as many tokens"
        return ""

    def is_finite(self, stored: StoredTokens) -> bool:
        """Whether all numbers of a text with consistent columns are finite."""
        tokens = self.restore(stored)
        parts = (tokens.states, tokens.importance, tokens.attention)
        return all(part is None or bool(np.isfinite(part).all()) for part in parts)

    # Writing

    def check(self, outputs: Sequence[TextTokens], *, attention: bool) -> CheckedTokens:
        """Convert the teacher output of n texts and compare it with the stored values."""
        checked = CheckedTokens({}, {}, {})
        valid = []
        for place, text in enumerate(outputs):
            self._check_shape(text, attention)
            if not len(text.pieces):
                checked.quarantined[place] = "tokens: none"
            elif attention and not all(np.isfinite(part).all() for part in (text.importance, text.attention)):  # type: ignore[arg-type]
                checked.quarantined[place] = "tokens: attention is not finite"
            else:
                valid.append(place)
        group: list[int] = []
        tokens = 0
        for place in valid:
            group.append(place)
            tokens += len(outputs[place].pieces)
            if tokens >= _CHECKED_TOKENS:
                self._check_group(outputs, group, checked, attention)
                group, tokens = [], 0
        if group:
            self._check_group(outputs, group, checked, attention)
        return checked

    def _check_shape(self, text: TextTokens, attention: bool) -> None:
        tokens, width = len(text.pieces), self.record.shape.width
        found = [text.pieces.shape, text.states.shape]
        expected: list[tuple[int, ...]] = [(tokens, 4), (tokens, width)]
        if attention:
            found += [() if part is None else part.shape for part in (text.importance, text.attention)]
            expected += [(tokens,), (len(self.record.attention or ()), tokens, tokens)]
        if found != expected:
            raise TeacherError(f"the teacher returned tokens of shapes {found}, its configuration gives {expected}")

    def _check_group(
        self, outputs: Sequence[TextTokens], places: list[int], checked: CheckedTokens, attention: bool
    ) -> None:
        states = np.concatenate([outputs[place].states for place in places])
        stored = self.encoding.store(states)
        errors = _error_bounds(states, stored, self.encoding)
        begin = 0
        for place in places:
            text = outputs[place]
            end = begin + len(text.pieces)
            reasons: dict[int, str] = {}
            if not errors[begin:end].max() <= self.encoding.max_cosine_error:
                exact = check_rows(states[begin:end], self.encoding)
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
        self, number: int, stored: dict[int, StoredTokens], errors: dict[int, float], quarantined: dict[int, str]
    ) -> list[Change]:
        """Write rows of one shard; returns the changes to commit.

        The files are durable when this returns. Columns that a row already has are not changed.

        Args:
            stored, errors, quarantined: as in `CheckedTokens`, but by row of the table.

        Raises:
            DamagedCache: the shard's older rows are not the values that were written; nothing changes.
        """
        changes: list[Change] = []
        for array, column in self.columns.items():
            blobs = {row: getattr(text, _FIELDS[array]) for row, text in stored.items()}
            rows = np.array(sorted(row for row, blob in blobs.items() if blob is not None), dtype=np.int64)
            rows = rows[~column.present(rows)]
            if len(rows):
                values = np.empty(len(rows), dtype=object)
                values[:] = [blobs[row] for row in rows.tolist()]
                worst = max(errors[row] for row in rows.tolist()) if array == STATES else 0.0
                changes += column.write(number, rows, values, worst)
            if array != PIECES:
                invalid = np.array(sorted(quarantined), dtype=np.int64)
                absent = invalid[~column.present(invalid)].tolist()
                changes += column.quarantine({row: quarantined[row] for row in absent})
        return changes


def _error_bounds(states: npt.NDArray[np.float32], stored: Rows, encoding: Encoding) -> npt.NDArray[np.floating]:
    """`(n,)`: a bound on 1 - cos between `(n, d)` states and their stored values; NaN or infinite for invalid rows.

    |x - y|^2 = (|x| - |y|)^2 + 2 |x| |y| (1 - cos), all in float32: a tenth of the time of `check_rows`. It also
    bounds the error of the length, whose square is far below the bound of any encoding.
    """
    back = np.empty_like(states)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        encoding.restore(stored, back)
        lengths = np.einsum("ij,ij->i", states, states) * np.einsum("ij,ij->i", back, back)
        back -= states
        return np.asarray(np.einsum("ij,ij->i", back, back) / (2 * np.sqrt(lengths)))


def _pieces(blob: bytes) -> npt.NDArray[np.int32]:
    return np.frombuffer(blob, dtype=_PIECE).reshape(-1, 4)
