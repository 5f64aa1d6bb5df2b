"""Files and folders, written durably and atomically."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any

from teacher_cache.errors import DiskFull

TEMPORARY_SUFFIX = ".writing"
DISK_FULL_HINT = "what was committed before is intact: free some space and run the same command again"


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path for a file or folder that replaces `path` when the block ends, and is removed if it raises.

    Data and folder entries are durable after the block.

    Raises:
        DiskFull: no space is left; nothing was replaced.
    """
    make_folder(path.parent)
    temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    try:
        yield temporary
        for part in [temporary, *temporary.rglob("*")]:
            sync_path(part)
        os.replace(temporary, path)
        sync_path(path.parent)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"no space left on the disk of {path.parent}; {DISK_FULL_HINT}") from error
        raise
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_write(path: Path) -> Iterator[Any]:
    """A binary file that replaces `path` as in `atomic_path`."""
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        yield file


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, durably."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_path(folder.parent)


def sync_path(path: Path) -> None:
    """Make the content of a file, or the entries of a folder, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest(path: Path) -> bytes:
    """16-byte digest of a file's content."""
    with path.open("rb") as file:
        return file_digest(file, lambda: blake2b(digest_size=16)).digest()
