"""The TALAS paper's training loop, written from its formulas alone: none of this project's models, losses or trainers.

    L = 0.75 TAMD + LASD + 0.001 SimCSE

    TAMD     mean over the two top layers and the batch of 1 - cos(W_l e_l, t)
    LASD     mean over neighboring layers, the embedding layer among them, of ||R_{l+1} - R_l||_F^2 / B^2,
             R_l the B x B cosines of a layer
    SimCSE   cross entropy of the cosines between the last layers of two dropout views, divided by 0.1

Each view is a separate forward pass over the batch padded to its longest text, in float32, with the attention that
transformers chooses. With ASAM, as the published code has it: a backward pass; every parameter with a gradient goes
to w + 0.05 w^2 g / ||w g||; both views again under fresh masks, a backward pass there; back to w; AdamW.

Left out of the published loop: heads for layers that are not anchored, the outputs of the
first pass kept through the second, a finite check of every tensor.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy, normalize
from transformers import AutoModel, get_scheduler

ANCHORED = 2
TAMD, SIMCSE = 0.75, 0.001
TEMPERATURE = 0.1
HEAD_STD = 1e-3
RHO = 0.05
LEARNING_RATE, HEAD_LEARNING_RATE, WEIGHT_DECAY = 2e-5, 1e-4, 0.01
WARM_UP, LAST_RATE = 0.06, 0.1


class PaperLoop(nn.Module):
    """Mean-pooled student, its heads and their optimizer.

    Args:
        encoder: a transformers folder.
        width: of the teacher's vectors.
        steps: of the whole training, for the learning rate.
        ascends: with ASAM.
    """

    def __init__(self, encoder: Path, width: int, steps: int, *, ascends: bool) -> None:
        super().__init__()
        self.encoder: Any = AutoModel.from_pretrained(encoder, dtype=torch.float32, local_files_only=True)
        self.heads = nn.ModuleList(
            nn.Linear(self.encoder.config.hidden_size, width, bias=False) for _ in range(ANCHORED)
        )
        for head in self.heads.parameters():
            nn.init.normal_(head, std=HEAD_STD)
        self.ascends = ascends
        groups = [
            {"params": list(self.encoder.parameters()), "lr": LEARNING_RATE},
            {"params": list(self.heads.parameters()), "lr": HEAD_LEARNING_RATE},
        ]
        self.optimizer = torch.optim.AdamW(groups, weight_decay=WEIGHT_DECAY)
        self.scheduler = get_scheduler(
            "cosine_with_min_lr",
            self.optimizer,
            num_warmup_steps=int(WARM_UP * steps),
            num_training_steps=steps,
            scheduler_specific_kwargs={"min_lr_rate": LAST_RATE},
        )
        self.train()

    def step(self, input_ids: Tensor, attention_mask: Tensor, vectors: Tensor) -> None:
        """One step of AdamW; `(B, t)` ids and mask, `(B, width)` targets."""
        torch.autograd.backward(self.loss(input_ids, attention_mask, vectors))
        if self.ascends:
            with self.perturbed():
                torch.autograd.backward(self.loss(input_ids, attention_mask, vectors))
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def loss(self, input_ids: Tensor, attention_mask: Tensor, vectors: Tensor) -> Tensor:
        """The scalar L of a batch."""
        first = self.pooled(input_ids, attention_mask)
        second = self.pooled(input_ids, attention_mask)
        tamd = torch.stack(
            [
                (1 - cosine_similarity(head(state), vectors)).mean()
                for head, state in zip(self.heads, first[-ANCHORED:], strict=True)
            ]
        ).mean()
        cosines = [normalize(state) @ normalize(state).T for state in first]
        lasd = torch.stack([(upper - lower).square().mean() for lower, upper in pairwise(cosines)]).mean()
        views = normalize(first[-1]) @ normalize(second[-1]).T / TEMPERATURE
        return TAMD * tamd + lasd + SIMCSE * cross_entropy(views, torch.arange(len(views)))

    def pooled(self, input_ids: Tensor, attention_mask: Tensor) -> list[Tensor]:
        """`(B, d)` mean states of the embedding layer and of every block, of one forward pass."""
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True)
        mask = attention_mask.unsqueeze(-1).float()
        return [(state * mask).sum(1) / mask.sum(1) for state in states.hidden_states]

    @contextmanager
    def perturbed(self) -> Iterator[None]:
        """Inside, the parameters that have a gradient are where ASAM's ascent along it leads, without the gradient."""
        moved = [weight for weight in self.parameters() if weight.grad is not None]
        originals = [weight.detach().clone() for weight in moved]
        ascend(moved)
        self.optimizer.zero_grad()
        yield
        with torch.no_grad():
            for weight, original in zip(moved, originals, strict=True):
                weight.copy_(original)


@torch.no_grad()
def ascend(weights: Sequence[Tensor]) -> None:
    """w + rho w^2 g / ||w g||, the norm over all of them."""
    pairs = [(weight, weight.grad) for weight in weights if weight.grad is not None]
    norms = [(weight.abs() * gradient).norm() for weight, gradient in pairs]
    factor = RHO / (torch.stack(norms).norm() + 1e-12)
    for weight, gradient in pairs:
        weight.add_(weight.square() * gradient * factor)
