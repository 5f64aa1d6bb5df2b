"""Merges of caches; conflicts are errors before anything is written."""

import dataclasses
import random
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teacher_cache.building.build import build
from teacher_cache.errors import CacheError, CacheNotFound, DamagedCache, SpaceMismatch
from teacher_cache.maintenance.check import verify
from teacher_cache.space import EmbeddingSpace
from teacher_cache.storage.codec import ENCODINGS
from teacher_cache.table import intake
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.view import SpaceView
from teacher_cache.teachers import TeacherOptions, resolve
from teacher_cache.transfer import merge as merge_module
from teacher_cache.transfer.exporter import export
from teacher_cache.transfer.importer import import_vectors
from teacher_cache.transfer.merge import MergeReport, merge
from tests.teacher_cache.copies import all_vectors, files, killed_until_done, npy, same_vectors, worst_error
from tests.teacher_cache.small_caches import TOY, corpus_of, numbered, passing_folder, teacher_vectors
from tests.teacher_cache.toy_variants import BadVectors

TEXTS = numbered(30)
QUERY = dataclasses.replace(TOY, prompt="query: ")


def cache_of(
    path: Path,
    texts: Sequence[str] | Sequence[tuple[str, str]],
    *,
    name: str,
    teacher: TeacherOptions = TOY,
    shard_rows: int = 8,
    storage: str | None = None,
) -> Path:
    """A cache at `path` with these texts as a corpus."""
    TeacherCache.open(path, "a", shard_rows=shard_rows).close()
    build(corpus_of(path.parent / f"{path.name}-texts", texts), teacher, path, name=name, storage=storage)
    return path


def foreign(path: Path, texts: Sequence[str], vectors: npt.NDArray[Any], *, storage: str = "float16") -> Path:
    """A cache of imported vectors of teacher "theirs"."""
    corpus = corpus_of(path.parent / f"{path.name}-texts", texts)
    source = npy(path.parent, vectors, f"{path.name}.npy")
    import_vectors(source, path, corpus=corpus, teacher="theirs", storage=storage, name=path.name)
    return path


def corpora(path: Path) -> dict[str, list[list[str]]]:
    """Name -> records of each corpus."""
    with TeacherCache.open(path) as cache:
        return {name: [cache.texts(row) for row in cache.corpus(name).rows] for name in cache.corpora()}


def outcome(report: MergeReport) -> tuple[int, int, int, int, int]:
    return report.rows, report.texts, report.vectors, report.held, report.quarantined


def test_a_build_after_a_merge_of_disjoint_caches_encodes_nothing(tmp_path: Path) -> None:
    first = cache_of(tmp_path / "a", TEXTS[:11], name="first")
    second = cache_of(tmp_path / "b", [*TEXTS[11:], TEXTS[20]], name="second", shard_rows=16)
    report = merge([first, second], tmp_path / "c")
    assert outcome(report) == (30, 30, 30, 0, 0)
    assert (report.spaces, report.corpora) == ([resolve(TOY).space.slug], ["first", "second"])
    assert verify(tmp_path / "c", deep=True).ok
    assert corpora(tmp_path / "c") == {**corpora(first), **corpora(second)}
    again = build(corpus_of(tmp_path / "all", TEXTS), TOY, tmp_path / "c", name="all")
    assert (again.cached, again.encoded) == (30, 0)
    with TeacherCache.open(tmp_path / "c") as cache:
        assert cache.shard_rows == 8  # a new cache takes the first source's
        assert np.array_equal(cache.space().gather(cache.lookup(TEXTS)), teacher_vectors(TEXTS).astype(np.float16))


def test_caches_are_merged_by_text_not_by_row(tmp_path: Path) -> None:
    target = cache_of(tmp_path / "c", TEXTS[:20], name="first", shard_rows=16)
    source = cache_of(tmp_path / "a", TEXTS[:9:-1], name="second")
    report = merge([source], target)
    assert outcome(report) == (30, 10, 10, 10, 0)
    assert corpora(target) == {"first": [[text] for text in TEXTS[:20]], "second": [[text] for text in TEXTS[:9:-1]]}
    assert verify(target, deep=True).ok
    before = files(target)
    assert outcome(merge([source], target)) == (30, 0, 0, 20, 0)
    assert {name: body for name, body in files(target).items() if "index" not in name} == {
        name: body for name, body in before.items() if "index" not in name
    }


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=25), min_size=1, max_size=4),
    st.lists(st.sampled_from([8, 16, 24]), min_size=4, max_size=4),
    st.booleans(),
)
def test_a_merge_equals_a_build_of_all_texts(
    parts: list[list[str]], shard_rows: list[int], into_the_first: bool
) -> None:
    with passing_folder() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(intake, "WINDOW_ROWS", 8)
        folder = Path(name)
        caches = [
            cache_of(folder / f"part-{i}", texts, name=f"corpus-{i}", shard_rows=rows)
            for i, (texts, rows) in enumerate(zip(parts, shard_rows, strict=False))
        ]
        whole = folder / "whole"
        for i, texts in enumerate(parts):
            cache_of(whole, texts, name=f"corpus-{i}")
        target, sources = (caches[0], caches[1:]) if into_the_first and caches[1:] else (folder / "joined", caches)
        merge(sources, target)
        assert verify(target, deep=True).ok
        assert corpora(target) == corpora(whole)
        assert same_vectors(target, whole)


@pytest.mark.parametrize("storage", ENCODINGS)
def test_a_copy_keeps_the_error_bound_of_its_source(tmp_path: Path, storage: str) -> None:
    source = foreign(tmp_path / "a", TEXTS, teacher_vectors(TEXTS), storage=storage)
    merge([source], tmp_path / "c")
    export(source, tmp_path / "out", "npy")
    import_vectors(tmp_path / "out", tmp_path / "d")
    assert worst_error(tmp_path / "c") == worst_error(tmp_path / "d") == pytest.approx(worst_error(source))
    assert (worst_error(source) > 0) == (storage != "float32")


@pytest.mark.parametrize("storage", ENCODINGS)
def test_values_in_the_same_encoding_are_copied_bit_for_bit(tmp_path: Path, storage: str) -> None:
    vectors = teacher_vectors(TEXTS) * np.linspace(0.1, 30, 30, dtype=np.float32)[:, None]
    source = foreign(tmp_path / "a", TEXTS, vectors, storage=storage)
    target = foreign(tmp_path / "c", ["own"], 2 * teacher_vectors(["own"]), storage=storage)
    merge([source], target)
    merged, given = all_vectors(target), all_vectors(source)
    assert all(np.array_equal(merged[text], given[text]) for text in TEXTS)
    with TeacherCache.open(target) as cache, TeacherCache.open(source) as other:
        view, original = cache.space(), other.space()
        rows = np.arange(other.rows)
        assert view.record.storage == original.record.storage == storage
        assert np.array_equal(view.gather(cache.lookup(other.texts(rows))), original.gather(rows))


def test_the_encoding_of_the_target_is_kept(tmp_path: Path) -> None:
    target = cache_of(tmp_path / "c", TEXTS[:9], name="first", storage="float16-raw")
    source = cache_of(tmp_path / "a", TEXTS, name="second", storage="float16")
    merge([source], target)
    with TeacherCache.open(target) as cache:
        assert cache.space().record.storage == "float16-raw"
    assert same_vectors(target, source)


def test_vectors_that_the_targets_encoding_cannot_hold_are_quarantined(tmp_path: Path) -> None:
    vectors = 2 * teacher_vectors(TEXTS)
    vectors[7] = 1e6
    source = foreign(tmp_path / "a", TEXTS, vectors, storage="float32")
    target = foreign(tmp_path / "c", ["own"], 2 * teacher_vectors(["own"]))
    report = merge([source], target)
    assert (report.vectors, report.quarantined) == (29, 1)
    with TeacherCache.open(target) as cache:
        (row,) = cache.lookup([TEXTS[7]]).tolist()
        assert cache.space().quarantined() == {row: "overflows float16: largest value 1e+06"}


def test_all_spaces_are_copied_with_their_rows(tmp_path: Path) -> None:
    first = cache_of(tmp_path / "a", TEXTS[:11], name="first")
    cache_of(first, TEXTS[5:15], name="questions", teacher=QUERY)
    second = cache_of(tmp_path / "b", TEXTS[8:], name="second", teacher=QUERY)
    report = merge([first, second], tmp_path / "c")
    slugs = sorted(resolve(options).space.slug for options in (TOY, QUERY))
    assert report.spaces == slugs
    assert set(all_vectors(tmp_path / "c", resolve(TOY).space.slug)) == set(TEXTS[:11])
    assert set(all_vectors(tmp_path / "c", resolve(QUERY).space.slug)) == set(TEXTS[5:])
    with TeacherCache.open(first) as cache, TeacherCache.open(tmp_path / "c") as joined:
        for slug in slugs:  # the cost of encoding is used to predict the next build
            assert joined.space(slug).record == cache.space(slug).record


def test_pairs_stay_pairs(tmp_path: Path) -> None:
    pairs = [(TEXTS[i], TEXTS[29 - i]) for i in range(12)]
    source = cache_of(tmp_path / "a", pairs, name="pairs")
    target = cache_of(tmp_path / "c", TEXTS[::-1], name="own")
    merge([source], target)
    assert corpora(target)["pairs"] == [list(pair) for pair in pairs]
    with TeacherCache.open(target) as cache, TeacherCache.open(source) as other:
        assert cache.corpora()["pairs"] == other.corpora()["pairs"]


def test_rounding_is_not_a_conflict_and_the_targets_vector_is_kept(tmp_path: Path) -> None:
    vectors = teacher_vectors(TEXTS)
    noise = np.random.default_rng(0).normal(size=vectors.shape).astype(np.float32) * 2.0**-9 / np.sqrt(32)
    target = foreign(tmp_path / "c", TEXTS[:20], vectors[:20])
    source = foreign(tmp_path / "a", TEXTS, vectors + noise)
    before = all_vectors(target)
    assert outcome(merge([source], target)) == (30, 10, 10, 20, 0)
    after = all_vectors(target)
    assert all(np.array_equal(after[text], before[text]) for text in before)


# Conflicts


def conflict(folder: Path, kind: str) -> tuple[list[Path], type[Exception], str]:
    """Sources that conflict with target `c` or each other, and the expected error."""
    cache_of(folder / "c", TEXTS[:20], name="first")
    vectors = teacher_vectors(TEXTS)
    if kind == "vectors":
        foreign(folder / "c", TEXTS[:20], vectors[:20])
        other = foreign(folder / "a", TEXTS[15:], np.roll(vectors[15:], 1, axis=0))
        return [other], CacheError, r"different vectors of space theirs@\w{8} for 'text 15': 1 - cos"
    if kind == "vectors of two sources":
        one = foreign(folder / "a", TEXTS[:20], vectors[:20])
        two = foreign(folder / "b", TEXTS[19:], np.roll(vectors[19:], 1, axis=0))
        return [one, two], CacheError, "/a and .*/b have different vectors of space theirs.* for 'text 19 and more"
    if kind == "lengths":
        foreign(folder / "c", TEXTS[:20], 2 * vectors[:20])
        return [foreign(folder / "a", TEXTS, 2.2 * vectors)], CacheError, r"lengths 2 and 2\.2"
    if kind == "corpora":
        return [cache_of(folder / "a", TEXTS[1:20], name="first")], CacheError, "different corpora named 'first'"
    if kind == "corpora of two sources":
        one = cache_of(folder / "a", TEXTS, name="same")
        two = cache_of(folder / "b", TEXTS[::-1], name="same")
        return [one, two], CacheError, r"different corpora named 'same' \(30 and 30 records\)"
    raise ValueError(kind)


@pytest.mark.parametrize("kind", ["vectors", "vectors of two sources", "lengths", "corpora", "corpora of two sources"])
def test_a_conflict_is_an_error_and_nothing_is_written(tmp_path: Path, kind: str) -> None:
    sources, error, message = conflict(tmp_path, kind)
    before = {path: files(path) for path in (tmp_path / "c", *sources)}
    with pytest.raises(error, match=message):
        merge(sources, tmp_path / "c")
    assert {path: files(path) for path in before} == before
    if "sources" in kind:
        with pytest.raises(error, match=message):
            merge(sources, tmp_path / "new")
        assert not (tmp_path / "new").exists()


def test_two_spaces_of_one_name_are_an_error_that_lists_their_differences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two spaces share a name when the first eight digits of their fingerprints do.
    monkeypatch.setattr(EmbeddingSpace, "slug", property(lambda self: f"{self.teacher}@00000000"))
    target = cache_of(tmp_path / "c", TEXTS[:5], name="first")
    source = cache_of(tmp_path / "a", TEXTS, name="second", teacher=QUERY)
    before = files(target)
    with pytest.raises(SpaceMismatch, match="different spaces named toy@00000000: prompt: '' and 'query: '"):
        merge([source], target)
    assert files(target) == before


def test_a_cache_is_never_merged_into_itself(tmp_path: Path) -> None:
    path = cache_of(tmp_path / "a", TEXTS, name="first")
    (tmp_path / "link").symlink_to(path)
    for source in (path, tmp_path / "link", tmp_path / "x" / ".." / "a"):
        with pytest.raises(CacheError, match="it is the cache that is merged into"):
            merge([source], path)
    with pytest.raises(CacheError, match="it is named twice"):
        merge([path, tmp_path / "link"], tmp_path / "c")
    with pytest.raises(CacheError, match="no cache to merge"):
        merge([], tmp_path / "c")
    with pytest.raises(CacheNotFound):
        merge([path, tmp_path / "none"], tmp_path / "c")
    assert not (tmp_path / "c").exists()


# Quarantined vectors


def test_quarantined_rows_without_a_vector_are_copied(tmp_path: Path) -> None:
    bad = BadVectors.options()
    target = cache_of(tmp_path / "c", ["fine 1", "nan 1"], name="first", teacher=bad)
    source = cache_of(tmp_path / "a", ["inf 1", "nan 1", "fine 2"], name="second", teacher=bad)
    assert outcome(merge([source], target)) == (4, 2, 1, 0, 1)
    with TeacherCache.open(target) as cache:
        reasons = cache.space().quarantined()
        reasons_by_text = {cache.texts(np.array([row]))[0]: reason for row, reason in reasons.items()}
    assert reasons_by_text == {"nan 1": "NaN in the teacher output", "inf 1": "infinite value in the teacher output"}
    again = build(corpus_of(tmp_path / "all", ["inf 1", "nan 1", "fine 2", "fine 1"]), bad, target, name="all")
    assert (again.encoded, again.cached, again.quarantined) == (0, 2, 2)


def test_a_space_with_only_quarantined_rows_is_copied(tmp_path: Path) -> None:
    source = cache_of(tmp_path / "a", ["nan 1"], name="first", teacher=BadVectors.options())
    merge([source], tmp_path / "c")
    with TeacherCache.open(tmp_path / "c") as cache:
        assert cache.space().quarantined() == {0: "NaN in the teacher output"}
    assert verify(tmp_path / "c", deep=True).ok


@pytest.mark.parametrize("first", ["invalid", "valid"])
def test_a_row_with_a_vector_in_any_source_is_not_quarantined(tmp_path: Path, first: str) -> None:
    valid = foreign(tmp_path / "valid", TEXTS, 2 * teacher_vectors(TEXTS))
    vectors = 2 * teacher_vectors(TEXTS)
    vectors[3] = 0
    invalid = foreign(tmp_path / "invalid", TEXTS, vectors)
    sources = [invalid, valid] if first == "invalid" else [valid, invalid]
    merge(sources, tmp_path / "c")
    merge([valid], invalid)
    for path in (tmp_path / "c", invalid):
        with TeacherCache.open(path) as cache:
            assert cache.space().quarantined() == {}
            assert len(all_vectors(path)) == 30


# Damage and interruption


@pytest.mark.parametrize("which", ["spaces/*/vectors.zarr/c/1/0", "texts/keys/c/1/0"])
def test_damage_is_not_copied(tmp_path: Path, which: str) -> None:
    source = cache_of(tmp_path / "a", TEXTS, name="first", storage="float16-raw")
    (path,) = source.glob(which)
    body = bytearray(path.read_bytes())
    body[5] ^= 0x10
    path.write_bytes(body)
    with pytest.raises(DamagedCache):
        merge([source], tmp_path / "c")
    assert verify(tmp_path / "c", deep=True).ok


def test_a_corpus_that_changes_during_a_merge_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = cache_of(tmp_path / "a", TEXTS, name="first")
    real = intake.CheckedReader.gather

    def rebuilt(self: intake.CheckedReader, rows: npt.NDArray[np.int64], *arguments: Any) -> Any:
        cache_of(source, TEXTS[::-1], name="first")
        return real(self, rows, *arguments)

    monkeypatch.setattr(intake.CheckedReader, "gather", rebuilt)
    with pytest.raises(CacheError, match=r"corpus 'first' of .* changed while it was merged"):
        merge([source], tmp_path / "c")
    monkeypatch.undo()
    assert verify(tmp_path / "c", deep=True).ok
    merge([source], tmp_path / "c")
    assert corpora(tmp_path / "c") == {"first": [[text] for text in TEXTS[::-1]]}


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    first = cache_of(tmp_path / "a", TEXTS[:18], name="first")
    cache_of(first, ["nan 1", "fine 1"], name="bad", teacher=BadVectors.options())
    return [first, cache_of(tmp_path / "b", TEXTS[:12:-1], name="second")]


# Steps of a merge that write to its target.
STEPS = {
    "write": SpaceView,
    "publish_corpus": TeacherCache,
    "ensure_space": TeacherCache,
    "add_quarantined": merge_module._Merger,
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("when", [0, 1, 3])
def test_an_interrupted_merge_resumes(
    tmp_path: Path, sources: list[Path], monkeypatch: pytest.MonkeyPatch, step: str, when: int
) -> None:
    merge(sources, tmp_path / "whole")
    target = tmp_path / "c"
    TeacherCache.open(target, "a", shard_rows=8).close()
    real = getattr(STEPS[step], step)
    calls = 0

    def cut_off(self: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > when:
            raise KeyboardInterrupt
        return real(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(STEPS[step], step, cut_off)
        try:
            merge(sources, target)
        except KeyboardInterrupt:
            assert verify(target, deep=True).damage == []
    merge(sources, target)
    assert verify(target, deep=True).ok
    assert corpora(target) == corpora(tmp_path / "whole")
    for options in (TOY, BadVectors.options()):
        slug = resolve(options).space.slug
        merged, expected = all_vectors(target, slug), all_vectors(tmp_path / "whole", slug)
        assert {text: vector.tolist() for text, vector in merged.items()} == {
            text: vector.tolist() for text, vector in expected.items()
        }
        with TeacherCache.open(target) as cache:
            assert len(cache.space(slug).quarantined()) == (options != TOY)


KILLED = """
import sys
import time
from teacher_cache.table.cache import TeacherCache
from teacher_cache.transfer.merge import merge
from teacher_cache.table.view import SpaceView

write = SpaceView.write

def slow(self, *arguments, **options):
    time.sleep(0.01)
    return write(self, *arguments, **options)

SpaceView.write = slow
*sources, into = sys.argv[1:]
TeacherCache.open(into, "a", shard_rows=64).close()
merge(sources, into)
"""


@pytest.mark.slow
def test_a_merge_killed_at_any_moment_loses_only_uncommitted_data(tmp_path: Path) -> None:
    texts = numbered(3000)
    first = cache_of(tmp_path / "a", texts[:2000], name="first", shard_rows=128)
    second = cache_of(tmp_path / "b", texts[1000:][::-1], name="second", shard_rows=128)
    before = [files(path) for path in (first, second)]
    path = tmp_path / "c"
    command = [sys.executable, "-c", KILLED, str(first), str(second), str(path)]
    assert killed_until_done(command, path, random.Random(5), 5) > 0
    assert verify(path, deep=True).ok
    merge([first, second], tmp_path / "whole")
    assert same_vectors(path, tmp_path / "whole")
    assert corpora(path) == {**corpora(first), **corpora(second)}
    assert [files(source) for source in (first, second)] == before


def test_progress_of_a_merge_reaches_every_row(tmp_path: Path) -> None:
    source = cache_of(tmp_path / "a", TEXTS, name="first")
    target = cache_of(tmp_path / "c", TEXTS[:5], name="own")
    latest: dict[str, tuple[int, int]] = {}
    merge([source], target, report=lambda p: latest.update({p.phase: (p.done, p.total)}))
    assert latest == {"comparing vectors": (30, 30), "reading texts": (30, 30), "writing vectors": (30, 30)}


def test_a_source_may_be_a_copy_of_the_target(tmp_path: Path) -> None:
    target = cache_of(tmp_path / "c", TEXTS, name="first")
    shutil.copytree(target, tmp_path / "copy")
    assert outcome(merge([tmp_path / "copy"], target)) == (30, 0, 0, 30, 0)
