"""Who runs the teacher: this process, or Ray actors on GPUs, CPU shares or a cluster.

Workers only encode. The driver is the one writer, so the index and the shards see a single process however
many GPUs there are.
"""

import logging
import math
import os
import sys
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

from teacher_cache.errors import WorkerError, optional_import
from teacher_cache.teachers import load_teacher
from teacher_cache.teachers.base import Encoded, Teacher, TeacherSpec

logger = logging.getLogger("teacher_cache")

LOOPBACK = "127.0.0.1"
# Batches waiting at an actor besides the one it works on: it never idles, and little is lost when it dies.
QUEUED_PER_ACTOR = 1
# A batch that has lost this many actors is the likely cause; give up rather than kill the next one.
MAX_LOSSES = 3


# (number of the batch, what was said). Closing it ends the workers.
Answers = Generator[tuple[int, Encoded], None, None]


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
    def encode(self, spec: TeacherSpec, batches: Iterable[list[str]]) -> Answers:
        """Encode every batch once.

        Batches are pulled as workers become free, so a lazy iterable is never read far ahead.

        Returns:
            The answers in order of completion.

        Raises:
            WorkerError: workers could not be started, or a batch kept killing them.
        """


class LocalWorkers(Workers):
    """Encode in this process, on one device."""

    def encode(self, spec: TeacherSpec, batches: Iterable[list[str]]) -> Answers:
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

    def encode(self, spec: TeacherSpec, batches: Iterable[list[str]]) -> Answers:
        with ray_session() as ray:
            crew = _Crew(ray, spec, self.actors)
            try:
                yield from crew.run(batches)
            finally:
                crew.dismiss()


@contextmanager
def ray_session() -> Iterator[Any]:
    """The Ray library, initialised; what is started here is ended with the block.

    Raises:
        MissingDependency: Ray is not installed.
        WorkerError: it cannot be started, or the cluster cannot be reached.
    """
    if not os.environ.get("RAY_ADDRESS"):
        # Ray reads this when it is imported, and only then takes 127.0.0.1 as its node's address, without which
        # its servers listen on every interface.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        if "ray" not in sys.modules:  # later it would hold for Ray's servers, and not for this process
            # What Ray does from 2.60 on when nothing is said, but then with a warning on the terminal.
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
    """How many actors, and what each asks for, so that all of them find room at once.

    A request that no single node can grant would wait for ever, so it is sized by the smallest node.

    Args:
        nodes: the resources of each node, by Ray's names.
        wanted: actors asked for; None takes one per GPU, or one where there is none.
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
    # Ray gives a worker as many OpenMP threads as CPUs, so the shares do not fight over cores.
    return count, {"num_cpus": cpus, **options}


def _share(amount: float, parts: int) -> float:
    """A part of a resource, rounded down: Ray counts whole ones, or ten thousandths below one."""
    share = amount / parts
    return float(math.floor(share)) if share >= 1 else math.floor(share * 10_000) / 10_000


class _Crew:
    """The actors of one build and the batches they hold."""

    def __init__(self, ray: Any, spec: TeacherSpec, count: int | None) -> None:
        self.ray = ray
        count, options = shares([node["Resources"] for node in ray.nodes() if node["Alive"]], count)
        environment = {"TOKENIZERS_PARALLELISM": "false"}
        actor = ray.remote(EncodeWorker).options(runtime_env={"env_vars": environment}, **options)
        self.hire = lambda: actor.remote(spec)
        self.actors: list[Any] = [self.hire() for _ in range(count)]
        # Reference -> actor, batch number, texts; in the order of handing out, in which an actor works.
        self.held: dict[Any, tuple[Any, int, list[str]]] = {}
        self.again: deque[tuple[int, list[str]]] = deque()
        self.losses: Counter[int] = Counter()

    def run(self, batches: Iterable[list[str]]) -> Answers:
        waiting = enumerate(batches)
        while True:
            self._hand_out(waiting)
            if not self.held:
                return
            (done,), _ = self.ray.wait(list(self.held), num_returns=1)
            actor, number, _ = self.held[done]
            try:
                encoded = self.ray.get(done)
            except self.ray.exceptions.RayActorError as death:
                self._replace(actor, death)
                continue
            except self.ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except self.ray.exceptions.RayError as error:
                raise WorkerError(f"Ray lost batch {number}: {_first_line(error)}") from error
            del self.held[done]
            yield number, encoded

    def _hand_out(self, waiting: Iterator[tuple[int, list[str]]]) -> None:
        """Give batches to the least busy until everyone has enough, or none is left."""
        load = Counter(dict.fromkeys(self.actors, 0))
        load.update(holder for holder, _, _ in self.held.values())
        while load:
            actor, held = min(load.items(), key=itemgetter(1))
            batch = None if held > QUEUED_PER_ACTOR else self._next(waiting)
            if batch is None:
                return
            number, texts = batch
            self.held[actor.encode.remote(texts)] = (actor, number, texts)
            load[actor] += 1

    def _next(self, waiting: Iterator[tuple[int, list[str]]]) -> tuple[int, list[str]] | None:
        return self.again.popleft() if self.again else next(waiting, None)

    def _replace(self, actor: Any, death: Exception) -> None:
        """A new actor for a dead one; what it held is done again. The batch it worked on bears the blame."""
        lost = [reference for reference, (holder, _, _) in self.held.items() if holder is actor]
        batches = [self.held.pop(reference)[1:] for reference in lost]
        number, texts = batches[0]
        self.losses[number] += 1
        if self.losses[number] >= MAX_LOSSES:
            raise WorkerError(
                f"workers died {MAX_LOSSES} times over the same batch of {len(texts)} texts, which starts "
                f"with {texts[0][:60]!r}: {_first_line(death)}; if memory ran out, lower --batch-tokens"
            ) from death
        self.again.extend(batches)
        logger.warning("a worker died; its %d batches are done again by a new one", len(batches))
        self.ray.kill(actor)  # it may be only out of reach
        self.actors[self.actors.index(actor)] = self.hire()

    def dismiss(self) -> None:
        for actor in self.actors:
            self.ray.kill(actor)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


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
                _node_ip_address=LOOPBACK,
            )
            if ray.util.get_node_ip_address() != LOOPBACK:
                logger.warning(
                    "Ray listens on every network interface, because it was imported before this build began; "
                    "set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 to keep it to this machine"
                )
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = f"the cluster at RAY_ADDRESS={address}" if address else "a local Ray instance"
        raise WorkerError(f"could not start {where}: {error}; use --workers local to do without") from error


def parse_workers(text: str) -> Workers:
    """Workers from what a user writes: "local", "ray" or "ray:N".

    Raises:
        WorkerError: anything else.
    """
    kind, colon, number = text.partition(":")
    if kind == "local" and not colon:
        return LocalWorkers()
    if kind == "ray" and (not colon or (number.isdecimal() and int(number) > 0)):
        return RayWorkers(int(number) if colon else None)
    raise WorkerError(f"unknown workers {text!r}; expected local, ray or ray:N with N of at least 1")
