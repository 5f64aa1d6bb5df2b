"""All workers give the same vectors, and the death of a worker loses none."""

import ast
import math
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from teacher_cache.building import workers as workers_module
from teacher_cache.building.workers import LocalWorkers, RayWorkers, Workers, _ActorPool, parse_workers, shares
from teacher_cache.errors import MissingDependency, TeacherError, WorkerError
from teacher_cache.teachers import TeacherOptions, TeacherSpec, resolve
from teacher_cache.teachers.base import Encoded
from tests.teacher_cache.small_caches import TOY, built, numbered, teacher_vectors
from tests.teacher_cache.toy_variants import DiesAlways, DiesOnce, Refuses

ray = pytest.importorskip("ray")

BATCHES = [numbered(3, start=10 * batch) for batch in range(12)]
DEADLY = [*BATCHES[:5], ["deadly", "text"], *BATCHES[5:]]


def encode_all(workers: Workers, batches: Iterable[list[str]], teacher: TeacherOptions = TOY) -> dict[int, Encoded]:
    found = list(workers.encode(resolve(teacher), batches))
    assert len({number for number, _ in found}) == len(found)
    return dict(found)


def assert_right(found: dict[int, Encoded], batches: list[list[str]]) -> None:
    assert sorted(found) == list(range(len(batches)))
    for number, texts in enumerate(batches):
        np.testing.assert_array_equal(found[number].vectors, teacher_vectors(texts))


@pytest.fixture(scope="module")
def two_cpus() -> Iterator[None]:
    """A Ray instance shared by the tests that do not start their own."""
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        _node_ip_address="127.0.0.1",
    )
    yield
    ray.shutdown()


# Without Ray


@pytest.mark.parametrize(("text", "actors"), [("ray", None), ("ray:1", 1), ("ray:16", 16)])
def test_workers_are_parsed(text: str, actors: int | None) -> None:
    workers = parse_workers(text)
    assert isinstance(workers, RayWorkers)
    assert workers.actors == actors


def test_local_is_parsed() -> None:
    assert isinstance(parse_workers("local"), LocalWorkers)


@pytest.mark.parametrize(
    "text", ["", "Ray", "ray:", "ray:0", "ray:-1", "ray:x", "ray:²", "ray:1.5", "local:2", "local:", "spark"]
)
def test_unknown_workers_are_refused(text: str) -> None:
    with pytest.raises(WorkerError, match="expected local, ray or ray:N with N of at least 1"):
        parse_workers(text)


def test_local_workers_take_one_batch_at_a_time() -> None:
    taken: list[int] = []

    def batches() -> Iterator[list[str]]:
        for number, batch in enumerate(BATCHES):
            taken.append(number)
            yield batch

    results = LocalWorkers().encode(resolve(TOY), batches())
    assert taken == []
    next(results)
    assert taken == [0]


def test_without_a_batch_the_teacher_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(spec: TeacherSpec) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(workers_module, "load_teacher", load)
    assert encode_all(LocalWorkers(), []) == {}


def test_a_missing_ray_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependency, match=r"pip install 'teacher-cache\[ray\]'"):
        encode_all(RayWorkers(), BATCHES)


@pytest.mark.parametrize(
    ("nodes", "wanted", "expected"),
    [
        ([{"CPU": 8.0}], None, (1, {"num_cpus": 8})),
        ([{"CPU": 8.0}], 3, (3, {"num_cpus": 2})),
        ([{"CPU": 2.0}], 3, (3, {"num_cpus": 0.6666})),
        ([{"CPU": 16.0, "GPU": 4.0}], None, (4, {"num_cpus": 4, "num_gpus": 1})),
        # Two GPUs hold three actors as halves; with two thirds the last one would wait forever.
        ([{"CPU": 16.0, "GPU": 2.0}], 3, (3, {"num_cpus": 5, "num_gpus": 0.5})),
        ([{"CPU": 16.0, "GPU": 8.0}], 2, (2, {"num_cpus": 8, "num_gpus": 1})),
        # An actor that needs a GPU cannot use the CPUs of a head node without one.
        (
            [{"CPU": 64.0}, {"CPU": 8.0, "GPU": 1.0}, {"CPU": 4.0, "GPU": 1.0}],
            None,
            (2, {"num_cpus": 4, "num_gpus": 1}),
        ),
        ([{"CPU": 4.0}, {"CPU": 4.0}], 1, (1, {"num_cpus": 4})),
        ([{"CPU": 4.0}, {"CPU": 4.0}], 3, (3, {"num_cpus": 2})),
    ],
)
def test_every_actor_fits_on_a_node(
    nodes: list[dict[str, float]], wanted: int | None, expected: tuple[int, dict[str, float]]
) -> None:
    assert shares(nodes, wanted) == expected


resources = st.fixed_dictionaries(
    {"CPU": st.integers(1, 128).map(float)}, optional={"GPU": st.integers(1, 8).map(float)}
)


@given(st.lists(resources, min_size=1, max_size=4), st.none() | st.integers(1, 40))
def test_all_actors_fit_at_once(nodes: list[dict[str, float]], wanted: int | None) -> None:
    count, options = shares(nodes, wanted)
    assert count == (wanted or max(1, sum(int(node.get("GPU", 0)) for node in nodes)))
    room = 0
    for node in nodes:
        # Ray allocates ten thousandths; an actor's share of a GPU is on one GPU.
        by_cpu = math.floor(node["CPU"] * 10_000 / round(options["num_cpus"] * 10_000))
        if "num_gpus" in options:
            per_gpu = math.floor(10_000 / round(options["num_gpus"] * 10_000))
            room += min(by_cpu, int(node.get("GPU", 0)) * per_gpu)
        else:
            room += by_cpu
    assert room >= count


# With Ray


@pytest.mark.usefixtures("two_cpus")
def test_actors_give_the_vectors_of_this_process_even_if_more_than_cpus() -> None:
    assert_right(encode_all(RayWorkers(3), BATCHES), BATCHES)
    assert ray.is_initialized()  # started by the fixture


@pytest.mark.usefixtures("two_cpus")
def test_the_batch_of_a_dead_worker_is_retried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    teacher = DiesOnce.options(tmp_path / "died")
    assert_right(encode_all(RayWorkers(2), DEADLY, teacher), DEADLY)
    assert (tmp_path / "died").exists()
    assert "a worker died; a new one retries its" in caplog.text


@pytest.mark.usefixtures("two_cpus")
def test_a_batch_that_always_kills_its_worker_is_named() -> None:
    with pytest.raises(WorkerError, match=r"died 3 times on the same batch of 2 texts, .* 'deadly'"):
        encode_all(RayWorkers(1), DEADLY, DiesAlways.options())


@pytest.mark.usefixtures("two_cpus")
def test_an_error_of_the_teacher_in_an_actor_is_raised_unchanged() -> None:
    with pytest.raises(TeacherError, match=r"^no answer to 'text 0'$"):
        encode_all(RayWorkers(1), BATCHES, Refuses.options())


@pytest.mark.usefixtures("two_cpus")
def test_actors_queue_few_batches_and_end_with_the_encoding() -> None:
    taken = 0

    def batches() -> Iterator[list[str]]:
        nonlocal taken
        for batch in BATCHES * 10:
            taken += 1
            yield batch

    results = RayWorkers(2).encode(resolve(TOY), batches())
    for done in range(1, 6):
        next(results)
        assert taken <= done + 2 * (1 + workers_module.QUEUED_PER_ACTOR)
    results.close()
    pool = _ActorPool(ray, resolve(TOY), 1)  # needs both CPUs, which the other actors must have freed
    assert len(list(pool.run(BATCHES))) == len(BATCHES)
    pool.close()


@pytest.mark.slow
def test_a_private_ray_listens_on_loopback_only_and_is_shut_down(tmp_path: Path) -> None:
    """A complete build in a new process, with nothing on stderr."""
    script = f"""
import sys
from pathlib import Path
from teacher_cache.building.workers import RayWorkers
from tests.teacher_cache.small_caches import built, numbered

class Watched(RayWorkers):
    def encode(self, spec, batches):
        for result in super().encode(spec, batches):
            port = int(sys.modules["ray"].get_runtime_context().gcs_address.rpartition(":")[2])
            tables = (Path("/proc/net") / name for name in ("tcp", "tcp6"))
            rows = [row.split() for table in tables if table.exists() for row in table.read_text().splitlines()[1:]]
            bound.update(row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1][-4:], 16) == port)
            yield result

bound = set()
report = built(Path({str(tmp_path)!r}), numbered(20), workers=Watched(2))
assert report.encoded == 20, report
assert not sys.modules["ray"].is_initialized()
print(sorted(bound))
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    found = set(ast.literal_eval(ran.stdout))
    assert found or sys.platform != "linux"  # whose kernel has a table of listening sockets
    assert found <= {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert built(tmp_path, numbered(20)).encoded == 0
