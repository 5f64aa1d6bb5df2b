"""The curvature of the loss at a run's checkpoints."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor

from distill.analyses.base import analyze
from distill.analyses.curvature import Curvature
from distill.analyses.trained_run import TrainedRun
from distill.errors import ConfigError
from distill.runs.run import run
from distill.sharpness import build_sharpness
from distill.training.trainer import Distillation
from tests.distill.tiny_runs import tiny_config

# Few texts and few steps, for tests that ask for something else than the eigenvalue.
QUICK: dict[str, Any] = {"texts": 8, "batch": 4, "iterations": 1, "heads": False}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, toy_cache: Path, tiny_student: Path) -> Path:
    """TALAS on "few", a checkpoint every 4 of 12 steps."""
    folder = tmp_path_factory.mktemp("curved") / "run"
    run(tiny_config(toy_cache, tiny_student, folder, "training.save_steps=4", "training.save_total_limit=9"))
    return folder


@pytest.fixture
def model(finished: Path) -> Distillation:
    with TrainedRun.open(finished) as trained:
        return trained.load()


@pytest.fixture(scope="module")
def batches(finished: Path) -> list[dict[str, Any]]:
    with TrainedRun.open(finished) as trained:
        return list(trained.batches(trained.load(), 8, 4))


def mean_loss(model: Distillation, batches: list[dict[str, Any]]) -> Tensor:
    return torch.stack([model(**inputs)["loss"] for inputs in batches]).mean()


def sharpest(model: Distillation, batches: list[dict[str, Any]], parameters: list[Tensor]) -> float:
    """The largest eigenvalue by ARPACK on differences of gradients, with both views encoded."""
    sizes = [parameter.numel() for parameter in parameters]

    def product(vector: np.ndarray[Any, Any], step: float = 1e-3) -> np.ndarray[Any, Any]:
        parts = torch.split(torch.from_numpy(vector.reshape(-1)).float(), sizes)
        shaped = [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]
        kept = [parameter.detach().clone() for parameter in parameters]
        gradients = []
        for sign in (1, -1):
            with torch.no_grad():
                torch._foreach_copy_(parameters, torch._foreach_add(kept, shaped, alpha=sign * step))
            found = torch.autograd.grad(
                mean_loss(model, batches), parameters, allow_unused=True, materialize_grads=True
            )
            gradients.append(torch.cat([gradient.reshape(-1) for gradient in found]).double().numpy())
        with torch.no_grad():
            torch._foreach_copy_(parameters, kept)
        difference: np.ndarray[Any, Any] = (gradients[0] - gradients[1]) / (2 * step)
        return difference

    size = sum(sizes)
    start = np.random.default_rng(2).standard_normal(size)
    values = eigsh(LinearOperator((size, size), matvec=product, dtype=np.float64), which="LA", k=1, tol=1e-3, v0=start)[
        0
    ]
    return float(values[0])


def test_eigenvalues_are_of_the_mean_loss_over_the_batches(model: Distillation, batches: list[dict[str, Any]]) -> None:
    found = Curvature(iterations=300).measure(model, batches)
    student, everything = list(model.student.parameters()), list(model.parameters())
    for side, parameters in (("student", student), ("with_heads", everything)):
        expected = sharpest(model, batches, [p for p in parameters if p.requires_grad])
        for method in ("power", "lanczos"):
            assert found[side][method]["converged"]
            assert found[side][method]["value"] == pytest.approx(expected, rel=0.02)
    assert found["value"] == pytest.approx(float(mean_loss(model, batches).detach()), rel=1e-5)
    assert found["with_heads"]["parameters"] > found["student"]["parameters"]


def test_differences_of_gradients_agree_with_exact_products(model: Distillation, batches: list[dict[str, Any]]) -> None:
    exact = Curvature(iterations=1, heads=False).measure(model, batches)
    differences = Curvature(iterations=1, heads=False, differences=True).measure(model, batches)
    assert (exact["products"], differences["products"]) == ("exact", "differences")
    largest = exact["student"]["lanczos"]["value"]
    assert differences["student"]["lanczos"]["value"] == pytest.approx(largest, rel=0.01)


def test_a_loss_without_a_second_derivative_is_measured_by_differences(
    toy_cache: Path, tiny_student: Path, tmp_path: Path
) -> None:
    run(tiny_config(toy_cache, tiny_student, tmp_path / "run", "objective.name=rkd", "training.max_steps=1"))
    said: list[str] = []
    with TrainedRun.open(tmp_path / "run") as trained:
        found = Curvature(announce=said.append, **QUICK)(trained)["points"][0]
    assert found["products"] == "differences"
    assert found["student"]["lanczos"]["value"] > 0
    assert found["with_heads"] is None  # RKD has none
    assert "cannot be differentiated twice" in said[0]


@pytest.mark.parametrize(("kind", "method", "rho"), [("sharpness", "sam", 0.05), ("adaptive_sharpness", "asam", 0.5)])
def test_the_rise_equals_that_of_training_with_sharpness(
    model: Distillation, batches: list[dict[str, Any]], kind: str, method: str, rho: float
) -> None:
    found = Curvature(**QUICK).measure(model, batches)[kind]
    sharpness = build_sharpness(method, model.student, rho=rho)
    assert sharpness is not None
    rises, losses = [], []
    for inputs in batches:
        at_weights = model(**inputs)["loss"]
        with sharpness.ascended(at_weights):
            rises.append(float(model(**inputs)["loss"].detach() - at_weights.detach()))
        losses.append(float(at_weights.detach()))
    assert found["rho"] == rho
    assert found["rise"] == pytest.approx(np.mean(rises), rel=1e-3)
    assert found["relative"] == pytest.approx(np.mean(rises) / np.mean(losses), rel=1e-3)
    assert found["rise"] > 0


def test_measuring_restores_the_weights_bit_for_bit(model: Distillation, batches: list[dict[str, Any]]) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    Curvature(**QUICK).measure(model, batches)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def texts_encoded(model: Distillation, inputs: dict[str, Any]) -> tuple[int, dict[str, Tensor]]:
    """The number of texts that the student encoded, and the terms."""
    asked: list[int] = []
    hook = model.student.register_forward_pre_hook(lambda module, given: asked.append(len(given[0])))
    with torch.no_grad():
        terms = model(**inputs)["terms"]
    hook.remove()
    return sum(asked), terms


def test_two_views_without_dropout_are_encoded_once_with_the_same_terms(
    model: Distillation, batches: list[dict[str, Any]]
) -> None:
    once, terms = texts_encoded(model, batches[0])
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    twice, expected = texts_encoded(model.train(), batches[0])
    assert (once, twice) == (4, 8)
    assert set(terms) == {"tamd", "lasd", "simcse"}
    torch.testing.assert_close(terms, expected)


def test_two_texts_of_a_pair_are_both_encoded(model: Distillation, batches: list[dict[str, Any]]) -> None:
    inputs = {**batches[0], "input_ids": batches[0]["input_ids"].clone()}
    inputs["input_ids"][4:] = inputs["input_ids"][4:].roll(1, 0)
    assert texts_encoded(model, inputs)[0] == 8


def test_every_checkpoint_of_a_run_is_a_point(finished: Path) -> None:
    record = analyze(finished, ["curvature"], options={"curvature": QUICK})["curvature"]
    result = record["result"]
    assert (result["texts"], result["batch"]) == (8, 4)
    assert [point["step"] for point in result["points"]] == [4, 8, 12]
    assert [point["epoch"] for point in result["points"]] == pytest.approx([4 / 7, 8 / 7, 12 / 7], abs=1e-4)
    assert "talas" in result["loss"]
    assert json.loads((finished / "analyses" / "curvature.json").read_text())["result"] == result
    last = result["points"][-1]["student"]["lanczos"]["value"]
    assert record["conclusion"].startswith(f"Largest eigenvalue {last:.4g} ")
    assert "at step 12, largest eigenvalue" in record["conclusion"]


@pytest.mark.parametrize(("count", "steps"), [(1, [12]), (2, [4, 12]), (9, [4, 8, 12])])
def test_fewer_checkpoints_are_spread_and_end_with_the_newest(finished: Path, count: int, steps: list[int]) -> None:
    with TrainedRun.open(finished) as trained:
        found = Curvature(checkpoints=count, **QUICK)(trained)
    assert [point["step"] for point in found["points"]] == steps
    assert all(point["with_heads"] is None for point in found["points"])


def test_an_eigenvalue_that_did_not_converge_is_reported_as_a_lower_bound(finished: Path) -> None:
    with TrainedRun.open(finished) as trained:
        found = Curvature(checkpoints=1, **QUICK)(trained)
    assert not found["points"][0]["student"]["power"]["converged"]
    assert "at least" in Curvature.conclusion(found)
    assert "by power iteration" in Curvature.conclusion(found)


@pytest.mark.parametrize("option", ["checkpoints", "texts", "batch", "iterations", "rho", "adaptive_rho"])
def test_an_option_out_of_range_is_an_error(option: str) -> None:
    with pytest.raises(ConfigError, match=rf"curvature\.{option} is 0; expected"):
        Curvature(**{option: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["seed", "heads", "differences"])
def test_an_option_of_another_type_is_an_error(option: str) -> None:
    with pytest.raises(ConfigError, match=rf"curvature\.{option} is 'x'; expected"):
        Curvature(**{option: "x"})  # type: ignore[arg-type]
