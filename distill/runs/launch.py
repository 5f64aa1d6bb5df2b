"""Where the processes of a sweep run: on this machine, or as Ray tasks on shares of a cluster's GPUs.

Each run is a process of its own, so that memory, threads and crashes are its alone. Its output goes to a log, and
the open log carries a lock: as long as the process lives no second one works in the same folder.
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

# A process whose sweep was killed, or that was told to end, is gone by then.
SECONDS_TO_WAIT = 2 * SECONDS_TO_STOP


@dataclass(frozen=True)
class Order:
    """What one process is to do.

    Attributes:
        content: for `distill.runs.job`, JSON.
        log: file that its output is added to.
    """

    name: str
    content: Mapping[str, Any]
    log: Path


@dataclass(frozen=True)
class Event:
    """A run that has started, or ended: well when `error` is None, else with that line."""

    name: str
    ended: bool = False
    error: str | None = None
    crash: BaseException | None = None


def work_in_process(
    order: Order,
    environment: Mapping[str, str],
    folder: str,
    started: Callable[[subprocess.Popen[bytes]], None] = lambda process: None,
) -> str | None:
    """Do the order in a process of its own, which starts in `folder`.

    Args:
        environment: added to this process's.
        started: is given the process, which ends when its standard input is closed.

    Returns:
        The line that it failed with; None when it ended well.

    Raises:
        RunFolderError: another process is at this run.
    """
    with _locked_log(order) as log:
        start = log.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "distill.runs.job"],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            cwd=folder,
            start_new_session=True,  # Ctrl-C is the sweep's to answer
        )
    try:
        _tell(process, order)
        started(process)
        code = process.wait()
    finally:
        _end([process])
    return None if code == 0 else _failure(order.log, start, code)


class Launcher(ABC):
    """Runs orders, several at once."""

    @abstractmethod
    def _start(self, order: Order) -> str | None:
        """Do one order, in the thread that calls; as `work_in_process`."""

    @abstractmethod
    def _stop(self) -> None:
        """End everything that runs."""

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def run(self, orders: Sequence[Order]) -> Generator[Event]:
        """An event for every start and every end; when the caller leaves, whatever still runs is ended."""
        pool = ThreadPoolExecutor(self.at_once)
        try:
            for order in orders:
                pool.submit(self._told, order)
            left = len(orders)
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

    def _told(self, order: Order) -> None:
        self._events.put(Event(order.name))
        try:
            self._events.put(Event(order.name, ended=True, error=self._start(order)))
        except KnownError as error:
            self._events.put(Event(order.name, ended=True, error=" ".join(str(error).split())))
        except BaseException as error:
            self._events.put(Event(order.name, crash=error))


class LocalLauncher(Launcher):
    """Processes on this machine, each with its part of the cores and, of several GPUs, one."""

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

    def _start(self, order: Order) -> str | None:
        slot = self._slots.get()
        try:
            return work_in_process(order, slot | self._threads, os.getcwd(), self._started)
        finally:
            self._slots.put(slot)

    def _started(self, process: subprocess.Popen[bytes]) -> None:
        with self._guard:
            self._running.append(process)
            if self._stopped:
                _close(process)

    def _stop(self) -> None:
        with self._guard:
            self._stopped = True
            running = list(self._running)
        _end(running)


class RayLauncher(Launcher):
    """One Ray task a run, which starts the same process where it lands.

    The folders of the runs, the cache and the students must be at the same paths on every machine.

    Args:
        wanted: runs at once; None takes one per GPU (or as many as share one), or one where there is none.
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
        self._task = ray.remote(work_in_process).options(max_retries=0, **options)
        self._running: set[Any] = set()
        self._stopped = False
        self._guard = threading.Lock()

    def _start(self, order: Order) -> str | None:
        with self._guard:
            if self._stopped:
                return "stopped"
            reference = self._task.remote(order, {}, os.getcwd())
            self._running.add(reference)
        try:
            failure: str | None = self._ray.get(reference)
            return failure
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except self._ray.exceptions.RayError as error:
            return f"Ray lost it: {str(error).strip().partition(chr(10))[0]}"
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
    """What `workers`, "local", "ray" or "ray:N", means; Ray is started, and ended, where it is needed.

    Raises:
        WorkerError: no such workers, or Ray cannot be started.
        ConfigError: Ray has no GPU to share.
    """
    chosen = parse_workers(workers)
    if isinstance(chosen, RayWorkers):
        with ray_session() as ray:
            yield RayLauncher(ray, chosen.actors, gpus_per_run)
    else:
        yield LocalLauncher(parallel)


@contextmanager
def _locked_log(order: Order) -> Iterator[BinaryIO]:
    """The run's log, to add to. The lock belongs to the open file: whoever inherits it holds it."""
    order.log.parent.mkdir(parents=True, exist_ok=True)
    with order.log.open("ab") as log:
        until = time.monotonic() + SECONDS_TO_WAIT
        while True:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise RunFolderError(
                        f"another process is at run {order.name} and writes to {order.log}; wait until it ends"
                    ) from None
                time.sleep(0.1)
        log.seek(0, os.SEEK_END)
        log.write(f"--- {order.name}, {datetime.now(UTC).isoformat(timespec='seconds')}\n".encode())
        log.flush()
        yield log


def _tell(process: subprocess.Popen[bytes], order: Order) -> None:
    if process.stdin is not None:
        with suppress(BrokenPipeError):  # it died at once; its log says of what
            process.stdin.write(json.dumps(order.content).encode() + b"\n")


def _close(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        _close(process)
    for process in processes:
        try:
            process.wait(SECONDS_TO_WAIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _failure(log: Path, start: int, code: int) -> str:
    """How a process ended, in one line: the last one of its own."""
    with log.open("rb") as file:
        file.seek(start)
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    said = lines[-1].removeprefix("error: ") if lines else ""
    if code < 0:
        name = signal.Signals(-code).name
        why = ", which also comes when memory runs out" if name == "SIGKILL" else ""
        return f"ended by {name}{why}; see {log}"
    return said or f"ended with exit code {code} without a word; see {log}"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _visible_gpus() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [device for device in named.split(",") if device.strip()]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]
