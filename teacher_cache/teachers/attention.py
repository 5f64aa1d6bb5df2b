"""Recording the attention maps, attention values and output of a transformers model during its forward passes.

Maps are taken from the attention function, not from `output_attentions`: with sdpa that returns an empty tuple and a
warning, in training it returns maps after dropout, and it keeps the maps of all layers in memory.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from teacher_cache.errors import TeacherError
from teacher_cache.tokens.request import TextTokens, TokenRequest

# Called in each layer with its number from 1, the maps `(b, heads, t, t)`, whose rows sum to 1, and the values
# `(b, heads, t, d_head)`, of fewer heads with grouped queries.
AttentionCallback = Callable[[int, Tensor, Tensor], None]

_NAME = "recorded"


class _Recorder:
    """Counts the attention layers of one forward pass and passes them on."""

    def __init__(self, model: nn.Module, on_attention: AttentionCallback) -> None:
        self.modules = frozenset(map(id, model.modules()))
        self.on_attention = on_attention
        self.layers = 0

    def record(self, module: nn.Module, maps: Tensor, values: Tensor) -> None:
        if id(module) in self.modules:
            self.layers += 1
            self.on_attention(self.layers, maps, values)


# Of the running forward passes, the outermost first.
_recorders: ContextVar[tuple[_Recorder, ...]] = ContextVar("recorders", default=())


def count_layers(model: Any) -> int:
    """Number of transformer blocks in the model's configuration."""
    return int(model.config.get_text_config().num_hidden_layers)


def make_recordable(model: Any) -> None:
    """Switch a model permanently to its eager attention, in a form that `record_forward` can record.

    Outputs and random dropout numbers in training are those of eager attention.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    if _mpnet_attention(model) or getattr(model.config, "_attn_implementation", None) == _NAME:
        return
    switchable = getattr(model, "_can_set_attn_implementation", lambda: False)
    if not switchable():
        raise TeacherError(
            f"the attention of {type(model).__name__} cannot be recorded: attention maps need an encoder of "
            "transformers that uses AttentionInterface, or MPNet"
        )
    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, eager_mask)
    model.set_attn_implementation(_NAME)


@contextmanager
def record_forward(
    model: Any,
    *,
    on_attention: AttentionCallback | None = None,
    on_output: Callable[[Any], None] | None = None,
    **arguments: Any,
) -> Iterator[None]:
    """Record every forward pass of `model` inside the context.

    Args:
        model: prepared by `make_recordable`, if `on_attention` is given.
        on_output: called with the output of the model.
        arguments: added to the arguments of the forward pass.

    Raises:
        TeacherError: a pass went through fewer or more attention layers than the model has.
    """
    forward, shadowed = model.forward, model.__dict__.get("forward")

    @functools.wraps(forward)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        with nullcontext() if on_attention is None else _recording(model, on_attention):
            output = forward(*args, **{**kwargs, **arguments})
        if on_output is not None:
            on_output(output)
        return output

    # Not a hook: sentence-transformers calls model.forward, which skips hooks.
    model.forward = recorded
    try:
        yield
    finally:
        if shadowed is None:
            del model.forward
        else:
            model.forward = shadowed


@contextmanager
def _recording(model: Any, on_attention: AttentionCallback) -> Iterator[None]:
    """Record the attention layers of one forward pass, and check that all were recorded."""
    recorder = _Recorder(model, on_attention)
    token = _recorders.set((*_recorders.get(), recorder))
    try:
        with ExitStack() as stack:
            for attention in _mpnet_attention(model):
                stack.enter_context(_hooked(attention, recorder))
            yield
    finally:
        _recorders.reset(token)
    if recorder.layers != count_layers(model):
        raise TeacherError(
            f"{type(model).__name__} returned attention maps of {recorder.layers} layers, expected those of its "
            f"{count_layers(model)}: its attention cannot be recorded, use a model with standard attention"
        )


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float = 0.0, **more: Any
) -> tuple[Tensor, Tensor]:
    """The eager attention of the module's source file, recorded before dropout."""
    eager = sys.modules[type(module).__module__].__dict__["eager_attention_forward"]
    output, maps = eager(module, query, key, value, mask, dropout=0.0, **more)
    for recorder in _recorders.get():
        recorder.record(module, maps, value)
    if dropout > 0 and module.training:
        maps = functional.dropout(maps, p=dropout)
        values = value.repeat_interleave(maps.shape[1] // value.shape[1], dim=1)
        output = torch.matmul(maps, values).transpose(1, 2).contiguous()
    return output, maps


def _mpnet_attention(model: nn.Module) -> list[nn.Module]:
    """MPNet's attention layers: always eager, and without AttentionInterface."""
    return [module for module in model.modules() if type(module).__name__ == "MPNetSelfAttention"]


@contextmanager
def _hooked(attention: Any, recorder: _Recorder) -> Iterator[None]:
    """Record an attention layer of MPNet by hooks."""
    values: list[Tensor] = []

    def keep(linear: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        heads = output.unflatten(-1, (attention.num_attention_heads, attention.attention_head_size))
        values[:] = [heads.transpose(1, 2)]

    def record(dropout: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        recorder.record(attention, args[0], values[0])
        values.clear()

    hooks = [attention.v.register_forward_hook(keep), attention.dropout.register_forward_hook(record)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class TokenPass:
    """The requested token-level output of b texts padded to t tokens, on the device until `fetch`.

    `record_attention` and `record_output` are callbacks of `record_forward`.
    """

    def __init__(self, request: TokenRequest, layers: int, mask: Tensor) -> None:
        self._wanted = request.attention
        self._last = layers
        self._mask = mask
        self._maps: list[Tensor] = []
        self._importance: Tensor | None = None
        self._states: Tensor | None = None

    def record_attention(self, layer: int, maps: Tensor, values: Tensor) -> None:
        """Keep the mean over heads of a requested layer, and the column sums of the last layer."""
        wanted = self._wanted is not None and layer in self._wanted
        if not wanted and layer != self._last:
            return
        mean = maps.float().mean(dim=1)
        if wanted:
            self._maps.append(mean)
        if layer == self._last:
            self._importance = mean.masked_fill(self._mask.unsqueeze(2) == 0, 0.0).sum(dim=1)

    def record_output(self, output: Any) -> None:
        """Keep the last hidden states without padding: `(tokens of all texts, width)`."""
        self._states = output[0][self._mask.bool()].float()

    def fetch(self, pieces: Sequence[npt.NDArray[np.int32]]) -> list[TextTokens]:
        """The token-level output of each text of the batch, given its word pieces."""
        if self._states is None:
            raise RuntimeError("fetch was called before a forward pass was recorded")
        states = self._states.cpu().numpy()
        importance = None if self._importance is None else self._importance.cpu().numpy()
        maps = [layer.cpu().numpy() for layer in self._maps]
        starts = self._mask.int().argmax(dim=1).cpu().tolist()
        texts, done = [], 0
        for row, (start, text_pieces) in enumerate(zip(starts, pieces, strict=True)):
            count = len(text_pieces)
            at = slice(start, start + count)
            attention = None
            if self._wanted is not None:
                # Copied, so that the padded maps of the batch are freed.
                attention = np.zeros((len(maps), count, count), dtype=np.float32)
                for number, layer in enumerate(maps):
                    attention[number] = layer[row, at, at]
            texts.append(
                TextTokens(
                    states=states[done : done + count],
                    pieces=text_pieces,
                    importance=None if importance is None else importance[row, at].copy(),
                    attention=attention,
                )
            )
            done += count
        return texts
