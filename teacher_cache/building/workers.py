"""Workers that run the teacher: this process, or Ray actors on GPUs, CPU shares or a cluster.

Workers only encode. The driver is the only process that writes to the cache, for any number of GPUs.
"""

import logging
import math
import os
import sys
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from operator import itemgetter
from typing import Any

from teacher_cache.errors import WorkerError, optional_import
from teacher_cache.teachers import load_teacher
from teacher_cache.teachers.base import Encoded, Teacher, TeacherSpec

logger = logging.getLogger("teacher_cache")

LOOPBACK = "127.0.0.1"
# Batches queued at an actor besides the current one: it is never idle, and little is lost if it dies.
QUEUED_PER_ACTOR = 1
# Raise an error after a batch has lost this many actors: it is the likely cause.
MAX_LOSSES = 3


# (batch number, its vectors). Closing the generator ends the workers.
EncodedBatches = Generator[tuple[int, Encoded], None, None]


class EncodeWorker:
    """Encodes batches with one teacher; used in this process and in actors."""

    def __init__(self, spec: TeacherSpec) -> None:
        self._spec = spec
        self._teacher: Teacher | None = None

    def encode(self, texts: list[str]) -> Encoded:
        """Vectors of a batch; the first call loads the teacher."""
        if self._teacher is None:
            self._teacher = load_teacher(self._spec)
        return self._teacher.encode_counted(texts)


class Workers(ABC):
    """Runs a teacher over batches."""

    @abstractmethod
    def encode(self, spec: TeacherSpec, batches: Iterable[list[str]]) -> EncodedBatches:
        """Encode every batch once, and yield the batches in order of completion.

        Batches are taken as workers become free, so a lazy iterable is not read far ahead.

        Raises:
            WorkerError: workers could not be started, or a batch repeatedly killed them.
        """


class LocalWorkers(Workers):
    """Encode in this process, on one device."""

    def encode(self, spec: TeacherSpec, batches: Iterable[list[str]]) -> EncodedBatches:
        worker = EncodeWorker(spec)
        for number, texts in enumerate(batches):
            yield number, worker.encode(texts)


class RayWorkers(Workers):
    """One Ray actor per GPU, or per share of the CPUs if there is no GPU.

    If `RAY_ADDRESS` is set, the actors run on that cluster, which needs this package and the teacher's folder.
    Otherwise a private Ray instance runs on the loopback interface and ends with the build.

    Args:
        actors: number of actors; None uses one per GPU, or one if there is none.
    """

    def __init__(self, actors: int | None = None) -> None:
        self.actors = actors

    def encode(self, spec: TeacherSpec, batches: Iterable[list[str]]) -> EncodedBatches:
        with ray_session() as ray, closing(_ActorPool(ray, spec, self.actors)) as pool:
            yield from pool.run(batches)


@contextmanager
def ray_session() -> Iterator[Any]:
    """The initialized Ray library. A Ray instance started here ends with the block."""
    if not os.environ.get("RAY_ADDRESS"):
        # Read when Ray is imported. Only then is 127.0.0.1 the address of its node; else its servers listen on every
        # interface.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        if "ray" not in sys.modules:  # set later it would apply to Ray's servers but not to this process
            # The default from Ray 2.60 on, which prints a warning if this is unset.
            os.environ.setdefault("RAY_AUTH_MODE", "token")
    with optional_import("a build with Ray", advice=", or leave `workers` out"):
        import ray
    started = not ray.is_initialized()
    if started:
        _start_ray(ray)
    try:
        yield ray
    finally:
        if started:
            ray.shutdown()


def shares(nodes: list[dict[str, float]], wanted: int | None) -> tuple[int, dict[str, float]]:
    """Number of actors, and the resources of each, such that all of them fit at once.

    An actor that no single node can hold would wait forever, so resources are sized by the smallest node.
    """
    with_gpu = [node for node in nodes if node.get("GPU", 0) >= 1]
    gpus = sum(int(node["GPU"]) for node in with_gpu)
    count = wanted or max(1, gpus)
    options: dict[str, float] = {}
    if gpus:
        per_gpu = -(-count // gpus)
        options["num_gpus"] = _share(1, per_gpu)
        cpus = min(_share(node.get("CPU", 0), min(count, int(node["GPU"]) * per_gpu)) for node in with_gpu)
    else:
        with_cpu = [node for node in nodes if node.get("CPU", 0) > 0]
        cpus = _share(min((node["CPU"] for node in with_cpu), default=0), -(-count // max(1, len(with_cpu))))
    # Ray gives a worker as many OpenMP threads as CPUs, so actors do not compete for cores.
    return count, {"num_cpus": cpus, **options}


def _share(amount: float, parts: int) -> float:
    """A part of a resource, rounded down: Ray allocates whole units, or ten thousandths below one."""
    share = amount / parts
    return float(math.floor(share)) if share >= 1 else math.floor(share * 10_000) / 10_000


class _ActorPool:
    """The actors of one build, and the batches they are encoding."""

    def __init__(self, ray: Any, spec: TeacherSpec, count: int | None) -> None:
        self.ray = ray
        count, options = shares([node["Resources"] for node in ray.nodes() if node["Alive"]], count)
        environment = {"TOKENIZERS_PARALLELISM": "false"}
        actor = ray.remote(EncodeWorker).options(runtime_env={"env_vars": environment}, **options)
        self.start = lambda: actor.remote(spec)
        self.actors: list[Any] = [self.start() for _ in range(count)]
        # Reference -> actor, batch number, texts; an actor works in the order of submission.
        self.running: dict[Any, tuple[Any, int, list[str]]] = {}
        self.retries: deque[tuple[int, list[str]]] = deque()
        self.losses: Counter[int] = Counter()

    def run(self, batches: Iterable[list[str]]) -> EncodedBatches:
        remaining = enumerate(batches)
        while True:
            self._submit(remaining)
            if not self.running:
                return
            (done,), _ = self.ray.wait(list(self.running), num_returns=1)
            actor, number, _ = self.running[done]
            try:
                encoded = self.ray.get(done)
            except self.ray.exceptions.RayActorError as death:
                self._replace(actor, death)
                continue
            except self.ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except self.ray.exceptions.RayError as error:
                raise WorkerError(f"Ray lost batch {number}: {_first_line(error)}") from error
            del self.running[done]
            yield number, encoded

    def _submit(self, remaining: Iterator[tuple[int, list[str]]]) -> None:
        """Submit batches to the actors with the fewest, until all queues are full or no batch is left."""
        load = Counter(dict.fromkeys(self.actors, 0))
        load.update(actor for actor, _, _ in self.running.values())
        while load:
            actor, queued = min(load.items(), key=itemgetter(1))
            if queued > QUEUED_PER_ACTOR:
                return
            batch = self.retries.popleft() if self.retries else next(remaining, None)
            if batch is None:
                return
            number, texts = batch
            self.running[actor.encode.remote(texts)] = (actor, number, texts)
            load[actor] += 1

    def _replace(self, actor: Any, death: Exception) -> None:
        """Start a new actor for a dead one, and retry its batches; the current one is counted as the cause."""
        lost = [reference for reference, (holder, _, _) in self.running.items() if holder is actor]
        batches = [self.running.pop(reference)[1:] for reference in lost]
        number, texts = batches[0]
        self.losses[number] += 1
        if self.losses[number] >= MAX_LOSSES:
            raise WorkerError(
                f"workers died {MAX_LOSSES} times on the same batch of {len(texts)} texts, which starts "
                f"with {texts[0][:60]!r}: {_first_line(death)}; if memory ran out, lower `batch_tokens`"
            ) from death
        self.retries.extend(batches)
        logger.warning("a worker died; a new one retries its %d batches", len(batches))
        self.ray.kill(actor)  # it may only be unreachable
        self.actors[self.actors.index(actor)] = self.start()

    def close(self) -> None:
        for actor in self.actors:
            self.ray.kill(actor)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _start_ray(ray: Any) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Without this and without a GPU, Ray sets CUDA_VISIBLE_DEVICES of its workers to an empty string.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
    try:
        if address:
            ray.init(address=address, **options)
        else:
            ray.init(include_dashboard=False, _node_ip_address=LOOPBACK, **options)
            if ray.util.get_node_ip_address() != LOOPBACK:
                logger.warning(
                    "Ray listens on every network interface, because it was imported before this build began; "
                    "set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 to keep it to this machine"
                )
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = f"the cluster at RAY_ADDRESS={address}" if address else "a local Ray instance"
        raise WorkerError(f"could not start {where}: {error}; leave `workers` out to use this process") from error


def parse_workers(text: str) -> Workers:
    """Workers from "local", "ray" or "ray:N"."""
    kind, colon, number = text.partition(":")
    if kind == "local" and not colon:
        return LocalWorkers()
    if kind == "ray" and (not colon or (number.isdecimal() and int(number) > 0)):
        return RayWorkers(int(number) if colon else None)
    raise WorkerError(f"unknown workers {text!r}; expected local, ray or ray:N with N of at least 1")
