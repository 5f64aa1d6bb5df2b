import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor, nn

from distill.errors import ConfigError
from distill.sharpness import SharpnessAware, build_sharpness

CURVATURE = (3.0, 2.0)


def two_parameters() -> tuple[nn.Parameter, nn.Parameter]:
    return nn.Parameter(torch.tensor([1.0])), nn.Parameter(torch.tensor([-2.0]))


def named(weight: nn.Parameter, bias: nn.Parameter) -> list[tuple[str, nn.Parameter]]:
    return [("layer.weight", weight), ("layer.bias", bias)]


def quadratic(weight: Tensor, bias: Tensor) -> Tensor:
    """(3 w^2 + 2 b^2) / 2: its gradient is (3 w, 2 b), that is (3, -4) at (1, -2)."""
    return (CURVATURE[0] * weight.square() + CURVATURE[1] * bias.square()).sum() / 2


def bits(parameters: Iterable[Tensor]) -> list[bytes]:
    return [parameter.detach().clone().numpy().tobytes() for parameter in parameters]


# At (1, -2) with gradient (3, -4), rho = 0.5:
#   none  T = (1, 1):      ||T g|| = 5,                      eps = 0.5 (3, -4) / 5
#   abs   T = (1, 2):      T g = (3, -8), norm sqrt(73),     eps = 0.5 (3, -16) / sqrt(73)
#   kwon  T = (1.5, 1) with eta = 0.5, the bias unscaled:
#                          T g = (4.5, -4), norm sqrt(36.25), eps = 0.5 (6.75, -4) / sqrt(36.25)
CLOSED_FORMS = [
    ("none", 0.0, 5.0, (0.3, -0.4)),
    ("abs", 0.0, math.sqrt(73), (1.5 / math.sqrt(73), -8 / math.sqrt(73))),
    ("kwon", 0.5, math.sqrt(36.25), (3.375 / math.sqrt(36.25), -2 / math.sqrt(36.25))),
]


@pytest.mark.parametrize(("scaling", "eta", "gradient_norm", "eps"), CLOSED_FORMS)
def test_the_ascent_equals_the_closed_form(
    scaling: str, eta: float, gradient_norm: float, eps: tuple[float, float]
) -> None:
    weight, bias = two_parameters()
    sharpness = SharpnessAware(named(weight, bias), scaling=scaling, rho=0.5, eta=eta)
    with sharpness.ascended(quadratic(weight, bias)) as ascent:
        assert weight.item() == pytest.approx(1 + eps[0], rel=1e-6)
        assert bias.item() == pytest.approx(-2 + eps[1], rel=1e-6)
        assert ascent.finite
        assert ascent.norm.item() == pytest.approx(math.hypot(*eps), rel=1e-6)
        assert ascent.gradient_norm.item() == pytest.approx(gradient_norm, rel=1e-6)
        assert not ascent.norm.requires_grad


@pytest.mark.parametrize(("scaling", "eta", "gradient_norm", "eps"), CLOSED_FORMS)
def test_the_second_gradient_is_at_the_perturbed_weights(
    scaling: str, eta: float, gradient_norm: float, eps: tuple[float, float]
) -> None:
    weight, bias = two_parameters()
    sharpness = SharpnessAware(named(weight, bias), scaling=scaling, rho=0.5, eta=eta)
    with sharpness.ascended(quadratic(weight, bias)):
        quadratic(weight, bias).backward()
    assert weight.grad is not None
    assert bias.grad is not None
    assert weight.grad.item() == pytest.approx(3 * (1 + eps[0]), rel=1e-6)
    assert bias.grad.item() == pytest.approx(2 * (-2 + eps[1]), rel=1e-6)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


@pytest.mark.parametrize(("scaling", "eta"), [("none", 0.0), ("abs", 0.0), ("kwon", 0.01)])
def test_the_ascent_of_a_network_equals_numpy_in_double_precision(scaling: str, eta: float) -> None:
    model, inputs = network(), torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    before = {name: p.detach().double().numpy().copy() for name, p in model.named_parameters()}
    gradients = torch.autograd.grad(model(inputs).square().sum(), list(model.parameters()))
    g = {name: value.double().numpy() for name, value in zip(before, gradients, strict=True)}
    t = {name: np.ones_like(w) for name, w in before.items()}
    for name, w in before.items():
        if scaling == "abs" or (scaling == "kwon" and name.endswith("weight")):
            t[name] = np.abs(w) + eta
    norm = math.sqrt(sum(np.sum((t[name] * g[name]) ** 2) for name in before))

    sharpness = SharpnessAware(model.named_parameters(), scaling=scaling, rho=0.7, eta=eta)
    with sharpness.ascended(model(inputs).square().sum()):
        for name, parameter in model.named_parameters():
            expected = before[name] + 0.7 * t[name] ** 2 * g[name] / norm
            np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=1e-4, atol=1e-6)


@settings(max_examples=50, deadline=None)
@given(
    w=arrays.arrays(np.float32, 6, elements=st.floats(-1e6, 1e6, width=32)),
    scaling=st.sampled_from(["none", "abs", "kwon"]),
    rho=st.floats(1e-3, 10),
)
def test_weights_are_restored_bit_for_bit(w: np.ndarray[Any, Any], scaling: str, rho: float) -> None:
    weight, bias = nn.Parameter(torch.tensor(w[:3])), nn.Parameter(torch.tensor(w[3:]))
    before = bits([weight, bias])
    sharpness = SharpnessAware(named(weight, bias), scaling=scaling, rho=rho)
    with sharpness.ascended((weight - 1).square().sum() + bias.sum()):
        (weight.square().sum() + bias.sum()).backward()
    assert bits([weight, bias]) == before


def test_weights_are_restored_if_the_block_raises() -> None:
    weight, bias = two_parameters()
    before = bits([weight, bias])
    sharpness = SharpnessAware(named(weight, bias), scaling="none", rho=0.5)

    def fail() -> None:
        with sharpness.ascended(quadratic(weight, bias)):
            assert bits([weight, bias]) != before
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert bits([weight, bias]) == before


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_perturbs_nothing_and_the_block_still_runs(bad: float) -> None:
    weight, bias = two_parameters()
    before = bits([weight, bias])
    sharpness = SharpnessAware(named(weight, bias), scaling="abs", rho=0.5)
    ran = False
    with sharpness.ascended(quadratic(weight, bias) * bad) as ascent:
        ran = True
        assert not ascent.finite
        assert ascent.norm.item() == 0
        assert not ascent.gradient_norm.isfinite()
        assert bits([weight, bias]) == before
    assert ran
    assert bits([weight, bias]) == before
    assert sharpness.perturbation_shares() == {}


def test_a_grad_scaler_skips_the_step_whose_passes_overflow() -> None:
    weight, bias = two_parameters()
    before = bits([weight, bias])
    optimizer = torch.optim.SGD([weight, bias], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    sharpness = SharpnessAware(named(weight, bias), scaling="abs", rho=0.5)

    def overflowing() -> Tensor:
        return scaler.scale(quadratic(weight.half(), bias.half()).float())

    with sharpness.ascended(overflowing()) as ascent:
        overflowing().backward()
    scaler.step(optimizer)
    scaler.update()
    assert not ascent.finite
    assert bits([weight, bias]) == before
    assert scaler.get_scale() == 2.0**15


@pytest.mark.parametrize(("scaling", "eta"), [("none", 0.0), ("abs", 0.0), ("kwon", 0.01)])
def test_the_scale_of_the_loss_does_not_change_a_bit(scaling: str, eta: float) -> None:
    model, inputs = network(), torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    sharpness = SharpnessAware(model.named_parameters(), scaling=scaling, rho=0.1, eta=eta)
    moved = []
    for scale in (1.0, 65536.0):
        with sharpness.ascended(model(inputs).square().sum() * scale):
            moved.append(bits(model.parameters()))
    assert moved[0] == moved[1]
    assert moved[0] != bits(model.parameters())


def test_the_first_pass_neither_stores_gradients_nor_runs_their_hooks() -> None:
    weight, bias = two_parameters()
    weight.grad = torch.tensor([7.0])
    accumulated: list[Tensor] = []
    weight.register_post_accumulate_grad_hook(lambda parameter: accumulated.append(parameter))
    sharpness = SharpnessAware(named(weight, bias), scaling="none", rho=0.5)
    with sharpness.ascended(quadratic(weight, bias)):
        assert weight.grad.item() == 7
        assert bias.grad is None
        assert accumulated == []
        quadratic(weight, bias).backward()
    assert weight.grad.item() == pytest.approx(7 + 3 * 1.3)
    assert len(accumulated) == 1


def test_gradients_are_enabled_inside_the_block() -> None:
    weight, bias = two_parameters()
    with SharpnessAware(named(weight, bias), scaling="none", rho=0.5).ascended(quadratic(weight, bias)):
        assert torch.is_grad_enabled()


def test_a_bias_of_zero_stays_under_abs_and_moves_under_kwon() -> None:
    for scaling, moves in (("abs", False), ("kwon", True)):
        weight, bias = nn.Parameter(torch.tensor([1.0])), nn.Parameter(torch.tensor([0.0]))
        sharpness = SharpnessAware(named(weight, bias), scaling=scaling, rho=0.5)
        with sharpness.ascended((weight + bias).square().sum()):
            assert (bias.item() != 0) == moves
            assert weight.item() > 1


def test_frozen_and_unused_parameters_stay() -> None:
    weight, bias = two_parameters()
    frozen = nn.Parameter(torch.tensor([4.0]), requires_grad=False)
    unused = nn.Parameter(torch.tensor([5.0]))
    everything = [*named(weight, bias), ("frozen.weight", frozen), ("pooler.weight", unused)]
    sharpness = SharpnessAware(everything, scaling="none", rho=0.5)
    with sharpness.ascended(quadratic(weight, bias) + frozen.sum()):
        assert weight.item() == pytest.approx(1.3)
        assert frozen.item() == 4
        assert unused.item() == 5


def test_a_parameter_frozen_after_construction_stays() -> None:
    weight, bias = two_parameters()
    sharpness = SharpnessAware(named(weight, bias), scaling="none", rho=0.5)
    bias.requires_grad_(False)
    with sharpness.ascended(quadratic(weight, bias)):
        assert weight.item() == pytest.approx(1.5)
        assert bias.item() == -2


def test_a_loss_without_any_of_the_parameters_moves_nothing() -> None:
    weight, bias = two_parameters()
    other = nn.Parameter(torch.ones(1))
    with SharpnessAware(named(weight, bias), scaling="abs", rho=0.5).ascended(other.sum()) as ascent:
        assert ascent.finite
        assert ascent.norm.item() == 0
        assert (weight.item(), bias.item()) == (1, -2)


def test_a_gradient_of_zero_moves_nothing() -> None:
    weight, bias = two_parameters()
    with SharpnessAware(named(weight, bias), scaling="none", rho=0.5).ascended(quadratic(weight, bias) * 0) as ascent:
        assert ascent.finite
        assert (weight.item(), bias.item()) == (1, -2)


def test_a_tied_parameter_moves_once() -> None:
    weight, bias = two_parameters()
    tied = [*named(weight, bias), ("decoder.weight", weight)]
    with SharpnessAware(tied, scaling="none", rho=0.5).ascended(quadratic(weight, bias)):
        assert weight.item() == pytest.approx(1.3)


def test_parameters_that_share_one_gradient_tensor_are_scaled_once_each() -> None:
    # The gradients of a sum are one expanded 1 for both.
    first, second = nn.Parameter(torch.tensor([2.0, 2.0])), nn.Parameter(torch.tensor([6.0, 6.0]))
    pair = [("a", first), ("b", second)]
    with SharpnessAware(pair, scaling="none", rho=1.0).ascended((first + second).sum()):
        assert first.tolist() == pytest.approx([2.5, 2.5])
        assert second.tolist() == pytest.approx([6.5, 6.5])
    # T g = (2, 2, 6, 6), norm sqrt(80); eps = (4, 4, 36, 36) / sqrt(80).
    with SharpnessAware(pair, scaling="abs", rho=1.0).ascended((first + second).sum()):
        assert first.tolist() == pytest.approx([2 + 4 / math.sqrt(80)] * 2)
        assert second.tolist() == pytest.approx([6 + 36 / math.sqrt(80)] * 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_move_by_the_float32_step_and_come_back_exactly(dtype: torch.dtype) -> None:
    # Gradients of 1e-5: their products and squares would underflow in float16.
    values = torch.tensor([0.1, -0.7, 3.3]).to(dtype)
    weight = nn.Parameter(values.clone())
    sharpness = SharpnessAware([("weight", weight)], scaling="abs", rho=1.0)
    with sharpness.ascended((weight * 1e-5).sum()):
        exact = values.float() + values.float().square() / values.float().norm()
        torch.testing.assert_close(weight.detach().float(), exact, rtol=5e-3, atol=0)
        assert weight.dtype == dtype
    assert torch.equal(weight.detach(), values)


def test_repeated_ascents_start_from_the_current_weights() -> None:
    weight, bias = two_parameters()
    optimizer = torch.optim.SGD([weight, bias], lr=0.1)
    sharpness = SharpnessAware(named(weight, bias), scaling="none", rho=0.5)
    w, b = 1.0, -2.0
    for _ in range(3):
        optimizer.zero_grad()
        with sharpness.ascended(quadratic(weight, bias)):
            quadratic(weight, bias).backward()
        optimizer.step()
        norm = math.hypot(3 * w, 2 * b)
        w, b = w - 0.1 * 3 * (w + 0.5 * 3 * w / norm), b - 0.1 * 2 * (b + 0.5 * 2 * b / norm)
    assert (weight.item(), bias.item()) == pytest.approx((w, b), rel=1e-5)


def test_a_model_may_change_its_dtype() -> None:
    model, inputs = network(), torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    sharpness = SharpnessAware(model.named_parameters(), scaling="abs", rho=0.1)
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter /= 3  # fills the digits that the narrower type does not have
        before = bits(model.parameters())
        with sharpness.ascended(model(inputs.to(dtype)).square().sum()):
            assert bits(model.parameters()) != before
        assert bits(model.parameters()) == before


def test_perturbation_shares_by_kind_of_parameter() -> None:
    parameters = {
        "embeddings.word_embeddings.weight": torch.full((2, 2), 1.0),
        "embeddings.LayerNorm.weight": torch.full((2,), 2.0),
        "embeddings.LayerNorm.bias": torch.full((1,), 2.0),
        "encoder.0.bias": torch.full((1,), 3.0),
        "encoder.0.weight": torch.full((1, 3), 1.0),
        "objective.heads.0.weight": torch.full((1, 2), 1.0),
    }
    weights = {name: nn.Parameter(torch.ones_like(value)) for name, value in parameters.items()}
    sharpness = SharpnessAware(weights.items(), scaling="none", rho=0.1)
    assert sharpness.perturbation_shares() == {}
    # Linear in the weights, so the gradients are the values above: squares 4, 8, 4, 9, 3, 2 of 30.
    loss = torch.stack([(weights[name] * value).sum() for name, value in parameters.items()]).sum()
    with sharpness.ascended(loss):
        pass
    shares = sharpness.perturbation_shares()
    expected = {"biases": 9, "norm gains": 8, "embeddings": 4, "norm biases": 4, "matrices": 3, "projections": 2}
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    assert shares == pytest.approx({kind: square / 30 for kind, square in expected.items()}, rel=1e-5)


def test_every_kth_step_has_an_ascent() -> None:
    sharpness = SharpnessAware(named(*two_parameters()), scaling="none", rho=0.5, every=3)
    assert [step for step in range(8) if sharpness.begin_step(step)] == [0, 3, 6]
    assert all(SharpnessAware(named(*two_parameters()), scaling="none", rho=0.5).begin_step(step) for step in range(4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scaling": "relative"}, "expected one of none, abs, kwon, found 'relative'"),
        ({"eta": 0.1}, "only scaling 'kwon' uses it"),
        ({"every": 0}, "every: expected a whole number of at least 1, found 0"),
        ({"every": 2.0}, "every"),
        ({"every": True}, "every"),
    ],
)
def test_an_option_out_of_its_range_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SharpnessAware(named(*two_parameters()), **{"scaling": "none", "rho": 0.5, **options})


def test_one_autocast_around_both_passes_does_not_cache_the_old_weights() -> None:
    layer = nn.Linear(4, 3)
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    sharpness = build_sharpness("sam", layer.named_parameters(), rho=50.0)
    assert sharpness is not None
    with torch.autocast("cpu", torch.bfloat16):
        first = layer(inputs).float().square().mean()
        with sharpness.ascended(first):
            second = layer(inputs).float().square().mean()
        again = layer(inputs).float().square().mean()
    assert second.item() > 10 * first.item()
    assert again.item() == first.item()
