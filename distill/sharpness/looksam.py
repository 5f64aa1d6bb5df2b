"""LookSAM (Liu et al., CVPR 2022): the flattening part of SAM's gradient is stored and reused for k steps.

With g the gradient at w and g_s the one at w + eps, every k-th step is that of SAM and stores

    g_v = g_s - (g_s . u) u        u = g / ||g||

the part of g_s that plain descent does not contain. The k - 1 steps after it have one pass and use

    g + alpha * ||g|| / ||g_v|| * g_v

Norms and products are over all perturbed parameters together. The paper uses k = 5 and alpha = 0.7.

g_s and g are those of the whole step: summed over its micro-batches and over the processes, so that all processes
store the same g_v. The gradient is corrected when the optimizer begins to step: after clipping and unscaling, and not
in a step that a `GradScaler` skips.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from distill.errors import RunFolderError
from distill.objectives.options import check_weight
from distill.sharpness.ascent import Ascent, SharpnessAware, at_least_float32, buffer_of, total_norm


class LookSam(SharpnessAware):
    """SAM at every k-th step; in between the stored direction corrects plain gradients.

    Call `attach` with the optimizer, and `begin_step` before every micro-batch. Memory in addition to SAM's: one tensor
    per perturbed parameter, at least float32.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        rho: float,
        every: int,
        alpha: float,
    ) -> None:
        """See `SharpnessAware`.

        Args:
            every: k.
            alpha: >= 0, length of the correction relative to that of the gradient.
        """
        super().__init__(named_parameters, scaling="none", rho=rho, every=every)
        check_weight("alpha", alpha, of="sharpness")
        self.alpha = alpha
        self._step: int | None = None
        self._ascends = True
        # Sum of g in the current step; becomes the direction, in place, when the optimizer steps.
        self._gathered: dict[Tensor, Tensor] = {}
        self._direction: dict[Tensor, Tensor] = {}  # g_v / ||g_v||
        self._buffers: dict[Tensor, Tensor] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        self._hook: Any = None

    def begin_step(self, step: int) -> bool:
        """Every k-th step has an ascent, and any step without a stored direction."""
        if step != self._step:
            self._step = step
            self._gathered.clear()  # of a step that the optimizer skipped
            self._ascends = step % self.every == 0 or not self._direction
        return self._ascends

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer is self._optimizer:
            return
        if self._hook is not None:
            self._hook.remove()
        self._optimizer = optimizer
        self._hook = optimizer.register_step_pre_hook(self._before_step)

    @contextmanager
    def ascended(self, loss: Tensor | None = None) -> Iterator[Ascent]:
        try:
            with super().ascended(loss) as ascent:
                yield ascent
        except BaseException:
            self._gathered.clear()
            raise

    def state_dict(self) -> dict[str, Tensor]:
        """The stored direction by parameter name."""
        return {self._names[parameter]: kept for parameter, kept in self._direction.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the direction."""
        shapes = {name: parameter.shape for parameter, name in self._names.items()}
        for name, kept in state.items():
            if shapes.get(name) != kept.shape:
                raise RunFolderError(
                    f"the checkpoint has a looksam direction of other parameters: {name} of shape {tuple(kept.shape)}"
                )
        # In the order of the parameters, because rounding of the norms depends on it.
        self._direction = {
            parameter: self._buffer(parameter).copy_(state[name])
            for parameter, name in self._names.items()
            if name in state
        }
        self._gathered.clear()
        self._step = None

    def _gradients(self, loss: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        parameters, gradients = super()._gradients(loss)
        self._direction = {}  # the sum uses its buffers
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter in self._gathered:
                self._gathered[parameter].add_(gradient)
            else:
                self._gathered[parameter] = self._buffer(parameter).copy_(gradient)
        return parameters, gradients

    @torch.no_grad()
    def _before_step(self, *_: Any) -> None:
        if self._gathered:
            self._store()
        elif self._direction:
            self._correct()

    def _store(self) -> None:
        """Compute the direction from g and `.grad`, g_s; none if it is not finite or zero."""
        gathered = self._gathered
        kept = {p: gathered[p] for p in self._names if p in gathered and p.grad is not None}
        self._gathered = {}
        if not kept:
            return
        vectors = list(kept.values())
        _sum_over_processes(vectors)
        slopes = [at_least_float32(parameter.grad) for parameter in kept if parameter.grad is not None]
        # Unit vectors first: with a loss scale, squares could exceed the range of float32.
        torch._foreach_div_(vectors, total_norm(vectors))
        along = torch.stack([(u * g).sum() for u, g in zip(vectors, slopes, strict=True)]).sum()
        torch._foreach_mul_(vectors, -along)
        torch._foreach_add_(vectors, slopes)
        norm = total_norm(vectors)
        if bool(norm.isfinite()) and bool(norm > 0):
            torch._foreach_div_(vectors, norm)
            self._direction = kept

    def _correct(self) -> None:
        pairs = [(p.grad, kept) for p, kept in self._direction.items() if p.grad is not None]
        if pairs:
            length = self.alpha * total_norm([at_least_float32(gradient) for gradient, _ in pairs])
            for gradient, kept in pairs:
                gradient.add_(kept * length)

    def _buffer(self, parameter: Tensor) -> Tensor:
        return buffer_of(self._buffers, parameter, torch.promote_types(parameter.dtype, torch.float32))


def _sum_over_processes(tensors: list[Tensor]) -> None:
    """All-reduce g over data-parallel processes; g_s is already their mean, and only the direction of g counts."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        for work in [distributed.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()
