"""Linear layers by oneDNN: the numbers of torch, for dense float32 on a CPU only."""

from typing import Any

import pytest
import torch

from teacher_cache.teachers import linear
from teacher_cache.teachers.linear import OneDnnLinear, use_onednn

pytestmark = pytest.mark.skipif(linear.ONEDNN_LINEAR is None, reason="torch was built without oneDNN")


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the inputs that oneDNN multiplied."""
    given: list[tuple[int, ...]] = []
    multiply = linear.ONEDNN_LINEAR

    def recorded(states: torch.Tensor, *others: Any) -> Any:
        given.append(tuple(states.shape))
        return multiply(states, *others)

    monkeypatch.setattr(linear, "ONEDNN_LINEAR", recorded)
    return given


def made(bias: bool = True) -> torch.nn.Linear:
    torch.manual_seed(0)
    return OneDnnLinear(24, 40, bias=bias)


@pytest.mark.parametrize("shape", [(7, 24), (3, 5, 24), (24,)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
def test_a_layer_returns_the_same_numbers(
    shape: tuple[int, ...], bias: bool, gradients: bool, shapes: list[tuple[int, ...]]
) -> None:
    layer, states = made(bias), torch.randn(shape)
    with torch.set_grad_enabled(gradients):
        found = layer(states)
    expected = states.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0)
    assert shapes == [shape]
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 1e-6 * expected.abs().max()


def test_transposed_states_work() -> None:
    layer, states = made(), torch.randn(24, 6).T
    torch.testing.assert_close(layer(states), states @ layer.weight.T + layer.bias)


@pytest.mark.parametrize("shape", [(7, 24), (3, 5, 24), (24,)])
def test_first_and_second_order_gradients_are_those_of_torch(
    shape: tuple[int, ...], shapes: list[tuple[int, ...]]
) -> None:
    states = torch.randn(shape, requires_grad=True)

    def gradients(layer: torch.nn.Linear) -> list[torch.Tensor]:
        leaves = [states, layer.weight, layer.bias]
        first = torch.autograd.grad(layer(states).tanh().sum(), leaves, create_graph=True)
        return [*first, *torch.autograd.grad(sum((part**2).sum() for part in first), leaves)]

    layer = torch.nn.Linear(24, 40)
    expected = gradients(layer)
    assert not shapes
    use_onednn(layer)
    found = gradients(layer)
    assert shapes
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_a_frozen_weight_has_no_gradient(shapes: list[tuple[int, ...]]) -> None:
    layer, states = made(), torch.randn(7, 24, requires_grad=True)
    layer.weight.requires_grad_(False)
    layer(states).sum().backward()
    assert layer.weight.grad is None
    assert shapes == [(7, 24), (7, 40)]


def test_other_dtypes_autocast_subclasses_devices_and_empty_inputs_use_torch(
    shapes: list[tuple[int, ...]],
) -> None:
    class Own(torch.Tensor):
        pass

    for layer, states in (
        (made().bfloat16(), torch.ones(2, 24).bfloat16()),
        (made().double(), torch.ones(2, 24).double()),
        (made(), torch.ones(2, 24).as_subclass(Own)),
        (made(), torch.ones(0, 24)),
        (made().to("meta"), torch.ones(2, 24, device="meta")),
    ):
        assert layer(states).shape == (len(states), 40)
    with torch.autocast("cpu", torch.bfloat16):
        assert made()(torch.ones(2, 24)).dtype == torch.bfloat16
    assert not shapes


def test_layers_of_another_class_are_unchanged() -> None:
    class Own(torch.nn.Linear):
        pass

    network = torch.nn.Sequential(torch.nn.Linear(2, 2), Own(2, 2))
    use_onednn(network)
    assert [type(layer) for layer in network] == [OneDnnLinear, Own]
