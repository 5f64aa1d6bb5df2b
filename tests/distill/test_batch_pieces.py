"""Batches in pieces: the cheapest cut, and a student that says the same of them."""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distill.config import StudentConfig
from distill.pieces import PROCESSOR_OVERHEAD, Piece, cut, pieces
from distill.student import Student
from tests.conftest import varied_texts
from tests.teacher_cache.tiny_teachers import write_bert, write_mpnet, write_qwen3, write_xlm_roberta


def cost(lengths: list[int], ends: tuple[int, ...], overhead: int) -> int:
    starts = (0, *ends[:-1])
    return sum((end - start) * max(lengths[start:end]) + overhead for start, end in zip(starts, ends, strict=True))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8).map(sorted), st.integers(0, 60))
def test_no_other_cut_is_cheaper(lengths: list[int], overhead: int) -> None:
    every = [
        (*inner, len(lengths)) for count in range(len(lengths)) for inner in combinations(range(1, len(lengths)), count)
    ]
    found = tuple(cut(lengths, overhead))
    assert found in every
    assert cost(lengths, found, overhead) == min(cost(lengths, ends, overhead) for ends in every)


def masks(lengths: list[int], side: str) -> torch.Tensor:
    width = max(lengths)
    places = torch.arange(width).expand(len(lengths), width)
    counts = torch.tensor(lengths)[:, None]
    return (places < counts if side == "right" else places >= width - counts).long()


@given(st.lists(st.integers(1, 90), min_size=1, max_size=12), st.sampled_from(["left", "right"]))
def test_every_token_is_in_one_piece(lengths: list[int], side: str) -> None:
    mask = masks(lengths, side)
    seen = torch.zeros_like(mask)
    for piece in pieces(mask):
        part = mask[piece.rows, piece.columns]
        assert bool((part.sum(1) == part.shape[1]).any())  # no wider than its longest
        seen[piece.rows, piece.columns] += part
    assert torch.equal(seen, mask)


def test_a_batch_of_one_length_stays_whole() -> None:
    (piece,) = pieces(masks([20] * 64, "right"))
    assert piece.rows.tolist() == list(range(64))
    assert piece.columns == slice(20)


@pytest.fixture(scope="module", params=["bert", "mpnet", "xlm-roberta", "qwen"])
def student(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Student:
    write = {"bert": write_bert, "mpnet": write_mpnet, "xlm-roberta": write_xlm_roberta, "qwen": write_qwen3}
    folder = write[request.param](tmp_path_factory.mktemp("models") / request.param)
    return Student.load(StudentConfig(str(folder)))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("recompute", [False, True])
def test_pieces_say_what_the_whole_batch_says(
    student: Student, side: str, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = student.tokenizer
    tokenizer.padding_side = side
    asked = Student(student.encoder, tokenizer, pooling=student.pooling, max_length=student.max_length).eval()
    texts = [" ".join([text] * times) for times, text in enumerate(varied_texts(6), start=1)]
    tokens = tokenizer(texts, padding=True, truncation=True, max_length=student.max_length, return_tensors="pt")
    inputs = (tokens["input_ids"], tokens["attention_mask"])

    def said() -> tuple[torch.Tensor, list[torch.Tensor]]:
        states = asked(*inputs)
        weights = torch.linspace(-1, 1, states.numel()).view_as(states)
        found = torch.autograd.grad((states * weights).sum(), list(asked.parameters()), allow_unused=True)
        return states, [gradient for gradient in found if gradient is not None]

    monkeypatch.setattr("distill.pieces.PROCESSOR_OVERHEAD", 0)
    assert len(pieces(tokens["attention_mask"])) > 2
    asked.recompute_pieces = recompute
    in_pieces, gradients = said()
    everything = Piece(torch.arange(len(texts)), slice(None))
    monkeypatch.setattr(asked, "pieces", lambda attention_mask: [everything])
    asked.recompute_pieces = False
    whole, expected = said()
    torch.testing.assert_close(in_pieces, whole, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_a_piece_more_has_to_pay_for_itself() -> None:
    """Eight texts of 10 tokens beside one of 11 + the overhead's eighth: cut off only where that is worth it."""
    worth = 10 + PROCESSOR_OVERHEAD // 8
    assert len(pieces(masks([10] * 8 + [worth], "right"))) == 1
    assert len(pieces(masks([10] * 8 + [worth + 1], "right"))) == 2
