"""Damages files of a cache in many ways and repairs them; `crash.py` runs it."""

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from teacher_cache.building.build import build
from teacher_cache.corpus.corpus import Corpus
from teacher_cache.maintenance.check import verify
from teacher_cache.maintenance.rebuild import reindex
from teacher_cache.maintenance.repair import repair
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.layout import INDEX
from teacher_cache.teachers.base import TeacherOptions

TOY = TeacherOptions(model="toy")
SHARD_ROWS = 64

# Text -> the bytes of its vector.
Vectors = dict[str, bytes]


def vectors_of(cache: TeacherCache) -> Vectors:
    """Text -> the bytes of its vector, of the only space."""
    rows = np.arange(cache.rows)
    views = list(cache.spaces().values())
    if not views:
        return {}
    rows = rows[views[0].present(rows)]
    gathered = views[0].gather(rows)
    return {text: vector.tobytes() for text, vector in zip(cache.texts(rows), gathered, strict=True)}


def contents(path: Path) -> dict[str, Any]:
    """Texts, vectors and corpora that a reader sees."""
    with TeacherCache.open(path) as cache:
        return {
            "texts": cache.texts(np.arange(cache.rows)),
            "vectors": vectors_of(cache),
            "corpora": {name: cache.corpus(name).rows.tolist() for name in cache.corpora()},
        }


def shard_file(cache: Path, number: int) -> Path:
    (found,) = cache.glob(f"spaces/*/vectors*.zarr/c/{number}/0")
    return found


def flip_byte(cache: Path, draw: random.Random) -> None:
    _flip(shard_file(cache, 2), draw, SHARD_ROWS * 32)  # among the values, in every encoding


def truncate(cache: Path, draw: random.Random) -> None:
    file = shard_file(cache, 2)
    os.truncate(file, draw.randrange(file.stat().st_size))


def delete(cache: Path, draw: random.Random) -> None:
    shard_file(cache, 2).unlink()


def swap(cache: Path, draw: random.Random) -> None:
    one, other = shard_file(cache, 1), shard_file(cache, 2)
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


def inject_nan(cache: Path, draw: random.Random) -> None:
    """Write NaN with valid checksums, as a faulty writer would."""
    with TeacherCache.open(cache) as opened:
        view = opened.space()
        rows = np.arange(2 * SHARD_ROWS, 3 * SHARD_ROWS)
        vectors: npt.NDArray[np.float32] = view.gather(rows).astype(np.float32)
        vectors[draw.randrange(SHARD_ROWS), draw.randrange(view.dims)] = np.nan
        view.vectors.write_shard(2, view.encoding.store(vectors), np.ones(SHARD_ROWS, dtype=bool))


def delete_index(cache: Path, draw: random.Random) -> None:
    shutil.rmtree(cache / INDEX)


def flip_text(cache: Path, draw: random.Random) -> None:
    _flip(cache / "texts/text/c/2", draw, 200)


def delete_texts(cache: Path, draw: random.Random) -> None:
    (cache / "texts/text/c/2").unlink()


def flip_key(cache: Path, draw: random.Random) -> None:
    _flip(cache / "texts/keys/c/2/0", draw, SHARD_ROWS * 16)


def change_manifest(cache: Path, draw: random.Random) -> None:
    (file,) = (cache / "corpora/corpus-1").glob("rows-*.npy")
    rows = np.load(file)
    rows[draw.randrange(len(rows))] = 0
    np.save(file, rows)


def _flip(file: Path, draw: random.Random, below: int) -> None:
    data = bytearray(file.read_bytes())
    data[draw.randrange(below)] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


DAMAGE: dict[str, Callable[[Path, random.Random], None]] = {
    "flipped byte": flip_byte,
    "truncated shard": truncate,
    "deleted shard": delete,
    "swapped shards": swap,
    "injected NaN": inject_nan,
    "deleted index": delete_index,
}
# Damage to arrays that are the same in every encoding of the vectors.
OTHER_DAMAGE: dict[str, Callable[[Path, random.Random], None]] = {
    "flipped byte in texts": flip_text,
    "deleted shard of texts": delete_texts,
    "flipped byte in keys": flip_key,
    "changed manifest": change_manifest,
}


@dataclass(frozen=True)
class Outcome:
    """The result of one damage and its repair.

    Attributes:
        found: kinds that `verify` reported; of a quick check, if it found the damage.
        quick: whether a quick check found it.
        encoded: rows that the build after the repair encoded.
        same: the cache is the same as before the damage.
    """

    storage: str
    damage: str
    found: list[str]
    quick: bool
    repaired_by: str
    encoded: int
    same: bool

    @property
    def ok(self) -> bool:
        return bool(self.found) and self.same


def damage_caches(wholes: dict[str, Path], corpora: list[Path], seed: int) -> list[Outcome]:
    """Every damage in every encoding.

    Args:
        wholes: an intact cache of the corpora for every encoding; they are copied.
    """
    draw = random.Random(seed)
    outcomes = []
    for storage, whole in wholes.items():
        before = contents(whole)
        for name, damage in (DAMAGE | (OTHER_DAMAGE if storage == next(iter(wholes)) else {})).items():
            cache = whole.with_name("damaged-cache")
            shutil.copytree(whole, cache)
            damage(cache, draw)
            outcomes.append(_repair(cache, corpora, storage, name, before))
            shutil.rmtree(cache)
    return outcomes


def _repair(cache: Path, corpora: list[Path], storage: str, name: str, before: dict[str, Any]) -> Outcome:
    quick = verify(cache)
    found = verify(cache, deep=True) if quick.ok else quick
    if (cache / INDEX).exists():
        repaired_by, ok = "repair", repair(cache).ok
    else:
        repaired_by, ok = "reindex", reindex(cache).ok
    ok = ok and verify(cache, deep=True).ok
    encoded = sum(build(Corpus.open(corpus), TOY, cache).encoded for corpus in corpora)
    same = ok and verify(cache, deep=True, teacher=TOY).ok and contents(cache) == before
    kinds = sorted({damage.kind for damage in found.damage})
    return Outcome(storage, name, kinds, not quick.ok, repaired_by, encoded, same)
