"""The lock that allows one writer per cache.

`flock` ends with its process, even a killed one, so there are no stale locks; the file's text only names the holder.
Programs that the process starts do not inherit the descriptor.
"""

import fcntl
import json
import logging
import os
import socket
from datetime import UTC, datetime
from pathlib import Path

from teacher_cache.errors import CacheLocked

logger = logging.getLogger("teacher_cache")


class WriterLock:
    """The right to write to one cache folder."""

    def __init__(self, path: Path) -> None:
        """Take the lock; CacheLocked names the process that holds it."""
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = self._owner()
            os.close(self._handle)
            raise CacheLocked(
                f"{path.parent} is being written by {owner or 'another process'}; wait for it to finish, or "
                "build into another cache folder"
            ) from None
        owner = self._owner()
        if owner:
            logger.warning("took over the writer lock of %s, which ended without releasing it", owner)
        since = datetime.now(UTC).isoformat(timespec="seconds")
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since})
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, text.encode(), 0)

    def _owner(self) -> str:
        try:
            record = json.loads(os.pread(self._handle, 4096, 0))
            return f"process {record['pid']} on {record['host']} since {record['since']}"
        except (ValueError, KeyError, TypeError):
            return ""

    def release(self) -> None:
        os.ftruncate(self._handle, 0)
        os.close(self._handle)
