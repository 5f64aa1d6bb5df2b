"""What is wrong with a cache, found shard by shard: `verify` tells it, `repair` mends it.

One shard at a time is in memory. Beside a writer, what looks like damage is looked at again where the index
promises something else by then.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from teacher_cache.corpus.corpus import Fingerprint
from teacher_cache.errors import CorpusNotFound, DamagedCache, FormatVersionError
from teacher_cache.storage.chunks import Rows
from teacher_cache.storage.codec import ENCODINGS
from teacher_cache.storage.column import Column
from teacher_cache.storage.index import ShardRecord
from teacher_cache.storage.manifest import CORPORA, CorpusRecord
from teacher_cache.storage.shards import ShardedArray
from teacher_cache.storage.texts import KEY_ARRAY, TEXT_ARRAY, TextTable
from teacher_cache.table.cache import CORPUS_JSON, SPACE_JSON, TeacherCache
from teacher_cache.table.view import SPACES, SpaceRecord, SpaceView
from teacher_cache.text_key import text_keys
from teacher_cache.tokens.token_columns import ATTENTION, PIECES, STATES, StoredTokens, TokenColumns

# What a teacher's own normalising may leave of a unit length, and what two number formats may add to it: a vector may
# have been stored in another one before.
UNIT_LENGTH = 1e-3 + 2 * max(encoding.max_norm_error for encoding in ENCODINGS.values())
# Rows decoded at a time for their lengths, records of a corpus read at a time.
_BLOCK_ROWS = 1024
_READ_RECORDS = 8192
# Rows or ranges that a message names.
_NAMED = 5

# The space, rows of the table and, as they are stored, their vectors.
Seen = Callable[[SpaceView, npt.NDArray[np.int64], Rows], None]


@dataclass(frozen=True)
class Damage:
    """One broken promise.

    Attributes:
        kind: what sort ("damaged_cache", "damaged_space", "missing_shard", "damaged_shard", "digest", "key",
            "index", "non_finite", "norm", "tokens", "teacher", "count", "corpus").
        where: file or name, and what was found and expected.
        rows: how many rows it touches.
        array: as the index names it, or "corpora/NAME"; "" for the cache as a whole.
        shard: number of the shard in that array.
    """

    kind: str
    where: str
    rows: int
    array: str = ""
    shard: int | None = None


class Inspection:
    """One check of an open cache.

    Attributes:
        done: shards checked so far.
        texts_sound: whether all texts are what they were, so that a corpus can be told by them.
    """

    def __init__(
        self,
        cache: TeacherCache,
        *,
        deep: bool,
        seen: Seen | None = None,
        report: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.cache = cache
        self.deep = deep
        self.done = 0
        self.texts_sound = True
        self._seen = seen
        self._report = report
        self._total = 0

    def damage(self) -> Iterator[Damage]:
        """Everything that is wrong."""
        yield from self.texts()
        for slug in self.cache.space_records():
            yield from self.space(slug)
        yield from self.corpora()

    def _numbers(self, name: str) -> list[int]:
        return [number for number, _ in self.cache.index.iter_shards(name)]

    def texts(self) -> Iterator[Damage]:
        """What is wrong with the text table and its keys; to be called first."""
        index, table = self.cache.index, self.cache.texts_table
        names = [TEXT_ARRAY, KEY_ARRAY]
        for record in self.cache.space_records().values():
            arrays = record.columns.arrays if record.columns is not None else ()
            names += [record.array_name, *(f"{record.name}/{array}" for array in arrays)]
        self._total = sum(len(self._numbers(name)) for name in names)
        with index.snapshot():
            rows, keys = index.rows(), index.key_count()
        if keys != rows:
            yield Damage("count", f"the index has {keys} text keys for {rows} rows", abs(keys - rows))
        numbers = {*range(-(-rows // table.shard_rows)), *self._numbers(TEXT_ARRAY), *self._numbers(KEY_ARRAY)}
        for number in sorted(numbers):
            found = self.text_shard(number)
            self.texts_sound &= not found
            yield from found

    def text_shard(self, number: int) -> list[Damage]:
        """What is wrong with the texts and keys of one shard."""
        table = self.cache.texts_table

        def look(rows: int, records: Sequence[ShardRecord | None]) -> list[Damage]:
            found, texts = self._shard(table.text, number, rows, records[0], complete=True)
            in_keys, keys = self._shard(table.keys, number, rows, records[1], complete=True)
            found += in_keys
            if not found and texts is not None and keys is not None:
                found += self._pairing(number, texts, keys)
            return found

        return self._settled([table.text, table.keys], number, look)

    def _pairing(self, number: int, texts: Rows, keys: Rows) -> Iterator[Damage]:
        """Texts and keys of one shard, which a writer may have given more rows between the two looks."""
        count = min(len(texts), len(keys))
        stored = [key.tobytes() for key in keys[:count]]
        made = text_keys(texts[:count].tolist())
        first = number * self.cache.shard_rows
        wrong = [first + place for place in range(count) if stored[place] != made[place]]
        if wrong:
            yield Damage(
                "key",
                f"shard {number} of the text table: {len(wrong)} keys are not the hash of their text, "
                f"{listed('row', wrong)}",
                len(wrong),
                KEY_ARRAY,
                number,
            )
        elsewhere = self.cache.index.find(made) != np.arange(first, first + count)
        misplaced = [first + place for place in np.flatnonzero(elsewhere).tolist() if first + place not in wrong]
        if misplaced:
            yield Damage(
                "index",
                f"shard {number} of the text table: {len(misplaced)} keys are indexed under another row or not at "
                f"all, {listed('row', misplaced)}",
                len(misplaced),
                KEY_ARRAY,
                number,
            )

    def space(self, slug: str) -> Iterator[Damage]:
        """What is wrong with one space; looked at anew if it was converted to another array meanwhile."""
        record = self.cache.space_records().get(slug)
        while record is not None:
            found = self._space(record)
            newest = self.cache.space_records().get(slug)
            if newest is None or newest.array == record.array:
                yield from found
                return
            record = newest

    def _space(self, record: SpaceRecord) -> list[Damage]:
        name = record.array_name
        try:
            view = SpaceView(self.cache.path, self.cache.index, record)
        except (DamagedCache, FormatVersionError) as error:
            rows = sum(int(shard.present.sum()) for _, shard in self.cache.index.iter_shards(name))
            return [Damage("damaged_space", str(error), rows, name)]
        lost = unreadable(self.cache.path / SPACES / record.space.slug / SPACE_JSON)
        found = [Damage("damaged_space", lost, 0, name)] if lost else []
        found += [damage for number in self._numbers(name) for damage in self._vector_shard(view, number)]
        try:
            return found + self._tokens(view.tokens) if view.tokens is not None else found
        except (DamagedCache, FormatVersionError) as error:
            return [*found, Damage("damaged_space", str(error), 0, f"{record.name}/{STATES}")]

    def _tokens(self, tokens: TokenColumns) -> list[Damage]:
        numbers = {number for column in tokens.columns.values() for number in self._numbers(column.name)}
        return [damage for number in sorted(numbers) for damage in self._token_shard(tokens, number)]

    def _token_shard(self, tokens: TokenColumns, number: int) -> list[Damage]:
        columns = tokens.columns

        def look(rows: int, records: Sequence[ShardRecord | None]) -> list[Damage]:
            promised = dict(zip(columns, records, strict=True))
            found: list[Damage] = []
            values: dict[str, Rows] = {}
            for array, record in promised.items():
                if record is not None:
                    damage, read = self._shard(columns[array], number, rows, record, complete=False)
                    found += damage
                    values |= {} if read is None else {array: read}
            states, pieces = (_present(promised[array]) for array in (STATES, PIECES))
            if not found and not np.array_equal(states, pieces):
                where = f"shard {number} of {columns[STATES].name} and {columns[PIECES].name}: not the same rows"
                found.append(Damage("count", where, tokens.shard_rows, columns[STATES].name, number))
            if not found and {STATES, PIECES} <= values.keys():
                found += _token_texts(tokens, number, promised, values)
            return found

        return self._settled(list(columns.values()), number, look)

    def _vector_shard(self, view: SpaceView, number: int) -> list[Damage]:
        def look(rows: int, records: Sequence[ShardRecord | None]) -> list[Damage]:
            (promised,) = records
            if promised is None:  # given up since we looked
                return []
            found, values = self._shard(view.column, number, rows, promised, complete=False)
            if values is not None:
                places = np.flatnonzero(promised.present) + number * view.vectors.shard_rows
                in_rows = list(_vectors(view, number, places, values))
                # Where the digest is another the lengths may well be; only what is no number says more.
                found += [damage for damage in in_rows if not found or damage.kind == "non_finite"]
                if self._seen is not None and not found:
                    self._seen(view, places, values)
            return found

        return self._settled([view.column], number, look)

    def _settled(
        self,
        columns: Sequence[Column],
        number: int,
        look: Callable[[int, Sequence[ShardRecord | None]], list[Damage]],
    ) -> list[Damage]:
        """What `look` finds where the index promises the same before and after."""
        while True:
            rows, records = self._promised(columns, number)
            found = look(rows, records)
            if not found or _packed(records) == _packed(self._promised(columns, number)[1]):
                break
        self.done += sum(record is not None for record in records)
        self._report(self.done, max(self.done, self._total))
        return found

    def _promised(self, columns: Sequence[Column], number: int) -> tuple[int, list[ShardRecord | None]]:
        with self.cache.index.snapshot():
            return self.cache.index.rows(), [column.record(number) for column in columns]

    def _shard(
        self, column: Column, number: int, rows: int, record: ShardRecord | None, *, complete: bool
    ) -> tuple[list[Damage], Rows | None]:
        """One shard against its record, and the values of its present rows if they were read deep.

        Args:
            complete: the array has every row of the table.
        """
        array, name = column.array, column.name
        path = array.shard_path(number).relative_to(self.cache.path)
        first = number * array.shard_rows
        expected = max(0, min(array.shard_rows, rows - first))
        if record is None:
            where = f"the index has no record of shard {number} of {name}"
            return [Damage("count", where, expected, name, number)] if expected else [], None
        places = np.flatnonzero(record.present)
        count = len(places)
        if count and places[-1] >= expected:
            where = f"{path}: the index promises rows past the table's {rows}"
            # Of texts it says two things at once; a vector there is a vector too many.
            return [Damage("index" if complete else "count", where, count, name, number)], None
        if complete and count != expected:
            where = f"{path}: {count} rows recorded, expected {expected}"
            return [Damage("count", where, expected - count, name, number)], None
        array.forget(number)  # it may have been replaced since a first look
        try:
            shard = array.open_shard(number)
            stored = shard.stored[places // array.chunk_rows]
            if not stored.all():
                where = f"{path}: promised chunks are not stored, {_chunk_rows(array, first + places[~stored])}"
                return [Damage("damaged_shard", where, int((~stored).sum()), name, number)], None
            # A kill before the commit leaves a file that is ahead of its record. It holds the recorded rows, too.
            if not self.deep and shard.size == record.size:
                return [], None
            values = array.read_shard(number, record.present)
            if array.codec.digest(values) != record.digest:
                where = f"{path}: the values are not those that were written"
                return [Damage("digest", where, count, name, number)], values if self.deep else None
            return [], values if self.deep else None
        except DamagedCache as error:
            if not array.shard_path(number).exists():
                return [Damage("missing_shard", str(error), count, name, number)], None
            lost = first + _unreadable(array, number, record.present)
            where = f"{error}; lost: {_chunk_rows(array, lost)}"
            return [Damage("damaged_shard", where, len(lost), name, number)], None
        finally:
            array.forget(number)

    def corpora(self) -> Iterator[Damage]:
        """What is wrong with the row lists and the domain lists."""
        for name, record in self.cache.corpora().items():
            where = f"corpora/{name}"
            try:
                manifest = self.cache.corpus(name)
            except CorpusNotFound:  # dropped since we looked
                continue
            except DamagedCache as error:
                yield Damage("corpus", str(error), record.records, where)
                continue
            lost = unreadable(self.cache.path / CORPORA / name / CORPUS_JSON)
            if lost:
                yield Damage("corpus", lost, 0, where)
            wrong = wrong_domains(manifest.record, manifest.domains, deep=self.deep)
            if wrong:
                yield Damage("corpus", wrong, len(manifest), where)
            rows = self.cache.rows  # read after the corpus, which names no row that is newer
            outside = 0
            for start in range(0, len(manifest), 2**20):
                part = manifest.rows[start : start + 2**20]
                outside += int(((part < 0) | (part >= rows)).sum())
            if outside:
                yield Damage("corpus", f"corpus {name!r} names rows outside the table of {rows}", outside, where)
            elif self.deep and self.texts_sound:
                made = fingerprint_of(self.cache.texts_table, manifest.rows)
                if made != manifest.record.fingerprint:
                    yield Damage(
                        "corpus",
                        f"the row list of corpus {name!r} leads to other texts: their fingerprint is {made}, recorded "
                        f"is {manifest.record.fingerprint}",
                        len(manifest),
                        where,
                    )


def unreadable(file: Path) -> str:
    """What is wrong with a `space.json` or `corpus.json`; "" if nothing is."""
    try:
        fine = isinstance(json.loads(file.read_bytes()), dict)
        return "" if fine else f"{file} does not say what it is; a lost index would be made again from it"
    except (OSError, ValueError) as error:
        return f"{file} cannot be read: {error}; a lost index would be made again from it"


def _packed(records: Sequence[ShardRecord | None]) -> list[bytes | None]:
    return [None if record is None else record.pack() for record in records]


def _unreadable(array: ShardedArray, number: int, present: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    """Places of the present rows of a damaged shard whose chunks do not decode; all, where its index does not."""
    lost = []
    for chunk in np.unique(np.flatnonzero(present) // array.chunk_rows).tolist():
        within = present & (np.arange(len(present)) // array.chunk_rows == chunk)
        try:
            array.read_shard(number, within)
        except DamagedCache:
            lost.append(np.flatnonzero(within))
    return np.concatenate(lost) if lost else np.flatnonzero(present)


def _vectors(view: SpaceView, number: int, rows: npt.NDArray[np.int64], values: Rows) -> Iterator[Damage]:
    """Numbers that are no numbers, and lengths that no teacher gave, among the stored rows of one shard."""
    finite, sound = vectors_sound(view, values)
    path = view.vectors.shard_path(number).relative_to(view.vectors.folder.parents[2])
    bad = rows[~finite].tolist()
    if bad:
        where = f"{path} holds NaN or infinite numbers, {listed('row', bad)}"
        yield Damage("non_finite", where, len(bad), view.array_name, number)
    bad = rows[finite & ~sound].tolist()
    if bad:
        expected = "1" if view.space.normalize else "more than 0"
        where = f"{path} holds vectors whose length is not {expected}, {listed('row', bad)}"
        yield Damage("norm", where, len(bad), view.array_name, number)


def _present(record: ShardRecord | None) -> npt.NDArray[np.bool_]:
    return np.zeros(0, dtype=bool) if record is None else record.present


def _token_texts(
    tokens: TokenColumns, number: int, promised: dict[str, ShardRecord | None], values: dict[str, Rows]
) -> Iterator[Damage]:
    """Texts of one shard whose columns do not go together, or hold what is no number."""
    by_array = {}
    for array, read in values.items():
        record = promised[array]
        if record is not None:
            by_array[array] = dict(zip(np.flatnonzero(record.present).tolist(), read, strict=True))
    first = number * tokens.shard_rows
    apart, broken, why = [], [], ""
    for place, states in by_array[STATES].items():
        text = StoredTokens(states, by_array[PIECES][place], by_array.get(ATTENTION, {}).get(place))
        wrong = tokens.wrong(text)
        why = why or wrong
        if wrong:
            apart.append(first + place)
        elif not tokens.finite(text):
            broken.append(first + place)
    name = tokens.columns[STATES].name
    if apart:
        yield Damage("tokens", f"shard {number} of {name}: {why}; {listed('row', apart)}", len(apart), name, number)
    if broken:
        where = f"shard {number} of {name} or its attention holds NaN or infinite numbers, {listed('row', broken)}"
        yield Damage("non_finite", where, len(broken), name, number)


def vectors_sound(view: SpaceView, values: Rows) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Two `(n,)` masks over rows as they are stored: finite; and of a length that the space can have."""
    norms = np.empty(len(values))
    finite = np.empty(len(values), dtype=bool)
    for start in range(0, len(values), _BLOCK_ROWS):  # in float64, so not all at once
        block = slice(start, start + _BLOCK_ROWS)
        vectors = restored(view, values[block]).astype(np.float64)
        finite[block] = np.isfinite(vectors).all(axis=1)
        with np.errstate(invalid="ignore"):
            norms[block] = np.linalg.norm(vectors, axis=1)
    if view.space.normalize:
        return finite, np.abs(norms - 1) <= UNIT_LENGTH
    return finite, norms > 0


def restored(view: SpaceView, values: Rows) -> npt.NDArray[np.float32]:
    """`(n, dims)` float32 of rows as they are stored, damaged ones included."""
    vectors = np.empty((len(values), view.dims), dtype=np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        view.encoding.restore(values, vectors)
    return vectors


def fingerprint_of(table: TextTable, rows: npt.NDArray[np.int64]) -> str:
    """What `Corpus.fingerprint` is for the texts of a row list `(M, k)`.

    Raises:
        DamagedCache: a text cannot be read.
    """
    fingerprint = Fingerprint(rows.shape[1])
    for start in range(0, len(rows), _READ_RECORDS):
        for text in table.read(np.asarray(rows[start : start + _READ_RECORDS]).ravel()):
            fingerprint.add(text.encode())
    return fingerprint.value


def wrong_domains(record: CorpusRecord, numbers: npt.NDArray[np.uint16] | None, *, deep: bool) -> str:
    """What is wrong with the domains `(M,)` of a corpus's records; "" if nothing is, or none were kept.

    Args:
        deep: compare their fingerprint, too.
    """
    if numbers is None:
        return ""
    names = [name.encode() for name in record.domains]
    fingerprint = Fingerprint(1)
    for start in range(0, len(numbers), 2**20):
        part = numbers[start : start + 2**20]
        if int(part.max()) >= len(names):
            return f"corpus {record.name!r} names domain {part.max()}, counted from 0, of its {len(names)}"
        for number in part.tolist() if deep else ():
            fingerprint.add(names[number])
    if deep and fingerprint.value != record.domains_fingerprint:
        return (
            f"the domain list of corpus {record.name!r} is not the one that was written: its fingerprint is "
            f"{fingerprint.value}, recorded is {record.domains_fingerprint}"
        )
    return ""


def _chunk_rows(array: ShardedArray, rows: npt.NDArray[np.intp]) -> str:
    """The inner chunks that hold these rows, as ranges of rows."""
    chunks = np.unique(rows // array.chunk_rows)
    runs = np.split(chunks, np.flatnonzero(np.diff(chunks) != 1) + 1)
    spans = [f"{run[0] * array.chunk_rows} to {(run[-1] + 1) * array.chunk_rows - 1}" for run in runs]
    return listed("rows", spans)


def listed(noun: str, items: Sequence[object]) -> str:
    """The first of the items, and how many more there are."""
    more = f" and {len(items) - _NAMED} more" if len(items) > _NAMED else ""
    return f"{noun} {', '.join(str(item) for item in items[:_NAMED])}{more}"
