"""Sweeps in real processes: killed, interrupted, parallel and on Ray."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file

from distill.training.checkpoints import checkpoint_step, checkpoints
from tests.distill.tiny_tasks import TASKS, write_tasks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
STEPS = 60
# Handle Ctrl-C, which background processes of a shell ignore.
HANDLE_INTERRUPT = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
COMMAND = [sys.executable, "-c", f"{HANDLE_INTERRUPT}; from cli.distill import main; main()", "sweep"]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def write_sweep(path: Path, cache: Path, student: Path, *, steps: int = STEPS, **settings: Any) -> Path:
    """A checkpoint every step, so that a kill meets runs in the middle."""
    base = {
        "cache": str(cache),
        "corpus": "sentences",
        "student": {"model": str(student)},
        "sharpness": {"name": "asam"},
        "data": {"window": 256},
        "training": {
            "max_steps": steps,
            "save_steps": 1,
            "per_device_train_batch_size": 20,
            "precision": "fp32",
            "learning_rate": 1e-3,
        },
    }
    path.write_text(yaml.safe_dump({"output_dir": str(path.with_suffix("")), "base": base} | settings))
    return path


def start(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, str(path), "--json"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait(process: subprocess.Popen[str]) -> tuple[int, dict[str, Any], str]:
    """Exit code, JSON and stderr."""
    out, err = process.communicate(timeout=300)
    return process.returncode, json.loads(out) if out else {}, err


def wait_for_step(step: int, folder: Path, process: subprocess.Popen[str]) -> None:
    """Wait until a run has a checkpoint of this step or a later one."""
    while max(map(checkpoint_step, checkpoints(folder)), default=0) < step:
        assert process.poll() is None, f"ended before step {step} of {folder}: {process.communicate()}"
        time.sleep(0.005)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "final" / "model.safetensors")


def assert_equal_runs(folder: Path, other: Path) -> None:
    mine, theirs = weights(folder), weights(other)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def mtimes(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


@pytest.fixture(scope="module")
def whole(toy_cache: Path, tiny_student: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an uninterrupted sweep of four parallel runs on one cache."""
    folder = tmp_path_factory.mktemp("sweeps")
    before = mtimes(toy_cache)
    path = write_sweep(
        folder / "whole.yaml",
        toy_cache,
        tiny_student,
        grid={"objective.name": ["talas", "simcse"], "training.seed": [1, 2]},
        data=str(write_tasks(folder / "data")),
        tasks=TASKS,
        parallel=4,
    )
    code, record, err = wait(start(path))
    assert code == 0, err
    assert [row["status"] for row in record["runs"]] == ["finished"] * 4
    # No run writes to the cache, except to LMDB's lock.
    assert [
        path for path, time in mtimes(toy_cache).items() if before.get(path) != time and path.suffix != ".mdb"
    ] == []
    return folder / "whole"


def test_four_parallel_runs_on_one_cache_have_scored_students_and_logs(whole: Path) -> None:
    for name in ("talas-seed=1", "talas-seed=2", "simcse-seed=1", "simcse-seed=2"):
        assert (whole / name / "final" / "modules.json").is_file()
        assert json.loads((whole / name / "eval.json").read_text())["tasks"].keys() == set(TASKS)
        log = (whole / f"{name}.log").read_text()
        assert "method: " in log
        assert "scored: average" in log


def test_killed_runs_and_a_killed_sweep_end_with_the_same_students(
    whole: Path, toy_cache: Path, tiny_student: Path, tmp_path: Path
) -> None:
    path = write_sweep(
        tmp_path / "killed.yaml",
        toy_cache,
        tiny_student,
        grid={"objective.name": ["talas", "simcse"], "training.seed": [1]},
    )
    folder = tmp_path / "killed"
    # The first run is killed: the second one still runs, and the sweep reports the failure.
    process = start(path)
    wait_for_step(4, folder / "talas-seed=1", process)
    (run,) = psutil.Process(process.pid).children()
    run.kill()
    code, record, _ = wait(process)
    assert code == 1
    assert "ended by SIGKILL" in record["failed"]["talas-seed=1"]
    assert [row["status"] for row in record["runs"]] == ["failed", "finished"]
    finished = mtimes(folder / "simcse-seed=1")
    # The sweep is killed: its run ends too, and the next sweep can start at once.
    process = start(path)
    wait_for_step(STEPS // 2, folder / "talas-seed=1", process)
    (run,) = psutil.Process(process.pid).children()
    process.kill()
    process.communicate()
    code, record, err = wait(start(path))
    assert not run.is_running()
    assert code == 0, err
    assert record["finished_before"] == 1
    assert json.loads((folder / "talas-seed=1" / "run.json").read_text())["resumed_from"] >= STEPS // 2 - 1
    assert mtimes(folder / "simcse-seed=1") == finished
    for name in ("talas-seed=1", "simcse-seed=1"):
        assert_equal_runs(folder / name, whole / name)


def test_ctrl_c_stops_the_runs_too(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    path = write_sweep(
        tmp_path / "stopped.yaml", toy_cache, tiny_student, grid={"training.seed": [1, 2, 3]}, parallel=2, steps=100_000
    )
    process = start(path)
    for seed in (1, 2):
        wait_for_step(2, tmp_path / "stopped" / f"seed={seed}", process)
    runs = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGINT)
    code, _, err = wait(process)
    assert code == 130
    assert "run the same command again to resume" in err
    assert len(runs) == 2
    assert not [run for run in runs if run.is_running() and run.status() != psutil.STATUS_ZOMBIE]
    assert not (tmp_path / "stopped" / "seed=3").exists()


def test_a_killed_search_ends_with_the_same_choice(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    data = write_tasks(tmp_path / "data")
    for task in TASKS:
        shutil.copy(data / f"{task}_test.csv", data / f"{task}_validation.csv")

    def write(name: str) -> Path:
        path = write_sweep(
            tmp_path / name,
            toy_cache,
            tiny_student,
            steps=40,
            grid={"training.learning_rate": [1e-4, 1e-2]},
            search={"stages": [0.25, 1], "keep": 0.5},
            data=str(data),
            tasks=TASKS,
        )
        settings = yaml.safe_load(path.read_text())
        settings["base"]["evaluation"] = {"data": str(data), "tasks": TASKS, "steps": 20}
        path.write_text(yaml.safe_dump(settings))
        return path

    code, expected, err = wait(start(write("whole.yaml")))
    assert code == 0, err
    path, name = write("killed.yaml"), expected["choice"]["name"]
    process = start(path)
    wait_for_step(20, tmp_path / "killed" / "stage-2" / name, process)
    process.kill()
    process.communicate()
    first = mtimes(tmp_path / "killed" / "stage-1")
    code, record, err = wait(start(path))
    assert code == 0, err
    assert mtimes(tmp_path / "killed" / "stage-1") == first
    assert json.loads((tmp_path / "killed" / "stage-2" / name / "run.json").read_text())["resumed_from"] >= 19
    assert without_seconds(record["stages"]) == without_seconds(expected["stages"])
    assert without_seconds(record["finalists"]) == without_seconds(expected["finalists"])
    assert record["choice"] == expected["choice"]
    scores = [{run["name"]: run["figures"]["average.all"] for run in found["runs"]} for found in (record, expected)]
    assert scores[0] == scores[1]


def without_seconds(part: Any) -> Any:
    if isinstance(part, dict):
        return {key: without_seconds(value) for key, value in part.items() if key != "seconds"}
    return [without_seconds(one) for one in part] if isinstance(part, list) else part


def test_a_sweep_needs_no_teacher(tiny_student: Path, tmp_path: Path) -> None:
    """The teacher's folder is removed after caching."""
    from teacher_cache.building.build import build
    from teacher_cache.corpus.corpus import Corpus
    from teacher_cache.teachers.base import TeacherOptions
    from tests.conftest import varied_texts
    from tests.teacher_cache.tiny_teachers import write_bert

    (tmp_path / "sentences.txt").write_text("\n".join(varied_texts(300)))
    teacher = write_bert(tmp_path / "teacher", seed=3)
    build(
        Corpus.open(tmp_path / "sentences.txt"), TeacherOptions(model=str(teacher), dtype="float32"), tmp_path / "cache"
    )
    shutil.rmtree(teacher)
    path = write_sweep(tmp_path / "alone.yaml", tmp_path / "cache", tiny_student, grid={"training.seed": [1]})
    code, record, err = wait(start(path))
    assert code == 0, err
    assert (
        record["runs"][0]["figures"]["agreement.after.spearman"]
        > record["runs"][0]["figures"]["agreement.before.spearman"]
    )


def test_runs_on_ray_give_the_same_students(whole: Path, toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    path = write_sweep(
        tmp_path / "ray.yaml",
        toy_cache,
        tiny_student,
        runs=[
            {"name": "talas-seed=1", "set": {"objective.name": "talas", "training.seed": 1}},
            {"name": "broken", "set": {"training.learning_rate": 1e38}},
        ],
        workers="ray:2",
    )
    code, record, err = wait(start(path))
    assert code == 1
    assert record["failed"].keys() == {"broken"}, err
    assert "the loss is" in record["failed"]["broken"]
    assert_equal_runs(tmp_path / "ray" / "talas-seed=1", whole / "talas-seed=1")


def test_gpus_per_run_without_a_gpu_on_ray_is_an_error(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    path = write_sweep(
        tmp_path / "ray.yaml", toy_cache, tiny_student, grid={"training.seed": [1]}, workers="ray", gpus_per_run=0.25
    )
    code, _, err = wait(start(path))
    assert code == 1
    assert "Ray sees no GPU" in err.splitlines()[-1]
