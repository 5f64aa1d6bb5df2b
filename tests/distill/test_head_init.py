"""Heads that start from a least-squares fit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distill.analyses.trained_run import TrainedRun
from distill.errors import ConfigError
from distill.objectives.base import StudentShape, TeacherShape
from distill.objectives.jasper import Jasper
from distill.objectives.leaf import Leaf
from distill.runs.run import check_run, run
from distill.training.head_init import RidgeRegression, fit_heads
from distill.training.trainer import Distillation
from tests.distill.tiny_runs import Stopped, parts, stop_at, tiny_config

LEAST_SQUARES = "training.head_init=least_squares"


def fitted(x: Any, y: Any, *, bias: bool = False) -> RidgeRegression:
    regression = RidgeRegression(x.shape[1], y.shape[1], bias=bias)
    for start in range(0, len(x), 7):
        regression.add(x[start : start + 7], y[start : start + 7])
    return regression


def data(seed: int = 0) -> tuple[Any, Any]:
    random = np.random.default_rng(seed)
    return random.normal(size=(50, 4)) + 1, random.normal(size=(50, 6)) - 2


def test_without_ridge_the_fit_is_that_of_lstsq() -> None:
    x, y = data()
    weight, bias = fitted(x, y).solve(0)
    np.testing.assert_allclose(weight, np.linalg.lstsq(x, y)[0].T, rtol=1e-9)
    assert not bias.any()


def test_with_a_bias_the_fit_is_that_of_lstsq_with_a_column_of_ones() -> None:
    x, y = data()
    weight, bias = fitted(x, y, bias=True).solve(0)
    expected = np.linalg.lstsq(np.hstack([x, np.ones((50, 1))]), y)[0]
    np.testing.assert_allclose(weight, expected[:-1].T, rtol=1e-9)
    np.testing.assert_allclose(bias, expected[-1], rtol=1e-9)


def test_the_ridge_is_a_share_of_the_mean_eigenvalue() -> None:
    # E^T E is diag(1, 9), its mean eigenvalue 5: with a ridge of 0.2 the two become 2 and 10.
    weight, _ = fitted(np.diag([1.0, 3.0]), np.array([[2.0], [5.0]])).solve(0.2)
    np.testing.assert_allclose(weight, [[2 * 1 / 2, 5 * 3 / 10]])


@pytest.mark.parametrize("bias", [False, True])
def test_unit_length_is_that_of_the_predictions(bias: bool) -> None:
    x, y = data()
    regression = fitted(x, y, bias=bias)
    weight, offset = regression.solve(0, unit_length=True)
    predicted = x @ weight.T + offset
    assert np.square(predicted).sum(1).mean() == pytest.approx(1)
    plain, start = regression.solve(0)
    cosines = (predicted * (x @ plain.T + start)).sum(1) / np.linalg.norm(predicted, axis=1)
    np.testing.assert_allclose(cosines, np.linalg.norm(x @ plain.T + start, axis=1))


@pytest.mark.parametrize(
    ("objective", "layers"),
    [("talas", [1, 2]), ("cosine", [2]), ("leaf", [2]), ("jasper", [2])],
)
def test_each_head_is_fitted_to_the_states_of_its_layer(
    toy_cache: Path, tiny_student: Path, tmp_path: Path, objective: str, layers: list[int]
) -> None:
    made = parts(tiny_config(toy_cache, tiny_student, tmp_path, f"objective.name={objective}"))
    texts = fit_heads(Distillation(made.student, made.objective), made.dataset, seed=0)
    assert texts == 60
    assert sorted(made.objective.linear_heads()) == layers
    assert made.student.training
    rows = np.unique(made.dataset.rows_of(np.arange(len(made.dataset)))[:, 0])
    cache, space, _ = made.dataset.handles()
    states, targets = made.student.encode_layers(cache.texts(rows)), space.gather(rows).astype(np.float64)
    targets /= np.linalg.norm(targets, axis=1, keepdims=True)
    for layer, head in made.objective.linear_heads().items():
        x = states[layer].astype(np.float64)
        gram = x.T @ x
        expected = np.linalg.solve(gram + 1e-3 * np.trace(gram) / 16 * np.eye(16), x.T @ targets)
        output = x @ expected
        expected /= np.sqrt(np.square(output).sum(1).mean())
        np.testing.assert_allclose(head.weight.detach().numpy(), expected.T, rtol=1e-3, atol=1e-5)
        found = torch.cosine_similarity(head(torch.from_numpy(states[layer])), torch.from_numpy(targets).float()).mean()
        assert found > 0.3  # 16 dimensions of 60 random vectors


def test_lengths_count_only_where_the_objective_compares_them() -> None:
    student, teacher = StudentShape(4, 2, "mean"), TeacherShape(6, normalized=False)
    assert Leaf(student, teacher).compares_lengths
    assert not Leaf(student, teacher, normalize=True).compares_lengths
    assert not Jasper(student, teacher).compares_lengths


@pytest.mark.parametrize(
    "overrides", [("objective.name=rkd",), ("objective.name=simcse",), ("objective.options.tamd_weight=0",)]
)
def test_an_objective_without_such_a_head_is_refused(
    toy_cache: Path, tiny_student: Path, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, match=r"has none; set training.head_init=random"):
        check_run(tiny_config(toy_cache, tiny_student, tmp_path / "run", LEAST_SQUARES, *overrides))


def test_a_resumed_run_ends_with_the_same_bits_and_an_analysis_sees_the_fitted_heads(
    toy_cache: Path, tiny_student: Path, tmp_path: Path
) -> None:
    def config(folder: str) -> Any:
        return tiny_config(toy_cache, tiny_student, tmp_path / folder, LEAST_SQUARES, "training.save_steps=5")

    announced: list[str] = []
    run(config("whole"), announce=announced.append)
    assert "heads: least squares on 60 texts" in announced
    with pytest.raises(Stopped):
        run(config("cut"), report=stop_at(7))
    run(config("cut"), announce=announced.append)
    assert announced.count("heads: least squares on 60 texts") == 1  # the checkpoint has them
    ends = [(tmp_path / name / "checkpoint-12" / "model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert ends[0] == ends[1]

    made = parts(config("again"))
    fit_heads(Distillation(made.student, made.objective), made.dataset, made.config.training.seed)
    with TrainedRun.open(tmp_path / "whole") as trained:
        initial = trained.initial().objective.linear_heads()
    for layer, head in made.objective.linear_heads().items():
        assert torch.equal(head.weight, initial[layer].weight)
