"""One writer per cache; a killed writer leaves no stale lock."""

import logging
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from teacher_cache.errors import CacheLocked
from teacher_cache.storage.lock import WriterLock
from teacher_cache.table.cache import TeacherCache

HOLDER = """
import sys
from teacher_cache.table.cache import TeacherCache
cache = TeacherCache.open(sys.argv[1], "a", shard_rows=8)
print("held", flush=True)
sys.stdin.read()
cache.close()
"""


def holder(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_writer_gets_an_error_that_names_the_first(tmp_path: Path) -> None:
    with holder(tmp_path / "cache") as owner:
        who = f"process {owner.pid} on {re.escape(socket.gethostname())} since 20[0-9T:+-]+"
        with pytest.raises(CacheLocked, match=f"cache is being written by {who}; wait for it"):
            TeacherCache.open(tmp_path / "cache", "a")
        TeacherCache.open(tmp_path / "cache").close()  # a reader needs no lock
        owner.communicate("")
    TeacherCache.open(tmp_path / "cache", "a").close()


def test_the_lock_of_a_killed_writer_is_taken_over_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with holder(tmp_path / "cache") as owner:
        owner.send_signal(signal.SIGKILL)
    with caplog.at_level(logging.WARNING, "teacher_cache"):
        TeacherCache.open(tmp_path / "cache", "a").close()
    assert f"took over the writer lock of process {owner.pid} on" in caplog.text


def test_a_released_lock_is_taken_without_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        WriterLock(tmp_path / "lock").release()
    assert caplog.text == ""


def test_a_lock_also_excludes_the_same_process(tmp_path: Path) -> None:
    with TeacherCache.open(tmp_path / "cache", "a"):
        with pytest.raises(CacheLocked, match=f"process {os.getpid()} "):
            TeacherCache.open(tmp_path / "cache", "a")
        with pytest.raises(CacheLocked):  # the failed attempt does not release it
            TeacherCache.open(tmp_path / "cache", "a")


def test_a_lock_file_with_garbage_still_locks(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path / "lock")
    (tmp_path / "lock").write_text("[]")
    with pytest.raises(CacheLocked, match="by another process"):
        WriterLock(tmp_path / "lock")
    lock.release()


def test_programs_started_by_the_writer_do_not_inherit_the_lock(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path / "lock")
    with subprocess.Popen(["sleep", "60"], close_fds=False) as child:
        lock.release()
        WriterLock(tmp_path / "lock").release()
        child.kill()
