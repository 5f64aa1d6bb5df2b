"""Word pieces and their character offsets, for teacher and student."""

from pathlib import Path

import numpy as np
import pytest

from teacher_cache.errors import TeacherError
from teacher_cache.teachers.token_offsets import ignores_case, tokenize_with_offsets, word_pieces
from teacher_cache.tokens.request import CLOSING, OPENING, OTHER, ROLE, TEXT_TOKEN


def test_first_and_last_special_tokens_have_roles_and_no_characters() -> None:
    pieces = word_pieces([(0, 0), (0, 3), (3, 7), (0, 0)], [1, 0, 0, 1], [101, 5, 6, 102], 0)
    assert pieces.dtype == np.int32
    assert pieces.tolist() == [[101, 0, 0, OPENING], [5, 0, 3, TEXT_TOKEN], [6, 3, 7, TEXT_TOKEN], [102, 0, 0, CLOSING]]


def test_without_an_opening_token_no_token_has_its_role() -> None:
    assert word_pieces([(0, 2), (0, 0)], [0, 1], [7, 2], 0)[:, ROLE].tolist() == [TEXT_TOKEN, CLOSING]


def test_prompt_tokens_are_not_part_of_the_text_and_do_not_shift_offsets() -> None:
    # "ask: cat", the prompt being "ask: ": the third token includes the last space of the prompt.
    spans = [(0, 0), (0, 3), (3, 4), (4, 7), (7, 8), (0, 0)]
    pieces = word_pieces(spans, [1, 0, 0, 0, 0, 1], [1, 2, 3, 4, 5, 6], 5)
    assert pieces[:, ROLE].tolist() == [OPENING, OTHER, OTHER, TEXT_TOKEN, TEXT_TOKEN, CLOSING]
    assert pieces[:, 1:3].tolist() == [[0, 0], [0, 0], [0, 0], [0, 2], [2, 3], [0, 0]]


def test_special_tokens_between_first_and_last_are_not_part_of_the_text() -> None:
    spans = [(0, 0), (0, 0), (0, 2), (0, 0), (0, 0)]
    pieces = word_pieces(spans, [1, 1, 0, 1, 1], [1, 9, 2, 3, 4], 0)
    assert pieces[:, ROLE].tolist() == [OPENING, OTHER, TEXT_TOKEN, OTHER, CLOSING]


def test_a_text_without_tokens_has_no_pieces() -> None:
    assert word_pieces([], [], [], 0).shape == (0, 4)


def test_truncation_keeps_the_closing_token(minilm: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(minilm)
    text = "Unbelievable [SEP] naïve"
    (whole,) = tokenize_with_offsets(tokenizer, [text])
    assert [text[start:end] for _, start, end, _ in whole.tolist()] == ["", "Unbelievable", "[SEP]", "naïve", ""]
    assert whole[:, ROLE].tolist() == [
        OPENING,
        TEXT_TOKEN,
        TEXT_TOKEN,
        TEXT_TOKEN,
        CLOSING,
    ]  # [SEP] stands in the text itself
    (cut,) = tokenize_with_offsets(tokenizer, [text], prompt="query: ", max_length=5)
    assert cut[:, ROLE].tolist() == [OPENING, OTHER, OTHER, TEXT_TOKEN, CLOSING]
    assert cut[3, 1:3].tolist() == [0, 12]
    assert tokenize_with_offsets(tokenizer, []) == []


def test_a_tokenizer_without_offsets_is_refused() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(TeacherError, match=r"Slow returns no character offsets.* tokenizer\.json"):
        tokenize_with_offsets(Slow(), ["a"])


def test_whether_a_tokenizer_ignores_case(minilm: Path, tiny_student: Path) -> None:
    from transformers import AutoTokenizer

    assert ignores_case(AutoTokenizer.from_pretrained(minilm))
    assert not ignores_case(AutoTokenizer.from_pretrained(tiny_student))
