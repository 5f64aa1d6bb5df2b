from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from distill.errors import ConfigError
from distill.objectives.base import Objective, StudentOutput, StudentShape, TeacherShape, TeacherTargets, TokenStates
from distill.objectives.cdm import CDM
from distill.objectives.simcse import info_nce
from teacher_cache.tokens.alignment import METHODS
from tests.contracts.objective_contract import SHAPE, TEACHER_SHAPE, TEXT_IDS, ObjectiveContract

Array = NDArray[np.float64]
TWO = StudentShape(dim=2, layers=1, pooling="mean")


def unit(rows: Array) -> Array:
    return np.asarray(rows / np.linalg.norm(rows, axis=-1, keepdims=True))


def array(tensor: Tensor) -> Array:
    return np.asarray(tensor.detach().double().numpy())


def blurred(alignment: Tensor) -> Tensor:
    """The same with some students' tokens averaging two of the teacher's, which sum to 1."""
    moved = alignment.roll(1, dims=2)
    half = 0.5 * alignment + 0.5 * moved
    out = alignment.clone()
    out[:, ::2] = half[:, ::2]
    return out


class TestCDM(ObjectiveContract):
    name = "cdm"
    used_states = frozenset({(0, 3), (1, 3)})
    uses_tokens = True

    def make(self) -> Objective:
        torch.manual_seed(0)
        return CDM(SHAPE, TEACHER_SHAPE)

    @pytest.mark.parametrize("preset", ["paper", "official", "fair"])
    def test_it_equals_numpy_token_by_token(self, preset: str) -> None:
        options: dict[str, Any] = CDM.presets[preset]
        objective = CDM(SHAPE, TEACHER_SHAPE, **options)
        student, teacher = self.student(objective), self.teacher(objective)
        assert teacher.alignment is not None
        teacher = replace(teacher, alignment=blurred(teacher.alignment))
        found = objective(student, teacher)

        assert objective.head is not None
        assert objective.token_head is not None
        assert student.tokens is not None
        assert teacher.tokens is not None
        assert teacher.alignment is not None
        s, t = array(student.layers[3, :6]) @ array(objective.head.weight).T, array(teacher.vectors)
        sentence = np.sum((unit(s) - unit(t)) ** 2)
        total, aligned = 0.0, 0
        states, targets = array(student.tokens.states), array(teacher.tokens.states)
        weight = array(objective.token_head.weight)
        for text in range(6):
            for place in range(states.shape[1]):
                shares = array(teacher.alignment[text, place])
                if student.tokens.special[text, place] or not shares.any():
                    continue
                mine = weight @ states[text, place]
                theirs = sum(share * target for share, target in zip(shares, targets[text], strict=True))
                total += np.sum((unit(mine) - unit(np.asarray(theirs))) ** 2)
                aligned += 1
        assert aligned > 10
        mean = preset != "fair"
        expected = 50 * total / (aligned * 8) if mean else 0.5 * total / aligned
        assert found["token"].item() == pytest.approx(expected, rel=1e-5)
        assert found["sentence"].item() == pytest.approx(sentence / (6 * 7) if mean else sentence / 6, rel=1e-5)
        text_ids = None if preset == "official" else TEXT_IDS
        contrast = 0.5 * info_nce(student.layers[3, :6], student.layers[3, 6:], 0.07, text_ids)
        assert found["simcse"].item() == pytest.approx(contrast.item(), rel=1e-6)

    def test_one_width_of_tokens_and_vectors_means_one_projection(self) -> None:
        shared = CDM(SHAPE, TeacherShape(dim=7, token_dim=7))
        assert len(list(shared.parameters())) == 1
        assert shared.token_head is None
        apart = CDM(SHAPE, TeacherShape(dim=7, token_dim=8))
        assert [tuple(weight.shape) for weight in apart.parameters()] == [(7, 5), (8, 5)]
        assert apart.head is not None
        assert apart.projection() is apart.head.weight


class TestCDMOfOneWidth(ObjectiveContract):
    """The shared projection gets its gradient from both terms, and is stored once."""

    name = "cdm"
    used_states = frozenset({(0, 3), (1, 3)})
    uses_tokens = True

    def make(self) -> Objective:
        torch.manual_seed(0)
        return CDM(SHAPE, replace(TEACHER_SHAPE, dim=8))

    def vectors(self, batch: int = 6) -> Tensor:
        return torch.randn(batch, 8, generator=torch.Generator().manual_seed(2))

    def test_its_projection_maps_student_to_teacher_width(self) -> None:
        projection = self.make().projection()
        assert projection is not None
        assert projection.shape == (8, 5)

    def test_every_preset_is_accepted(self) -> None:
        for options in CDM.presets.values():
            chosen: dict[str, Any] = options
            objective = CDM(SHAPE, replace(TEACHER_SHAPE, dim=8), **chosen)
            assert self.loss(objective, self.student(objective), self.teacher(objective)).isfinite()


def hand_made(alignment: list[list[float]]) -> tuple[StudentOutput, TeacherTargets]:
    """One text of three student tokens, the first special, and two teacher tokens."""
    mine = TokenStates(
        torch.tensor([[[5.0, 5.0], [2.0, 0.0], [0.0, 3.0]]]),
        torch.ones(1, 3, dtype=torch.bool),
        torch.tensor([[True, False, False]]),
    )
    theirs = TokenStates(
        torch.tensor([[[4.0, 0.0], [2.0, 8.0]]]),
        torch.ones(1, 2, dtype=torch.bool),
        torch.zeros(1, 2, dtype=torch.bool),
    )
    return (
        StudentOutput(torch.randn(2, 1, 2), tokens=mine),
        TeacherTargets(torch.ones(1, 2), torch.zeros(1), tokens=theirs, alignment=torch.tensor([alignment])),
    )


def test_aligned_tokens_by_hand() -> None:
    objective = CDM(TWO, TeacherShape(dim=2, token_dim=2), simcse_weight=0, sentence_weight=0, token_weight=1)
    assert objective.token_head is not None
    torch.nn.init.eye_(objective.token_head.weight)
    # Token 1 takes the mean (3, 4) of both teacher tokens and points (1, 0): 2 - 2 * 0.6 = 0.8. Token 2 has no
    # counterpart. Token 0 is special.
    student, teacher = hand_made([[1.0, 0.0], [0.5, 0.5], [0.0, 0.0]])
    assert objective(student, teacher)["token"].item() == pytest.approx(0.8 / 2)
    # Token 2, pointing (0, 1), takes the first teacher token (1, 0): 2.
    student, teacher = hand_made([[0.0, 0.0], [0.5, 0.5], [1.0, 0.0]])
    assert objective(student, teacher)["token"].item() == pytest.approx((0.8 + 2) / 2 / 2)


def test_a_batch_without_an_aligned_token_has_no_token_loss() -> None:
    objective = CDM(TWO, TeacherShape(dim=2, token_dim=2), simcse_weight=0, sentence_weight=0)
    student, teacher = hand_made([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    loss = objective(student, teacher)["token"]
    loss.backward()
    assert loss.item() == 0
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in objective.parameters())


def test_states_read_from_a_half_precision_cache_change_the_loss_by_its_rounding() -> None:
    contract = TestCDM()
    objective = CDM(SHAPE, TEACHER_SHAPE, reduction="sum_dim", token_weight=1)
    student, teacher = contract.student(objective), contract.teacher(objective)
    assert teacher.tokens is not None
    stored = replace(teacher.tokens, states=teacher.tokens.states.half().float())
    exact, rounded = objective(student, teacher), objective(student, replace(teacher, tokens=stored))
    assert rounded["token"].item() != exact["token"].item()
    # A unit vector is off by at most 2^-11 or so, its squared distance from another by 4 times that.
    assert rounded["token"].item() == pytest.approx(exact["token"].item(), abs=4 * 2**-11)


def test_its_alignments_exist() -> None:
    alignments = {CDM(SHAPE, TEACHER_SHAPE, alignment=name).needs.alignment for name in ("dtw_mean", "dtw_strict")}
    assert alignments <= set(METHODS)
    assert CDM(SHAPE, TEACHER_SHAPE).needs.alignment == "dtw_mean"
    official: dict[str, Any] = CDM.presets["official"]
    assert CDM(SHAPE, TEACHER_SHAPE, **official).needs.alignment == "dtw_strict"


@pytest.mark.parametrize(
    ("options", "views", "tokens", "alignment", "names", "owned"),
    [
        ({"simcse_weight": 0}, 1, True, "dtw_mean", {"token", "sentence"}, 2),
        ({"token_weight": 0}, 2, False, None, {"simcse", "sentence"}, 1),
        ({"sentence_weight": 0}, 2, True, "dtw_mean", {"simcse", "token"}, 1),
    ],
)
def test_a_term_of_weight_zero_needs_nothing(
    options: dict[str, Any], views: int, tokens: bool, alignment: str | None, names: set[str], owned: int
) -> None:
    objective = CDM(SHAPE, TEACHER_SHAPE, **options)
    assert (objective.needs.views, objective.needs.tokens, objective.needs.alignment) == (views, tokens, alignment)
    contract = TestCDM()
    assert objective(contract.student(objective), contract.teacher(objective)).keys() == names
    assert len(list(objective.parameters())) == owned


def test_a_teacher_without_token_states_is_refused_with_the_command_that_adds_them() -> None:
    with pytest.raises(ConfigError, match=r"objective cdm .* `tcache build --columns vectors,tokens"):
        CDM(SHAPE, TeacherShape(dim=7))
    assert CDM(SHAPE, TeacherShape(dim=7), token_weight=0).token_head is None


def test_a_missing_alignment_is_named() -> None:
    contract = TestCDM()
    objective = contract.make()
    student, teacher = contract.student(objective), contract.teacher(objective)
    with pytest.raises(ConfigError, match="cdm was given no alignment"):
        objective(student, replace(teacher, alignment=None))
    with pytest.raises(ConfigError, match="cdm was given no token states"):
        objective(replace(student, tokens=None), teacher)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_weight": -1}, "token_weight"),
        ({"sentence_weight": 0, "token_weight": 0}, "token_weight or sentence_weight above 0"),
        ({"alignment": "dtw"}, "alignment: expected one of dtw_mean, dtw_strict, found 'dtw'"),
        ({"reduction": "sum"}, "reduction: expected one of sum_dim, mean, found 'sum'"),
        ({"temperature": 0}, "temperature"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CDM(SHAPE, TEACHER_SHAPE, **options)
