"""The index: commits, growth, and use by several readers, threads and processes."""

import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import lmdb
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from teacher_cache.errors import CacheError, CacheNotFound, DamagedCache, DiskFull
from teacher_cache.storage import environment
from teacher_cache.storage import index as index_module
from teacher_cache.storage.index import (
    Change,
    Index,
    ShardRecord,
    quarantine_key,
    row_value,
    shard_key,
)
from tests.teacher_cache.small_caches import passing_folder


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Index]:
    index = Index(tmp_path / "index.lmdb", writable=True)
    index.commit([])
    yield index
    index.close()


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def keys(start: int, stop: int) -> list[Change]:
    return [Change("keys", key(number), row_value(number)) for number in range(start, stop)]


@given(
    st.binary(min_size=16, max_size=16),
    st.floats(allow_nan=False),
    st.integers(0, 2**64 - 1),
    st.lists(st.booleans(), min_size=1, max_size=10).map(lambda bits: bits * 8),
)
def test_a_shard_record_survives_packing(digest: bytes, error: float, size: int, present: list[bool]) -> None:
    record = ShardRecord(digest, error, size, np.array(present))
    back = ShardRecord.unpack(record.pack())
    assert (back.digest, back.worst_error, back.size) == (digest, error, size)
    assert back.present.dtype == bool
    assert back.present.tolist() == present


def test_a_known_key_has_its_row_and_an_unknown_one_minus_one(writer: Index) -> None:
    writer.commit(keys(0, 3))
    assert writer.find([key(2), key(9), key(0), key(2)]).tolist() == [2, -1, 0, 2]
    assert writer.find([]).tolist() == []
    assert writer.key_count() == 3


def test_shard_records_are_found_by_array_name_and_number(writer: Index) -> None:
    names = [("a", 300), ("a", 2), ("ab", 0), ("a/b", 1)]
    writer.commit([Change("shards", shard_key(name, number), record(number)) for name, number in names])
    assert {number: found.size for number, found in writer.iter_shards("a")} == {2: 2, 300: 300}
    assert [number for number, _ in writer.iter_shards("a")] == [2, 300]
    assert list(writer.iter_shards("b")) == []
    assert writer.shard("ab", 1) is None


def record(size: int) -> bytes:
    return ShardRecord(bytes(16), 0.0, size, np.ones(8, dtype=bool)).pack()


def shards_of(array: str, numbers: Iterable[int]) -> list[Change]:
    return [Change("shards", shard_key(array, number), record(number)) for number in numbers]


@pytest.mark.parametrize("count", [0, 255, 256, 257, 600])
def test_iter_shards_returns_all_records_of_one_array(writer: Index, count: int) -> None:
    numbers = [3 * number for number in range(count)]
    for array in ("a", "b", "c"):
        writer.commit(shards_of(array, numbers))
    assert [(number, found.size) for number, found in writer.iter_shards("b")] == [(n, n) for n in numbers]


def test_iter_shards_does_not_block_a_writer_and_may_see_its_commits(writer: Index) -> None:
    writer.commit(shards_of("a", range(300)))
    reader = Index(writer.folder, writable=False)
    walk = reader.iter_shards("a")
    assert next(walk)[0] == 0
    writer.commit([*shards_of("a", [300]), Change("shards", shard_key("a", 299), None)])
    assert [number for number, _ in walk] == [*range(1, 299), 300]
    with reader.snapshot():
        writer.commit(shards_of("a", [301]))
        assert [number for number, _ in reader.iter_shards("a")][-1] == 300


def test_quarantined_rows_have_a_reason_and_can_be_released(writer: Index) -> None:
    writer.commit([Change("quarantine", quarantine_key("s", row), b"NaN") for row in (70_000, 3)])
    assert writer.quarantined("s") == {3: "NaN", 70_000: "NaN"}
    assert writer.quarantined("s", range(4, 70_001)) == {70_000: "NaN"}
    assert writer.quarantined("s", range(3, 70_000)) == {3: "NaN"}
    writer.commit([Change("quarantine", quarantine_key("s", 3), None)])
    assert writer.quarantined("s") == {70_000: "NaN"}


# Keys in random order; many begin with the same bytes.
some_keys = st.builds(lambda head, tail: bytes([head]) * 12 + bytes([tail]) * 4, st.integers(0, 3), st.integers(0, 9))


@given(st.lists(st.lists(some_keys, max_size=12), max_size=4), st.lists(some_keys, max_size=10))
def test_keys_get_rows_in_order_and_the_last_key_is_the_last_row(
    batches: list[list[bytes]], looked_up: list[bytes]
) -> None:
    expected: dict[bytes, int] = {}
    rows = 0
    with passing_folder() as folder:
        index = Index(Path(folder) / "index.lmdb", writable=True)
        index.commit([])
        for batch in batches:
            index.commit([], keys=batch, first_row=rows)
            expected |= {key: rows + place for place, key in enumerate(batch)}
            rows += len(batch)
            assert index.rows() == rows
        found = index.find(looked_up)
        assert found.dtype == np.int64
        assert found.tolist() == [expected.get(key, -1) for key in looked_up]
        assert index.key_count() == len(expected)
        index.close()


def test_keys_and_changes_are_one_transaction(writer: Index) -> None:
    with pytest.raises(CacheError, match="could not commit"):
        writer.commit([Change("spaces", b"", b"an empty key is not allowed")], keys=[key(1)], first_row=0)
    assert (writer.rows(), writer.key_count()) == (0, 0)


def test_the_map_grows_when_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "FIRST_MAP_BYTES", 64 * 1024)
    writer = Index(tmp_path / "index.lmdb", writable=True)
    writer.commit(keys(0, 20_000))
    assert writer.find([key(19_999)]).tolist() == [19_999]
    assert (tmp_path / "index.lmdb" / "data.mdb").stat().st_size > 64 * 1024


def grow_index(folder: Path) -> None:
    index = Index(folder, writable=True)
    index.commit(keys(5, 20_000))
    index.close()


def test_a_reader_opened_before_another_process_grew_the_map_sees_what_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "FIRST_MAP_BYTES", 64 * 1024)
    folder = tmp_path / "index.lmdb"
    writer = Index(folder, writable=True)
    writer.commit(keys(0, 5))
    writer.close()
    reader = Index(folder, writable=False)
    assert reader.key_count() == 5
    process = multiprocessing.get_context("spawn").Process(target=grow_index, args=(folder,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert reader.key_count() == 20_000
    # A writer in this process shares the reader's handle, which was opened with the small map.
    writer = Index(folder, writable=True)
    writer.commit(keys(20_000, 20_100))
    assert reader.key_count() == 20_100


def test_readers_and_a_writer_share_one_process(tmp_path: Path, writer: Index) -> None:
    writer.commit(keys(0, 3))
    writer.close()
    before = Index(tmp_path / "index.lmdb", writable=False)
    assert before.key_count() == 3
    again = Index(tmp_path / "index.lmdb", writable=True)
    again.commit(keys(3, 4))
    after = Index(tmp_path / "." / "index.lmdb", writable=False)
    assert before.key_count() == after.key_count() == 4
    again.close()
    after.close()
    assert before.key_count() == 4


def test_an_index_recreated_at_the_same_path_is_a_new_index(tmp_path: Path, writer: Index) -> None:
    writer.commit(keys(0, 3))
    (tmp_path / "index.lmdb").rename(tmp_path / "old")
    new = Index(tmp_path / "index.lmdb", writable=True)
    new.commit(keys(0, 1))
    assert (writer.key_count(), new.key_count()) == (3, 1)


def test_a_reader_and_a_closed_writer_cannot_write(tmp_path: Path, writer: Index) -> None:
    with pytest.raises(CacheError, match='is read-only; open the cache with mode "a"'):
        Index(tmp_path / "index.lmdb", writable=False).commit(keys(0, 1))
    writer.close()
    with pytest.raises(CacheError, match="is read-only"):
        writer.commit(keys(0, 1))
    assert writer.key_count() == 0


def test_a_snapshot_does_not_see_what_is_committed_meanwhile(tmp_path: Path, writer: Index) -> None:
    reader = Index(tmp_path / "index.lmdb", writable=False)
    with reader.snapshot():
        assert reader.key_count() == 0
        writer.commit(keys(0, 2))
        assert reader.key_count() == 0
        assert reader.find([key(1)]).tolist() == [-1]
    assert reader.key_count() == 2


def test_a_failed_transaction_changes_nothing(writer: Index) -> None:
    with pytest.raises(CacheError, match="could not commit"):
        writer.commit([*keys(0, 3), Change("keys", b"", b"an empty key is not allowed")])
    assert writer.key_count() == 0
    writer.commit(keys(0, 1))
    assert writer.key_count() == 1


@pytest.mark.parametrize(
    "error",
    [
        lmdb.DiskError("mdb_txn_commit", 28),
        lmdb.Error(f"mdb_txn_commit: {os.strerror(122)}"),
    ],
)
def test_a_full_disk_is_reported(writer: Index, monkeypatch: pytest.MonkeyPatch, error: lmdb.Error) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(Index, "_apply", staticmethod(fail))
    with pytest.raises(DiskFull, match=r"no space left on the disk of .*index.lmdb"):
        writer.commit(keys(0, 1))


def test_threads_read_while_one_writes_and_the_map_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "FIRST_MAP_BYTES", 64 * 1024)
    writer = Index(tmp_path / "index.lmdb", writable=True)
    writer.commit(keys(0, 1))
    stop = threading.Event()
    seen: list[int] = []
    failures: list[Exception] = []

    def read() -> None:
        reader = Index(tmp_path / "index.lmdb", writable=False)
        try:
            while not stop.is_set():
                rows = reader.find([key(number) for number in range(0, 5000, 7)])
                seen.append(int((rows >= 0).sum()))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for start in range(1, 5000, 500):
        writer.commit(keys(start, start + 500))
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert seen
    assert writer.key_count() == 5001


def test_a_forked_child_opens_its_own_handle(tmp_path: Path, writer: Index) -> None:
    writer.commit(keys(0, 3))
    reader = Index(tmp_path / "index.lmdb", writable=False)
    assert reader.key_count() == 3
    child = os.fork()
    if child == 0:
        try:
            equal = reader.key_count() == 3 and Index(tmp_path / "index.lmdb", writable=False).key_count() == 3
            reader.close()
        finally:
            os._exit(0 if equal else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    writer.commit(keys(3, 4))  # the parent's handle is still open after the child closed its copy
    assert reader.key_count() == 4


def test_too_many_readers_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "MAX_READERS", 1)
    writer = Index(tmp_path / "index.lmdb", writable=True)
    writer.commit(keys(0, 1))
    reader = Index(tmp_path / "index.lmdb", writable=False)
    with writer.snapshot(), pytest.raises(CacheError, match=r"already has 1 readers.*`tcache seal`"):
        reader.rows()
    assert reader.rows() == 0


def test_a_fork_waits_for_reads_of_other_threads(writer: Index) -> None:
    """The child closes its copy of the handle, which would remove their transactions from the reader table."""
    reader = Index(writer.folder, writable=False)
    inside, done = threading.Event(), threading.Event()

    def read() -> None:
        with reader.snapshot():
            inside.set()
            time.sleep(0.05)
            done.set()

    thread = threading.Thread(target=read)
    thread.start()
    inside.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if done.is_set() and reader.key_count() == 0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    thread.join()


def test_a_truncated_index_is_damage(tmp_path: Path, writer: Index) -> None:
    writer.commit(keys(0, 50_000))
    writer.close()
    data = tmp_path / "index.lmdb" / "data.mdb"
    os.truncate(data, data.stat().st_size // 2)
    with pytest.raises(DamagedCache, match=r"is truncated: .* bytes, expected .*`tcache reindex`"):
        Index(tmp_path / "index.lmdb", writable=False).rows()


def test_damaged_pages_are_reported_while_reading(tmp_path: Path, writer: Index) -> None:
    writer.commit(keys(0, 50_000))
    writer.close()
    data = tmp_path / "index.lmdb" / "data.mdb"
    with open(data, "r+b") as file:  # all pages but the two meta pages
        file.seek(8192)
        file.write(b"\xff" * (data.stat().st_size - 8192))
    with pytest.raises(DamagedCache, match=r"cannot be (opened|read): .*`tcache reindex`"):
        Index(tmp_path / "index.lmdb", writable=False).find([key(7)])


def test_a_pickled_index_opens_for_reading(writer: Index) -> None:
    writer.commit(keys(0, 3))
    copy = pickle.loads(pickle.dumps(writer))
    assert copy.key_count() == 3
    with pytest.raises(CacheError, match="is read-only"):
        copy.commit([])


def test_a_missing_index_is_not_a_cache_and_garbage_is_damage(tmp_path: Path) -> None:
    with pytest.raises(CacheNotFound, match="no index at"):
        Index(tmp_path / "nowhere", writable=False).rows()
    (tmp_path / "garbage").mkdir()
    (tmp_path / "garbage" / "data.mdb").write_bytes(b"garbage" * 1000)
    with pytest.raises(DamagedCache, match="cannot be opened"):
        Index(tmp_path / "garbage", writable=False).rows()


def random_keys(count: int) -> list[bytes]:
    made: list[bytes] = (
        np.random.default_rng(1).integers(0, 256, (count, 16), dtype=np.uint8).view("V16")[:, 0].tolist()
    )
    return made


def sealed_copy(source: Index, folder: Path, cache: str = "this cache") -> Index:
    folder.mkdir(exist_ok=True)
    source.copy_sealed(folder / "data.mdb", cache, "2001-02-03T04:05:06+00:00")
    return Index(folder, writable=False, sealed_copy_of="this cache")


@pytest.mark.parametrize("at_a_time", [1000, 3000, 2**18])
def test_a_sealed_copy_returns_the_same_as_its_source(
    tmp_path: Path, writer: Index, monkeypatch: pytest.MonkeyPatch, at_a_time: int
) -> None:
    monkeypatch.setattr(index_module, "SEALED_AT_A_TIME", at_a_time)
    made = random_keys(3000)
    writer.commit(
        [
            *shards_of("a", range(300)),
            Change("spaces", b"s", b"{}"),
            Change("quarantine", quarantine_key("s", 7), b"NaN"),
        ],
        keys=made,
    )
    copy = sealed_copy(writer, tmp_path / "index.sealed")
    looked_up = [*made, key(1)]
    assert copy.find(looked_up).tolist() == writer.find(looked_up).tolist() == [*range(3000), -1]
    assert (copy.rows(), copy.key_count()) == (3000, 3000)
    assert [number for number, _ in copy.iter_shards("a")] == list(range(300))
    assert copy.records("spaces") == {"s": b"{}"}
    assert copy.quarantined("s") == {7: "NaN"}
    assert copy.records("corpora") == {}


def test_a_sealed_copy_has_full_pages_and_no_lock(tmp_path: Path, writer: Index) -> None:
    made = random_keys(100_000)
    for start in range(0, len(made), 10_000):
        writer.commit([], keys=made[start : start + 10_000], first_row=start)
    copy = sealed_copy(writer, tmp_path / "index.sealed")
    assert copy.find(made[-2:]).tolist() == [99_998, 99_999]
    assert [file.name for file in (tmp_path / "index.sealed").iterdir()] == ["data.mdb"]
    # 16 of key, 8 of row, 8 of node, 2 of its offset: 34 bytes, and page headers and branch pages.
    assert (tmp_path / "index.sealed" / "data.mdb").stat().st_size < 36 * 100_000
    assert (tmp_path / "index.lmdb" / "data.mdb").stat().st_size > 50 * 100_000


def test_a_sealed_copy_lacks_later_commits_and_reports_its_age(tmp_path: Path, writer: Index) -> None:
    writer.commit([], keys=[key(0)])
    copy = sealed_copy(writer, tmp_path / "index.sealed")
    writer.commit([], keys=[key(1)], first_row=1)
    assert copy.find([key(0), key(1)]).tolist() == [0, -1]
    assert "sealed at 2001-02-03T04:05:06+00:00: `tcache seal` makes a newer copy" in copy.as_of
    assert writer.as_of == ""


def test_a_truncated_sealed_copy_is_damage(tmp_path: Path, writer: Index) -> None:
    writer.commit(keys(0, 50_000))
    copy = sealed_copy(writer, tmp_path / "index.sealed")
    os.truncate(tmp_path / "index.sealed" / "data.mdb", 2**20)
    with pytest.raises(DamagedCache, match=r"is truncated: 1048576 bytes, .*`tcache seal` rebuilds it"):
        copy.rows()


def test_a_sealed_copy_of_another_cache_is_an_error_each_time(tmp_path: Path, writer: Index) -> None:
    copy = sealed_copy(writer, tmp_path / "index.sealed", cache="that cache")
    for _ in range(2):
        with pytest.raises(CacheError, match=r"belongs to another cache \(id that cache, expected this cache\)"):
            copy.rows()


def test_a_sealed_copy_cannot_be_written_or_sealed_again(tmp_path: Path, writer: Index) -> None:
    copy = sealed_copy(writer, tmp_path / "index.sealed")
    with pytest.raises(CacheError, match="is read-only"):
        copy.commit([])
    with pytest.raises(CacheError, match="cannot be sealed again"):
        copy.copy_sealed(tmp_path / "again.mdb", "this cache", "now")
    assert not (tmp_path / "again.mdb").exists()


def test_a_full_disk_while_sealing_is_reported(tmp_path: Path, writer: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise lmdb.DiskError("mdb_txn_commit", 28)

    monkeypatch.setattr(index_module, "_fill", fail)
    with pytest.raises(DiskFull, match="no space left on the disk of"):
        sealed_copy(writer, tmp_path / "index.sealed")


def test_an_index_out_of_order_is_not_sealed(tmp_path: Path, writer: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "merge", lambda *entries: iter([(b"sealed", b"x"), (b"cache", b"y")]))
    with pytest.raises(DamagedCache, match="the keys of 'meta' are not in order"):
        sealed_copy(writer, tmp_path / "index.sealed")


def test_a_pickled_sealed_copy_is_still_sealed(tmp_path: Path, writer: Index) -> None:
    writer.commit([], keys=[key(0)])
    copy = pickle.loads(pickle.dumps(sealed_copy(writer, tmp_path / "index.sealed")))
    assert copy.find([key(0)]).tolist() == [0]
    assert copy.as_of


def test_a_missing_sealed_copy_names_the_command_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(CacheNotFound, match=r"no sealed copy of the index at .*`tcache seal` makes one"):
        Index(tmp_path / "index.sealed", writable=False, sealed_copy_of="x").rows()
