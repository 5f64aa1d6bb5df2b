"""What a device's kernels keep for the backward pass, on a machine without the device.

Fake tensors are on the CPU, whose kernels keep other tensors than a GPU's. Inside `kernels("cuda")` these functions
behave as torch does with CUDA tensors:

    layer norm, softmax, ...    run in float32 under autocast (torch's list for CUDA)
    dropout                     keeps a mask of 1 byte per number, not one in the input's precision
    attention                   scaled_dot_product_attention with a mask uses the memory-efficient kernel, which keeps
                                its inputs, its output and one float32 per row; its backward pass recomputes the
                                probabilities. (Flash attention takes no mask.)

On a CPU attention uses the flash kernel, which keeps no probabilities either; with dropout torch decomposes it into
single operations, which keep the probabilities and a mask.
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
# torch's own function, which decomposes into single operations for fake tensors.
_decomposed_attention = functional.scaled_dot_product_attention
_HALF = (torch.float16, torch.bfloat16)


@contextmanager
def kernels(device: str) -> Iterator[None]:
    """Compute with fake tensors as on "cuda" or "cpu" inside the block.

    Functions of torch.nn.functional are replaced. A dispatch mode would not do: torch leaves it during a backward
    pass, where activation checkpointing recomputes blocks.
    """
    replaced: dict[str, Any] = {"scaled_dot_product_attention": _attention(_cpu_flash)}
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
    def in_float32(*args: Any, **kwargs: Any) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map(_to_float32, (args, kwargs))
        return function(*args, **kwargs)

    return in_float32


def _to_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALF else value


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0:
        return input
    dropped: Tensor = aten.native_dropout(input, p, True)[0]
    return dropped


def _attention(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`kernel`, called with the arguments prepared as torch prepares them."""

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
        if enable_gqa:  # the kernels want as many key heads as query heads
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
    output: Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, keeps, dropout, causal, scale=scale
    )[0]
    return output


def _cpu_flash(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float | None
) -> Tensor:
    if dropout > 0:
        return _decomposed_attention(query, key, value, mask, dropout, causal, scale=scale)
    output: Tensor = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=mask, scale=scale
    )[0]
    return output
