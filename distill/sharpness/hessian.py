"""The largest eigenvalue of a loss's Hessian H: how fast the gradient grows along the direction that bends most.

    power     v <- H v / ||H v||,  lambda = v' H v
    lanczos   v, H v, H^2 v, ... made orthonormal; lambda is the largest eigenvalue of H in the space they span

Both give the largest eigenvalue in the algebraic sense. Power iteration finds the largest in size; where that is
negative it runs once more on H - lambda I, none of whose eigenvalues is. Lanczos makes every vector orthogonal to all
before it, twice, as float32 asks for, and stops as soon as its residual allows. ARPACK takes as many products for the
same value, but says nothing where it does not converge, nor of a Hessian that is 0.

Neither forms H. Products with it are exact (Pearlmutter 1994), or differences of gradients where a loss cannot be
differentiated twice.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from distill.errors import NonFiniteLoss

# Of the largest eigenvalue in size, what float32 cannot tell from 0.
ROUNDING = 1e-6
# Small beside the distance over which a loss of size 1 bends with an eigenvalue of 1e4, 1e-2.
RADIUS = 1e-3


@dataclass(frozen=True)
class Eigenvalue:
    """An estimate of the largest eigenvalue, with what is known of its error.

    Attributes:
        value: lambda = v' H v of a unit vector v, never above the largest.
        residual: ||H v - lambda v||; H has an eigenvalue within this of lambda.
        products: of H with a vector that it took.
        converged: the method met its tolerance; if not, the value is only a lower bound.
    """

    value: float
    residual: float
    products: int
    converged: bool


class Hessian(ABC):
    """Second derivatives of a loss at the current weights, as a symmetric operator on flat vectors.

    Attributes:
        parameters: those that the loss depends on; along all others H is 0.
    """

    parameters: list[Tensor]

    @property
    def size(self) -> int:
        """Elements of the parameters, the length of a vector."""
        return sum(parameter.numel() for parameter in self.parameters)

    def product(self, vector: Tensor) -> Tensor:
        """H v.

        Args:
            vector: `(size,)`, of the parameters' dtype and device.

        Raises:
            NonFiniteLoss: it is NaN or infinite.
        """
        parts = vector.split([parameter.numel() for parameter in self.parameters])
        shaped = [part.view_as(parameter) for part, parameter in zip(parts, self.parameters, strict=True)]
        flat = torch.cat([product.reshape(-1) for product in self._products(shaped)])
        if not bool(flat.isfinite().all()):
            raise NonFiniteLoss("the loss has a second derivative that is NaN or infinite here, and so no curvature")
        return flat

    def start(self, seed: int) -> Tensor:
        """A random unit vector `(size,)`, the same for a seed on every device; torch's own random state stays."""
        like = self.parameters[0]
        vector = torch.randn(self.size, generator=torch.Generator().manual_seed(seed), dtype=like.dtype)
        return (vector / torch.linalg.vector_norm(vector)).to(like.device)

    @abstractmethod
    def block(self, parameters: Iterable[Tensor]) -> "Hessian":
        """The block of some of the parameters, the others held fixed."""

    @abstractmethod
    def _products(self, vector: list[Tensor]) -> Iterable[Tensor]:
        """H v, shaped as the parameters."""


class DoubleBackward(Hessian):
    """Exact products, each a backward pass through the graph of the gradient, which is made once and kept.

    Needs an attention that can be differentiated twice: `sdpa_kernel([SDPBackend.MATH])` around the forward pass,
    because fused kernels cannot. Losses that scale rows of zeros to length 1 (padding, the diagonal of differences)
    have a gradient there, but no second derivative. Memory: the graphs of the loss and of its gradient.
    """

    def __init__(self, loss: Tensor, parameters: Iterable[Tensor]) -> None:
        """Differentiate once.

        Args:
            loss: scalar, with its graph; of several mini-batches their mean.
            parameters: frozen ones and second names of tied ones are left out.
        """
        candidates = _trained(parameters)
        depends = bool(candidates) and loss.requires_grad
        found = torch.autograd.grad(loss, candidates, create_graph=True, allow_unused=True) if depends else ()
        # A gradient without a graph is constant, and H symmetric: row and column are 0.
        self._gradients = {
            parameter: gradient
            for parameter, gradient in zip(candidates, found, strict=False)
            if gradient is not None and gradient.requires_grad
        }
        self.parameters = list(self._gradients)

    def block(self, parameters: Iterable[Tensor]) -> "DoubleBackward":
        part = object.__new__(DoubleBackward)
        part._gradients = {p: self._gradients[p] for p in dict.fromkeys(parameters) if p in self._gradients}
        part.parameters = list(part._gradients)
        return part

    def _products(self, vector: list[Tensor]) -> Iterable[Tensor]:
        return torch.autograd.grad(
            list(self._gradients.values()), self.parameters, vector, retain_graph=True, materialize_grads=True
        )


class GradientDifferences(Hessian):
    """Products as central differences, (g(w + r v) - g(w - r v)) / 2r for a unit vector v.

    Asks for gradients alone, of one mini-batch at a time, with whichever kernels. Between the passes the weights are
    what they were, bit for bit.
    """

    def __init__(
        self, losses: Callable[[], Iterable[Tensor]], parameters: Iterable[Tensor], radius: float = RADIUS
    ) -> None:
        """Find out which parameters have a gradient.

        Args:
            losses: the losses of the mini-batches at the weights as they are, whose mean is taken.
            parameters: frozen ones and second names of tied ones are left out.
            radius: r. Float32 rounds the quotient by some 1e-7 ||g|| / r; r^2 / 6 times the fourth derivative along v
                is what it leaves out.
        """
        self._losses, self._radius = losses, radius
        candidates, reached = _trained(parameters), set()
        for loss in losses():
            if candidates and loss.requires_grad:
                found = torch.autograd.grad(loss, candidates, allow_unused=True)
                reached |= {p for p, gradient in zip(candidates, found, strict=True) if gradient is not None}
        self.parameters = [parameter for parameter in candidates if parameter in reached]

    def block(self, parameters: Iterable[Tensor]) -> "GradientDifferences":
        part = object.__new__(GradientDifferences)
        part._losses, part._radius = self._losses, self._radius
        mine = set(self.parameters)
        part.parameters = [parameter for parameter in dict.fromkeys(parameters) if parameter in mine]
        return part

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


def _trained(parameters: Iterable[Tensor]) -> list[Tensor]:
    return list(dict.fromkeys(parameter for parameter in parameters if parameter.requires_grad))


def power_iteration(
    hessian: Hessian, *, seed: int = 0, tolerance: float = 5e-4, iterations: int = 100
) -> Eigenvalue | None:
    """The largest eigenvalue by power iteration; None where the loss bends along no parameter.

    That lambda stands still is not enough to have converged: between two eigenvalues of one size and opposite signs it
    does at once. The residual has to be small too; where lambda is apart from other eigenvalues, its error is about the
    square of that.

    Args:
        seed: of the start vector.
        tolerance: largest relative change of lambda in a step, and largest square of residual / lambda.
        iterations: at most so many, and as many again where the eigenvalue largest in size is negative.
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
    """Of H + shift I, less the shift again."""
    vector, value, residual = hessian.start(seed), float("inf"), float("inf")
    for step in range(1, iterations + 1):
        image = hessian.product(vector)
        before, value = value, float(vector @ image)
        residual = float(torch.linalg.vector_norm(image - value * vector))
        change, rounding = abs(value - before), ROUNDING * shift
        settled = change <= max(tolerance * abs(value), rounding)
        settled = settled and residual <= max(tolerance**0.5 * abs(value), rounding)
        image += shift * vector
        norm = torch.linalg.vector_norm(image)
        if settled or not float(norm):  # H + shift I takes a random vector to 0: it is 0
            return Eigenvalue(value, residual, step, converged=True)
        vector = image / norm
    return Eigenvalue(value, residual, iterations, converged=False)


def lanczos(hessian: Hessian, *, seed: int = 0, tolerance: float = 1e-2, steps: int = 30) -> Eigenvalue | None:
    """The largest eigenvalue by Lanczos; None where the loss bends along no parameter.

    Args:
        seed: of the start vector.
        tolerance: largest residual / lambda; where lambda is apart from other eigenvalues, its error is about the
            square of that.
        steps: at most so many products. A vector as large as the parameters is kept of each.
    """
    if not hessian.size:
        return None
    basis: list[Tensor] = []
    diagonal: list[float] = []
    beside: list[float] = []
    value, residual, vector = 0.0, float("inf"), hessian.start(seed)
    for step in range(1, steps + 1):
        basis.append(vector)
        image = hessian.product(vector)
        diagonal.append(float(vector @ image))
        for kept in basis * 2:
            image -= (kept @ image) * kept
        beside.append(float(torch.linalg.vector_norm(image)))
        # H in the span of the basis is tridiagonal; its eigenvalues are the Ritz values.
        ritz, coordinates = np.linalg.eigh(np.diag(diagonal) + np.diag(beside[:-1], 1) + np.diag(beside[:-1], -1))
        value, residual = float(ritz[-1]), beside[-1] * abs(float(coordinates[-1, -1]))
        if residual <= max(tolerance * abs(value), ROUNDING * float(np.abs(ritz).max())):
            return Eigenvalue(value, residual, step, converged=True)
        vector = image / beside[-1]
    return Eigenvalue(value, residual, steps, converged=False)
