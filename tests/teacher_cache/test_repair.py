"""Repairs fix what can be confirmed, and report the rest."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
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
from tests.teacher_cache.damaged_caches import commit_shard, edit_manifest, flip, lose_index, vector_shard
from tests.teacher_cache.small_caches import TOY, built, corpus_of, numbered, teacher_vectors

TEXTS = numbered(20)


class Intact:
    """An intact cache of 20 texts in shards of 8, to be damaged, and its contents."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "cache"
        self.corpus = folder / "corpus-0.jsonl"
        with TeacherCache.open(self.path) as cache:
            self.vectors = cache.space().gather(np.arange(20))

    def shard(self, number: int) -> Path:
        return vector_shard(self.path, number)

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
    """The folder of an intact cache in an encoding; built once."""
    made: dict[str, Path] = {}

    def original(storage: str) -> Path:
        if storage not in made:
            made[storage] = tmp_path_factory.mktemp(storage)
            built(made[storage], TEXTS, storage=storage)
        return made[storage]

    return original


@pytest.fixture(params=["float16"])
def intact(tmp_path: Path, originals: Callable[[str], Path], request: pytest.FixtureRequest) -> Intact:
    original = originals(request.param)
    shutil.copytree(original / "cache", tmp_path / "cache")
    shutil.copyfile(original / "corpus-0.jsonl", tmp_path / "corpus-0.jsonl")
    return Intact(tmp_path)


in_every_format = pytest.mark.parametrize("intact", sorted(ENCODINGS), indirect=True)


def actions(report: RepairReport) -> list[tuple[str, int]]:
    return [(action.kind, action.rows) for action in report.repaired]


# Vectors


def flipped_byte(intact: Intact) -> None:
    flip(intact.shard(1), 40)


def truncated(intact: Intact) -> None:
    os.truncate(intact.shard(1), intact.shard(1).stat().st_size - 30)


def deleted(intact: Intact) -> None:
    intact.shard(1).unlink()


def swapped(intact: Intact) -> None:
    one, other = intact.shard(0), intact.shard(1)
    one.rename(other.with_name("aside"))
    other.rename(one)
    other.with_name("aside").rename(other)


def injected_nan(intact: Intact) -> None:
    with TeacherCache.open(intact.path) as cache:
        view = cache.space()
        values = intact.vectors[8:16].copy()
        values[3, 5] = np.nan
        view.vectors.write_shard(1, view.encoding.store(values), np.ones(8, dtype=bool))


@in_every_format
@pytest.mark.parametrize(
    ("damage", "shards"),
    [(flipped_byte, [1]), (truncated, [1]), (deleted, [1]), (swapped, [0, 1]), (injected_nan, [1])],
)
def test_a_damaged_shard_is_moved_and_only_its_rows_are_encoded_again(
    intact: Intact, damage: Callable[[Intact], None], shards: list[int]
) -> None:
    places = [intact.shard(shard).relative_to(intact.path) for shard in shards]
    damage(intact)
    damaged = {place: (intact.path / place).read_bytes() for place in places if (intact.path / place).exists()}
    report = repair(intact.path)
    assert report.ok
    assert [action.rows for action in report.repaired] == [8] * len(shards)
    assert report.missing == 8 * len(shards)
    assert {place: (intact.path / "damaged" / place).read_bytes() for place in damaged} == damaged
    assert verify(intact.path, deep=True).ok  # the digests of the remaining shards are right
    with TeacherCache.open(intact.path) as cache:
        gone = ~cache.space().present(np.arange(20))
        assert sorted(set(np.flatnonzero(gone) // 8)) == shards
    result = intact.build()
    assert (result.cached, result.encoded) == (20 - report.missing, report.missing)
    intact.assert_as_before()


def test_a_shard_that_is_damaged_twice_is_kept_twice(intact: Intact) -> None:
    for _ in range(2):
        flipped_byte(intact)
        assert repair(intact.path).ok
        intact.build()
    kept = sorted(file.name for file in (intact.path / "damaged").rglob("*") if file.is_file())
    assert kept == ["0", "0.1"]
    intact.assert_as_before()


@in_every_format
def test_a_shard_with_a_vector_past_the_table_is_dropped(intact: Intact) -> None:
    with TeacherCache.open(intact.path, "a") as cache:
        view = cache.space()
        view.write(2, np.arange(20, 22), teacher_vectors(["no", "row"]))
    assert [damage.kind for damage in verify(intact.path).damage] == ["count"]
    report = repair(intact.path)
    assert (actions(report), report.missing) == ([("count", 6)], 6)
    assert intact.build().encoded == 4
    intact.assert_as_before()


@in_every_format
def test_an_intact_cache_is_not_changed(intact: Intact) -> None:
    before = {file: file.read_bytes() for file in intact.path.rglob("*") if file.is_file() and "lmdb" not in str(file)}
    report = repair(intact.path)
    assert report.to_json() == {"ok": True, "repaired": [], "unrepaired": [], "missing": 0}
    after = {file: file.read_bytes() for file in intact.path.rglob("*") if file.is_file() and "lmdb" not in str(file)}
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


def test_vectors_of_another_length_stay_if_their_digest_is_right(intact: Intact) -> None:
    with TeacherCache.open(intact.path, "a") as cache:
        view = cache.space()
        commit_shard(view.column, 1, view.encoding.store(2 * intact.vectors[8:16]), np.ones(8, dtype=bool))
    before = intact.shard(1).read_bytes()
    report = repair(intact.path)
    assert [(action.kind, action.rows) for action in report.unrepaired] == [("norm", 8)]
    assert "`tcache verify --teacher T`" in report.unrepaired[0].action
    assert (report.repaired, report.missing) == ([], 0)
    assert intact.shard(1).read_bytes() == before


# Keys


def other_keys(intact: Intact) -> None:
    shutil.copyfile(intact.keys(0), intact.keys(1))


def flipped_key(intact: Intact) -> None:
    flip(intact.keys(1), 20)


def deleted_keys(intact: Intact) -> None:
    intact.keys(1).unlink()


def lost_record_of_keys(intact: Intact) -> None:
    with TeacherCache.open(intact.path, "a") as cache:
        cache.index.commit([Change("shards", shard_key(KEY_ARRAY, 1), None)])


def other_keys_with_a_matching_digest(intact: Intact) -> None:
    with TeacherCache.open(intact.path, "a") as cache:
        column = cache.texts_table.keys
        keys = cache.texts_table.read_keys(np.arange(8, 16)).copy()
        keys[2] ^= 1
        commit_shard(column, 1, keys, np.ones(8, dtype=bool))


@pytest.mark.parametrize(
    "damage", [other_keys, flipped_key, deleted_keys, lost_record_of_keys, other_keys_with_a_matching_digest]
)
def test_keys_are_rewritten_from_the_texts(intact: Intact, damage: Callable[[Intact], None]) -> None:
    damage(intact)
    intact.corpus.unlink()
    assert not verify(intact.path, deep=True).ok
    report = repair(intact.path)
    assert report.ok
    assert report.missing == 0
    assert {action.action for action in report.repaired} <= {
        "rewritten: texts/keys/c/1/0, every text confirmed by its key",
        "rewritten: texts/text/c/1 and texts/keys/c/1/0, every text confirmed by its key",
    }
    intact.assert_as_before()


# Texts


def flipped_text(intact: Intact) -> None:
    flip(intact.text(1), 20)


def deleted_text(intact: Intact) -> None:
    intact.text(1).unlink()


def other_texts(intact: Intact) -> None:
    shutil.copyfile(intact.text(0), intact.text(1))


def both_gone(intact: Intact) -> None:
    intact.text(1).unlink()
    intact.keys(1).unlink()


LOST = [flipped_text, deleted_text, other_texts, both_gone]


def set_source(intact: Intact, file: Path) -> None:
    """Change the file that the corpus came from in its record: the copy still names that of the original."""
    with TeacherCache.open(intact.path, "a") as cache:
        record = cache.corpora()["corpus"]
        changed = replace(record, sources=(replace(record.sources[0], name=str(file)),))
        cache.index.commit([Change("corpora", b"corpus", changed.to_json())])


@pytest.mark.parametrize("damage", LOST)
def test_lost_texts_are_read_again_from_the_sources_of_the_corpus(
    intact: Intact, damage: Callable[[Intact], None]
) -> None:
    set_source(intact, intact.corpus)
    damage(intact)
    report = repair(intact.path)
    assert report.unrepaired == []
    assert report.repaired != []
    intact.assert_as_before()


@pytest.mark.parametrize("damage", LOST)
def test_lost_texts_are_read_again_from_the_given_files(intact: Intact, damage: Callable[[Intact], None]) -> None:
    damage(intact)
    lines = [json.dumps({"sentence": text}) for text in ["unknown", *reversed(TEXTS)]]
    (intact.folder / "again.jsonl").write_text("\n".join(lines))
    report = repair(intact.path, Corpus.open(intact.folder / "again.jsonl", "sentence"))
    assert report.unrepaired == []
    intact.assert_as_before()


def without_sources(intact: Intact) -> None:
    """Make the corpus come from a file that does not exist."""
    set_source(intact, intact.folder / "gone.jsonl")


@pytest.mark.parametrize(("damage", "lost"), [(flipped_text, 8), (deleted_text, 8), (other_texts, 8), (both_gone, 8)])
def test_texts_that_no_file_has_are_reported_and_nothing_changes(
    intact: Intact, damage: Callable[[Intact], None], lost: int
) -> None:
    without_sources(intact)
    damage(intact)
    before = verify(intact.path, deep=True)
    report = repair(intact.path)
    assert not report.ok
    assert [action.rows for action in report.unrepaired] == [lost]
    assert f"{lost} texts are lost and nothing was changed" in report.unrepaired[0].action
    assert f"`tcache repair {intact.path} --corpus FILE` restores them" in report.unrepaired[0].action
    assert "gone.jsonl does not exist any more" in report.unrepaired[0].action
    assert verify(intact.path, deep=True) == before
    assert not (intact.path / "damaged").exists()


def test_texts_without_a_record_are_confirmed_by_their_keys(intact: Intact) -> None:
    without_sources(intact)
    with TeacherCache.open(intact.path, "a") as cache:
        cache.index.commit([Change("shards", shard_key(TEXT_ARRAY, 1), None)])
    assert repair(intact.path).ok
    intact.assert_as_before()


def test_texts_that_the_index_lacks_are_confirmed_by_their_keys(intact: Intact) -> None:
    without_sources(intact)
    with TeacherCache.open(intact.path, "a") as cache:
        lost = [Change("shards", shard_key(TEXT_ARRAY, 1), None), Change("keys", text_key(TEXTS[9]), None)]
        cache.index.commit(lost)
    report = repair(intact.path)
    assert {action.kind for action in report.unrepaired} == {"count", "index"}
    assert all("`tcache reindex`" in action.action for action in report.unrepaired)
    with TeacherCache.open(intact.path) as cache:
        assert cache.texts(np.arange(20)) == TEXTS


def test_texts_with_a_row_past_the_table_are_not_restored(intact: Intact) -> None:
    intact.text(2).unlink()
    with TeacherCache.open(intact.path, "a") as cache:
        cache.index.commit([Change("keys", text_key("extra"), row_value(22))])
    report = repair(intact.path, corpus_of(intact.folder, [*TEXTS, "extra"]))
    assert [action.kind for action in report.repaired] == ["missing_shard"]
    with TeacherCache.open(intact.path) as cache:
        assert cache.texts(np.arange(20)) == TEXTS


def test_a_text_whose_hash_is_not_its_key_is_replaced(intact: Intact) -> None:
    with TeacherCache.open(intact.path, "a") as cache:
        texts = np.array(TEXTS[8:16], dtype=object)
        texts[3] = "another text"
        commit_shard(cache.texts_table.text, 1, texts, np.ones(8, dtype=bool))
    assert [damage.kind for damage in verify(intact.path, deep=True).damage] == ["key"]
    without_sources(intact)
    assert [action.rows for action in repair(intact.path).unrepaired] == [1]
    assert repair(intact.path, Corpus.open(intact.corpus)).ok
    intact.assert_as_before()


def test_a_text_indexed_under_another_row_is_reported_after_its_keys_are_repaired(intact: Intact) -> None:
    flipped_key(intact)
    with TeacherCache.open(intact.path, "a") as cache:
        cache.index.commit([Change("keys", text_key(TEXTS[9]), row_value(5))])
    report = repair(intact.path)
    assert actions(report) == [("digest", 8)]
    assert [(action.kind, action.rows) for action in report.unrepaired] == [("index", 1)]


@pytest.mark.parametrize("change", ["lost", "moved", "rows"])
def test_an_index_that_is_wrong_about_texts_is_left_to_reindex(intact: Intact, change: str) -> None:
    with TeacherCache.open(intact.path, "a") as cache:
        cache.index.commit(
            [
                {
                    "lost": Change("keys", text_key(TEXTS[2]), None),
                    "moved": Change("keys", text_key(TEXTS[2]), row_value(5)),
                    "rows": Change("meta", b"rows", row_value(18)),
                }[change]
            ]
        )
    files = {file: file.read_bytes() for file in (intact.path / "texts").rglob("*") if file.is_file()}
    report = repair(intact.path)
    assert not report.ok
    assert all("`tcache reindex`" in action.action for action in report.unrepaired)
    assert {file: file.read_bytes() for file in (intact.path / "texts").rglob("*") if file.is_file()} == files


# Corpora


def deleted_manifest(intact: Intact) -> None:
    (file,) = intact.path.glob("corpora/corpus/rows-*.npy")
    file.unlink()


def changed_manifest(intact: Intact) -> None:
    edit_manifest(intact.path, {3: 4})


def manifest_of_garbage(intact: Intact) -> None:
    (file,) = intact.path.glob("corpora/corpus/rows-*.npy")
    file.write_bytes(b"garbage")


@pytest.mark.parametrize("damage", [deleted_manifest, changed_manifest, manifest_of_garbage])
def test_a_manifest_is_rewritten_from_its_texts(intact: Intact, damage: Callable[[Intact], None]) -> None:
    without_sources(intact)
    damage(intact)
    report = repair(intact.path, Corpus.open(intact.corpus))
    assert report.unrepaired == []
    assert actions(report) == [("corpus", 20)]
    intact.assert_as_before()


@pytest.mark.parametrize("texts", [TEXTS[:19], [*TEXTS, "new"], TEXTS[::-1], [(text, text) for text in TEXTS]])
def test_a_manifest_is_not_rewritten_from_other_texts(intact: Intact, texts: list[str]) -> None:
    without_sources(intact)
    deleted_manifest(intact)
    report = repair(intact.path, corpus_of(intact.folder, texts))
    (left,) = report.unrepaired
    assert (left.kind, left.rows) == ("corpus", 20)
    assert f"`tcache build {intact.folder / 'gone.jsonl'} --text-key text --teacher T --name corpus" in left.action
    assert list((intact.path / "corpora/corpus").glob("rows*")) == []


def test_a_manifest_is_not_rewritten_from_texts_that_the_index_lacks(intact: Intact) -> None:
    deleted_manifest(intact)
    with TeacherCache.open(intact.path, "a") as cache:
        cache.index.commit([Change("keys", text_key(TEXTS[2]), None)])
    report = repair(intact.path, Corpus.open(intact.corpus))
    assert "corpus" in [action.kind for action in report.unrepaired]
    assert list((intact.path / "corpora/corpus").glob("rows*")) == []


def test_texts_keys_and_manifest_are_repaired_together_and_the_damaged_files_are_kept(intact: Intact) -> None:
    without_sources(intact)
    flipped_text(intact)
    flipped_key(intact)
    changed_manifest(intact)
    damaged = [intact.text(1), intact.keys(1), *intact.path.glob("corpora/corpus/rows-*.npy")]
    before = {file.relative_to(intact.path): file.read_bytes() for file in damaged}
    assert repair(intact.path, Corpus.open(intact.corpus)).ok
    assert {name: (intact.path / "damaged" / name).read_bytes() for name in before} == before
    intact.assert_as_before()


def test_the_error_for_a_broken_corpus_names_file_and_line(intact: Intact) -> None:
    deleted_text(intact)
    without_sources(intact)
    (intact.folder / "broken.jsonl").write_text("{")
    with pytest.raises(CorpusError, match=r"broken\.jsonl:1"):
        repair(intact.path, Corpus.open(intact.folder / "broken.jsonl"))


# Metadata


@in_every_format
@pytest.mark.parametrize("content", [None, "", "{}"])
def test_lost_metadata_are_rewritten(intact: Intact, content: str | None) -> None:
    lost = [
        intact.path / "cache.json",
        intact.path / TEXT_ARRAY / "zarr.json",
        intact.path / KEY_ARRAY / "zarr.json",
        intact.shard(0).parents[2] / "zarr.json",
    ]
    before = [json.loads(file.read_bytes()) for file in lost]
    for file in lost:
        file.unlink()
        if content is not None:
            file.write_text(content)
    report = repair(intact.path)
    assert report.unrepaired == []
    assert [action.kind for action in report.repaired] == ["damaged_cache"] * 3 + ["damaged_space"]
    after = [json.loads(file.read_bytes()) for file in lost]
    assert after[1:] == before[1:]
    assert before[0].items() - after[0].items() <= {("id", before[0]["id"])}
    intact.assert_as_before()


def test_metadata_that_no_shard_confirms_are_not_written(intact: Intact) -> None:
    folder = intact.shard(0).parents[2]
    for number in range(3):
        flip(intact.shard(number), 40)
    (folder / "zarr.json").unlink()
    report = repair(intact.path)
    (left,) = report.unrepaired
    assert left.kind == "damaged_space"
    assert not (folder / "zarr.json").exists()
    assert len(list(folder.glob("c/*/0"))) == 3


def test_texts_without_any_file_are_left_to_a_backup(intact: Intact) -> None:
    shutil.rmtree(intact.path / TEXT_ARRAY / "c")
    (intact.path / TEXT_ARRAY / "zarr.json").unlink()
    (left,) = repair(intact.path).unrepaired
    assert left.kind == "damaged_cache"
    assert "from a backup" in left.action
    assert list((intact.path / TEXT_ARRAY).iterdir()) == []


def test_a_build_does_not_overwrite_a_cache_without_cache_json(intact: Intact) -> None:
    (intact.path / "cache.json").unlink()
    for use in (lambda: intact.build(), lambda: TeacherCache.open(intact.path)):
        with pytest.raises(DamagedCache, match=r"cache\.json is missing: `tcache repair"):
            use()
    assert repair(intact.path).ok
    intact.assert_as_before()


# What repair leaves


def test_a_lost_index_is_left_to_reindex(intact: Intact) -> None:
    lose_index(intact.path)
    with pytest.raises(DamagedCache, match=r"`tcache reindex .*` rebuilds it"):
        repair(intact.path)


def test_a_folder_that_is_no_cache_is_not_made_one(tmp_path: Path) -> None:
    with pytest.raises(CacheNotFound):
        repair(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_nothing_is_repaired_beside_a_writer(intact: Intact) -> None:
    with TeacherCache.open(intact.path, "a"), pytest.raises(CacheLocked):
        repair(intact.path)


def test_a_space_without_its_array_is_emptied_and_filled_by_a_build(tmp_path: Path) -> None:
    built(tmp_path, numbered(20))
    path = tmp_path / "cache"
    (array,) = path.glob("spaces/*/vectors.zarr")
    shutil.rmtree(array)
    assert repair(path).missing == 20
    assert verify(path, deep=True).ok
    assert built(tmp_path, numbered(20)).encoded == 20
    assert verify(path, deep=True).ok


def test_metadata_that_are_not_json_are_damage_and_the_message_names_the_repair(tmp_path: Path) -> None:
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
def test_the_files_that_reindex_needs_are_checked_and_rewritten(tmp_path: Path, spoiled: bytes | None) -> None:
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
    lose_index(path)
    assert reindex(path).ok
    assert verify(path, deep=True).ok
