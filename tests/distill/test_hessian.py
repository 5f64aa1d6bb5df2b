"""Both methods find the largest eigenvalue of the exact Hessian."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from distill.errors import NonFiniteLoss
from distill.sharpness.hessian import DoubleBackward, Eigenvalue, GradientDifferences, lanczos, power_iteration

Method = Callable[..., Eigenvalue | None]


def net(seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    """47 weights in float32, inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2), nn.LayerNorm(2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model, torch.randn(24, 4, generator=generator), torch.randn(24, 2, generator=generator)


def exact(model: nn.Module, inputs: Tensor, targets: Tensor) -> np.ndarray[Any, Any]:
    """The whole Hessian of the mean squared error, in float64, by torch.autograd.functional."""
    names = [name for name, _ in model.named_parameters()]
    shapes = [parameter.shape for parameter in model.parameters()]

    def loss(flat: Tensor) -> Tensor:
        parts = torch.split(flat, [shape.numel() for shape in shapes])
        weights = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        return nn.functional.mse_loss(functional_call(model, weights, inputs.double()), targets.double())

    flat = torch.cat([parameter.detach().double().reshape(-1) for parameter in model.parameters()])
    whole: np.ndarray[Any, Any] = torch.autograd.functional.hessian(loss, flat).numpy()  # type: ignore[no-untyped-call]
    return whole


def quadratic(*eigenvalues: float) -> tuple[Tensor, nn.Parameter]:
    """A loss whose Hessian has these eigenvalues, in a random basis, and its only parameter."""
    size = len(eigenvalues)
    basis = np.linalg.qr(np.random.default_rng(3).standard_normal((size, size)))[0]
    matrix = torch.from_numpy(basis @ np.diag(eigenvalues) @ basis.T)
    point = nn.Parameter(torch.linspace(-1, 1, size, dtype=torch.float64))
    return point @ matrix @ point / 2, point


@pytest.mark.parametrize("seed", range(4))
def test_both_methods_agree_with_the_exact_hessian_of_a_small_net_to_one_percent(seed: int) -> None:
    model, inputs, targets = net(seed)
    hessian = DoubleBackward(nn.functional.mse_loss(model(inputs), targets), model.parameters())
    largest = np.linalg.eigvalsh(exact(model, inputs, targets))[-1]
    for method in (power_iteration, lanczos):
        found = method(hessian)
        assert found is not None
        assert found.converged
        assert found.value == pytest.approx(largest, rel=0.01)


def test_a_product_is_that_of_the_exact_hessian() -> None:
    model, inputs, targets = net()
    hessian = DoubleBackward(nn.functional.mse_loss(model(inputs), targets), model.parameters())
    vector = hessian.start(5)
    expected = exact(model, inputs, targets) @ vector.double().numpy()
    np.testing.assert_allclose(hessian.product(vector).numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_differences_of_gradients_over_mini_batches_give_the_same_eigenvalue(seed: int) -> None:
    model, inputs, targets = net(seed)
    parts = list(zip(torch.split(inputs, 8), torch.split(targets, 8), strict=True))
    hessian = GradientDifferences(
        lambda: (nn.functional.mse_loss(model(mine), theirs) for mine, theirs in parts), model.parameters()
    )
    largest = np.linalg.eigvalsh(exact(model, inputs, targets))[-1]
    for method in (power_iteration, lanczos):
        found = method(hessian)
        assert found is not None
        assert found.converged
        assert found.value == pytest.approx(largest, rel=0.01)


def test_differences_hold_the_other_parameters_of_a_block_fixed() -> None:
    model, inputs, targets = net()
    loss = nn.functional.mse_loss
    whole = GradientDifferences(lambda: [loss(model(inputs), targets)], [*model.parameters(), nn.Parameter(inputs)])
    assert whole.parameters == list(model.parameters())
    part = whole.block(model[0].parameters())  # type: ignore[index]
    vector = part.start(3)
    expected = exact(model, inputs, targets)[: part.size, : part.size] @ vector.double().numpy()
    np.testing.assert_allclose(part.product(vector).numpy(), expected, atol=2e-3)


def test_differences_leave_the_weights_bit_for_bit_even_after_an_error() -> None:
    model, inputs, targets = net()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    passes: list[None] = []

    def losses() -> list[Tensor]:
        passes.append(None)
        if len(passes) == 3:
            raise ValueError("in the middle of a product")
        return [nn.functional.mse_loss(model(inputs), targets)]

    hessian = GradientDifferences(losses, model.parameters())
    with pytest.raises(ValueError, match="middle"):
        hessian.product(hessian.start(0))
    hessian.product(hessian.start(0))
    assert all(torch.equal(parameter, kept) for parameter, kept in zip(model.parameters(), before, strict=True))


def test_only_differences_support_normalized_rows_of_zeros() -> None:
    weight = nn.Parameter(torch.ones(3))

    def loss() -> Tensor:
        rows = torch.stack([weight, 0 * weight])
        return nn.functional.normalize(rows)[:, 0].sum()

    with pytest.raises(NonFiniteLoss, match="second derivative"):
        DoubleBackward(loss(), [weight]).product(torch.ones(3))
    along = torch.tensor([1.0, 0.0, 0.0])
    # u = w / ||w|| of w = (1, 1, 1): the second derivatives of u_1 by w_1 and the others.
    expected = torch.tensor([-2.0, 0.0, 0.0]) / 3**1.5
    torch.testing.assert_close(
        GradientDifferences(lambda: [loss()], [weight]).product(along)[0], expected[0], rtol=1e-3, atol=1e-4
    )


def test_the_mean_over_mini_batches_has_the_hessian_of_the_whole() -> None:
    model, inputs, targets = net()
    parts = [
        nn.functional.mse_loss(model(mine), theirs)
        for mine, theirs in zip(torch.split(inputs, 8), torch.split(targets, 8), strict=True)
    ]
    vector = torch.linspace(-1, 1, 48)[: sum(p.numel() for p in model.parameters())]
    whole = DoubleBackward(nn.functional.mse_loss(model(inputs), targets), model.parameters()).product(vector)
    torch.testing.assert_close(DoubleBackward(torch.stack(parts).mean(), model.parameters()).product(vector), whole)


@pytest.mark.parametrize(
    ("eigenvalues", "largest"),
    [
        ((3.0, 1.0, 0.5, 0.0, -1.0), 3.0),
        ((2.0, 1.0, 0.5, -9.0, -1.0), 2.0),  # a negative one is largest in magnitude
        ((-1.0, -2.0, -5.0, -7.0), -1.0),  # a maximum of the loss
        ((4.0, 4.0, 1.0, -3.5), 4.0),  # a double one
        ((5.0, 0.0, 0.0, 0.0), 5.0),  # flat except in one direction
    ],
)
def test_the_largest_eigenvalue_is_the_algebraic_one(eigenvalues: tuple[float, ...], largest: float) -> None:
    loss, point = quadratic(*eigenvalues)
    for method in (power_iteration, lanczos):
        found = method(DoubleBackward(loss, [point]))
        assert found is not None
        assert found.converged
        assert found.value == pytest.approx(largest, rel=0.01)
        assert abs(found.value - largest) <= found.residual + 1e-9


@pytest.mark.parametrize("method", [power_iteration, lanczos])
def test_equal_eigenvalues_of_opposite_sign_are_not_converged(method: Method) -> None:
    loss, point = quadratic(3.0, -3.0, 1.0, 0.5, 0.1)
    found = method(DoubleBackward(loss, [point]))
    assert found is not None
    assert not found.converged or found.value == pytest.approx(3, rel=0.01)


def test_a_method_that_ran_out_of_steps_has_not_converged() -> None:
    loss, point = quadratic(*np.linspace(0.99, 1, 60).tolist(), *np.linspace(-1, 0.9, 60).tolist())
    hessian = DoubleBackward(loss, [point])
    power, krylov = power_iteration(hessian, iterations=2), lanczos(hessian, tolerance=1e-9, steps=2)
    assert power is not None
    assert krylov is not None
    assert not power.converged
    assert not krylov.converged
    assert power.products >= 2


def test_a_block_holds_the_other_parameters_fixed() -> None:
    model, inputs, targets = net()
    whole = DoubleBackward(nn.functional.mse_loss(model(inputs), targets), model.parameters())
    first = list(model[0].parameters())  # type: ignore[index]
    part = whole.block(first)
    assert part.parameters == first
    size = sum(parameter.numel() for parameter in first)
    largest = np.linalg.eigvalsh(exact(model, inputs, targets)[:size, :size])[-1]
    found = lanczos(part)
    assert found is not None
    assert found.value == pytest.approx(largest, rel=0.01)


def test_parameters_with_a_constant_gradient_are_skipped() -> None:
    bent, frozen = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3), requires_grad=False)
    linear, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    loss = bent.pow(4).sum() + frozen.sum() + linear.sum()
    hessian = DoubleBackward(loss, [bent, bent, frozen, linear, unused])
    assert hessian.parameters == [bent]
    assert hessian.size == 3
    found = power_iteration(hessian)
    assert found is not None
    assert found.value == pytest.approx(12)


@pytest.mark.parametrize("method", [power_iteration, lanczos])
def test_a_loss_without_curvature_has_no_eigenvalue_or_zero(method: Method) -> None:
    weight = nn.Parameter(torch.ones(4))
    assert method(DoubleBackward(weight.sum(), [weight])) is None
    assert method(DoubleBackward(torch.tensor(1.0), [weight])) is None
    assert method(DoubleBackward(weight.sum(), [])) is None
    flat = method(DoubleBackward((0 * weight).pow(2).sum(), [weight]))
    assert flat is not None
    assert (flat.value, flat.converged) == (0, True)


@pytest.mark.parametrize("method", [power_iteration, lanczos])
def test_a_single_weight_has_its_second_derivative(method: Method) -> None:
    weight = nn.Parameter(torch.tensor([2.0]))
    found = method(DoubleBackward(weight.pow(3).sum(), [weight]))
    assert found is not None
    assert found.value == pytest.approx(12)


@pytest.mark.parametrize("method", [power_iteration, lanczos])
def test_a_second_derivative_that_is_not_finite_is_an_error(method: Method) -> None:
    weight = nn.Parameter(torch.zeros(3))
    with pytest.raises(NonFiniteLoss, match="second derivative"):
        method(DoubleBackward(weight.abs().pow(1.5).sum(), [weight]))


def test_estimates_with_one_seed_are_equal_and_keep_the_random_state() -> None:
    model, inputs, targets = net()
    hessian = DoubleBackward(nn.functional.mse_loss(model(inputs), targets), model.parameters())
    before = torch.random.get_rng_state()
    assert power_iteration(hessian, seed=7) == power_iteration(hessian, seed=7)
    assert lanczos(hessian, seed=7) == lanczos(hessian, seed=7)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_weights_and_gradients_do_not_change() -> None:
    model, inputs, targets = net()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    hessian = DoubleBackward(nn.functional.mse_loss(model(inputs), targets), model.parameters())
    power_iteration(hessian)
    lanczos(hessian)
    for parameter, kept in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, kept)
        assert parameter.grad is None


def test_attention_is_differentiated_twice_by_the_kernel_that_can() -> None:
    queries = nn.Parameter(torch.randn(1, 1, 5, 8, generator=torch.Generator().manual_seed(0)))

    def loss() -> Tensor:
        return nn.functional.scaled_dot_product_attention(queries, queries, queries).square().sum()

    with sdpa_kernel([SDPBackend.MATH]):
        found = lanczos(DoubleBackward(loss(), [queries]))
    assert found is not None
    assert found.converged
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]), pytest.raises(RuntimeError, match="not implemented"):
        DoubleBackward(loss(), [queries]).product(torch.ones(40))
