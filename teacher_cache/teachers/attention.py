"""Looking into a transformers model while it runs: its attention maps, its values, its whole output.

Maps are asked of the attention itself, not through `output_attentions`: under sdpa that gives an empty tuple
and a warning, in training it gives maps with dropout in them, and it holds the maps of all layers at once.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from teacher_cache.errors import TeacherError

# Called in every layer with its number, counted from 1, the maps `(b, heads, t, t)`, whose rows sum to 1, and the
# values `(b, heads, t, d_head)`, fewer heads where several share theirs.
Visit = Callable[[int, Tensor, Tensor], None]

_NAME = "recorded"


class _Recorder:
    """Numbers the attention layers of one forward pass."""

    def __init__(self, model: nn.Module, visit: Visit) -> None:
        self.modules = frozenset(map(id, model.modules()))
        self.visit = visit
        self.seen = 0

    def take(self, module: nn.Module, maps: Tensor, values: Tensor) -> None:
        if id(module) in self.modules:
            self.seen += 1
            self.visit(self.seen, maps, values)


# Of the forward passes under way, the outermost first.
_recorders: ContextVar[tuple[_Recorder, ...]] = ContextVar("recorders", default=())


def layers_of(model: Any) -> int:
    """Transformer blocks that the model's configuration names."""
    return int(model.config.get_text_config().num_hidden_layers)


def make_recordable(model: Any) -> None:
    """Switch to the model's own eager attention in a form that `watching` can look into; for good.

    In training the numbers, and the random ones drawn for dropout, are those of eager attention.

    Raises:
        TeacherError: the model computes its attention in a way that cannot be looked into.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    if _self_contained(model) or getattr(model.config, "_attn_implementation", None) == _NAME:
        return
    switchable = getattr(model, "_can_set_attn_implementation", lambda: False)
    if not switchable():
        raise TeacherError(
            f"{type(model).__name__} computes its attention in a way that cannot be looked into: attention maps need "
            "an encoder of transformers that goes through AttentionInterface, or MPNet"
        )
    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, eager_mask)
    model.set_attn_implementation(_NAME)


@contextmanager
def watching(
    model: Any, *, visit: Visit | None = None, output: Callable[[Any], None] | None = None, **options: Any
) -> Iterator[None]:
    """Look into every forward pass of `model` inside the context.

    Args:
        model: `make_recordable`, where there is a `visit`.
        output: called with what the model returns.
        options: arguments of the forward pass.

    Raises:
        TeacherError: a pass went through fewer or more attention layers than the model has.
    """
    forward, shadowed = model.forward, model.__dict__.get("forward")

    @functools.wraps(forward)
    def watched(*args: Any, **kwargs: Any) -> Any:
        with nullcontext() if visit is None else _recording(model, visit):
            said = forward(*args, **{**kwargs, **options})
        if output is not None:
            output(said)
        return said

    # Not a hook: sentence-transformers calls model.forward, which passes hooks by.
    model.forward = watched
    try:
        yield
    finally:
        if shadowed is None:
            del model.forward
        else:
            model.forward = shadowed


@contextmanager
def _recording(model: Any, visit: Visit) -> Iterator[None]:
    """Show `visit` the attention layers of one forward pass, and make sure that it saw them all."""
    recorder = _Recorder(model, visit)
    held = _recorders.set((*_recorders.get(), recorder))
    try:
        with ExitStack() as stack:
            for attention in _self_contained(model):
                stack.enter_context(_hooked(attention, recorder))
            yield
    finally:
        _recorders.reset(held)
    if recorder.seen != layers_of(model):
        raise TeacherError(
            f"{type(model).__name__} gave attention maps of {recorder.seen} layers, expected those of its "
            f"{layers_of(model)}: its attention cannot be looked into"
        )


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float = 0.0, **more: Any
) -> tuple[Tensor, Tensor]:
    """The eager attention of the module's own file, seen before dropout."""
    eager = sys.modules[type(module).__module__].__dict__["eager_attention_forward"]
    output, maps = eager(module, query, key, value, mask, dropout=0.0, **more)
    for recorder in _recorders.get():
        recorder.take(module, maps, value)
    if dropout > 0 and module.training:
        maps = functional.dropout(maps, p=dropout)
        values = value.repeat_interleave(maps.shape[1] // value.shape[1], dim=1)
        output = torch.matmul(maps, values).transpose(1, 2).contiguous()
    return output, maps


def _self_contained(model: nn.Module) -> list[nn.Module]:
    """MPNet's attention layers: they are always eager and know no interface."""
    return [module for module in model.modules() if type(module).__name__ == "MPNetSelfAttention"]


@contextmanager
def _hooked(attention: Any, recorder: _Recorder) -> Iterator[None]:
    """Show the recorder what goes through one of MPNet's layers."""
    values: list[Tensor] = []

    def keep(linear: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        heads = output.unflatten(-1, (attention.num_attention_heads, attention.attention_head_size))
        values[:] = [heads.transpose(1, 2)]

    def show(dropout: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        recorder.take(attention, args[0], values[0])
        values.clear()

    hooks = [attention.v.register_forward_hook(keep), attention.dropout.register_forward_hook(show)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
