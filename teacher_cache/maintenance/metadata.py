"""Rewrites lost `cache.json`, `zarr.json`, `space.json` and `corpus.json` files from the index and the shards."""

import json
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np

from teacher_cache.errors import DamagedCache, FormatVersionError
from teacher_cache.maintenance.check import Damage
from teacher_cache.maintenance.walk import CacheArray, cache_arrays, json_fault
from teacher_cache.storage.codec import find_encoding
from teacher_cache.storage.files import atomic_write
from teacher_cache.storage.index import Index
from teacher_cache.storage.lock import WriterLock
from teacher_cache.storage.manifest import CORPORA
from teacher_cache.storage.shards import ShardedArray
from teacher_cache.storage.texts import TEXT_ARRAY, TextTable
from teacher_cache.table.layout import CACHE_JSON, CORPUS_JSON, INDEX, LOCK, SPACE_JSON, write_cache_json
from teacher_cache.table.view import SPACES, create_vectors
from teacher_cache.tokens.token_columns import create_array


def restore_cache_json(path: Path) -> None:
    """Rewrite `cache.json` if it cannot be read but the metadata of the texts can; the index is not used."""
    if _was_cache(path) and not _has_format(path):
        write_cache_json(path, ShardedArray(path / TEXT_ARRAY).shard_rows)


def restore_metadata(path: Path) -> tuple[list[Damage], list[Damage]]:
    """Rewrite the metadata that cannot be read; a folder that was never a cache is not changed.

    Returns what was damaged and is restored, and what is not because no shard confirms what would be written.

    Raises:
        DamagedCache: the index cannot be opened, or neither it nor the metadata of the texts have the size of a shard.
    """
    restored: list[Damage] = []
    lost: list[Damage] = []
    if not _was_cache(path):
        return restored, lost
    lock = WriterLock(path / LOCK)
    index = Index(path / INDEX, writable=False)
    try:
        shard_rows = _shard_rows(path, index)
        if not _has_format(path):
            write_cache_json(path, shard_rows)
            restored.append(Damage("damaged_cache", f"{path / CACHE_JSON} could not be read", 0))
        if not Index.exists(index.folder):
            return restored, lost
        for array in cache_arrays(path, index):
            try:
                ShardedArray(array.folder)
            except (DamagedCache, FormatVersionError) as error:
                kind = "damaged_cache" if array.space is None else "damaged_space"
                (restored if _restore(index, array, shard_rows) else lost).append(Damage(kind, str(error), 0))
        for kind, database, folder, name in (
            ("damaged_space", "spaces", SPACES, SPACE_JSON),
            ("corpus", "corpora", CORPORA, CORPUS_JSON),
        ):
            for record, data in index.records(database).items():
                file = path / folder / record / name
                fault = json_fault(file)
                if fault:
                    with atomic_write(file) as new:
                        new.write(data)
                    restored.append(Damage(kind, fault, 0))
    finally:
        index.close()
        lock.release()
    return restored, lost


def _was_cache(path: Path) -> bool:
    return (path / LOCK).exists() and (path / TEXT_ARRAY).is_dir()


def _has_format(path: Path) -> bool:
    """Whether `cache.json` can be read."""
    try:
        return "format" in json.loads((path / CACHE_JSON).read_bytes())
    except (OSError, ValueError, TypeError):
        return False


def _shard_rows(path: Path, index: Index) -> int:
    """Rows of a shard of texts, from any record in the index or from the metadata of the texts."""
    if Index.exists(index.folder):
        for _, record in index.iter_shards(TEXT_ARRAY):
            return len(record.present)
    return ShardedArray(path / TEXT_ARRAY).shard_rows


def _create(scratch: Path, index: Index, array: CacheArray, shard_rows: int) -> ShardedArray:
    """An empty array with the metadata that `array` should have."""
    if array.space is None:
        TextTable.create(scratch, shard_rows)
        return ShardedArray(scratch / array.name)
    folder, columns = scratch / array.folder.name, array.space.columns
    if columns is None or folder.name not in columns.arrays:
        return create_vectors(folder, find_encoding(array.space.storage), array.space.space.dims, shard_rows)
    shards = index.iter_shards(array.name)
    rows = next((len(record.present) for _, record in shards), columns.shard_rows(shard_rows))
    return create_array(folder, columns, folder.name, rows)


def _restore(index: Index, array: CacheArray, shard_rows: int) -> bool:
    """Give an array the metadata of a new one, if a shard read with them has its digest."""
    with tempfile.TemporaryDirectory() as scratch:
        new = _create(Path(scratch), index, array, shard_rows)
        shards = array.folder / "c"
        confirmed = array.space is not None and not any(shards.rglob("*"))  # no shard is left to contradict them
        if not confirmed:
            (new.folder / "c").symlink_to(shards.absolute(), target_is_directory=True)
            rows = 0
            for number, record in index.iter_shards(array.name):
                rows = number * new.shard_rows + int(np.flatnonzero(record.present).max(initial=-1)) + 1
                with suppress(DamagedCache):
                    if not confirmed:
                        new.read_checked(number, record.present, record.digest)
                        confirmed = True
            if confirmed:
                new.grow(rows)
        if confirmed:
            with atomic_write(array.folder / "zarr.json") as file:
                file.write((new.folder / "zarr.json").read_bytes())
        return confirmed
