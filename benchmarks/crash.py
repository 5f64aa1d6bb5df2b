"""Crash safety: builds that are killed at any moment, and files that are damaged.

    python benchmarks/crash.py [--kills 100] [--quick] [--seed N] [--json FILE]

Kills: builds (toy teacher, shards of 64 rows, so that files are written and transactions committed all the time) end
with SIGKILL: at a random time, before or after the k-th fsync or rename, or at a random moment in the k-th write of a
shard or the k-th LMDB commit. Each build logs what it is about to commit and what it has committed. After every kill:

- `verify --deep` finds no damage;
- what was committed is in the cache, and what was in it before still is, bit for bit;
- nothing is visible whose commit had not begun; every vector is the teacher's for its text, every corpus has the rows
  of its texts.

A finished build is compared with one that was never killed; the next starts with a new cache.

Damage: a flipped byte, a truncated shard, a deleted shard, a swapped pair of shards, an injected NaN, a deleted index,
in every encoding. `verify` has to find each, `repair` or `reindex` has to repair it, and after one more build the
vectors have to be the same as before.

The last line has the number of kills and of lost rows. The exit code is 1 if anything went wrong.
"""

import argparse
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.damage import SHARD_ROWS, TOY, Vectors, contents, damage_caches, vectors_of
from teacher_cache.building import build as build_module
from teacher_cache.building.build import build
from teacher_cache.corpus.corpus import Corpus
from teacher_cache.errors import CacheNotFound
from teacher_cache.maintenance.check import verify
from teacher_cache.storage import texts as texts_module
from teacher_cache.storage.codec import ENCODINGS
from teacher_cache.storage.index import Change, Index
from teacher_cache.storage.shards import ShardedArray
from teacher_cache.table.cache import TeacherCache

# Texts of a corpus, and corpora of a cache; consecutive corpora share half of their texts.
TEXTS = 400
CORPORA = 4
POINTS = ("time", "before fsync", "after fsync", "before rename", "after rename", "in shard", "in commit")
LONGEST_LIST = 20
# A kill happens at one of the first N calls of a build, so that a build is killed often before it ends.
FIRST_CALLS = {"fsync": 24, "rename": 16, "shard": 8, "commit": 8, "": 1}


def texts_of(corpus: int) -> list[str]:
    """Texts of different lengths, some of them twice."""
    first = corpus * TEXTS // 2
    texts = [f"text {number}" + " and more" * (number % 5) for number in range(first, first + TEXTS)]
    return [*texts, *texts[::7]]


def write_corpora(folder: Path) -> list[Path]:
    paths = [folder / f"corpus-{number}.txt" for number in range(CORPORA)]
    for number, path in enumerate(paths):
        path.write_text("".join(f"{text}\n" for text in texts_of(number)))
    return paths


# The killed process


class Killer:
    """Kills this process at the `at`-th call of a kind, or during it."""

    def __init__(self, point: str, at: int, seed: int) -> None:
        self.where, _, self.what = point.partition(" ")
        self.at = at
        self.draw = random.Random(seed)
        self.calls = 0
        self.took = 0.001

    def around(self, what: str, call: Callable[[], Any]) -> Any:
        """Make a call, and kill the process before, in or after it if its turn has come."""
        if what != self.what:
            return call()
        self.calls += 1
        if self.calls == self.at:
            if self.where == "before":
                kill_self()
            if self.where == "in":  # within the time that the call before took
                threading.Timer(self.draw.uniform(0, self.took), kill_self).start()
        started = time.perf_counter()
        result = call()
        self.took = time.perf_counter() - started
        if self.calls == self.at:
            kill_self()
        return result


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_build(corpus: str, cache: str, log: str, storage: str, point: str, at: int, seed: int) -> None:
    """Run a build that logs its commits and is killed at a point."""
    sys.setswitchinterval(1e-4)  # so that timers are on time
    logging.getLogger("teacher_cache").setLevel(logging.ERROR)  # no warnings about the lock of the killed process
    build_module.BATCH_ROWS = 16
    build_module.READ_RECORDS = 50
    build_module.COMMIT_SECONDS = 0.02
    texts_module.PUBLISHED_ROWS = 2 * SHARD_ROWS
    killer = Killer(point, at, seed)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    fsync, replace, commit, write_shard = os.fsync, os.replace, Index.commit, ShardedArray.write_shard

    def log_event(**what: Any) -> None:
        os.write(handle, json.dumps(what).encode() + b"\n")

    def logged_commit(self: Index, changes: Any, **keys: Any) -> None:
        changes = list(changes)
        log_event(commit="begins", changes=[logged for change in changes if (logged := _logged(change))])
        killer.around("commit", lambda: commit(self, changes, **keys))
        log_event(commit="ended")

    def logged_shard(self: ShardedArray, *arguments: Any) -> Any:
        log_event(shard="begins")
        receipt = killer.around("shard", lambda: write_shard(self, *arguments))
        log_event(shard="ended")
        return receipt

    os.fsync = lambda file: killer.around("fsync", lambda: fsync(file))  # type: ignore[assignment]
    os.replace = lambda *names: killer.around("rename", lambda: replace(*names))
    Index.commit = logged_commit  # type: ignore[method-assign]
    ShardedArray.write_shard = logged_shard  # type: ignore[assignment, method-assign]
    log_event(build="begins")
    TeacherCache.open(cache, "a", shard_rows=SHARD_ROWS).close()
    build(Corpus.open(corpus), TOY, cache, storage=storage)


def _logged(change: Change) -> list[str] | None:
    """A shard record or corpus for the log; None for other changes."""
    if change.value is None or change.database not in ("shards", "corpora"):
        return None
    return [change.database, change.key.hex(), change.value.hex()]


# After a kill


@dataclass
class Log:
    """The log of the killed builds of one cache.

    Attributes:
        begun: values that commits were about to write under each key of the index, in order.
        ended: place in that order of the value of the last commit that ended.
        inside: "shard" or "commit" if the last build was killed in one.
    """

    begun: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    ended: dict[tuple[str, str], int] = field(default_factory=dict)
    inside: str = ""
    read: int = 0
    _open: list[list[str]] = field(default_factory=list)

    def follow(self, path: Path) -> None:
        """Read the lines written since the last call."""
        self.inside = ""
        lines = path.read_bytes()[self.read :] if path.exists() else b""
        self.read += len(lines)
        for line in lines.splitlines():
            note = json.loads(line)
            (what, state), *_ = note.items()
            self.inside = what if state == "begins" and what != "build" else ""
            if what == "commit" and state == "begins":
                self._open = note["changes"]
                for database, key, value in self._open:
                    self.begun.setdefault((database, key), []).append(value)
            elif what == "commit":
                self.ended |= {(database, key): len(self.begun[database, key]) - 1 for database, key, _ in self._open}


class Watch:
    """Checks one cache after every kill."""

    def __init__(self, cache: Path, log: Path) -> None:
        self.cache = cache
        self.log_path = log
        self.log = Log()
        self.vectors: Vectors = {}
        self.faults: list[str] = []
        self.lost = 0

    def check(self, expected: Vectors) -> None:
        """Compare what is visible with what was committed; adds to `faults` and `lost`."""
        self.log.follow(self.log_path)
        try:
            report = verify(self.cache, deep=True)
        except CacheNotFound:
            if self.log.ended:
                self.faults.append("a cache with committed values is missing")
            return
        if not report.ok:
            self.faults += [f"{damage.kind}: {damage.where}" for damage in report.damage]
            self.lost += sum(damage.rows for damage in report.damage)
            return
        with TeacherCache.open(self.cache) as cache:
            visible = _visible(cache)
            for key, place in self.log.ended.items():
                # A later commit that was killed may still have been written.
                if visible.get(key) not in self.log.begun[key][place:]:
                    self.faults.append(f"what was committed under {key[0]} {bytes.fromhex(key[1])!r} is missing")
                    self.lost += 1
            for key, value in visible.items():
                if value not in self.log.begun.get(key, ()):
                    self.faults.append(f"{key[0]} {bytes.fromhex(key[1])!r} is visible and was never committed")
            now = vectors_of(cache)
            lost = [text for text, vector in self.vectors.items() if now.get(text) != vector]
            self.lost += len(lost)
            self.faults += [f"the vector of {text!r} is lost or has changed" for text in lost]
            self.faults += [
                f"the vector of {text!r} is not the teacher's" for text in now if now[text] != expected[text]
            ]
            for name in cache.corpora():
                texts = cache.texts(cache.corpus(name).rows[:, 0])
                if texts != texts_of(int(name.rpartition("-")[2])):
                    self.faults.append(f"corpus {name} has other texts")
            self.vectors = now


def _visible(cache: TeacherCache) -> dict[tuple[str, str], str]:
    """Shard records and corpora of the index, as in the log."""
    names = ["texts/text", "texts/keys", *(record.array_name for record in cache.space_records().values())]
    found = {("corpora", name.encode().hex()): data.hex() for name, data in cache.index.records("corpora").items()}
    for name in names:
        for number, record in cache.index.iter_shards(name):
            key = name.encode() + b"\0" + number.to_bytes(8, "big")
            found["shards", key.hex()] = record.pack().hex()
    return found


# Kills


@dataclass
class Tally:
    """The result of all kills.

    Attributes:
        points: kills by the point they were aimed at.
        inside: kills that hit the write of a shard or a commit, by the logs.
        builds: builds that ended after kills and were compared with one that was never killed.
    """

    kills: int = 0
    lost: int = 0
    builds: int = 0
    points: Counter[str] = field(default_factory=Counter)
    inside: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def child(corpus: Path, cache: Path, log: Path, storage: str, point: str, at: int, seed: int) -> list[str]:
    """The command of a build that kills itself at a point."""
    arguments = [str(corpus), str(cache), str(log), storage, point, str(at), str(seed)]
    return [sys.executable, str(Path(__file__).resolve()), "--child", *arguments]


def run_child(command: list[str], log: Path, after: float | None) -> int:
    """Run a build and return its exit code; kill it `after` seconds of work unless it kills itself."""
    size = log.stat().st_size if log.exists() else 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        if after is not None:
            while process.poll() is None and (log.stat().st_size if log.exists() else 0) == size:
                time.sleep(0.001)
            time.sleep(after)
            process.kill()
    return process.returncode


def reference(folder: Path, corpora: list[Path], storage: str) -> tuple[Path, float]:
    """A cache whose builds were not killed, and the seconds of one build."""
    cache = folder / f"whole-{storage}"
    started = time.perf_counter()
    for corpus in corpora:
        code = run_child(child(corpus, cache, folder / "whole.log", storage, "never", 0, 0), folder / "whole.log", None)
        if code:
            raise SystemExit(f"a build that was not killed ended with {code}")
    return cache, (time.perf_counter() - started) / len(corpora)


def kill_builds(folder: Path, kills: int, seed: int, show: Callable[[str], None]) -> Tally:
    draw = random.Random(seed)
    tally = Tally()
    corpora = write_corpora(folder)
    wholes: dict[str, tuple[dict[str, Any], float]] = {}
    rounds = 0
    while tally.kills < kills:
        storage = list(ENCODINGS)[rounds % len(ENCODINGS)]
        if storage not in wholes:
            whole, took = reference(folder, corpora, storage)
            wholes[storage] = contents(whole), took
            shutil.rmtree(whole)
        expected, seconds = wholes[storage]
        cache, log = folder / f"killed-{rounds}", folder / f"killed-{rounds}.log"
        watch = Watch(cache, log)
        for corpus in corpora:
            done = False
            while not done:
                point = draw.choice(POINTS) if tally.kills < kills else "never"
                at = draw.randint(1, FIRST_CALLS[point.partition(" ")[2]])
                command = child(corpus, cache, log, storage, point, at, draw.randrange(2**32))
                code = run_child(command, log, draw.uniform(0, seconds) if point == "time" else None)
                done = code == 0
                if code not in (0, -signal.SIGKILL):
                    watch.faults.append(f"a build ended with {code}")
                    done = True
                watch.check(expected["vectors"])
                if code == -signal.SIGKILL:
                    tally.kills += 1
                    tally.points[point] += 1
                    tally.inside[watch.log.inside or "elsewhere"] += 1
                    show(f"{tally.kills} kills, {tally.lost + watch.lost} rows lost")
        tally.builds += 1
        if contents(cache) != expected:
            watch.faults.append("a build that was killed and resumed differs from one that was never killed")
        tally.lost += watch.lost
        tally.faults += watch.faults
        shutil.rmtree(cache)
        rounds += 1
    return tally


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        corpus, cache, log, storage, point, at, seed = sys.argv[2:]
        killed_build(corpus, cache, log, storage, point, int(at), int(seed))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="10 kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()

    def show(line: str) -> None:
        print(f"\r{line}", end="", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        tally = kill_builds(Path(scratch), 10 if options.quick else options.kills, options.seed, show)
        print(file=sys.stderr)
        corpora = write_corpora(Path(scratch))
        wholes = {storage: reference(Path(scratch), corpora, storage)[0] for storage in ENCODINGS}
        outcomes = damage_caches(wholes, corpora, options.seed)
    print("| kill | times |\n|---|---|")
    for point in POINTS:
        print(f"| {point} | {tally.points[point]} |")
    for inside, times in sorted(tally.inside.items()):
        print(f"| hit: {'elsewhere' if inside == 'elsewhere' else f'inside a {inside}'} | {times} |")
    print("\n| format | damage | found as | by | repaired by | rows encoded again | as before |")
    print("|---|---|---|---|---|---|---|")
    for outcome in outcomes:
        depth = "verify" if outcome.quick else "verify --deep"
        print(
            f"| {outcome.storage} | {outcome.damage} | {', '.join(outcome.found) or 'NOT FOUND'} | {depth} | "
            f"{outcome.repaired_by} | {outcome.encoded} | {'yes' if outcome.same else 'NO'} |"
        )
    print()
    for fault in tally.faults[:LONGEST_LIST]:
        print(f"FAULT: {fault}")
    repaired = sum(outcome.ok for outcome in outcomes)
    print(f"{tally.builds} builds resumed after kills and equal those that were never killed")
    print(f"{repaired} of {len(outcomes)} damages found and repaired")
    if options.json:
        record = {
            "kills": tally.kills,
            "rows_lost": tally.lost,
            "builds": tally.builds,
            "points": dict(tally.points),
            "inside": dict(tally.inside),
            "faults": tally.faults,
            "damage": [vars(outcome) | {"ok": outcome.ok} for outcome in outcomes],
        }
        options.json.write_text(json.dumps(record, indent=2))
    print(f"{tally.kills} kills, {tally.lost} rows lost")
    return int(bool(tally.faults) or tally.lost > 0 or repaired < len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
