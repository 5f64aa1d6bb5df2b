"""Momentum-SAM (Becker et al., 2024): the perturbation follows the optimizer's momentum, so one pass suffices.

With m the momentum of the previous steps (Adam's `exp_avg`, without bias correction; SGD's buffer),

    eps = -rho * m / (||m|| + 1e-12)        norm over all perturbed parameters together

the loss is differentiated at w + eps and the optimizer steps from w. The sign is the authors': the point lies ahead
along the descent, beyond the end of the next step, not uphill.

The authors' optimizer keeps w + eps in the weights between steps, and moves them back for evaluation and saving. Here
the weights are w outside of the passes, as with every other method, at the cost of one copy of the parameters;
gradients and steps are the same.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from distill.errors import ConfigError
from distill.sharpness.ascent import Ascent, SharpnessAware, at_least_float32, no_ascent, total_norm

# Keys of the momentum in the optimizer's state.
MOMENTUM = ("exp_avg", "momentum_buffer")


class MomentumSam(SharpnessAware):
    """Perturbs along the momentum; the first step is plain. Call `attach` first; `ascended()` needs no loss."""

    passes = 1

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], *, rho: float) -> None:
        """See `SharpnessAware`."""
        super().__init__(named_parameters, scaling="none", rho=rho)
        self._optimizer: torch.optim.Optimizer | None = None

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the optimizer."""
        if not (optimizer.defaults.get("betas") or optimizer.defaults.get("momentum")):
            raise _no_momentum(optimizer)
        self._optimizer = optimizer

    def _perturbation(self, loss: Tensor | None) -> tuple[Ascent, list[Tensor], list[Tensor], float]:
        if self._optimizer is None:
            raise TypeError("MomentumSam needs the optimizer's momentum; call attach(optimizer) first")
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
            return no_ascent(next(iter(self._names)).device), [], [], 0.0
        moved, momenta = [parameter for parameter, _ in found], [momentum for _, momentum in found]
        norm = total_norm(momenta)
        if not bool(norm.isfinite()):
            return Ascent(torch.zeros_like(norm), norm, finite=False), [], [], 0.0
        return self._with_radius(-self.rho, moved, momenta, norm)


def _no_momentum(optimizer: torch.optim.Optimizer) -> ConfigError:
    return ConfigError(
        f"sharpness msam needs the optimizer's momentum; {type(optimizer).__name__} has no "
        f"{' or '.join(MOMENTUM)}; use AdamW, or SGD with momentum"
    )
