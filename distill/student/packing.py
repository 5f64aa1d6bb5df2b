"""A batch as one row of its texts' own tokens, without padding, for encoders that can be asked so.

Layers that look at tokens one by one (embeddings, linear layers, norms, activations, dropout) see the tokens alone, one
text after the other; attention alone is computed in micro-batches (`distill.student.micro_batches`), each padded to its
longest text.
What a token's state is does not change. transformers' attention interface hands the layout on as a keyword argument, so
that a block which is computed again in the backward pass finds it too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distill.student.micro_batches import Piece

_NAME = "packed"

# A row is filled up to a multiple of so many tokens: memory that is taken and given back in ever other sizes frays, on
# a processor to twice as much after some hundred steps.
FILLED = 64

# Encoders in which a token's place counts in the attention and in a table of positions alone, whose rows can be named.
# RoBERTa's kind counts from the row behind that of its padding token.
FROM_ZERO = frozenset({"bert", "distilbert", "electra", "ernie"})
BEHIND_PADDING = frozenset({"camembert", "roberta", "xlm-roberta"})


@dataclass(frozen=True)
class Block:
    """Texts whose attention is computed together.

    Attributes:
        texts: how many.
        width: tokens of the longest one.
        seen: `(texts, 1, 1, width)` bool, which of the padded places are tokens; None where all are.
    """

    texts: int
    width: int
    seen: Tensor | None

    @property
    def places(self) -> int:
        return self.texts * self.width


class Packing:
    """Where the tokens of a batch stand in a row, text by text, and in the padded blocks of the attention.

    The row is filled up by a repetition of its beginning, which nothing looks at.

    Attributes:
        taken: `(N,)` places of the row's tokens in the flattened `(n, t)` batch.
        positions: `(N,)` of each in its text, from 0 on.
        lengths: `(n,)` tokens of each text, in the order of the pieces.
        blocks: one a piece.
    """

    def __init__(self, attention_mask: Tensor, found: Sequence[Piece]) -> None:
        """Lay out a batch.

        Args:
            attention_mask: `(n, t)`, with a token in every row.
            found: see `distill.student.micro_batches.pieces`.
        """
        places = torch.arange(attention_mask.numel(), device=attention_mask.device).view_as(attention_mask)
        masks = [attention_mask[piece.rows, piece.columns].bool() for piece in found]
        self.taken = _filled(
            [places[piece.rows, piece.columns][mask] for piece, mask in zip(found, masks, strict=True)]
        )
        self.positions = _filled([(mask.cumsum(1) - 1)[mask] for mask in masks])
        self.lengths = torch.cat([mask.sum(1) for mask in masks])
        self._owners = torch.arange(len(self.lengths), device=self.lengths.device).repeat_interleave(self.lengths)
        self.blocks = [
            Block(mask.shape[0], mask.shape[1], None if bool(mask.all()) else mask[:, None, None, :]) for mask in masks
        ]
        flat = torch.cat([mask.flatten() for mask in masks])
        self._kept = _filled([flat.nonzero().squeeze(1)])
        # A place without a token repeats the one before: nobody looks at it, and none of them is NaN.
        self._padded = (flat.cumsum(0) - 1).clamp(min=0)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, dropout: float, scale: float | None) -> Tensor:
        """`(1, N, heads, d)` of `(1, heads, N, d)` each, every token attending to those of its own text."""
        heads, width = query.shape[1], query.shape[3]
        sizes = [block.places for block in self.blocks]
        rows = [self._rows(states).index_select(0, self._padded).split(sizes) for states in (query, key, value)]
        attended = []
        for block, *parts in zip(self.blocks, *rows, strict=True):
            q, k, v = (part.view(block.texts, block.width, heads, width).transpose(1, 2) for part in parts)
            states = nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=block.seen, dropout_p=dropout, scale=scale
            )
            attended.append(states.transpose(1, 2).reshape(-1, heads * width))
        return torch.cat(attended).index_select(0, self._kept).view(1, -1, heads, width)

    @staticmethod
    def _rows(states: Tensor) -> Tensor:
        """`(1, heads, N, d)` to `(N, heads * d)`, as the linear layer before had it."""
        return states[0].transpose(0, 1).flatten(1)

    def pool(self, states: Tensor, how: str) -> Tensor:
        """`(n, d)` float32 from `(1, N, d)`, in the order of the pieces, as `pool` makes them of padded ones."""
        tokens = states[0, : len(self._owners)].float()
        if how == "mean":  # not segment_reduce, which cannot be differentiated twice
            sums = tokens.new_zeros(len(self.lengths), tokens.shape[1]).index_add(0, self._owners, tokens)
            return sums / self.lengths.unsqueeze(1)
        ends = self.lengths.cumsum(0)
        return tokens.index_select(0, ends - self.lengths if how == "cls" else ends - 1)


def _filled(parts: list[Tensor]) -> Tensor:
    row = torch.cat(parts)
    return row[torch.arange(-(-len(row) // FILLED) * FILLED, device=row.device) % len(row)]


def make_packable(encoder: Any) -> None:
    """Switch from transformers' sdpa to a form of it that a `Packing` can be handed to, for good.

    Encoders that are not known to be indifferent to a token's place, or that use another attention, are left alone.
    """
    config: Any = getattr(encoder, "config", None)
    if getattr(config, "model_type", None) not in FROM_ZERO | BEHIND_PADDING or getattr(config, "is_decoder", False):
        return
    if config._attn_implementation != "sdpa":
        return
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    encoder.set_attn_implementation(_NAME)


def is_packable(encoder: Any) -> bool:
    """Whether `make_packable` has been there, and nobody has switched the attention since."""
    return getattr(getattr(encoder, "config", None), "_attn_implementation", None) == _NAME


def packed_arguments(encoder: Any, packing: Packing, name: str, inputs: Tensor) -> dict[str, Any]:
    """What a packable encoder is called with.

    Args:
        name: of the argument that `inputs` are.
        inputs: `(n, t)` ids or `(n, t, d)` word embeddings.
    """
    config = encoder.config
    first = config.pad_token_id + 1 if config.model_type in BEHIND_PADDING else 0
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
    """transformers' sdpa, or the attention of a packed row."""
    if packing is not None:
        return packing.attend(query, key, value, dropout, scaling), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    attended, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
    )
    return attended, None
