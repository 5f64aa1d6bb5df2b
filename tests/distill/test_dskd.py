import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from distill.errors import ConfigError
from distill.objectives.base import Objective, StudentOutput, StudentShape, TeacherShape, TeacherTargets, TokenStates
from distill.objectives.dskd import DSKD, CrossAttention
from distill.objectives.simcse import info_nce
from distill.objectives.tokens import direction_loss
from tests.contracts.objective_contract import SHAPE, TEACHER_SHAPE, TEXT_IDS, ObjectiveContract

Array = NDArray[np.float64]
PARITY: dict[str, Any] = DSKD.presets["parity"]


def unit(rows: Array) -> Array:
    return np.asarray(rows / np.linalg.norm(rows, axis=-1, keepdims=True))


def array(tensor: Tensor) -> Array:
    return np.asarray(tensor.detach().double().numpy())


def attended(attention: CrossAttention, queries: Array, keys: Array) -> Array:
    """Attention output of every query over the keys of one text without padding."""
    q, k, v = (array(layer.weight) for layer in (attention.query, attention.key, attention.value))
    scores = np.exp((queries @ q.T) @ (keys @ k.T).T / math.sqrt(len(q)))
    return np.asarray(scores / scores.sum(axis=1, keepdims=True) @ (keys @ v.T))


def squared(mine: Array, theirs: Array, reduction: str) -> Array:
    distances = (unit(mine) - unit(theirs)) ** 2
    return np.asarray(distances.sum(axis=-1) if reduction == "sum_dim" else distances.mean(axis=-1))


class TestDSKD(ObjectiveContract):
    name = "dskd"
    used_states = frozenset({(0, 3), (1, 3)})
    uses_tokens = True

    def make(self) -> Objective:
        torch.manual_seed(0)
        return DSKD(SHAPE, TEACHER_SHAPE)

    @pytest.mark.parametrize("preset", ["paper", "fair", "parity"])
    def test_it_equals_numpy_text_by_text(self, preset: str) -> None:
        options: dict[str, Any] = DSKD.presets[preset]
        objective = DSKD(SHAPE, TEACHER_SHAPE, **options)
        student, teacher = self.student(objective), self.teacher(objective)
        found = objective(student, teacher)

        reduction = options.get("reduction", "sum_dim")
        s, t = array(student.layers[3, :6]), array(teacher.vectors)
        assert objective.to_teacher is not None
        assert objective.to_student is not None
        there = squared(s @ array(objective.to_teacher.weight).T, t, reduction).mean()
        here = squared(s, t @ array(objective.to_student).T, reduction).mean()
        assert found["sentence"].item() == pytest.approx(there + here, rel=1e-5)

        assert student.tokens is not None
        assert teacher.tokens is not None
        assert objective.of_teacher is not None
        assert objective.of_student is not None
        ours: list[float] = []
        theirs: list[float] = []
        for text in range(6):
            mine, yours = student.tokens.take(torch.tensor([text])), teacher.tokens.take(torch.tensor([text]))
            states, targets = array(mine.states[mine.mask]), array(yours.states[yours.mask])
            kept, kept_targets = (~mine.special[mine.mask]).numpy(), (~yours.special[yours.mask]).numpy()
            ours.extend(squared(states, attended(objective.of_teacher, states, targets), reduction)[kept])
            theirs.extend(squared(targets, attended(objective.of_student, targets, states), reduction)[kept_targets])
        assert found["token"].item() == pytest.approx(np.mean(ours) + np.mean(theirs), rel=1e-5)

        text_ids = TEXT_IDS if options.get("mask_duplicates", True) else None
        contrast = info_nce(student.layers[3, :6], student.layers[3, 6:], 0.07, text_ids)
        assert torch.equal(found["simcse"], contrast)


class TestDSKDAsPorted(ObjectiveContract):
    name = "dskd"
    used_states = frozenset({(0, 3), (1, 3)})
    uses_tokens = True

    def make(self) -> Objective:
        torch.manual_seed(0)
        return DSKD(SHAPE, TEACHER_SHAPE, **PARITY)

    def test_the_way_back_stays_the_random_matrix_it_began_as(self) -> None:
        objective = DSKD(SHAPE, TEACHER_SHAPE, **PARITY)
        assert objective.to_student is not None
        assert "to_student" not in dict(objective.named_parameters())
        assert torch.equal(objective.state_dict()["to_student"], objective.to_student)
        bound = math.sqrt(6 / (SHAPE.dim + TEACHER_SHAPE.dim))
        assert 0 < objective.to_student.abs().max() <= bound


def test_a_direction_loss_by_hand() -> None:
    # (3, 4) and (0, 2) have a cosine of 0.8: 2 - 2 * 0.8 = 0.4; opposite vectors give 4.
    first, second = torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([[0.0, 2.0], [-5.0, 0.0]])
    assert direction_loss(first, second, "sum_dim").item() == pytest.approx((0.4 + 4) / 2)
    assert direction_loss(first, second, "mean").item() == pytest.approx((0.4 + 4) / 2 / 2)
    assert direction_loss(first, second, "sum_dim", torch.tensor([True, False])).item() == pytest.approx(0.4)
    assert direction_loss(first, second, "sum_dim", torch.tensor([False, False])).item() == 0


def test_a_mean_over_the_width_is_tiny_for_orthogonal_vectors() -> None:
    first, second = torch.eye(2, 384), torch.eye(2, 384).flip(0)
    assert direction_loss(first, second, "mean").item() == pytest.approx(2 / 384)
    assert direction_loss(first, second, "sum_dim").item() == pytest.approx(2)


def test_attention_takes_the_value_of_the_key_that_a_query_matches() -> None:
    attention = CrossAttention(2, 3)
    assert attention.query.out_features == 2
    with torch.no_grad():
        attention.query.weight.copy_(100 * torch.eye(2))
        attention.key.weight.copy_(torch.eye(2, 3))
        attention.value.weight.copy_(torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]))
    keys = torch.tensor([[[1.0, 0.0, 5.0], [0.0, 1.0, 7.0], [9.0, 9.0, 9.0]]])
    queries = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    # The third key would have the highest score, but is padding.
    found = attention(queries, keys, torch.tensor([[True, True, False]]))
    assert torch.allclose(found, torch.tensor([[[1.0, 5.0], [0.0, 7.0]]]))


def test_a_text_without_tokens_is_finite_and_adds_nothing() -> None:
    torch.manual_seed(1)
    objective = DSKD(SHAPE, TEACHER_SHAPE, simcse_weight=0, sentence_weight=0)
    states, targets = torch.randn(2, 4, 5, requires_grad=True), torch.randn(2, 3, 8)
    mask, teacher_mask = torch.ones(2, 4, dtype=torch.bool), torch.ones(2, 3, dtype=torch.bool)
    mask[1], teacher_mask[1] = False, False
    none = torch.zeros_like

    def loss(texts: slice) -> Tensor:
        mine = TokenStates(states[texts] * mask[texts, :, None], mask[texts], none(mask[texts]))
        there = teacher_mask[texts]
        theirs = TokenStates(targets[texts] * there[..., None], there, none(there))
        count = len(there)
        student = StudentOutput(torch.randn(4, count, 5), tokens=mine)
        terms: dict[str, Tensor] = objective(
            student, TeacherTargets(torch.randn(count, 7), torch.arange(count), tokens=theirs)
        )
        return terms["token"]

    both = loss(slice(0, 2))
    both.backward()
    assert both.item() == pytest.approx(loss(slice(0, 1)).item(), rel=1e-6)
    assert states.grad is not None
    assert states.grad.isfinite().all()


def test_states_read_from_a_half_precision_cache_change_the_loss_by_its_rounding() -> None:
    contract = TestDSKD()
    objective = contract.make()
    student, teacher = contract.student(objective), contract.teacher(objective)
    assert teacher.tokens is not None
    stored = replace(teacher.tokens, states=teacher.tokens.states.half().float())
    exact, rounded = objective(student, teacher), objective(student, replace(teacher, tokens=stored))
    assert rounded["token"].item() != exact["token"].item()
    # Every state is off by at most 2^-11 of itself; the loss is between 0 and 8.
    assert rounded["token"].item() == pytest.approx(exact["token"].item(), abs=8 * 2**-11)


def test_the_projection_is_the_one_into_the_teachers_space() -> None:
    objective = DSKD(SHAPE, TEACHER_SHAPE)
    assert objective.to_teacher is not None
    assert objective.projection() is objective.to_teacher.weight
    assert DSKD(SHAPE, TEACHER_SHAPE, sentence_weight=0).projection() is None


@pytest.mark.parametrize(
    ("options", "views", "tokens", "names", "owned"),
    [
        ({"simcse_weight": 0}, 1, True, {"sentence", "token"}, 8),
        ({"token_weight": 0}, 2, False, {"simcse", "sentence"}, 2),
        ({"sentence_weight": 0}, 2, True, {"simcse", "token"}, 6),
    ],
)
def test_a_term_of_weight_zero_needs_nothing(
    options: dict[str, Any], views: int, tokens: bool, names: set[str], owned: int
) -> None:
    objective = DSKD(SHAPE, TEACHER_SHAPE, **options)
    assert (objective.needs.views, objective.needs.tokens) == (views, tokens)
    contract = TestDSKD()
    assert objective(contract.student(objective), contract.teacher(objective)).keys() == names
    assert len(list(objective.parameters())) == owned


def test_a_teacher_without_token_states_is_refused_with_the_command_that_adds_them() -> None:
    with pytest.raises(ConfigError, match="tcache build --columns vectors,tokens"):
        DSKD(SHAPE, TeacherShape(dim=7))
    assert DSKD(SHAPE, TeacherShape(dim=7), token_weight=0).of_teacher is None


def test_missing_token_states_are_named() -> None:
    objective = DSKD(SHAPE, TEACHER_SHAPE)
    with pytest.raises(ConfigError, match="dskd was given no token states"):
        objective(StudentOutput(torch.randn(4, 2, 5)), TeacherTargets(torch.randn(2, 7), torch.arange(2)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"simcse_weight": -1}, "simcse_weight"),
        ({"sentence_weight": 0, "token_weight": 0}, "sentence_weight or token_weight above 0"),
        ({"reduction": "sum"}, "reduction: expected one of sum_dim, mean, found 'sum'"),
        ({"temperature": 0}, "temperature"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DSKD(StudentShape(5, 3, "mean"), TEACHER_SHAPE, **options)
