from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from distill.errors import ConfigError
from distill.sharpness import MomentumSam

CURVATURE = np.array([3.0, 2.0, 0.5])
START = np.array([1.0, -2.0, 4.0])


def loss_of(weights: Tensor) -> Tensor:
    """Half a sum of c w^2: its gradient is c w."""
    return (torch.tensor(CURVATURE) * weights.square()).sum() / 2


def made(kind: Any, **options: Any) -> tuple[nn.Parameter, MomentumSam, torch.optim.Optimizer]:
    weights = nn.Parameter(torch.tensor(START))
    sharpness = MomentumSam([("w", weights)], rho=0.4)
    optimizer = kind([weights], lr=0.1, **options)
    sharpness.attach(optimizer)
    return weights, sharpness, optimizer


def take(weights: nn.Parameter, sharpness: MomentumSam, optimizer: torch.optim.Optimizer) -> None:
    with sharpness.ascended():
        loss_of(weights).backward()
    optimizer.step()
    optimizer.zero_grad()


def kept_in_the_weights(steps: int) -> list[np.ndarray[Any, Any]]:
    """AdamW of the authors: adds back the offset of the previous step and subtracts the new one."""
    w, m, v, offset, path = START.copy(), np.zeros(3), np.zeros(3), np.zeros(3), []
    for step in range(1, steps + 1):
        g = CURVATURE * w  # at the offset weights
        w = w + offset
        w = w * (1 - 0.1 * 0.01)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        w = w - 0.1 * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
        path.append(w)
        offset = 0.4 * m / np.linalg.norm(m)
        w = w - offset
    return path


def test_with_adamw_the_steps_equal_those_of_the_authors_optimizer() -> None:
    weights, sharpness, optimizer = made(torch.optim.AdamW, weight_decay=0.01)
    for there in kept_in_the_weights(8):
        take(weights, sharpness, optimizer)
        np.testing.assert_allclose(weights.detach().numpy(), there, rtol=1e-9)


def test_with_sgd_the_buffer_is_the_momentum() -> None:
    weights, sharpness, optimizer = made(torch.optim.SGD, momentum=0.9)
    w, m = START.copy(), np.zeros(3)
    for _ in range(6):
        take(weights, sharpness, optimizer)
        there = w - (0.4 * m / np.linalg.norm(m) if m.any() else 0)
        m = 0.9 * m + CURVATURE * there
        w = w - 0.1 * m
        np.testing.assert_allclose(weights.detach().numpy(), w, rtol=1e-9)


def test_the_weights_are_unperturbed_outside_of_the_passes_bit_for_bit() -> None:
    weights, sharpness, optimizer = made(torch.optim.AdamW)
    with sharpness.ascended() as ascent:
        assert weights.detach().tolist() == START.tolist()  # no momentum yet
        assert ascent.norm.item() == 0
    for _ in range(3):
        take(weights, sharpness, optimizer)
        before = weights.detach().clone()
        with sharpness.ascended() as ascent:
            assert ascent.norm.item() == pytest.approx(0.4)
            assert float((weights.detach() - before).norm()) == pytest.approx(0.4)
        assert torch.equal(weights.detach(), before)
    assert sharpness.perturbation_shares() == {"norm gains": 1.0}


def test_the_weights_are_restored_if_the_block_raises() -> None:
    weights, sharpness, optimizer = made(torch.optim.AdamW)
    take(weights, sharpness, optimizer)
    before = weights.detach().clone()

    def fail() -> None:
        with sharpness.ascended():
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.equal(weights.detach(), before)


def test_a_momentum_that_is_not_finite_perturbs_nothing() -> None:
    weights, sharpness, optimizer = made(torch.optim.AdamW)
    take(weights, sharpness, optimizer)
    optimizer.state[weights]["exp_avg"][1] = torch.inf
    before = weights.detach().clone()
    with sharpness.ascended() as ascent:
        assert not ascent.finite
        assert torch.equal(weights.detach(), before)
    assert sharpness.perturbation_shares() == {}


@pytest.mark.parametrize(("kind", "options"), [(torch.optim.SGD, {}), (torch.optim.Adagrad, {})])
def test_an_optimizer_without_a_momentum_is_refused(kind: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{kind.__name__} has no exp_avg"):
        made(kind, **options)


def test_frozen_parameters_stay() -> None:
    weights, sharpness, optimizer = made(torch.optim.AdamW)
    take(weights, sharpness, optimizer)
    weights.requires_grad_(False)
    before = weights.clone()
    with sharpness.ascended():
        assert torch.equal(weights, before)
