"""What is wrong with a cache: `verify` reports it, `repair` fixes it.

Quick: index records against files and their sizes, presence against the table, counts against each other, manifests
against the table. Deep: every stored value is read once, to check digests, finite numbers, vector lengths, that each
key is the hash of its text, and the fingerprint of each corpus. With a teacher, some rows are encoded again.

One shard at a time is in memory. Beside a writer, a damaged shard is checked again if its record has changed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from teacher_cache.building.workers import EncodeWorker
from teacher_cache.errors import CorpusNotFound, DamagedCache, FormatVersionError
from teacher_cache.maintenance.walk import (
    cache_arrays,
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
from teacher_cache.storage.texts import KEY_ARRAY, TEXT_ARRAY
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.layout import CORPUS_JSON, SPACE_JSON
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

# The record of a shard, and the values of its present rows if they were read.
Read = tuple[ShardRecord | None, Rows | None]


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong.

    Attributes:
        kind: "damaged_cache", "damaged_space", "missing_shard", "damaged_shard", "digest", "key", "index",
            "non_finite", "norm", "tokens", "teacher", "count" or "corpus".
        where: file or name, and what was found and expected.
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
        teacher: encode one row in `every` again and compare; implies `deep`.
        every: by default such that about `REENCODED_ROWS` rows are encoded.
        report: called after every shard with how many are done and how many there are.

    Raises:
        SpaceMismatch, SpaceNotFound: the cache has no space of the teacher; the message names what differs.
    """
    try:
        cache = TeacherCache.open(path)
        rows = cache.rows  # reads the index, which `open` does not
    except DamagedCache as error:
        return CheckReport([Damage("damaged_cache", str(error), 0)], 0, 0, deep, [])
    with cache:
        comparison = None if teacher is None else TeacherCheck(cache, teacher, every)
        check = Check(cache, deep=deep or comparison is not None, report=report)
        damage: list[Damage] = []
        try:
            for found in check.damage():
                damage.append(found)
            damage += [] if comparison is None else comparison.damage(damage)
        except DamagedCache as error:  # in the index, so nothing more can be checked
            damage.append(Damage("damaged_cache", str(error), 0))
        compared = (0, None) if comparison is None else (comparison.reencoded, comparison.largest_difference)
        leftovers = sorted(str(file.relative_to(cache.path)) for file in cache.path.rglob(f"*{TEMPORARY_SUFFIX}"))
        return CheckReport(damage, check.done, rows, check.deep, leftovers, *compared)


class Check:
    """One check of an open cache."""

    def __init__(
        self, cache: TeacherCache, *, deep: bool, report: Callable[[int, int], None] = lambda done, total: None
    ) -> None:
        self.cache = cache
        self.deep = deep
        self.done = 0
        self.texts_ok = True  # so that the fingerprints of corpora can be computed
        self._report = report
        self._total = 0

    def damage(self) -> Iterator[Damage]:
        """Everything that is wrong."""
        yield from self.texts()
        for slug in self.cache.space_records():
            yield from self.space(slug)
        yield from self.corpora()

    def _numbers(self, *arrays: str) -> list[int]:
        """Shards of some arrays that the index has a record of, ascending."""
        return sorted({number for name in arrays for number, _ in self.cache.index.iter_shards(name)})

    # Texts and keys

    def texts(self) -> Iterator[Damage]:
        """Damage of the texts and keys; to be called first."""
        index, shard_rows = self.cache.index, self.cache.shard_rows
        self._total = sum(len(self._numbers(array.name)) for array in cache_arrays(self.cache.path, index))
        with index.snapshot():
            rows, keys = index.rows(), index.key_count()
        if keys != rows:
            yield Damage("count", f"the index has {keys} text keys for {rows} rows", abs(keys - rows))
        for number in sorted({*range(-(-rows // shard_rows)), *self._numbers(TEXT_ARRAY, KEY_ARRAY)}):
            found = self.text_shard(number)
            self.texts_ok &= not found
            yield from found

    def text_shard(self, number: int) -> list[Damage]:
        """Damage of the texts and keys of one shard."""
        table = self.cache.texts_table
        return self._shard([table.text, table.keys], number, self._unpaired, complete=True)

    def _unpaired(self, number: int, read: Sequence[Read], damaged: bool) -> Iterator[Damage]:
        """Texts whose hash is not their key, or is not indexed under their row."""
        (_, texts), (_, keys) = read
        if damaged or texts is None or keys is None:
            return
        hashes, same = pair_texts(texts, keys)  # a writer may have added rows to one of them
        rows = number * self.cache.shard_rows + np.arange(len(same))
        misplaced = self.cache.index.find(hashes[: len(same)]) != rows
        for kind, bad, what in (
            ("key", rows[~same], "keys are not the hash of their text"),
            ("index", rows[same & misplaced], "keys are indexed under another row or not at all"),
        ):
            if len(bad):
                where = f"shard {number} of the text table: {len(bad)} {what}, {_listed('row', bad)}"
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
            found += self._shard([view.column], number, partial(_invalid_vectors, view))
        try:
            if view.tokens is not None:
                columns = list(view.tokens.columns.values())
                for number in self._numbers(*(column.name for column in columns)):
                    found += self._shard(columns, number, partial(_invalid_tokens, view.tokens))
        except (DamagedCache, FormatVersionError) as error:
            found.append(Damage("damaged_space", str(error), 0, f"{record.name}/{STATES}"))
        return found

    # Any shard

    def _shard(
        self,
        columns: Sequence[Column],
        number: int,
        compare: Callable[[int, Sequence[Read], bool], Iterator[Damage]],
        *,
        complete: bool = False,
    ) -> list[Damage]:
        """Damage of one shard of arrays that belong together, found while their records stayed the same.

        `compare` yields damage that only values or several arrays together show; its last argument is whether an array
        is damaged by itself. `complete` arrays have every row of the table; others may lack the shard.
        """
        while True:
            rows, records = self._records(columns, number)
            found: list[Damage] = []
            read: list[Read] = []
            for column, record in zip(columns, records, strict=True):
                damage, values = self._read(column, number, rows, record, complete=complete)
                found += damage
                read.append((record, values))
            found += list(compare(number, read, bool(found)))
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
    """Compares some vectors of a space with what its teacher computes now; no model is loaded before `damage`."""

    def __init__(self, cache: TeacherCache, teacher: TeacherOptions, every: int | None) -> None:
        """Find the space of the teacher."""
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

    def damage(self, found: Sequence[Damage]) -> list[Damage]:
        """Vectors that differ, besides the damage that was found without the teacher."""
        view, name = self.view, self.view.array_name
        damaged = {(damage.array, damage.shard) for damage in found}
        parts = [np.empty(0, dtype=np.int64)]
        for number, record in view.index.iter_shards(name):
            if not {(name, number), (TEXT_ARRAY, number)} & damaged:
                rows = np.flatnonzero(record.present) + number * view.column.shard_rows
                parts.append(rows[rows % self.every == 0])
        rows = np.concatenate(parts)
        differences = np.empty(len(rows))
        for start in range(0, len(rows), _BATCH_ROWS):
            batch = rows[start : start + _BATCH_ROWS]
            now = self._worker.encode(self._cache.texts(batch)).vectors.astype(np.float64)
            differences[start : start + len(batch)] = cosine_errors(now, view.gather(batch, dtype=np.float64))
            self.reencoded += len(batch)
            self.largest_difference = float(np.nanmax(differences[: self.reencoded], initial=0.0))
        different = ~(differences <= SAME_COSINE)  # NaN differs
        if not different.any():
            return []
        where = (
            f"space {view.slug}: {different.sum()} of {len(rows)} rows differ from the teacher's output now by 1 - cos "
            f"of up to {differences[different].max():.2g} (bound {SAME_COSINE:g}): {_listed('row', rows[different])}"
        )
        return [Damage("teacher", where, int(different.sum()), name)]


def _packed(records: Sequence[ShardRecord | None]) -> list[bytes | None]:
    return [None if record is None else record.pack() for record in records]


def _invalid_vectors(view: SpaceView, number: int, read: Sequence[Read], damaged: bool) -> Iterator[Damage]:
    """Vectors of one shard that are not finite or have an impossible length."""
    ((record, stored),) = read
    if record is None or stored is None:
        return
    rows = np.flatnonzero(record.present) + number * view.column.shard_rows
    finite, valid_length = valid_vectors(view, stored)
    path = view.vectors.shard_path(number).relative_to(view.vectors.folder.parents[2])
    length = "1" if view.space.normalize else "more than 0"
    for kind, bad, what in (
        ("non_finite", rows[~finite], "NaN or infinite numbers"),
        ("norm", rows[finite & ~valid_length], f"vectors whose length is not {length}"),
    ):
        # A wrong digest explains a wrong length, but not NaN.
        if len(bad) and not (damaged and kind == "norm"):
            where = f"{path} holds {what}, {_listed('row', bad)}"
            yield Damage(kind, where, len(bad), view.array_name, number)


def _invalid_tokens(tokens: TokenColumns, number: int, read: Sequence[Read], damaged: bool) -> Iterator[Damage]:
    """Texts of one shard whose token columns do not have the same rows or length, or are not finite."""
    if damaged:
        return
    places, values = {}, {}
    for array, (record, stored) in zip(tokens.columns, read, strict=True):
        places[array] = [] if record is None else np.flatnonzero(record.present).tolist()
        if stored is not None:
            values[array] = dict(zip(places[array], stored, strict=True))
    first, name = number * tokens.shard_rows, tokens.columns[STATES].name
    if places[STATES] != places[PIECES]:
        where = f"shard {number} of {name} and {tokens.columns[PIECES].name}: not the same rows"
        yield Damage("count", where, tokens.shard_rows, name, number)
    elif {STATES, PIECES} <= values.keys():
        unequal, non_finite, reason = [], [], ""
        for place, states in values[STATES].items():
            text = StoredTokens(states, values[PIECES][place], values.get(ATTENTION, {}).get(place))
            fault = tokens.inconsistency(text)
            reason = reason or fault
            if fault:
                unequal.append(first + place)
            elif not tokens.is_finite(text):
                non_finite.append(first + place)
        if unequal:
            where = f"shard {number} of {name}: {reason}; {_listed('row', unequal)}"
            yield Damage("tokens", where, len(unequal), name, number)
        if non_finite:
            where = f"shard {number} of {name} or its attention holds NaN or infinite numbers, "
            yield Damage("non_finite", where + _listed("row", non_finite), len(non_finite), name, number)


def _chunk_rows(array: ShardedArray, rows: npt.NDArray[np.intp]) -> str:
    """The rows of the inner chunks that hold these rows, as ranges."""
    chunks = np.unique(rows // array.chunk_rows)
    runs = np.split(chunks, np.flatnonzero(np.diff(chunks) != 1) + 1)
    return _listed("rows", [f"{run[0] * array.chunk_rows} to {(run[-1] + 1) * array.chunk_rows - 1}" for run in runs])


def _listed(noun: str, items: Sequence[Any] | npt.NDArray[np.int64]) -> str:
    """The first of the items, and how many more there are."""
    more = f" and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
    return f"{noun} {', '.join(str(item) for item in items[:_LISTED])}{more}"
