"""Conversion of a space to another encoding, from its stored vectors."""

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from teacher_cache.errors import CacheError
from teacher_cache.storage.codec import Encoding, check_rows, combined_error, find_encoding, stored_name
from teacher_cache.storage.files import atomic_write
from teacher_cache.storage.index import Change, ShardRecord, shard_key
from teacher_cache.storage.shards import ShardedArray
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.layout import SPACE_JSON
from teacher_cache.table.view import SPACES, SpaceView, create_vectors


@dataclass(frozen=True)
class Conversion:
    """Result of a conversion. Scripts rely on the names of `to_json`.

    Attributes:
        rows: converted vectors; 0 if the space already had the encoding.
        worst_error: bound on the largest 1 - cos between a stored vector and the teacher output, over both encodings.
        bytes_before, bytes: of the shards. The old ones remain for open readers until `tcache gc`.
        token_columns: of the space, which are not converted; "" if it has none.
    """

    space: str
    storage_before: str
    storage: str
    rows: int
    worst_error: float
    bytes_before: int
    bytes: int
    token_columns: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def convert(
    path: str | Path,
    storage: str,
    space: str | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Conversion:
    """Store a space in another encoding.

    One transaction switches readers to the new vectors after all are converted; a kill before it changes nothing.

    Args:
        report: called with vectors done and their total, after each shard.

    Raises:
        DamagedCache: a shard does not hold the values that were written; nothing changes.
        CacheError: the encoding cannot hold a vector; nothing changes.
    """
    encoding = find_encoding(storage)
    with TeacherCache.open(path, "r+") as cache:
        view = cache.space(space)
        before = view.record
        kept = "" if before.columns is None else before.columns.describe()
        if view.encoding == encoding:
            size = sum(record.size for _, record in cache.index.iter_shards(view.array_name))
            return Conversion(view.slug, encoding.name, encoding.name, 0, view.worst_error(), size, size, kept)
        after = replace(before, storage=encoding.name, array=f"vectors-{stored_name(encoding.name)}.zarr")
        folder = cache.path / SPACES / view.slug
        # Left by an interrupted conversion, or by an earlier one that this one reverts.
        left = [number for number, _ in cache.index.iter_shards(after.array_name)]
        cache.index.commit([Change("shards", shard_key(after.array_name, number), None) for number in left])
        shutil.rmtree(folder / after.array, ignore_errors=True)
        array = create_vectors(folder / after.array, encoding, view.dims, cache.shard_rows)
        changes = [Change("spaces", view.slug.encode(), after.to_json())]
        size_before = size = done = 0
        worst = 0.0
        total = view.present_count()
        for number, record in cache.index.iter_shards(view.array_name):
            new = _convert_shard(view, record, number, array, encoding)
            # The old records and files remain: open readers still use them.
            changes.append(Change("shards", shard_key(after.array_name, number), new.pack()))
            size_before, size, worst = size_before + record.size, size + new.size, max(worst, new.worst_error)
            done += int(record.present.sum())
            report(done, total)
        cache.index.commit(changes)
        with atomic_write(folder / SPACE_JSON) as file:
            file.write(after.to_json())
        return Conversion(view.slug, before.storage, encoding.name, done, worst, size_before, size, kept)


def _convert_shard(
    view: SpaceView, record: ShardRecord, number: int, array: ShardedArray, encoding: Encoding
) -> ShardRecord:
    stored = view.vectors.read_checked(number, record.present, record.digest)
    vectors = np.empty((len(stored), view.dims), dtype=np.float32)
    view.encoding.restore(stored, vectors)
    checked = check_rows(vectors, encoding)
    within = np.flatnonzero(record.present)
    if checked.quarantined:
        place, reason = next(iter(checked.quarantined.items()))
        raise CacheError(
            f"row {number * array.shard_rows + within[place]} of space {view.slug} cannot be stored as "
            f"{encoding.name}: {reason}; it remains {view.encoding.name}"
        )
    body = array.empty(array.shard_rows)
    body[within] = checked.stored
    receipt = array.write_shard(number, body, record.present)
    array.grow(number * array.shard_rows + int(within[-1]) + 1)
    worst = combined_error(record.worst_error, float(checked.cosine_error.max()))
    return ShardRecord(receipt.digest, worst, receipt.size, record.present)
