"""The index of text keys compared with a table of sqlite3: building, look-up, size on disk, opening.

    python benchmarks/index.py [--quick] [--json FILE] [--scratch FOLDER]

Keys are random, like hashes of texts. Both write the same batches, sorted by key, each in one durable transaction:
one shard (8,192 keys), and eight shards. sqlite3 has a `WITHOUT ROWID` table, a write-ahead log and
`synchronous=FULL`. Look-ups are batches of 8,192 random keys, known and unknown; sqlite3 gets them in one `IN` query,
which is faster than one query per key. Rounds are interleaved, figures are medians. A cache is opened, and its only
space found, in a process that has already imported everything.
"""

import argparse
import json
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from teacher_cache.building.build import build
from teacher_cache.corpus.corpus import Corpus
from teacher_cache.maintenance.seal import seal
from teacher_cache.storage.environment import DATA
from teacher_cache.storage.index import Index
from teacher_cache.table.cache import TeacherCache
from teacher_cache.teachers.base import TeacherOptions

SIZES = (20_000, 200_000, 2_000_000)
QUICK_SIZES = (20_000, 100_000)
ONE_SHARD = 8192
EIGHT_SHARDS = 8 * ONE_SHARD
LOOKED_UP = 8192
ROUNDS = 3
LOOKUP_BATCHES = 20
OPENINGS = 50


class Ours:
    """`Index`, used as in builds."""

    name = "index"

    def __init__(self, folder: Path) -> None:
        self.index = Index(folder, writable=True)
        self.index.commit([])
        self.file = folder / DATA

    def put(self, keys: Sequence[bytes], first_row: int) -> None:
        self.index.commit([], keys=keys, first_row=first_row)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        found: list[int] = self.index.find(keys).tolist()
        return found

    def close(self) -> None:
        self.index.close()


class Sqlite:
    """A table of the standard library's sqlite3."""

    name = "sqlite3"

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.file = folder / "keys.sqlite"
        self.connection = sqlite3.connect(self.file, isolation_level=None)
        self.connection.execute("PRAGMA journal_mode=WAL")
        self.connection.execute("PRAGMA synchronous=FULL")
        self.connection.execute("CREATE TABLE keys (key BLOB PRIMARY KEY, row INTEGER) WITHOUT ROWID")

    def put(self, keys: Sequence[bytes], first_row: int) -> None:
        entries = sorted(zip(keys, range(first_row, first_row + len(keys)), strict=True))
        self.connection.execute("BEGIN")
        self.connection.executemany("INSERT OR REPLACE INTO keys VALUES (?, ?)", entries)
        self.connection.execute("COMMIT")

    def find(self, keys: Sequence[bytes]) -> list[int]:
        marks = ",".join("?" * len(keys))
        found = dict(self.connection.execute(f"SELECT key, row FROM keys WHERE key IN ({marks})", keys))
        return [found.get(key, -1) for key in keys]

    def close(self) -> None:
        self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self.connection.close()


def random_keys(count: int, seed: int) -> list[bytes]:
    data = np.random.default_rng(seed).bytes(16 * count)
    return [data[start : start + 16] for start in range(0, len(data), 16)]


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def build_all(store: Ours | Sqlite, keys: Sequence[bytes], batch: int) -> float:
    def put() -> None:
        for start in range(0, len(keys), batch):
            store.put(keys[start : start + batch], start)

    return seconds(put)


def look_up(find: Callable[[Sequence[bytes]], list[int]], keys: Sequence[bytes], rows: Sequence[int]) -> float:
    found: list[int] = []
    took = seconds(lambda: found.extend(find(keys)))
    if found != list(rows):
        raise RuntimeError("a look-up returned a wrong row")
    return took


def measure(size: int, scratch: Path) -> dict[str, Any]:
    """All figures of one size: keys per second, bytes per row, milliseconds."""
    keys = random_keys(size, 1)
    rng = np.random.default_rng(3)
    times: dict[str, list[float]] = {}
    figures: dict[str, Any] = {"rows": size}
    for number in range(ROUNDS):
        for batch in (ONE_SHARD, EIGHT_SHARDS):
            stores = [kind(scratch / f"{kind.name}-{number}-{batch}") for kind in (Ours, Sqlite)]
            for store in stores:
                times.setdefault(f"{store.name}_put_{batch}", []).append(build_all(store, keys, batch))
            if batch == EIGHT_SHARDS:
                for question in range(LOOKUP_BATCHES):
                    unknown = random_keys(LOOKED_UP, 2 + question)
                    rows = rng.integers(0, size, LOOKED_UP).tolist()
                    known = [keys[row] for row in rows]
                    for store in stores:
                        times_of = times.setdefault(f"{store.name}_known", [])
                        times_of.append(look_up(store.find, known, rows))
                        times_of = times.setdefault(f"{store.name}_unknown", [])
                        times_of.append(look_up(store.find, unknown, [-1] * LOOKED_UP))
            for store in stores:
                store.close()
                figures[f"{store.name}_bytes_{batch}"] = store.file.stat().st_size / size
                shutil.rmtree(store.file.parent)
    for name, took in times.items():
        figures[name] = (size if "_put_" in name else LOOKED_UP) / median(took)
    return figures | measure_cache(size, keys, scratch)


def measure_cache(size: int, keys: Sequence[bytes], scratch: Path) -> dict[str, Any]:
    """Open a cache with `size` keys, and its sealed copy."""
    path = scratch / "cache"
    corpus = scratch / "corpus.txt"
    corpus.write_text("one text\nanother\n")
    build(Corpus.open(corpus), TeacherOptions(model="toy"), path)
    with TeacherCache.open(path, "a") as cache:
        # Only keys: neither opening nor sealing reads the texts.
        for start in range(0, size, EIGHT_SHARDS):
            cache.index.commit([], keys=keys[start : start + EIGHT_SHARDS], first_row=start)

    def open_and_close(sealed: bool) -> None:
        with TeacherCache.open(path, sealed=sealed) as cache:
            cache.space()

    took = seconds(lambda: seal(path))
    opening = {
        name: median(seconds(lambda: open_and_close(sealed)) for _ in range(OPENINGS))  # noqa: B023
        for name, sealed in (("open_ms", False), ("open_sealed_ms", True))
    }
    rows = np.random.default_rng(4).integers(0, size, LOOKED_UP).tolist()
    with TeacherCache.open(path, sealed=True) as copy:
        some_keys = [keys[row] for row in rows]
        known = [look_up(lambda some: copy.index.find(some).tolist(), some_keys, rows) for _ in range(LOOKUP_BATCHES)]
    sealed_bytes = (path / "index.sealed" / DATA).stat().st_size
    shutil.rmtree(path)
    return {
        "seal": size / took,
        "sealed_bytes": sealed_bytes / size,
        "sealed_known": LOOKED_UP / median(known),
        **{name: 1000 * value for name, value in opening.items()},
    }


def table(all_figures: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for of in all_figures:
        lines.append(f"{of['rows']:,} keys")
        for title, name in (
            ("put, 8,192 in a transaction", f"put_{ONE_SHARD}"),
            ("put, 65,536 in a transaction", f"put_{EIGHT_SHARDS}"),
            ("look up, known", "known"),
            ("look up, unknown", "unknown"),
        ):
            ours, theirs = of[f"index_{name}"], of[f"sqlite3_{name}"]
            lines.append(
                f"  {title:<30} {ours:>12,.0f} keys/s   sqlite3 {theirs:>12,.0f} keys/s   {ours / theirs:5.1f}x"
            )
        lines.append(f"  {'look up in the sealed copy':<30} {of['sealed_known']:>12,.0f} keys/s")
        lines.append(f"  {'seal':<30} {of['seal']:>12,.0f} keys/s")
        lines.append(
            f"  {'bytes per row':<30} {of['sealed_bytes']:.1f} sealed; live {of[f'index_bytes_{ONE_SHARD}']:.1f} "
            f"(8,192) and {of[f'index_bytes_{EIGHT_SHARDS}']:.1f} (65,536); sqlite3 "
            f"{of[f'sqlite3_bytes_{EIGHT_SHARDS}']:.1f}"
        )
        lines.append(
            f"  {'open a cache and its space':<30} {of['open_ms']:.2f} ms, sealed {of['open_sealed_ms']:.2f} ms"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="smaller sizes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there too")
    parser.add_argument(
        "--scratch", type=Path, metavar="FOLDER", help="where to write; by default the temporary folder of the system"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        figures = [measure(size, Path(scratch)) for size in (QUICK_SIZES if options.quick else SIZES)]
    print("\n".join(table(figures)))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2))
    last = figures[-1]
    print(
        f"index of {last['rows']:,} keys: {last[f'index_put_{EIGHT_SHARDS}']:,.0f} keys/s put, "
        f"{last['index_known']:,.0f} look-ups/s, {last['sealed_bytes']:.1f} bytes per row sealed, opened in "
        f"{last['open_ms']:.1f} ms"
    )


if __name__ == "__main__":
    main()
