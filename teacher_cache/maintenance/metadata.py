"""`cache.json` and the arrays' `zarr.json`, written anew: all they say is in the index, or as this version has it."""

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from teacher_cache.errors import DamagedCache, FormatVersionError
from teacher_cache.maintenance.inspection import unreadable
from teacher_cache.storage.codec import find_encoding
from teacher_cache.storage.files import atomic_write, make_folder
from teacher_cache.storage.index import Index
from teacher_cache.storage.lock import WriterLock
from teacher_cache.storage.manifest import CORPORA
from teacher_cache.storage.shards import ShardedArray
from teacher_cache.storage.texts import KEY_ARRAY, TEXT_ARRAY, TextTable
from teacher_cache.table.cache import CACHE_JSON, CORPUS_JSON, INDEX, LOCK, SPACE_JSON, write_cache_json
from teacher_cache.table.view import SPACES, SpaceRecord, create_vectors
from teacher_cache.tokens.token_columns import TokenRecord, create_array


@dataclass(frozen=True)
class LostMetadata:
    """A file that could not be read.

    Attributes:
        kind, where: as `verify` says.
        restored: it is written anew; False where no shard proves what would be written.
    """

    kind: str
    where: str
    restored: bool


def restore_cache_json(path: Path) -> None:
    """Write `cache.json` anew where it cannot be read but the texts say the size of a shard; the index is not asked."""
    if (path / LOCK).exists() and (path / TEXT_ARRAY).is_dir() and not _readable(path / CACHE_JSON):
        write_cache_json(path, ShardedArray(path / TEXT_ARRAY).shard_rows)


def restore_metadata(path: Path) -> list[LostMetadata]:
    """Write anew what cannot be read; a folder that was no cache is left alone.

    Raises:
        CacheLocked: someone is writing to it.
        DamagedCache: the index cannot be opened, or neither it nor the texts' metadata tell the size of a shard.
    """
    found: list[LostMetadata] = []
    if not (path / LOCK).exists() or not (path / TEXT_ARRAY).is_dir():
        return found
    lock = WriterLock(path / LOCK)
    index = Index(path / INDEX, writable=False)
    try:
        shard_rows = _shard_rows(path, index)
        if not _readable(path / CACHE_JSON):
            write_cache_json(path, shard_rows)
            found.append(LostMetadata("damaged_cache", f"{path / CACHE_JSON} could not be read", True))
        for name, folder, make in _arrays(path, index, shard_rows) if Index.exists(index.folder) else ():
            try:
                ShardedArray(folder)
            except (DamagedCache, FormatVersionError) as error:
                kind = "damaged_space" if name.startswith(SPACES) else "damaged_cache"
                found.append(LostMetadata(kind, str(error), _restore(index, name, folder, make)))
        for kind, file, data in _descriptions(path, index) if Index.exists(index.folder) else ():
            lost = unreadable(file)
            if lost:
                make_folder(file.parent)
                with atomic_write(file) as again:
                    again.write(data)
                found.append(LostMetadata(kind, lost, True))
    finally:
        index.close()
        lock.release()
    return found


def _shard_rows(path: Path, index: Index) -> int:
    """Rows of a shard, which every record of the index says."""
    if Index.exists(index.folder):
        for _, record in index.iter_shards(TEXT_ARRAY):
            return len(record.present)
    return ShardedArray(path / TEXT_ARRAY).shard_rows


def _readable(path: Path) -> bool:
    try:
        return "format" in json.loads(path.read_bytes())
    except (OSError, ValueError, TypeError):
        return False


def _descriptions(path: Path, index: Index) -> Iterator[tuple[str, Path, bytes]]:
    """What stands in `space.json` and `corpus.json`: the index's own records, for the day it is lost."""
    for slug, data in index.records("spaces").items():
        yield "damaged_space", path / SPACES / slug / SPACE_JSON, data
    for name, data in index.records("corpora").items():
        yield "corpus", path / CORPORA / name / CORPUS_JSON, data


def _arrays(path: Path, index: Index, shard_rows: int) -> Iterator[tuple[str, Path, Callable[[Path], ShardedArray]]]:
    """Name and folder of every array, and what makes an empty one like it below another folder."""

    def of_texts(name: str) -> Callable[[Path], ShardedArray]:
        def make(scratch: Path) -> ShardedArray:
            TextTable.create(scratch, shard_rows)
            return ShardedArray(scratch / name)

        return make

    def of_vectors(record: SpaceRecord) -> Callable[[Path], ShardedArray]:
        encoding = find_encoding(record.storage)
        return lambda scratch: create_vectors(scratch / record.array, encoding, record.space.dims, shard_rows)

    def of_tokens(columns: TokenRecord, name: str, array: str) -> Callable[[Path], ShardedArray]:
        shards = index.iter_shards(name)
        rows = next((len(shard.present) for _, shard in shards), columns.shard_rows(shard_rows))
        return lambda scratch: create_array(scratch / array, columns, array, rows)

    yield TEXT_ARRAY, path / TEXT_ARRAY, of_texts(TEXT_ARRAY)
    yield KEY_ARRAY, path / KEY_ARRAY, of_texts(KEY_ARRAY)
    for slug, data in index.records("spaces").items():
        record = SpaceRecord.from_json(data)
        yield record.array_name, path / SPACES / slug / record.array, of_vectors(record)
        for array in record.columns.arrays if record.columns is not None else ():
            name = f"{record.name}/{array}"
            yield name, path / name, of_tokens(record.columns, name, array)  # type: ignore[arg-type]


def _restore(index: Index, name: str, folder: Path, make: Callable[[Path], ShardedArray]) -> bool:
    """Give an array the metadata of a new one, if a shard that is read with them has its digest."""
    with tempfile.TemporaryDirectory() as scratch:
        array = make(Path(scratch))
        if name.startswith(SPACES) and not any((folder / "c").rglob("*")):  # no vector is left to speak against it
            make_folder(folder)
            with atomic_write(folder / "zarr.json") as file:
                file.write((array.folder / "zarr.json").read_bytes())
            return True
        (array.folder / "c").symlink_to((folder / "c").absolute(), target_is_directory=True)
        rows, proven = 0, False
        for number, record in index.iter_shards(name):
            rows = number * array.shard_rows + int(np.flatnonzero(record.present).max(initial=-1)) + 1
            try:
                proven = proven or array.codec.digest(array.read_shard(number, record.present)) == record.digest
            except DamagedCache:
                continue
        if proven:
            array.grow(rows)
            with atomic_write(folder / "zarr.json") as file:
                file.write((array.folder / "zarr.json").read_bytes())
        return proven
