"""Word pieces of a text with their character offsets, from a fast tokenizer; the same for teacher and student."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from teacher_cache.errors import TeacherError
from teacher_cache.tokens.request import CLOSING, END, ID, OPENING, OTHER, ROLE, START, TEXT_TOKEN


def word_pieces(
    offsets: npt.ArrayLike, special_mask: npt.ArrayLike, ids: npt.ArrayLike, prompt_characters: int
) -> npt.NDArray[np.int32]:
    """`(n, 4)` int32: id, start, end and role of each token, as in `TextTokens.pieces`.

    A special token is the opening one if it is first, the closing one if it is last. Other special tokens and tokens
    inside the prompt are not part of the text. A token that starts in the prompt and ends in the text (when it
    includes the space before it) gets its part of the text.

    Args:
        offsets: `(n, 2)` characters in prompt and text together, without padding.
        special_mask: `(n,)`, true for tokens that the tokenizer added.
        prompt_characters: length of the prompt before the text.
    """
    spans = np.asarray(offsets, dtype=np.int32).reshape(-1, 2)
    special = np.asarray(special_mask, dtype=np.bool_)
    count = len(spans)
    pieces = np.zeros((count, 4), dtype=np.int32)
    pieces[:, ID] = np.asarray(ids, dtype=np.int64)
    in_prompt = (spans[:, 0] < prompt_characters) & (spans[:, 1] <= prompt_characters)
    text = ~special & ~in_prompt
    pieces[text, START] = np.maximum(spans[text, 0] - prompt_characters, 0)
    pieces[text, END] = spans[text, 1] - prompt_characters
    pieces[:, ROLE] = np.where(text, TEXT_TOKEN, OTHER)
    if count and special[-1]:
        pieces[-1, ROLE] = CLOSING
    if count and special[0]:
        pieces[0, ROLE] = OPENING
    return pieces


def encoding_word_pieces(encoding: Any, prompt: str) -> list[npt.NDArray[np.int32]]:
    """`word_pieces` of each text of an unpadded tokenizer output with offsets and special token masks."""
    fields = zip(encoding["offset_mapping"], encoding["special_tokens_mask"], encoding["input_ids"], strict=True)
    return [word_pieces(offsets, special, ids, len(prompt)) for offsets, special, ids in fields]


def tokenize_with_offsets(
    tokenizer: Any, texts: Sequence[str], *, prompt: str = "", max_length: int | None = None
) -> list[npt.NDArray[np.int32]]:
    """`word_pieces` of each text, after the prompt; `max_length` tokens include special tokens and prompt."""
    check_fast_tokenizer(tokenizer)
    if not texts:
        return []
    encoding = tokenizer(
        [prompt + text for text in texts],
        truncation=max_length is not None,
        max_length=max_length,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
        return_attention_mask=False,
        verbose=False,
    )
    return encoding_word_pieces(encoding, prompt)


def check_fast_tokenizer(tokenizer: Any) -> None:
    """Check that a tokenizer returns character offsets."""
    if not getattr(tokenizer, "is_fast", False):
        raise TeacherError(
            f"the tokenizer {type(tokenizer).__name__} returns no character offsets, which token columns and "
            "alignments need: use a model whose folder has a tokenizer.json"
        )


def ignores_case(tokenizer: Any) -> bool:
    """Whether a text has the same tokens in lower case."""
    return bool(tokenizer("A")["input_ids"] == tokenizer("a")["input_ids"])
