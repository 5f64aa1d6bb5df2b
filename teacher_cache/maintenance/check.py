"""What is wrong with a cache: `verify` reports it, `repair` fixes it.

Quick: index records against files and their sizes, presence against the table, counts against each other, manifests
against the table. Deep: every stored value is read once, to check digests, finite numbers, vector lengths, that each
key is the hash of its text, and the fingerprint of each corpus. With a teacher, some rows are encoded again.

One shard at a time is in memory. Beside a writer, a damaged shard is checked again if its record has changed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from teacher_cache.building.workers import EncodeWorker
from teacher_cache.errors import CorpusNotFound, DamagedCache, FormatVersionError
from teacher_cache.maintenance.walk import (
    cache_arrays,
    decode,
    json_fault,
    manifest_faults,
    pair_texts,
    read_shard,
    valid_vectors,
)
from teacher_cache.space import LABELS
from teacher_cache.storage.chunks import Rows
from teacher_cache.storage.codec import cosine_errors
from teacher_cache.storage.column import Column
from teacher_cache.storage.files import TEMPORARY_SUFFIX
from teacher_cache.storage.index import ShardRecord
from teacher_cache.storage.manifest import CORPORA
from teacher_cache.storage.shards import ShardedArray
from teacher_cache.storage.texts import KEY_ARRAY
from teacher_cache.table.cache import CORPUS_JSON, SPACE_JSON, TeacherCache
from teacher_cache.table.view import SpaceRecord, SpaceView
from teacher_cache.teachers import resolve
from teacher_cache.teachers.base import TeacherOptions
from teacher_cache.tokens.token_columns import ATTENTION, PIECES, STATES, StoredTokens, TokenColumns

# Largest 1 - cos between a stored vector and the same text encoded again: bfloat16 differs by up to 4e-5 with the batch
# it is computed in, `int8` storage by up to 1e-4.
SAME_COSINE = 1e-3
# Rows that are encoded again, about, if `every` is not given.
REENCODED_ROWS = 1000
_BATCH_ROWS = 1024
# Rows or ranges that a message lists.
_LISTED = 5

# The space, rows of the table, and their vectors as they are stored.
ValidVectors = Callable[[SpaceView, npt.NDArray[np.int64], Rows], None]
# The record of a shard, and the values of its present rows if they were read.
Read = tuple[ShardRecord | None, Rows | None]


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong.

    Attributes:
        kind: "damaged_cache", "damaged_space", "missing_shard", "damaged_shard", "digest", "key", "index",
            "non_finite", "norm", "tokens", "teacher", "count" or "corpus".
        where: file or name, and what was found and expected.
        rows: how many rows are affected.
        array: its name in the index, or "corpora/NAME"; "" for the cache as a whole.
        shard: number of the shard in that array.
    """

    kind: str
    where: str
    rows: int
    array: str = ""
    shard: int | None = None


@dataclass(frozen=True)
class CheckReport:
    """The result of a check.

    Attributes:
        shards: shard records checked.
        leftovers: files of interrupted writes, which are harmless.
        reencoded: rows that the teacher encoded again.
        largest_difference: largest 1 - cos among those; None if there were none.
    """

    damage: list[Damage]
    shards: int
    rows: int
    deep: bool
    leftovers: list[str]
    reencoded: int = 0
    largest_difference: float | None = None

    @property
    def ok(self) -> bool:
        return not self.damage

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


def verify(
    path: str | Path,
    *,
    deep: bool = False,
    teacher: TeacherOptions | None = None,
    every: int | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> CheckReport:
    """Check a cache; reads only, and may run beside a writer.

    Args:
        deep: read every value.
        teacher: encode one row in `every` again and compare; implies `deep`.
        every: by default such that about `REENCODED_ROWS` rows are encoded.
        report: called after every shard with how many are done and how many there are.

    Raises:
        CacheNotFound, FormatVersionError: the cache cannot be opened.
        SpaceMismatch, SpaceNotFound: the cache has no space of the teacher; the message names what differs.
        TeacherError: the teacher cannot be found or run.
    """
    try:
        cache = TeacherCache.open(path)
        rows = cache.rows  # reads the index, which `open` does not
    except DamagedCache as error:
        return CheckReport([Damage("damaged_cache", str(error), 0)], 0, 0, deep, [])
    with cache:
        comparison = None if teacher is None else TeacherCheck(cache, teacher, every)
        deep = deep or comparison is not None
        check = Check(cache, deep=deep, on_valid=None if comparison is None else comparison.add, report=report)
        damage: list[Damage] = []
        try:
            for found in check.damage():
                damage.append(found)
            damage += [] if comparison is None else comparison.damage()
        except DamagedCache as error:  # in the index, so nothing more can be checked
            damage.append(Damage("damaged_cache", str(error), 0))
        compared = (0, None) if comparison is None else (comparison.reencoded, comparison.largest_difference)
        leftovers = sorted(str(file.relative_to(cache.path)) for file in cache.path.rglob(f"*{TEMPORARY_SUFFIX}"))
        return CheckReport(damage, check.done, rows, deep, leftovers, *compared)


class Check:
    """One check of an open cache.

    Attributes:
        done: shard records checked so far.
        texts_ok: whether all texts are valid, so that the fingerprints of corpora can be computed.
    """

    def __init__(
        self,
        cache: TeacherCache,
        *,
        deep: bool,
        on_valid: ValidVectors | None = None,
        report: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.cache = cache
        self.deep = deep
        self.done = 0
        self.texts_ok = True
        self._on_valid = on_valid
        self._report = report
        self._total = 0

    def damage(self) -> Iterator[Damage]:
        """Everything that is wrong."""
        yield from self.texts()
        for slug in self.cache.space_records():
            yield from self.space(slug)
        yield from self.corpora()

    def _numbers(self, *names: str) -> list[int]:
        """Shards of some arrays that the index has a record of, ascending."""
        return sorted({number for name in names for number, _ in self.cache.index.iter_shards(name)})

    # Texts and keys

    def texts(self) -> Iterator[Damage]:
        """Damage of the texts and keys; to be called first."""
        index, table = self.cache.index, self.cache.texts_table
        self._total = sum(len(self._numbers(array.name)) for array in cache_arrays(self.cache.path, index))
        with index.snapshot():
            rows, keys = index.rows(), index.key_count()
        if keys != rows:
            yield Damage("count", f"the index has {keys} text keys for {rows} rows", abs(keys - rows))
        numbers = {*range(-(-rows // table.shard_rows)), *self._numbers(table.text.name, table.keys.name)}
        for number in sorted(numbers):
            found = self.text_shard(number)
            self.texts_ok &= not found
            yield from found

    def text_shard(self, number: int) -> list[Damage]:
        """Damage of the texts and keys of one shard."""

        def compare(read: Sequence[Read], damaged: bool) -> Iterator[Damage]:
            (_, texts), (_, keys) = read
            if not damaged and texts is not None and keys is not None:
                yield from self._pairs(number, texts, keys)

        table = self.cache.texts_table
        return self._shard([table.text, table.keys], number, compare, complete=True)

    def _pairs(self, number: int, texts: Rows, keys: Rows) -> Iterator[Damage]:
        """Texts whose hash is not their key, or is not indexed under their row."""
        hashes, same = pair_texts(texts, keys)  # a writer may have added rows to one of them
        rows = number * self.cache.shard_rows + np.arange(len(same))
        misplaced = self.cache.index.find(hashes[: len(same)]) != rows
        for kind, bad, what in (
            ("key", rows[~same], "keys are not the hash of their text"),
            ("index", rows[same & misplaced], "keys are indexed under another row or not at all"),
        ):
            if len(bad):
                where = f"shard {number} of the text table: {len(bad)} {what}, {_listed('row', bad.tolist())}"
                yield Damage(kind, where, len(bad), KEY_ARRAY, number)

    # Spaces

    def space(self, slug: str) -> Iterator[Damage]:
        """Damage of one space, checked again if it was converted to another array meanwhile."""
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
        fault = json_fault(view.folder / SPACE_JSON)
        found = [Damage("damaged_space", fault, 0, name)] if fault else []
        for number in self._numbers(name):
            found += self._vector_shard(view, number)
        try:
            if view.tokens is not None:
                for number in self._numbers(*(column.name for column in view.tokens.columns.values())):
                    found += self._token_shard(view.tokens, number)
        except (DamagedCache, FormatVersionError) as error:
            found.append(Damage("damaged_space", str(error), 0, f"{record.name}/{STATES}"))
        return found

    def _vector_shard(self, view: SpaceView, number: int) -> list[Damage]:
        def compare(read: Sequence[Read], damaged: bool) -> Iterator[Damage]:
            ((record, vectors),) = read
            if record is None or vectors is None:
                return
            rows = np.flatnonzero(record.present) + number * view.vectors.shard_rows
            found = list(_invalid_vectors(view, number, rows, vectors))
            # A wrong digest explains a wrong length, but not NaN.
            yield from (damage for damage in found if not damaged or damage.kind == "non_finite")
            if self._on_valid is not None and not damaged and not found:
                self._on_valid(view, rows, vectors)

        return self._shard([view.column], number, compare)

    def _token_shard(self, tokens: TokenColumns, number: int) -> list[Damage]:
        columns = tokens.columns
        name = columns[STATES].name

        def compare(read: Sequence[Read], damaged: bool) -> Iterator[Damage]:
            if damaged:
                return
            rows = {
                array: np.flatnonzero(record.present).tolist() if record is not None else []
                for array, (record, _) in zip(columns, read, strict=True)
            }
            if rows[STATES] != rows[PIECES]:
                where = f"shard {number} of {name} and {columns[PIECES].name}: not the same rows"
                yield Damage("count", where, tokens.shard_rows, name, number)
                return
            values = {
                array: dict(zip(rows[array], stored, strict=True))
                for array, (_, stored) in zip(columns, read, strict=True)
                if stored is not None
            }
            if {STATES, PIECES} <= values.keys():
                yield from _invalid_tokens(tokens, number, values)

        return self._shard(list(columns.values()), number, compare)

    # Any shard

    def _shard(
        self,
        columns: Sequence[Column],
        number: int,
        compare: Callable[[Sequence[Read], bool], Iterator[Damage]],
        *,
        complete: bool = False,
    ) -> list[Damage]:
        """Damage of one shard of arrays that belong together, found while their records stayed the same.

        Args:
            compare: yields damage that only the values or several arrays together show; its second argument is whether
                an array is damaged by itself.
            complete: the arrays have every row of the table; others may lack the shard.
        """
        while True:
            rows, records = self._records(columns, number)
            found: list[Damage] = []
            read: list[Read] = []
            for column, record in zip(columns, records, strict=True):
                damage, values = self._read(column, number, rows, record, complete=complete)
                found += damage
                read.append((record, values))
            found += list(compare(read, bool(found)))
            if not found or _packed(records) == _packed(self._records(columns, number)[1]):
                break
        self.done += sum(record is not None for record in records)
        self._report(self.done, max(self.done, self._total))
        return found

    def _records(self, columns: Sequence[Column], number: int) -> tuple[int, list[ShardRecord | None]]:
        """Rows of the table, and the records of one shard, of the same moment."""
        with self.cache.index.snapshot():
            return self.cache.index.rows(), [column.record(number) for column in columns]

    def _read(
        self, column: Column, number: int, rows: int, record: ShardRecord | None, *, complete: bool
    ) -> tuple[list[Damage], Rows | None]:
        """Damage of one shard by its record, and the values of its present rows if the check is deep."""
        array, name = column.array, column.name
        path = array.shard_path(number).relative_to(self.cache.path)
        first = number * array.shard_rows
        expected = max(0, min(array.shard_rows, rows - first))

        def damage(kind: str, where: str, count: int) -> list[Damage]:
            return [Damage(kind, where, count, name, number)]

        if record is None:
            where = f"the index has no record of shard {number} of {name}"
            return damage("count", where, expected) if expected and complete else [], None
        places = np.flatnonzero(record.present)
        count = len(places)
        if count and places[-1] >= expected:
            # A text past the end contradicts the row count of the index; a vector there is one too many.
            where = f"{path}: the index records rows past the table's {rows}"
            return damage("index" if complete else "count", where, count), None
        if complete and count != expected:
            return damage("count", f"{path}: {count} rows recorded, expected {expected}", expected - count), None
        array.forget(number)  # the file may have been replaced
        try:
            shard = array.open_shard(number)
            stored = shard.stored[places // array.chunk_rows]
            if not stored.all():
                where = f"{path}: recorded chunks are not stored, {_chunk_rows(array, first + places[~stored])}"
                return damage("damaged_shard", where, int((~stored).sum())), None
            # A kill before the commit leaves a file with more rows than its record, so another size is no damage yet.
            if not self.deep and shard.size == record.size:
                return [], None
            values = array.read_shard(number, record.present)
            same = array.codec.digest(values) == record.digest
            found = [] if same else damage("digest", f"{path}: the values are not those that were written", count)
            return found, values if self.deep else None
        except DamagedCache as error:
            if not array.shard_path(number).exists():
                return damage("missing_shard", str(error), count), None
            lost = np.flatnonzero(record.present & ~read_shard(array, number, record.present).read)
            lost = lost if len(lost) else places
            return damage("damaged_shard", f"{error}; lost: {_chunk_rows(array, first + lost)}", len(lost)), None
        finally:
            array.forget(number)

    # Corpora

    def corpora(self) -> Iterator[Damage]:
        """Damage of the manifests and their domains."""
        for name, record in self.cache.corpora().items():
            where = f"{CORPORA}/{name}"
            try:
                manifest = self.cache.corpus(name)
            except CorpusNotFound:  # dropped meanwhile
                continue
            except DamagedCache as error:
                yield Damage("corpus", str(error), record.records, where)
                continue
            fault = json_fault(self.cache.path / CORPORA / name / CORPUS_JSON)
            if fault:
                yield Damage("corpus", fault, 0, where)
            rows = self.cache.rows  # read after the manifest, which has no newer row
            texts = self.cache.texts_table if self.deep and self.texts_ok else None
            for fault, count in manifest_faults(manifest, rows, texts, deep=self.deep):
                yield Damage("corpus", fault, count, where)


class TeacherCheck:
    """Compares some rows of a space with what the teacher computes now.

    Attributes:
        reencoded: rows encoded so far.
        largest_difference: largest 1 - cos among those.
    """

    def __init__(self, cache: TeacherCache, teacher: TeacherOptions, every: int | None) -> None:
        """Find the space of the teacher; no model is loaded.

        Raises:
            SpaceMismatch, SpaceNotFound: the cache does not have it.
        """
        spec = resolve(teacher)
        view = cache.find_space(spec.space)
        if view is None:
            fields = {name: value for name, value in spec.space.to_json().items() if name not in LABELS}
            if spec.space.dtype == "auto":
                del fields["dtype"]
            view = cache.space(fields)
        self.view = view
        self.every = every or max(1, view.present_count() // REENCODED_ROWS)
        self.reencoded = 0
        self.largest_difference: float | None = None
        self._cache = cache
        self._worker = EncodeWorker(spec.with_dtype(view.space.dtype))
        self._waiting: list[tuple[int, str, npt.NDArray[np.float32]]] = []
        self._different: dict[int, float] = {}

    def add(self, view: SpaceView, rows: npt.NDArray[np.int64], stored: Rows) -> None:
        """Compare every `every`-th of the rows, in batches."""
        if view.slug != self.view.slug:
            return
        chosen = np.flatnonzero(rows % self.every == 0)
        if not len(chosen):
            return
        try:
            texts = self._cache.texts(rows[chosen])
        except DamagedCache:
            return  # reported as damage of the text table
        self._waiting += zip(rows[chosen].tolist(), texts, decode(view, stored[chosen]), strict=True)
        while len(self._waiting) >= _BATCH_ROWS:
            self._compare()

    def _compare(self) -> None:
        batch, self._waiting = self._waiting[:_BATCH_ROWS], self._waiting[_BATCH_ROWS:]
        rows, texts, stored = zip(*batch, strict=True)
        now = self._worker.encode(list(texts)).vectors.astype(np.float64)
        difference = cosine_errors(now, np.stack(stored).astype(np.float64))
        self.reencoded += len(batch)
        self.largest_difference = float(np.nanmax([self.largest_difference or 0.0, *difference]))
        for row, found in zip(rows, difference.tolist(), strict=True):
            if not found <= SAME_COSINE:  # NaN differs
                self._different[row] = found

    def damage(self) -> Iterator[Damage]:
        """Rows that differ; to be called after the last `add`."""
        while self._waiting:
            self._compare()
        if self._different:
            yield Damage(
                "teacher",
                f"space {self.view.slug}: {len(self._different)} of {self.reencoded} rows differ from the teacher's "
                f"output now by 1 - cos of up to {max(self._different.values()):.2g} (bound {SAME_COSINE:g}): "
                f"{_listed('row', sorted(self._different))}",
                len(self._different),
                self.view.array_name,
            )


def _packed(records: Sequence[ShardRecord | None]) -> list[bytes | None]:
    return [None if record is None else record.pack() for record in records]


def _invalid_vectors(view: SpaceView, number: int, rows: npt.NDArray[np.int64], stored: Rows) -> Iterator[Damage]:
    """Stored vectors of one shard that are not finite or have an impossible length."""
    finite, valid_length = valid_vectors(view, stored)
    path = view.vectors.shard_path(number).relative_to(view.vectors.folder.parents[2])
    length = "1" if view.space.normalize else "more than 0"
    for kind, bad, what in (
        ("non_finite", rows[~finite], "NaN or infinite numbers"),
        ("norm", rows[finite & ~valid_length], f"vectors whose length is not {length}"),
    ):
        if len(bad):
            where = f"{path} holds {what}, {_listed('row', bad.tolist())}"
            yield Damage(kind, where, len(bad), view.array_name, number)


def _invalid_tokens(tokens: TokenColumns, number: int, values: dict[str, dict[int, bytes]]) -> Iterator[Damage]:
    """Texts of one shard whose token columns differ in length or hold NaN or infinite numbers.

    Args:
        values: by array, then by place in the shard.
    """
    first, name = number * tokens.shard_rows, tokens.columns[STATES].name
    unequal, non_finite, reason = [], [], ""
    for place, states in values[STATES].items():
        text = StoredTokens(states, values[PIECES][place], values.get(ATTENTION, {}).get(place))
        fault = tokens.wrong(text)
        reason = reason or fault
        if fault:
            unequal.append(first + place)
        elif not tokens.finite(text):
            non_finite.append(first + place)
    if unequal:
        where = f"shard {number} of {name}: {reason}; {_listed('row', unequal)}"
        yield Damage("tokens", where, len(unequal), name, number)
    if non_finite:
        where = f"shard {number} of {name} or its attention holds NaN or infinite numbers, {_listed('row', non_finite)}"
        yield Damage("non_finite", where, len(non_finite), name, number)


def _chunk_rows(array: ShardedArray, rows: npt.NDArray[np.intp]) -> str:
    """The rows of the inner chunks that hold these rows, as ranges."""
    chunks = np.unique(rows // array.chunk_rows)
    runs = np.split(chunks, np.flatnonzero(np.diff(chunks) != 1) + 1)
    return _listed("rows", [f"{run[0] * array.chunk_rows} to {(run[-1] + 1) * array.chunk_rows - 1}" for run in runs])


def _listed(noun: str, items: Sequence[object]) -> str:
    """The first of the items, and how many more there are."""
    more = f" and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
    return f"{noun} {', '.join(str(item) for item in items[:_LISTED])}{more}"
