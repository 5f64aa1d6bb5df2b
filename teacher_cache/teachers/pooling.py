"""Pooling of token states by the attention mask, with padding on either side."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn


def pool(hidden: Tensor, mask: Tensor, how: str) -> Tensor:
    """`(b, d)` float32 from token states `(b, t, d)` and a 0/1 mask `(b, t)`.

    "mean" is sum(h·m) / max(sum m, 1e-9) in float32; "cls" is the first position with mask 1, "last_token"
    the last one. Positions with mask 0 are never read: they may be NaN, as fully masked rows are in some
    attention kernels.
    """
    if how == "mean":
        kept = hidden.float().masked_fill(mask.unsqueeze(-1) == 0, 0.0)
        return kept.sum(dim=1) / mask.sum(dim=1, keepdim=True).clamp(min=1e-9)
    # argmax over integers returns the first of equal values.
    first = mask.int().argmax(dim=1)
    at = first if how == "cls" else mask.shape[1] - 1 - mask.int().flip(1).argmax(dim=1)
    return hidden[torch.arange(len(hidden), device=hidden.device), at].float()


def position_ids(mask: Tensor) -> Tensor:
    """`(b, t)` positions that count the tokens of each text from 0, without padding before them."""
    return (mask.cumsum(dim=1) - 1).clamp(min=0)


def needs_position_ids(model: nn.Module, padding_side: str) -> bool:
    """Whether `model` would count padding as positions unless it is given `position_ids`.

    Right padding shifts nothing. RoBERTa-like models compute positions from the token ids, starting after the padding
    id, so they need none.
    """
    if padding_side == "right":
        return False
    for module in model.modules():
        table: Any = getattr(module, "position_embeddings", None)
        if isinstance(getattr(module, "padding_idx", None), int) and isinstance(table, nn.Embedding):
            return False
    return "position_ids" in inspect.signature(model.forward).parameters
