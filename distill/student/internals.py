"""Internals of a model in a forward pass: states of every layer, attention of every head, values of the last layer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from distill.errors import NeedsNotMet
from distill.objectives.base import Internals
from teacher_cache.teachers.attention import count_layers, make_recordable, record_forward


@contextmanager
def capture_internals(model: Any) -> Iterator[list[Internals]]:
    """Collect the internals of every forward pass of a transformers model, student or teacher.

    The model is switched permanently to eager attention. Gradients flow if enabled. Attention maps are those before
    dropout, so that rows sum to 1 in training too. Padding is on the side of the batch and has arbitrary values.

    Raises:
        NeedsNotMet: the model has grouped-query attention, or does not return one hidden state per layer.
        TeacherError: the attention of the model cannot be recorded.
    """
    make_recordable(model)
    passes: list[Internals] = []
    maps: list[Tensor] = []
    values: list[Tensor] = []

    def on_attention(layer: int, attention: Tensor, layer_values: Tensor) -> None:
        if layer == 1:
            maps.clear()  # of a pass that failed
        maps.append(attention)
        values[:] = [layer_values]

    def on_output(output: Any) -> None:
        states = output.hidden_states
        if states is None or len(states) != count_layers(model) + 1:
            raise NeedsNotMet(
                f"{type(model).__name__} returned {len(states or ())} hidden states, expected one of its embedding "
                f"layer and of each of its {count_layers(model)} blocks"
            )
        heads, value_heads = maps[-1].shape[1], values[0].shape[1]
        if heads != value_heads:
            raise NeedsNotMet(
                f"{type(model).__name__} has {heads} heads that share {value_heads} values (grouped queries): losses "
                "on the values of each head need a model without"
            )
        passes.append(Internals(torch.stack(states).float(), torch.stack(maps).float(), values[0].float()))
        maps.clear()
        values.clear()

    with record_forward(model, on_attention=on_attention, on_output=on_output, output_hidden_states=True):
        yield passes
