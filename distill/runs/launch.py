"""Processes of a sweep: on this machine, or in Ray tasks on shares of a cluster's GPUs.

Each run has its own process, with its own memory, threads and crashes. Its output goes to a log, whose open file is
locked, so that no second process works in the same folder.
"""

import fcntl
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from distill.errors import ConfigError, RunFolderError
from distill.runs.job import SECONDS_TO_STOP
from teacher_cache.building.workers import RayWorkers, parse_workers, ray_session, shares
from teacher_cache.errors import KnownError

# A process that was asked to stop, or whose sweep was killed, has ended by then.
SECONDS_TO_WAIT = 2 * SECONDS_TO_STOP


@dataclass(frozen=True)
class Job:
    """The work of one process.

    Attributes:
        content: JSON for `distill.runs.job`.
        log: file that output is appended to.
    """

    name: str
    content: Mapping[str, Any]
    log: Path


@dataclass(frozen=True)
class JobEvent:
    """The start or the end of a job.

    Attributes:
        error: why the job failed, in one line; None if it did not.
        crash: an error of the launcher, which ends the sweep.
    """

    name: str
    ended: bool = False
    error: str | None = None
    crash: BaseException | None = None


def run_job(
    job: Job,
    environment: Mapping[str, str],
    folder: str,
    on_start: Callable[[subprocess.Popen[bytes]], None] = lambda process: None,
) -> str | None:
    """Run a job in a new process.

    Args:
        environment: variables in addition to this process's.
        folder: working directory.
        on_start: called with the process, which stops when its standard input is closed.

    Returns:
        The error in one line; None without one.

    Raises:
        RunFolderError: another process has the run's log open.
    """
    with _locked_log(job) as log:
        start = log.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "distill.runs.job"],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            cwd=folder,
            start_new_session=True,  # Ctrl-C reaches the sweep only, which stops its processes
        )
    try:
        if process.stdin is not None:
            with suppress(BrokenPipeError):  # the process died at once; its log has the reason
                process.stdin.write(json.dumps(job.content).encode() + b"\n")
        on_start(process)
        code = process.wait()
    finally:
        _stop_processes([process])
    return None if code == 0 else _failure(job.log, start, code)


class Launcher(ABC):
    """Runs jobs, several at once."""

    @abstractmethod
    def _start(self, job: Job) -> str | None:
        """Run one job in the calling thread; as `run_job`."""

    @abstractmethod
    def _stop(self) -> None:
        """Stop all running jobs."""

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once
        self._events: queue.SimpleQueue[JobEvent] = queue.SimpleQueue()

    def run(self, jobs: Sequence[Job]) -> Generator[JobEvent]:
        """An event for every start and every end; closing the generator stops all running jobs."""
        pool = ThreadPoolExecutor(self.at_once)
        try:
            for job in jobs:
                pool.submit(self._run_one, job)
            left = len(jobs)
            while left:
                event = self._events.get()
                if event.crash is not None:
                    raise event.crash
                left -= event.ended
                yield event
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            self._stop()
            pool.shutdown()

    def _run_one(self, job: Job) -> None:
        self._events.put(JobEvent(job.name))
        try:
            self._events.put(JobEvent(job.name, ended=True, error=self._start(job)))
        except KnownError as error:
            self._events.put(JobEvent(job.name, ended=True, error=" ".join(str(error).split())))
        except BaseException as error:
            self._events.put(JobEvent(job.name, crash=error))


class LocalLauncher(Launcher):
    """Processes on this machine, each with a share of the cores and, if there are several GPUs, one GPU."""

    def __init__(self, at_once: int) -> None:
        super().__init__(at_once)
        devices = _visible_gpus()
        self._slots: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()
        for number in range(at_once):
            self._slots.put({"CUDA_VISIBLE_DEVICES": devices[number % len(devices)]} if len(devices) > 1 else {})
        self._threads: dict[str, str] = {}
        if at_once > 1 and "OMP_NUM_THREADS" not in os.environ:
            self._threads = {"OMP_NUM_THREADS": str(max(1, _cores() // at_once))}
        self._stopped = False
        self._running: list[subprocess.Popen[bytes]] = []
        self._guard = threading.Lock()

    def _start(self, job: Job) -> str | None:
        slot = self._slots.get()
        try:
            return run_job(job, slot | self._threads, os.getcwd(), self._on_start)
        finally:
            self._slots.put(slot)

    def _on_start(self, process: subprocess.Popen[bytes]) -> None:
        with self._guard:
            self._running.append(process)
            if self._stopped:
                _close_stdin(process)

    def _stop(self) -> None:
        with self._guard:
            self._stopped = True
            running = list(self._running)
        _stop_processes(running)


class RayLauncher(Launcher):
    """One Ray task per run, which starts the same process on its node.

    Run folders, cache and students must have the same paths on every machine.

    Args:
        wanted: runs at once; None is one per GPU, or as many as share it, and one without GPUs.
        gpus_per_run: share of one GPU.
    """

    def __init__(self, ray: Any, wanted: int | None, gpus_per_run: float | None) -> None:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if gpus_per_run is not None:
            gpus = int(sum(node.get("GPU", 0) for node in nodes))
            if not gpus:
                raise ConfigError(f"gpus_per_run is {gpus_per_run:g}, but Ray sees no GPU; leave it out")
            wanted = wanted or max(1, int(gpus / gpus_per_run))
        count, options = shares(nodes, wanted)
        if gpus_per_run is not None:
            options["num_gpus"] = gpus_per_run
        super().__init__(count)
        self._ray = ray
        self._task = ray.remote(run_job).options(max_retries=0, **options)
        self._running: set[Any] = set()
        self._stopped = False
        self._guard = threading.Lock()

    def _start(self, job: Job) -> str | None:
        with self._guard:
            if self._stopped:
                return "stopped"
            reference = self._task.remote(job, {}, os.getcwd())
            self._running.add(reference)
        try:
            failure: str | None = self._ray.get(reference)
            return failure
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except self._ray.exceptions.RayError as error:
            return f"Ray error: {str(error).strip().partition(chr(10))[0]}"
        finally:
            with self._guard:
                self._running.discard(reference)

    def _stop(self) -> None:
        with self._guard:
            self._stopped = True
            for reference in self._running:
                self._ray.cancel(reference)


@contextmanager
def launcher(workers: str, parallel: int, gpus_per_run: float | None) -> Iterator[Launcher]:
    """The launcher for `workers` "local", "ray" or "ray:N"; Ray is started and shut down if needed.

    Raises:
        WorkerError: unknown workers, or Ray cannot be started.
        ConfigError: `gpus_per_run` without a GPU.
    """
    chosen = parse_workers(workers)
    if isinstance(chosen, RayWorkers):
        with ray_session() as ray:
            yield RayLauncher(ray, chosen.actors, gpus_per_run)
    else:
        yield LocalLauncher(parallel)


@contextmanager
def _locked_log(job: Job) -> Iterator[BinaryIO]:
    """The job's log, locked and open to append. Processes that inherit the open file hold the lock too."""
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("ab") as log:
        until = time.monotonic() + SECONDS_TO_WAIT
        while True:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise RunFolderError(
                        f"another process trains run {job.name} and writes to {job.log}; wait until it ends"
                    ) from None
                time.sleep(0.1)
        log.seek(0, os.SEEK_END)
        log.write(f"--- {job.name}, {datetime.now(UTC).isoformat(timespec='seconds')}\n".encode())
        log.flush()
        yield log


def _close_stdin(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()


def _stop_processes(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        _close_stdin(process)
    for process in processes:
        try:
            process.wait(SECONDS_TO_WAIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _failure(log: Path, start: int, code: int) -> str:
    """The error of a process in one line: its signal, or the last line that it wrote after `start`."""
    with log.open("rb") as file:
        file.seek(start)
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    last = lines[-1].removeprefix("error: ") if lines else ""
    if code < 0:
        name = signal.Signals(-code).name
        hint = ", as when memory runs out" if name == "SIGKILL" else ""
        return f"ended by {name}{hint}; see {log}"
    return last or f"ended with exit code {code} without output; see {log}"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _visible_gpus() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [device for device in named.split(",") if device.strip()]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]
