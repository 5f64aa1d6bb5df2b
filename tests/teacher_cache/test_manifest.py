"""A manifest holds row numbers in corpus order, also for readers of a corpus that was replaced."""

from pathlib import Path

import numpy as np
import pytest

from teacher_cache.errors import CacheError, CorpusNotFound, DamagedCache
from teacher_cache.storage.manifest import CorpusRecord, Manifest, SourceRecord, writing_manifest
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.layout import checked_name
from tests.teacher_cache.small_caches import built, numbered


def record(**changes: object) -> CorpusRecord:
    fields = {
        "name": "corpus",
        "fingerprint": "0123456789abcdef" * 2,
        "columns": ("a", "b"),
        "records": 3,
        "distinct": 5,
        "sources": (SourceRecord("x.jsonl", 0, 2), SourceRecord("né\udcff.jsonl", 2, 1)),
        "counts": {"skipped_empty": 1},
    }
    return CorpusRecord(**(fields | changes))  # type: ignore[arg-type]


def written(cache: Path, rows: list[list[int]], published: CorpusRecord) -> Manifest:
    with writing_manifest(cache, published.name, len(rows[0])) as (writer, path):
        for row in rows:
            writer.append(np.array([row]))
    path.replace(published.file(cache))
    return Manifest(published, cache)


def test_a_corpus_record_survives_json() -> None:
    assert CorpusRecord.from_json(record().to_json()) == record()


def test_rows_are_read_as_appended_and_are_read_only(tmp_path: Path) -> None:
    rows = [[4, 0], [4, 4], [2**40, 1]]
    manifest = written(tmp_path, rows, record())
    assert manifest.rows.tolist() == rows
    assert len(manifest) == 3
    with pytest.raises(ValueError, match="read-only"):
        manifest.rows[0, 0] = 1
    np.testing.assert_array_equal(np.load(record().file(tmp_path)), rows)


def test_distinct_rows_are_ascending(tmp_path: Path) -> None:
    manifest = written(tmp_path, [[4, 0], [4, 4], [6, 1]], record())
    assert manifest.distinct_rows(8).tolist() == [0, 1, 4, 6]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"records": 4}, r"has int64 of shape \(3, 2\), expected int64 of shape \(4, 2\)"),
        ({"columns": ("a",)}, r"has int64 of shape \(3, 2\), expected int64 of shape \(3, 1\)"),
        ({"fingerprint": "f" * 32}, "cannot be read"),
    ],
)
def test_a_manifest_that_does_not_match_the_index_is_damage(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    written(tmp_path, [[4, 0], [4, 4], [6, 1]], record())
    with pytest.raises(DamagedCache, match=message):
        Manifest(record(**changes), tmp_path)


def test_a_truncated_manifest_is_damage(tmp_path: Path) -> None:
    written(tmp_path, [[4, 0], [4, 4], [6, 1]], record())
    path = record().file(tmp_path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DamagedCache, match="build it again"):
        Manifest(record(), tmp_path)


def test_an_error_in_the_block_leaves_no_manifest(tmp_path: Path) -> None:
    def interrupted() -> None:
        with writing_manifest(tmp_path, "corpus", 1) as (writer, _):
            writer.append(np.array([[1]]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_replaced_corpus_stays_readable_for_open_readers(tmp_path: Path) -> None:
    built(tmp_path, ["a", "b", "c"])
    with TeacherCache.open(tmp_path / "cache") as cache:
        held = cache.corpus("corpus")
        built(tmp_path, ["d", "a"])
        assert held.rows.tolist() == [[0], [1], [2]]
        assert cache.corpus("corpus").rows.tolist() == [[3], [0]]
        assert len(list((tmp_path / "cache/corpora/corpus").glob("rows-*"))) == 1


def test_a_corpus_replaced_while_it_is_opened_is_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built(tmp_path, ["a", "b", "c"])
    with TeacherCache.open(tmp_path / "cache") as cache:
        old = cache.corpora()
        built(tmp_path, ["d", "a"])
        new = cache.corpora()
        looks = iter([old, new])
        monkeypatch.setattr(cache, "corpora", lambda: next(looks))
        assert cache.corpus("corpus").rows.tolist() == [[3], [0]]


def test_a_missing_manifest_is_damage(tmp_path: Path) -> None:
    built(tmp_path, ["a"])
    with TeacherCache.open(tmp_path / "cache") as cache:
        cache.corpora()["corpus"].file(cache.path).unlink()
        with pytest.raises(DamagedCache, match=r"manifest of corpus 'corpus' .* build it again"):
            cache.corpus()


def test_a_corpus_is_found_by_name_or_as_the_only_one(tmp_path: Path) -> None:
    built(tmp_path, ["a"], name="one")
    with TeacherCache.open(tmp_path / "cache") as cache:
        assert cache.corpus().record.name == "one"
        built(tmp_path, numbered(2), name="two")
        assert cache.corpus("two").record.records == 2
        with pytest.raises(CorpusNotFound, match="has several corpora, name one with `corpus`: one, two"):
            cache.corpus()
        with pytest.raises(CorpusNotFound, match=r"no corpus 'three' in .*; it has: one, two"):
            cache.corpus("three")


@pytest.mark.parametrize("name", ["../x", "/x", "", ".hidden", "a/b", "a b", "x\n", "-x", "é", "x" * 101])
def test_a_name_that_could_leave_its_folder_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(CacheError, match="is not a corpus name"):
        built(tmp_path / "work", ["a"], name=name)
    assert not (tmp_path / "x").exists()
    assert list((tmp_path / "work/cache/corpora").iterdir()) == []


def test_an_ordinary_name_is_not_changed() -> None:
    assert checked_name("MS-marco_v2.1") == "MS-marco_v2.1"


def test_records_are_read_in_any_order_also_from_a_replaced_manifest(tmp_path: Path) -> None:
    built(tmp_path, numbered(20))
    with TeacherCache.open(tmp_path / "cache") as cache:
        manifest = cache.corpus()
        built(tmp_path, numbered(25)[::-1])
        assert manifest.rows_of(np.array([3, 19, 0, 1, 2])).ravel().tolist() == [3, 19, 0, 1, 2]
        assert manifest.rows_of(np.empty(0, dtype=np.int64)).shape == (0, 1)
        for outside in ([20], [-1, 3]):
            with pytest.raises(IndexError, match="has 20 records, counted from 0"):
                manifest.rows_of(np.array(outside))
