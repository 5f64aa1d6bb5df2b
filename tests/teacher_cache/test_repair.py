"""What a deep check finds is mended where it can be proven, and named where it cannot."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from teacher_cache.building.build import BuildReport, build
from teacher_cache.corpus.corpus import Corpus
from teacher_cache.errors import CacheLocked, CacheNotFound, CorpusError, DamagedCache
from teacher_cache.maintenance.check import verify
from teacher_cache.maintenance.rebuild import reindex
from teacher_cache.maintenance.repair import RepairReport, repair
from teacher_cache.storage.codec import ENCODINGS
from teacher_cache.storage.index import Change, row_value, shard_key
from teacher_cache.storage.texts import KEY_ARRAY, TEXT_ARRAY
from teacher_cache.table.cache import TeacherCache
from teacher_cache.teachers import TeacherOptions
from teacher_cache.text_key import text_key
from tests.teacher_cache.small_caches import TOY, built, corpus_of, numbered, said

TEXTS = numbered(20)


class Sound:
    """A sound cache of 20 texts in shards of 8, to be damaged, and what it holds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "cache"
        self.corpus = folder / "corpus-0.jsonl"
        with TeacherCache.open(self.path) as cache:
            self.vectors = cache.space().gather(np.arange(20))

    def shard(self, number: int) -> Path:
        (found,) = self.path.glob(f"spaces/*/vectors.zarr/c/{number}/0")
        return found

    def text(self, number: int) -> Path:
        return self.path / TEXT_ARRAY / "c" / str(number)

    def keys(self, number: int) -> Path:
        return self.path / KEY_ARRAY / "c" / str(number) / "0"

    def build(self) -> BuildReport:
        return build(Corpus.open(self.corpus), TOY, self.path, name="corpus")

    def assert_as_before(self) -> None:
        assert verify(self.path, deep=True).damage == []
        with TeacherCache.open(self.path) as cache:
            assert cache.lookup(TEXTS).tolist() == list(range(20))
            assert cache.texts(np.arange(20)) == TEXTS
            assert cache.corpus("corpus").rows[:, 0].tolist() == list(range(20))
            np.testing.assert_array_equal(cache.space().gather(np.arange(20)), self.vectors)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a sound cache in a number format; made once."""
    made: dict[str, Path] = {}

    def original(storage: str) -> Path:
        if storage not in made:
            made[storage] = tmp_path_factory.mktemp(storage)
            built(made[storage], TEXTS, storage=storage)
        return made[storage]

    return original


@pytest.fixture(params=["float16"])
def sound(tmp_path: Path, originals: Callable[[str], Path], request: pytest.FixtureRequest) -> Sound:
    original = originals(request.param)
    shutil.copytree(original / "cache", tmp_path / "cache")
    shutil.copyfile(original / "corpus-0.jsonl", tmp_path / "corpus-0.jsonl")
    return Sound(tmp_path)


in_every_format = pytest.mark.parametrize("sound", sorted(ENCODINGS), indirect=True)


def flip(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 0x20
    file.write_bytes(data)


def actions(report: RepairReport) -> list[tuple[str, int]]:
    return [(action.kind, action.rows) for action in report.repaired]


# Vectors


def flipped_byte(sound: Sound) -> None:
    flip(sound.shard(1), 40)


def truncated(sound: Sound) -> None:
    os.truncate(sound.shard(1), sound.shard(1).stat().st_size - 30)


def deleted(sound: Sound) -> None:
    sound.shard(1).unlink()


def swapped(sound: Sound) -> None:
    one, other = sound.shard(0), sound.shard(1)
    one.rename(other.with_name("aside"))
    other.rename(one)
    other.with_name("aside").rename(other)


def injected_nan(sound: Sound) -> None:
    with TeacherCache.open(sound.path) as cache:
        view = cache.space()
        values = sound.vectors[8:16].copy()
        values[3, 5] = np.nan
        view.vectors.write_shard(1, view.encoding.store(values), np.ones(8, dtype=bool))


@in_every_format
@pytest.mark.parametrize(
    ("damage", "shards"),
    [(flipped_byte, [1]), (truncated, [1]), (deleted, [1]), (swapped, [0, 1]), (injected_nan, [1])],
)
def test_a_damaged_shard_is_set_aside_and_its_rows_alone_are_encoded_again(
    sound: Sound, damage: Callable[[Sound], None], shards: list[int]
) -> None:
    places = [sound.shard(shard).relative_to(sound.path) for shard in shards]
    damage(sound)
    damaged = {place: (sound.path / place).read_bytes() for place in places if (sound.path / place).exists()}
    report = repair(sound.path)
    assert report.ok
    assert [action.rows for action in report.repaired] == [8] * len(shards)
    assert report.missing == 8 * len(shards)
    assert {place: (sound.path / "damaged" / place).read_bytes() for place in damaged} == damaged
    assert verify(sound.path, deep=True).ok  # what is left is proven
    with TeacherCache.open(sound.path) as cache:
        gone = ~cache.space().present(np.arange(20))
        assert sorted(set(np.flatnonzero(gone) // 8)) == shards
    result = sound.build()
    assert (result.cached, result.encoded) == (20 - report.missing, report.missing)
    sound.assert_as_before()


def test_what_is_set_aside_twice_is_kept_twice(sound: Sound) -> None:
    for _ in range(2):
        flipped_byte(sound)
        assert repair(sound.path).ok
        sound.build()
    kept = sorted(file.name for file in (sound.path / "damaged").rglob("*") if file.is_file())
    assert kept == ["0", "0.1"]
    sound.assert_as_before()


@in_every_format
def test_a_vector_too_many_is_forgotten(sound: Sound) -> None:
    with TeacherCache.open(sound.path, "a") as cache:
        view = cache.space()
        view.write(2, np.arange(20, 22), said(["no", "row"]))
    assert [damage.kind for damage in verify(sound.path).damage] == ["count"]
    report = repair(sound.path)
    assert (actions(report), report.missing) == ([("count", 6)], 6)
    assert sound.build().encoded == 4
    sound.assert_as_before()


@in_every_format
def test_a_sound_cache_is_left_as_it_is(sound: Sound) -> None:
    before = {file: file.read_bytes() for file in sound.path.rglob("*") if file.is_file() and "lmdb" not in str(file)}
    report = repair(sound.path)
    assert report.to_json() == {"ok": True, "repaired": [], "unrepaired": [], "missing": 0}
    after = {file: file.read_bytes() for file in sound.path.rglob("*") if file.is_file() and "lmdb" not in str(file)}
    assert after == before


def test_only_the_damaged_space_loses_rows(tmp_path: Path) -> None:
    built(tmp_path, TEXTS)
    built(tmp_path, TEXTS, teacher=TeacherOptions(model="toy", dims=8))
    small, large = (TeacherCache.open(tmp_path / "cache").space({"dims": dims}) for dims in (8, 32))
    flip(small.vectors.shard_path(0), 40)
    assert repair(tmp_path / "cache").missing == 8
    with TeacherCache.open(tmp_path / "cache") as cache:
        assert cache.space(small.slug).present_count() == 12
        assert cache.space(large.slug).present_count() == 20


# Keys


def other_keys(sound: Sound) -> None:
    shutil.copyfile(sound.keys(0), sound.keys(1))


def flipped_key(sound: Sound) -> None:
    flip(sound.keys(1), 20)


def deleted_keys(sound: Sound) -> None:
    sound.keys(1).unlink()


def lost_record_of_keys(sound: Sound) -> None:
    with TeacherCache.open(sound.path, "a") as cache:
        cache.index.commit([Change("shards", shard_key(KEY_ARRAY, 1), None)])


def keys_that_the_index_vouches_for(sound: Sound) -> None:
    with TeacherCache.open(sound.path, "a") as cache:
        column = cache.texts_table.keys
        keys = cache.texts_table.read_keys(np.arange(8, 16)).copy()
        keys[2] ^= 1
        record = column.record(1)
        assert record is not None
        receipt = column.array.write_shard(1, keys, record.present)
        changed = type(record)(receipt.digest, 0.0, receipt.size, record.present)
        cache.index.commit([Change("shards", shard_key(KEY_ARRAY, 1), changed.pack())])


@pytest.mark.parametrize(
    "damage", [other_keys, flipped_key, deleted_keys, lost_record_of_keys, keys_that_the_index_vouches_for]
)
def test_keys_are_made_again_from_the_texts(sound: Sound, damage: Callable[[Sound], None]) -> None:
    damage(sound)
    sound.corpus.unlink()
    assert not verify(sound.path, deep=True).ok
    report = repair(sound.path)
    assert report.ok
    assert report.missing == 0
    assert {action.action for action in report.repaired} <= {
        "rewritten: texts/keys/c/1/0, every text confirmed by its key",
        "rewritten: texts/text/c/1 and texts/keys/c/1/0, every text confirmed by its key",
    }
    sound.assert_as_before()


# Texts


def flipped_text(sound: Sound) -> None:
    flip(sound.text(1), 20)


def deleted_text(sound: Sound) -> None:
    sound.text(1).unlink()


def other_texts(sound: Sound) -> None:
    shutil.copyfile(sound.text(0), sound.text(1))


def both_gone(sound: Sound) -> None:
    sound.text(1).unlink()
    sound.keys(1).unlink()


LOST = [flipped_text, deleted_text, other_texts, both_gone]


@pytest.mark.parametrize("damage", LOST)
def test_lost_texts_are_read_again_from_where_the_corpus_came_from(
    sound: Sound, damage: Callable[[Sound], None]
) -> None:
    with TeacherCache.open(sound.path, "a") as cache:  # the copy of the cache was built beside another copy
        record = cache.corpora()["corpus"]
        sources = (type(record.sources[0])(str(sound.corpus), 0, 20),)
        cache.index.commit(
            [Change("corpora", b"corpus", type(record)(**{**vars(record), "sources": sources}).to_json())]
        )
    damage(sound)
    report = repair(sound.path)
    assert report.unrepaired == []
    assert report.repaired != []
    sound.assert_as_before()


@pytest.mark.parametrize("damage", LOST)
def test_lost_texts_are_read_again_from_files_that_are_named(sound: Sound, damage: Callable[[Sound], None]) -> None:
    damage(sound)
    lines = [json.dumps({"sentence": text}) for text in ["unknown", *reversed(TEXTS)]]
    (sound.folder / "again.jsonl").write_text("\n".join(lines))
    report = repair(sound.path, Corpus.open(sound.folder / "again.jsonl", "sentence"))
    assert report.unrepaired == []
    sound.assert_as_before()


def without_sources(sound: Sound) -> None:
    """As if the corpus files had gone: the copied cache names files beside the original."""
    with TeacherCache.open(sound.path, "a") as cache:
        record = cache.corpora()["corpus"]
        sources = (type(record.sources[0])(str(sound.folder / "gone.jsonl"), 0, 20),)
        cache.index.commit(
            [Change("corpora", b"corpus", type(record)(**{**vars(record), "sources": sources}).to_json())]
        )


@pytest.mark.parametrize(("damage", "lost"), [(flipped_text, 8), (deleted_text, 8), (other_texts, 8), (both_gone, 8)])
def test_texts_that_are_nowhere_to_be_found_are_named_and_nothing_changes(
    sound: Sound, damage: Callable[[Sound], None], lost: int
) -> None:
    without_sources(sound)
    damage(sound)
    before = verify(sound.path, deep=True)
    report = repair(sound.path)
    assert not report.ok
    assert [action.rows for action in report.unrepaired] == [lost]
    assert f"{lost} texts are lost and nothing was changed" in report.unrepaired[0].action
    assert f"`tcache repair {sound.path} --corpus FILE` restores them" in report.unrepaired[0].action
    assert "gone.jsonl does not exist any more" in report.unrepaired[0].action
    assert verify(sound.path, deep=True) == before
    assert not (sound.path / "damaged").exists()


def test_texts_whose_record_is_wrong_are_proven_by_their_keys(sound: Sound) -> None:
    without_sources(sound)
    with TeacherCache.open(sound.path, "a") as cache:
        cache.index.commit([Change("shards", shard_key(TEXT_ARRAY, 1), None)])
    assert repair(sound.path).ok
    sound.assert_as_before()


def test_a_text_that_is_not_that_of_its_key_is_replaced(sound: Sound) -> None:
    with TeacherCache.open(sound.path, "a") as cache:
        column = cache.texts_table.text
        texts = np.array(TEXTS[8:16], dtype=object)
        texts[3] = "another text"
        record = column.record(1)
        assert record is not None
        receipt = column.array.write_shard(1, texts, record.present)
        changed = type(record)(receipt.digest, 0.0, receipt.size, record.present)
        cache.index.commit([Change("shards", shard_key(TEXT_ARRAY, 1), changed.pack())])
    assert [damage.kind for damage in verify(sound.path, deep=True).damage] == ["key"]
    without_sources(sound)
    assert [action.rows for action in repair(sound.path).unrepaired] == [1]
    assert repair(sound.path, Corpus.open(sound.corpus)).ok
    sound.assert_as_before()


def test_a_text_that_the_index_has_under_another_row_is_told_though_its_keys_are_mended(sound: Sound) -> None:
    flipped_key(sound)
    with TeacherCache.open(sound.path, "a") as cache:
        cache.index.commit([Change("keys", text_key(TEXTS[9]), row_value(5))])
    report = repair(sound.path)
    assert actions(report) == [("digest", 8)]
    assert [(action.kind, action.rows) for action in report.unrepaired] == [("index", 1)]


@pytest.mark.parametrize("change", ["lost", "moved", "rows"])
def test_an_index_that_is_wrong_about_texts_is_left_to_reindex(sound: Sound, change: str) -> None:
    with TeacherCache.open(sound.path, "a") as cache:
        cache.index.commit(
            [
                {
                    "lost": Change("keys", text_key(TEXTS[2]), None),
                    "moved": Change("keys", text_key(TEXTS[2]), row_value(5)),
                    "rows": Change("meta", b"rows", row_value(18)),
                }[change]
            ]
        )
    files = {file: file.read_bytes() for file in (sound.path / "texts").rglob("*") if file.is_file()}
    report = repair(sound.path)
    assert not report.ok
    assert all("`tcache reindex`" in action.action for action in report.unrepaired)
    assert {file: file.read_bytes() for file in (sound.path / "texts").rglob("*") if file.is_file()} == files


# Corpora


def lost_list(sound: Sound) -> None:
    (file,) = sound.path.glob("corpora/corpus/rows-*.npy")
    file.unlink()


def changed_list(sound: Sound) -> None:
    (file,) = sound.path.glob("corpora/corpus/rows-*.npy")
    rows = np.load(file)
    rows[3] = 4
    np.save(file, rows)


def list_of_garbage(sound: Sound) -> None:
    (file,) = sound.path.glob("corpora/corpus/rows-*.npy")
    file.write_bytes(b"garbage")


@pytest.mark.parametrize("damage", [lost_list, changed_list, list_of_garbage])
def test_a_row_list_is_made_again_from_its_texts(sound: Sound, damage: Callable[[Sound], None]) -> None:
    without_sources(sound)
    damage(sound)
    report = repair(sound.path, Corpus.open(sound.corpus))
    assert report.unrepaired == []
    assert actions(report) == [("corpus", 20)]
    sound.assert_as_before()


@pytest.mark.parametrize("texts", [TEXTS[:19], [*TEXTS, "new"], TEXTS[::-1], [(text, text) for text in TEXTS]])
def test_other_texts_make_no_row_list(sound: Sound, texts: list[str]) -> None:
    without_sources(sound)
    lost_list(sound)
    report = repair(sound.path, corpus_of(sound.folder, texts))
    (left,) = report.unrepaired
    assert (left.kind, left.rows) == ("corpus", 20)
    assert f"`tcache build {sound.folder / 'gone.jsonl'} --text-key text --teacher T --name corpus" in left.action
    assert list((sound.path / "corpora/corpus").glob("rows*")) == []


def test_texts_and_row_list_are_mended_in_one_go(sound: Sound) -> None:
    without_sources(sound)
    flipped_text(sound)
    changed_list(sound)
    assert repair(sound.path, Corpus.open(sound.corpus)).ok
    sound.assert_as_before()


def test_a_corpus_that_cannot_be_read_is_named(sound: Sound) -> None:
    deleted_text(sound)
    without_sources(sound)
    (sound.folder / "broken.jsonl").write_text("{")
    with pytest.raises(CorpusError, match=r"broken\.jsonl:1"):
        repair(sound.path, Corpus.open(sound.folder / "broken.jsonl"))


# Metadata


@in_every_format
@pytest.mark.parametrize("content", [None, "", "{}"])
def test_lost_metadata_are_written_anew(sound: Sound, content: str | None) -> None:
    lost = [
        sound.path / "cache.json",
        sound.path / TEXT_ARRAY / "zarr.json",
        sound.path / KEY_ARRAY / "zarr.json",
        sound.shard(0).parents[2] / "zarr.json",
    ]
    before = [json.loads(file.read_bytes()) for file in lost]
    for file in lost:
        file.unlink()
        if content is not None:
            file.write_text(content)
    report = repair(sound.path)
    assert report.unrepaired == []
    assert [action.kind for action in report.repaired] == ["damaged_cache"] * 3 + ["damaged_space"]
    after = [json.loads(file.read_bytes()) for file in lost]
    assert after[1:] == before[1:]
    assert before[0].items() - after[0].items() <= {("id", before[0]["id"])}
    sound.assert_as_before()


def test_metadata_that_no_shard_proves_are_not_written(sound: Sound) -> None:
    folder = sound.shard(0).parents[2]
    for number in range(3):
        flip(sound.shard(number), 40)
    (folder / "zarr.json").unlink()
    report = repair(sound.path)
    (left,) = report.unrepaired
    assert left.kind == "damaged_space"
    assert not (folder / "zarr.json").exists()
    assert len(list(folder.glob("c/*/0"))) == 3


def test_a_cache_that_has_lost_its_description_is_not_built_over(sound: Sound) -> None:
    (sound.path / "cache.json").unlink()
    for use in (lambda: sound.build(), lambda: TeacherCache.open(sound.path)):
        with pytest.raises(DamagedCache, match=r"cache\.json is missing: `tcache repair"):
            use()
    assert repair(sound.path).ok
    sound.assert_as_before()


# What cannot be repaired at all


def test_a_lost_index_is_left_to_reindex(sound: Sound) -> None:
    shutil.rmtree(sound.path / "index.lmdb")
    with pytest.raises(DamagedCache, match=r"`tcache reindex .*` rebuilds it"):
        repair(sound.path)


def test_a_folder_that_is_no_cache_is_not_made_one(tmp_path: Path) -> None:
    with pytest.raises(CacheNotFound):
        repair(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_nothing_is_repaired_beside_a_writer(sound: Sound) -> None:
    with TeacherCache.open(sound.path, "a"), pytest.raises(CacheLocked):
        repair(sound.path)


def test_a_space_that_has_lost_its_whole_array_is_empty_again_and_filled_by_a_build(tmp_path: Path) -> None:
    built(tmp_path, numbered(20))
    path = tmp_path / "cache"
    (array,) = path.glob("spaces/*/vectors.zarr")
    shutil.rmtree(array)
    assert repair(path).missing == 20
    assert verify(path, deep=True).ok
    assert built(tmp_path, numbered(20)).encoded == 20
    assert verify(path, deep=True).ok


def test_an_array_whose_metadata_are_no_json_is_damage_that_names_its_mending(tmp_path: Path) -> None:
    built(tmp_path, numbered(20))
    path = tmp_path / "cache"
    (path / "texts/keys/zarr.json").write_text("{")
    (damage,) = verify(path).damage
    assert damage.kind == "damaged_cache"
    assert "zarr.json cannot be read" in damage.where
    assert "`tcache repair` writes it again" in damage.where
    assert repair(path).ok
    assert verify(path, deep=True).ok


@pytest.mark.parametrize("spoiled", [None, b"", b"[1]"])
def test_what_a_lost_index_is_made_from_is_checked_and_written_again(tmp_path: Path, spoiled: bytes | None) -> None:
    built(tmp_path, numbered(20))
    path = tmp_path / "cache"
    described = [*path.glob("spaces/*/space.json"), *path.glob("corpora/*/corpus.json")]
    assert len(described) == 2
    for file in described:
        file.unlink()
        if spoiled is not None:
            file.write_bytes(spoiled)
    assert sorted(damage.kind for damage in verify(path).damage) == ["corpus", "damaged_space"]
    report = repair(path)
    assert (report.ok, len(report.repaired), report.missing) == (True, 2, 0)
    shutil.rmtree(path / "index.lmdb")
    assert reindex(path).ok
    assert verify(path, deep=True).ok
