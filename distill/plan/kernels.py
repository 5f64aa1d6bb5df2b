"""What a device's kernels keep for the backward pass, on a machine that does not have the device.

Fake tensors live on the processor, whose kernels keep other tensors than a GPU's do. Inside `kernels("cuda")` these
functions do what torch does with CUDA tensors:

    layer norm, softmax, ...    in float32 under autocast (torch's list for CUDA)
    dropout                     keeps a mask of 1 byte, not one in the input's precision
    attention                   scaled_dot_product_attention with an arbitrary mask goes to the memory-efficient
                                kernel, which keeps its inputs, its output and one float32 a row, no probabilities;
                                its backward computes them again. (Flash attention takes no mask.)

On a processor attention goes to the flash kernel, which keeps no probabilities either, only without dropout; with
dropout torch computes it in single steps, and keeps the probabilities and a mask.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map

aten = torch.ops.aten

# "CUDA Ops that can autocast to float32" of torch's documentation, as far as encoders call them.
_FLOAT32_UNDER_AUTOCAST = ("layer_norm", "rms_norm", "softmax", "log_softmax", "normalize", "cosine_similarity")
# Torch's own, which goes to single steps for fake tensors.
_single_steps = functional.scaled_dot_product_attention
_HALF = (torch.float16, torch.bfloat16)


@contextmanager
def kernels(device: str) -> Iterator[None]:
    """Inside, fake tensors are kept and computed with as on "cuda" or "cpu".

    Functions of torch.nn.functional are replaced meanwhile. A mode would not do: torch leaves it while a backward
    pass runs, where blocks are computed again.
    """
    replaced: dict[str, Any] = {"scaled_dot_product_attention": _attention(_flash_on_processor)}
    if device == "cuda":
        replaced = {name: _in_float32(getattr(functional, name)) for name in _FLOAT32_UNDER_AUTOCAST}
        replaced |= {"scaled_dot_product_attention": _attention(_memory_efficient), "dropout": _dropout}
    originals = {name: getattr(functional, name) for name in replaced}
    for name, function in replaced.items():
        setattr(functional, name, function)
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(functional, name, function)


def _in_float32(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def widened(*args: Any, **kwargs: Any) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map(_wide, (args, kwargs))
        return function(*args, **kwargs)

    return widened


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALF else value


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0:
        return input
    dropped: Tensor = aten.native_dropout(input, p, True)[0]
    return dropped


def _attention(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`kernel` behind what torch makes of the arguments before it chooses one."""

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if enable_gqa:  # the kernels take as many keys as queries
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        if torch.is_autocast_enabled("cpu"):
            half = torch.get_autocast_dtype("cpu")
            query, key, value = query.to(half), key.to(half), value.to(half)
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -torch.inf)
        elif attn_mask is not None:
            attn_mask = attn_mask.to(query.dtype)
        return kernel(query, key, value, attn_mask, dropout_p, is_causal, scale)

    return attend


def _memory_efficient(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float | None
) -> Tensor:
    keeps = any(tensor.requires_grad for tensor in (query, key, value)) and torch.is_grad_enabled()
    if mask is not None:
        mask = mask.expand(*query.shape[:3], key.shape[2])
    said: Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, keeps, dropout, causal, scale=scale
    )[0]
    return said


def _flash_on_processor(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float | None
) -> Tensor:
    said: Tensor
    if dropout > 0:
        said = _single_steps(query, key, value, mask, dropout, causal, scale=scale)
    else:
        said = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=mask, scale=scale
        )[0]
    return said
