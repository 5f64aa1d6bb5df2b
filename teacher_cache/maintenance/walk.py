"""The arrays of a cache, what can be read of their shards, and whether the values fit together.

Shared by `check`, `repair` and `rebuild`. Nothing here writes to the cache.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from teacher_cache.building.build import READ_RECORDS
from teacher_cache.corpus.corpus import Fingerprint
from teacher_cache.errors import DamagedCache
from teacher_cache.storage.chunks import Rows
from teacher_cache.storage.codec import ENCODINGS
from teacher_cache.storage.index import Index
from teacher_cache.storage.manifest import CorpusRecord, Manifest
from teacher_cache.storage.shards import ShardedArray
from teacher_cache.storage.texts import KEY_ARRAY, TEXT_ARRAY, TextTable
from teacher_cache.table.view import SpaceRecord, SpaceView
from teacher_cache.text_key import KEY_BYTES, text_keys

# Largest difference from length 1: rounding in the teacher's own normalization, and in two encodings, because a vector
# may have been converted.
UNIT_LENGTH = 1e-3 + 2 * max(encoding.max_norm_error for encoding in ENCODINGS.values())
# Vectors decoded at a time to compute their lengths in float64.
_BLOCK_ROWS = 1024
# Rows of a manifest read at a time.
_MANIFEST_ROWS = 2**20


@dataclass(frozen=True)
class CacheArray:
    """One array of a cache: its name in the index, folder, and record of its space; None for the text table."""

    name: str
    folder: Path
    space: SpaceRecord | None


def cache_arrays(path: Path, index: Index) -> Iterator[CacheArray]:
    """Texts and keys, then the vectors and token columns of every space in the index."""
    for name in (TEXT_ARRAY, KEY_ARRAY):
        yield CacheArray(name, path / name, None)
    for data in index.records("spaces").values():
        record = SpaceRecord.from_json(data)
        yield CacheArray(record.array_name, path / record.name / record.array, record)
        for array in record.columns.arrays if record.columns is not None else ():
            yield CacheArray(f"{record.name}/{array}", path / record.name / array, record)


@dataclass(frozen=True)
class ShardContents:
    """The rows of one shard that can be read.

    Attributes:
        values: `(shard_rows, ...)`, blank where nothing was read.
        read: `(shard_rows,)`, which rows were read.
        error: why the others were not; None if all wanted rows were read.
    """

    values: Rows
    read: npt.NDArray[np.bool_]
    error: DamagedCache | None


def read_shard(array: ShardedArray, number: int, wanted: npt.NDArray[np.bool_] | None = None) -> ShardContents:
    """Read one shard, chunk by chunk if it is damaged; its record in the index is not used.

    Args:
        wanted: `(shard_rows,)` rows to read; by default all rows of the stored chunks.
    """
    values, read = array.codec.blank(array.shard_rows), np.zeros(array.shard_rows, dtype=bool)
    array.forget(number)  # the file may have been replaced
    try:
        if wanted is None:
            wanted = np.repeat(array.open_shard(number).stored, array.chunk_rows)
        values[wanted] = array.read_shard(number, wanted)
        return ShardContents(values, wanted, None)
    except DamagedCache as error:
        for chunk in [] if wanted is None else np.unique(np.flatnonzero(wanted) // array.chunk_rows).tolist():
            within = wanted & (np.arange(array.shard_rows) // array.chunk_rows == chunk)
            try:
                values[within] = array.read_shard(number, within)
            except DamagedCache:
                continue
            read |= within
        return ShardContents(values, read, error)
    finally:
        array.forget(number)


def shard_files(array: ShardedArray) -> list[int]:
    """Numbers of the shards that have a file, ascending."""
    folder = array.folder / "c"
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdecimal() and array.shard_path(int(name)).is_file())


def subfolders(folder: Path) -> list[Path]:
    """The folders in a folder, and links to folders, by name."""
    return sorted(entry for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []


def key_matrix(keys: Sequence[bytes]) -> npt.NDArray[np.uint8]:
    """`(n, 16)` of n keys, as the array of keys stores them."""
    return np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, KEY_BYTES)


def pair_texts(texts: Rows, keys: Rows) -> tuple[list[bytes], npt.NDArray[np.bool_]]:
    """The hashes of n texts, and `(min(n, m),)`: which equal the stored key, of m keys."""
    hashes = text_keys(texts.tolist())
    count = min(len(hashes), len(keys))
    return hashes, np.asarray((key_matrix(hashes[:count]) == keys[:count]).all(axis=1))


def valid_vectors(view: SpaceView, stored: Rows) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Two `(n,)` masks of stored rows: finite, and of a length that the space allows."""
    norms = np.empty(len(stored))
    finite = np.empty(len(stored), dtype=bool)
    for start in range(0, len(stored), _BLOCK_ROWS):
        block = slice(start, start + _BLOCK_ROWS)
        decoded = np.empty((len(stored[block]), view.dims), dtype=np.float32)
        with np.errstate(invalid="ignore", over="ignore"):  # damaged rows
            view.encoding.restore(stored[block], decoded)
            norms[block] = np.linalg.norm(decoded.astype(np.float64), axis=1)
        finite[block] = np.isfinite(decoded).all(axis=1)
    return finite, np.abs(norms - 1) <= UNIT_LENGTH if view.space.normalize else norms > 0


def json_fault(file: Path) -> str:
    """What is wrong with a `space.json` or `corpus.json`; "" if it can be read."""
    try:
        reason = "" if isinstance(json.loads(file.read_bytes()), dict) else "it is not a JSON object"
    except (OSError, ValueError) as error:
        reason = str(error)
    return f"{file} cannot be read: {reason}; `tcache reindex` needs it if the index is lost" if reason else ""


def manifest_faults(manifest: Manifest, rows: int, texts: TextTable | None, *, deep: bool) -> Iterator[tuple[str, int]]:
    """What is wrong with a manifest and its domains: messages, and how many records each concerns.

    Args:
        texts: where the texts of the fingerprint are read; None skips it.
    """
    record = manifest.record
    fault = domain_fault(record, manifest.domains, deep=deep)
    if fault:
        yield fault, len(manifest)
    outside = 0
    for start in range(0, len(manifest), _MANIFEST_ROWS):
        part = manifest.rows[start : start + _MANIFEST_ROWS]
        outside += int(((part < 0) | (part >= rows)).sum())
    if outside:
        yield f"corpus {record.name!r} names rows outside the table of {rows}", outside
    elif texts is not None:
        fingerprint = Fingerprint(manifest.rows.shape[1])
        for start in range(0, len(manifest), READ_RECORDS):
            for text in texts.read(np.asarray(manifest.rows[start : start + READ_RECORDS]).ravel()):
                fingerprint.add(text.encode())
        if fingerprint.value != record.fingerprint:
            fault = f"the manifest of corpus {record.name!r} leads to other texts: their fingerprint is "
            yield f"{fault}{fingerprint.value}, recorded is {record.fingerprint}", len(manifest)


def domain_fault(record: CorpusRecord, numbers: npt.NDArray[np.uint16] | None, *, deep: bool) -> str:
    """What is wrong with the domain numbers `(M,)` of a corpus; "" if nothing is or the corpus has none."""
    if numbers is None:
        return ""
    names = [name.encode() for name in record.domains]
    fingerprint = Fingerprint(1)
    for start in range(0, len(numbers), _MANIFEST_ROWS):
        part = numbers[start : start + _MANIFEST_ROWS]
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
