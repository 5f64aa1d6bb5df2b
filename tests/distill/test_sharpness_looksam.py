import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from distill.errors import RunFolderError
from distill.sharpness import LookSam

CURVATURE = np.array([3.0, 2.0, 0.5])
START = np.array([1.0, -2.0, 4.0])


def loss_of(weights: Tensor, scale: float = 1.0) -> Tensor:
    """Half a sum of c w^2: its gradient is c w."""
    return scale * (torch.tensor(CURVATURE, dtype=weights.dtype) * weights.square()).sum() / 2


def made(**options: Any) -> tuple[nn.Parameter, LookSam, torch.optim.Optimizer]:
    weights = nn.Parameter(torch.tensor(START, dtype=torch.float64))
    sharpness = LookSam([("w", weights)], **{"rho": 0.5, "every": 3, "alpha": 0.7, **options})
    optimizer = torch.optim.SGD([weights], lr=0.1)
    sharpness.attach(optimizer)
    return weights, sharpness, optimizer


def take(step: int, weights: nn.Parameter, sharpness: LookSam, optimizer: torch.optim.Optimizer) -> bool:
    ascends = sharpness.begin_step(step)
    if ascends:
        with sharpness.ascended(loss_of(weights)):
            loss_of(weights).backward()
    else:
        loss_of(weights).backward()
    optimizer.step()
    optimizer.zero_grad()
    return ascends


def expected(steps: int, *, rho: float = 0.5, every: int = 3, alpha: float = 0.7) -> list[np.ndarray[Any, Any]]:
    """The algorithm of the paper for the quadratic."""
    w, kept, path = START.copy(), np.zeros(3), []
    for step in range(steps):
        g = CURVATURE * w
        if step % every == 0:
            there = CURVATURE * (w + rho * g / np.linalg.norm(g))
            u = g / np.linalg.norm(g)
            kept, direction = there - (there @ u) * u, there
        else:
            direction = g + alpha * np.linalg.norm(g) / np.linalg.norm(kept) * kept
        w = w - 0.1 * direction
        path.append(w)
    return path


@pytest.mark.parametrize("options", [{}, {"every": 1}, {"alpha": 0.0}, {"every": 5, "alpha": 0.2, "rho": 0.05}])
def test_steps_are_those_of_the_paper(options: dict[str, Any]) -> None:
    weights, sharpness, optimizer = made(**options)
    every = options.get("every", 3)
    for step, there in enumerate(expected(11, **options)):
        assert take(step, weights, sharpness, optimizer) == (step % every == 0)
        np.testing.assert_allclose(weights.detach().numpy(), there, rtol=1e-9)


def test_the_stored_direction_is_orthogonal_to_the_gradient() -> None:
    weights, sharpness, optimizer = made()
    gradient = CURVATURE * START
    take(0, weights, sharpness, optimizer)
    kept = sharpness.state_dict()["w"].numpy()
    assert kept @ gradient == pytest.approx(0, abs=1e-12)
    assert np.linalg.norm(kept) == pytest.approx(1)


def test_micro_batches_count_as_one_step() -> None:
    weights, sharpness, optimizer = made()
    rows = [np.array([3.0, 0.0, 0.5]), np.array([0.0, 2.0, 0.5])]  # curvatures of two micro-batches

    def micro(row: np.ndarray[Any, Any]) -> Tensor:
        return (torch.tensor(row) * weights.square()).sum() / 2

    w, kept = START.copy(), np.zeros(3)
    for step in range(5):
        for row in rows:
            if sharpness.begin_step(step):
                with sharpness.ascended(micro(row)):
                    micro(row).backward()
            else:
                micro(row).backward()
        optimizer.step()
        optimizer.zero_grad()
        slopes = [row * w for row in rows]
        g = sum(slopes)
        if step % 3 == 0:
            # Each micro-batch ascends its own loss; the stored direction is of their sums.
            there = sum(
                row * (w + 0.5 * slope / np.linalg.norm(slope)) for row, slope in zip(rows, slopes, strict=True)
            )
            u = g / np.linalg.norm(g)
            kept, direction = there - (there @ u) * u, there
        else:
            direction = g + 0.7 * np.linalg.norm(g) / np.linalg.norm(kept) * kept
        w = w - 0.1 * direction
        np.testing.assert_allclose(weights.detach().numpy(), w, rtol=1e-9)


def test_a_loaded_state_continues_exactly() -> None:
    whole = made()
    for step in range(8):
        take(step, *whole)
    first = made()
    for step in range(4):
        take(step, *first)
    second = made()
    with torch.no_grad():
        second[0].copy_(first[0])
    second[1].load_state_dict({name: tensor.clone() for name, tensor in first[1].state_dict().items()})
    assert not second[1].begin_step(4)
    for step in range(4, 8):
        take(step, *second)
    assert torch.equal(second[0], whole[0])


def test_the_order_of_a_state_does_not_change_a_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = {f"w{number}": 3 + 7 * number for number in range(12)}
    state = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    gradients = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    ends = []
    for names in (list(state), list(reversed(state))):
        weights = {name: nn.Parameter(torch.zeros(size)) for name, size in sizes.items()}
        sharpness = LookSam(weights.items(), rho=0.5, every=3, alpha=0.7)
        optimizer = torch.optim.SGD(weights.values(), lr=0.1)
        sharpness.attach(optimizer)
        sharpness.load_state_dict({name: state[name] for name in names})
        assert not sharpness.begin_step(1)
        for name, weight in weights.items():
            weight.grad = gradients[name].clone()
        optimizer.step()
        ends.append(torch.cat([weight.detach() for weight in weights.values()]))
    assert torch.equal(*ends)


def test_without_a_state_any_first_step_has_an_ascent() -> None:
    weights, sharpness, optimizer = made()
    assert [take(step, weights, sharpness, optimizer) for step in (4, 5, 6, 7)] == [True, False, True, False]


def test_a_state_of_other_parameters_is_refused() -> None:
    _, sharpness, _ = made()
    for state in ({"v": torch.zeros(3)}, {"w": torch.zeros(2)}):
        with pytest.raises(RunFolderError, match="other parameters"):
            sharpness.load_state_dict(state)


def test_the_scale_of_the_loss_does_not_matter() -> None:
    paths = []
    for scale in (1.0, 2.0**16):
        weights = nn.Parameter(torch.tensor(START, dtype=torch.float32))
        sharpness = LookSam([("w", weights)], rho=0.5, every=3, alpha=0.7)
        optimizer = torch.optim.SGD([weights], lr=0.1)
        sharpness.attach(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for step in range(7):
            if sharpness.begin_step(step):
                with sharpness.ascended(scaler.scale(loss_of(weights))):
                    scaler.scale(loss_of(weights)).backward()
            else:
                scaler.scale(loss_of(weights)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        paths.append(weights.detach().clone())
    assert torch.equal(*paths)


@pytest.mark.parametrize("overflowing", [3, 4])  # an ascent, and a step that would be corrected
def test_a_skipped_step_only_requires_a_new_direction(overflowing: int) -> None:
    weights = nn.Parameter(torch.tensor(START, dtype=torch.float32))
    sharpness = LookSam([("w", weights)], rho=0.5, every=3, alpha=0.7)
    optimizer = torch.optim.SGD([weights], lr=0.1)
    sharpness.attach(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    ascended = []
    for step in range(7):
        before = weights.detach().clone()
        bad = math.inf if step == overflowing else 1.0
        ascended.append(sharpness.begin_step(step))
        if ascended[-1]:
            with sharpness.ascended(scaler.scale(loss_of(weights, bad))):
                scaler.scale(loss_of(weights, bad)).backward()
        else:
            scaler.scale(loss_of(weights, bad)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(before, weights.detach()) == (step == overflowing)
        assert bool(weights.isfinite().all())
    assert scaler.get_scale() == 2.0
    again = {3: [True, False, False, True, True, False, True], 4: [True, False, False, True, False, False, True]}
    assert ascended == again[overflowing]


def test_a_direction_that_is_not_finite_is_not_stored() -> None:
    weights, sharpness, optimizer = made()
    assert sharpness.begin_step(0)
    with sharpness.ascended(loss_of(weights, math.inf)):  # only the first pass overflows
        loss_of(weights).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert sharpness.state_dict() == {}
    assert sharpness.begin_step(1)


def test_a_block_that_raises_restores_the_weights_and_discards_its_gradients() -> None:
    weights, sharpness, optimizer = made()
    sharpness.begin_step(0)

    def fail() -> None:
        with sharpness.ascended(loss_of(weights)):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    np.testing.assert_array_equal(weights.detach().numpy(), START)
    take(0, weights, sharpness, optimizer)
    np.testing.assert_allclose(weights.detach().numpy(), expected(1)[0], rtol=1e-12)
    take(1, weights, sharpness, optimizer)
    np.testing.assert_allclose(weights.detach().numpy(), expected(2)[1], rtol=1e-9)


def test_attaching_again_corrects_once_and_another_optimizer_replaces_the_first() -> None:
    weights, sharpness, optimizer = made()
    for _ in range(3):
        sharpness.attach(optimizer)
    for step in range(2):
        take(step, weights, sharpness, optimizer)
    np.testing.assert_allclose(weights.detach().numpy(), expected(2)[1], rtol=1e-9)
    other = torch.optim.SGD([weights], lr=0.1)
    sharpness.attach(other)
    loss_of(weights).backward()
    before = weights.grad.clone() if weights.grad is not None else None
    optimizer.step()
    assert before is not None
    assert torch.equal(before, weights.grad)  # type: ignore[arg-type]


def test_half_precision_parameters_have_a_float32_direction() -> None:
    weights = nn.Parameter(torch.tensor(START, dtype=torch.bfloat16))
    sharpness = LookSam([("w", weights)], rho=0.5, every=2, alpha=0.7)
    optimizer = torch.optim.SGD([weights], lr=0.1)
    sharpness.attach(optimizer)
    for step in range(2):
        take(step, weights, sharpness, optimizer)
    assert sharpness.state_dict()["w"].dtype == torch.float32
    assert weights.dtype == torch.bfloat16
    np.testing.assert_allclose(weights.detach().float().numpy(), expected(2, every=2)[1], rtol=0.03)
