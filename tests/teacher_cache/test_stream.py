"""`WindowedReader` returns each record's text and vector in shuffle order, in flat memory."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from teacher_cache.errors import DamagedCache, MissingRows
from teacher_cache.reading.shuffle import WindowedShuffle
from teacher_cache.reading.stream import Batch, WindowedReader
from teacher_cache.table.cache import TeacherCache
from tests.teacher_cache.small_caches import built, numbered, teacher_vectors

TEXTS = [*numbered(200), *numbered(20)]  # the first twenty appear twice


@pytest.fixture(scope="module", params=["float16", "float16-raw", "int8", "float32"])
def cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TeacherCache]:
    folder = tmp_path_factory.mktemp("stream")
    built(folder, TEXTS, storage=request.param)
    with TeacherCache.open(folder / "cache") as opened:
        yield opened


def reader(cache: TeacherCache, batch: int = 8, window: int = 64, **options: Any) -> WindowedReader:
    manifest = cache.corpus()
    order = WindowedShuffle(len(manifest), batch, window=window)
    return WindowedReader(cache, cache.space(), order, manifest.rows_of, **options)


def assert_right(batch: Batch) -> None:
    assert batch.vectors.dtype == np.float32
    cosines = (batch.vectors * teacher_vectors(batch.texts)).sum(axis=1) / np.linalg.norm(batch.vectors, axis=1)
    assert (cosines > 1 - 1e-3).all()  # int8; two texts of the toy teacher are far apart


def test_an_epoch_returns_every_record_once_with_its_text_and_vector(cache: TeacherCache) -> None:
    stream = reader(cache)
    for epoch in range(2):
        batches = list(stream.epoch(epoch))
        assert sorted(text for batch in batches for text in batch.texts) == sorted(TEXTS)
        assert [len(batch.texts) for batch in batches] == [8] * 27 + [4]
        for batch in batches:
            assert cache.texts(batch.rows) == batch.texts
            assert_right(batch)
    stream.close()


def test_the_order_is_that_of_the_shuffle(cache: TeacherCache) -> None:
    stream = reader(cache)
    order = stream.order
    expected = [
        TEXTS[record]
        for window in range(order.windows)
        for record in order.records_of(3, window)[order.permutation(3, window)]
    ]
    assert [text for batch in stream.epoch(3) for text in batch.texts] == expected
    stream.close()


def test_batches_read_in_any_order_equal_those_of_a_sequential_pass(cache: TeacherCache) -> None:
    sequential = [batch.texts for batch in reader(cache).epoch(1)]
    random_access = reader(cache)
    for number in [20, 3, 3, 27, 0, 19, 26]:
        positions = np.arange(number * 8, min(number * 8 + 8, len(random_access.order)))
        assert random_access.read(1, positions).texts == sequential[number]
    assert [batch.texts for batch in random_access.epoch(1, start=9)] == sequential[9:]
    assert [len(batch.texts) for batch in random_access.epoch(1, drop_last=True)] == [8] * 27
    random_access.close()


def test_a_batch_is_not_overwritten_by_later_reads(cache: TeacherCache) -> None:
    for dtype in (np.float16, np.float32):
        stream = reader(cache, dtype=dtype)
        batches = list(stream.epoch())
        for batch in batches:
            np.testing.assert_array_equal(batch.vectors, cache.space().gather(batch.rows, dtype=dtype))
        stream.close()


def test_only_two_window_buffers_are_used(cache: TeacherCache) -> None:
    stream = reader(cache, window=16)
    buffers = set()
    for batch in stream.epoch():
        assert len(batch.rows) <= 8
        buffers |= {buffer.ctypes.data for buffer in stream._buffers.values()}
    stream.close()
    assert stream.order.windows > 10
    assert len(buffers) == 2
    assert not stream._buffers


def test_prefetching_uses_one_thread_that_ends(cache: TeacherCache) -> None:
    before = threading.active_count()
    stream = reader(cache)
    list(stream.epoch())
    assert threading.active_count() == before + 1
    stream.close()
    assert threading.active_count() == before


def test_grouping_by_length_keeps_the_records_of_a_window(cache: TeacherCache) -> None:
    plain, grouped = reader(cache, window=216), reader(cache, window=216, grouped=50)
    one, other = list(plain.epoch()), list(grouped.epoch())
    assert sorted(text for batch in other for text in batch.texts) == sorted(TEXTS)
    assert [len(batch.texts) for batch in other] == [len(batch.texts) for batch in one]

    def spread(batches: list[Batch]) -> float:
        return float(np.mean([np.ptp([len(text) for text in batch.texts]) for batch in batches]))

    assert spread(other) < spread(one) / 3
    assert [batch.texts for batch in grouped.epoch()] == [batch.texts for batch in other]
    # Batches are shuffled: the shortest are not always first.
    means = [np.mean([len(text) for text in batch.texts]) for batch in other]
    assert means != sorted(means)
    plain.close()
    grouped.close()


def test_reading_only_vectors_reads_no_text(cache: TeacherCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "texts", None)
    stream = reader(cache, texts=0)
    assert all(batch.texts == [] for batch in stream.epoch())
    stream.close()


def test_both_texts_of_pairs_are_read(tmp_path: Path) -> None:
    pairs = list(zip(numbered(40), numbered(40, start=100), strict=True))
    built(tmp_path, pairs)
    with TeacherCache.open(tmp_path / "cache") as cache:
        stream = reader(cache, texts=2, window=16)
        seen = [
            pair for b in stream.epoch() for pair in zip(b.texts[: len(b.rows)], b.texts[len(b.rows) :], strict=True)
        ]
        assert sorted(seen) == sorted(pairs)
        stream.close()


def test_a_missing_vector_or_damaged_shard_raises_its_error(tmp_path: Path) -> None:
    built(tmp_path, numbered(64), storage="float16")
    with TeacherCache.open(tmp_path / "cache") as cache:
        stream = reader(cache, window=16)
        missing = WindowedReader(cache, cache.space(), stream.order, lambda records: records[:, None] + 1)
        with pytest.raises(MissingRows, match="row 64 is outside the table of 64 rows"):
            list(missing.epoch())
        missing.close()
        path = cache.space().vectors.shard_path(3)
        data = bytearray(path.read_bytes())
        data[20] ^= 1
        path.write_bytes(data)
        with pytest.raises(DamagedCache, match=str(path)):
            list(stream.epoch())
        stream.close()


def test_after_a_failed_window_earlier_batches_are_read_correctly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failed read has overwritten a buffer."""
    built(tmp_path, numbered(64))
    with TeacherCache.open(tmp_path / "cache") as cache:
        stream = reader(cache, window=16)
        before = stream.read(0, np.arange(8))
        assert stream._next is not None
        stream._next[1].result()

        def broken(rows: object) -> list[str]:
            raise OSError("the disk is gone")

        with monkeypatch.context() as patch:
            patch.setattr(cache, "texts", broken)
            with pytest.raises(OSError, match="the disk is gone"):
                stream.read(0, np.arange(48, 56))
        again = stream.read(0, np.arange(8))
        assert again.texts == before.texts
        np.testing.assert_array_equal(again.vectors, before.vectors)
        stream.close()


def test_an_error_in_an_unused_prefetched_window_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built(tmp_path, numbered(64))
    with TeacherCache.open(tmp_path / "cache") as cache:
        stream = reader(cache, window=16)
        read, calls = cache.texts, 0

        def broken_once(rows: Any) -> list[str]:
            nonlocal calls
            calls += 1
            if calls == 2:  # the second window, prefetched and then not used
                raise OSError("the disk is gone")
            return read(rows)

        monkeypatch.setattr(cache, "texts", broken_once)
        stream.read(0, np.arange(8))
        assert len(stream.read(0, np.arange(48, 56)).texts) == 8
        stream.close()


def test_positions_of_two_windows_in_one_batch_are_refused(cache: TeacherCache) -> None:
    stream = reader(cache, window=16)
    with pytest.raises(IndexError, match=r"positions 25 to 40 .* are in more than one window"):
        stream.read(0, np.array([40, 25]))
    stream.close()


def test_grouping_by_length_omits_no_text_in_every_epoch(tmp_path: Path) -> None:
    texts = ["x" * (length + 1) for length in range(100)]
    built(tmp_path, texts)
    with TeacherCache.open(tmp_path / "cache") as cache:
        stream = reader(cache, batch=16, window=100, grouped=50)
        epochs = [stream.epoch(epoch, drop_last=True) for epoch in range(12)]
        assert {text for epoch in epochs for batch in epoch for text in batch.texts} == set(texts)
        stream.close()
