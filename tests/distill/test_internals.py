"""Internals of a model, compared with values computed from its weights."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel

from distill.errors import NeedsNotMet
from distill.student.internals import capture_internals
from tests.teacher_cache import tiny_teachers

IDS = torch.randint(4, 16, (3, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [1] * 6 + [0]])


def load(folder: Path, **options: Any) -> Any:
    return AutoModel.from_pretrained(folder, **options).eval()


def heads(tensor: Tensor) -> Tensor:
    """`(B, n, 2 * 8)` to `(B, 2, n, 8)`."""
    return tensor.unflatten(-1, (2, 8)).transpose(1, 2)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_and_values_are_softmax_of_queries_and_keys(tiny_student: Path, attention: str) -> None:
    model = load(tiny_student, attn_implementation=attention)
    with capture_internals(model) as passes, torch.no_grad():
        output = model(input_ids=IDS, attention_mask=MASK)
    (internals,) = passes
    assert internals.hidden.shape == (3, 3, 7, 16)
    assert torch.equal(internals.hidden[-1], output.last_hidden_state)
    for layer, block in enumerate(model.encoder.layer):
        projections, states = block.attention.self, internals.hidden[layer]
        scores = heads(projections.query(states)) @ heads(projections.key(states)).mT / math.sqrt(8)
        expected = scores.masked_fill(MASK[:, None, None] == 0, float("-inf")).softmax(-1)
        torch.testing.assert_close(internals.attention[layer], expected)
    torch.testing.assert_close(internals.values, heads(projections.value(internals.hidden[-2])))


def test_mpnet_adds_its_position_bias(tmp_path: Path) -> None:
    model = load(tiny_teachers.write_mpnet(tmp_path / "mpnet"))
    with capture_internals(model) as passes, torch.no_grad():
        model(input_ids=IDS, attention_mask=MASK)
    (internals,) = passes
    layer = model.encoder.layer[1].attention.attn
    bias = model.encoder.compute_position_bias(internals.hidden[1])
    scores = heads(layer.q(internals.hidden[1])) @ heads(layer.k(internals.hidden[1])).mT / math.sqrt(8) + bias
    expected = scores.masked_fill(MASK[:, None, None] == 0, float("-inf")).softmax(-1)
    torch.testing.assert_close(internals.attention[1], expected)
    torch.testing.assert_close(internals.values, heads(layer.v(internals.hidden[1])))


def test_gradients_flow_through_every_part(tiny_student: Path) -> None:
    model = load(tiny_student).train()
    for part in ("hidden", "attention", "values"):
        model.zero_grad()
        with capture_internals(model) as passes:
            model(input_ids=IDS, attention_mask=MASK)
        getattr(passes[0], part).square().sum().backward()
        gradient = model.embeddings.word_embeddings.weight.grad
        assert gradient.abs().sum() > 0
        assert gradient.isfinite().all()


def test_rows_sum_to_one_in_training_and_half_precision_comes_as_float32(tiny_student: Path) -> None:
    model = load(tiny_student).train()
    with capture_internals(model) as passes, torch.autocast("cpu", dtype=torch.bfloat16):
        model(input_ids=IDS, attention_mask=MASK)
    assert {tensor.dtype for tensor in vars(passes[0]).values()} == {torch.float32}
    torch.testing.assert_close(passes[0].attention.sum(-1), torch.ones(2, 3, 2, 7), atol=0.02, rtol=0)


def test_only_completed_passes_are_collected(tiny_student: Path) -> None:
    model = load(tiny_student)
    with capture_internals(model) as passes, torch.no_grad():
        model(input_ids=IDS, attention_mask=MASK)
        handle = model.encoder.layer[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(input_ids=IDS, attention_mask=MASK)
        handle.remove()
        model(input_ids=IDS[:, :3], attention_mask=MASK[:, :3])
    assert [one.values.shape[2] for one in passes] == [7, 3]
    assert [len(one.attention) for one in passes] == [2, 2]


def test_grouped_queries_are_refused(tmp_path: Path) -> None:
    model = load(tiny_teachers.write_qwen3(tmp_path / "qwen3"))
    refused = pytest.raises(NeedsNotMet, match=r"has 2 heads that share 1 values \(grouped queries\)")
    with refused, capture_internals(model), torch.no_grad():
        model(input_ids=IDS, attention_mask=MASK)
