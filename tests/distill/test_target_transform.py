"""Targets that are centered or whitened."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from distill.analyses.trained_run import TrainedRun
from distill.errors import ConfigError
from distill.objectives.base import StudentOutput, StudentShape, TeacherShape, TeacherTargets
from distill.objectives.cosine import Cosine
from distill.runs.run import check_run, run
from distill.training.method import build_objective
from distill.training.target_transform import RIDGE, TargetTransform
from distill.training.targets import Targets
from teacher_cache.table.cache import TeacherCache
from tests.distill.tiny_runs import Stopped, metrics, parts, stop_at, tiny_config

COSINE = ("objective.name=cosine", "corpus=sentences", "training.max_steps=4")


def transform(kind: str, vectors: Any, *, normalized: bool | None = False) -> TargetTransform:
    """A transform fitted to these vectors."""
    made = TargetTransform(kind, TeacherShape(vectors.shape[1], normalized))
    space = SimpleNamespace(gather=lambda rows: vectors[rows].astype(np.float32))
    dataset: Any = SimpleNamespace(handles=lambda: (None, space, None), first_rows=lambda: np.arange(len(vectors)))
    made.fit(dataset)
    return made


def test_centered_targets_by_hand() -> None:
    vectors = np.array([[3.0, 4.0], [1.0, 0.0], [2.0, 2.0]])  # their mean is (2, 2)
    found = transform("centered", vectors)(torch.tensor([[5.0, 6.0], [2.0, 2.0]]))
    assert found.tolist() == [[3.0, 4.0], [0.0, 0.0]]
    found = transform("centered", vectors, normalized=True)(torch.tensor([[5.0, 6.0], [2.0, 2.0]]))
    np.testing.assert_allclose(found, [[0.6, 0.8], [0.0, 0.0]], rtol=1e-6)


def test_whitened_targets_by_hand() -> None:
    # Mean (1, 2), variances 4 along the first axis and 1 along the second: the ridge is RIDGE * 2.5.
    vectors = np.array([[3.0, 3.0], [3.0, 1.0], [-1.0, 3.0], [-1.0, 1.0]])
    found = transform("whitened", vectors)(torch.tensor([[3.0, 3.0]]))
    expected = [2 / np.sqrt(4 + 2.5 * RIDGE), 1 / np.sqrt(1 + 2.5 * RIDGE)]
    np.testing.assert_allclose(found.abs(), [expected], rtol=1e-5)


def test_whitened_vectors_have_equal_variances_and_no_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distill.training.target_transform.CHUNK", 64)
    random = np.random.default_rng(0)
    vectors = random.normal(size=(500, 5)) @ random.normal(size=(5, 5)) + 3
    found = transform("whitened", vectors)(torch.from_numpy(vectors)).double().numpy()
    np.testing.assert_allclose(found.mean(0), 0, atol=1e-5)
    covariance = found.T @ found / 500
    np.testing.assert_allclose(covariance, np.diag(np.diag(covariance)), atol=1e-4)
    assert (np.diag(covariance) <= 1 + 1e-5).all()  # the ridge lowers them
    np.testing.assert_allclose(np.diag(covariance)[:3], 1, atol=0.05)


def test_the_objective_sees_the_transformed_vectors_of_the_training_texts(
    toy_cache: Path, tiny_student: Path, tmp_path: Path
) -> None:
    config = tiny_config(toy_cache, tiny_student, tmp_path, *COSINE, "teacher.targets=centered")
    held_out = np.arange(0, 40, 2)
    made = parts(config, held_out)
    trainer = made.trainer()
    cache, space, _ = made.dataset.handles()
    rows = np.setdiff1d(made.assembly.manifest.distinct_rows(cache.rows), held_out)
    mean = space.gather(rows).astype(np.float64).mean(0)
    np.testing.assert_allclose(trainer.model.transform.mean.cpu(), mean, atol=1e-6)
    batch = made.collator(made.dataset.__getitems__([0, 1, 2]))
    trainer.model.eval()
    term = trainer.model(**batch)["terms"]["cosine"]
    layers = made.student(batch["input_ids"], batch["attention_mask"])
    targets = torch.from_numpy(batch["vectors"].double().numpy() - mean).float()
    assert isinstance(made.objective, Cosine)
    expected = made.objective(StudentOutput(layers), TeacherTargets(targets, batch["text_ids"]))["cosine"]
    assert term.item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_resumed_run_ends_with_the_same_bits_and_its_record_names_the_transform(
    toy_cache: Path, tiny_student: Path, tmp_path: Path
) -> None:
    def config(name: str) -> Any:
        options = ("teacher.targets=whitened", "training.head_init=least_squares", "training.save_steps=2")
        return tiny_config(toy_cache, tiny_student, tmp_path / name, *COSINE, *options)

    run(config("whole"))
    with pytest.raises(Stopped):
        run(config("cut"), report=stop_at(3))
    run(config("cut"))
    whole, cut = (load_file(tmp_path / name / "checkpoint-4" / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(tensor, cut[name]) for name, tensor in whole.items())
    assert {"transform.mean", "transform.matrix"} <= whole.keys()
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    record = json.loads((tmp_path / "cut" / "run.json").read_text())
    assert record["targets"]["transform"] == "whitened"
    assert record["targets"]["texts"] == 360 - record["corpus"]["held_out"]
    assert not record["in_teacher_space"]
    with TrainedRun.open(tmp_path / "whole") as opened:
        loaded, initial = opened.load(), opened.initial()
    assert torch.equal(loaded.transform.matrix, whole["transform.matrix"])
    torch.testing.assert_close(initial.transform.matrix, whole["transform.matrix"])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("export.projection=true",), "would not be in the teacher's space"),
        (("teacher.targets=pca",), "expected none, centered or whitened"),
    ],
)
def test_what_needs_the_teacher_s_own_space_is_refused(
    toy_cache: Path, tiny_student: Path, tmp_path: Path, overrides: tuple[str, ...], expected: str
) -> None:
    with pytest.raises(ConfigError) as error:
        check_run(tiny_config(toy_cache, tiny_student, tmp_path, *COSINE, "teacher.targets=centered", *overrides))
    assert expected in str(error.value)


def test_a_student_without_a_head_is_refused(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    targets = "teacher.targets=centered"
    config = tiny_config(toy_cache, tiny_student, tmp_path, *COSINE, targets, "objective.options.head=identity")
    with TeacherCache.open(toy_cache) as cache:
        found = Targets(config, cache)
        equal = StudentShape(found.shape.dim, 2, "mean")
        with pytest.raises(ConfigError, match="would not be in the teacher's space"):
            build_objective(config, equal, found)
