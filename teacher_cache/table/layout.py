"""Files of a cache folder: their names, `cache.json`, and what makes a folder a cache."""

import json
import re
import secrets
import shutil
from pathlib import Path
from typing import Any

from teacher_cache.errors import CacheError, CacheNotFound, DamagedCache, FormatVersionError
from teacher_cache.storage.files import TEMPORARY_SUFFIX, atomic_write
from teacher_cache.storage.index import Index
from teacher_cache.storage.manifest import CORPORA
from teacher_cache.storage.texts import TEXT_ARRAY, TextTable
from teacher_cache.table.view import SPACES
from teacher_cache.text_key import KEY_RULE

FORMAT_VERSION = 2
SHARD_ROWS = 8192
CACHE_JSON = "cache.json"
CORPUS_JSON = "corpus.json"
SPACE_JSON = "space.json"
INDEX = "index.lmdb"
SEALED = "index.sealed"
LOCK = "writer.lock"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def checked_name(name: str) -> str:
    """`name`, if it is a valid corpus name: a folder name that cannot leave the cache.

    Raises:
        CacheError: it is not.
    """
    if not _NAME.fullmatch(name):
        raise CacheError(
            f"{name!r} is not a corpus name: `name` takes up to 100 letters, digits, '.', '_' and '-', starting "
            "with a letter or digit"
        )
    return name


def read_cache_json(path: Path) -> dict[str, Any]:
    """Content of `cache.json`.

    Raises:
        DamagedCache: it is not valid JSON, or has no format version.
    """
    try:
        record: dict[str, Any] = json.loads((path / CACHE_JSON).read_bytes())
        record["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCache(
            f"{path / CACHE_JSON} has no format version: {error!r}; `tcache repair {path}` rewrites it"
        ) from error
    return record


def check_format(path: Path) -> None:
    """Check that a folder is a cache of this format version.

    Raises:
        CacheNotFound: it is not a cache.
        DamagedCache: `cache.json` is missing or invalid.
        FormatVersionError: it has another format version.
    """
    if not (path / CACHE_JSON).exists():
        if has_shards(path):
            raise DamagedCache(f"{path / CACHE_JSON} is missing: `tcache repair {path}` rewrites it")
        raise CacheNotFound(
            f"no teacher cache at {path}: it has no {CACHE_JSON}; create one with "
            f"`tcache build CORPUS --teacher T --cache {path}`"
        )
    version = read_cache_json(path)["format"]
    if version != FORMAT_VERSION:
        raise FormatVersionError(
            f"{path} has cache format {version}, this version reads format {FORMAT_VERSION}; use the "
            "release that wrote it, or build a new cache"
        )


def check_index(path: Path) -> None:
    # LMDB would create an empty index for a writer, which would then overwrite the stored rows.
    if not Index.exists(path / INDEX):
        raise DamagedCache(
            f"the index at {path / INDEX} is missing: `tcache reindex {path}` rebuilds it from the shards"
        )


def has_shards(path: Path) -> bool:
    """Whether the folder holds text shards, so that it is a cache even if other files are missing."""
    return (path / LOCK).exists() and (path / TEXT_ARRAY / "c").is_dir()


def is_unfinished(path: Path) -> bool:
    """Whether the folder is empty, or left by a first build that was killed before its first commit.

    The lock file is created first, so a folder without it belongs to someone else, whatever its entries are called.
    """
    names = {entry.name for entry in path.iterdir() if not entry.name.endswith(TEMPORARY_SUFFIX)}
    return not names or (LOCK in names and names <= {INDEX, "texts", CORPORA, SPACES, LOCK})


def create_files(path: Path, shard_rows: int) -> None:
    if shard_rows < 8 or shard_rows % 8:
        raise CacheError(f"shards of {shard_rows} rows: expected a positive multiple of 8")
    shutil.rmtree(path / "texts", ignore_errors=True)
    shutil.rmtree(path / INDEX, ignore_errors=True)
    TextTable.create(path, shard_rows)
    (path / CORPORA).mkdir(exist_ok=True)
    (path / SPACES).mkdir(exist_ok=True)
    (path / INDEX).mkdir()
    index = Index(path / INDEX, writable=True)
    index.commit([])
    index.close()
    write_cache_json(path, shard_rows)  # last: this makes the folder a cache


def write_cache_json(path: Path, shard_rows: int) -> None:
    """Write `cache.json`, with a new id."""
    record = {"format": FORMAT_VERSION, "id": secrets.token_hex(16), "key": KEY_RULE, "shard_rows": shard_rows}
    with atomic_write(path / CACHE_JSON) as file:
        file.write(json.dumps(record).encode())
