"""Shards are plain zarr, are written atomically, and raise on damage."""

import errno
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from teacher_cache.errors import DamagedCache, DiskFull, FormatVersionError
from teacher_cache.storage.files import atomic_write
from teacher_cache.storage.shards import ShardedArray, ShardReceipt
from tests.teacher_cache.small_caches import passing_folder

WIDTH = 5
SHARD = 16
CHUNK = 4


def numbers(folder: Path, *, compressed: bool = True, dtype: str = "<f2") -> ShardedArray:
    return ShardedArray.create(
        folder, width=WIDTH, dtype=dtype, shard_rows=SHARD, chunk_rows=CHUNK, compressed=compressed, checksum=False
    )


def strings(folder: Path) -> ShardedArray:
    return ShardedArray.create(folder, width=None, dtype="str", shard_rows=SHARD, chunk_rows=CHUNK, compressed=True)


def values(rows: int, seed: int = 0) -> npt.NDArray[np.float16]:
    return np.random.default_rng(seed).normal(size=(rows, WIDTH)).astype(np.float16)


def full(rows: int = SHARD) -> npt.NDArray[np.bool_]:
    return np.ones(rows, dtype=bool)


@pytest.mark.parametrize("compressed", [True, False])
def test_zarr_reads_our_arrays_and_nan_for_missing_rows(tmp_path: Path, compressed: bool) -> None:
    array = numbers(tmp_path / "a", compressed=compressed)
    rows = values(SHARD)
    present = np.isin(np.arange(SHARD), [1, 2, 13])
    array.write_shard(0, rows, present)
    array.write_shard(2, rows[:6], full(6))  # shard 1 has no file at all
    array.grow(2 * SHARD + 6)
    seen = zarr.open_array(tmp_path / "a", mode="r")
    assert seen.shape == (2 * SHARD + 6, WIDTH)
    assert seen.dtype == np.float16
    expected = np.full((2 * SHARD + 6, WIDTH), np.nan, dtype=np.float16)
    expected[[1, 2, 13]] = rows[[1, 2, 13]]
    expected[2 * SHARD :] = rows[:6]
    np.testing.assert_array_equal(seen[:], expected)


def test_zarr_reads_our_strings_and_keys(tmp_path: Path) -> None:
    texts = np.array(["", "a\0b", "née 😀", "x" * 10_000, "line\nend"], dtype=object)
    array = strings(tmp_path / "text")
    array.write_shard(0, texts, full(len(texts)))
    array.grow(len(texts))
    assert zarr.open_array(tmp_path / "text", mode="r")[:].tolist() == texts.tolist()

    keys = np.arange(SHARD * WIDTH, dtype=np.uint8).reshape(SHARD, WIDTH)
    table = numbers(tmp_path / "keys", compressed=False, dtype="u1")
    table.write_shard(0, keys, full())
    table.grow(SHARD)
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "keys", mode="r")[:], keys)


@pytest.mark.parametrize("compressed", [True, False])
def test_we_read_what_zarr_wrote(tmp_path: Path, compressed: bool) -> None:
    array = numbers(tmp_path / "a", compressed=compressed)
    rows = values(2 * SHARD + 3)
    array.grow(len(rows))
    zarr.open_array(tmp_path / "a", mode="r+")[:] = rows
    for shard, count in ((0, SHARD), (1, SHARD), (2, 3)):
        read = array.read(shard * SHARD + np.arange(count)[::-1])
        np.testing.assert_array_equal(read, rows[shard * SHARD :][:count][::-1])


def test_we_read_strings_that_zarr_wrote(tmp_path: Path) -> None:
    array = strings(tmp_path / "text")
    array.grow(3)
    zarr.open_array(tmp_path / "text", mode="r+")[:] = np.array(["a", "bé", ""], dtype=object)
    assert array.read(np.array([1, 0, 2])).tolist() == ["bé", "a", ""]


@settings(deadline=None, max_examples=40)
@given(st.data(), st.booleans())
def test_present_rows_are_read_in_any_order(data: st.DataObject, compressed: bool) -> None:
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=SHARD, max_size=SHARD)))
    rows = values(SHARD, seed=data.draw(st.integers(0, 9)))
    places = np.flatnonzero(mask).tolist()
    wanted = np.array(data.draw(st.lists(st.sampled_from(places), max_size=40)) if places else [], dtype=np.intp)
    with passing_folder() as folder:
        array = numbers(Path(folder) / "a", compressed=compressed)
        receipt = array.write_shard(0, rows, mask)
        assert receipt.size == array.shard_path(0).stat().st_size
        np.testing.assert_array_equal(array.read(wanted), rows[wanted])
        np.testing.assert_array_equal(array.read_shard(0, mask), rows[mask])
        assert array.codec.digest(rows[mask]) == receipt.digest


def test_the_digest_covers_only_present_rows(tmp_path: Path) -> None:
    array = numbers(tmp_path / "a")
    rows, other = values(SHARD), values(SHARD)
    mask = np.arange(SHARD) % 2 == 0
    other[~mask] = 7
    first = array.write_shard(0, rows, mask)
    assert array.write_shard(0, other, mask).digest == first.digest
    other[2, 0] += 1
    assert array.write_shard(0, other, mask).digest != first.digest


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x40
    path.write_bytes(data)


def flip_index(path: Path) -> None:
    flip(path, path.stat().st_size - 30)


def flip_index_checksum(path: Path) -> None:
    flip(path, path.stat().st_size - 1)


def cut_a_little(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def cut_to_nothing(path: Path) -> None:
    path.write_bytes(b"")


def cut_in_the_data(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:10] + data[20:])


@pytest.mark.parametrize(
    "damage", [flip_index, flip_index_checksum, cut_a_little, cut_to_nothing, cut_in_the_data, Path.unlink]
)
@pytest.mark.parametrize("make", [numbers, strings])
def test_damage_to_a_shard_is_an_error_that_names_the_file(
    tmp_path: Path, make: Callable[[Path], ShardedArray], damage: Callable[[Path], None]
) -> None:
    array = make(tmp_path / "a")
    rows = values(SHARD) if make is numbers else np.array([f"text {i}" for i in range(SHARD)], dtype=object)
    array.write_shard(0, rows, full())
    damage(array.shard_path(0))
    with pytest.raises(DamagedCache, match=str(array.shard_path(0))):
        array.read(np.arange(SHARD))


def every_flipped_byte_is_found(array: ShardedArray, receipt: ShardReceipt) -> bool:
    """Whether reading all rows fails for each single byte of the shard flipped in turn."""
    path = array.shard_path(0)
    whole = path.read_bytes()
    for place in range(receipt.size):
        flip(path, place)
        try:
            ShardedArray(array.folder).read(np.arange(SHARD))
        except DamagedCache:
            path.write_bytes(whole)
        else:
            return False
    return True


@pytest.mark.parametrize("make", [numbers, strings])
def test_every_flipped_byte_of_a_compressed_shard_is_found_when_read(
    make: Callable[[Path], ShardedArray],
) -> None:
    rows = values(SHARD) if make is numbers else np.array([f"text {i}" for i in range(SHARD)], dtype=object)
    with passing_folder() as folder:
        array = make(Path(folder) / "a")
        assert every_flipped_byte_is_found(array, array.write_shard(0, rows, full()))


def test_a_flipped_byte_of_an_uncompressed_shard_shows_in_the_digest(tmp_path: Path) -> None:
    array = numbers(tmp_path / "a", compressed=False)
    receipt = array.write_shard(0, values(SHARD), full())
    flip(array.shard_path(0), 8)
    assert array.codec.digest(array.read_shard(0, full())) != receipt.digest


def test_a_missing_row_of_a_shard_is_damage(tmp_path: Path) -> None:
    for compressed in (True, False):
        array = numbers(tmp_path / f"{compressed}", compressed=compressed)
        array.write_shard(0, values(SHARD), np.arange(SHARD) < 4)
        with pytest.raises(DamagedCache):
            array.read(np.array([9]))


def test_a_shard_of_another_width_is_damage(tmp_path: Path) -> None:
    array = numbers(tmp_path / "a", compressed=False)
    array.write_shard(0, values(SHARD), full())
    wide = ShardedArray.create(
        tmp_path / "b",
        width=2 * WIDTH,
        dtype="<f2",
        shard_rows=SHARD,
        chunk_rows=CHUNK,
        compressed=False,
        checksum=False,
    )
    wide.write_shard(0, np.ones((SHARD, 2 * WIDTH), dtype=np.float16), full())
    wide.shard_path(0).replace(array.shard_path(0))
    with pytest.raises(DamagedCache, match="8 rows instead of 4"):
        array.read(np.arange(SHARD))


def test_a_replaced_shard_is_read_after_forget(tmp_path: Path) -> None:
    array = numbers(tmp_path / "a")
    first, second = values(SHARD, 1), values(SHARD, 2)
    array.write_shard(0, first, full())
    np.testing.assert_array_equal(array.read_shard(0, full()), first)
    numbers_again = ShardedArray(tmp_path / "a")
    numbers_again.write_shard(0, second, full())
    np.testing.assert_array_equal(array.read_shard(0, full()), first)
    array.forget(0)
    np.testing.assert_array_equal(array.read_shard(0, full()), second)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_keeps_the_old_shard_and_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    array = numbers(tmp_path / "a")
    array.write_shard(0, values(SHARD), full())
    before = files(tmp_path)

    def no_space(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, no_space)
    with pytest.raises(DiskFull, match=r"no space left on the disk of .*a/c/0.*committed before is intact"):
        array.write_shard(0, values(SHARD, 1), full())
    assert files(tmp_path) == before


def test_another_disk_error_is_raised_and_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="broken") as caught, atomic_write(tmp_path / "x") as file:
        file.write(b"1")
    assert not isinstance(caught.value, DiskFull)
    assert files(tmp_path) == {}


def test_an_error_in_the_block_replaces_nothing(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"old")

    def interrupted() -> None:
        with atomic_write(tmp_path / "x") as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert files(tmp_path) == {str(tmp_path / "x"): b"old"}


def test_a_full_file_system_is_reported_and_the_old_data_stay(tmp_path: Path) -> None:
    """In a separate namespace, on a file system of two megabytes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=2m tmpfs '{disk}'"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a small disk")
    script = f"""
import numpy as np
from teacher_cache.table.cache import TeacherCache
from teacher_cache.errors import DiskFull
from teacher_cache.teachers import TeacherOptions, resolve
from teacher_cache.maintenance.check import verify
path = {str(disk / "cache")!r}
with TeacherCache.open(path, "a", shard_rows=1024) as cache:
    done = 0
    try:
        for block in range(1000):
            with cache.appending() as appender:
                appender.add([np.random.default_rng([block, i]).bytes(200).hex() for i in range(500)])
            done = cache.rows
    except DiskFull as error:
        assert "no space left" in str(error), error
        assert cache.rows == done > 0
    else:
        raise SystemExit("the disk never filled up")
verdict = verify(path, deep=True)
assert verdict.ok and verdict.rows == done and not verdict.leftovers, verdict
"""
    command = ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$0" -c "$1"', sys.executable, script]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_grow_never_shrinks_an_array(tmp_path: Path) -> None:
    array = numbers(tmp_path / "a")
    ShardedArray(tmp_path / "a").grow(100)
    array.grow(20)
    assert array.rows == 100
    assert ShardedArray(tmp_path / "a").rows == 100


def test_a_pickled_array_reads_in_a_spawned_process(tmp_path: Path) -> None:
    array = numbers(tmp_path / "a")
    rows = values(SHARD)
    array.write_shard(0, rows, full())
    array.read_shard(0, full())  # maps a file, which cannot be pickled
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        read = pool.apply(array.read, (np.array([3, 1]),))
    np.testing.assert_array_equal(read, rows[[3, 1]])
    assert len(pickle.dumps(array)) < 1000


def test_an_array_without_metadata_is_damaged(tmp_path: Path) -> None:
    array = numbers(tmp_path / "a")
    (tmp_path / "a" / "zarr.json").unlink()
    with pytest.raises(DamagedCache, match=r"zarr.json is missing"):
        ShardedArray(array.folder)


def test_an_array_of_another_layout_is_refused(tmp_path: Path) -> None:
    zarr.create_array(str(tmp_path / "plain"), shape=(8, 2), chunks=(4, 2), dtype="f4")
    with pytest.raises(FormatVersionError, match="not a sharded zarr v3 array"):
        ShardedArray(tmp_path / "plain")
