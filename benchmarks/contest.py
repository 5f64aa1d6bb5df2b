"""Contenders in processes of their own, with their data, measured in interleaved rounds."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers import CONTENDERS, REPEATED
from benchmarks.resources import warm
from benchmarks.vectors import write_vectors

ROOT = Path(__file__).resolve().parent.parent
# No network access.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "LITDATA_DISABLE_VERSION_CHECK": "1",
    "DO_NOT_TRACK": "1",
}

Answer = dict[str, Any]


class Absent(Exception):
    """The contender's library is not installed."""


class Failed(Exception):
    """The contender raised an error; its log has the traceback."""


class Process:
    """The process of a contender.

    Args:
        root: folder of the contenders' data.
        vectors: the .npy file that they are made from.
    """

    def __init__(self, name: str, root: Path, vectors: Path, rows: int, dims: int) -> None:
        self.log = root / "logs" / f"{name.replace(', ', '-').replace(' ', '-')}.log"
        home = root / "home"  # keeps files out of the user's home
        for folder in (self.log.parent, home):
            folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "benchmarks.contender", name, str(root), str(vectors), str(rows), str(dims)]
        with open(self.log, "ab") as log:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **OFFLINE, "PYTHONPATH": str(ROOT), "HOME": str(home)},
                cwd=home,
                start_new_session=True,
            )

    def request(self, request: str, **arguments: Any) -> Answer:
        """The response to one request.

        Raises:
            Absent: the library is not there.
            Failed: it raised, or ended.
        """
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            self._child.stdin.write(json.dumps({"request": request, **arguments}).encode() + b"\n")
            self._child.stdin.flush()
            answer: Answer = json.loads(self._child.stdout.readline())
        except (BrokenPipeError, ValueError):
            raise Failed(f"ended without a response, see {self.log}") from None
        if "absent" in answer:
            raise Absent(answer["absent"])
        if "failed" in answer:
            raise Failed(answer["failed"])
        return answer

    def pause(self) -> None:
        """Suspend the process and its children: threads of some libraries are always busy."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the process and its children."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # the process has ended; the next request reports it
            os.killpg(self._child.pid, number)

    def close(self) -> None:
        """End the process; threads of some libraries do not end by themselves."""
        self.resume()
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.close()
        self._child.stdout.close()
        try:
            self._child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


@dataclass(frozen=True)
class Size:
    """Number and width of vectors."""

    rows: int
    dims: int


class Contest:
    """Contenders with their data under one folder; complete data are reused.

    Attributes:
        missing: contender -> "absent", or why it failed; it has no more turns.
        bytes: contender -> size of its data.
    """

    def __init__(self, folder: Path, size: Size, only: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self.size = size
        self.only = only
        self.missing: dict[str, str] = {}
        self.bytes: dict[str, int] = {}

    def root(self, rows: int) -> Path:
        return self.folder / f"{rows}x{self.size.dims}"

    def data(self, name: str, rows: int | None = None) -> Path:
        """Folder of a contender's data."""
        return self.root(rows or self.size.rows) / {**CONTENDERS, **REPEATED}[name].data

    def wanted(self, names: Iterable[str]) -> list[str]:
        """The chosen contenders that have not failed."""
        return [
            name
            for name in names
            if name not in self.missing and (not self.only or any(part in name for part in self.only))
        ]

    @contextmanager
    def running(self, name: str, rows: int | None = None) -> Iterator[Process]:
        """The process of a contender whose data are written and open.

        Raises:
            Absent, Failed
        """
        rows = rows or self.size.rows
        self._prepare(name, rows)
        with self._process(name, rows) as process:
            process.request("open")
            yield process

    @contextmanager
    def _process(self, name: str, rows: int) -> Iterator[Process]:
        # A repeated shard is made from the first rows of the main file.
        vectors = self._vectors(self.size.rows if name in REPEATED else rows)
        process = Process(name, self.root(rows), vectors, rows, self.size.dims)
        try:
            process.request("load")
            yield process
        finally:
            process.close()

    def _vectors(self, rows: int) -> Path:
        path = self.root(rows) / "npy" / "vectors.npy"
        complete = path.parent.with_suffix(".json")
        if not complete.exists():
            print_status(f"{rows} rows: created")
            path.parent.mkdir(parents=True, exist_ok=True)
            write_vectors(path, rows, self.size.dims)
            complete.write_text(json.dumps({"bytes": path.stat().st_size}))
        return path

    def _prepare(self, name: str, rows: int) -> None:
        """Write the contender's data in another process than the measured one."""
        data = self.data(name, rows)
        complete = data.with_suffix(".json")
        if not complete.exists():
            with self._process(name, rows) as process:
                if not complete.exists():  # the memory map's data exist already
                    print_status(f"{name}: writing {rows} rows")
                    shutil.rmtree(data, ignore_errors=True)
                    data.mkdir(parents=True)
                    complete.write_text(json.dumps(process.request("write")))
        self.bytes[name] = json.loads(complete.read_text())["bytes"]

    @contextmanager
    def noting(self, name: str) -> Iterator[None]:
        """Skip a contender from now on if it is absent or fails in the block; the reason is recorded and printed."""
        try:
            yield
        except (Absent, Failed) as error:
            self.missing[name] = "absent" if isinstance(error, Absent) else f"failed: {error}"
            print_status(f"{name}: {self.missing[name]}")

    def rounds(
        self, names: Iterable[str], count: int, measure: Callable[[Process, int], Answer]
    ) -> dict[str, list[Answer]]:
        """The responses of each contender in `count` interleaved rounds.

        Before them comes a turn with number -1, which does not count.
        """
        answers: dict[str, list[Answer]] = {}
        with ExitStack() as stack:
            processes: dict[str, Process] = {}
            for name in self.wanted(names):
                with self.noting(name):
                    processes[name] = stack.enter_context(self.running(name))
                    processes[name].pause()
            for number in range(-1, count):
                for name in self.wanted(processes):
                    with self.noting(name):
                        warm(self.data(name))  # the page cache may have dropped idle files
                        processes[name].resume()
                        answer = measure(processes[name], number)
                        processes[name].pause()
                        if number >= 0:
                            answers.setdefault(name, []).append(answer)
        return {name: found for name, found in answers.items() if len(found) == count}


def print_status(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
