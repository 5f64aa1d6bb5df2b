"""Sweeps as they are typed: real processes, killed, stopped, side by side, on Ray."""

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
# Listening to Ctrl-C, which a process does not whose parent was started in a shell's background.
LISTENS = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
COMMAND = [sys.executable, "-c", f"{LISTENS}; from cli.distill import main; main()", "sweep"]


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


def begin(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, str(path), "--json"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, dict[str, Any], str]:
    """Exit code, JSON and stderr."""
    out, err = process.communicate(timeout=300)
    return process.returncode, json.loads(out) if out else {}, err


def wait_for_step(step: int, folder: Path, process: subprocess.Popen[str]) -> None:
    """Until the run in that folder is that far; the very checkpoint may come and go between two looks."""
    while max(map(checkpoint_step, checkpoints(folder)), default=0) < step:
        assert process.poll() is None, f"ended by itself before step {step} of {folder}: {process.communicate()}"
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
    """Four runs of one sweep, all at once on one cache, which nothing disturbed; its folder."""
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
    code, record, err = ended(begin(path))
    assert code == 0, err
    assert [row["status"] for row in record["runs"]] == ["finished"] * 4
    # One copy of the data: nothing was written beside or into the cache but what its readers touch.
    assert [
        path for path, time in mtimes(toy_cache).items() if before.get(path) != time and path.suffix != ".mdb"
    ] == []
    return folder / "whole"


def test_four_runs_at_once_on_one_cache_leave_scored_students_and_a_log_each(whole: Path) -> None:
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
    # The first run is killed: the second goes on, the sweep says what happened.
    process = begin(path)
    wait_for_step(4, folder / "talas-seed=1", process)
    (run,) = psutil.Process(process.pid).children()
    run.kill()
    code, record, _ = ended(process)
    assert code == 1
    assert "ended by SIGKILL" in record["failed"]["talas-seed=1"]
    assert [row["status"] for row in record["runs"]] == ["failed", "finished"]
    finished = mtimes(folder / "simcse-seed=1")
    # The sweep is killed: its run ends too, and the next sweep begins at once.
    process = begin(path)
    wait_for_step(STEPS // 2, folder / "talas-seed=1", process)
    (run,) = psutil.Process(process.pid).children()
    process.kill()
    process.communicate()
    code, record, err = ended(begin(path))
    assert not run.is_running()
    assert code == 0, err
    assert record["finished_before"] == 1
    assert json.loads((folder / "talas-seed=1" / "run.json").read_text())["resumed_from"] >= STEPS // 2 - 1
    assert mtimes(folder / "simcse-seed=1") == finished
    for name in ("talas-seed=1", "simcse-seed=1"):
        assert_equal_runs(folder / name, whole / name)


def test_ctrl_c_ends_the_runs_too(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    path = write_sweep(
        tmp_path / "stopped.yaml", toy_cache, tiny_student, grid={"training.seed": [1, 2, 3]}, parallel=2, steps=100_000
    )
    process = begin(path)
    for seed in (1, 2):
        wait_for_step(2, tmp_path / "stopped" / f"seed={seed}", process)
    runs = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGINT)
    code, _, err = ended(process)
    assert code == 130
    assert "the same command goes on" in err
    assert len(runs) == 2
    assert not [run for run in runs if run.is_running() and run.status() != psutil.STATUS_ZOMBIE]
    assert not (tmp_path / "stopped" / "seed=3").exists()


def test_a_sweep_needs_no_teacher(tiny_student: Path, tmp_path: Path) -> None:
    """Once its vectors are cached, the teacher's folder may be gone."""
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
    code, record, err = ended(begin(path))
    assert code == 0, err
    assert (
        record["runs"][0]["figures"]["agreement.after.spearman"]
        > record["runs"][0]["figures"]["agreement.before.spearman"]
    )


def test_on_ray_the_same_students_come_out(whole: Path, toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    path = write_sweep(
        tmp_path / "ray.yaml",
        toy_cache,
        tiny_student,
        runs=[
            {"name": "talas-seed=1", "set": {"training.seed": 1}},
            {"name": "broken", "set": {"training.learning_rate": 1e38}},
        ],
        workers="ray:2",
    )
    code, record, err = ended(begin(path))
    assert code == 1
    assert record["failed"].keys() == {"broken"}, err
    assert "the loss is" in record["failed"]["broken"]
    assert_equal_runs(tmp_path / "ray" / "talas-seed=1", whole / "talas-seed=1")


def test_shares_of_a_gpu_are_refused_where_ray_sees_none(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    path = write_sweep(
        tmp_path / "ray.yaml", toy_cache, tiny_student, grid={"training.seed": [1]}, workers="ray", gpus_per_run=0.25
    )
    code, _, err = ended(begin(path))
    assert code == 1
    assert "Ray sees no GPU" in err.splitlines()[-1]
