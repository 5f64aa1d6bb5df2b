"""The largest eigenvalue of the Hessian H of a loss, its sharpness.

    power     v <- H v / ||H v||,  lambda = v' H v
    lanczos   v, H v, H^2 v, ... orthonormalized; lambda is the largest eigenvalue of H in their span

Both give the largest eigenvalue in the algebraic sense. Power iteration finds the largest in magnitude; if that is
negative it runs once more on H - lambda I, which has no negative eigenvalue. Lanczos orthogonalizes every vector
against all before it, twice, which float32 needs, and stops as soon as its residual allows. ARPACK takes as many
products for the same value, but returns nothing if it does not converge or the Hessian is 0.

Neither forms H. Products with it are exact (Pearlmutter 1994), or differences of gradients if a loss cannot be
differentiated twice.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from distill.errors import NonFiniteLoss

# Relative to the eigenvalue largest in magnitude; float32 cannot distinguish less from 0.
ROUNDING = 1e-6
# Small compared with 1e-2, over which a loss of 1 changes with an eigenvalue of 1e4.
RADIUS = 1e-3


@dataclass(frozen=True)
class Eigenvalue:
    """An estimate of the largest eigenvalue, and its error.

    Attributes:
        value: lambda = v' H v of a unit vector v, never above the largest.
        residual: ||H v - lambda v||; H has an eigenvalue within this of lambda.
        products: products of H with a vector.
        converged: whether the tolerance was met; if not, the value is a lower bound.
    """

    value: float
    residual: float
    products: int
    converged: bool


class Hessian(ABC):
    """Second derivatives of a loss at the current weights, as a symmetric operator on flat vectors.

    Attributes:
        parameters: those that the loss depends on; H is 0 along others.
    """

    parameters: list[Tensor]

    @property
    def size(self) -> int:
        """Number of elements of the parameters."""
        return sum(parameter.numel() for parameter in self.parameters)

    def product(self, vector: Tensor) -> Tensor:
        """H v.

        Args:
            vector: `(size,)`, with dtype and device of the parameters.
        """
        parts = vector.split([parameter.numel() for parameter in self.parameters])
        shaped = [part.view_as(parameter) for part, parameter in zip(parts, self.parameters, strict=True)]
        flat = torch.cat([product.reshape(-1) for product in self._products(shaped)])
        if not bool(flat.isfinite().all()):
            raise NonFiniteLoss("a second derivative of the loss is NaN or infinite, so its curvature is undefined")
        return flat

    def start(self, seed: int) -> Tensor:
        """A random unit vector `(size,)`, the same on every device; torch's random state does not change."""
        like = self.parameters[0]
        vector = torch.randn(self.size, generator=torch.Generator().manual_seed(seed), dtype=like.dtype)
        return (vector / torch.linalg.vector_norm(vector)).to(like.device)

    def block(self, parameters: Iterable[Tensor]) -> Self:
        """The block of some parameters, with the others fixed."""
        part, known = copy.copy(self), set(self.parameters)
        part.parameters = [parameter for parameter in dict.fromkeys(parameters) if parameter in known]
        return part

    @abstractmethod
    def _products(self, vector: list[Tensor]) -> Iterable[Tensor]:
        """H v, in the shapes of the parameters."""


class DoubleBackward(Hessian):
    """Exact products, each a backward pass through the graph of the gradient, which is built once.

    Needs `sdpa_kernel([SDPBackend.MATH])` around the forward pass, because fused attention cannot be differentiated
    twice. Losses that normalize rows of zeros (padding, the diagonal of differences) have a gradient there, but no
    second derivative. Memory: the graphs of the loss and of its gradient.
    """

    def __init__(self, loss: Tensor, parameters: Iterable[Tensor]) -> None:
        """Compute the gradient and its graph.

        Args:
            loss: scalar with its graph; for several mini-batches their mean.
            parameters: frozen and duplicate ones are skipped.
        """
        candidates = _trainable(parameters)
        depends = bool(candidates) and loss.requires_grad
        found = torch.autograd.grad(loss, candidates, create_graph=True, allow_unused=True) if depends else ()
        # A gradient without a graph is constant: its row and column of H are 0.
        self._gradients = {
            parameter: gradient
            for parameter, gradient in zip(candidates, found, strict=False)
            if gradient is not None and gradient.requires_grad
        }
        self.parameters = list(self._gradients)

    def _products(self, vector: list[Tensor]) -> Iterable[Tensor]:
        gradients = [self._gradients[parameter] for parameter in self.parameters]
        return torch.autograd.grad(gradients, self.parameters, vector, retain_graph=True, materialize_grads=True)


class GradientDifferences(Hessian):
    """Products as central differences, (g(w + r v) - g(w - r v)) / 2r for a unit vector v.

    Needs only gradients, of one mini-batch at a time, with any kernels. Afterwards the weights are unchanged, bit for
    bit.
    """

    def __init__(
        self, losses: Callable[[], Iterable[Tensor]], parameters: Iterable[Tensor], radius: float = RADIUS
    ) -> None:
        """Find the parameters that have a gradient.

        Args:
            losses: computes the losses of the mini-batches at the current weights; their mean is used.
            parameters: frozen and duplicate ones are skipped.
            radius: r. Rounding errors are about 1e-7 ||g|| / r in float32, the truncation error is r^2 / 6 times the
                fourth derivative along v.
        """
        self._losses, self._radius = losses, radius
        candidates, reached = _trainable(parameters), set()
        for loss in losses():
            if candidates and loss.requires_grad:
                found = torch.autograd.grad(loss, candidates, allow_unused=True)
                reached |= {p for p, gradient in zip(candidates, found, strict=True) if gradient is not None}
        self.parameters = [parameter for parameter in candidates if parameter in reached]

    def _products(self, vector: list[Tensor]) -> Iterable[Tensor]:
        kept = [parameter.detach().clone() for parameter in self.parameters]
        sides: list[list[Tensor]] = []
        try:
            for radius in (self._radius, -self._radius):
                with torch.no_grad():
                    torch._foreach_copy_(self.parameters, torch._foreach_add(kept, vector, alpha=radius))
                sides.append(self._gradient())
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, kept)
        forward, backward = sides
        return torch._foreach_div(torch._foreach_sub(forward, backward), 2 * self._radius)

    def _gradient(self) -> list[Tensor]:
        total, batches = [torch.zeros_like(parameter) for parameter in self.parameters], 0
        for loss in self._losses():
            found = torch.autograd.grad(loss, self.parameters, allow_unused=True, materialize_grads=True)
            torch._foreach_add_(total, found)
            batches += 1
        return list(torch._foreach_div(total, batches))


def _trainable(parameters: Iterable[Tensor]) -> list[Tensor]:
    return list(dict.fromkeys(parameter for parameter in parameters if parameter.requires_grad))


def power_iteration(
    hessian: Hessian, *, seed: int = 0, tolerance: float = 5e-4, iterations: int = 100
) -> Eigenvalue | None:
    """The largest eigenvalue by power iteration; None if the gradient is constant.

    A constant lambda does not imply convergence: with two eigenvalues of equal magnitude and opposite signs it is
    constant at once. The residual has to be small too; if lambda is well separated, its error is about the square of
    the residual.

    Args:
        seed: of the start vector.
        tolerance: largest relative change of lambda in a step, and largest square of residual / lambda.
        iterations: maximum, twice if the eigenvalue largest in magnitude is negative.
    """
    if not hessian.size:
        return None
    found = _largest_in_size(hessian, 0.0, seed, tolerance, iterations)
    if found.value >= 0:
        return found
    shifted = _largest_in_size(hessian, -found.value, seed + 1, tolerance, iterations)
    products, converged = found.products + shifted.products, found.converged and shifted.converged
    return replace(shifted, products=products, converged=converged)


def _largest_in_size(hessian: Hessian, shift: float, seed: int, tolerance: float, iterations: int) -> Eigenvalue:
    """The eigenvalue of H + shift I largest in magnitude, minus the shift."""
    vector, value, residual = hessian.start(seed), float("inf"), float("inf")
    for step in range(1, iterations + 1):
        image = hessian.product(vector)
        before, value = value, float(vector @ image)
        residual = float(torch.linalg.vector_norm(image - value * vector))
        change, rounding = abs(value - before), ROUNDING * shift
        is_converged = change <= max(tolerance * abs(value), rounding)
        is_converged = is_converged and residual <= max(tolerance**0.5 * abs(value), rounding)
        image += shift * vector
        norm = torch.linalg.vector_norm(image)
        if is_converged or not float(norm):  # a random vector maps to 0: H + shift I is 0
            return Eigenvalue(value, residual, step, converged=True)
        vector = image / norm
    return Eigenvalue(value, residual, iterations, converged=False)


def lanczos(hessian: Hessian, *, seed: int = 0, tolerance: float = 1e-2, steps: int = 30) -> Eigenvalue | None:
    """The largest eigenvalue by Lanczos; None if the gradient is constant.

    Args:
        seed: of the start vector.
        tolerance: largest residual / lambda; if lambda is well separated, its error is about the square of that.
        steps: maximum number of products; for each a vector as large as the parameters is kept.
    """
    if not hessian.size:
        return None
    basis: list[Tensor] = []
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    value, residual, vector = 0.0, float("inf"), hessian.start(seed)
    for step in range(1, steps + 1):
        basis.append(vector)
        image = hessian.product(vector)
        diagonal.append(float(vector @ image))
        for kept in basis * 2:
            image -= (kept @ image) * kept
        off_diagonal.append(float(torch.linalg.vector_norm(image)))
        # H is tridiagonal in the basis; its eigenvalues there are the Ritz values.
        above = np.diag(off_diagonal[:-1], 1)
        ritz, coordinates = np.linalg.eigh(np.diag(diagonal) + above + above.T)
        value, residual = float(ritz[-1]), off_diagonal[-1] * abs(float(coordinates[-1, -1]))
        if residual <= max(tolerance * abs(value), ROUNDING * float(np.abs(ritz).max())):
            return Eigenvalue(value, residual, step, converged=True)
        vector = image / off_diagonal[-1]
    return Eigenvalue(value, residual, steps, converged=False)
