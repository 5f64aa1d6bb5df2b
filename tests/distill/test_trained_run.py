"""A run folder is looked into as it was trained, or not at all."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from distill.config import StudentConfig
from distill.errors import RunFolderError
from distill.run import run
from distill.student import Student
from distill.trained_run import TrainedRun
from tests.distill.tiny_runs import tiny_config


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, toy_cache: Path, tiny_student: Path) -> Path:
    """Twelve steps on "sentences", a checkpoint every 4; 45 texts are held out."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    keep = ("corpus=sentences", "training.save_steps=4", "training.save_total_limit=9")
    run(tiny_config(toy_cache, tiny_student, folder, *keep))
    return folder


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_every_checkpoint_is_found_by_step_and_loads_the_weights_it_holds(finished: Path) -> None:
    with TrainedRun.open(finished) as trained:
        found = trained.checkpoints()
        assert [path.name for path in found] == ["checkpoint-4", "checkpoint-8", "checkpoint-12"]
        for path in found:
            model = trained.load(path)
            assert not model.training
            stored = load_file(path / "model.safetensors")
            assert all(torch.equal(weights(model)[name], stored[name]) for name in stored)


def test_the_newest_checkpoint_gives_the_vectors_of_the_exported_student(finished: Path) -> None:
    with TrainedRun.open(finished) as trained:
        texts = trained.cache.texts(trained.held_out_rows()[:5])
        mine = trained.load().student.encode(texts)
        final = Student.load(StudentConfig(model=str(finished / "final"))).encode(texts)
        np.testing.assert_allclose(mine, final, atol=1e-6)


def test_the_start_is_the_student_before_training_with_the_projections_that_the_run_drew(
    finished: Path, toy_cache: Path, tiny_student: Path, tmp_path: Path
) -> None:
    still = [f"training.{key}=0" for key in ("learning_rate", "head_learning_rate", "weight_decay")]
    once = ("corpus=sentences", "training.max_steps=1", *still)
    run(tiny_config(toy_cache, tiny_student, tmp_path / "still", *once))
    stored = load_file(tmp_path / "still" / "checkpoint-1" / "model.safetensors")
    with TrainedRun.open(finished) as trained:
        began = weights(trained.starting())
    assert all(torch.equal(began[name], stored[name]) for name in stored)


def test_held_out_texts_are_never_in_the_batches_of_training_records(finished: Path) -> None:
    with TrainedRun.open(finished) as trained:
        held_out = set(trained.held_out_rows().tolist())
        assert len(held_out) == trained.record["corpus"]["held_out"] == 45
        batches = list(trained.batches(trained.load(), texts=1000, size=32))
        seen = {row for batch in batches for row in batch["text_ids"].tolist()}
        assert not seen & held_out
        assert len(seen) == 360 - 45
        again = list(trained.batches(trained.load(), texts=1000, size=32))
        assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(batches, again, strict=True))


def test_a_last_batch_of_one_record_is_left_out(finished: Path) -> None:
    with TrainedRun.open(finished) as trained:
        sizes = [len(batch["text_ids"]) for batch in trained.batches(trained.load(), texts=33, size=32)]
    assert sizes == [32]


def test_looking_into_a_run_leaves_the_random_numbers_alone(finished: Path) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with TrainedRun.open(finished) as trained:
        trained.starting()
        trained.load()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_whose_student_has_moved_is_looked_into_by_its_own_export(
    finished: Path, tmp_path: Path, tiny_student: Path, toy_cache: Path
) -> None:
    began = tmp_path / "began"
    shutil.copytree(tiny_student, began)
    run(tiny_config(toy_cache, began, tmp_path / "run"))
    shutil.rmtree(began)
    with TrainedRun.open(tmp_path / "run") as trained:
        assert trained.load() is not None


def test_a_run_whose_start_was_exchanged_is_refused(tmp_path: Path, tiny_student: Path, toy_cache: Path) -> None:
    began = tmp_path / "began"
    shutil.copytree(tiny_student, began)
    run(tiny_config(toy_cache, began, tmp_path / "run"))
    shutil.rmtree(began)
    shutil.copytree(tmp_path / "run" / "final", began)
    with TrainedRun.open(tmp_path / "run") as trained, pytest.raises(RunFolderError, match="began with the student"):
        trained.starting()


def test_a_folder_without_a_run_and_a_run_without_checkpoints_are_told(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"run\.json is missing"):
        TrainedRun.open(tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy, ignore=shutil.ignore_patterns("checkpoint-*"))
    with TrainedRun.open(copy) as trained, pytest.raises(RunFolderError, match="no whole checkpoint"):
        trained.load()
