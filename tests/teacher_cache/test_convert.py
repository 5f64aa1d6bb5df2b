"""Conversion of a space to another encoding: without a teacher, atomic for readers, never from damage."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import zarr

from teacher_cache.building.build import build
from teacher_cache.errors import CacheError, CacheNotFound, DamagedCache
from teacher_cache.maintenance.check import verify
from teacher_cache.maintenance.gc import reclaim
from teacher_cache.maintenance.info import describe
from teacher_cache.maintenance.repair import repair
from teacher_cache.storage.codec import ENCODINGS, find_encoding
from teacher_cache.table.cache import TeacherCache
from teacher_cache.teachers import TeacherOptions
from teacher_cache.tokens.request import TokenRequest
from teacher_cache.transfer import convert as conversion
from teacher_cache.transfer.convert import convert
from teacher_cache.transfer.exporter import export
from teacher_cache.transfer.importer import import_vectors
from tests.teacher_cache.small_caches import TOY, built, corpus_of, numbered, teacher_vectors

TEXTS = numbered(43)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    built(tmp_path, TEXTS, storage="float32")
    return tmp_path / "cache"


@pytest.mark.parametrize("storage", [name for name in ENCODINGS if name != "float32"])
def test_a_converted_space_equals_a_build_in_that_encoding(path: Path, tmp_path: Path, storage: str) -> None:
    result = convert(path, storage)
    other = tmp_path / "other"
    built(other, TEXTS, storage=storage)
    with TeacherCache.open(path) as cache, TeacherCache.open(other / "cache") as fresh:
        rows = np.arange(len(TEXTS))
        np.testing.assert_array_equal(cache.space().gather_stored(rows), fresh.space().gather_stored(rows))
        assert cache.space().record.storage == storage
    assert (result.rows, result.storage_before, result.storage) == (43, "float32", storage)
    assert 0 < result.worst_error <= find_encoding(storage).max_cosine_error
    assert verify(path, deep=True).ok


def test_the_next_build_continues_in_the_new_encoding(path: Path, tmp_path: Path) -> None:
    convert(path, "int8")
    result = build(corpus_of(tmp_path, numbered(50)), TOY, path, name="more")
    assert (result.cached, result.encoded) == (43, 7)
    with TeacherCache.open(path) as cache:
        assert cache.space().record.storage == "int8"
        vectors = cache.space().gather(np.arange(50))
        cosines = (vectors * teacher_vectors(numbered(50))).sum(axis=1) / np.linalg.norm(vectors, axis=1)
        assert (cosines > 1 - 1e-4).all()
    assert verify(path, deep=True).ok


def test_open_readers_keep_the_old_vectors_and_new_readers_get_the_new(path: Path) -> None:
    """Also shards that were not read before; until `gc`."""
    rows = np.arange(43)
    with TeacherCache.open(path) as cache:
        view = cache.space()
        view.gather(rows[:3])
        convert(path, "int8")
        np.testing.assert_array_equal(view.gather(rows), teacher_vectors(TEXTS))
        assert cache.space().encoding.name == "int8"
        assert verify(path, deep=True).ok
    reclaim(path)
    with TeacherCache.open(path) as cache:
        (slug,) = cache.space_records()
        assert list(cache.index.iter_shards(f"spaces/{slug}")) == []
        assert [entry.name for entry in (path / "spaces" / slug).glob("vectors*")] == ["vectors-compact.zarr"]
    assert verify(path, deep=True).ok


def test_errors_of_several_conversions_add_up(path: Path) -> None:
    errors = [convert(path, storage).worst_error for storage in ("float16", "int8", "float32")]
    assert all(first <= second for first, second in pairwise(errors))
    with TeacherCache.open(path) as cache:
        vectors = cache.space().gather(np.arange(43)).astype(np.float64)
        exact = teacher_vectors(TEXTS).astype(np.float64)
        cosines = (vectors * exact).sum(axis=1) / np.linalg.norm(vectors, axis=1) / np.linalg.norm(exact, axis=1)
        assert 1 - cosines.min() <= errors[-1] + 1e-12
        assert not (cache.path / cache.space().array_name).is_symlink()


def test_a_conversion_to_the_same_encoding_does_nothing(path: Path) -> None:
    assert convert(path, "float32").rows == 0


def test_an_interrupted_conversion_changes_nothing_and_can_be_repeated(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = conversion._convert_shard
    calls = 0

    def killed(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(conversion, "_convert_shard", killed)
    with pytest.raises(KeyboardInterrupt):
        convert(path, "float16-raw")
    with TeacherCache.open(path) as cache:
        assert cache.space().record.storage == "float32"
        np.testing.assert_array_equal(cache.space().gather(np.arange(43)), teacher_vectors(TEXTS))
    assert verify(path, deep=True).ok
    assert convert(path, "float16-raw").rows == 43


def test_damage_is_not_converted(path: Path) -> None:
    with TeacherCache.open(path) as cache:
        shard = cache.space().vectors.shard_path(2)
    data = bytearray(shard.read_bytes())
    data[30] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DamagedCache, match=str(shard)):
        convert(path, "float16-raw")


def test_a_vector_that_the_encoding_cannot_hold_is_an_error(tmp_path: Path) -> None:
    built(tmp_path, TEXTS, teacher=TeacherOptions(model="toy", normalize=False), storage="float32")
    with TeacherCache.open(tmp_path / "cache", "a") as cache:
        vectors = teacher_vectors(TEXTS[3:4]) * 1e6
        cache.space().write(0, np.array([3]), vectors.astype(np.float32))
    with pytest.raises(CacheError, match=r"row 3 of space .* cannot be stored as float16: overflows.*remains float32"):
        convert(tmp_path / "cache", "float16")


def test_zarr_and_numpy_alone_read_int8_vectors(path: Path) -> None:
    convert(path, "int8")
    with TeacherCache.open(path) as cache:
        view = cache.space()
        expected = view.gather(np.arange(43))
        dims = view.dims
    stored = zarr.open_array(str(path / "spaces" / view.slug / "vectors-compact.zarr"), mode="r")[:]
    numbers, scales = stored[:, :dims], np.ascontiguousarray(stored[:, dims:]).view("<f2").astype(np.float32)
    np.testing.assert_array_equal(numbers * scales.repeat(64, axis=1)[:, :dims], expected)


@pytest.mark.parametrize("storage", [name for name in ENCODINGS if name != "int8"])
def test_vectors_that_were_int8_before_are_valid_in_any_encoding(tmp_path: Path, storage: str) -> None:
    """Their lengths differ by more than the bound of the new encoding, which is not damage."""
    texts = numbered(400)
    built(tmp_path, texts, storage="int8")
    path = tmp_path / "cache"
    convert(path, storage)
    with TeacherCache.open(path) as cache:
        lengths = np.linalg.norm(cache.space().gather(np.arange(400)), axis=1)
    assert np.abs(lengths - 1).max() > 1.5e-3
    assert verify(path, deep=True).ok
    assert repair(path).missing == 0


@pytest.mark.parametrize(("old", "name"), [("raw", "float16-raw"), ("compact", "int8")])
def test_files_keep_the_older_names_of_encodings_and_both_are_accepted(tmp_path: Path, old: str, name: str) -> None:
    built(tmp_path, TEXTS[:5], tokens=TokenRequest(), storage=old, token_storage=old)
    built(tmp_path, TEXTS[:9], tokens=TokenRequest(), storage=name, token_storage=name)
    path = tmp_path / "cache"
    with TeacherCache.open(path) as cache:
        view = cache.space()
        on_disk = [cache.index.record("spaces", view.slug) or b"", (view.folder / "space.json").read_bytes()]
        assert view.record.columns is not None
        assert (view.record.storage, view.record.columns.storage) == (name, name)
    for record in map(json.loads, on_disk):
        assert (record["storage"], record["columns"]["storage"]) == (old, old)
    (held,) = describe(path)["spaces"].values()
    assert (held["storage"], held["columns"]["tokens"]["storage"]) == (name, name)
    assert convert(path, old).rows == convert(path, name).rows == 0
    export(path, tmp_path / "out", "npy")
    assert json.loads((tmp_path / "out/space.json").read_text())["storage"] == old
    import_vectors(tmp_path / "out", tmp_path / "other")
    with TeacherCache.open(tmp_path / "other") as cache:
        assert cache.space().record.storage == name


def test_a_missing_cache_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(CacheNotFound):
        convert(tmp_path / "none", "float16-raw")
    assert list(tmp_path.iterdir()) == []
