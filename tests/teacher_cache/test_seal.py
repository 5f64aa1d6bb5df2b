"""Sealed copies, for readers that may not write to the lock file of the index."""

import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from teacher_cache.errors import CacheError, CacheNotFound, CorpusNotFound, DamagedCache, MissingRows, SpaceNotFound
from teacher_cache.maintenance.check import verify
from teacher_cache.maintenance.seal import seal
from teacher_cache.table.cache import TeacherCache
from tests.teacher_cache.small_caches import built, numbered, teacher_vectors

TEXTS = numbered(20)
NOBODY = 65534


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    built(tmp_path, TEXTS)
    return tmp_path / "cache"


def served(path: Path | str, *, sealed: bool) -> tuple[list[int], list[str], npt.NDArray[np.float32]]:
    with TeacherCache.open(path, sealed=sealed) as reader:
        rows = reader.lookup(TEXTS)
        return rows.tolist(), reader.texts(rows), reader.space().gather(rows)


def test_a_sealed_copy_reads_like_the_index(cache: Path) -> None:
    sealed = seal(cache)
    assert (sealed.rows, sealed.path) == (20, str(cache / "index.sealed" / "data.mdb"))
    assert sealed.bytes == Path(sealed.path).stat().st_size
    rows, texts, vectors = served(cache, sealed=True)
    assert (rows, texts) == (list(range(20)), TEXTS)
    np.testing.assert_allclose(vectors, teacher_vectors(TEXTS), atol=1e-3)
    np.testing.assert_array_equal(vectors, served(cache, sealed=False)[2])
    assert verify(cache, deep=True).ok


def test_a_sealed_copy_does_not_change_until_the_next(tmp_path: Path, cache: Path) -> None:
    when = seal(cache).sealed
    built(tmp_path, numbered(40), name="longer")
    with TeacherCache.open(cache, sealed=True) as old, TeacherCache.open(cache) as live:
        assert (old.rows, live.rows) == (20, 40)
        with pytest.raises(MissingRows, match=f"as sealed at {when}".replace("+", r"\+")):
            old.texts(np.array([30]))
        with pytest.raises(CorpusNotFound, match="as sealed at"):
            old.corpus("longer")
        with pytest.raises(SpaceNotFound, match="as sealed at"):
            old.space("another teacher")
        assert seal(cache).rows == 40
        assert old.rows == 20  # its file stays open
    assert served(cache, sealed=True)[0] == list(range(20))


def test_the_error_for_a_manifest_removed_after_sealing_names_the_time(tmp_path: Path, cache: Path) -> None:
    seal(cache)
    built(tmp_path, numbered(30))  # replaces the corpus
    with (
        TeacherCache.open(cache, sealed=True) as old,
        pytest.raises(DamagedCache, match=r"cannot be read.* as sealed at"),
    ):
        old.corpus("corpus")


def test_the_error_for_vectors_removed_after_sealing_names_the_time(cache: Path) -> None:
    seal(cache)
    (vectors,) = cache.glob("spaces/*/vectors.zarr")
    shutil.rmtree(vectors)
    with TeacherCache.open(cache, sealed=True) as old, pytest.raises(DamagedCache, match=r"is missing.* as sealed at"):
        old.space()


def test_a_cache_can_be_sealed_beside_a_writer(cache: Path) -> None:
    with TeacherCache.open(cache, "a") as writer:
        with writer.appending() as appender:
            appender.add(["one more"])
        assert seal(cache).rows == 21
        assert writer.lookup(["one more"]).tolist() == [20]


def test_the_sealed_copy_of_another_cache_is_refused(tmp_path: Path, cache: Path) -> None:
    seal(cache)
    other = tmp_path / "other"
    built(other, TEXTS)
    shutil.copytree(cache / "index.sealed", other / "cache" / "index.sealed")
    with TeacherCache.open(other / "cache", sealed=True) as reader, pytest.raises(CacheError, match="another cache"):
        reader.lookup(TEXTS)


def test_a_copied_cache_keeps_its_sealed_copy(tmp_path: Path, cache: Path) -> None:
    seal(cache)
    shutil.copytree(cache, tmp_path / "copied", ignore=shutil.ignore_patterns("index.lmdb"))
    assert served(tmp_path / "copied", sealed=True)[0] == list(range(20))
    with pytest.raises(DamagedCache, match="is missing"):
        TeacherCache.open(tmp_path / "copied")


def test_the_error_without_a_sealed_copy_names_the_command(cache: Path) -> None:
    with TeacherCache.open(cache, sealed=True) as reader, pytest.raises(CacheNotFound, match="`tcache seal`"):
        reader.lookup(TEXTS)


def test_a_sealed_copy_cannot_be_opened_for_writing(cache: Path) -> None:
    seal(cache)
    with pytest.raises(CacheError, match="a sealed index is read-only"):
        TeacherCache.open(cache, "a", sealed=True)
    TeacherCache.open(cache, "a").close()  # the lock is free


def test_a_pickled_reader_of_a_sealed_copy_reads_it_too(tmp_path: Path, cache: Path) -> None:
    seal(cache)
    built(tmp_path, numbered(40), name="longer")
    with TeacherCache.open(cache, sealed=True) as reader:
        assert pickle.loads(pickle.dumps(reader)).rows == 20


def count_found(path: Path, found: "multiprocessing.Queue[int]") -> None:
    rows, texts, vectors = served(path, sealed=True)
    found.put(int((np.array(rows) >= 0).sum()) + len(texts) + len(vectors))


def test_two_processes_read_one_sealed_copy(cache: Path) -> None:
    seal(cache)
    context = multiprocessing.get_context("spawn")
    found: multiprocessing.Queue[int] = context.Queue()
    processes = [context.Process(target=count_found, args=(cache, found)) for _ in range(2)]
    for process in processes:
        process.start()
    assert [found.get(timeout=60) for _ in processes] == [60, 60]
    for process in processes:
        process.join()


def in_a_child(work: Callable[[], None]) -> int:
    """Do the work in a forked child; returns its exit code, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("moment", ["_fill", "fsync", "replace"])
def test_a_kill_while_sealing_leaves_the_older_copy(tmp_path: Path, cache: Path, moment: str) -> None:
    seal(cache)
    built(tmp_path, numbered(40), name="longer")

    def killed() -> None:
        from teacher_cache.storage import index

        def die(*arguments: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(index if moment == "_fill" else os, moment, die)
        seal(cache)

    assert in_a_child(killed) == -signal.SIGKILL
    assert served(cache, sealed=True)[0] == list(range(20))
    with TeacherCache.open(cache, sealed=True) as old:
        assert old.rows == 20
    (leftover,) = verify(cache).leftovers
    assert leftover.startswith("index.sealed/")
    assert seal(cache).rows == 40


@pytest.fixture
def read_only(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Runs work in a child process that may read the cache but not write to it."""
    served(cache, sealed=False)  # import now what the child may not be allowed to read
    tmp_path.chmod(0o755)
    (cache / "index.lmdb" / "lock.mdb").chmod(0o444)
    monkeypatch.chdir(tmp_path)

    def run(work: Callable[[], None]) -> int:
        def as_nobody() -> None:
            if os.getuid() == 0:  # file modes do not restrict root
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            work()

        return in_a_child(as_nobody)

    yield run
    (cache / "index.lmdb" / "lock.mdb").chmod(0o644)


def test_a_reader_that_may_not_write_to_the_lock_reads_the_sealed_copy(
    cache: Path, read_only: Callable[..., int]
) -> None:
    seal_time = seal_as_owner(cache)

    def read() -> None:
        rows, texts, vectors = served("cache", sealed=False)
        assert (rows, texts, len(vectors)) == (list(range(20)), TEXTS, 20)
        with TeacherCache.open("cache") as reader:
            assert seal_time in reader.index.as_of
        with pytest.raises(CacheError, match="a sealed copy cannot be sealed again"), TeacherCache.open("cache") as c:
            c.index.copy_sealed(Path("nothing"), "", "")

    assert read_only(read) == 0


def seal_as_owner(cache: Path) -> str:
    lock = cache / "index.lmdb" / "lock.mdb"
    lock.chmod(0o644)
    when = seal(cache).sealed
    lock.chmod(0o444)
    return when


def test_the_error_for_a_lock_that_cannot_be_written_names_the_command(read_only: Callable[..., int]) -> None:
    def read() -> None:
        with (
            TeacherCache.open("cache") as reader,
            pytest.raises(CacheError, match=r"no permission to write to .*lock.mdb.*`tcache seal cache`"),
        ):
            reader.lookup(TEXTS)

    assert read_only(read) == 0


def test_on_a_read_only_file_system_only_the_sealed_copy_is_read(tmp_path: Path, cache: Path) -> None:
    """LMDB would open the index there without a lock."""
    (tmp_path / "mounted").mkdir()
    script = (
        "from teacher_cache.table.cache import TeacherCache\n"
        "with TeacherCache.open('mounted') as reader:\n"
        "    try:\n        print(reader.rows, reader.index.folder.name)\n"
        "    except Exception as error:\n        print(error)\n"
    )

    def mounted(*command: str) -> subprocess.CompletedProcess[str]:
        mount = "mount --bind cache mounted && mount -o remount,ro,bind mounted"
        return subprocess.run(
            ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh", *command],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
        )

    if shutil.which("unshare") is None or mounted("true").returncode:
        pytest.skip("this user may not mount")
    assert "no permission to write to mounted/index.lmdb/lock.mdb" in mounted(sys.executable, "-c", script).stdout
    seal(cache)
    assert mounted(sys.executable, "-c", script).stdout == "20 index.sealed\n"
