"""Ways to damage a cache, and processes that are killed while they change one."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from teacher_cache.storage.chunks import Rows
from teacher_cache.storage.column import Column
from teacher_cache.storage.index import Change, ShardRecord, shard_key

KILLED = """
import importlib, os, signal, sys
module, owner, name, at, calls = importlib.import_module(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), 0
target = getattr(module, owner) if owner else module
real = getattr(target, name)
def counted(*arguments, **more):
    global calls
    calls += 1
    if calls == at:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments, **more)
setattr(target, name, counted)
exec(sys.argv[5])
"""


def killed(function: str, call: int, program: str) -> int:
    """Run a program that is killed at a call of `function`, such as "os:rename" or "module:Class.method".

    Returns:
        Its return code.
    """
    module, _, path = function.partition(":")
    owner, _, name = path.rpartition(".")
    command = [sys.executable, "-c", KILLED, module, owner, name, str(call), program]
    return subprocess.run(command, check=False).returncode


def flip(file: Path, place: int = 20) -> None:
    """Change one bit of a byte."""
    data = bytearray(file.read_bytes())
    data[place] ^= 0x20
    file.write_bytes(data)


def vector_shard(path: Path, number: int) -> Path:
    """The file of one shard of the vectors of the only space."""
    (found,) = path.glob(f"spaces/*/vectors.zarr/c/{number}/0")
    return found


def lose_index(path: Path) -> None:
    shutil.rmtree(path / "index.lmdb")


def commit_shard(column: Column, number: int, values: Rows, present: npt.NDArray[np.bool_]) -> None:
    """Write a shard and commit a record with its digest, whatever the values are."""
    receipt = column.array.write_shard(number, values, present)
    record = ShardRecord(receipt.digest, 0.0, receipt.size, present)
    column.index.commit([Change("shards", shard_key(column.name, number), record.pack())])


def edit_manifest(path: Path, rows: dict[int, int]) -> None:
    """Replace the rows of some records of the only corpus."""
    (file,) = path.glob("corpora/corpus/rows-*.npy")
    manifest = np.load(file)
    for record, row in rows.items():
        manifest[record] = row
    np.save(file, manifest)
