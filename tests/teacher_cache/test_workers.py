"""Workers give the same vectors wherever they run, and survive the death of one of theirs."""

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
from tests.teacher_cache.small_caches import TOY, built, numbered, said
from tests.teacher_cache.toy_variants import DiesAlways, DiesOnce, Refuses

ray = pytest.importorskip("ray")

BATCHES = [numbered(3, start=10 * batch) for batch in range(12)]
DEADLY = [*BATCHES[:5], ["deadly", "text"], *BATCHES[5:]]


def answers(workers: Workers, batches: Iterable[list[str]], teacher: TeacherOptions = TOY) -> dict[int, Encoded]:
    found = list(workers.encode(resolve(teacher), batches))
    assert len({number for number, _ in found}) == len(found)
    return dict(found)


def assert_right(found: dict[int, Encoded], batches: list[list[str]]) -> None:
    assert sorted(found) == list(range(len(batches)))
    for number, texts in enumerate(batches):
        np.testing.assert_array_equal(found[number].vectors, said(texts))


@pytest.fixture(scope="module")
def two_cpus() -> Iterator[None]:
    """One Ray for the tests that do not care who started it."""
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
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(WorkerError, match="expected local, ray or ray:N with N of at least 1"):
        parse_workers(text)


def test_local_workers_read_no_further_than_they_have_come() -> None:
    given_out: list[int] = []

    def batches() -> Iterator[list[str]]:
        for number, batch in enumerate(BATCHES):
            given_out.append(number)
            yield batch

    encoding = LocalWorkers().encode(resolve(TOY), batches())
    assert given_out == []
    next(encoding)
    assert given_out == [0]


def test_no_batch_means_no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(spec: TeacherSpec) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(workers_module, "load_teacher", load)
    assert answers(LocalWorkers(), []) == {}


def test_absent_ray_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependency, match=r"pip install 'teacher-cache\[ray\]'"):
        answers(RayWorkers(), BATCHES)


@pytest.mark.parametrize(
    ("nodes", "wanted", "expected"),
    [
        ([{"CPU": 8.0}], None, (1, {"num_cpus": 8})),
        ([{"CPU": 8.0}], 3, (3, {"num_cpus": 2})),
        ([{"CPU": 2.0}], 3, (3, {"num_cpus": 0.6666})),
        ([{"CPU": 16.0, "GPU": 4.0}], None, (4, {"num_cpus": 4, "num_gpus": 1})),
        # Two GPUs hold three actors as halves; two thirds would leave the third waiting for ever.
        ([{"CPU": 16.0, "GPU": 2.0}], 3, (3, {"num_cpus": 5, "num_gpus": 0.5})),
        ([{"CPU": 16.0, "GPU": 8.0}], 2, (2, {"num_cpus": 8, "num_gpus": 1})),
        # A head node with many CPUs does not help an actor that has to sit beside a GPU.
        (
            [{"CPU": 64.0}, {"CPU": 8.0, "GPU": 1.0}, {"CPU": 4.0, "GPU": 1.0}],
            None,
            (2, {"num_cpus": 4, "num_gpus": 1}),
        ),
        ([{"CPU": 4.0}, {"CPU": 4.0}], 1, (1, {"num_cpus": 4})),
        ([{"CPU": 4.0}, {"CPU": 4.0}], 3, (3, {"num_cpus": 2})),
    ],
)
def test_actors_ask_for_what_a_node_can_grant(
    nodes: list[dict[str, float]], wanted: int | None, expected: tuple[int, dict[str, float]]
) -> None:
    assert shares(nodes, wanted) == expected


resources = st.fixed_dictionaries(
    {"CPU": st.integers(1, 128).map(float)}, optional={"GPU": st.integers(1, 8).map(float)}
)


@given(st.lists(resources, min_size=1, max_size=4), st.none() | st.integers(1, 40))
def test_all_actors_find_room_at_once(nodes: list[dict[str, float]], wanted: int | None) -> None:
    count, options = shares(nodes, wanted)
    assert count == (wanted or max(1, sum(int(node.get("GPU", 0)) for node in nodes)))
    room = 0
    for node in nodes:
        # Ray counts ten thousandths; a GPU is shared only by what fits on it as a whole.
        by_cpu = math.floor(node["CPU"] * 10_000 / round(options["num_cpus"] * 10_000))
        if "num_gpus" in options:
            per_gpu = math.floor(10_000 / round(options["num_gpus"] * 10_000))
            room += min(by_cpu, int(node.get("GPU", 0)) * per_gpu)
        else:
            room += by_cpu
    assert room >= count


# With Ray


@pytest.mark.usefixtures("two_cpus")
def test_actors_even_more_than_cpus_say_what_this_process_says() -> None:
    assert_right(answers(RayWorkers(3), BATCHES), BATCHES)
    assert ray.is_initialized()  # what we did not start we do not end


@pytest.mark.usefixtures("two_cpus")
def test_a_batch_whose_worker_died_is_done_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    teacher = DiesOnce.options(tmp_path / "died")
    assert_right(answers(RayWorkers(2), DEADLY, teacher), DEADLY)
    assert (tmp_path / "died").exists()
    assert "a worker died; a new one retries its" in caplog.text


@pytest.mark.usefixtures("two_cpus")
def test_a_batch_that_always_kills_its_worker_is_named() -> None:
    with pytest.raises(WorkerError, match=r"died 3 times on the same batch of 2 texts, .* 'deadly'"):
        answers(RayWorkers(1), DEADLY, DiesAlways.options())


@pytest.mark.usefixtures("two_cpus")
def test_a_teachers_error_in_an_actor_comes_out_as_it_is() -> None:
    with pytest.raises(TeacherError, match=r"^no answer to 'text 0'$"):
        answers(RayWorkers(1), BATCHES, Refuses.options())


@pytest.mark.usefixtures("two_cpus")
def test_actors_hold_few_batches_and_end_with_the_encoding() -> None:
    given_out = 0

    def batches() -> Iterator[list[str]]:
        nonlocal given_out
        for batch in BATCHES * 10:
            given_out += 1
            yield batch

    encoding = RayWorkers(2).encode(resolve(TOY), batches())
    for done in range(1, 6):
        next(encoding)
        assert given_out <= done + 2 * (1 + workers_module.QUEUED_PER_ACTOR)
    encoding.close()
    pool = _ActorPool(ray, resolve(TOY), 1)  # asks for both CPUs: finds room only if the others are gone
    assert len(list(pool.run(BATCHES))) == len(BATCHES)
    pool.close()


def test_a_ray_of_our_own_listens_on_this_machine_only_and_is_ended_afterwards(tmp_path: Path) -> None:
    """In a process of its own: a build over Ray, from start to end, without a word on the terminal but its own."""
    script = f"""
import sys
from pathlib import Path
from teacher_cache.building.workers import RayWorkers
from tests.teacher_cache.small_caches import built, numbered

class Watched(RayWorkers):
    def encode(self, spec, batches):
        for answer in super().encode(spec, batches):
            port = int(sys.modules["ray"].get_runtime_context().gcs_address.rpartition(":")[2])
            tables = (Path("/proc/net") / name for name in ("tcp", "tcp6"))
            rows = [row.split() for table in tables if table.exists() for row in table.read_text().splitlines()[1:]]
            bound.update(row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1][-4:], 16) == port)
            yield answer

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
