"""Which characters of a text each token covers, out of a fast tokenizer's answer: the same for teacher and student."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from teacher_cache.errors import TeacherError
from teacher_cache.tokens.request import CLOSING, END, ID, OPENING, OTHER, ROLE, START, TEXT_TOKEN


def pieces_of(
    offsets: npt.ArrayLike, special_mask: npt.ArrayLike, ids: npt.ArrayLike, prompt_characters: int
) -> npt.NDArray[np.int32]:
    """`(n, 4)` int32: id, first character, the one behind the last, role, as `TextTokens.pieces` keeps them.

    The first token, where it is special, is the opening one, the last the closing one; other specials and the
    tokens that lie within the prompt are no part of the text. A token that begins in the prompt and ends in the
    text (a space of the prompt that a piece carries in front) covers what it has of the text.

    Args:
        offsets: `(n, 2)` characters of prompt and text together, without padding.
        special_mask: `(n,)`, true for tokens that the tokenizer has added.
        ids: `(n,)`.
        prompt_characters: length of the prompt in front of the text.
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


def text_pieces(
    tokenizer: Any, texts: Sequence[str], *, prompt: str = "", max_length: int | None = None
) -> list[npt.NDArray[np.int32]]:
    """The pieces of each text as a transformers tokenizer cuts it, prompt in front, specials included.

    Args:
        max_length: tokens that a text is cut to, specials and prompt included; None cuts nothing.

    Raises:
        TeacherError: the tokenizer is written in Python and cannot say which characters a token covers.
    """
    require_offsets(tokenizer)
    if not texts:
        return []
    found = tokenizer(
        [prompt + text for text in texts],
        truncation=max_length is not None,
        max_length=max_length,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
        return_attention_mask=False,
        verbose=False,
    )
    parts = zip(found["offset_mapping"], found["special_tokens_mask"], found["input_ids"], strict=True)
    return [pieces_of(offsets, special, ids, len(prompt)) for offsets, special, ids in parts]


def require_offsets(tokenizer: Any) -> None:
    """Refuse a tokenizer that cannot say which characters a token covers.

    Raises:
        TeacherError: it is not one of the fast ones.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise TeacherError(
            f"the tokenizer {type(tokenizer).__name__} cannot say which characters a token covers, which token by "
            "token columns and alignments need: use a model whose folder has a tokenizer.json"
        )


def ignores_case(tokenizer: Any) -> bool:
    """Whether a text in lower case has the same tokens."""
    return bool(tokenizer("A")["input_ids"] == tokenizer("a")["input_ids"])
