"""Sharpness-aware minimisation: the gradient is taken at the worst point near the weights, not at them.

SAM (Foret et al., ICLR 2021) and ASAM (Kwon et al., ICML 2021). With g the gradient of the loss at w and T a
diagonal scaling,

    eps = rho * T^2 g / (||T g|| + 1e-12)        norms over all parameters together

the loss is differentiated at w + eps, and the optimizer steps from w with that gradient. Scalings:

    "none"   T = 1: SAM.
    "abs"    T = |w| in every tensor, no eta: what the published TALAS code trains with. A weight that is
             exactly 0 does not move.
    "kwon"   T = |w| + eta in tensors whose name holds "weight" (norm gains and embeddings too), T = 1 in the
             others (biases): what the ASAM authors' code does.

What it does to a sentence encoder is less than its name says. T weighs by magnitude, and the weights of size
1 are the LayerNorm gains: under "abs" nearly all of ||eps||^2 falls on them and on embeddings, under "kwon"
much of it on biases, under "none" on a freshly initialised projection, whose gradients are largest; attention
and feed-forward matrices get a percent or two. At the published rho = 0.05 the "abs" loss rises by under 1 %.
`perturbation_shares` shows it for a run at hand.

The second pass draws fresh dropout masks, as the published code does: the masks are the model's business, and
nothing here replays them.
"""

import difflib
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distill.errors import ConfigError

SCALINGS = ("none", "abs", "kwon")
PRESETS: dict[str, dict[str, Any]] = {
    "sam": {"scaling": "none", "rho": 0.05},
    "asam": {"scaling": "abs", "rho": 0.05},
    "asam-kwon": {"scaling": "kwon", "rho": 0.5, "eta": 0.01},
}
# How the trainer names the parameters that an objective owns.
OBJECTIVE_PREFIX = "objective."


@dataclass(frozen=True)
class Ascent:
    """How far one ascent went. Reading a tensor's value waits for the device.

    Attributes:
        norm: ||eps||, a scalar tensor; 0 where the weights were not moved.
        gradient_norm: ||T g||, a scalar tensor, still times the loss scale if the loss was scaled.
        finite: False where ||T g|| was not, so that the weights were not moved.
    """

    norm: Tensor
    gradient_norm: Tensor
    finite: bool


class SharpnessAware:
    """Moves parameters to w + eps for the length of a `with` block. Not an optimizer: any one steps after.

        with sharpness.ascended(first_loss):
            second_loss().backward()
        optimizer.step()

    The first gradient never enters `.grad`, so accumulated gradients stay and hooks on gradient accumulation
    (DDP's) do not fire: each process climbs its own loss. Under DDP the first forward belongs in `no_sync()`;
    checkpointed activations need `use_reentrant=False`. Extra memory: one copy of the parameters, kept.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        scaling: str,
        rho: float,
        eta: float = 0.0,
    ) -> None:
        """Take the parameters to perturb, all on one device; frozen ones are left out at each ascent.

        Args:
            named_parameters: names decide the scaling under "kwon" and the kind in `perturbation_shares`.
            scaling: one of `SCALINGS`.
            rho: radius, > 0, in the norm of eps / T.
            eta: >= 0, added to |w| under "kwon".

        Raises:
            ConfigError: an option out of its range, or `eta` where the scaling has no place for it.
        """
        if scaling not in SCALINGS:
            raise ConfigError(f"sharpness scaling: expected one of {', '.join(SCALINGS)}, found {scaling!r}")
        if not (isinstance(rho, int | float) and 0 < rho < math.inf):
            raise ConfigError(f"sharpness rho: expected a number above 0, found {rho!r}")
        if not (isinstance(eta, int | float) and 0 <= eta < math.inf):
            raise ConfigError(f"sharpness eta: expected a number >= 0, found {eta!r}")
        if eta and scaling != "kwon":
            raise ConfigError(f"sharpness eta: only scaling 'kwon' uses it, found {eta!r} with {scaling!r}")
        self.scaling, self.rho, self.eta = scaling, rho, eta
        # A tied parameter listed under two names is moved once, under the first.
        self._names: dict[Tensor, str] = {}
        for name, parameter in named_parameters:
            self._names.setdefault(parameter, name)
        self._backups: dict[Tensor, Tensor] = {}
        self._last_norms: tuple[list[Tensor], Tensor] | None = None

    @contextmanager
    def ascended(self, loss: Tensor) -> Iterator[Ascent]:
        """Inside, the weights are w + eps; afterwards, also after an exception, they are w bit for bit.

        Args:
            loss: scalar; its graph is used up. A loss times a `GradScaler`'s factor gives the same eps and
                keeps float16 gradients from underflowing.

        If ||T g|| is not finite the weights stay and the block still runs: its own backward is then as bad,
        and whoever guards the step (a `GradScaler`, a check of the loss) sees it there.
        """
        with torch.no_grad():
            ascent, moved, steps = self._steps(loss)
            originals = [self._backup(parameter) for parameter in moved]
            if moved:
                torch._foreach_copy_(originals, moved)
        try:
            if moved:
                with torch.no_grad():
                    torch._foreach_add_(moved, steps)
            del steps  # a model's worth of memory that the second pass can use
            yield ascent
        finally:
            # Copied back, because (w + eps) - eps is not w in floating point.
            if moved:
                with torch.no_grad():
                    torch._foreach_copy_(moved, originals)

    def perturbation_shares(self) -> dict[str, float]:
        """Share of ||eps||^2 of the last ascent by kind of parameter, largest first; they sum to 1.

        Kinds: "projections" (the objective's own), "biases", "embeddings", "norm gains", "matrices". Empty
        before the first ascent and after one that moved nothing. Waits for the device.
        """
        if self._last_norms is None:
            return {}
        moved, norms = self._last_norms
        squares = norms.double().square()
        total = float(squares.sum())
        if total == 0:
            return {}
        shares: dict[str, float] = {}
        for parameter, square in zip(moved, squares.tolist(), strict=True):
            kind = _kind(self._names[parameter], parameter)
            shares[kind] = shares.get(kind, 0.0) + square / total
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    def _steps(self, loss: Tensor) -> tuple[Ascent, list[Tensor], list[Tensor]]:
        """The ascent, the parameters that move and their eps; none where the norm is not finite."""
        self._last_norms = None
        nothing = loss.new_zeros((), dtype=torch.float32)
        candidates = [parameter for parameter in self._names if parameter.requires_grad]
        gradients = torch.autograd.grad(loss, candidates, allow_unused=True)
        moved = [p for p, gradient in zip(candidates, gradients, strict=True) if gradient is not None]
        # Half-precision products would underflow; for float32 this copies nothing.
        directions = [_wide(gradient) for gradient in gradients if gradient is not None]
        del gradients  # so that each is freed as its product replaces it below
        if not moved:
            return Ascent(nothing, nothing, finite=True), [], []
        scaled = [i for i, parameter in enumerate(moved) if self._scales(self._names[parameter])]
        if scaled:
            operators = self._operators([moved[i] for i in scaled])
            products = torch._foreach_mul([directions[i] for i in scaled], operators)
            for i, product in zip(scaled, products, strict=True):
                directions[i] = product
        gradient_norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(directions)))
        if not bool(gradient_norm.isfinite()):
            return Ascent(nothing, gradient_norm, finite=False), [], []
        if scaled:
            torch._foreach_mul_(products, operators)
        # Not in place: autograd may have handed out views of one tensor to several parameters.
        steps = list(torch._foreach_mul(directions, self.rho / (gradient_norm + 1e-12)))
        norms = torch.stack(torch._foreach_norm(steps))
        self._last_norms = (moved, norms)
        return Ascent(torch.linalg.vector_norm(norms), gradient_norm, finite=True), moved, steps

    def _scales(self, name: str) -> bool:
        return self.scaling == "abs" or (self.scaling == "kwon" and "weight" in name)

    def _operators(self, parameters: list[Tensor]) -> list[Tensor]:
        """T per tensor. Under "abs" w itself: T enters a norm or twice, where the sign of w cancels."""
        weights = [_wide(parameter.detach()) for parameter in parameters]
        if self.scaling == "abs":
            return weights
        operators = list(torch._foreach_abs(weights))
        torch._foreach_add_(operators, self.eta)
        return operators

    def _backup(self, parameter: Tensor) -> Tensor:
        """The parameter's buffer, made at its first use and again if the model moved or changed its type."""
        kept = self._backups.get(parameter)
        if kept is None or (kept.device, kept.dtype) != (parameter.device, parameter.dtype):
            kept = self._backups[parameter] = torch.empty_like(parameter, requires_grad=False)
        return kept


def build_sharpness(
    name: str, named_parameters: Iterable[tuple[str, nn.Parameter]], **overrides: Any
) -> SharpnessAware | None:
    """The preset of that name, with `rho` or `eta` replaced where given; None for "none", which ignores both.

    Raises:
        ConfigError: an unknown name or option, or a value out of its range.
    """
    unknown = sorted(overrides.keys() - {"rho", "eta"})
    if unknown:
        raise ConfigError(f"sharpness: unknown option {unknown[0]!r}; the options are rho and eta")
    if name == "none":
        return None
    if name not in PRESETS:
        known = ["none", *PRESETS]
        near = difflib.get_close_matches(str(name).lower(), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        raise ConfigError(f"sharpness: nothing is called {name!r}; {hint}")
    return SharpnessAware(named_parameters, **{**PRESETS[name], **overrides})


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _kind(name: str, parameter: Tensor) -> str:
    if name.startswith(OBJECTIVE_PREFIX):
        return "projections"
    if name.endswith("bias"):
        return "biases"
    if parameter.ndim < 2:
        return "norm gains"
    return "embeddings" if "embedding" in name.lower() else "matrices"
