"""Does a cache keep what it promised? Builds that are killed at any moment, and files that are damaged.

    python benchmarks/crash.py [--kills 100] [--quick] [--seed N] [--json FILE]

Kills: real builds (toy teacher, shards of 64 rows, so that files are written and transactions committed all the
time) end with SIGKILL: at a random time; before or after the k-th fsync or rename; at a random moment inside the
k-th writing of a shard or the k-th LMDB commit. Each build notes what it is about to commit and what it has
committed in a log that outlives it. After every kill:

- `verify --deep` finds nothing;
- what was committed is there, and whatever was there before is there still, bit for bit;
- nothing is visible whose commit had not begun; every vector is the teacher's for its text, every corpus the
  rows of its texts.

A build that got through is compared with one that was never killed; then the next begins with a new cache.

Damage: a flipped byte, a truncated shard, a deleted shard, a swapped pair of shards, an injected NaN, a deleted
index; in every number format. Each has to be found by `verify`, mended by `repair` or `reindex`, and the vectors
have to be what they were after one more build.

The last line is how many kills there were and how many rows were lost; 1 is returned if anything went wrong.
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

# Texts of one corpus, and corpora of one cache; neighbours share half of their texts.
TEXTS = 400
CORPORA = 4
POINTS = ("time", "before fsync", "after fsync", "before rename", "after rename", "in shard", "in commit")
LONGEST_LIST = 20
# How many of a build's first calls a kill may wait for: few, so that a build is killed often before it ends.
FIRST_CALLS = {"fsync": 24, "rename": 16, "shard": 8, "commit": 8, "": 1}


def texts_of(corpus: int) -> list[str]:
    """Different texts of different lengths, with some that come twice."""
    first = corpus * TEXTS // 2
    texts = [f"text {number}" + " and more" * (number % 5) for number in range(first, first + TEXTS)]
    return [*texts, *texts[::7]]


def write_corpora(folder: Path) -> list[Path]:
    paths = [folder / f"corpus-{number}.txt" for number in range(CORPORA)]
    for number, path in enumerate(paths):
        path.write_text("".join(f"{text}\n" for text in texts_of(number)))
    return paths


# The process that is killed


class Death:
    """Kills this process at the `at`-th call of a kind, or at a moment inside it."""

    def __init__(self, point: str, at: int, seed: int) -> None:
        self.where, _, self.what = point.partition(" ")
        self.at = at
        self.draw = random.Random(seed)
        self.calls = 0
        self.took = 0.001

    def around(self, what: str, call: Callable[[], Any]) -> Any:
        """Make a call that may be this process's last."""
        if what != self.what:
            return call()
        self.calls += 1
        if self.calls == self.at:
            if self.where == "before":
                die()
            if self.where == "in":  # so long after its start as the call before took at most
                threading.Timer(self.draw.uniform(0, self.took), die).start()
        started = time.perf_counter()
        result = call()
        self.took = time.perf_counter() - started
        if self.calls == self.at:
            die()
        return result


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def build_until_death(corpus: str, cache: str, log: str, storage: str, point: str, at: int, seed: int) -> None:
    """A build that notes its commits in `log` and ends as it is told to."""
    sys.setswitchinterval(1e-4)  # a timer has to come in time
    logging.getLogger("teacher_cache").setLevel(logging.ERROR)  # that it takes the lock over goes without saying
    build_module.BATCH_ROWS = 16
    build_module.READ_RECORDS = 50
    build_module.COMMIT_SECONDS = 0.02
    texts_module.PUBLISHED_ROWS = 2 * SHARD_ROWS
    death = Death(point, at, seed)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    fsync, replace, commit, write_shard = os.fsync, os.replace, Index.commit, ShardedArray.write_shard

    def note(**what: Any) -> None:
        os.write(handle, json.dumps(what).encode() + b"\n")

    def noted_commit(self: Index, changes: Any, **keys: Any) -> None:
        changes = list(changes)
        note(commit="begins", changes=[told for change in changes if (told := _told(change))])
        death.around("commit", lambda: commit(self, changes, **keys))
        note(commit="ended")

    def noted_shard(self: ShardedArray, *arguments: Any) -> Any:
        note(shard="begins")
        receipt = death.around("shard", lambda: write_shard(self, *arguments))
        note(shard="ended")
        return receipt

    os.fsync = lambda file: death.around("fsync", lambda: fsync(file))  # type: ignore[assignment]
    os.replace = lambda *names: death.around("rename", lambda: replace(*names))
    Index.commit = noted_commit  # type: ignore[method-assign]
    ShardedArray.write_shard = noted_shard  # type: ignore[assignment, method-assign]
    note(build="begins")
    TeacherCache.open(cache, "a", shard_rows=SHARD_ROWS).close()
    build(Corpus.open(corpus), TOY, cache, storage=storage)


def _told(change: Change) -> list[str] | None:
    """What a log keeps of a change: enough to know a shard record, a space or a corpus again."""
    if change.value is None or change.database not in ("shards", "corpora"):
        return None
    return [change.database, change.key.hex(), change.value.hex()]


# What is seen after a kill


@dataclass
class Log:
    """What a killed build has noted.

    Attributes:
        begun: what commits were about to give each key of the index, in order.
        ended: place in that order of what the last commit that ended gave it.
        inside: "shard" or "commit" if the last build died in one.
    """

    begun: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    ended: dict[tuple[str, str], int] = field(default_factory=dict)
    inside: str = ""
    read: int = 0
    _open: list[list[str]] = field(default_factory=list)

    def follow(self, path: Path) -> None:
        """Read on from where the last kill was."""
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
    """What one cache has shown so far; every kill is followed by a look at it."""

    def __init__(self, cache: Path, log: Path) -> None:
        self.cache = cache
        self.log_path = log
        self.log = Log()
        self.vectors: Vectors = {}
        self.faults: list[str] = []
        self.lost = 0

    def look(self, expected: Vectors) -> None:
        """Compare what is visible with what was promised; faults are told and counted."""
        self.log.follow(self.log_path)
        try:
            verdict = verify(self.cache, deep=True)
        except CacheNotFound:
            if self.log.ended:
                self.faults.append("a cache that held something is gone")
            return
        if not verdict.ok:
            self.faults += [f"{damage.kind}: {damage.where}" for damage in verdict.damage]
            self.lost += sum(damage.rows for damage in verdict.damage)
            return
        with TeacherCache.open(self.cache) as cache:
            visible = _visible(cache)
            for key, place in self.log.ended.items():
                # A commit that was cut off later may have come through all the same.
                if visible.get(key) not in self.log.begun[key][place:]:
                    self.faults.append(f"what was committed under {key[0]} {bytes.fromhex(key[1])!r} is not there")
                    self.lost += 1
            for key, value in visible.items():
                if value not in self.log.begun.get(key, ()):
                    self.faults.append(f"{key[0]} {bytes.fromhex(key[1])!r} is visible and was never committed")
            now = vectors_of(cache)
            gone = [text for text, vector in self.vectors.items() if now.get(text) != vector]
            self.lost += len(gone)
            self.faults += [f"the vector of {text!r} was there and is not, or is another" for text in gone]
            self.faults += [f"the vector of {text!r} is not its own" for text in now if now[text] != expected[text]]
            for name in cache.corpora():
                texts = cache.texts(cache.corpus(name).rows[:, 0])
                if texts != texts_of(int(name.rpartition("-")[2])):
                    self.faults.append(f"corpus {name} has other texts")
            self.vectors = now


def _visible(cache: TeacherCache) -> dict[tuple[str, str], str]:
    """Shard records and corpora of the index, as a log tells them."""
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
    """What came of the kills.

    Attributes:
        points: kills by where they were aimed at.
        inside: kills that hit the writing of a shard or a commit, as the builds' own notes tell.
        builds: that got through after kills and were compared with one that was never killed.
    """

    kills: int = 0
    lost: int = 0
    builds: int = 0
    points: Counter[str] = field(default_factory=Counter)
    inside: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def child(corpus: Path, cache: Path, log: Path, storage: str, point: str, at: int, seed: int) -> list[str]:
    """The command of a build that is to be killed."""
    arguments = [str(corpus), str(cache), str(log), storage, point, str(at), str(seed)]
    return [sys.executable, str(Path(__file__).resolve()), "--child", *arguments]


def run_child(command: list[str], log: Path, after: float | None) -> int:
    """Run a build, kill it `after` so many seconds of its work if it is not to kill itself; its return code."""
    size = log.stat().st_size if log.exists() else 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        if after is not None:
            while process.poll() is None and (log.stat().st_size if log.exists() else 0) == size:
                time.sleep(0.001)
            time.sleep(after)
            process.kill()
    return process.returncode


def reference(folder: Path, corpora: list[Path], storage: str) -> tuple[Path, float]:
    """A cache that was never killed, and how long one of its builds took."""
    cache = folder / f"whole-{storage}"
    started = time.perf_counter()
    for corpus in corpora:
        code = run_child(child(corpus, cache, folder / "whole.log", storage, "never", 0, 0), folder / "whole.log", None)
        if code:
            raise SystemExit(f"a build that nobody killed ended with {code}")
    return cache, (time.perf_counter() - started) / len(corpora)


def kill_builds(folder: Path, kills: int, seed: int, say: Callable[[str], None]) -> Tally:
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
                watch.look(expected["vectors"])
                if code == -signal.SIGKILL:
                    tally.kills += 1
                    tally.points[point] += 1
                    tally.inside[watch.log.inside or "elsewhere"] += 1
                    say(f"{tally.kills} kills, {tally.lost + watch.lost} rows lost")
        tally.builds += 1
        if contents(cache) != expected:
            watch.faults.append("a build that was killed and went on is not one that was never killed")
        tally.lost += watch.lost
        tally.faults += watch.faults
        shutil.rmtree(cache)
        rounds += 1
    return tally


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        corpus, cache, log, storage, point, at, seed = sys.argv[2:]
        build_until_death(corpus, cache, log, storage, point, int(at), int(seed))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="10 kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()

    def say(line: str) -> None:
        print(f"\r{line}", end="", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        tally = kill_builds(Path(scratch), 10 if options.quick else options.kills, options.seed, say)
        print(file=sys.stderr)
        corpora = write_corpora(Path(scratch))
        wholes = {storage: reference(Path(scratch), corpora, storage)[0] for storage in ENCODINGS}
        outcomes = damage_caches(wholes, corpora, options.seed)
    print("| kill | times |\n|---|---|")
    for point in POINTS:
        print(f"| {point} | {tally.points[point]} |")
    for inside, times in sorted(tally.inside.items()):
        print(f"| hit: {'elsewhere' if inside == 'elsewhere' else f'inside a {inside}'} | {times} |")
    print("\n| format | damage | found as | by | mended by | rows encoded again | as before |")
    print("|---|---|---|---|---|---|---|")
    for outcome in outcomes:
        depth = "verify" if outcome.quick else "verify --deep"
        print(
            f"| {outcome.storage} | {outcome.damage} | {', '.join(outcome.found) or 'NOT FOUND'} | {depth} | "
            f"{outcome.mended_by} | {outcome.encoded} | {'yes' if outcome.same else 'NO'} |"
        )
    print()
    for fault in tally.faults[:LONGEST_LIST]:
        print(f"FAULT: {fault}")
    mended = sum(outcome.ok for outcome in outcomes)
    print(f"{tally.builds} builds went on after kills and are those that were never killed")
    print(f"{mended} of {len(outcomes)} damages found and mended")
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
    return int(bool(tally.faults) or tally.lost > 0 or mended < len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
