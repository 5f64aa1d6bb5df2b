"""Linear layers on CPUs: float32 products by oneDNN, and bfloat16 products in a network that is otherwise float32.

torch multiplies float32 by MKL, which does not use the wide vector units of other vendors' CPUs. On a Zen 5, oneDNN is
2.2 times as fast, forward and backward, and equally exact (1e-6 of the largest value).

A CPU adds, normalizes and attends faster in float32 than in bfloat16, and most of the rounding error of a network that
is bfloat16 throughout comes from there: the residual stream and attention (docs/decisions/0005-precision.md).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# The operator that torch.compile emits for linear layers on CPUs; None in builds without oneDNN.
ONEDNN_LINEAR: Any = (
    getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None
)
# The same in bfloat16; None where oneDNN or the CPU lacks bfloat16.
_ONEDNN_BFLOAT16: Any = (
    ONEDNN_LINEAR if ONEDNN_LINEAR is not None and torch.ops.mkldnn._is_mkldnn_bf16_supported() else None
)


class OneDnnLinear(nn.Linear):
    """A linear layer that multiplies float32 on a CPU by oneDNN, and everything else by torch."""

    def forward(self, input: Tensor) -> Tensor:
        if _is_cpu_float32(input, self.weight):
            product: Tensor = _multiply(input, self.weight, self.bias)
            return product
        return super().forward(input)


class Bfloat16Linear(nn.Linear):
    """A linear layer with bfloat16 weights that takes any floating-point input and returns float32."""

    def forward(self, input: Tensor) -> Tensor:
        rounded = input.bfloat16()
        if _ONEDNN_BFLOAT16 is None:
            return functional.linear(rounded, self.weight, self.bias).float()
        product: Tensor = _ONEDNN_BFLOAT16(rounded, self.weight, self.bias, "none", [], "")
        return product.float()


class _Bfloat16LinearGelu(nn.Linear):
    """A bfloat16 linear layer and the exact GELU; returns bfloat16, because the next layer is linear and rounds too."""

    def forward(self, input: Tensor) -> Tensor:
        rounded = input.bfloat16()
        if _ONEDNN_BFLOAT16 is None:
            return functional.gelu(functional.linear(rounded, self.weight, self.bias))
        product: Tensor = _ONEDNN_BFLOAT16(rounded, self.weight, self.bias, "gelu", [], "none")
        return product


def uses_bfloat16_linear(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `prepare_linear_layers` keeps a network float32 but for its linear layers."""
    return dtype == torch.bfloat16 and device.type == "cpu"


def prepare_linear_layers(network: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Replace the linear layers of a transformers model by those for `dtype` on `device`."""
    if uses_bfloat16_linear(dtype, device):
        use_bfloat16(network)
    else:
        use_onednn(network)


def use_onednn(network: nn.Module) -> None:
    """Make the linear layers of a network `OneDnnLinear`, on any device."""
    for module in network.modules():
        if type(module) is nn.Linear:
            module.__class__ = OneDnnLinear


def use_bfloat16(network: nn.Module) -> None:
    """Round the weights of the linear layers of a transformers model to bfloat16, and make the rest float32.

    A model without `nn.Linear`, such as GPT-2, becomes bfloat16 throughout.
    """
    linear = [module for module in network.modules() if type(module) is nn.Linear]
    if not linear:
        network.to(torch.bfloat16)
        return
    for module in network.modules():
        if type(module) is not nn.Linear:
            _to_float32(module)
    for module in linear:
        # A new parameter: an embedding that shares the old one stays float32.
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.data.bfloat16(), requires_grad=parameter.requires_grad))
        module.__class__ = Bfloat16Linear
    blocks: list[Any] = [module for module in network.modules() if _ends_in_gelu(module)]
    for block in blocks:
        block.dense.__class__ = _Bfloat16LinearGelu
        block.intermediate_act_fn = nn.Identity()


def _ends_in_gelu(module: Any) -> bool:
    """Whether a module is the first half of a BERT-like feed-forward block: a linear layer, then the exact GELU."""
    from transformers.activations import GELUActivation

    if not type(module).__module__.startswith("transformers.models."):  # custom code may do more between the two
        return False
    dense, activation = getattr(module, "dense", None), getattr(module, "intermediate_act_fn", None)
    exact = isinstance(activation, GELUActivation) and activation.act is functional.gelu
    return exact and type(dense) is Bfloat16Linear


def _to_float32(module: nn.Module) -> None:
    """Convert the parameters and buffers of a module, without those of its submodules."""
    for parameter in module.parameters(recurse=False):
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_floating_point():
            setattr(module, name, buffer.float())


def _is_cpu_float32(input: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN takes the tensors; a quantized weight, for one, is a subclass with its own product."""
    return (
        ONEDNN_LINEAR is not None
        and all(type(tensor) in (Tensor, nn.Parameter) for tensor in (input, weight))
        and input.device.type == "cpu"
        and input.dtype == weight.dtype == torch.float32
        and input.numel() > 0
        and not torch.is_autocast_enabled("cpu")
    )


def _multiply(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if torch.is_grad_enabled():
        return _Differentiable.apply(input, weight, bias)
    return ONEDNN_LINEAR(input, weight, bias, "none", [], "")


class _Differentiable(torch.autograd.Function):
    """`input @ weight.T + bias`; twice differentiable, because the gradients are computed by `_multiply` too."""

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        return ONEDNN_LINEAR(input, weight, bias, "none", [], "")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
        input, weight, _ = inputs
        ctx.save_for_backward(input, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        input, weight = ctx.saved_tensors
        (gradient,) = gradients
        of_input, of_weight, of_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (
            _multiply(gradient, weight.t()) if of_input else None,
            _multiply(rows.t(), input.reshape(-1, input.shape[-1]).t()) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )
