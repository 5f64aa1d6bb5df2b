"""Comparison of caches with their copies."""

import json
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from teacher_cache.maintenance.check import verify
from teacher_cache.table.cache import TeacherCache
from tests.teacher_cache.small_caches import SHARD_ROWS, numbered

TEXTS = numbered(20)
RECORDS = [*TEXTS[:12], TEXTS[3], *TEXTS[12:], TEXTS[0]]


def named(folder: Path, encoding: str) -> Path:
    return folder / ("out.parquet" if encoding == "parquet" else "out")


def empty_cache(path: Path) -> Path:
    """An empty cache with small shards."""
    TeacherCache.open(path, "a", shard_rows=SHARD_ROWS).close()
    return path


def jsonl(path: Path) -> list[Any]:
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def all_vectors(path: Path, space: str | None = None) -> dict[str, npt.NDArray[np.float32]]:
    """Text -> vector of a whole cache."""
    with TeacherCache.open(path) as cache:
        view = cache.space(space)
        rows = np.flatnonzero(view.present(np.arange(cache.rows)))
        return dict(zip(cache.texts(rows), view.gather(rows), strict=True))


def same_vectors(path: Path, other: Path) -> bool:
    """Whether two caches hold the same texts with bit-equal vectors."""
    ours, theirs = all_vectors(path), all_vectors(other)
    return set(ours) == set(theirs) and all(np.array_equal(vector, theirs[text]) for text, vector in ours.items())


def worst_error(path: Path) -> float:
    """Largest 1 - cos of a stored vector in the index."""
    with TeacherCache.open(path) as cache:
        view = cache.space()
        return max(record.worst_error for _, record in cache.index.iter_shards(view.array_name))


def files(path: Path) -> dict[str, bytes]:
    """All files in a folder except locks."""
    if not path.exists():
        return {}
    left_out = ("writer.lock", "lock.mdb")
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file() and p.name not in left_out}


def npy(folder: Path, vectors: npt.NDArray[Any], name: str = "vectors.npy") -> Path:
    path = folder / name
    np.save(path, vectors)
    return path


def killed_until_done(command: Sequence[str], cache: Path, moments: random.Random, kills: int) -> int:
    """Run a command and kill it a few times, verifying the cache after each; returns how many kills hit it."""
    hit = 0
    for _ in range(kills):
        with subprocess.Popen(command) as process:
            while process.poll() is None and not (cache / "cache.json").exists():
                time.sleep(0.005)
            time.sleep(moments.uniform(0.25, 0.8))
            process.kill()
        hit += process.returncode == -signal.SIGKILL
        assert verify(cache, deep=True).damage == []
    subprocess.run(command, check=True)
    return hit
