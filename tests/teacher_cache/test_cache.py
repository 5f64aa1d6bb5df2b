"""Opening a cache, finding a space in it, and reading vectors by row."""

import json
import multiprocessing
import pickle
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from teacher_cache.building.build import build
from teacher_cache.errors import (
    CacheError,
    CacheNotFound,
    DamagedCache,
    FormatVersionError,
    MissingRows,
    SpaceMismatch,
    SpaceNotFound,
)
from teacher_cache.maintenance.check import verify
from teacher_cache.storage import shards
from teacher_cache.storage.index import Index
from teacher_cache.storage.shards import ShardedArray
from teacher_cache.storage.texts import TextTable
from teacher_cache.table import layout
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.view import SpaceView
from teacher_cache.teachers import TeacherOptions, resolve
from tests.teacher_cache.small_caches import TOY, built, corpus_of, numbered, teacher_vectors, unequal_rows

TEXTS = numbered(20)
QUERY = TeacherOptions(model="toy", prompt="query: ")


@pytest.fixture(scope="module")
def twenty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("twenty")
    built(folder, TEXTS)
    return folder / "cache"


@pytest.fixture
def cache(tmp_path: Path, twenty: Path) -> Iterator[TeacherCache]:
    shutil.copytree(twenty, tmp_path / "cache")
    with TeacherCache.open(tmp_path / "cache") as cache:
        yield cache


# Opening


def test_a_folder_that_is_no_cache_is_not_read(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CacheNotFound, match=rf"no teacher cache at {path}: it has no cache.json"):
            TeacherCache.open(path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("entry", ["notes.txt", "texts/mine.txt", "index.lmdb/data.mdb", "corpora/x/y"])
def test_a_folder_of_someones_own_is_not_written_whatever_its_entries_are_called(tmp_path: Path, entry: str) -> None:
    (tmp_path / entry).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / entry).write_text("mine")
    with pytest.raises(CacheError, match="is not a teacher cache and not empty; choose another folder"):
        TeacherCache.open(tmp_path, "a")
    assert (tmp_path / entry).read_text() == "mine"
    assert sum(path.is_file() for path in tmp_path.rglob("*")) == 1


def test_a_file_is_no_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CacheError, match="not a teacher cache"):
        TeacherCache.open(tmp_path / "file", "a")


def test_an_empty_folder_becomes_a_cache(tmp_path: Path) -> None:
    TeacherCache.open(tmp_path, "a").close()
    with TeacherCache.open(tmp_path) as cache:
        assert (cache.rows, cache.spaces(), cache.corpora()) == (0, {}, {})
        assert cache.shard_rows == 8192
        assert cache.texts(np.array([], dtype=np.int64)) == []
    assert verify(tmp_path, deep=True).ok


@pytest.mark.parametrize(("owner", "step"), [(TextTable, "create"), (Index, "commit"), (layout, "atomic_write")])
def test_a_cache_whose_making_was_cut_off_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, step: str
) -> None:
    def cut_off(*arguments: object) -> None:
        (tmp_path / "cache/cache.json.1.writing").write_text("half")  # a killed process cleans up nothing
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, step, cut_off)
    with pytest.raises(KeyboardInterrupt):
        TeacherCache.open(tmp_path / "cache", "a", shard_rows=8)
    monkeypatch.undo()
    with pytest.raises(CacheNotFound):
        TeacherCache.open(tmp_path / "cache")
    built(tmp_path, TEXTS)
    assert verify(tmp_path / "cache", deep=True).ok


def test_an_existing_cache_keeps_its_shard_size(tmp_path: Path) -> None:
    TeacherCache.open(tmp_path, "a", shard_rows=16).close()
    with TeacherCache.open(tmp_path, "a", shard_rows=8) as cache:
        assert cache.shard_rows == 16


@pytest.mark.parametrize("shard_rows", [0, -8, 12])
def test_a_shard_size_that_is_no_multiple_of_eight_is_refused(tmp_path: Path, shard_rows: int) -> None:
    with pytest.raises(CacheError, match=f"shards of {shard_rows} rows: expected a positive multiple of 8"):
        TeacherCache.open(tmp_path / "cache", "a", shard_rows=shard_rows)


def test_another_format_version_is_refused_and_named(tmp_path: Path, cache: TeacherCache) -> None:
    path = cache.path / "cache.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    for mode in ("r", "a"):
        with pytest.raises(FormatVersionError, match="has cache format 99, this version reads format 2"):
            TeacherCache.open(cache.path, mode)  # type: ignore[arg-type]


@pytest.mark.parametrize("content", ["", "{}", "[]", "{"])
def test_a_cache_that_does_not_say_its_format_is_damaged(cache: TeacherCache, content: str) -> None:
    (cache.path / "cache.json").write_text(content)
    with pytest.raises(DamagedCache, match="has no format version"):
        TeacherCache.open(cache.path)


# Finding a space


def test_a_space_is_found_by_slug_teacher_or_fingerprint(cache: TeacherCache) -> None:
    (slug,) = cache.spaces()
    fingerprint = resolve(TOY).space.fingerprint
    for name in (None, slug, "toy", fingerprint, fingerprint[:6]):
        assert cache.space(name).slug == slug
    for name in ("to", fingerprint[:5], "toy@", ""):
        with pytest.raises(SpaceNotFound, match=f"no embedding space {name!r}; it has: {slug}"):
            cache.space(name)


def test_an_ambiguous_space_names_what_differs(tmp_path: Path, cache: TeacherCache) -> None:
    built(tmp_path, TEXTS, teacher=QUERY)
    for name in (None, "toy"):
        with pytest.raises(SpaceNotFound, match=r"has 2 matching spaces \(they differ in prompt\)"):
            cache.space(name)
    for slug in cache.spaces():
        assert cache.space(slug).slug == slug


def test_a_damaged_space_does_not_hide_a_sound_one(tmp_path: Path, cache: TeacherCache) -> None:
    built(tmp_path, TEXTS, teacher=QUERY)
    query, plain = resolve(QUERY).space, resolve(TOY).space
    (cache.path / "spaces" / query.slug / "vectors.zarr" / "zarr.json").unlink()
    assert cache.space(plain.slug).slug == plain.slug
    with pytest.raises(DamagedCache):
        cache.space(query.slug)


def test_a_cache_without_spaces_says_so(tmp_path: Path) -> None:
    with TeacherCache.open(tmp_path, "a") as cache:
        for wanted in (None, "toy", {"teacher": "toy"}):
            with pytest.raises(SpaceNotFound, match=r"has no embedding space yet; .*`tcache build"):
                cache.space(wanted)


def test_a_space_is_found_by_the_fields_it_must_have(tmp_path: Path, cache: TeacherCache) -> None:
    built(tmp_path, TEXTS, teacher=QUERY)
    assert cache.space({"teacher": "toy", "prompt": "query: "}).space == resolve(QUERY).space
    assert cache.space({"prompt": ""}).space == resolve(TOY).space


def test_a_wanted_space_that_differs_is_refused_with_the_fields_and_both_values(cache: TeacherCache) -> None:
    with pytest.raises(SpaceMismatch, match=r"differs in prompt: wanted 'query: ', cached ''; `tcache build`"):
        cache.space({"teacher": "toy", "prompt": "query: "})
    with pytest.raises(SpaceMismatch, match="max_length: wanted 9, cached 512; dims: wanted 8, cached 32"):
        cache.space({"max_length": 9, "dims": 8, "prompt": ""})


def test_the_nearest_space_is_the_one_compared_with(tmp_path: Path, cache: TeacherCache) -> None:
    built(tmp_path, TEXTS, teacher=TeacherOptions(model="toy", prompt="query: ", dims=8, max_length=9))
    with pytest.raises(SpaceMismatch, match=r"differs in prompt: wanted 'x ', cached ''; "):
        cache.space({"prompt": "x ", "dims": 32, "max_length": 512})


def test_a_field_that_no_space_has_is_refused_by_name(cache: TeacherCache) -> None:
    with pytest.raises(CacheError, match="no field 'promt'"):
        cache.space({"promt": "query: "})


def test_an_unsettled_precision_finds_the_space_that_differs_in_nothing_else(cache: TeacherCache) -> None:
    space = resolve(TOY).space
    found = cache.find_space(replace(space, dtype="auto"))
    assert found is not None
    assert found.space.dtype == "float32"
    assert cache.find_space(replace(space, dtype="bfloat16")) is None
    assert cache.find_space(replace(space, dtype="auto", dims=8)) is None


def test_a_space_in_another_number_format_is_refused(cache: TeacherCache) -> None:
    with TeacherCache.open(cache.path, "a") as writer:
        with pytest.raises(CacheError, match="is stored as float16, not float16-raw; leave `storage` out"):
            writer.ensure_space(resolve(TOY).space, "float16-raw")
        assert writer.ensure_space(resolve(TOY).space, "float16").present_count() == len(TEXTS)


# Reading


def test_vectors_come_back_in_the_order_asked_for(cache: TeacherCache) -> None:
    view = cache.space()
    assert unequal_rows(view, TEXTS) == []
    rows = np.array([19, 0, 7, 7, 8, 15, 0])
    got = view.gather(rows)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, view.gather(np.arange(20))[rows])
    out = np.zeros((7, 32), dtype=np.float32)
    assert view.gather(rows, out=out) is out
    np.testing.assert_array_equal(out, got)
    assert view.gather(np.array([], dtype=np.int64)).shape == (0, 32)


def test_rows_without_a_vector_are_counted_and_the_first_is_named(cache: TeacherCache) -> None:
    with TeacherCache.open(cache.path, "a") as writer, writer.appending() as appender:
        appender.add(["new", "newer"])
    view = cache.space()
    assert view.present(np.array([19, 20, 21, 1000, -1])).tolist() == [True, False, False, False, False]
    with pytest.raises(MissingRows, match="no vector for 2 of 3 rows, first row 21; `tcache build`"):
        view.gather(np.array([0, 21, 20]))
    assert view.missing_rows(np.array([3, 20, 21])).tolist() == [20, 21]


def test_an_unknown_text_has_no_vector(cache: TeacherCache) -> None:
    rows = cache.lookup([TEXTS[0], "unknown"])
    assert rows.tolist() == [0, -1]
    with pytest.raises(MissingRows, match="1 of 2 rows, first row -1"):
        cache.space().gather(rows)
    with pytest.raises(MissingRows, match="has 20 rows, counted from 0; requested -1 to 0"):
        cache.texts(rows)


def test_an_open_reader_sees_rows_added_meanwhile(tmp_path: Path, cache: TeacherCache) -> None:
    view = cache.space()
    before = view.gather(np.arange(20))
    built(tmp_path, numbered(30))
    assert cache.rows == 30
    assert view.present(np.arange(30)).all()
    assert unequal_rows(view, numbered(30)) == []
    np.testing.assert_array_equal(view.gather(np.arange(20)), before)


def test_many_shards_are_read_with_few_open(cache: TeacherCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "OPEN_SHARDS", 2)
    view = cache.space()
    for row in (0, 9, 17, 3, 12):
        assert view.gather(np.array([row])).shape == (1, 32)
        assert len(view.vectors._open) <= 2
    assert unequal_rows(view, TEXTS) == []


def test_what_is_read_is_closed_to_writing(cache: TeacherCache) -> None:
    view = cache.space()
    with pytest.raises(CacheError, match='open the cache with mode "a"'):
        view.write(0, np.array([0]), teacher_vectors(TEXTS[:1]))


def test_a_closed_writer_does_not_write_without_its_lock(tmp_path: Path, cache: TeacherCache) -> None:
    writer = TeacherCache.open(cache.path, "a")
    view = writer.space()
    writer.close()
    with pytest.raises(CacheError, match="is read-only"):
        view.write(0, np.array([0]), teacher_vectors(TEXTS[:1]))
    assert view.present_count() == 20


def test_two_views_of_a_writer_add_to_each_others_shards(cache: TeacherCache) -> None:
    with TeacherCache.open(cache.path, "a") as writer:
        with writer.appending() as appender:
            rows = appender.add(numbered(10, start=20))
        first, second = writer.space(), writer.space()
        second.write(3, rows[4:], teacher_vectors(numbered(6, start=24)))
        first.write(2, rows[:4], teacher_vectors(numbered(4, start=20)))
        assert unequal_rows(first, numbered(30)) == []
        assert ShardedArray(first.vectors.folder).rows == 30


def test_costs_add_up_over_views(cache: TeacherCache) -> None:
    words = sum(len(text.split()) for text in TEXTS)
    assert cache.space().record.tokens == words
    with TeacherCache.open(cache.path, "a") as writer:
        view = writer.space()
        view.write(0, np.array([0]), teacher_vectors(TEXTS[:1]), tokens=5, seconds=1.5)
        writer.space().write(0, np.array([0]), teacher_vectors(TEXTS[:1]), tokens=5, seconds=1.5)
    again = cache.space().record
    assert again.tokens == words + 10
    assert again.seconds >= 3.0


def gathered(view: SpaceView, rows: np.ndarray) -> np.ndarray:
    return view.gather(rows)


def test_a_view_travels_to_a_spawned_process(cache: TeacherCache) -> None:
    view = cache.space()
    rows = np.array([19, 2])
    expected = view.gather(rows)  # so that mappings and an index handle are open, which cannot travel
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        np.testing.assert_array_equal(pool.apply(gathered, (view, rows)), expected)


def test_a_pickled_writer_comes_back_as_a_reader(cache: TeacherCache) -> None:
    with TeacherCache.open(cache.path, "a") as writer:
        copy = pickle.loads(pickle.dumps(writer))
        assert copy.rows == 20
        with pytest.raises(CacheError, match="is read-only"):
            copy.space().write(0, np.array([0]), teacher_vectors(TEXTS[:1]))


def test_a_forked_process_reads_what_its_parent_has_open(cache: TeacherCache) -> None:
    view = cache.space()
    expected = view.gather(np.array([3, 18]))
    with multiprocessing.get_context("fork").Pool(1) as pool:
        np.testing.assert_array_equal(pool.apply(view.gather, (np.array([3, 18]),)), expected)
    np.testing.assert_array_equal(view.gather(np.array([3, 18])), expected)


def test_a_reader_may_stay_open_while_its_own_process_builds(tmp_path: Path, cache: TeacherCache) -> None:
    assert cache.rows == 20
    build(corpus_of(tmp_path, ["new"]), TOY, cache.path, name="more")
    assert cache.rows == 21
    assert unequal_rows(cache.space(), ["new"]) == []
