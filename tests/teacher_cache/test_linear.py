"""Linear layers by oneDNN: the same numbers, and only where they are its business."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from teacher_cache.teachers import linear
from teacher_cache.teachers.linear import fast_linear

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(linear.ONEDNN_LINEAR is None, reason="torch was built without oneDNN")


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the states that oneDNN was given."""
    given: list[tuple[int, ...]] = []
    multiply = linear.ONEDNN_LINEAR

    def watched(states: torch.Tensor, *others: Any) -> Any:
        given.append(tuple(states.shape))
        return multiply(states, *others)

    monkeypatch.setattr(linear, "ONEDNN_LINEAR", watched)
    return given


@pytest.mark.parametrize("shape", [(7, 24), (3, 5, 24), (24,)])
@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_a_layer_gives_the_same_numbers(shape: tuple[int, ...], bias: bool, shapes: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    layer, states = torch.nn.Linear(24, 40, bias=bias), torch.randn(shape)
    with fast_linear(CPU):
        found = layer(states)
    expected = states.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0)
    assert shapes == [shape]
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 1e-6 * expected.abs().max()


@torch.inference_mode()
def test_transposed_states_and_named_arguments_are_understood() -> None:
    torch.manual_seed(0)
    states, weight = torch.randn(24, 6).T, torch.randn(40, 24)
    with fast_linear(CPU):
        found = functional.linear(states, weight=weight, bias=None)
    torch.testing.assert_close(found, states @ weight.T)


@torch.inference_mode()
def test_other_precisions_subclasses_and_nothing_are_left_to_torch(shapes: list[tuple[int, ...]]) -> None:
    class Own(torch.Tensor):
        pass

    states, weight = torch.ones(2, 8), torch.ones(4, 8)
    for one, other in (
        (states.bfloat16(), weight.bfloat16()),
        (states.double(), weight.double()),
        (states, weight.as_subclass(Own)),
        (states[:0], weight),
    ):
        with fast_linear(CPU):
            assert functional.linear(one, other).shape == (len(one), 4)
        assert not shapes


@torch.inference_mode()
def test_other_devices_and_the_time_after_are_left_alone(shapes: list[tuple[int, ...]]) -> None:
    states, weight = torch.ones(2, 8), torch.ones(4, 8)
    with fast_linear(torch.device("meta")):
        functional.linear(states, weight)
    with fast_linear(CPU):
        pass
    functional.linear(states, weight)
    assert not shapes
