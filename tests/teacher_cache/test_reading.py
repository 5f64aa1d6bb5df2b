"""Rows are the same however they are read: from the map, by runs, chunk by chunk, cached or not."""

import gc
import multiprocessing
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from teacher_cache.errors import DamagedCache, MissingRows
from teacher_cache.storage import shard_files, shards
from teacher_cache.storage.shards import ShardedArray
from teacher_cache.table.cache import TeacherCache
from tests.teacher_cache.small_caches import built, numbered, passing_folder, teacher_vectors

WIDTH = 16
SHARD = 256  # two pages: plain shards of this width with fewer rows are not mapped
CHUNK = 32
ROWS = 70 * SHARD + 40  # more shards than the map first has room for
KINDS = {"plain": (False, False), "sealed": (False, True), "compressed": (True, True)}


def make(folder: Path, kind: str, rows: int = ROWS) -> tuple[ShardedArray, npt.NDArray[np.float16]]:
    compressed, checksum = KINDS[kind]
    array = ShardedArray.create(
        folder,
        width=WIDTH,
        dtype="<f2",
        shard_rows=SHARD,
        chunk_rows=CHUNK,
        compressed=compressed,
        checksum=checksum,
    )
    values = np.random.default_rng(0).normal(size=(rows, WIDTH)).astype(np.float16)
    for number in range(-(-rows // SHARD)):
        part = values[number * SHARD : (number + 1) * SHARD]
        array.write_shard(number, part, np.ones(len(part), dtype=bool))
    array.grow(rows)
    return array, values


@pytest.fixture(scope="module", params=KINDS)
def stored(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ShardedArray, npt.NDArray[np.float16]]:
    return make(tmp_path_factory.mktemp("reading") / "a", request.param)


@pytest.fixture(params=["warm", "cold", "few files"])
def circumstances(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "cold":
        monkeypatch.setattr(shard_files, "read_cached", lambda *read: False)
        monkeypatch.setattr(shards, "read_cached", lambda *read: False)
    if request.param == "few files":
        monkeypatch.setattr(shards, "OPEN_SHARDS", 2)
        monkeypatch.setattr(shard_files, "_OPENED_AT_ONCE", 2)


ORDERS: dict[str, Callable[[np.random.Generator], npt.NDArray[np.int64]]] = {
    "scattered": lambda random: random.integers(0, ROWS, 300),
    "ascending": lambda random: np.sort(random.permutation(ROWS)[:300]),
    "all": lambda random: np.arange(ROWS),
    "blocks": lambda random: (random.permutation(ROWS // 64)[:50, None] * 64 + np.arange(64)).ravel(),
    "over shards": lambda random: np.arange(SHARD - 20, 3 * SHARD + 20),
    "twice the same": lambda random: np.repeat(np.arange(100, 140), 2),
    "descending": lambda random: np.arange(ROWS)[::-1].copy(),
    "one": lambda random: np.array([ROWS - 1]),
    "none": lambda random: np.empty(0, dtype=np.int64),
}


@pytest.mark.usefixtures("circumstances")
@pytest.mark.parametrize("order", ORDERS)
def test_rows_come_in_the_given_order(stored: tuple[ShardedArray, npt.NDArray[np.float16]], order: str) -> None:
    array, values = stored
    rows = ORDERS[order](np.random.default_rng(1))
    out = np.full((len(rows), WIDTH), 7, dtype=np.float16)
    assert ShardedArray(array.folder).read(rows, out) is out
    np.testing.assert_array_equal(out, values[rows])


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_any_rows_are_those_that_were_written(
    stored: tuple[ShardedArray, npt.NDArray[np.float16]], data: st.DataObject
) -> None:
    array, values = stored
    runs = data.draw(st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(1, 90)), max_size=12))
    rows = np.array([row for start, count in runs for row in range(start, min(start + count, ROWS))], dtype=np.int64)
    np.testing.assert_array_equal(array.read(rows), values[rows])


@pytest.mark.parametrize(
    "out",
    [
        np.empty((3, WIDTH), dtype=np.float32),
        np.empty((4, WIDTH), dtype=np.float16),
        np.empty((3, WIDTH + 1), dtype=np.float16),
        np.empty((3, 2 * WIDTH), dtype=np.float16)[:, ::2],
    ],
)
def test_a_buffer_of_another_shape_or_dtype_is_refused(
    stored: tuple[ShardedArray, npt.NDArray[np.float16]], out: npt.NDArray[np.generic]
) -> None:
    with pytest.raises(ValueError, match="expected a contiguous array"):
        stored[0].read(np.arange(3), out)


def test_chunks_in_another_order_are_read_as_zarr_reads_them(tmp_path: Path) -> None:
    """Another writer may store the chunks of a shard in any order."""
    array, values = make(tmp_path / "a", "plain", SHARD)
    path = array.shard_path(0)
    data = path.read_bytes()
    size = CHUNK * WIDTH * 2
    index = np.frombuffer(data[-(16 * SHARD // CHUNK + 4) : -4], dtype="<u8").reshape(-1, 2).copy()
    chunks = [data[start : start + size] for start in range(0, SHARD * WIDTH * 2, size)]
    index[:, 0] = index[::-1, 0]
    from teacher_cache.storage.chunks import crc32c

    path.write_bytes(b"".join(chunks[::-1]) + index.tobytes() + crc32c(index.tobytes()))
    np.testing.assert_array_equal(zarr.open_array(str(tmp_path / "a"), mode="r")[:], values)
    again = ShardedArray(tmp_path / "a")
    rows = np.random.default_rng(0).permutation(SHARD)
    np.testing.assert_array_equal(again.read(rows), values[rows])


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_after_the_stored_ones_is_damage_and_not_zeros(tmp_path: Path, kind: str) -> None:
    array, _ = make(tmp_path / "a", kind, SHARD + 10)
    with pytest.raises(DamagedCache, match="lacks"):
        array.read(np.array([SHARD + CHUNK, 3, 200, 7]))


@pytest.mark.parametrize("kind", ["sealed", "compressed"])
def test_a_shard_that_is_truncated_while_it_is_open_is_damage(tmp_path: Path, kind: str) -> None:
    array, _ = make(tmp_path / "a", kind, 2 * SHARD)
    array.read(np.arange(2 * SHARD))
    os.truncate(array.shard_path(1), 100)
    with pytest.raises(DamagedCache, match=r"c/1/0 was truncated while it was read"):
        array.read(np.arange(2 * SHARD))


def test_at_most_open_shards_files_stay_open_and_are_closed_with_the_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "OPEN_SHARDS", 5)
    array, values = make(tmp_path / "a", "compressed", 20 * SHARD)

    def opened() -> int:
        links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return sum(os.path.realpath(link).startswith(str(tmp_path)) for link in links if os.path.exists(link))

    for _ in range(3):
        np.testing.assert_array_equal(array.read(np.arange(len(values))), values)
        assert opened() == 5
    del array
    gc.collect()
    assert opened() == 0


def read_in_child(array: ShardedArray, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float16]:
    return array.read(rows)


def test_a_forked_process_reads_open_files_with_its_own_threads(
    stored: tuple[ShardedArray, npt.NDArray[np.float16]], monkeypatch: pytest.MonkeyPatch
) -> None:
    array, values = stored
    rows = np.random.default_rng(2).integers(0, ROWS, 200)
    monkeypatch.setattr(shard_files, "read_cached", lambda *read: False)
    array.read(rows)  # starts threads, which a fork does not inherit
    with multiprocessing.get_context("fork").Pool(1) as pool:
        np.testing.assert_array_equal(pool.apply_async(read_in_child, (array, rows)).get(60), values[rows])


def test_read_cached_returns_false_instead_of_waiting_for_a_disk(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(2**20))
    file = os.open(path, os.O_RDONLY)
    buffer = bytearray(4096)
    try:
        os.fsync(file)
        if shard_files.read_cached(file, 2**19, buffer):
            assert bytes(buffer) == path.read_bytes()[2**19 : 2**19 + 4096]
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        shard_files.read_all([(file, 0, buffer), (file, 8192, bytearray(10))])
        assert bytes(buffer) == path.read_bytes()[:4096]
        assert not shard_files.read_cached(file, 2**20 - 10, bytearray(20))  # past the end
        with pytest.raises(EOFError):
            shard_files.read_all([(file, 2**20 - 10, bytearray(20))])
    finally:
        os.close(file)


# Columns: only rows that the index has


def test_a_reader_sees_rows_once_they_are_published(tmp_path: Path) -> None:
    built(tmp_path, numbered(11))
    with TeacherCache.open(tmp_path / "cache") as cache:
        view = cache.space()
        assert view.present(np.array([0, 10, 11, -1, 5000])).tolist() == [True, True, False, False, False]
        for wrong in ([11], [3, -1], [5000]):
            with pytest.raises(MissingRows):
                view.gather(np.array(wrong))
        before = view.gather(np.arange(11))
        built(tmp_path, numbered(21), name="more")
        assert view.present(np.array([0, 10, 11, 20, 21])).tolist() == [True, True, True, True, False]
        np.testing.assert_array_equal(view.gather(np.arange(11)), before)
        np.testing.assert_allclose(view.gather(np.arange(21)), teacher_vectors(numbered(21)), rtol=1e-3, atol=1e-6)


def test_vectors_are_written_into_the_given_array_or_tensor_in_its_dtype(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    built(tmp_path, numbered(20))
    rows = np.array([3, 19, 0])
    with TeacherCache.open(tmp_path / "cache") as cache:
        view = cache.space()
        expected = view.gather(rows)
        for out in (torch.empty(3, 32), torch.empty(3, 32, dtype=torch.float16), torch.empty(3, 64)[:, ::2]):
            view.gather(rows, out)
            assert torch.equal(out.float(), torch.from_numpy(expected))
        half = np.empty((3, 32), dtype=np.float16)
        assert view.gather(rows, half) is half
        np.testing.assert_array_equal(half, expected)
        assert view.gather(rows, dtype=np.float64).dtype == np.float64
        with pytest.raises(ValueError, match="expected an array or tensor"):
            view.gather(rows, [[0.0] * 32] * 3)
        with pytest.raises(ValueError, match=r"expected \(3, 32\) floats"):
            view.gather(rows, np.empty((2, 32), dtype=np.float32))


def test_a_read_of_many_shards_stays_under_the_limit_of_open_files(tmp_path: Path) -> None:
    with passing_folder() as folder:
        array, values = make(Path(folder) / "a", "compressed", 60 * SHARD)
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert max(32, limit // 8) >= shards.OPEN_SHARDS
        np.testing.assert_array_equal(array.read(np.arange(0, 60 * SHARD, 50)), values[::50])


def test_rows_outside_the_table_are_absent_and_take_no_memory(tmp_path: Path) -> None:
    built(tmp_path, numbered(20))
    with TeacherCache.open(tmp_path / "cache") as cache:
        view = cache.space()
        rows = np.array([3, 10**9, 2**60, -(10**9), 19])
        assert view.present(rows).tolist() == [True, False, False, False, True]
        assert len(view.column._ends) < 1000


def test_threads_that_read_a_growing_column_agree(tmp_path: Path) -> None:
    built(tmp_path, numbered(8 * 300))
    rows = np.arange(8 * 300)
    with TeacherCache.open(tmp_path / "cache") as cache, ThreadPoolExecutor(4) as pool:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            for _ in range(15):
                view = cache.space()
                parts = pool.map(view.present, [rows[:600], rows[:1100], rows, rows[-5:]])
                assert all(part.all() for part in parts)
        finally:
            sys.setswitchinterval(interval)


def read_all_rows(array: ShardedArray) -> int:
    return len(array.read(np.arange(SHARD)))


def test_a_process_forked_while_a_thread_reads_can_read(tmp_path: Path) -> None:
    array, _ = make(tmp_path / "a", "compressed", SHARD)
    holding, done = threading.Event(), threading.Event()

    def hold() -> None:
        with array._lock:
            holding.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    holding.wait(60)
    try:
        with multiprocessing.get_context("fork").Pool(1) as pool:
            assert pool.apply_async(read_all_rows, (array,)).get(60) == SHARD
    finally:
        done.set()
        thread.join()


def test_after_an_error_no_thread_writes_into_the_given_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "short").write_bytes(b"1")
    (tmp_path / "slow").write_bytes(b"2" * 100)
    monkeypatch.setattr(shard_files, "read_cached", lambda *read: False)
    original = shard_files._read
    slow = os.open(tmp_path / "slow", os.O_RDONLY)
    short = os.open(tmp_path / "short", os.O_RDONLY)

    def slowly(read: shard_files.Read) -> None:
        if read[0] == slow:
            time.sleep(0.2)
        original(read)

    monkeypatch.setattr(shard_files, "_read", slowly)
    buffers = [bytearray(100) for _ in range(40)]
    try:
        with pytest.raises(EOFError):
            shard_files.read_all([(short, 0, bytearray(2)), *((slow, 0, buffer) for buffer in buffers)])
        left = [bytes(buffer) for buffer in buffers]
        time.sleep(0.5)
        assert [bytes(buffer) for buffer in buffers] == left
    finally:
        os.close(slow)
        os.close(short)
