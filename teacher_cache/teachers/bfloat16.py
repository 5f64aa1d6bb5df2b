"""What bfloat16 means on a processor: linear layers multiply in it, everything between them stays float32.

A processor adds, normalises and attends faster in float32 than in bfloat16, and most of the rounding error of a model
that is bfloat16 throughout lies there: in the residual stream and in attention (docs/decisions/0005-precision.md).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from teacher_cache.teachers.linear import ONEDNN_LINEAR, multiply_by_onednn

# It takes an activation behind the layer too; None where oneDNN, or the processor, has no bfloat16.
_ONEDNN: Any = ONEDNN_LINEAR if ONEDNN_LINEAR is not None and torch.ops.mkldnn._is_mkldnn_bf16_supported() else None


class Bfloat16Linear(nn.Linear):
    """A linear layer with bfloat16 weights; any floating input, float32 output."""

    def forward(self, input: Tensor) -> Tensor:
        rounded = input.bfloat16()
        if _ONEDNN is None:
            return functional.linear(rounded, self.weight, self.bias).float()
        product: Tensor = _ONEDNN(rounded, self.weight, self.bias, "none", [], "")
        return product.float()


class _Bfloat16LinearGelu(nn.Linear):
    """With the exact GELU behind it. The output is bfloat16: what comes next is a linear layer, which rounds anyway."""

    def forward(self, input: Tensor) -> Tensor:
        rounded = input.bfloat16()
        if _ONEDNN is None:
            return functional.gelu(functional.linear(rounded, self.weight, self.bias))
        product: Tensor = _ONEDNN(rounded, self.weight, self.bias, "gelu", [], "none")
        return product


def rounds_linear_layers(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a model in `dtype` on `device` is one that `multiply_in_bfloat16` makes."""
    return dtype == torch.bfloat16 and device.type == "cpu"


def settle_linear_layers(network: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """How the linear layers of a transformers model multiply that is asked in `dtype` on `device`."""
    if rounds_linear_layers(dtype, device):
        multiply_in_bfloat16(network)
    else:
        multiply_by_onednn(network)


def multiply_in_bfloat16(network: nn.Module) -> None:
    """Round the weights of the linear layers of a transformers model to bfloat16, and make the rest float32.

    One without any, such as GPT-2, whose layers are of a class of its own, becomes bfloat16 throughout.
    """
    linear = [module for module in network.modules() if type(module) is nn.Linear]
    if not linear:
        network.to(torch.bfloat16)
        return
    for module in network.modules():
        if type(module) is not nn.Linear:
            _to_float32(module)
    for module in linear:
        # Of its own: where it is shared with an embedding, that stays float32.
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.data.bfloat16(), requires_grad=parameter.requires_grad))
        module.__class__ = Bfloat16Linear
    blocks: list[Any] = [module for module in network.modules() if _ends_in_gelu(module)]
    for block in blocks:
        block.dense.__class__ = _Bfloat16LinearGelu
        block.intermediate_act_fn = nn.Identity()


def _ends_in_gelu(module: Any) -> bool:
    """Whether it is the first half of a BERT-like feed-forward block: a linear layer, and the exact GELU behind it."""
    from transformers.activations import GELUActivation

    if not type(module).__module__.startswith("transformers.models."):  # somebody's own may do more between the two
        return False
    dense, activation = getattr(module, "dense", None), getattr(module, "intermediate_act_fn", None)
    exact = isinstance(activation, GELUActivation) and activation.act is functional.gelu
    return exact and type(dense) is Bfloat16Linear


def _to_float32(module: nn.Module) -> None:
    """Its own parameters and buffers, not those of the modules in it."""
    for parameter in module.parameters(recurse=False):
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_floating_point():
            setattr(module, name, buffer.float())
