"""Targets that are centered or whitened before the objective sees them.

With m the mean of the teacher's vectors t of the training texts, and U diag(l) U^T their covariance,

    centered    t - m
    whitened    diag(l + r)^(-1/2) U^T (t - m),    r = RIDGE * mean of l

and the result is scaled to unit length again if the teacher's vectors have it. The vectors of most models share a large
mean and vary in few directions, so that all their cosines are high; without the mean, and with equal variances, they
differ more (Su et al., Whitening Sentence Representations for Better Semantics and Faster Retrieval, arXiv 2103.15316;
Li et al., On the Sentence Embeddings from Pre-trained Language Models, arXiv 2011.05864). The ridge, which they do not
have, keeps directions without variance from being scaled up.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from distill.data.dataset import CachedDataset
from distill.objectives.base import TeacherShape, unit

CENTERED, WHITENED = "centered", "whitened"
RIDGE = 1e-3
# Vectors read at a time.
CHUNK = 4096


class TargetTransform(nn.Module):
    """Maps the teacher's `(B, d_T)` vectors to the targets of a run; its values are part of every checkpoint.

    Args:
        kind: "centered" or "whitened".
    """

    mean: Tensor
    matrix: Tensor | None

    def __init__(self, kind: str, teacher: TeacherShape) -> None:
        super().__init__()
        self.kind = kind
        self.normalize = teacher.normalized is not False
        self.texts = 0
        self.register_buffer("mean", torch.zeros(teacher.dim))
        self.register_buffer("matrix", torch.eye(teacher.dim) if kind == WHITENED else None)

    def forward(self, vectors: Tensor) -> Tensor:
        """`(B, d_T)` float32 targets."""
        with torch.autocast(vectors.device.type, enabled=False):
            targets = vectors.float() - self.mean
            if self.matrix is not None:
                targets = targets @ self.matrix.T
            return unit(targets) if self.normalize else targets

    def fit(self, dataset: CachedDataset) -> None:
        """Fit to the first texts of the training records, each distinct text once, in one pass in float64."""
        _, space, _ = dataset.handles()
        rows = dataset.first_rows()
        dims = len(self.mean)
        total, products = np.zeros(dims), np.zeros((dims, dims) if self.kind == WHITENED else (0, 0))
        for start in range(0, len(rows), CHUNK):
            vectors = space.gather(rows[start : start + CHUNK]).astype(np.float64)
            total += vectors.sum(0)
            if self.kind == WHITENED:
                products += vectors.T @ vectors
        mean = total / len(rows)
        self.texts = len(rows)
        self.mean.copy_(torch.from_numpy(mean))
        if self.matrix is not None:
            variances, directions = np.linalg.eigh(products / len(rows) - np.outer(mean, mean))
            variances = variances.clip(0)[::-1]  # largest first
            scales = 1 / np.sqrt(variances + RIDGE * variances.mean())
            self.matrix.copy_(torch.from_numpy(scales[:, None] * directions[:, ::-1].T))

    def to_json(self) -> dict[str, Any]:
        """For `run.json`: kind, number of texts, and length of their mean vector."""
        return {"transform": self.kind, "texts": self.texts, "mean_length": round(float(self.mean.norm()), 6)}
