"""What a model computes on the way: every layer's states, its heads one by one, the values of its last block."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from distill.errors import NeedsNotMet
from distill.objectives.base import Internals
from teacher_cache.teachers.attention import layers_of, make_recordable, watching


@contextmanager
def capture_internals(model: Any) -> Iterator[list[Internals]]:
    """Collect the internals of every forward pass of a transformers model, the same for student and teacher.

    The model is switched to eager attention for good. Gradients flow where they are on. Attention maps are those
    before dropout, so that rows sum to 1 in training too. Padding is where the model saw it, and holds anything.

    Raises:
        NeedsNotMet: heads share their values (grouped queries), or hidden states are not those of the layers.
        TeacherError: the model's attention cannot be looked into.
    """
    make_recordable(model)
    passes: list[Internals] = []
    maps: list[Tensor] = []
    values: list[Tensor] = []

    def visit(layer: int, attention: Tensor, weighed: Tensor) -> None:
        if layer == 1:
            maps.clear()  # of a pass that failed
        maps.append(attention)
        values[:] = [weighed]

    def output(said: Any) -> None:
        states = said.hidden_states
        if states is None or len(states) != layers_of(model) + 1:
            raise NeedsNotMet(
                f"{type(model).__name__} gave {len(states or ())} hidden states, expected one of its embedding layer "
                f"and of each of its {layers_of(model)} blocks"
            )
        heads, valued = maps[-1].shape[1], values[0].shape[1]
        if heads != valued:
            raise NeedsNotMet(
                f"{type(model).__name__} has {heads} heads that share {valued} values (grouped queries): losses on the "
                "values of each head need a model without"
            )
        passes.append(Internals(torch.stack(states).float(), torch.stack(maps).float(), values[0].float()))
        maps.clear()
        values.clear()

    with watching(model, visit=visit, output=output, output_hidden_states=True):
        yield passes
