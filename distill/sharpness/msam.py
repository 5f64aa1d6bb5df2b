"""Momentum-SAM (Becker et al., 2024): the optimizer's momentum says where to look, so one pass is enough.

With m the momentum of the steps before (Adam's `exp_avg`, without its bias correction; SGD's buffer),

    eps = -rho * m / (||m|| + 1e-12)        norm over all perturbed parameters together

the loss is differentiated at w + eps and the optimizer steps from w. The sign is the authors': the point lies ahead
along the descent, beyond where the next step ends, not uphill.

The authors' optimizer keeps w + eps in the weights from one step to the next, to be moved back before they are
evaluated or saved. Here the weights are w outside of the passes, as with every other method, at the price of one
copy of the parameters; gradients and steps are the same.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from distill.errors import ConfigError
from distill.sharpness.ascent import Ascent, SharpnessAware, at_least_float32, total_norm

# Where optimizers keep their momentum.
MOMENTUM = ("exp_avg", "momentum_buffer")


class MomentumSam(SharpnessAware):
    """`ascended()` needs no loss; the first step, before there is a momentum, is a plain one. Call `attach` first."""

    passes = 1

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], *, rho: float) -> None:
        """See `SharpnessAware`."""
        super().__init__(named_parameters, scaling="none", rho=rho)
        self._optimizer: torch.optim.Optimizer | None = None

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises `ConfigError` where the optimizer has no momentum."""
        if not (optimizer.defaults.get("betas") or optimizer.defaults.get("momentum")):
            raise _no_momentum(optimizer)
        self._optimizer = optimizer

    def _steps(self, loss: Tensor | None) -> tuple[Ascent, list[Tensor], list[Tensor], float]:
        if self._optimizer is None:
            raise TypeError("MomentumSam reads the optimizer's momentum; call attach(optimizer) first")
        states = {p: self._optimizer.state[p] for p in self._names if p in self._optimizer.state and p.requires_grad}
        found = [
            (parameter, at_least_float32(state[name]))
            for parameter, state in states.items()
            for name in MOMENTUM
            if state.get(name) is not None
        ]
        if not found:
            if any(states.values()):
                raise _no_momentum(self._optimizer)
            nothing = torch.zeros((), device=next(iter(self._names)).device)
            return Ascent(nothing, nothing, finite=True), [], [], 0.0
        moved, momenta = [parameter for parameter, _ in found], [momentum for _, momentum in found]
        norm = total_norm(momenta)
        if not bool(norm.isfinite()):
            return Ascent(torch.zeros_like(norm), norm, finite=False), [], [], 0.0
        return self._scaled_to(-self.rho, moved, momenta, norm)


def _no_momentum(optimizer: torch.optim.Optimizer) -> ConfigError:
    return ConfigError(
        f"sharpness msam follows the optimizer's momentum; {type(optimizer).__name__} keeps none as "
        f"{' or '.join(MOMENTUM)}: use AdamW, or SGD with momentum"
    )
