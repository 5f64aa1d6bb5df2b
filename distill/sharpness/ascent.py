"""SAM (Foret et al., ICLR 2021) and ASAM (Kwon et al., ICML 2021): the gradient at the worst point near the weights.

With g the gradient of the loss at w and T a diagonal scaling,

    eps = rho * T^2 g / (||T g|| + 1e-12)        norms over all perturbed parameters together

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

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from distill.errors import ConfigError
from distill.sharpness.ascent_loss import AscentLoss
from distill.sharpness.parameters import parameter_kind

SCALINGS = ("none", "abs", "kwon")


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
    checkpointed activations need `use_reentrant=False`. Extra memory: one copy of the perturbed parameters,
    kept. The first backward computes gradients of those parameters alone.

    Attributes:
        passes: forward and backward passes of a step with an ascent; a method of one pass needs no first loss.
        climbs: what the first loss is where it is not the whole loss; making it is the caller's part.
    """

    passes: ClassVar[int] = 2

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        scaling: str,
        rho: float,
        eta: float = 0.0,
        every: int = 1,
        ascent_loss: AscentLoss | None = None,
    ) -> None:
        """Take the parameters to perturb, all on one device; frozen ones are left out at each ascent.

        Args:
            named_parameters: names decide the scaling under "kwon" and the kind in `perturbation_shares`.
            scaling: one of `SCALINGS`.
            rho: radius, > 0, in the norm of eps / T.
            eta: >= 0, added to |w| under "kwon".
            every: steps whose number it divides have an ascent, the others are plain.

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
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ConfigError(f"sharpness every: expected a whole number from 1 on, found {every!r}")
        self.scaling, self.rho, self.eta, self.every, self.ascent_loss = scaling, rho, eta, every, ascent_loss
        # A tied parameter listed under two names is moved once, under the first.
        self._names: dict[Tensor, str] = {}
        for name, parameter in named_parameters:
            self._names.setdefault(parameter, name)
        self._backups: dict[Tensor, Tensor] = {}
        self._last_norms: tuple[list[Tensor], Tensor] | None = None

    def begin_step(self, step: int) -> bool:
        """Told before every micro-batch which optimizer step, from 0 on, it is part of: does it have an ascent?"""
        return step % self.every == 0

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Told, as often as one likes, which optimizer steps. Methods that need its state or its steps keep it."""

    @contextmanager
    def ascended(self, loss: Tensor | None = None) -> Iterator[Ascent]:
        """Inside, the weights are w + eps; afterwards, also after an exception, they are w bit for bit.

        Args:
            loss: scalar; its graph is used up. A loss times a `GradScaler`'s factor gives the same eps and
                keeps float16 gradients from underflowing. A method of one pass does not look at it.

        If ||T g|| is not finite the weights stay and the block still runs: its own backward is then as bad,
        and whoever guards the step (a `GradScaler`, a check of the loss) sees it there.
        """
        self._last_norms = None
        with torch.no_grad():
            ascent, moved, directions, length = self._steps(loss)
            originals = [self._backup(parameter) for parameter in moved]
            if moved:
                torch._foreach_copy_(originals, moved)
        try:
            if moved:
                with torch.no_grad():
                    torch._foreach_add_(moved, directions, alpha=length)
                # An autocast around both passes keeps half-precision copies of w, and would go on with them.
                torch.clear_autocast_cache()
            del directions  # a model's worth of memory that the second pass can use
            yield ascent
        finally:
            # Copied back, because (w + eps) - eps is not w in floating point.
            if moved:
                with torch.no_grad():
                    torch._foreach_copy_(moved, originals)
                torch.clear_autocast_cache()

    def perturbation_shares(self) -> dict[str, float]:
        """Share of ||eps||^2 of the last ascent by kind of parameter, largest first; they sum to 1.

        Kinds: see `distill.sharpness.parameters.parameter_kind`. Empty before the first ascent and after one that moved
        nothing. Waits for the device.
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
            its = parameter_kind(self._names[parameter], parameter)
            shares[its] = shares.get(its, 0.0) + square / total
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    def state_dict(self) -> dict[str, Tensor]:
        """What steps to come depend on besides weights and optimizer; empty for most methods."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a `state_dict`, with the same parameters under the same names."""

    def _gradients(self, loss: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The parameters that have a gradient, and those, at least float32; never entered in `.grad`."""
        candidates = [parameter for parameter in self._names if parameter.requires_grad]
        gradients = torch.autograd.grad(loss, candidates, allow_unused=True) if candidates else ()
        found = [(p, gradient) for p, gradient in zip(candidates, gradients, strict=True) if gradient is not None]
        # Half-precision products would underflow; for float32 this copies nothing.
        return [parameter for parameter, _ in found], [at_least_float32(gradient) for _, gradient in found]

    def _steps(self, loss: Tensor | None) -> tuple[Ascent, list[Tensor], list[Tensor], float]:
        """The ascent, the parameters that move, and directions of which eps is so many times the length.

        No parameter moves where the norm is not finite.
        """
        if loss is None:
            raise TypeError(f"{type(self).__name__}.ascended takes the loss at the weights; found none")
        moved, directions = self._gradients(loss)
        if not moved:
            return _standstill(loss.device), [], [], 0.0
        scaled = [i for i, parameter in enumerate(moved) if self._scales(self._names[parameter])]
        if scaled:
            operators = self._operators([moved[i] for i in scaled])
            # Not in place: autograd may have handed out views of one tensor to several parameters.
            products = torch._foreach_mul([directions[i] for i in scaled], operators)
            for i, product in zip(scaled, products, strict=True):  # each gradient is freed as its product takes over
                directions[i] = product
        gradient_norm = total_norm(directions)
        if not bool(gradient_norm.isfinite()):
            return Ascent(torch.zeros_like(gradient_norm), gradient_norm, finite=False), [], [], 0.0
        if scaled:
            torch._foreach_mul_(products, operators)
        return self._scaled_to(self.rho, moved, directions, gradient_norm)

    def _scaled_to(
        self, radius: float, moved: list[Tensor], directions: list[Tensor], norm: Tensor
    ) -> tuple[Ascent, list[Tensor], list[Tensor], float]:
        length = radius / (float(norm) + 1e-12)
        norms = torch.stack(torch._foreach_norm(directions)) * abs(length)
        self._last_norms = (moved, norms)
        return Ascent(torch.linalg.vector_norm(norms), norm, finite=True), moved, directions, length

    def _scales(self, name: str) -> bool:
        return self.scaling == "abs" or (self.scaling == "kwon" and "weight" in name)

    def _operators(self, parameters: list[Tensor]) -> list[Tensor]:
        """T per tensor. Under "abs" w itself: T enters a norm or twice, where the sign of w cancels."""
        weights = [at_least_float32(parameter.detach()) for parameter in parameters]
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


def at_least_float32(tensor: Tensor) -> Tensor:
    """In float32 if it is in half precision, else itself."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def total_norm(tensors: list[Tensor]) -> Tensor:
    """Euclidean norm over all of them together, a scalar tensor."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))


def _standstill(device: torch.device) -> Ascent:
    nothing = torch.zeros((), device=device)
    return Ascent(nothing, nothing, finite=True)
