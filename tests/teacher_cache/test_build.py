"""A build encodes each missing text once, and can be killed at any moment."""

import dataclasses
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teacher_cache.building import build as build_module
from teacher_cache.building import workers as workers_module
from teacher_cache.building.build import BuildReport, Progress, build
from teacher_cache.building.workers import EncodedBatches, LocalWorkers, Workers
from teacher_cache.corpus.corpus import Corpus
from teacher_cache.errors import CacheError, CorpusError, DiskFull, TeacherError
from teacher_cache.maintenance.check import verify
from teacher_cache.storage.shards import ShardedArray
from teacher_cache.table.cache import TeacherCache
from teacher_cache.teachers import TeacherOptions, TeacherSpec, resolve
from tests.teacher_cache.observed_builds import EncodedLog, Recorded
from tests.teacher_cache.small_caches import (
    TOY,
    built,
    corpus_of,
    numbered,
    passing_folder,
    unequal_rows,
)
from tests.teacher_cache.toy_variants import BadVectors, Logged, Refuses

TEXTS = numbered(20)


def outcome(report: BuildReport) -> tuple[int, int, int, int]:
    return report.distinct, report.cached, report.encoded, report.quarantined


def test_the_first_build_encodes_every_distinct_text_once(tmp_path: Path) -> None:
    workers = Recorded()
    report = built(tmp_path, [*TEXTS, TEXTS[3], TEXTS[3]], workers=workers)
    assert report.rows == 22
    assert outcome(report) == (20, 0, 20, 0)
    assert sorted(workers.texts) == sorted(TEXTS)
    assert report.tokens == sum(len(text.split()) for text in TEXTS)
    assert (report.truncated, report.repaired) == (0, 0)
    assert (report.corpus, report.cache) == ("corpus", str(tmp_path / "cache"))
    assert report.to_json()["space"] == resolve(TOY).space.slug
    with TeacherCache.open(tmp_path / "cache") as cache:
        assert unequal_rows(cache.space(), TEXTS) == []
        manifest = cache.corpus("corpus")
        assert cache.texts(manifest.rows[:, 0]) == [*TEXTS, TEXTS[3], TEXTS[3]]
        assert (manifest.record.records, manifest.record.distinct) == (22, 20)
        assert [source.records for source in manifest.record.sources] == [22]
    assert verify(tmp_path / "cache", deep=True).ok


def test_a_second_build_never_loads_the_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built(tmp_path, TEXTS)

    def load(spec: TeacherSpec) -> None:
        raise AssertionError("the teacher was loaded")

    monkeypatch.setattr(workers_module, "load_teacher", load)
    assert outcome(built(tmp_path, TEXTS)) == (20, 20, 0, 0)
    assert outcome(built(tmp_path, TEXTS[::-1], name="reversed")) == (20, 20, 0, 0)
    with pytest.raises(AssertionError, match="the teacher was loaded"):
        built(tmp_path, ["new"])


def test_only_the_new_text_is_encoded(tmp_path: Path) -> None:
    built(tmp_path, TEXTS)
    workers = Recorded()
    assert outcome(built(tmp_path, ["new", *TEXTS], workers=workers)) == (21, 20, 1, 0)
    assert workers.batches == [["new"]]


@pytest.mark.parametrize("change", [{"prompt": "query: "}, {"max_length": 3}, {"dims": 8}])
def test_another_prompt_length_or_width_creates_another_space_and_keeps_the_old_one(
    tmp_path: Path, change: dict[str, object]
) -> None:
    old = built(tmp_path, TEXTS)
    folder = tmp_path / "cache/spaces" / old.space
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    teacher = dataclasses.replace(TOY, **change)  # type: ignore[arg-type]
    new = built(tmp_path, TEXTS, teacher=teacher)
    assert new.space != old.space
    assert new.encoded == 20
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    with TeacherCache.open(tmp_path / "cache") as cache:
        assert unequal_rows(cache.space(new.space), TEXTS, teacher) == []


def test_truncated_texts_are_counted(tmp_path: Path) -> None:
    texts = ["one two three", "one two three four", "one two three four five"]
    report = built(tmp_path, texts, teacher=TeacherOptions(model="toy", max_length=3))
    assert (report.truncated, report.tokens) == (2, 9)


def test_pairs_have_two_columns_of_rows(tmp_path: Path) -> None:
    report = built(tmp_path, [("q1", "a1"), ("q2", "a1"), ("q1", "q2")])
    assert (report.rows, report.distinct, report.encoded) == (3, 3, 3)
    with TeacherCache.open(tmp_path / "cache") as cache:
        manifest = cache.corpus()
        assert manifest.record.columns == ("a", "b")
        assert manifest.rows.tolist() == [[0, 1], [2, 1], [0, 2]]


@pytest.mark.parametrize(("texts", "skipped"), [([], 0), (["", " "], 2)])
def test_a_corpus_without_a_text_is_refused_and_publishes_nothing(
    tmp_path: Path, texts: list[str], skipped: int
) -> None:
    with pytest.raises(CorpusError, match=rf"corpus-0\.jsonl: no texts, {skipped} records were skipped as empty"):
        built(tmp_path, texts)
    with TeacherCache.open(tmp_path / "cache") as cache:
        assert (cache.rows, cache.corpora(), cache.spaces()) == (0, {}, {})
    assert verify(tmp_path / "cache", deep=True).ok
    assert outcome(built(tmp_path, TEXTS)) == (20, 0, 20, 0)


def test_without_a_name_a_corpus_never_replaces_one_from_another_file(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "t.txt").write_text(f"{folder}\n")
    path = tmp_path / "cache"

    def unnamed(*files: str) -> BuildReport:
        return build(Corpus.open([tmp_path / file for file in files]), TOY, path)

    assert unnamed("a/t.txt").corpus == "t"
    with pytest.raises(CacheError, match=r"corpus 't' of .* came from .*a/t\.txt, this one from .*b/t\.txt; .*`name`"):
        unnamed("b/t.txt")
    with TeacherCache.open(path) as cache:
        assert cache.texts(cache.corpus("t").rows[:, 0]) == ["a"]
        assert cache.rows == 1
    assert unnamed("a/t.txt", "b/t.txt").rows == 2  # the file has grown a second part
    assert build(Corpus.open(tmp_path / "b/t.txt"), TOY, path, name="t").rows == 1


def test_a_relative_path_is_another_file_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "t.txt").write_text(f"{folder}\n")
    monkeypatch.chdir(tmp_path / "a")
    build(Corpus.open("t.txt"), TOY, tmp_path / "cache")
    monkeypatch.chdir(tmp_path / "b")
    with pytest.raises(CacheError, match="came from"):
        build(Corpus.open("t.txt"), TOY, tmp_path / "cache")
    assert build(Corpus.open("../a/t.txt"), TOY, tmp_path / "cache").cached == 1


def test_quarantined_vectors_are_counted_with_reasons_and_not_encoded_again(tmp_path: Path) -> None:
    texts = ["nan 1", "fine 1", "inf 1", "nan 2", "zero 1", "huge 1", "fine 2", "repaired 1", "fine 1"]
    report = built(tmp_path, texts, teacher=BadVectors.options())
    assert outcome(report) == (8, 0, 3, 5)
    assert report.repaired == 1
    assert report.reasons == {
        "NaN in the teacher output": 2,
        "infinite value in the teacher output": 1,
        "zero vector": 1,
        "overflows float16: largest value 1e+06": 1,
    }
    with TeacherCache.open(tmp_path / "cache") as cache:
        present = cache.space().present(cache.lookup(texts))
        assert [text for text, has_vector in zip(texts, present, strict=True) if not has_vector] == [
            "nan 1",
            "inf 1",
            "nan 2",
            "zero 1",
            "huge 1",
        ]
    workers = Recorded()
    again = built(tmp_path, [*texts, "nan 3"], teacher=BadVectors.options(), workers=workers)
    assert workers.texts == ["nan 3"]
    assert outcome(again) == (9, 3, 0, 6)
    # Another corpus without these texts does not count them.
    assert outcome(built(tmp_path, ["fine 1"], teacher=BadVectors.options(), name="b")) == (1, 1, 0, 0)
    assert verify(tmp_path / "cache", deep=True).ok


words = st.sampled_from(["nan", "inf", "fine", "zero", "repaired"])
small_texts = st.builds("{} {}".format, words, st.integers(0, 9))


@settings(deadline=None, max_examples=20)
@given(st.lists(st.lists(small_texts, min_size=1, max_size=40), min_size=1, max_size=3))
def test_every_distinct_text_is_cached_encoded_or_quarantined(corpora: list[list[str]]) -> None:
    seen: set[str] = set()
    with passing_folder() as folder:
        for texts in corpora:
            report = built(Path(folder), texts, teacher=BadVectors.options())
            fine = {text for text in texts if text.split()[0] in ("fine", "repaired")}
            assert report.rows == len(texts)
            assert outcome(report) == (
                len(set(texts)),
                len(fine & seen),
                len(fine - seen),
                len(set(texts) - fine),
            )
            assert report.repaired == sum(text.startswith("repaired") for text in set(texts) - seen)
            assert sum(report.reasons.values()) == report.quarantined
            seen |= set(texts)
        assert verify(Path(folder) / "cache", deep=True).ok


@settings(deadline=None, max_examples=15)
@given(st.permutations(TEXTS), st.integers(1, 25), st.booleans())
def test_vectors_do_not_depend_on_order_batches_or_commits(
    texts: list[str], batch_rows: int, always_commit: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch, passing_folder() as folder:
        patch.setattr(build_module, "BATCH_ROWS", batch_rows)
        patch.setattr(build_module, "COMMIT_SECONDS", 0.0 if always_commit else 1e9)
        report = built(Path(folder), texts)
        assert outcome(report) == (20, 0, 20, 0)
        with TeacherCache.open(Path(folder) / "cache") as cache:
            assert unequal_rows(cache.space(), TEXTS) == []
            assert cache.lookup(texts).tolist() == list(range(20))
        assert verify(Path(folder) / "cache", deep=True).ok


def test_an_unfinished_shard_is_committed_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "BATCH_ROWS", 3)
    monkeypatch.setattr(build_module, "COMMIT_SECONDS", 0.0)
    seen: list[int] = []

    def report(progress: Progress) -> None:
        if progress.phase == "encoding":
            with TeacherCache.open(tmp_path / "cache") as reader:
                seen.append(sum(space.present_count() for space in reader.spaces().values()))

    built(tmp_path, TEXTS, report=report)
    assert seen == [0, 3, 6, 8, 11, 14, 16, 19, 20]


def test_batches_can_be_completed_in_any_order(tmp_path: Path) -> None:
    class Shuffled(Workers):
        def encode(self, spec: TeacherSpec, batches: Iterable[list[str]]) -> EncodedBatches:
            results = list(LocalWorkers().encode(spec, batches))
            random.Random(0).shuffle(results)
            yield from results

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_module, "BATCH_ROWS", 3)
        built(tmp_path, TEXTS, workers=Shuffled())
    with TeacherCache.open(tmp_path / "cache") as cache:
        assert unequal_rows(cache.space(), TEXTS) == []


def test_progress_adds_up(tmp_path: Path) -> None:
    built(tmp_path, TEXTS[:5], teacher=BadVectors.options())
    seen: list[Progress] = []
    built(
        tmp_path,
        [*TEXTS, "nan 1"],
        teacher=BadVectors.options(),
        report=lambda progress: seen.append(dataclasses.replace(progress)),
    )
    reading = [progress for progress in seen if progress.phase == "reading"]
    encoding = [progress for progress in seen if progress.phase == "encoding"]
    assert reading[-1].done == 21
    assert [(p.done, p.total, p.cached) for p in (encoding[0], encoding[-1])] == [(0, 16, 5), (16, 16, 5)]
    assert encoding[-1].quarantined == 1
    assert encoding[-1].bytes == 16 * 32 * 2


def test_an_unknown_teacher_or_encoding_leaves_no_folder(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, TEXTS)
    path = tmp_path / "cache"
    with pytest.raises(TeacherError):
        build(corpus, TeacherOptions(model="toy", backend="no.such:Teacher"), path, name="x")
    with pytest.raises(CacheError, match="unknown encoding 'float17'"):
        build(corpus, TOY, path, name="x", storage="float17")
    assert not path.exists()


def test_the_encoding_of_a_space_is_kept(tmp_path: Path) -> None:
    built(tmp_path, TEXTS[:5], storage="float16-raw")
    assert built(tmp_path, TEXTS).encoded == 15
    with pytest.raises(CacheError, match="is stored as float16-raw, not float16"):
        built(tmp_path, TEXTS, storage="float16")
    with TeacherCache.open(tmp_path / "cache") as cache:
        assert cache.space().record.storage == "float16-raw"
        assert unequal_rows(cache.space(), TEXTS) == []


def test_an_invalid_corpus_is_not_published_and_damages_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "READ_RECORDS", 4)
    built(tmp_path, TEXTS[:3])
    path = tmp_path / "broken.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS) + "broken\n")
    with pytest.raises(CorpusError, match=r"broken.jsonl:21"):
        build(Corpus.open(path), TOY, tmp_path / "cache", name="broken")
    with TeacherCache.open(tmp_path / "cache") as cache:
        assert list(cache.corpora()) == ["corpus"]
        assert cache.space().present_count() == 3
    verdict = verify(tmp_path / "cache", deep=True)
    assert verdict.ok
    assert verdict.leftovers == []
    assert outcome(built(tmp_path, TEXTS)) == (20, 3, 17, 0)


def test_an_error_of_the_teacher_is_raised_unchanged_and_frees_the_lock(tmp_path: Path) -> None:
    with pytest.raises(TeacherError, match="no answer to"):
        built(tmp_path, TEXTS, teacher=Refuses.options())
    with TeacherCache.open(tmp_path / "cache") as cache:
        assert cache.spaces() == {}
    assert verify(tmp_path / "cache", deep=True).ok
    assert built(tmp_path, TEXTS).encoded == 20


@pytest.mark.parametrize("step", ["write_shard", "grow"])
def test_a_space_exists_once_its_first_vectors_are_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    real = getattr(ShardedArray, step)

    def cut_off(self: ShardedArray, *arguments: object) -> object:
        result = real(self, *arguments)
        if "vectors" in str(self.folder):
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(ShardedArray, step, cut_off)
    try:
        built(tmp_path, TEXTS)
    except KeyboardInterrupt:
        monkeypatch.undo()
    (left,) = (tmp_path / "cache/spaces").glob("*/vectors.zarr/c/0/0")  # a shard that the index does not know
    with TeacherCache.open(tmp_path / "cache") as cache:
        assert cache.spaces() == {}
    assert verify(tmp_path / "cache", deep=True).ok
    left.write_bytes(b"garbage")
    assert outcome(built(tmp_path, TEXTS)) == (20, 0, 20, 0)
    assert verify(tmp_path / "cache", deep=True).ok


def test_a_first_commit_of_only_quarantined_vectors_is_stored(tmp_path: Path) -> None:
    built(tmp_path, ["nan 1"], teacher=BadVectors.options())
    workers = Recorded()
    assert outcome(built(tmp_path, ["nan 1"], teacher=BadVectors.options(), workers=workers)) == (1, 0, 0, 1)
    assert workers.texts == []
    with TeacherCache.open(tmp_path / "cache") as cache:
        assert cache.space().record.tokens == 2
        assert cache.space().quarantined() == {0: "NaN in the teacher output"}
    assert verify(tmp_path / "cache", deep=True).ok


def test_an_error_closes_the_workers_at_once(tmp_path: Path) -> None:
    closed: list[bool] = []

    class ClosingWorkers(Workers):
        def encode(self, spec: TeacherSpec, batches: Iterable[list[str]]) -> EncodedBatches:
            try:
                yield from LocalWorkers().encode(spec, batches)
            finally:
                closed.append(True)

    def interrupt(progress: Progress) -> None:
        if progress.phase == "encoding" and progress.done:
            raise KeyboardInterrupt

    try:
        built(tmp_path, TEXTS, workers=ClosingWorkers(), report=interrupt)
    except KeyboardInterrupt:
        assert closed == [True]
    else:
        pytest.fail("the interrupt was lost")


def test_a_full_disk_keeps_the_committed_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ShardedArray.write_shard

    def full_at_shard_one(self: ShardedArray, number: int, *arguments: object) -> object:
        if "vectors" in str(self.folder) and number == 1:
            raise DiskFull("no space left on the disk of x")
        return real(self, number, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ShardedArray, "write_shard", full_at_shard_one)
    with pytest.raises(DiskFull):
        built(tmp_path, TEXTS)
    monkeypatch.undo()
    assert verify(tmp_path / "cache", deep=True).ok
    assert outcome(built(tmp_path, TEXTS)) == (20, 8, 12, 0)


KILLED = """
import sys
from teacher_cache.building import build as build_module
from teacher_cache.table.cache import TeacherCache
from teacher_cache.corpus.corpus import Corpus
from tests.teacher_cache.toy_variants import Logged

build_module.BATCH_ROWS = 16
build_module.READ_RECORDS = 200
build_module.COMMIT_SECONDS = 0.05
corpus, cache, log = sys.argv[1:]
TeacherCache.open(cache, "a", shard_rows=64).close()
build_module.build(Corpus.open(corpus), Logged.options(log), cache, name="corpus")
"""


def test_a_killed_build_loses_only_uncommitted_work(tmp_path: Path) -> None:
    texts = numbered(3000)
    corpus_of(tmp_path, texts)
    path, log = tmp_path / "cache", EncodedLog(tmp_path / "encoded.log")
    command = [sys.executable, "-c", KILLED, str(tmp_path / "corpus-0.jsonl"), str(path), str(log.path)]
    moments = random.Random(7)
    committed: set[str] = set()  # texts with a committed vector before the latest kill

    def kill_build(started: Callable[[], bool]) -> None:
        """Kill a build a little while after `started` is true."""
        with subprocess.Popen(command) as process:
            while process.poll() is None and not started():
                time.sleep(0.005)
            time.sleep(moments.uniform(0.0, 0.3))
            process.kill()
        assert process.returncode == -signal.SIGKILL

    index = path / "index.lmdb" / "data.mdb"
    kill_build(lambda: index.exists() and index.stat().st_size > 0)  # while it reads the corpus or creates the cache
    for _ in range(5):
        kill_build(log.has_grown)
        assert not committed & set(log.new_texts())
        verdict = verify(path, deep=True)
        assert verdict.damage == []
        with TeacherCache.open(path) as cache:
            rows = np.arange(cache.rows)
            for view in cache.spaces().values():
                there = cache.texts(rows[view.present(rows)])
                assert unequal_rows(view, there) == []
                assert committed <= set(there)
                committed = set(there)
    assert 0 < len(committed) < len(texts)
    subprocess.run(command, check=True)
    last = log.new_texts()
    assert not committed & set(last)
    assert committed | set(last) == set(texts)
    assert max(Counter(last).values(), default=1) == 1
    assert verify(path, deep=True).ok
    with TeacherCache.open(path) as cache:
        assert cache.lookup(texts).tolist() == list(range(3000))
        assert cache.texts(cache.corpus().rows[:, 0]) == texts
        assert unequal_rows(cache.space(), texts) == []
        assert cache.space().slug == resolve(Logged.options()).space.slug
