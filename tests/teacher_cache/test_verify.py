"""Each kind of damage is found and named; a sound cache has none."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from teacher_cache.cache import TeacherCache
from teacher_cache.errors import CacheNotFound, DamagedCache
from teacher_cache.storage.index import Change, ShardRecord, row_value, shard_key
from teacher_cache.storage.texts import KEYS, TEXT
from teacher_cache.teachers import TeacherOptions
from teacher_cache.text_key import text_key
from teacher_cache.verify import Verdict, verify
from teacher_cache.view import SpaceView
from tests.teacher_cache.small_caches import built, numbered, said

TEXTS = numbered(20)
Change_ = Callable[[TeacherCache], None]


@pytest.fixture(scope="module", params=["float16", "raw"])
def sound(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    built(folder, TEXTS, storage=request.param)
    return folder / "cache"


@pytest.fixture
def path(tmp_path: Path, sound: Path) -> Path:
    """A sound cache to be damaged."""
    return shutil.copytree(sound, tmp_path / "cache")


def kinds(verdict: Verdict) -> set[str]:
    return {damage.kind for damage in verdict.damage}


def vectors(path: Path, shard: int) -> Path:
    (found,) = path.glob(f"spaces/*/vectors.zarr/c/{shard}/0")
    return found


def flip(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 0x20
    file.write_bytes(data)


def publish(view: SpaceView, number: int, values: np.ndarray, present: np.ndarray) -> None:
    """Write a shard with a record that is right for it, whatever the values are."""
    receipt = view.vectors.write_shard(number, values, present)
    record = ShardRecord(receipt.digest, 0.0, receipt.size, present)
    view.index.commit([Change("shards", shard_key(view.array_name, number), record.pack())])


def test_a_sound_cache_has_no_damage(path: Path) -> None:
    for deep in (False, True):
        verdict = verify(path, deep=deep)
        assert verdict.to_json() == {
            "ok": True,
            "damage": [],
            "shards": 9,
            "rows": 20,
            "deep": deep,
            "leftovers": [],
        }


def test_leftovers_of_interrupted_writes_are_named_and_no_damage(path: Path) -> None:
    left = vectors(path, 1).with_name("0.123.writing")
    left.write_bytes(b"half")
    verdict = verify(path, deep=True)
    assert verdict.ok
    assert verdict.leftovers == [str(left.relative_to(path))]


def test_a_lost_shard_is_missing(path: Path) -> None:
    vectors(path, 1).unlink()
    (path / "texts/text/c/2").unlink()
    for deep in (False, True):
        verdict = verify(path, deep=deep)
        assert not verdict.ok
        assert [(damage.kind, damage.rows) for damage in verdict.damage] == [
            ("missing_shard", 4),
            ("missing_shard", 8),
        ]
        assert "texts/text/c/2 is gone" in verdict.damage[0].where
        assert "vectors.zarr/c/1/0 is gone" in verdict.damage[1].where


def test_a_cut_shard_is_damaged(path: Path) -> None:
    file = vectors(path, 0)
    file.write_bytes(file.read_bytes()[:-1])
    (damage,) = verify(path).damage
    assert (damage.kind, damage.rows) == ("damaged_shard", 8)
    assert str(file) in damage.where


def test_a_flipped_byte_among_the_values_is_found_by_a_deep_check(path: Path) -> None:
    flip(vectors(path, 2), 20)
    assert verify(path).ok
    (damage,) = verify(path, deep=True).damage
    assert damage.kind in ("digest", "damaged_shard")
    assert "vectors.zarr/c/2/0" in damage.where
    assert damage.rows == 4


@pytest.mark.parametrize("array", [TEXT, KEYS])
def test_a_flipped_byte_among_texts_or_keys_is_found_by_a_deep_check(path: Path, array: str) -> None:
    flip(path / array / ("c/0" if array == TEXT else "c/0/0"), 20)
    (damage,) = verify(path, deep=True).damage
    assert damage.kind == ("damaged_shard" if array == TEXT else "digest")


def test_swapped_shards_are_found_by_a_deep_check(path: Path) -> None:
    one, other = vectors(path, 0), vectors(path, 1)
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)
    verdict = verify(path, deep=True)
    assert [damage.kind for damage in verdict.damage] == ["digest", "digest"]


@pytest.mark.parametrize("array", ["vectors", TEXT, KEYS])
def test_a_damaged_shard_gains_no_rows_and_stays_found(tmp_path: Path, path: Path, array: str) -> None:
    files = {"vectors": vectors(path, 2), TEXT: path / TEXT / "c/2", KEYS: path / KEYS / "c/2/0"}
    # Whole and with sound checksums, but another's: only the digest can tell.
    shutil.copyfile(files[array].with_name("0") if array == TEXT else files[array].parents[1] / "0/0", files[array])
    before = files[array].read_bytes()
    with pytest.raises(DamagedCache, match=r"c/2.* does not hold the values that were written.*verify --deep"):
        built(tmp_path, numbered(22))
    assert files[array].read_bytes() == before
    assert "digest" in kinds(verify(path, deep=True))


def test_a_nan_that_the_index_vouches_for_is_found_by_a_deep_check(path: Path) -> None:
    with TeacherCache.open(path, "a") as cache:
        values = said(TEXTS[:8]).astype(np.float16)
        values[3, 7] = np.nan
        publish(cache.space(), 0, values, np.ones(8, dtype=bool))
    assert verify(path).ok
    (damage,) = verify(path, deep=True).damage
    assert (damage.kind, damage.rows) == ("non_finite", 1)


def test_a_promised_chunk_that_is_not_stored_is_damage(path: Path) -> None:
    with TeacherCache.open(path, "a") as cache:
        view = cache.space()
        record = view.index.shard(view.array_name, 2)
        assert record is not None
        view.vectors.write_shard(2, np.zeros((8, 32)), np.zeros(8, dtype=bool))
    (damage,) = verify(path).damage
    assert (damage.kind, damage.rows) == ("damaged_shard", 4)
    assert "promised chunks are not stored" in damage.where


def test_a_key_that_is_not_the_hash_of_its_text_is_found_by_a_deep_check(path: Path) -> None:
    with TeacherCache.open(path, "a") as cache:
        table = cache.texts_table
        texts = np.array(TEXTS[:8], dtype=object)
        texts[2] = "another text"
        receipt = table.text.array.write_shard(0, texts, np.ones(8, dtype=bool))
        record = ShardRecord(receipt.digest, 0.0, receipt.size, np.ones(8, dtype=bool))
        cache.index.commit([Change("shards", shard_key(TEXT, 0), record.pack())])
    assert verify(path).ok
    (damage,) = verify(path, deep=True).damage
    assert (damage.kind, damage.rows) == ("key", 1)
    assert "1 keys are not the hash of their text, 0 are indexed under another row" in damage.where


def test_a_text_indexed_under_another_row_is_found_by_a_deep_check(path: Path) -> None:
    with TeacherCache.open(path, "a") as cache:
        cache.index.commit([Change("keys", text_key(TEXTS[2]), row_value(5))])
    (damage,) = verify(path, deep=True).damage
    assert (damage.kind, damage.rows) == ("key", 1)
    assert "0 keys are not the hash of their text, 1 are indexed under another row" in damage.where


def lose_a_key(cache: TeacherCache) -> None:
    cache.index.commit([Change("keys", text_key(TEXTS[2]), None)])


def lose_a_record(cache: TeacherCache) -> None:
    cache.index.commit([Change("shards", shard_key(KEYS, 1), None)])


def promise_rows_beyond_the_table(cache: TeacherCache) -> None:
    publish(cache.space(), 2, said(numbered(8)), np.ones(8, dtype=bool))


def promise_too_few_texts(cache: TeacherCache) -> None:
    record = ShardRecord(bytes(16), 0.0, 0, np.arange(8) < 7)
    cache.index.commit([Change("shards", shard_key(TEXT, 0), record.pack())])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lose_a_key, "the index has 19 text keys for 20 rows"),
        (lose_a_record, "no record of shard 1 of texts/keys"),
        (promise_rows_beyond_the_table, "promises rows past the table's 20"),
        (promise_too_few_texts, "texts/text/c/0: 7 rows recorded, expected 8"),
    ],
)
def test_counts_that_disagree_are_damage(path: Path, change: Change_, message: str) -> None:
    with TeacherCache.open(path, "a") as cache:
        change(cache)
    verdict = verify(path)
    assert kinds(verdict) == {"count"}
    assert message in verdict.damage[0].where


def test_a_lost_row_list_is_damage(path: Path) -> None:
    (file,) = path.glob("corpora/corpus/rows-*.npy")
    file.unlink()
    (damage,) = verify(path).damage
    assert (damage.kind, damage.rows) == ("corpus", 20)


def test_a_row_list_that_names_rows_outside_the_table_is_damage(path: Path) -> None:
    (file,) = path.glob("corpora/corpus/rows-*.npy")
    rows = np.load(file)
    rows[3], rows[4] = 20, -1
    np.save(file, rows)
    (damage,) = verify(path).damage
    assert (damage.kind, damage.rows) == ("corpus", 2)


def test_a_damaged_space_does_not_hide_the_damage_of_another(tmp_path: Path) -> None:
    built(tmp_path, TEXTS)
    built(tmp_path, TEXTS, teacher=TeacherOptions(model="toy", dims=8))
    path = tmp_path / "cache"
    one, other = sorted((path / "spaces").iterdir())
    (one / "vectors.zarr/zarr.json").unlink()
    (other / "vectors.zarr/c/1/0").unlink()
    verdict = verify(path)
    assert [damage.kind for damage in verdict.damage] == ["damaged_space", "missing_shard"]
    assert str(one) in verdict.damage[0].where


def test_a_text_table_without_metadata_is_damage_and_no_crash(path: Path) -> None:
    (path / "texts/text/zarr.json").unlink()
    (damage,) = verify(path).damage
    assert damage.kind == "damaged_cache"


@pytest.mark.parametrize("lost", ["index.lmdb", "index.lmdb/data.mdb"])
def test_a_lost_index_is_damage_and_no_build_makes_an_empty_one(tmp_path: Path, path: Path, lost: str) -> None:
    shutil.move(path / lost, tmp_path / "elsewhere")
    (damage,) = verify(path).damage
    assert damage.kind == "damaged_cache"
    assert "index.lmdb is gone" in damage.where
    with pytest.raises(DamagedCache, match=r"index\.lmdb is gone"):
        built(tmp_path, numbered(1))
    assert not (path / "index.lmdb/data.mdb").exists()


def test_an_index_that_cannot_be_opened_is_damage(path: Path) -> None:
    (path / "index.lmdb/data.mdb").write_bytes(b"garbage" * 1000)
    (damage,) = verify(path).damage
    assert damage.kind == "damaged_cache"
    assert "cannot be opened" in damage.where


def test_no_cache_is_no_verdict(tmp_path: Path) -> None:
    with pytest.raises(CacheNotFound):
        verify(tmp_path)


def test_a_check_beside_a_writer_finds_no_damage(tmp_path: Path) -> None:
    built(tmp_path, TEXTS)
    done = threading.Event()

    def write() -> None:
        try:
            for start in range(0, 200, 10):
                built(tmp_path, numbered(10 + start % 7, start=100 + start), name="growing")
        finally:
            done.set()

    writer = threading.Thread(target=write)
    writer.start()
    verdicts = []
    while not done.is_set():
        verdicts.append(verify(tmp_path / "cache", deep=True))
    writer.join()
    assert len(verdicts) > 1
    assert [verdict.damage for verdict in verdicts if not verdict.ok] == []
