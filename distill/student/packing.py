"""A batch packed into one row of all its tokens, without padding, for encoders that support it.

Layers that treat tokens one by one (embeddings, linear layers, norms, activations, dropout) run on the tokens only, one
text after another. Attention runs on the micro-batches of `distill.student.micro_batches`, each padded to its longest
text. The states of the tokens do not change. transformers' attention interface passes the layout on as a keyword
argument, so a checkpointed block that is recomputed in the backward pass gets it too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distill.student.micro_batches import MicroBatch

_NAME = "packed"

# The row is extended to a multiple of this many tokens: allocating a new size at every step fragments memory, on a CPU
# to twice the size after some hundred steps.
ROW_MULTIPLE = 64

# Encoders in which only attention and a table of positions depend on the place of a token, and which accept position
# ids. RoBERTa-like models count positions from the one after their padding id.
POSITIONS_FROM_ZERO = frozenset({"bert", "distilbert", "electra", "ernie"})
POSITIONS_AFTER_PADDING = frozenset({"camembert", "roberta", "xlm-roberta"})


@dataclass(frozen=True)
class Block:
    """Texts whose attention is computed together.

    Attributes:
        texts: number of texts.
        width: tokens of the longest one.
        mask: `(texts, 1, 1, width)` bool, true for tokens; None without padding.
    """

    texts: int
    width: int
    mask: Tensor | None

    @property
    def places(self) -> int:
        return self.texts * self.width


class Packing:
    """Places of the tokens of a batch in the packed row, text by text, and in the padded blocks of the attention.

    The row is extended by repeating its first tokens, which nothing attends to.

    Args:
        attention_mask: `(n, t)`, with a token in every row.
        parts: from `distill.student.micro_batches.micro_batches`.

    Attributes:
        taken: `(N,)` places of the row's tokens in the flattened `(n, t)` batch.
        positions: `(N,)` of each token in its text, from 0.
        lengths: `(n,)` tokens of each text, in the order of the micro-batches.
        blocks: one per micro-batch.
    """

    def __init__(self, attention_mask: Tensor, parts: Sequence[MicroBatch]) -> None:
        places = torch.arange(attention_mask.numel(), device=attention_mask.device).view_as(attention_mask)
        masks = [attention_mask[part.rows, part.columns].bool() for part in parts]
        self.taken = _extended([places[part.rows, part.columns][mask] for part, mask in zip(parts, masks, strict=True)])
        self.positions = _extended([(mask.cumsum(1) - 1)[mask] for mask in masks])
        self.lengths = torch.cat([mask.sum(1) for mask in masks])
        self._texts = torch.arange(len(self.lengths), device=self.lengths.device).repeat_interleave(self.lengths)
        self.blocks = [
            Block(mask.shape[0], mask.shape[1], None if bool(mask.all()) else mask[:, None, None, :]) for mask in masks
        ]
        flat = torch.cat([mask.flatten() for mask in masks])
        self._tokens = _extended([flat.nonzero().squeeze(1)])
        # A padded place repeats the token before it: it is masked, and never NaN.
        self._padded = (flat.cumsum(0) - 1).clamp(min=0)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, dropout: float, scale: float | None) -> Tensor:
        """`(1, N, heads, d)` attention of `(1, heads, N, d)` inputs, in which a token attends to its own text only."""
        heads, width = query.shape[1], query.shape[3]
        sizes = [block.places for block in self.blocks]
        rows = [self._rows(states).index_select(0, self._padded).split(sizes) for states in (query, key, value)]
        attended = []
        for block, *parts in zip(self.blocks, *rows, strict=True):
            q, k, v = (part.view(block.texts, block.width, heads, width).transpose(1, 2) for part in parts)
            states = nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=block.mask, dropout_p=dropout, scale=scale
            )
            attended.append(states.transpose(1, 2).reshape(-1, heads * width))
        return torch.cat(attended).index_select(0, self._tokens).view(1, -1, heads, width)

    @staticmethod
    def _rows(states: Tensor) -> Tensor:
        """`(1, heads, N, d)` to `(N, heads * d)`, as the linear layer before returned it."""
        return states[0].transpose(0, 1).flatten(1)

    def pool(self, states: Tensor, how: str) -> Tensor:
        """`(n, d)` float32 from `(1, N, d)`, in the order of the micro-batches; `how` as in `pool` of padded states."""
        tokens = states[0, : len(self._texts)].float()
        if how == "mean":  # not segment_reduce, which is not twice differentiable
            sums = tokens.new_zeros(len(self.lengths), tokens.shape[1]).index_add(0, self._texts, tokens)
            return sums / self.lengths.unsqueeze(1)
        ends = self.lengths.cumsum(0)
        return tokens.index_select(0, ends - self.lengths if how == "cls" else ends - 1)


def _extended(parts: list[Tensor]) -> Tensor:
    """The concatenated row, extended to `ROW_MULTIPLE`."""
    row = torch.cat(parts)
    return row[torch.arange(-(-len(row) // ROW_MULTIPLE) * ROW_MULTIPLE, device=row.device) % len(row)]


def make_packable(encoder: Any) -> None:
    """Switch an encoder permanently from transformers' sdpa to a form of it that accepts a `Packing`.

    Encoders that may depend on a token's place in other ways, or that use another attention, are left unchanged.
    """
    config: Any = getattr(encoder, "config", None)
    known = POSITIONS_FROM_ZERO | POSITIONS_AFTER_PADDING
    if getattr(config, "model_type", None) not in known or getattr(config, "is_decoder", False):
        return
    if config._attn_implementation != "sdpa":
        return
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    encoder.set_attn_implementation(_NAME)


def is_packable(encoder: Any) -> bool:
    """Whether `make_packable` switched the attention, and it was not switched again."""
    return getattr(getattr(encoder, "config", None), "_attn_implementation", None) == _NAME


def packed_arguments(encoder: Any, packing: Packing, name: str, inputs: Tensor) -> dict[str, Any]:
    """Arguments of the forward pass of a packable encoder.

    Args:
        name: of the argument that takes `inputs`.
        inputs: `(n, t)` ids or `(n, t, d)` word embeddings.
    """
    config = encoder.config
    first = config.pad_token_id + 1 if config.model_type in POSITIONS_AFTER_PADDING else 0
    return {
        name: inputs.flatten(0, 1)[packing.taken].unsqueeze(0),
        "position_ids": packing.positions.unsqueeze(0) + first,
        "packing": packing,
    }


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    packing: Packing | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention of a packed row, or without `packing` transformers' sdpa."""
    if packing is not None:
        return packing.attend(query, key, value, dropout, scaling), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    attended, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
    )
    return attended, None
