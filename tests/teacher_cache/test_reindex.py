"""A lost index is rebuilt from the shards; what cannot be confirmed is left out and reported."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teacher_cache.building.build import build
from teacher_cache.errors import CacheLocked, CacheNotFound, FormatVersionError
from teacher_cache.maintenance import rebuild as reindex_module
from teacher_cache.maintenance.check import verify
from teacher_cache.maintenance.rebuild import ReindexReport, reindex
from teacher_cache.maintenance.repair import repair
from teacher_cache.storage.codec import ENCODINGS
from teacher_cache.storage.index import Index
from teacher_cache.storage.texts import KEY_ARRAY, TEXT_ARRAY
from teacher_cache.table.cache import TeacherCache
from teacher_cache.teachers import TeacherOptions
from teacher_cache.transfer.convert import convert
from tests.teacher_cache.damaged_caches import edit_manifest, flip, killed, lose_index, vector_shard
from tests.teacher_cache.small_caches import TOY, built, corpus_of, numbered, passing_folder
from tests.teacher_cache.toy_variants import BadVectors

TEXTS = numbered(20)
PAIRS = list(zip(TEXTS[:5], TEXTS[10:15], strict=True))


def contents(path: Path) -> dict[str, object]:
    """Texts, rows, corpora and vectors that a reader sees."""
    with TeacherCache.open(path) as cache:
        rows = np.arange(cache.rows)
        found: dict[str, object] = {"texts": cache.texts(rows), "rows": cache.lookup(cache.texts(rows)).tolist()}
        for name, record in cache.corpora().items():
            found[name] = (record, cache.corpus(name).rows.tolist())
        for slug, view in cache.spaces().items():
            present = rows[view.present(rows)]
            found[slug] = (view.space, view.record.storage, present.tolist(), view.gather(present).tolist())
        return found


def lose_data(path: Path) -> None:
    (path / "index.lmdb/data.mdb").unlink()


def spoil(path: Path) -> None:
    (path / "index.lmdb/data.mdb").write_bytes(b"garbage" * 1000)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    built(tmp_path, TEXTS)
    return tmp_path / "cache"


@pytest.mark.parametrize("loss", [lose_index, lose_data, spoil])
@pytest.mark.parametrize("storage", sorted(ENCODINGS))
def test_a_lost_index_is_rebuilt_as_it_was(tmp_path: Path, storage: str, loss: Callable[[Path], None]) -> None:
    built(tmp_path, TEXTS[:15], storage=storage)
    built(tmp_path, [*TEXTS, TEXTS[0]], name="more", teacher=TeacherOptions(model="toy", dims=8))
    built(tmp_path, PAIRS, name="pairs", storage=storage)
    path = tmp_path / "cache"
    before = contents(path)
    loss(path)
    report = reindex(path)
    assert report.left_out == []
    assert report.rows == 20
    assert sorted(report.spaces.values()) == [15, 20]
    assert report.corpora == ["corpus", "more", "pairs"]
    assert contents(path) == before
    assert verify(path, deep=True).damage == []
    with TeacherCache.open(path) as cache:
        for view in cache.spaces().values():
            worst = {record.worst_error for _, record in cache.index.iter_shards(view.array_name)}
            assert worst == {view.encoding.max_cosine_error}
    result = build(corpus_of(tmp_path, TEXTS), TOY, path, name="corpus")
    assert (result.cached, result.encoded) == (15, 5)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 13), min_size=1, max_size=4), st.booleans())
def test_caches_built_in_any_steps_are_found_again(steps: list[int], many: bool) -> None:
    with passing_folder() as folder:
        at_a_time, reindex_module.SHARDS_AT_A_TIME = reindex_module.SHARDS_AT_A_TIME, 2 if many else 16
        try:
            texts = numbered(sum(steps))
            for step in range(len(steps)):
                built(Path(folder), texts[: sum(steps[: step + 1])], name=f"corpus-{step}")
            before = contents(Path(folder) / "cache")
            lose_index(Path(folder) / "cache")
            assert reindex(Path(folder) / "cache").ok
            assert contents(Path(folder) / "cache") == before
        finally:
            reindex_module.SHARDS_AT_A_TIME = at_a_time


def test_the_old_index_is_moved_to_damaged(path: Path) -> None:
    old = (path / "index.lmdb/data.mdb").read_bytes()
    assert reindex(path).old == "damaged/index.lmdb"
    assert (path / "damaged/index.lmdb/data.mdb").read_bytes() == old
    assert verify(path, deep=True).ok


def test_an_empty_cache_has_an_empty_index(tmp_path: Path) -> None:
    TeacherCache.open(tmp_path, "a").close()
    lose_index(tmp_path)
    assert reindex(tmp_path).to_json() == {
        "ok": True,
        "rows": 0,
        "spaces": {},
        "tokens": {},
        "corpora": [],
        "left_out": [],
        "old": "",
    }
    built(tmp_path.parent / "other", TEXTS)
    assert verify(tmp_path, deep=True).ok


def test_quarantined_rows_are_encoded_again(tmp_path: Path) -> None:
    teacher = BadVectors.options()
    built(tmp_path, ["nan 1", *TEXTS], teacher=teacher)
    path = tmp_path / "cache"
    lose_index(path)
    assert list(reindex(path).spaces.values()) == [20]
    result = built(tmp_path, ["nan 1", *TEXTS], teacher=teacher)
    assert (result.cached, result.encoded, result.quarantined) == (20, 0, 1)


def where(report: ReindexReport) -> list[str]:
    return [left.where for left in report.left_out]


def test_a_converted_space_is_found_in_its_new_encoding(path: Path) -> None:
    convert(path, "float16-raw")
    before = contents(path)
    lose_index(path)
    assert reindex(path).ok
    assert contents(path) == before
    assert verify(path, deep=True).ok


# What cannot be confirmed


def test_a_vector_shard_that_does_not_decode_is_left_out_and_filled_by_a_build(tmp_path: Path, path: Path) -> None:
    before = contents(path)
    flip(vector_shard(path, 1), 40)
    lose_index(path)
    report = reindex(path)
    assert where(report) == [str(vector_shard(path, 1).relative_to(path))]
    assert "does not decode" in report.left_out[0].why
    assert verify(path, deep=True).ok
    assert build(corpus_of(tmp_path, TEXTS), TOY, path, name="corpus").encoded == 8
    assert contents(path).keys() == before.keys()
    assert contents(path)["texts"] == before["texts"]


@pytest.mark.parametrize("storage", sorted(ENCODINGS))
def test_rows_that_are_not_vectors_of_the_space_are_left_out(tmp_path: Path, storage: str) -> None:
    built(tmp_path, TEXTS, storage=storage)
    path = tmp_path / "cache"
    with TeacherCache.open(path) as cache:
        view = cache.space()
        vectors = view.gather(np.arange(8))
        vectors[2, 5] = np.nan
        vectors[4] *= 2
        view.vectors.write_shard(0, view.encoding.store(vectors), np.ones(8, dtype=bool))
    lose_index(path)
    report = reindex(path)
    assert [left.why for left in report.left_out] == ["2 of its rows are not vectors of this space, or have no text"]
    assert list(report.spaces.values()) == [18]
    assert verify(path, deep=True).ok


def test_vectors_without_a_text_are_left_out(path: Path) -> None:
    (path / TEXT_ARRAY / "c/2").unlink()
    (path / KEY_ARRAY / "c/2/0").unlink()
    lose_index(path)
    report = reindex(path)
    assert (report.rows, list(report.spaces.values())) == (16, [16])
    assert where(report)[0] == str(vector_shard(path, 2).relative_to(path))
    assert report.left_out[0].why == "4 of its rows are not vectors of this space, or have no text"


def test_a_space_whose_folder_was_renamed_is_left_out(path: Path) -> None:
    (folder,) = (path / "spaces").iterdir()
    folder.rename(folder.with_name("renamed@12345678"))
    lose_index(path)
    report = reindex(path)
    assert where(report) == ["spaces/renamed@12345678"]
    assert f"it describes {folder.name}" in report.left_out[0].why
    assert report.spaces == {}


def test_a_space_without_space_json_is_left_out(path: Path) -> None:
    (description,) = path.glob("spaces/*/space.json")
    description.write_text("{}")
    lose_index(path)
    report = reindex(path)
    assert where(report) == [str(description.parent.relative_to(path))]
    assert report.spaces == {}


def test_a_space_that_never_held_a_vector_is_not_reported(path: Path) -> None:
    (path / "spaces/never@12345678").mkdir()
    lose_index(path)
    assert reindex(path).ok


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda folder: edit_manifest(folder.parents[1], {3: 4}), "leads to other texts"),
        (lambda folder: edit_manifest(folder.parents[1], {3: 20}), "names rows outside the table of 20"),
        (lambda folder: next(folder.glob("rows-*")).write_bytes(b"garbage"), "cannot be read"),
        (lambda folder: (folder / "corpus.json").unlink(), "No such file"),
        (lambda folder: (folder / "corpus.json").write_text("{}"), "do not match"),
    ],
)
def test_a_manifest_with_another_fingerprint_is_left_out(
    path: Path, damage: Callable[[Path], object], why: str
) -> None:
    damage(path / "corpora/corpus")
    lose_index(path)
    report = reindex(path)
    assert where(report) == ["corpora/corpus"]
    assert why in report.left_out[0].why
    assert report.corpora == []
    assert verify(path, deep=True).ok


def test_corpus_json_is_the_record_of_the_corpus(path: Path) -> None:
    with TeacherCache.open(path) as cache:
        record = cache.corpora()["corpus"]
    assert json.loads((path / "corpora/corpus/corpus.json").read_bytes()) == json.loads(record.to_json())


# Texts


@pytest.mark.parametrize("count", [21, 24, 27])
def test_texts_whose_commit_was_killed_are_indexed_too(tmp_path: Path, path: Path, count: int) -> None:
    program = (
        "from pathlib import Path\n"
        "from tests.teacher_cache.small_caches import built, numbered\n"
        f"built(Path({str(tmp_path)!r}), numbered({count}))"
    )
    assert killed("teacher_cache.storage.index:Index.commit", 1, program) == -signal.SIGKILL
    lose_index(path)
    assert reindex(path).rows in (min(count, 24), count)  # whole shards were written with their keys before the commit
    assert verify(path, deep=True).damage == []
    result = build(corpus_of(tmp_path, numbered(count)), TOY, path, name="corpus")
    assert (result.distinct, result.encoded) == (count, count - 20)
    assert verify(path, deep=True).damage == []


def test_texts_without_keys_are_indexed_and_repair_rewrites_the_keys(path: Path) -> None:
    before = contents(path)
    for number in (1, 2):
        (path / KEY_ARRAY / f"c/{number}/0").unlink()
    lose_index(path)
    report = reindex(path)
    assert where(report) == ["texts/keys/c/2/0", "texts/keys/c/1/0"]
    assert report.rows == 20
    assert repair(path).ok
    assert contents(path) == before
    assert verify(path, deep=True).ok


def lose_text(file: Path) -> None:
    file.unlink()


def flip_text(file: Path) -> None:
    flip(file, 20)


def other_text(file: Path) -> None:
    shutil.copyfile(file.with_name("0" if file.name != "0" else "1"), file)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("damage", [lose_text, flip_text, other_text])
def test_damaged_texts_are_left_out_and_repair_restores_them(
    path: Path, damage: Callable[[Path], None], number: int
) -> None:
    before = contents(path)
    damage(path / TEXT_ARRAY / f"c/{number}")
    lose_index(path)
    report = reindex(path)
    assert where(report) == [f"texts/text/c/{number}"]
    assert report.rows == 20
    assert list(report.spaces.values()) == [20]
    assert report.corpora == ["corpus"]  # `repair` reads the texts from its sources
    assert repair(path).ok
    assert contents(path) == before
    assert verify(path, deep=True).ok


def test_texts_of_which_none_matches_its_key_are_left_out(tmp_path: Path) -> None:
    built(tmp_path, TEXTS[:5])
    path = tmp_path / "cache"
    with TeacherCache.open(path) as cache:
        cache.texts_table.keys.array.write_shard(0, np.ones((5, 16), dtype=np.uint8), np.ones(5, dtype=bool))
    lose_index(path)
    report = reindex(path)
    assert report.rows == 0
    assert where(report)[0] == "texts/text/c/0"
    assert report.left_out[0].why == "5 of its rows have no text whose hash is their key"


def test_rows_after_a_gap_of_texts_and_keys_are_indexed(path: Path) -> None:
    (path / TEXT_ARRAY / "c/1").unlink()
    (path / KEY_ARRAY / "c/1/0").unlink()
    lose_index(path)
    report = reindex(path)
    assert sorted(where(report)) == ["texts/keys/c/1/0", "texts/text/c/1"]
    assert report.rows == 20
    with TeacherCache.open(path) as cache:
        assert cache.lookup(TEXTS).tolist() == [*range(8), *[-1] * 8, *range(16, 20)]
        assert cache.space().present(np.arange(20)).all()


# Kills and other processes

COMMIT, RENAME = "teacher_cache.storage.index:Index.commit", "os:rename"
SYNC_FOLDER = "teacher_cache.maintenance.rebuild:sync_path"


@pytest.mark.parametrize("lost", [True, False])
@pytest.mark.parametrize("moment", [(COMMIT, 1), (COMMIT, 3), (RENAME, 1), (RENAME, 2), (SYNC_FOLDER, 2)])
def test_a_kill_leaves_the_old_or_the_new_index(path: Path, moment: tuple[str, int], lost: bool) -> None:
    before = contents(path)
    if lost:
        lose_index(path)
    code = killed(*moment, f"from teacher_cache.maintenance.rebuild import reindex\nreindex({str(path)!r})")
    assert code == (0 if lost and moment == (RENAME, 2) else -signal.SIGKILL)
    if Index.exists(path / "index.lmdb"):
        assert contents(path) == before
    else:
        assert verify(path).damage[0].kind == "damaged_cache"
    assert reindex(path).ok
    assert contents(path) == before
    assert verify(path, deep=True).ok


def test_reindex_is_refused_beside_a_writer(path: Path) -> None:
    with TeacherCache.open(path, "a"), pytest.raises(CacheLocked):
        reindex(path)
    assert verify(path, deep=True).ok


def test_reindex_is_refused_without_a_cache_of_this_version(tmp_path: Path) -> None:
    with pytest.raises(CacheNotFound):
        reindex(tmp_path)
    (tmp_path / "cache.json").write_text('{"format": 99}')
    with pytest.raises(FormatVersionError):
        reindex(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["cache.json"]


def test_a_corpus_whose_folder_was_renamed_is_left_out(path: Path) -> None:
    (path / "corpora/corpus").rename(path / "corpora/renamed")
    lose_index(path)
    report = reindex(path)
    assert where(report) == ["corpora/renamed"]
    assert "it describes corpus" in report.left_out[0].why


def test_progress_is_reported(path: Path) -> None:
    steps: list[tuple[int, int]] = []
    reindex(path, report=lambda done, total: steps.append((done, total)))
    assert steps[-1] == (6, 6)


def test_text_shards_of_a_killed_build_do_not_mix_with_those_of_the_next(tmp_path: Path) -> None:
    path = tmp_path / "cache"

    def killed() -> None:
        with TeacherCache.open(path, "a", shard_rows=8) as cache, cache.appending() as appender:
            appender.add(numbered(40))  # five shards are written, and none is published
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        killed()
    built(tmp_path, numbered(12, start=30))
    lose_index(path)
    assert reindex(path).rows == 12
    assert verify(path, deep=True).ok


def test_a_lost_index_and_a_lost_cache_json_are_both_restored(tmp_path: Path) -> None:
    built(tmp_path, numbered(20))
    path = tmp_path / "cache"
    lose_index(path)
    (path / "cache.json").unlink()
    assert reindex(path).rows == 20
    assert verify(path, deep=True).ok
