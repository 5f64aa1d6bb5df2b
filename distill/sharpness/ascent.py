"""SAM (Foret et al., ICLR 2021) and ASAM (Kwon et al., ICML 2021): the gradient at the worst point near the weights.

With g the gradient of the loss at w and T a diagonal scaling,

    eps = rho * T^2 g / (||T g|| + 1e-12)        norms over all perturbed parameters together

the loss is differentiated at w + eps, and the optimizer steps from w with that gradient. Scalings:

    "none"   T = 1: SAM.
    "abs"    T = |w| in every tensor, no eta: what the published TALAS code trains with. A weight that is
             exactly 0 is not perturbed.
    "kwon"   T = |w| + eta in tensors whose name contains "weight" (norm weights and embeddings too), T = 1 in the
             others (biases): what the code of ASAM's authors does.

T weighs by magnitude, and in a sentence encoder the weights of size 1 are those of LayerNorm: under "abs" nearly all
of ||eps||^2 is on them and on embeddings, under "kwon" much of it on biases, under "none" on a newly initialized
projection, whose gradients are largest; attention and feed-forward matrices get a percent or two. At the published
rho = 0.05 the loss under "abs" rises by under 1 %. `perturbation_shares` reports this for a run.

The second pass draws new dropout masks, as the published code does.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from distill.errors import ConfigError
from distill.objectives.options import check_choice, check_count, check_positive, check_weight
from distill.sharpness.ascent_loss import AscentLoss
from distill.sharpness.parameters import parameter_kind

SCALINGS = ("none", "abs", "kwon")


@dataclass(frozen=True)
class Ascent:
    """Norms of one ascent, as tensors on the device.

    Attributes:
        norm: ||eps||, a scalar; 0 if the weights were not perturbed.
        gradient_norm: ||T g||, a scalar, including the loss scale if the loss was scaled.
        finite: False if ||T g|| was not finite; the weights were not perturbed then.
    """

    norm: Tensor
    gradient_norm: Tensor
    finite: bool


class SharpnessAware:
    """Perturbs parameters to w + eps inside a `with` block; works with any optimizer.

        with sharpness.ascended(first_loss):
            second_loss().backward()
        optimizer.step()

    The first gradient is not stored in `.grad`: accumulated gradients stay, and gradient hooks (DDP's) do not run, so
    that each process ascends its own loss. Under DDP the first forward pass belongs in `no_sync()`; activation
    checkpointing needs `use_reentrant=False`. Extra memory: one copy of the perturbed parameters, kept between steps.
    The first backward pass computes gradients of those parameters only.

    Attributes:
        passes: forward and backward passes of a step with an ascent; a method of one pass needs no first loss.
        ascent_loss: the first loss if it is not the whole loss; the caller computes it.
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
        """Set the parameters to perturb, all on one device; frozen ones are skipped at each ascent.

        Args:
            named_parameters: names select the scaling under "kwon" and the kind in `perturbation_shares`.
            scaling: one of `SCALINGS`.
            rho: radius, > 0, in the norm of eps / T.
            eta: >= 0, added to |w| under "kwon".
            every: steps divisible by it have an ascent, the others are plain.
        """
        check_choice("scaling", scaling, SCALINGS, of="sharpness")
        check_positive("rho", rho, of="sharpness")
        check_weight("eta", eta, of="sharpness")
        if eta and scaling != "kwon":
            raise ConfigError(f"sharpness eta: only scaling 'kwon' uses it, found {eta!r} with {scaling!r}")
        check_count("every", every, 1, None, of="sharpness")
        self.scaling, self.rho, self.eta, self.every, self.ascent_loss = scaling, rho, eta, every, ascent_loss
        # A tied parameter with two names is perturbed once, under the first.
        self._names: dict[Tensor, str] = {}
        for name, parameter in named_parameters:
            self._names.setdefault(parameter, name)
        self._backups: dict[Tensor, Tensor] = {}
        self._last_norms: tuple[list[Tensor], Tensor] | None = None

    def begin_step(self, step: int) -> bool:
        """Whether an optimizer step, counted from 0, has an ascent; call it before every micro-batch of the step."""
        return step % self.every == 0

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the optimizer, for methods that need its state or its steps; may be called repeatedly."""

    @contextmanager
    def ascended(self, loss: Tensor | None = None) -> Iterator[Ascent]:
        """Perturb the weights to w + eps in the block; afterwards, even after an exception, they are w bit for bit.

        If ||T g|| is not finite the weights stay, and the block still runs: its backward pass is then not finite
        either, and a `GradScaler` or a check of the loss detects it there.

        Args:
            loss: scalar; its graph is freed. A loss scaled by a `GradScaler` gives the same eps and prevents
                float16 gradients from underflowing. Methods of one pass ignore it.
        """
        self._last_norms = None
        with torch.no_grad():
            ascent, moved, directions, length = self._perturbation(loss)
            originals = [buffer_of(self._backups, parameter, parameter.dtype) for parameter in moved]
            if moved:
                torch._foreach_copy_(originals, moved)
        try:
            if moved:
                with torch.no_grad():
                    torch._foreach_add_(moved, directions, alpha=length)
                # An autocast around both passes caches half-precision copies of w.
                torch.clear_autocast_cache()
            del directions  # frees memory for the second pass
            yield ascent
        finally:
            # Copied, because (w + eps) - eps is not w in floating point.
            if moved:
                with torch.no_grad():
                    torch._foreach_copy_(moved, originals)
                torch.clear_autocast_cache()

    def perturbation_shares(self) -> dict[str, float]:
        """Share of ||eps||^2 of the last ascent by `parameter_kind`, largest first; they sum to 1.

        Empty before the first ascent and after one that perturbed nothing. Synchronizes with the device.
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
            kind = parameter_kind(self._names[parameter], parameter)
            shares[kind] = shares.get(kind, 0.0) + square / total
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    def state_dict(self) -> dict[str, Tensor]:
        """State for a checkpoint besides weights and optimizer; empty for most methods."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a `state_dict` of the same parameters under the same names."""

    def _gradients(self, loss: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Parameters with a gradient, and these gradients in at least float32; `.grad` is not used."""
        candidates = [parameter for parameter in self._names if parameter.requires_grad]
        gradients = torch.autograd.grad(loss, candidates, allow_unused=True) if candidates else ()
        found = [(p, gradient) for p, gradient in zip(candidates, gradients, strict=True) if gradient is not None]
        # Half-precision products would underflow.
        return [parameter for parameter, _ in found], [at_least_float32(gradient) for _, gradient in found]

    def _perturbation(self, loss: Tensor | None) -> tuple[Ascent, list[Tensor], list[Tensor], float]:
        """The ascent, the parameters to perturb, and directions and length whose product is eps.

        Without parameters if the norm is not finite.
        """
        if loss is None:
            raise TypeError(f"{type(self).__name__}.ascended needs the loss at the weights; found None")
        moved, directions = self._gradients(loss)
        if not moved:
            return no_ascent(loss.device), [], [], 0.0
        scaled = [i for i, parameter in enumerate(moved) if self._scales(self._names[parameter])]
        if scaled:
            operators = self._operators([moved[i] for i in scaled])
            # Not in place: autograd may have handed out views of one tensor to several parameters.
            products = torch._foreach_mul([directions[i] for i in scaled], operators)
            for i, product in zip(scaled, products, strict=True):  # frees each gradient as it is replaced
                directions[i] = product
        gradient_norm = total_norm(directions)
        if not bool(gradient_norm.isfinite()):
            return Ascent(torch.zeros_like(gradient_norm), gradient_norm, finite=False), [], [], 0.0
        if scaled:
            torch._foreach_mul_(products, operators)
        return self._with_radius(self.rho, moved, directions, gradient_norm)

    def _with_radius(
        self, radius: float, moved: list[Tensor], directions: list[Tensor], norm: Tensor
    ) -> tuple[Ascent, list[Tensor], list[Tensor], float]:
        length = radius / (float(norm) + 1e-12)
        norms = torch.stack(torch._foreach_norm(directions)) * abs(length)
        self._last_norms = (moved, norms)
        return Ascent(torch.linalg.vector_norm(norms), norm, finite=True), moved, directions, length

    def _scales(self, name: str) -> bool:
        return self.scaling == "abs" or (self.scaling == "kwon" and "weight" in name)

    def _operators(self, parameters: list[Tensor]) -> list[Tensor]:
        """T per tensor. Under "abs" w itself: T is squared or in a norm, where the sign of w cancels."""
        weights = [at_least_float32(parameter.detach()) for parameter in parameters]
        if self.scaling == "abs":
            return weights
        operators = list(torch._foreach_abs(weights))
        torch._foreach_add_(operators, self.eta)
        return operators


def buffer_of(buffers: dict[Tensor, Tensor], parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """The parameter's buffer, allocated at first use and after the model changed device or dtype."""
    kept = buffers.get(parameter)
    if kept is None or (kept.device, kept.dtype) != (parameter.device, dtype):
        kept = buffers[parameter] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return kept


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor in float32 if it is in half precision."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def total_norm(tensors: list[Tensor]) -> Tensor:
    """Euclidean norm over all tensors together, a scalar."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))


def no_ascent(device: torch.device) -> Ascent:
    """An ascent that perturbs nothing."""
    zero = torch.zeros((), device=device)
    return Ascent(zero, zero, finite=True)
