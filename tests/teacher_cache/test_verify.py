"""Each kind of damage is found and reported; an intact cache has none."""

import os
import re
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from teacher_cache.errors import CacheNotFound, DamagedCache, SpaceMismatch, SpaceNotFound
from teacher_cache.maintenance import check
from teacher_cache.maintenance.check import CheckReport, verify
from teacher_cache.maintenance.gc import reclaim
from teacher_cache.maintenance.rebuild import reindex
from teacher_cache.maintenance.repair import repair
from teacher_cache.maintenance.walk import ShardContents
from teacher_cache.storage.codec import ENCODINGS
from teacher_cache.storage.index import Change, Index, ShardRecord, row_value, shard_key
from teacher_cache.storage.manifest import Manifest
from teacher_cache.storage.shard_files import OpenShard
from teacher_cache.storage.shards import ShardedArray
from teacher_cache.storage.texts import KEY_ARRAY, TEXT_ARRAY
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.view import SpaceRecord, SpaceView
from teacher_cache.teachers import Encoded, TeacherOptions
from teacher_cache.text_key import text_key
from teacher_cache.transfer.convert import convert
from tests.teacher_cache.damaged_caches import commit_shard, edit_manifest, flip, vector_shard
from tests.teacher_cache.small_caches import TOY, built, numbered, teacher_vectors
from tests.teacher_cache.toy_variants import Variant

TEXTS = numbered(20)
Change_ = Callable[[TeacherCache], None]


@pytest.fixture(scope="module", params=sorted(ENCODINGS))
def intact(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("intact")
    built(folder, TEXTS, storage=request.param)
    return folder / "cache"


@pytest.fixture
def path(tmp_path: Path, intact: Path) -> Path:
    """A copy of an intact cache, to be damaged."""
    return shutil.copytree(intact, tmp_path / "cache")


def kinds(report: CheckReport) -> set[str]:
    return {damage.kind for damage in report.damage}


def commit_vectors(view: SpaceView, number: int, vectors: np.ndarray) -> None:
    """Write a shard of 8 vectors with a record that matches it, whatever the vectors are."""
    commit_shard(view.column, number, view.encoding.store(vectors), np.ones(8, dtype=bool))


def test_an_intact_cache_has_no_damage(path: Path) -> None:
    for deep in (False, True):
        report = verify(path, deep=deep)
        assert report.to_json() == {
            "ok": True,
            "damage": [],
            "shards": 9,
            "rows": 20,
            "deep": deep,
            "leftovers": [],
            "reencoded": 0,
            "largest_difference": None,
        }


def test_temporary_files_of_interrupted_writes_are_reported_but_no_damage(path: Path) -> None:
    left = vector_shard(path, 1).with_name("0.123.writing")
    left.write_bytes(b"half")
    report = verify(path, deep=True)
    assert report.ok
    assert report.leftovers == [str(left.relative_to(path))]


def test_a_deleted_shard_is_reported_as_missing(path: Path) -> None:
    vector_shard(path, 1).unlink()
    (path / "texts/text/c/2").unlink()
    for deep in (False, True):
        report = verify(path, deep=deep)
        assert not report.ok
        assert [(damage.kind, damage.rows) for damage in report.damage] == [
            ("missing_shard", 4),
            ("missing_shard", 8),
        ]
        assert "texts/text/c/2 is missing" in report.damage[0].where
        assert "vectors.zarr/c/1/0 is missing" in report.damage[1].where


def test_a_truncated_shard_is_damaged(path: Path) -> None:
    file = vector_shard(path, 0)
    file.write_bytes(file.read_bytes()[:-1])
    (damage,) = verify(path).damage
    assert (damage.kind, damage.rows) == ("damaged_shard", 8)
    assert str(file) in damage.where


def test_a_flipped_byte_among_the_values_is_found_by_a_deep_check(path: Path) -> None:
    flip(vector_shard(path, 2), 20)
    assert verify(path).ok
    (damage,) = verify(path, deep=True).damage
    assert damage.kind in ("digest", "damaged_shard")
    assert "vectors.zarr/c/2/0" in damage.where
    assert damage.rows == 4


@pytest.mark.parametrize("array", [TEXT_ARRAY, KEY_ARRAY])
def test_a_flipped_byte_among_texts_or_keys_is_found_by_a_deep_check(path: Path, array: str) -> None:
    flip(path / array / ("c/0" if array == TEXT_ARRAY else "c/0/0"), 20)
    (damage,) = verify(path, deep=True).damage
    assert damage.kind == ("damaged_shard" if array == TEXT_ARRAY else "digest")


def test_swapped_shards_are_found_by_a_deep_check(path: Path) -> None:
    one, other = vector_shard(path, 0), vector_shard(path, 1)
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)
    report = verify(path, deep=True)
    assert [damage.kind for damage in report.damage] == ["digest", "digest"]


@pytest.mark.parametrize("array", ["vectors", TEXT_ARRAY, KEY_ARRAY])
def test_a_build_adds_no_rows_to_a_damaged_shard(tmp_path: Path, path: Path, array: str) -> None:
    files = {
        "vectors": vector_shard(path, 2),
        TEXT_ARRAY: path / TEXT_ARRAY / "c/2",
        KEY_ARRAY: path / KEY_ARRAY / "c/2/0",
    }
    # A valid shard of other rows: only the digest differs.
    shutil.copyfile(
        files[array].with_name("0") if array == TEXT_ARRAY else files[array].parents[1] / "0/0", files[array]
    )
    before = files[array].read_bytes()
    with pytest.raises(DamagedCache, match=r"c/2.* does not hold the values that were written.*verify --deep"):
        built(tmp_path, numbered(22))
    assert files[array].read_bytes() == before
    assert "digest" in kinds(verify(path, deep=True))


def test_a_nan_with_a_matching_digest_is_found_by_a_deep_check(path: Path) -> None:
    with TeacherCache.open(path, "a") as cache:
        values = teacher_vectors(TEXTS[:8])
        values[3, 7] = np.nan
        commit_vectors(cache.space(), 0, values)
    assert verify(path).ok
    (damage,) = verify(path, deep=True).damage
    assert (damage.kind, damage.rows, damage.shard) == ("non_finite", 1, 0)
    assert "c/0/0 holds NaN or infinite numbers, row 3" in damage.where


def test_a_nan_with_another_digest_is_reported_as_both(path: Path) -> None:
    with TeacherCache.open(path) as cache:
        view = cache.space()
        values = teacher_vectors(TEXTS[8:16])
        values[[2, 5], 7] = np.nan
        view.vectors.write_shard(1, view.encoding.store(values), np.ones(8, dtype=bool))
    assert [(damage.kind, damage.rows) for damage in verify(path, deep=True).damage] == [
        ("digest", 8),
        ("non_finite", 2),
    ]


def test_a_wrong_length_with_another_digest_is_reported_as_another_digest_only(path: Path) -> None:
    with TeacherCache.open(path) as cache:
        view = cache.space()
        view.vectors.write_shard(1, view.encoding.store(2 * teacher_vectors(TEXTS[8:16])), np.ones(8, dtype=bool))
    assert [damage.kind for damage in verify(path, deep=True).damage] == ["digest"]


@pytest.mark.parametrize(("length", "fits"), [(1.0005, True), (0.9995, True), (1.1, False), (0.5, False)])
def test_a_vector_of_another_length_in_a_normalized_space_is_found_by_a_deep_check(
    path: Path, length: float, fits: bool
) -> None:
    with TeacherCache.open(path, "a") as cache:
        values = teacher_vectors(TEXTS[:8])
        values[3] *= length
        commit_vectors(cache.space(), 0, values)
    report = verify(path, deep=True)
    assert report.ok == fits
    for damage in report.damage:
        assert (damage.kind, damage.rows) == ("norm", 1)
        assert "c/0/0 holds vectors whose length is not 1, row 3" in damage.where


def test_in_a_space_that_is_not_normalized_only_length_zero_is_damage(tmp_path: Path) -> None:
    built(tmp_path, TEXTS, teacher=TeacherOptions(model="toy", normalize=False))
    path = tmp_path / "cache"
    assert verify(path, deep=True).ok
    with TeacherCache.open(path, "a") as cache:
        values = teacher_vectors(TEXTS[:8]) * 100
        commit_vectors(cache.space(), 0, values)
        assert verify(path, deep=True).ok
        values[4] = 0
        commit_vectors(cache.space(), 0, values)
    (damage,) = verify(path, deep=True).damage
    assert (damage.kind, damage.rows) == ("norm", 1)
    assert "length is not more than 0, row 4" in damage.where


def test_a_recorded_chunk_that_is_not_stored_is_damage(path: Path) -> None:
    with TeacherCache.open(path, "a") as cache:
        view = cache.space()
        record = view.index.shard(view.array_name, 2)
        assert record is not None
        view.vectors.write_shard(2, view.vectors.empty(8), np.zeros(8, dtype=bool))
    (damage,) = verify(path).damage
    assert (damage.kind, damage.rows) == ("damaged_shard", 4)
    assert "recorded chunks are not stored, rows 16 to 23" in damage.where


def many_chunks(folder: Path, storage: str) -> Path:
    """A cache of one shard with 160 rows, 32 in each chunk."""
    TeacherCache.open(folder / "cache", "a", shard_rows=160).close()
    built(folder, numbered(160), storage=storage)
    return folder / "cache"


@pytest.mark.parametrize("storage", ["float16", "int8", "float32"])
def test_the_rows_of_chunks_with_a_bad_checksum_are_listed(tmp_path: Path, storage: str) -> None:
    path = many_chunks(tmp_path, storage)
    file = vector_shard(path, 0)
    with TeacherCache.open(path) as cache:
        entries = cache.space().vectors.open_shard(0).entries
    for chunk in (1, 2, 4):
        flip(file, int(entries[chunk, 0]) + 9)
    (damage,) = verify(path, deep=True).damage
    assert (damage.kind, damage.rows) == ("damaged_shard", 96)
    assert damage.where.endswith("lost: rows 32 to 95, 128 to 159")


def test_all_rows_of_a_shard_with_a_damaged_chunk_index_are_lost(path: Path) -> None:
    flip(vector_shard(path, 1), -6)
    (damage,) = verify(path).damage
    assert (damage.kind, damage.rows) == ("damaged_shard", 8)
    assert "its chunk index does not match; lost: rows 8 to 15" in damage.where


def test_a_file_with_more_rows_than_its_record_is_no_damage(tmp_path: Path, path: Path) -> None:
    with TeacherCache.open(path, "a") as cache:  # a kill between the rename and the commit
        with cache.appending() as appender:
            appender.add(numbered(24))
        view = cache.space()
        before = view.column.record(2)
        view.write(2, np.arange(20, 24), teacher_vectors(numbered(4, start=20)))
        assert before is not None
        cache.index.commit([Change("shards", shard_key(view.array_name, 2), before.pack())])
    for deep in (False, True):
        assert verify(path, deep=deep).damage == []


def test_a_file_of_another_size_is_read_by_a_quick_check_too(path: Path) -> None:
    with TeacherCache.open(path) as cache:  # valid shards that have the recorded rows
        view = cache.space()
        present = np.arange(8) < 4
        view.vectors.write_shard(1, view.encoding.store(teacher_vectors(TEXTS[:8])), np.ones(8, dtype=bool))
        view.vectors.write_shard(2, view.encoding.store(teacher_vectors(TEXTS[:4])), present)
        record = view.column.record(2)
        assert record is not None
        same_size = vector_shard(path, 2).stat().st_size == record.size
    kinds_found = [damage.kind for damage in verify(path).damage]
    with TeacherCache.open(path) as cache:
        record = cache.space().column.record(1)
        assert record is not None
        expected = ["digest"] * ((vector_shard(path, 1).stat().st_size != record.size) + (not same_size))
    assert kinds_found == expected
    assert kinds(verify(path, deep=True)) == {"digest"}


def test_a_key_that_is_not_the_hash_of_its_text_is_found_by_a_deep_check(path: Path) -> None:
    with TeacherCache.open(path, "a") as cache:
        table = cache.texts_table
        texts = np.array(TEXTS[:8], dtype=object)
        texts[2] = "another text"
        commit_shard(table.text, 0, texts, np.ones(8, dtype=bool))
    assert verify(path).ok
    (damage,) = verify(path, deep=True).damage
    assert (damage.kind, damage.rows, damage.array) == ("key", 1, KEY_ARRAY)
    assert damage.where == "shard 0 of the text table: 1 keys are not the hash of their text, row 2"


def test_a_text_indexed_under_another_row_is_found_by_a_deep_check(path: Path) -> None:
    with TeacherCache.open(path, "a") as cache:
        cache.index.commit([Change("keys", text_key(TEXTS[2]), row_value(5))])
    (damage,) = verify(path, deep=True).damage
    assert (damage.kind, damage.rows, damage.array) == ("index", 1, KEY_ARRAY)
    assert "1 keys are indexed under another row or not at all, row 2" in damage.where


def lose_a_key(cache: TeacherCache) -> None:
    cache.index.commit([Change("keys", text_key(TEXTS[2]), None)])


def lose_a_record(cache: TeacherCache) -> None:
    cache.index.commit([Change("shards", shard_key(KEY_ARRAY, 1), None)])


def record_rows_past_the_table(cache: TeacherCache) -> None:
    commit_vectors(cache.space(), 2, teacher_vectors(numbered(8)))


def record_too_few_texts(cache: TeacherCache) -> None:
    record = ShardRecord(bytes(16), 0.0, 0, np.arange(8) < 7)
    cache.index.commit([Change("shards", shard_key(TEXT_ARRAY, 0), record.pack())])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lose_a_key, "the index has 19 text keys for 20 rows"),
        (lose_a_record, "no record of shard 1 of texts/keys"),
        (record_rows_past_the_table, "records rows past the table's 20"),
        (record_too_few_texts, "texts/text/c/0: 7 rows recorded, expected 8"),
    ],
)
def test_different_counts_are_damage(path: Path, change: Change_, message: str) -> None:
    with TeacherCache.open(path, "a") as cache:
        change(cache)
    report = verify(path)
    assert kinds(report) == {"count"}
    assert message in report.damage[0].where


def test_a_deleted_manifest_is_damage(path: Path) -> None:
    (file,) = path.glob("corpora/corpus/rows-*.npy")
    file.unlink()
    (damage,) = verify(path).damage
    assert (damage.kind, damage.rows) == ("corpus", 20)


def test_a_manifest_with_rows_outside_the_table_is_damage(path: Path) -> None:
    edit_manifest(path, {3: 20, 4: -1})
    (damage,) = verify(path).damage
    assert (damage.kind, damage.rows) == ("corpus", 2)


def test_a_manifest_with_another_fingerprint_is_found_by_a_deep_check(path: Path) -> None:
    edit_manifest(path, {3: 4})
    assert verify(path).ok
    (damage,) = verify(path, deep=True).damage
    assert (damage.kind, damage.rows, damage.array) == ("corpus", 20, "corpora/corpus")
    assert "leads to other texts" in damage.where


def test_damaged_texts_are_not_reported_as_damage_of_their_corpus(path: Path) -> None:
    flip(path / TEXT_ARRAY / "c/0", 20)
    assert [damage.array for damage in verify(path, deep=True).damage] == [TEXT_ARRAY]


def test_a_damaged_space_does_not_hide_the_damage_of_another(tmp_path: Path) -> None:
    built(tmp_path, TEXTS)
    built(tmp_path, TEXTS, teacher=TeacherOptions(model="toy", dims=8))
    path = tmp_path / "cache"
    one, other = sorted((path / "spaces").iterdir())
    (one / "vectors.zarr/zarr.json").unlink()
    (other / "vectors.zarr/c/1/0").unlink()
    report = verify(path)
    assert [damage.kind for damage in report.damage] == ["damaged_space", "missing_shard"]
    assert str(one) in report.damage[0].where
    assert report.damage[0].rows == 20


def test_lost_metadata_of_the_texts_are_damage_and_no_crash(path: Path) -> None:
    (path / "texts/text/zarr.json").unlink()
    (damage,) = verify(path).damage
    assert damage.kind == "damaged_cache"


@pytest.mark.parametrize("lost", ["index.lmdb", "index.lmdb/data.mdb"])
def test_a_lost_index_is_damage_and_no_build_creates_an_empty_one(tmp_path: Path, path: Path, lost: str) -> None:
    shutil.move(path / lost, tmp_path / "elsewhere")
    (damage,) = verify(path).damage
    assert damage.kind == "damaged_cache"
    assert "index.lmdb is missing" in damage.where
    with pytest.raises(DamagedCache, match=r"index\.lmdb is missing"):
        built(tmp_path, numbered(1))
    assert not (path / "index.lmdb/data.mdb").exists()


def test_an_index_that_cannot_be_opened_is_damage(path: Path) -> None:
    (path / "index.lmdb/data.mdb").write_bytes(b"garbage" * 1000)
    (damage,) = verify(path).damage
    assert damage.kind == "damaged_cache"
    assert "cannot be opened" in damage.where


def test_a_folder_without_a_cache_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CacheNotFound):
        verify(tmp_path)


def test_a_check_beside_a_writer_finds_no_damage(tmp_path: Path) -> None:
    built(tmp_path, TEXTS)
    done = threading.Event()

    def write() -> None:
        try:
            for start in range(0, 100, 10):
                built(tmp_path, numbered(10 + start % 7, start=100 + start), name="growing")
        finally:
            done.set()

    writer = threading.Thread(target=write)
    writer.start()
    reports = []
    while not done.is_set():
        reports.append(verify(tmp_path / "cache", deep=True))
    writer.join()
    assert len(reports) > 1
    assert [report.damage for report in reports if not report.ok] == []


def test_a_shard_that_is_replaced_during_the_check_is_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built(tmp_path, TEXTS)
    open_shard, opened = ShardedArray.open_shard, []

    def replace_first(array: ShardedArray, number: int) -> OpenShard:
        if array.folder.name == "vectors.zarr" and number == 1:
            opened.append(number)
            if len(opened) == 1:
                with TeacherCache.open(tmp_path / "cache", "r+") as cache:
                    commit_vectors(cache.space(), 1, teacher_vectors(numbered(8)))
        return open_shard(array, number)

    monkeypatch.setattr(ShardedArray, "open_shard", replace_first)
    assert verify(tmp_path / "cache", deep=True).damage == []
    assert len(opened) == 2


def test_a_space_that_is_converted_during_the_check_is_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built(tmp_path, TEXTS)
    arrays = []

    def convert_first(cache: Path, index: Index, record: SpaceRecord) -> SpaceView:
        arrays.append(record.array)
        if len(arrays) == 1:
            convert(cache, "float32")
            reclaim(cache)
        return SpaceView(cache, index, record)

    monkeypatch.setattr(check, "SpaceView", convert_first)
    assert verify(tmp_path / "cache", deep=True).damage == []
    assert arrays == ["vectors.zarr", "vectors-float32.zarr"]


def test_a_corpus_that_is_dropped_during_the_check_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built(tmp_path, TEXTS)
    corpus = TeacherCache.corpus

    def drop_first(cache: TeacherCache, name: str) -> Manifest:
        reclaim(cache.path, corpora=[name])
        return corpus(cache, name)

    monkeypatch.setattr(TeacherCache, "corpus", drop_first)
    assert verify(tmp_path / "cache", deep=True).damage == []


def test_all_rows_are_lost_if_the_damaged_chunks_are_not_known(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(path / TEXT_ARRAY / "c/0", 20)

    def all_read(array: ShardedArray, number: int, wanted: np.ndarray) -> ShardContents:
        return ShardContents(array.empty(array.shard_rows), wanted, None)

    monkeypatch.setattr(check, "read_shard", all_read)
    assert [(damage.kind, damage.rows) for damage in verify(path, deep=True).damage] == [("damaged_shard", 8)]


# With a teacher


def test_every_nth_row_is_encoded_again(path: Path) -> None:
    report = verify(path, teacher=TOY, every=3)
    assert report.ok
    assert report.deep
    assert report.reencoded == 7  # rows 0, 3, ..., 18
    assert report.largest_difference is not None
    assert report.largest_difference <= 1e-4


def test_by_default_about_a_thousand_rows_are_encoded_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert verify(path, teacher=TOY).reencoded == 20
    monkeypatch.setattr("teacher_cache.maintenance.check.REENCODED_ROWS", 4)
    assert verify(path, teacher=TOY).reencoded == 4  # every fifth


def test_rows_that_differ_from_the_teacher_are_listed(path: Path) -> None:
    with TeacherCache.open(path, "a") as cache:  # the digest is right, but the vectors are of other texts
        commit_vectors(cache.space(), 1, teacher_vectors([*TEXTS[8:12], *TEXTS[:4]]))
    assert verify(path, deep=True).ok
    report = verify(path, teacher=TOY, every=1)
    (damage,) = report.damage
    assert (damage.kind, damage.rows, report.reencoded) == ("teacher", 4, 20)
    assert "4 of 20 rows differ" in damage.where
    assert damage.where.endswith("row 12, 13, 14, 15")
    assert report.largest_difference is not None
    assert report.largest_difference > 0.5


def test_nan_from_the_teacher_is_a_difference(tmp_path: Path) -> None:
    built(tmp_path, ["fine", "nan now"], teacher=Fickle.options())
    Fickle.broken = True
    try:
        report = verify(tmp_path / "cache", teacher=Fickle.options())
    finally:
        Fickle.broken = False
    assert [(damage.kind, damage.rows) for damage in report.damage] == [("teacher", 1)]
    assert report.largest_difference == pytest.approx(0, abs=1e-6)


class Fickle(Variant):
    """Returns NaN for some texts once `broken` is set."""

    broken = False

    def encode_counted(self, texts: Sequence[str]) -> Encoded:
        encoded = super().encode_counted(texts)
        if self.broken:
            encoded.vectors[[text.startswith("nan") for text in texts]] = np.nan
        return encoded


def test_the_error_for_another_teacher_names_the_field_that_differs(path: Path) -> None:
    with pytest.raises(SpaceMismatch, match=r"differs in prompt: wanted 'query: ', cached ''"):
        verify(path, teacher=TeacherOptions(model="toy", prompt="query: "))


def test_a_cache_without_a_space_cannot_be_compared_with_a_teacher(tmp_path: Path) -> None:
    TeacherCache.open(tmp_path, "a").close()
    with pytest.raises(SpaceNotFound, match="has no embedding space yet"):
        verify(tmp_path, teacher=TOY)


def test_only_the_space_of_the_teacher_is_compared(tmp_path: Path) -> None:
    built(tmp_path, TEXTS)
    built(tmp_path, TEXTS[:7], teacher=TeacherOptions(model="toy", dims=8))
    assert verify(tmp_path / "cache", teacher=TeacherOptions(model="toy", dims=8), every=1).reencoded == 7


def test_progress_is_reported_after_every_shard(path: Path) -> None:
    steps: list[tuple[int, int]] = []
    report = verify(path, deep=True, report=lambda done, total: steps.append((done, total)))
    assert steps == [(2, 9), (4, 9), (6, 9), (7, 9), (8, 9), (9, 9)]
    assert report.shards == 9


def test_a_truncated_index_is_damage_and_no_crash(tmp_path: Path) -> None:
    built(tmp_path, numbered(3000))
    data = tmp_path / "cache/index.lmdb/data.mdb"
    os.truncate(data, data.stat().st_size // 2)
    (damage,) = verify(tmp_path / "cache").damage
    assert damage.kind == "damaged_cache"
    assert re.search(r"is truncated: \d+ bytes, expected \d+; `tcache reindex`", damage.where)
    assert reindex(tmp_path / "cache").ok
    assert verify(tmp_path / "cache", deep=True).ok


def test_damaged_pages_of_the_index_are_damage_and_no_crash(tmp_path: Path) -> None:
    built(tmp_path, numbered(3000))
    data = tmp_path / "cache/index.lmdb/data.mdb"
    pages = bytearray(data.read_bytes())
    pages[8 * 4096 :] = b"\xff" * (len(pages) - 8 * 4096)
    data.write_bytes(pages)
    assert "damaged_cache" in kinds(verify(tmp_path / "cache", deep=True))
    with pytest.raises(DamagedCache, match="`tcache reindex`"):
        repair(tmp_path / "cache")


def test_rows_of_damaged_shards_are_not_compared_with_the_teacher(path: Path) -> None:
    vector_shard(path, 1).unlink()
    flip(path / TEXT_ARRAY / "c/2", 20)
    report = verify(path, teacher=TOY, every=1)
    assert sorted(damage.kind for damage in report.damage) == ["damaged_shard", "missing_shard"]
    assert report.reencoded == 8  # rows 0 to 7
