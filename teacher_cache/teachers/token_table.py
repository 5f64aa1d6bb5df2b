"""Static models: a table of token vectors, in which the vector of a text is the mean of its tokens' rows.

They are folders of sentence-transformers' StaticEmbedding, which model2vec writes too. Here such a table is an encoder
without blocks: the state of a token is its row, whatever is around it, so that batching and training work as for any
other encoder. Special tokens are not added, and an unknown token counts in the mean, as in that library.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from teacher_cache.errors import TeacherError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PretrainedConfig, PreTrainedTokenizerFast


class TokenTable(nn.Module):
    """An encoder whose token states are rows of a table.

    Args:
        rows: `(V, d)` float, one row for each token id.
        unknown: id of the unknown token, whose row is not trained; None if there is none.

    Attributes:
        config: sizes, named as in transformers.
    """

    def __init__(self, rows: Tensor, unknown: int | None = None) -> None:
        super().__init__()
        # The gradient of a lookup leaves `padding_idx` out.
        self.rows = nn.Embedding.from_pretrained(rows, freeze=False, padding_idx=unknown)
        self.config = table_config(*rows.shape)

    def get_input_embeddings(self) -> nn.Embedding:
        """The table."""
        return self.rows

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        """A `BaseModelOutput` with `(n, t, d)` token states."""
        from transformers.modeling_outputs import BaseModelOutput

        return BaseModelOutput(last_hidden_state=self.rows(input_ids))

    def means(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """`(n, d)` means of the rows of each text, 0 for a text without tokens.

        Padding is not looked up, which takes a third of the time of a backward pass over padded states. Not an
        embedding bag, which is not twice differentiable.
        """
        tokens = attention_mask.bool()
        lengths = tokens.sum(1)
        rows = self.rows(input_ids[tokens])
        texts = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        return rows.new_zeros(len(lengths), rows.shape[1]).index_add(0, texts, rows) / lengths.clamp(min=1)[:, None]


def table_config(rows: int, width: int) -> "PretrainedConfig":
    """The sizes of a table as those of an encoder without blocks."""
    from transformers import PretrainedConfig

    return PretrainedConfig(vocab_size=rows, hidden_size=width, num_hidden_layers=0, num_attention_heads=1)


def load_token_table(folder: Path) -> TokenTable:
    """The table in a StaticEmbedding folder, in float32."""
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    module = StaticEmbedding.load(str(folder), local_files_only=True)
    unknown, rows = unknown_id(module.tokenizer), module.embedding.weight.detach().float()
    if len(rows) < (needed := 1 + max(module.tokenizer.get_vocab().values())):
        raise TeacherError(
            f"the tokenizer in {folder} has token ids up to {needed - 1}, but the table has {len(rows)} rows; save the "
            "model again"
        )
    return TokenTable(rows, unknown)


def unknown_id(tokenizer: "Tokenizer") -> int | None:
    """Id of the token that a tokenizer puts in place of what its vocabulary lacks; None if there is none."""
    model = tokenizer.model
    if hasattr(model, "unk_token"):
        return None if model.unk_token is None else tokenizer.token_to_id(model.unk_token)
    found: int | None = json.loads(tokenizer.to_str())["model"].get("unk_id")
    return found


def static_tokenizer(tokenizer: "Tokenizer") -> "PreTrainedTokenizerFast":
    """A transformers tokenizer that adds no special tokens to a text.

    Raises:
        TeacherError: it has no token to pad with.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    state = json.loads(tokenizer.to_str())
    named = (state["padding"] or {}).get("pad_token")
    special = [token["content"] for token in state["added_tokens"] if token["special"]]
    # A token of another kind would be cut out of texts before they are split.
    names = [named] if tokenizer.token_to_id(named or "") is not None else []
    names += [token for token in special if "pad" in token.lower()] + special
    if not names:
        raise TeacherError("its tokenizer has no padding token and no other special token to pad with")
    without = Tokenizer.from_str(json.dumps(state | {"post_processor": None, "padding": None, "truncation": None}))
    return PreTrainedTokenizerFast(tokenizer_object=without, pad_token=names[0])
