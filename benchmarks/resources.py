"""What a process takes of memory, and what the system keeps of files in its page cache. Linux only."""

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from distill.training.measurement import memory_in_use, peak_memory, process_memory, reset_peak_memory

SAMPLE_SECONDS = 0.05


@dataclass(frozen=True)
class Memory:
    """Resident memory of this process in bytes.

    Attributes:
        peak: highest `resident` since `reset_peak_memory`.
        anonymous: heap and private pages.
        file: mapped pages of files, shared memory included.
    """

    peak: int
    resident: int
    anonymous: int
    file: int

    @classmethod
    def now(cls) -> Self:
        """What the process uses now."""
        file = process_memory("RssFile") + process_memory("RssShmem")
        return cls(peak_memory(), memory_in_use(), process_memory("RssAnon"), file)

    def to_json(self) -> dict[str, int]:
        return asdict(self)


class PeakMemory:
    """Highest resident, anonymous and file memory while the block runs; the last two are sampled."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.anonymous = self.file = self.peak = 0

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self._look()

    def _look(self) -> None:
        memory = Memory.now()
        self.anonymous = max(self.anonymous, memory.anonymous)
        self.file = max(self.file, memory.file)
        self.peak = memory.peak

    def __enter__(self) -> Self:
        reset_peak_memory()
        self._look()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._look()


def files_below(folder: Path) -> Iterator[Path]:
    """Every file with bytes in it."""
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size)


def bytes_below(folder: Path) -> int:
    """Size of all files."""
    return sum(path.stat().st_size for path in files_below(folder))


def warm(folder: Path) -> None:
    """Read every file once, so that the page cache holds it."""
    buffer = bytearray(2**20)
    for path in files_below(folder):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def cool(folder: Path) -> float:
    """Drop every file from the page cache; returns the share of pages that stayed all the same.

    Pages that some process has mapped stay.
    """
    for path in files_below(folder):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return resident_share(folder)


def resident_share(folder: Path) -> float:
    """How much of the files below a folder the page cache holds: 0 to 1."""
    counts = [_pages(path) for path in files_below(folder)]
    return sum(resident for resident, _ in counts) / max(1, sum(pages for _, pages in counts))


def _pages(path: Path) -> tuple[int, int]:
    """Pages of a file that are in the page cache, and pages in all."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = -(-path.stat().st_size // mmap.PAGESIZE)
    resident = np.zeros(pages, dtype=np.uint8)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, dtype=np.uint8)
        arguments = (ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(mapped)))
        failed = libc.mincore(*arguments, ctypes.c_void_p(resident.ctypes.data))
        del view
    if failed:
        raise OSError(ctypes.get_errno(), "mincore", str(path))
    return int((resident & 1).sum()), pages
