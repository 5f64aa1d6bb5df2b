"""Micro-batches: the cheapest split, and the same states as for the padded batch."""

from itertools import combinations
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModel

from distill.config import StudentConfig
from distill.student.micro_batches import CPU_OVERHEAD, micro_batches, split_points
from distill.student.packing import (
    POSITIONS_AFTER_PADDING,
    POSITIONS_FROM_ZERO,
    ROW_MULTIPLE,
    Packing,
    is_packable,
    make_packable,
    packed_arguments,
)
from distill.student.student import Student
from teacher_cache.teachers.pooling import needs_position_ids, pool, position_ids
from tests.conftest import varied_texts
from tests.teacher_cache.tiny_teachers import write_bert, write_mpnet, write_qwen3, write_xlm_roberta


def cost(lengths: list[int], ends: tuple[int, ...], overhead: int) -> int:
    starts = (0, *ends[:-1])
    return sum((end - start) * max(lengths[start:end]) + overhead for start, end in zip(starts, ends, strict=True))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8).map(sorted), st.integers(0, 60))
def test_no_other_split_is_cheaper(lengths: list[int], overhead: int) -> None:
    every = [
        (*inner, len(lengths)) for count in range(len(lengths)) for inner in combinations(range(1, len(lengths)), count)
    ]
    found = tuple(split_points(lengths, overhead))
    assert found in every
    assert cost(lengths, found, overhead) == min(cost(lengths, ends, overhead) for ends in every)


def masks(lengths: list[int], side: str) -> torch.Tensor:
    width = max(lengths)
    places = torch.arange(width).expand(len(lengths), width)
    counts = torch.tensor(lengths)[:, None]
    return (places < counts if side == "right" else places >= width - counts).long()


@given(st.lists(st.integers(1, 90), min_size=1, max_size=12), st.sampled_from(["left", "right"]))
def test_every_token_is_in_one_micro_batch(lengths: list[int], side: str) -> None:
    mask = masks(lengths, side)
    seen = torch.zeros_like(mask)
    for part in micro_batches(mask):
        own_mask = mask[part.rows, part.columns]
        assert bool((own_mask.sum(1) == own_mask.shape[1]).any())  # as wide as its longest text
        seen[part.rows, part.columns] += own_mask
    assert torch.equal(seen, mask)


def test_a_batch_of_one_length_is_not_split() -> None:
    (part,) = micro_batches(masks([20] * 64, "right"))
    assert part.rows.tolist() == list(range(64))
    assert part.columns == slice(20)


WRITERS = {
    "bert": write_bert,
    "mpnet": write_mpnet,
    "qwen": write_qwen3,
    "xlm-roberta": write_xlm_roberta,
}


@pytest.fixture(scope="module", params=WRITERS)
def student(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Student:
    folder = WRITERS[request.param](tmp_path_factory.mktemp("models") / request.param)
    return Student.load(StudentConfig(str(folder)))


def inputs_of(student: Student, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Six texts: a sentence repeated 1 to 6 times."""
    student.tokenizer.padding_side = side
    texts = [" ".join([text] * times) for times, text in enumerate(varied_texts(6), start=1)]
    tokens = student.tokenizer(texts, padding=True, truncation=True, max_length=student.max_length, return_tensors="pt")
    return tokens["input_ids"], tokens["attention_mask"]


def differentiated(student: Student, states: torch.Tensor) -> list[torch.Tensor]:
    weights = torch.linspace(-1, 1, states.numel()).view_as(states)
    found = torch.autograd.grad((states * weights).sum(), list(student.parameters()), allow_unused=True)
    return [gradient for gradient in found if gradient is not None]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("pooling", ["mean", "cls", "last_token"])
def test_states_and_gradients_are_those_of_the_padded_batch(
    student: Student, side: str, recompute: bool, pooling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, mask = inputs_of(student, side)
    pooled = Student(student.encoder, student.tokenizer, pooling=pooling, max_length=student.max_length).eval()
    options = {"position_ids": position_ids(mask)} if needs_position_ids(pooled.encoder, side) else {}
    output = pooled.encoder(input_ids=ids, attention_mask=mask, output_hidden_states=True, **options)
    whole = torch.stack([pool(state, mask, pooling) for state in output.hidden_states])
    monkeypatch.setattr("distill.student.micro_batches.CPU_OVERHEAD", 0)
    assert len(micro_batches(mask)) > 2
    pooled.recompute_micro_batches = recompute
    monkeypatch.setattr("distill.student.student.MICRO_BATCH_TOKENS", int(mask.sum()) // 2)
    found = pooled(ids, mask)
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-5)
    for gradient, expected in zip(differentiated(pooled, found), differentiated(pooled, whole), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-4)


def test_layers_of_packable_encoders_process_only_tokens(student: Student) -> None:
    ids, mask = inputs_of(student, "right")
    seen: list[int] = []
    layer = next(module for module in student.encoder.modules() if isinstance(module, torch.nn.Linear))
    hook = layer.register_forward_pre_hook(lambda module, given: seen.append(given[0][..., 0].numel()))
    student(ids, mask)
    hook.remove()
    row = -(-int(mask.sum()) // ROW_MULTIPLE) * ROW_MULTIPLE
    assert (seen == [row]) == (student.encoder.config.model_type in POSITIONS_FROM_ZERO | POSITIONS_AFTER_PADDING)


@pytest.mark.parametrize("kind", sorted(POSITIONS_FROM_ZERO | POSITIONS_AFTER_PADDING))
def test_packed_states_are_those_of_the_padded_batch(kind: str) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = AutoConfig.for_model(kind, vocab_size=50, pad_token_id=1, initializer_range=0.5, **sizes)
    encoder = AutoModel.from_config(config).eval()
    mask = masks([3, 9, 5, 9], "right")
    ids = torch.randint(2, 50, mask.shape) * mask + 1 - mask
    with torch.no_grad():
        expected = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        make_packable(encoder)
        assert is_packable(encoder)
        packing = Packing(mask, micro_batches(mask))
        found = encoder(**packed_arguments(encoder, packing, "input_ids", ids)).last_hidden_state[0]
    torch.testing.assert_close(found, expected.flatten(0, 1)[packing.taken], rtol=1e-4, atol=1e-5)


def test_a_text_without_tokens_does_not_change_the_others(tmp_path: Path) -> None:
    student = Student.load(StudentConfig(str(write_bert(tmp_path / "bert")), pooling="cls")).eval()
    ids, mask = inputs_of(student, "right")
    mask[2] = 0
    with torch.no_grad():
        found = student(ids, mask)
        others = [0, 1, 3, 4, 5]
        torch.testing.assert_close(found[:, others], student(ids[others], mask[others]), rtol=1e-4, atol=1e-5)
        for row in others:
            assert not torch.allclose(found[-1, 2], found[-1, row])


def test_an_encoder_without_an_embedding_table_takes_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as CANINE, which takes embeddings but has no single table."""
    folder = write_mpnet(tmp_path / "mpnet")
    expected = Student.load(StudentConfig(str(folder))).eval()

    def refused(self: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr("distill.student.micro_batches.CPU_OVERHEAD", 0)
    inputs = inputs_of(expected, "right")
    with torch.no_grad():
        states = expected(*inputs)
        monkeypatch.setattr(type(expected.encoder), "get_input_embeddings", refused)
        torch.testing.assert_close(Student.load(StudentConfig(str(folder))).eval()(*inputs), states)


def test_a_saved_encoder_has_no_trace_of_packing(tmp_path: Path) -> None:
    student = Student.load(StudentConfig(str(write_bert(tmp_path / "bert"))))
    assert is_packable(student.encoder)
    student.save_encoder(tmp_path / "saved")
    assert "packed" not in (tmp_path / "saved" / "config.json").read_text()


def test_a_micro_batch_must_save_more_than_its_overhead() -> None:
    """Eight texts of 10 tokens and a longer one: split only if that saves more than the overhead."""
    longest = 10 + CPU_OVERHEAD // 8
    assert len(micro_batches(masks([10] * 8 + [longest], "right"))) == 1
    assert len(micro_batches(masks([10] * 8 + [longest + 1], "right"))) == 2
