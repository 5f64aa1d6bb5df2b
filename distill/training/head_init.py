"""Heads that start from a least-squares fit to the teacher, instead of from random values.

With E the `(N, d_s)` pooled states of one student layer before training and T the `(N, d_T)` targets of the same texts,
a head starts as the ridge regression of T on E,

    W = (E^T E + ridge I)^-1 E^T T,     ridge = RIDGE * mean eigenvalue of E^T E

as in linear probing before fine-tuning (Kumar et al., Fine-Tuning can Distort Pretrained Features and Underperform
Out-of-Distribution, arXiv 2202.10054): gradients through a random head would distort the student in its first steps.
A head with a bias is fitted to centered states and targets.
"""

import numpy as np
import numpy.typing as npt
import torch

from distill.data.dataset import CachedDataset
from distill.training.trainer import Distillation

RIDGE = 1e-3
# Texts of the fit for each dimension of the student's states, and the most of any fit.
TEXTS_PER_DIMENSION, MOST_TEXTS = 10, 2**14
# Texts encoded at a time: the states of all layers are in memory.
CHUNK = 512

Matrix = npt.NDArray[np.float64]


class RidgeRegression:
    """Linear regression of `(n, d_out)` targets on `(n, d_in)` inputs that are added in parts, in float64."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        """Create a regression without data; `bias` centers inputs and targets."""
        self.bias = bias
        self.count = 0
        self._gram, self._cross = np.zeros((inputs, inputs)), np.zeros((inputs, outputs))
        self._input_sum, self._output_sum = np.zeros(inputs), np.zeros(outputs)

    def add(self, inputs: npt.NDArray[np.floating], outputs: npt.NDArray[np.floating]) -> None:
        """Add the rows of some texts."""
        x, y = inputs.astype(np.float64), outputs.astype(np.float64)
        self.count += len(x)
        self._gram += x.T @ x
        self._cross += x.T @ y
        self._input_sum += x.sum(0)
        self._output_sum += y.sum(0)

    def solve(self, ridge: float = RIDGE, *, unit_length: bool = False) -> tuple[Matrix, Matrix]:
        """`(d_out, d_in)` weight and `(d_out,)` bias, 0 unless fitted.

        Args:
            ridge: added to the diagonal, as a share of the mean eigenvalue of the inputs' Gram matrix.
            unit_length: scale both so that the predictions have a root mean square length of 1.
        """
        gram, cross = self._gram, self._cross
        mean, target = self._input_sum / self.count, self._output_sum / self.count
        if self.bias:
            gram = gram - self.count * np.outer(mean, mean)
            cross = cross - self.count * np.outer(mean, target)
        damping = ridge * np.trace(gram) / len(gram)
        weight = np.linalg.solve(gram + damping * np.eye(len(gram)), cross).T
        bias = target - weight @ mean if self.bias else np.zeros(len(weight))
        if unit_length:
            squares = np.einsum("oi,ij,oj->", weight, gram, weight) / self.count
            if self.bias:  # the centered predictions are orthogonal to their mean
                squares += float(target @ target)
            weight, bias = weight / np.sqrt(squares), bias / np.sqrt(squares)
        return weight, bias


def fit_heads(model: Distillation, dataset: CachedDataset, seed: int) -> int:
    """Set the heads of an objective by ridge regression on a sample of the training texts; returns its size.

    Deterministic, and without dropout. If the objective compares directions only, targets have unit length and so, on
    average, have the heads' outputs: the gradient of a cosine is inversely proportional to the length.

    Args:
        dataset: the training records; second texts of pairs are not used.
    """
    student, objective = model.student, model.objective
    heads, device = objective.linear_heads(), next(model.parameters()).device
    width = student.shape.dim
    count = min(len(dataset), MOST_TEXTS, TEXTS_PER_DIMENSION * width)
    records = np.random.default_rng(seed).choice(len(dataset), size=count, replace=False)
    rows = np.unique(dataset.rows_of(np.sort(records))[:, 0])
    cache, space, _ = dataset.handles()
    fits = {
        layer: RidgeRegression(width, head.out_features, bias=head.bias is not None) for layer, head in heads.items()
    }
    for start in range(0, len(rows), CHUNK):
        chosen = rows[start : start + CHUNK]
        vectors = torch.from_numpy(space.gather(chosen))
        if model.transform is not None:
            vectors = model.transform(vectors.to(device)).cpu()
        targets = vectors.double().numpy()
        if not objective.compares_lengths:
            targets = targets / np.linalg.norm(targets, axis=1, keepdims=True).clip(1e-12)
        states = student.encode_layers(cache.texts(chosen))
        for layer, fit in fits.items():
            fit.add(states[layer], targets)
    with torch.no_grad():
        for layer, head in heads.items():
            weight, bias = fits[layer].solve(unit_length=not objective.compares_lengths)
            head.weight.copy_(torch.from_numpy(weight))
            if head.bias is not None:
                head.bias.copy_(torch.from_numpy(bias))
    return len(rows)
