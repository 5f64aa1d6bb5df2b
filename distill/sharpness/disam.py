"""DISAM (Zhang et al., ICLR 2024): the ascent loss is lowered by the variance of the losses over domains.

With L_d the loss of the batch's texts of domain d, over the M domains that have one,

    V = (1 / M) sum_d (L_d - mean L)^2        the ascent loss is L - lambda V, lambda = 0.1, rho = 0.05

and the step uses the gradient of plain L at w + eps. The sign is that of the authors' code: a direction that raises
an already high L_d also raises V, so the domains that have converged are perturbed more.

The paper's losses are means over texts. Losses that compare the texts of a batch have no share per text: here L_d is
the whole objective on the sub-batch of domain d, with its own cosines and negatives.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# Losses that compare texts need two.
MIN_TEXTS = 2


def domain_variance(loss_of: Callable[[Tensor], Tensor], domains: Tensor) -> Tensor:
    """V over the domains that have at least two texts in the batch; 0 with fewer than two such domains.

    Args:
        loss_of: maps indices of texts in the batch to their loss, a scalar.
        domains: `(B,)` int64. Its values are copied to the CPU, because `loss_of` runs once per domain.
    """
    numbers, texts = domains.unique(return_counts=True)
    chosen = numbers[texts >= MIN_TEXTS].tolist()
    if len(chosen) < 2:
        return torch.zeros((), device=domains.device)
    losses = [loss_of((domains == number).nonzero()[:, 0]) for number in chosen]
    return torch.stack(losses).var(correction=0)
