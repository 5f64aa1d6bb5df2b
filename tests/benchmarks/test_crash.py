"""`benchmarks/crash.py`: killed builds lose no rows, and a loss would be detected."""

import random
import signal
from pathlib import Path

import pytest

from benchmarks import crash, damage
from teacher_cache.building.build import build
from teacher_cache.corpus.corpus import Corpus
from teacher_cache.maintenance.repair import repair
from teacher_cache.storage.codec import ENCODINGS

# Each goes on where the one before was killed: making the cache, texts, publishing the corpus, vectors.
MOMENTS = [
    ("before rename", 2),
    ("in shard", 6),
    ("in commit", 3),
    ("after rename", 9),
    ("in commit", 2),
    ("before fsync", 8),
    ("in shard", 2),
]


def killed(corpus: Path, watch: crash.Watch, storage: str, point: str, at: int) -> int:
    command = crash.child(corpus, watch.cache, watch.log_path, storage, point, at, seed=at)
    return crash.run_child(command, watch.log_path, None)


def whole(folder: Path, corpus: Path, storage: str) -> dict[str, object]:
    build(Corpus.open(corpus), damage.TOY, folder / "whole", storage=storage)
    return damage.contents(folder / "whole")


def test_kills_during_writes_and_commits_lose_no_rows_and_leave_no_partial_ones(tmp_path: Path) -> None:
    corpus, *_ = crash.write_corpora(tmp_path)
    expected = whole(tmp_path, corpus, "float16")
    watch = crash.Watch(tmp_path / "cache", tmp_path / "log")
    shown = []
    for point, at in MOMENTS:
        assert killed(corpus, watch, "float16", point, at) == -signal.SIGKILL
        watch.check(expected["vectors"])  # type: ignore[arg-type]
        assert (watch.faults, watch.lost) == ([], 0)
        shown.append(len(watch.vectors))
    assert shown == sorted(shown)
    assert 0 < shown[-1] < crash.TEXTS
    assert killed(corpus, watch, "float16", "never", 0) == 0
    watch.check(expected["vectors"])  # type: ignore[arg-type]
    assert watch.faults == []
    assert damage.contents(watch.cache) == expected


def test_a_loss_is_detected(tmp_path: Path) -> None:
    corpus, *_ = crash.write_corpora(tmp_path)
    watch = crash.Watch(tmp_path / "cache", tmp_path / "log")
    assert killed(corpus, watch, "float16-raw", "never", 0) == 0
    expected = whole(tmp_path, corpus, "float16-raw")["vectors"]
    watch.check(expected)  # type: ignore[arg-type]
    assert watch.faults == []
    damage.delete(watch.cache, random.Random(0))
    watch.check(expected)  # type: ignore[arg-type]
    assert watch.lost == damage.SHARD_ROWS
    repair(watch.cache)
    watch.check(expected)  # type: ignore[arg-type]
    assert watch.lost == damage.SHARD_ROWS + 1 + damage.SHARD_ROWS  # the record, and each of its rows


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_builds_killed_at_random_end_like_uninterrupted_ones(tmp_path: Path, seed: int) -> None:
    tally = crash.kill_builds(tmp_path, 8, seed, lambda line: None)
    assert (tally.lost, tally.faults) == (0, [])
    assert tally.kills == 8


@pytest.mark.slow
def test_every_damage_is_found_and_repaired_in_every_encoding(tmp_path: Path) -> None:
    corpora = crash.write_corpora(tmp_path)
    wholes = {storage: crash.reference(tmp_path, corpora, storage)[0] for storage in ENCODINGS}
    outcomes = damage.damage_caches(wholes, corpora, 1)
    assert len(outcomes) == len(ENCODINGS) * len(damage.DAMAGE) + len(damage.OTHER_DAMAGE)
    assert [outcome for outcome in outcomes if not outcome.ok] == []
