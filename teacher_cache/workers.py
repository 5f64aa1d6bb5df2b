"""Who runs the teacher: this process, or Ray actors on GPUs, CPU shares or a cluster.

Workers only encode. The driver is the one writer, so the index and the shards see a single process however
many GPUs there are.
"""

import logging
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from teacher_cache.errors import MissingDependency, WorkerError
from teacher_cache.teachers import load_teacher
from teacher_cache.teachers.base import Encoded, Teacher, TeacherSpec

logger = logging.getLogger("teacher_cache")

# Batches waiting at an actor besides the one it works on: it never idles, and little is lost when it dies.
QUEUED_PER_ACTOR = 1
# A batch that has lost this many actors is the likely cause; give up rather than kill the next one.
MAX_LOSSES = 3


class EncodeWorker:
    """Holds one teacher and encodes batches; the same class runs here and inside an actor."""

    def __init__(self, spec: TeacherSpec) -> None:
        self._spec = spec
        self._teacher: Teacher | None = None

    def encode(self, texts: list[str]) -> Encoded:
        """What the teacher says; it is loaded with the first batch, so no batch means no loading."""
        if self._teacher is None:
            self._teacher = load_teacher(self._spec)
        return self._teacher.encode_counted(texts)


class Workers(ABC):
    """A way to run a teacher over batches."""

    @abstractmethod
    def encode(self, spec: TeacherSpec, batches: Iterable[list[str]]) -> Iterator[tuple[int, Encoded]]:
        """Encode every batch once.

        Batches are pulled as workers become free, so a lazy iterable is never read far ahead.

        Returns:
            (number of the batch, what was said), in order of completion.

        Raises:
            WorkerError: workers could not be started, or a batch kept killing them.
        """


class LocalWorkers(Workers):
    """Encode in this process, on one device."""

    def encode(self, spec: TeacherSpec, batches: Iterable[list[str]]) -> Iterator[tuple[int, Encoded]]:
        worker = EncodeWorker(spec)
        for number, texts in enumerate(batches):
            yield number, worker.encode(texts)


class RayWorkers(Workers):
    """One Ray actor per GPU, or per share of the CPUs where there is no GPU.

    With `RAY_ADDRESS` set the actors run on that cluster: this package and the teacher's folder must be
    there too. Otherwise a private Ray instance is started on the loopback interface and ended afterwards.

    Args:
        actors: how many; None takes one per GPU, or one where there is none.
    """

    def __init__(self, actors: int | None = None) -> None:
        self.actors = actors

    def encode(self, spec: TeacherSpec, batches: Iterable[list[str]]) -> Iterator[tuple[int, Encoded]]:
        try:
            import ray
        except ImportError:
            raise MissingDependency(
                "ray is not installed; `pip install 'teacher-cache[ray]'`, or use --workers local"
            ) from None
        started = not ray.is_initialized()
        if started:
            _start_ray(ray)
        crew = _Crew(ray, spec, self.actors)
        try:
            yield from crew.run(batches)
        finally:
            crew.dismiss()
            if started:
                ray.shutdown()


class _Crew:
    """The actors of one build and the batches they hold."""

    def __init__(self, ray: Any, spec: TeacherSpec, count: int | None) -> None:
        self.ray = ray
        resources = ray.cluster_resources()
        gpus, cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 1))
        self.count = count or max(1, gpus)
        # Ray gives each worker as many OMP threads as CPUs, so the shares do not fight over cores.
        options: dict[str, Any] = {"num_cpus": max(1, cpus // self.count)}
        if gpus:
            options |= {"num_gpus": min(1.0, gpus / self.count)}
        if options["num_cpus"] * self.count > cpus:
            options["num_cpus"] = cpus / self.count
        environment = {"TOKENIZERS_PARALLELISM": "false"}
        self.hire = lambda: (
            ray.remote(EncodeWorker).options(runtime_env={"env_vars": environment}, **options).remote(spec)
        )
        self.actors: list[Any] = [self.hire() for _ in range(self.count)]
        self.held: dict[Any, tuple[Any, int, list[str]]] = {}  # reference -> actor, batch number, texts
        self.again: deque[tuple[int, list[str]]] = deque()
        self.losses: dict[int, int] = {}

    def run(self, batches: Iterable[list[str]]) -> Iterator[tuple[int, Encoded]]:
        waiting = enumerate(batches)
        while True:
            self._hand_out(waiting)
            if not self.held:
                return
            (done,), _ = self.ray.wait(list(self.held), num_returns=1)
            actor, number, texts = self.held[done]
            try:
                encoded = self.ray.get(done)
            except self.ray.exceptions.RayActorError as death:
                self._replace(actor, death)
                continue
            except self.ray.exceptions.RayTaskError as error:
                raise error.cause from None
            del self.held[done]
            yield number, encoded

    def _hand_out(self, waiting: Iterator[tuple[int, list[str]]]) -> None:
        for _ in range(1 + QUEUED_PER_ACTOR):
            for actor in self.actors:
                load = sum(holder is actor for holder, _, _ in self.held.values())
                if load > QUEUED_PER_ACTOR:
                    continue
                batch = self.again.popleft() if self.again else next(waiting, None)
                if batch is None:
                    return
                number, texts = batch
                self.held[actor.encode.remote(texts)] = (actor, number, texts)

    def _replace(self, actor: Any, death: Exception) -> None:
        """A new actor for a dead one; what it held is done again."""
        lost = [(reference, batch) for reference, batch in self.held.items() if batch[0] is actor]
        for reference, (_, number, texts) in lost:
            del self.held[reference]
            self.losses[number] = self.losses.get(number, 0) + 1
            if self.losses[number] >= MAX_LOSSES:
                reason = str(death).strip().splitlines()[0]
                raise WorkerError(
                    f"workers died {MAX_LOSSES} times over the same batch of {len(texts)} texts, which starts with "
                    f"{texts[0][:60]!r}: {reason}; if memory ran out, lower --batch-tokens"
                ) from death
            self.again.append((number, texts))
        logger.warning("a worker died; its %d batches are done again by a new one", len(lost))
        self.actors[self.actors.index(actor)] = self.hire()

    def dismiss(self) -> None:
        for actor in self.actors:
            self.ray.kill(actor)


def _start_ray(ray: Any) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Without a GPU Ray would hide CUDA devices from its workers by writing an empty variable; say it itself.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = os.environ.get("RAY_ADDRESS")
    try:
        if address:
            ray.init(address=address, log_to_driver=False, logging_level="warning")
        else:
            ray.init(
                include_dashboard=False,
                log_to_driver=False,
                logging_level="warning",
                _node_ip_address="127.0.0.1",
            )
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = f"the cluster at RAY_ADDRESS={address}" if address else "a local Ray instance"
        raise WorkerError(f"could not start {where}: {error}; use --workers local to do without") from error


def parse_workers(text: str) -> Workers:
    """Workers from what a user writes: "local", "ray" or "ray:N".

    Raises:
        WorkerError: anything else.
    """
    kind, _, number = text.partition(":")
    if kind == "local" and not number:
        return LocalWorkers()
    if kind == "ray" and (not number or (number.isdigit() and int(number) > 0)):
        return RayWorkers(int(number) if number else None)
    raise WorkerError(f"unknown workers {text!r}; expected local, ray or ray:N with N of at least 1")
