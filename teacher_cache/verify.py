"""Check every promise the index makes.

Quick: records against files, presence against the table, counts against each other, row lists against the
table. Deep: every stored value is read; digests, finiteness, and that each key is the hash of its text.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from teacher_cache.cache import TeacherCache
from teacher_cache.errors import DamagedCache, FormatVersionError
from teacher_cache.storage.files import TEMPORARY_SUFFIX
from teacher_cache.storage.index import ShardRecord
from teacher_cache.storage.shards import ShardedArray
from teacher_cache.storage.texts import KEYS, TEXT
from teacher_cache.text_key import text_keys
from teacher_cache.view import SPACES, SpaceRecord, SpaceView


@dataclass(frozen=True)
class Damage:
    """One broken promise.

    Attributes:
        kind: what sort ("damaged_cache", "damaged_space", "missing_shard", "damaged_shard", "digest", "key",
            "non_finite", "count", "corpus").
        where: file or name, and what was found and expected.
        rows: how many rows it touches.
    """

    kind: str
    where: str
    rows: int


@dataclass(frozen=True)
class Verdict:
    """The outcome; `leftovers` are files of interrupted writes, harmless and named for completeness."""

    damage: list[Damage]
    shards: int
    rows: int
    deep: bool
    leftovers: list[str]

    @property
    def ok(self) -> bool:
        return not self.damage

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


def verify(path: str | Path, *, deep: bool = False) -> Verdict:
    """Check a cache; reads only, and may run beside a writer.

    Raises:
        CacheNotFound, FormatVersionError: it cannot even be opened.
    """
    try:
        cache = TeacherCache.open(path)
        cache.index.rows()  # the index itself is opened by the first look into it
    except DamagedCache as error:
        return Verdict([Damage("damaged_cache", str(error), 0)], 0, 0, deep, [])
    with cache:
        index = cache.index
        table = cache.texts_table
        with index.snapshot():
            rows, keys = index.rows(), index.key_count()
            spaces = cache.space_records()
            arrays = [TEXT, KEYS, *(space.array_name for space in spaces.values())]
            records = {name: index.shards(name) for name in arrays}
        damage: list[Damage] = []
        if keys != rows:
            damage.append(Damage("count", f"the index has {keys} text keys for {rows} rows", abs(keys - rows)))
        in_texts = [
            *_check_array(cache, TEXT, table.text.array, records[TEXT], rows, complete=True, deep=deep),
            *_check_array(cache, KEYS, table.keys.array, records[KEYS], rows, complete=True, deep=deep),
        ]
        damage += in_texts
        if deep and not in_texts:
            damage += _check_keys(cache, records[TEXT])
        for space in spaces.values():
            damage += _check_space(cache, space, records, rows, deep=deep)
        damage += _check_corpora(cache)
        leftovers = sorted(str(p.relative_to(cache.path)) for p in cache.path.rglob(f"*{TEMPORARY_SUFFIX}"))
        return Verdict(damage, sum(map(len, records.values())), rows, deep, leftovers)


def _check_space(
    cache: TeacherCache,
    space: SpaceRecord,
    records: dict[str, dict[int, ShardRecord]],
    rows: int,
    *,
    deep: bool,
) -> list[Damage]:
    try:
        view = SpaceView(cache.path, cache.index, space)
    except (DamagedCache, FormatVersionError) as error:
        return [Damage("damaged_space", str(error), 0)]
    ours = records[view.array_name]
    found = list(_check_array(cache, view.array_name, view.vectors, ours, rows, complete=False, deep=deep))
    if deep and not found:
        found += _check_finite(view, ours)
    return found


def _check_array(
    cache: TeacherCache,
    name: str,
    array: ShardedArray,
    records: dict[int, ShardRecord],
    rows: int,
    *,
    complete: bool,
    deep: bool,
) -> Iterator[Damage]:
    shard_rows = array.shard_rows
    if complete:
        for number in range(-(-rows // shard_rows)):
            if number not in records:
                yield Damage("count", f"the index has no record of shard {number} of {name}", shard_rows)
    for number, record in records.items():
        count = int(record.present.sum())
        path = array.shard_path(number).relative_to(cache.path)
        last = int(np.flatnonzero(record.present)[-1]) if count else -1
        if number * shard_rows + last >= rows:
            yield Damage("count", f"{path}: the index promises rows past the table's {rows}", count)
            continue
        expected = min(shard_rows, rows - number * shard_rows)
        if complete and count != expected:
            yield Damage("count", f"{path}: {count} rows recorded, expected {expected}", expected - count)
        try:
            shard = array.open_shard(number)
            chunks = np.unique(np.flatnonzero(record.present) // array.chunk_rows)
            if not shard.stored[chunks].all():
                yield Damage("damaged_shard", f"{path}: promised chunks are not stored", count)
            elif deep:
                values = array.read_shard(number, record.present)
                if array.codec.digest(values) != record.digest:
                    yield Damage("digest", f"{path}: the values are not those that were written", count)
        except DamagedCache as error:
            kind = "damaged_shard" if (cache.path / path).exists() else "missing_shard"
            yield Damage(kind, str(error), count)


def _check_keys(cache: TeacherCache, records: dict[int, ShardRecord]) -> Iterator[Damage]:
    table = cache.texts_table
    for number, record in records.items():
        rows = np.flatnonzero(record.present) + number * table.shard_rows
        keys = [key.tobytes() for key in table.read_keys(rows)]
        texts = table.read(rows)
        wrong = sum(stored != made for stored, made in zip(keys, text_keys(texts), strict=True))
        misplaced = int((cache.index.find(keys) != rows).sum())
        if wrong or misplaced:
            yield Damage(
                "key",
                f"shard {number} of the text table: {wrong} keys are not the hash of their text, {misplaced} "
                "are indexed under another row",
                max(wrong, misplaced),
            )


def _check_finite(view: SpaceView, records: dict[int, ShardRecord]) -> Iterator[Damage]:
    for number, record in records.items():
        values = view.vectors.read_shard(number, record.present)
        bad = int((~np.isfinite(values.astype(np.float32)).all(axis=1)).sum())
        if bad:
            yield Damage("non_finite", f"shard {number} of space {view.slug} holds NaN or infinite rows", bad)


def _check_corpora(cache: TeacherCache) -> Iterator[Damage]:
    for name, record in cache.corpora().items():
        try:
            manifest = cache.corpus(name)
        except DamagedCache as error:
            yield Damage("corpus", str(error), record.records)
            continue
        rows = cache.rows  # read after the corpus, which names no row that is newer
        for start in range(0, len(manifest), 2**20):
            part = manifest.rows[start : start + 2**20]
            outside = int(((part < 0) | (part >= rows)).sum())
            if outside:
                yield Damage("corpus", f"corpus {name!r} names rows outside the table of {rows}", outside)
