"""A sealed copy of the index, with which other machines read a cache.

LMDB must not be opened over a network, and its readers write to its lock file. A sealed copy never changes, so it needs
no lock and may be on any file system, mounted read-only.
"""

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from teacher_cache.storage.environment import DATA
from teacher_cache.storage.files import atomic_write
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.layout import SEALED


@dataclass(frozen=True)
class SealedIndex:
    """A sealed copy, and when it was made: ISO 8601 in UTC."""

    path: str
    rows: int
    bytes: int
    sealed: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def seal(path: str | Path) -> SealedIndex:
    """Replace the sealed copy by one of the index as it is now; may run beside a writer.

    Raises:
        CacheError: the index itself cannot be read here.
        DiskFull: the older copy is unchanged.
    """
    with TeacherCache.open(path) as cache:
        target = cache.path / SEALED / DATA
        when = datetime.now(UTC).isoformat(timespec="seconds")
        with atomic_write(target) as file:
            cache.index.copy_sealed(Path(file.name), cache.id, when)
    with TeacherCache.open(path, sealed=True) as copy:
        return SealedIndex(str(target), copy.rows, target.stat().st_size, when)
