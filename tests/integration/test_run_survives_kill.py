"""A run killed with SIGKILL and resumed ends with the same bits as an uninterrupted one."""

import json
import multiprocessing
import random
import time
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from distill.config import RunConfig
from distill.runs.run import run
from distill.training.checkpoints import checkpoint_step, checkpoints
from tests.distill.tiny_runs import metrics, tiny_config

STEPS = 24


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """A fork server with the imports of a run."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["distill.runs.run", "distill.objectives.talas", "sentence_transformers"])
    return context


def config(cache: Path, student: Path, folder: Path) -> RunConfig:
    """A checkpoint every step, so that a kill often meets one that is being written or deleted."""
    return tiny_config(
        cache,
        student,
        folder,
        f"training.max_steps={STEPS}",
        "training.save_steps=1",
        "sharpness.name=asam",
        "training.gradient_accumulation_steps=2",
    )


@pytest.fixture(scope="module")
def whole(toy_cache: Path, tiny_student: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run(config(toy_cache, tiny_student, folder))
    return folder


def weights(folder: Path) -> list[dict[str, torch.Tensor]]:
    return [load_file(folder / place / "model.safetensors") for place in (f"checkpoint-{STEPS}", "final")]


def reached(folder: Path, sign: str) -> bool:
    """Whether a file exists or the run has a later checkpoint: a checkpoint may be removed between two calls."""
    if (folder / sign).exists():
        return True
    written = sign.partition("/")[0]
    return written.startswith("checkpoint-") and any(
        checkpoint_step(path) > checkpoint_step(Path(written)) for path in checkpoints(folder)
    )


def assert_the_same_run(folder: Path, whole: Path) -> None:
    for mine, theirs in zip(weights(folder), weights(whole), strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert metrics(folder) == metrics(whole)
    assert [line["step"] for line in metrics(folder)] == list(range(1, STEPS + 1))
    record = json.loads((folder / "run.json").read_text())
    assert (record["status"], record["steps"]) == ("finished", STEPS)


def test_a_run_killed_at_every_stage_ends_with_the_same_bits(
    processes: ForkServerContext, toy_cache: Path, tiny_student: Path, tmp_path: Path, whole: Path
) -> None:
    settings = config(toy_cache, tiny_student, tmp_path / "run")
    # Killed after the settings, while three checkpoints are written, and while the student is exported.
    for sign in (
        "config.yaml",
        "checkpoint-5",
        "checkpoint-11/model.safetensors",
        "checkpoint-17/optimizer.pt",
        "final.writing",
    ):
        process = processes.Process(target=run, args=(settings,))
        process.start()
        while not reached(tmp_path / "run", sign) and process.is_alive():
            time.sleep(0.0005)
        process.kill()
        process.join()
        assert process.exitcode == -9, f"ended before {sign}"
        assert not (tmp_path / "run" / "final").exists()
    result = run(settings)
    assert result.resumed_from >= 16
    assert_the_same_run(tmp_path / "run", whole)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_run_killed_at_any_moment_ends_with_the_same_bits(
    processes: ForkServerContext, toy_cache: Path, tiny_student: Path, tmp_path: Path, whole: Path, seed: int
) -> None:
    moments = random.Random(seed)
    settings = config(toy_cache, tiny_student, tmp_path / "run")
    for _ in range(6):
        process = processes.Process(target=run, args=(settings,))
        process.start()
        process.join(moments.uniform(0.05, 1.5))
        process.kill()
        process.join()
    run(settings)
    assert_the_same_run(tmp_path / "run", whole)
