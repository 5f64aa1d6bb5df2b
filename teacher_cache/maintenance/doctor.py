"""Checks this machine: libraries, devices, memory, and a small build from end to end."""

import importlib.metadata
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from teacher_cache.building.build import build
from teacher_cache.corpus.corpus import Corpus
from teacher_cache.errors import EXTRAS, KnownError, distribution
from teacher_cache.maintenance.check import verify
from teacher_cache.table.cache import TeacherCache
from teacher_cache.teachers import load_teacher, resolve
from teacher_cache.teachers.base import TeacherOptions

REQUIRED = ("numpy", "zarr", "numcodecs", "google-crc32c", "lmdb", "click", "pyyaml", "rich")
# Ray and data loaders pass tensors through shared memory; containers often have 64 MB of it.
SMALL_SHARED_MEMORY = 2**30


@dataclass(frozen=True)
class Finding:
    """The result of one check; `ok` is False if something will not work."""

    what: str
    ok: bool
    detail: str

    @property
    def mark(self) -> str:
        return "ok " if self.ok else "BAD"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def examine() -> list[Finding]:
    """Check everything; writes only to a temporary folder."""
    return [*_required(), *extras(), _processor(), _accelerator(), _shared_memory(), _offline(), _self_test()]


def _required() -> Iterator[Finding]:
    yield Finding("python", True, platform.python_version())
    for name in REQUIRED:
        version = _version(name)
        yield Finding(name, version is not None, version or "not installed; reinstall teacher-cache")


def extras() -> Iterator[Finding]:
    """One finding per optional extra: its libraries and, if some are missing, how to install them. Imports none."""
    for extra in dict.fromkeys(EXTRAS.values()):
        names = [distribution(library) for library, its_extra in EXTRAS.items() if its_extra == extra]
        versions = {name: _version(name) for name in names}
        installed = [f"{name} {version}" for name, version in versions.items() if version]
        missing = [name for name, version in versions.items() if not version]
        details = [f"installed: {', '.join(installed)}"] if installed else []
        if missing:
            details.append(f"missing: {', '.join(missing)}; pip install 'teacher-cache[{extra}]'")
        yield Finding(f"extra {extra}", True, "; ".join(details))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> Finding:
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return Finding("processor", True, f"{os.cpu_count()} cores, {pages * page / 1e9:.0f} GB of memory")


def _accelerator() -> Finding:
    try:
        import torch
    except ImportError:
        return Finding("accelerator", True, "unknown: torch is not installed")
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        return Finding("accelerator", True, ", ".join(names))
    if torch.backends.mps.is_available():
        return Finding("accelerator", True, "Apple GPU (mps)")
    return Finding("accelerator", True, "none; teachers run on the CPU")


def _shared_memory() -> Finding:
    if not Path("/dev/shm").is_dir():
        return Finding("shared memory", True, "not a Linux machine")
    free = shutil.disk_usage("/dev/shm").free
    detail = f"{free / 1e9:.1f} GB free"
    if free < SMALL_SHARED_MEMORY:
        return Finding("shared memory", False, f"{detail}; start the container with --shm-size=2g or more")
    return Finding("shared memory", True, detail)


def _offline() -> Finding:
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    return Finding("model hub", True, "offline: HF_HUB_OFFLINE is set" if offline else "used for hub ids only")


def _self_test() -> Finding:
    """Build, read and verify a cache of the toy teacher."""
    texts = [f"Sentence number {number}." for number in range(100)]
    try:
        with tempfile.TemporaryDirectory() as scratch:
            source, path = Path(scratch) / "corpus.txt", Path(scratch) / "cache"
            source.write_text("\n".join(texts), encoding="utf-8")
            options = TeacherOptions(model="toy")
            build(Corpus.open(source), options, path, name="self-test")
            with TeacherCache.open(path) as cache:
                stored = cache.space().gather(cache.lookup(texts))
            if not np.allclose(stored, load_teacher(resolve(options)).encode(texts), atol=1e-3):
                return Finding("self-test", False, "the vectors that were read are not those that were written")
            damage = verify(path, deep=True).damage
            if damage:
                return Finding("self-test", False, f"a new cache is damaged: {damage[0].where}")
    except (KnownError, OSError) as error:
        return Finding("self-test", False, str(error))
    return Finding("self-test", True, "built, read and verified a cache of 100 texts")
