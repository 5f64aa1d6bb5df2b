"""The text table assigns one permanent row to each distinct text and keeps its exact bytes."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teacher_cache.errors import DamagedCache, DiskFull
from teacher_cache.storage import texts as texts_module
from teacher_cache.storage.index import Index
from teacher_cache.storage.shards import ShardedArray
from teacher_cache.table.cache import TeacherCache
from teacher_cache.text_key import text_key
from tests.teacher_cache.small_caches import numbered, passing_folder

AWKWARD = ["", " ", "a\0b", "\0", "née", "ne\u0301e", "😀" * 3, "line\r\nend\n", "\u2028", "x" * 300_000]
texts = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(AWKWARD)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.lists(texts, max_size=12), max_size=4), max_size=4))
def test_rows_follow_the_order_of_first_appearance_over_any_appenders(sessions: list[list[list[str]]]) -> None:
    first_seen: dict[str, int] = {}
    with passing_folder() as folder:
        for session in sessions:
            with (
                TeacherCache.open(Path(folder) / "cache", "a", shard_rows=8) as cache,
                cache.appending() as appender,
            ):
                for batch in session:
                    rows = appender.add(batch)
                    for text in batch:
                        first_seen.setdefault(text, len(first_seen))
                    assert rows.tolist() == [first_seen[text] for text in batch]
        with TeacherCache.open(Path(folder) / "cache", "a", shard_rows=8) as cache:
            assert cache.rows == len(first_seen)
            rows = np.arange(len(first_seen))
            assert cache.texts(rows[::-1]) == list(first_seen)[::-1]
            assert [key.tobytes() for key in cache.texts_table.read_keys(rows)] == [
                text_key(text) for text in first_seen
            ]
            assert cache.lookup([*first_seen, "not there"]).tolist() == [*rows.tolist(), -1]


def test_unusual_texts_are_distinct_and_read_back_exactly(tmp_path: Path) -> None:
    with TeacherCache.open(tmp_path / "cache", "a", shard_rows=8) as cache:
        with cache.appending() as appender:
            assert appender.add(AWKWARD).tolist() == list(range(len(AWKWARD)))
        assert cache.texts(np.arange(len(AWKWARD))) == AWKWARD


def test_a_row_exists_for_readers_only_once_it_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts_module, "PUBLISHED_ROWS", 16)
    with TeacherCache.open(tmp_path / "cache", "a", shard_rows=8) as cache:
        reader = TeacherCache.open(tmp_path / "cache")
        with cache.appending() as appender:
            appender.add(numbered(12))  # one shard is written but not yet published
            assert reader.rows == 0
            appender.add(numbered(7, start=12))
            assert reader.rows == 16
            assert reader.lookup(numbered(19)).tolist() == [*range(16), *[-1] * 3]
            assert appender.add(numbered(19)[::-1]).tolist() == [*range(19)][::-1]
            assert reader.texts(np.arange(16)) == numbered(16)
        assert reader.rows == 19


def test_an_error_in_the_block_keeps_only_published_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts_module, "PUBLISHED_ROWS", 8)
    with TeacherCache.open(tmp_path / "cache", "a", shard_rows=8) as cache:

        def interrupted() -> None:
            with cache.appending() as appender:
                appender.add(numbered(11))
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert cache.rows == 8
        with cache.appending() as appender:
            assert appender.add(["other", *numbered(11)]).tolist() == [8, *range(8), 9, 10, 11]


def test_a_full_disk_keeps_committed_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with TeacherCache.open(tmp_path / "cache", "a", shard_rows=8) as cache:

        def add(count: int) -> None:
            with cache.appending() as appender:
                appender.add(numbered(count))

        def full(*arguments: object, **named: object) -> None:
            raise DiskFull("no space left")

        add(5)
        for owner, call in ((Index, "commit"), (ShardedArray, "write_shard")):
            monkeypatch.setattr(owner, call, full)
            with pytest.raises(DiskFull):
                add(30)
            monkeypatch.undo()
            assert cache.rows == 5
            assert cache.texts(np.arange(5)) == numbered(5)
        add(30)
        assert cache.texts(np.arange(30)) == numbered(30)


def test_a_shard_without_a_record_is_damage(tmp_path: Path) -> None:
    with TeacherCache.open(tmp_path / "cache", "a", shard_rows=8) as cache:
        with cache.appending() as appender:
            appender.add(numbered(3))
        with pytest.raises(DamagedCache, match="texts/text lacks 1 of 1 rows, the first is row 9"):
            cache.texts_table.read(np.array([9]))
