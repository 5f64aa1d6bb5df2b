"""`gc` removes files that no reader needs and the named spaces and corpora, and nothing else."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from teacher_cache.building.build import build
from teacher_cache.errors import CacheLocked, CacheNotFound, CorpusNotFound, SpaceNotFound
from teacher_cache.maintenance.check import verify
from teacher_cache.maintenance.gc import ReclaimReport, reclaim
from teacher_cache.maintenance.repair import repair
from teacher_cache.storage.index import Change
from teacher_cache.table.cache import TeacherCache
from teacher_cache.teachers import TeacherOptions
from teacher_cache.transfer.convert import convert
from tests.teacher_cache.damaged_caches import killed
from tests.teacher_cache.small_caches import TOY, built, corpus_of, numbered, unequal_rows
from tests.teacher_cache.toy_variants import BadVectors

TEXTS = numbered(20)
SMALL = TeacherOptions(model="toy", dims=8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A cache of two spaces and two corpora."""
    built(tmp_path, TEXTS)
    built(tmp_path, TEXTS[:9], teacher=SMALL, name="few")
    return tmp_path / "cache"


def slug(path: Path, dims: int) -> str:
    with TeacherCache.open(path) as cache:
        return cache.space({"dims": dims}).slug


def freed(report: ReclaimReport) -> list[tuple[str, str, int]]:
    return [(one.what, one.where, one.bytes) for one in report.freed]


def files(path: Path) -> set[str]:
    """Files of a cache, without those of LMDB."""
    return {str(file.relative_to(path)) for file in path.rglob("*") if "index.lmdb/" not in str(file)}


def assert_intact(path: Path) -> None:
    assert verify(path, deep=True).damage == []
    with TeacherCache.open(path) as cache:
        assert unequal_rows(cache.space({"dims": 32}), TEXTS) == []
        assert unequal_rows(cache.space({"dims": 8}), TEXTS[:9], SMALL) == []
        assert cache.corpus("corpus").rows[:, 0].tolist() == list(range(20))
        assert cache.corpus("few").rows[:, 0].tolist() == list(range(9))


def test_a_cache_without_orphans_loses_nothing(path: Path) -> None:
    before = files(path)
    report = reclaim(path)
    assert report.to_json() == {"bytes": 0, "freed": [], "kept": [], "dry_run": False}
    assert files(path) == before
    assert_intact(path)


def half_a_shard(path: Path) -> str:
    (found,) = path.glob(f"spaces/{slug(path, 32)}/vectors.zarr/c/1/0")
    left = found.with_name("0.123.writing")
    left.write_bytes(b"half a shard")
    return str(left.relative_to(path))


def half_an_index(path: Path) -> str:
    (path / "index.lmdb.123.writing").mkdir()
    (path / "index.lmdb.123.writing/data.mdb").write_bytes(b"half an ind.")
    return "index.lmdb.123.writing"


def damaged(path: Path) -> str:
    (path / "damaged/texts/c").mkdir(parents=True)
    (path / "damaged/texts/c/0").write_bytes(b"12 bytes ...")
    return "damaged"


def never_published(path: Path) -> str:
    (path / "spaces/never@12345678/vectors.zarr").mkdir(parents=True)
    (path / "spaces/never@12345678/space.json").write_bytes(b"12 bytes ...")
    return "spaces/never@12345678"


def converted(path: Path) -> str:
    name = slug(path, 32)
    (path / f"spaces/{name}/vectors-old.zarr").mkdir()
    (path / f"spaces/{name}/vectors-old.zarr/zarr.json").write_bytes(b"12 bytes ...")
    return f"spaces/{name}/vectors-old.zarr"


def old_manifest(path: Path) -> str:
    (path / "corpora/few/rows-0123456789abcdef.npy").write_bytes(b"12 bytes ...")
    return "corpora/few/rows-0123456789abcdef.npy"


def manifest_of_a_killed_build(path: Path) -> str:
    (path / "corpora/other").mkdir()
    (path / "corpora/other/rows.new").write_bytes(b"12 bytes ...")
    return "corpora/other"


@pytest.mark.parametrize(
    ("leave", "what"),
    [
        (half_a_shard, "leftover"),
        (half_an_index, "leftover"),
        (damaged, "damaged"),
        (never_published, "unpublished space"),
        (converted, "old array"),
        (old_manifest, "old row list"),
        (manifest_of_a_killed_build, "old row list"),
    ],
)
def test_orphans_are_removed_and_their_bytes_counted(path: Path, leave: Callable[[Path], str], what: str) -> None:
    before = files(path)
    where = leave(path)
    cluttered = files(path)
    planned = reclaim(path, dry_run=True)
    assert freed(planned) == [(what, where, 12)]
    assert planned.dry_run
    assert files(path) == cluttered
    assert freed(reclaim(path)) == freed(planned)
    assert files(path) == before
    assert_intact(path)


def test_the_new_array_of_a_converted_space_stays(path: Path) -> None:
    name = slug(path, 32)
    description = path / "spaces" / name / "space.json"
    before = description.read_bytes()
    convert(path, "float32", name)
    description.write_bytes(before)  # as after a kill right after the commit
    assert [(one.what, one.where) for one in reclaim(path).freed] == [("old array", f"spaces/{name}/vectors.zarr")]
    assert json.loads(description.read_bytes())["array"] == "vectors-float32.zarr"
    assert_intact(path)
    assert freed(reclaim(path)) == []


def test_vectors_that_the_index_does_not_know_are_kept_and_reported(path: Path) -> None:
    name = slug(path, 8)
    with TeacherCache.open(path, "a") as cache:
        cache.index.commit([Change("spaces", name.encode(), None)])
    before = files(path)
    report = reclaim(path)
    assert report.freed == []
    assert f"2 shards of vectors that the index does not know; `tcache gc {path} --space {name}`" in report.kept[0]
    assert files(path) == before
    assert [one.what for one in reclaim(path, spaces=[name]).freed] == ["space"]
    assert not (path / "spaces" / name).exists()


# Dropping


@pytest.mark.parametrize("given", [8, "fingerprint"])
def test_a_dropped_space_is_gone_and_the_others_stay(path: Path, given: object) -> None:
    name = slug(path, 8)
    with TeacherCache.open(path) as cache:
        wanted = name if given == 8 else cache.space(name).space.fingerprint
    held = sum(file.stat().st_size for file in (path / "spaces" / name).rglob("*") if file.is_file())
    assert freed(reclaim(path, spaces=[wanted], dry_run=True)) == [("space", f"spaces/{name}", held)]
    assert_intact(path)
    assert freed(reclaim(path, spaces=[wanted])) == [("space", f"spaces/{name}", held)]
    assert verify(path, deep=True).damage == []
    with TeacherCache.open(path) as cache:
        assert list(cache.spaces()) == [slug(path, 32)]
        assert list(cache.index.iter_shards(f"spaces/{name}")) == []
        assert unequal_rows(cache.space(), TEXTS) == []
    assert built(path.parent, TEXTS[:9], teacher=SMALL, name="few").encoded == 9


def test_a_dropped_space_loses_its_quarantined_rows(tmp_path: Path) -> None:
    teacher = BadVectors.options()
    name = built(tmp_path, ["nan 1", *TEXTS], teacher=teacher).space
    reclaim(tmp_path / "cache", spaces=[name])
    with TeacherCache.open(tmp_path / "cache") as cache:
        assert cache.index.quarantined(name) == {}


def test_a_dropped_corpus_is_gone_and_its_texts_stay(path: Path) -> None:
    report = reclaim(path, corpora=["corpus", "corpus"])
    assert [(one.what, one.where) for one in report.freed] == [("corpus", "corpora/corpus")]
    assert verify(path, deep=True).damage == []
    with TeacherCache.open(path) as cache:
        assert list(cache.corpora()) == ["few"]
        assert cache.texts(np.arange(20)) == TEXTS
    result = build(corpus_of(path.parent, TEXTS), TOY, path, name="corpus")
    assert (result.cached, result.encoded) == (20, 0)
    assert_intact(path)


def test_an_unknown_space_or_corpus_is_an_error_before_anything_is_removed(path: Path) -> None:
    damaged(path)
    before = files(path)
    for wanted, error in (({"spaces": ["toy@none"]}, SpaceNotFound), ({"corpora": ["../spaces"]}, CorpusNotFound)):
        with pytest.raises(error):
            reclaim(path, **wanted)  # type: ignore[arg-type]
    with pytest.raises(SpaceNotFound):
        reclaim(path, corpora=["few"], spaces=["toy"])  # two spaces match
    assert files(path) == before
    assert_intact(path)


@pytest.mark.parametrize("moment", [("os:rename", 1), ("os:unlink", 1), ("os:unlink", 3), ("os:rmdir", 2)])
def test_after_a_kill_the_space_is_dropped(path: Path, moment: tuple[str, int]) -> None:
    name = slug(path, 8)
    program = f"from teacher_cache.maintenance.gc import reclaim\nreclaim({str(path)!r}, spaces=[{name!r}])"
    assert killed(*moment, program) == -signal.SIGKILL
    assert verify(path, deep=True).damage == []
    with TeacherCache.open(path) as cache:
        assert name not in cache.spaces()
    reclaim(path, spaces=[name] if moment[0] == "os:rename" else [])
    assert not list((path / "spaces").glob("*8*.writing"))
    assert os.listdir(path / "spaces") == [slug(path, 32)]


# Links and other files


def test_a_link_is_removed_and_its_target_stays(path: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("mine")
    (path / "damaged").symlink_to(outside)
    (path / "spaces/never@12345678").symlink_to(outside)
    (path / "corpora/corpus/rows-old.npy").symlink_to(outside / "precious")
    (path / "spaces" / "x.1.writing").symlink_to(outside)
    report = reclaim(path)
    assert len(report.freed) == 4
    assert report.bytes == 0
    assert (outside / "precious").read_text() == "mine"
    assert_intact(path)


def test_files_in_a_linked_folder_stay(path: Path, tmp_path: Path) -> None:
    shutil.move(path / "spaces", tmp_path / "elsewhere")
    (path / "spaces").symlink_to(tmp_path / "elsewhere")
    name = slug(path, 8)
    never_published(path)
    report = reclaim(path, spaces=[name])
    assert report.freed == []
    assert [kept.split(":")[0] for kept in report.kept] == [f"spaces/{name}", "spaces/never@12345678"]
    assert (tmp_path / "elsewhere" / name / "space.json").exists()
    with TeacherCache.open(path) as cache:
        assert name not in cache.spaces()


def test_the_space_json_of_a_linked_space_is_not_rewritten(path: Path, tmp_path: Path) -> None:
    converted(path)
    folder = path / "spaces" / slug(path, 32)
    shutil.move(folder, tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    (folder / "space.json").write_text("mine")
    report = reclaim(path)
    assert report.freed == []
    assert [kept.split(":")[0] for kept in report.kept] == [f"spaces/{folder.name}/vectors-old.zarr"]
    assert (folder / "space.json").read_text() == "mine"


def test_temporary_files_among_damaged_files_are_counted_once(path: Path) -> None:
    damaged(path)
    (path / "damaged/0.1.writing").write_bytes(b"half")
    assert freed(reclaim(path)) == [("damaged", "damaged", 16)]


def test_other_files_stay(path: Path) -> None:
    (path / "notes.txt").write_text("mine")
    (path / "corpora/mine").mkdir()
    (path / "corpora/mine/notes.txt").write_text("mine")
    (path / "corpora/few/notes.txt").write_text("mine")
    before = files(path)
    assert reclaim(path).freed == []
    assert files(path) == before


def test_files_that_a_repair_moved_are_removed(path: Path) -> None:
    (found,) = path.glob(f"spaces/{slug(path, 32)}/vectors.zarr/c/1/0")
    found.write_bytes(found.read_bytes()[:-20])
    repair(path)
    assert [one.what for one in reclaim(path).freed] == ["damaged"]
    build(corpus_of(path.parent, TEXTS), TOY, path, name="corpus")
    assert_intact(path)


def test_gc_is_refused_beside_a_writer(path: Path) -> None:
    with TeacherCache.open(path, "a"), pytest.raises(CacheLocked):
        reclaim(path)


def test_gc_does_not_create_a_cache(tmp_path: Path) -> None:
    with pytest.raises(CacheNotFound):
        reclaim(tmp_path / "none")
    assert not (tmp_path / "none").exists()
