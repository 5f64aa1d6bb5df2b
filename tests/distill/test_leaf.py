import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from distill.errors import ConfigError, NeedsNotMet
from distill.objectives.base import (
    Internals,
    Needs,
    Objective,
    StudentOutput,
    StudentShape,
    TeacherShape,
    TeacherTargets,
    TokenStates,
)
from distill.objectives.leaf import Leaf
from tests.contracts.objective_contract import (
    SHAPE,
    STUDENT_LENGTHS,
    TEACHER_SHAPE,
    TEXT_IDS,
    ObjectiveContract,
    padded,
    tokens,
)

Array = npt.NDArray[Any]
# Two heads each, four blocks of the teacher above two of the student; head widths differ.
STUDENT = StudentShape(dim=6, layers=2, pooling="mean", heads=2)
TEACHER = TeacherShape(dim=7, token_dim=8, layers=5, heads=2, causal=False)
LENGTHS = torch.tensor([5, 3, 4])


def made(student: StudentShape = STUDENT, teacher: TeacherShape = TEACHER, **options: Any) -> Leaf:
    torch.manual_seed(0)
    return Leaf(student, teacher, **options)


def distance(states: list[list[float]], vectors: list[list[float]], teacher: TeacherShape, **options: Any) -> float:
    """The term "leaf" with W_out = I."""
    objective = made(StudentShape(2, 1, "mean"), teacher, **options)
    torch.nn.init.eye_(objective.out.weight)
    layers = torch.tensor([states, states])
    found = objective(StudentOutput(layers), TeacherTargets(torch.tensor(vectors), torch.arange(len(states))))
    assert found.keys() == {"leaf"}
    loss: float = found["leaf"].item()
    return loss


class TestLeaf(ObjectiveContract):
    name = "leaf"
    used_states = frozenset({(0, 3)})

    def make(self) -> Objective:
        return made(SHAPE, TEACHER_SHAPE)

    @pytest.mark.parametrize("normalize", [True, False])
    @pytest.mark.parametrize("squared", [True, False])
    def test_it_equals_numpy_in_double_precision(self, normalize: bool, squared: bool) -> None:
        objective = made(SHAPE, TEACHER_SHAPE, normalize=normalize, squared=squared)
        states, vectors = self.states(1), self.vectors()
        found = objective(StudentOutput(states), TeacherTargets(vectors, TEXT_IDS))["leaf"]
        y = states[-1].double().numpy() @ objective.out.weight.detach().double().numpy().T
        t = vectors.double().numpy()
        if normalize:
            y, t = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (y, t))
        expected = (np.linalg.norm(y - t, axis=1) ** (2 if squared else 1)).mean()
        assert found.item() == pytest.approx(expected, rel=1e-5)


class TestLeafWithDistilBERT(ObjectiveContract):
    """The contract for the added loss that needs only token states."""

    name = "leaf"
    used_states = frozenset({(0, 3)})
    uses_tokens = True

    def make(self) -> Objective:
        return made(SHAPE, TEACHER_SHAPE, distilbert_weight=1.0)

    def teacher(self, objective: Objective, batch: int = 6) -> TeacherTargets:
        """The same tokens as the student's, padded on the other side."""
        given = tokens(STUDENT_LENGTHS[:batch], 8, 4, left=True, maps=0, importance=False)
        return replace(super().teacher(objective, batch), tokens=given)


def test_the_distance_is_squared_only_by_option() -> None:
    # The errors are (3, 4) and 0: lengths 5 and 0.
    raw = TeacherShape(2, normalized=False)
    assert distance([[4, 5], [1, 2]], [[1, 1], [1, 2]], raw) == pytest.approx(2.5)
    assert distance([[4, 5], [1, 2]], [[1, 1], [1, 2]], raw, squared=True) == pytest.approx(12.5)


@pytest.mark.parametrize(
    ("normalized", "option", "expected"),
    [
        # Directions (3/5, 4/5) and (1, 0) are sqrt(0.4^2 + 0.8^2) apart; the vectors themselves sqrt(2^2 + 4^2).
        (None, None, math.sqrt(0.8)),
        (True, None, math.sqrt(0.8)),
        (False, None, math.sqrt(20)),
        (False, True, math.sqrt(0.8)),
        (True, False, math.sqrt(20)),
    ],
)
def test_vectors_are_normalized_unless_the_teacher_is_known_not_to_be(
    normalized: bool | None, option: bool | None, expected: float
) -> None:
    found = distance([[3, 4]], [[1, 0]], TeacherShape(2, normalized=normalized), normalize=option)
    assert found == pytest.approx(expected)


def test_loss_and_gradient_are_zero_if_student_equals_teacher() -> None:
    objective = made(StudentShape(2, 1, "mean"), TeacherShape(2, normalized=False))
    torch.nn.init.eye_(objective.out.weight)
    layers = torch.ones(2, 3, 2, requires_grad=True)
    loss = objective(StudentOutput(layers), TeacherTargets(torch.ones(3, 2), torch.arange(3)))["leaf"]
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=2e-6)
    assert layers.grad is not None
    assert torch.equal(layers.grad, torch.zeros_like(layers))


def test_the_projection_is_the_bias_free_w_out() -> None:
    objective = made()
    assert objective.projection() is objective.out.weight
    assert [tuple(parameter.shape) for parameter in objective.parameters()] == [(7, 6)]
    assert not objective.in_teacher_space


# --- The added losses.


def internals(given: TokenStates, layers: int, heads: int, head_dim: int, seed: int) -> TokenStates:
    """The same tokens with random states of every layer and head, also at padding."""
    generator = torch.Generator().manual_seed(seed)
    batch, n, dim = given.states.shape
    hidden = torch.randn(layers + 1, batch, n, dim, generator=generator)
    scores = torch.randn(layers, batch, heads, n, n, generator=generator)
    attention = scores.masked_fill(~given.mask[None, :, None, None, :], -torch.inf).softmax(-1)
    values = torch.randn(batch, heads, n, head_dim, generator=generator)
    return replace(given, states=hidden[-1], internals=Internals(hidden, attention, values))


def student_tokens(lengths: Tensor = LENGTHS) -> TokenStates:
    return internals(tokens(lengths, 6, 1, left=False, maps=0, importance=False), 2, 2, 3, 1)


def teacher_tokens(lengths: Tensor = LENGTHS) -> TokenStates:
    return internals(tokens(lengths, 8, 2, left=True, maps=0, importance=False), 5, 2, 4, 2)


def added(objective: Leaf, student: TokenStates, teacher: TokenStates) -> dict[str, Tensor]:
    """The added terms."""
    batch = len(student.mask)
    layers = torch.ones(3, batch, objective.out.in_features)
    targets = TeacherTargets(torch.ones(batch, objective.out.out_features), torch.arange(batch), tokens=teacher)
    found: dict[str, Tensor] = objective(StudentOutput(layers, tokens=student), targets)
    return {name: term for name, term in found.items() if name != "leaf"}


def texts(given: TokenStates) -> list[dict[str, Array]]:
    """What was given of each text, without padding, in double precision."""
    assert given.internals is not None
    found = []
    for text, mask in enumerate(given.mask):
        kept = mask.nonzero()[:, 0]
        found.append(
            {
                "hidden": given.internals.hidden[:, text][:, kept].double().numpy(),
                "attention": given.internals.attention[:, text][:, :, kept][..., kept].double().numpy(),
                "values": given.internals.values[text][:, kept].double().numpy(),
            }
        )
    return found


def softmax(x: Array) -> Array:
    return np.asarray(np.exp(x) / np.exp(x).sum(-1, keepdims=True))


def kl(teacher: Array, student: Array) -> Array:
    return np.asarray((teacher * np.log(teacher / student)).sum(-1))


def distilbert_in_numpy(student: list[dict[str, Array]], teacher: list[dict[str, Array]], w: Array) -> float:
    found = []
    for mine, theirs in zip(student, teacher, strict=True):
        a, b = mine["hidden"][-1] @ w.T, theirs["hidden"][-1]
        found += list(1 - (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1))
    return float(np.mean(found))


def minilm_in_numpy(student: list[dict[str, Array]], teacher: list[dict[str, Array]]) -> float:
    attention, values = [], []
    for mine, theirs in zip(student, teacher, strict=True):
        attention += list(kl(theirs["attention"][-1], mine["attention"][-1]).mean(0))
        relation = [softmax(v @ v.swapaxes(1, 2) / math.sqrt(v.shape[-1])) for v in (theirs["values"], mine["values"])]
        values += list(kl(*relation).mean(0))
    return float(np.mean(attention) + np.mean(values))


def tinybert_in_numpy(student: list[dict[str, Array]], teacher: list[dict[str, Array]], w: Array) -> float:
    total = 0.0
    for block in (1, 2):  # g(l) = floor(5 / 2) l
        states, maps = [], []
        for mine, theirs in zip(student, teacher, strict=True):
            states += list(((mine["hidden"][block] @ w.T - theirs["hidden"][2 * block]) ** 2).mean(-1))
            maps += list(((mine["attention"][block - 1] - theirs["attention"][2 * block - 1]) ** 2).mean(0).reshape(-1))
        total += float(np.mean(states) + np.mean(maps))
    return total


def test_the_added_losses_equal_numpy_in_double_precision() -> None:
    objective = made(distilbert_weight=2.0, minilm_weight=3.0, tinybert_weight=0.5)
    student, teacher = student_tokens(), teacher_tokens()
    found = added(objective, student, teacher)
    assert isinstance(objective.token_map, torch.nn.Linear)
    w = objective.token_map.weight.detach().double().numpy()
    one, other = texts(student), texts(teacher)
    assert found["distilbert"].item() == pytest.approx(2 * distilbert_in_numpy(one, other, w), rel=1e-5)
    assert found["minilm"].item() == pytest.approx(3 * minilm_in_numpy(one, other), rel=1e-5)
    assert found["tinybert"].item() == pytest.approx(0.5 * tinybert_in_numpy(one, other, w), rel=1e-5)


def test_distilbert_by_hand() -> None:
    # Cosines of the three tokens 1, 0.6 and 0; the teacher's are padded on the left.
    shape = StudentShape(2, 1, "mean")
    objective = made(shape, TeacherShape(2, token_dim=2), distilbert_weight=1.0)
    mine = TokenStates(
        torch.tensor([[[2.0, 0], [3, 4]], [[0, 1], [9, 9]]]),
        torch.tensor([[True, True], [True, False]]),
        torch.zeros(2, 2, dtype=torch.bool),
    )
    theirs = TokenStates(
        torch.tensor([[[9.0, 9], [1, 0], [1, 0]], [[9, 9], [9, 9], [1, 0]]]),
        torch.tensor([[False, True, True], [False, False, True]]),
        torch.zeros(2, 3, dtype=torch.bool),
    )
    assert added(objective, mine, theirs)["distilbert"].item() == pytest.approx((0 + 0.4 + 1) / 3)
    assert isinstance(objective.token_map, torch.nn.Identity)


def test_the_added_losses_are_zero_if_student_equals_teacher() -> None:
    teacher = TeacherShape(6, token_dim=6, layers=2, heads=2, causal=False)
    objective = made(teacher=teacher, distilbert_weight=1.0, minilm_weight=1.0, tinybert_weight=1.0)
    for term in added(objective, student_tokens(), student_tokens()).values():
        assert term.item() == pytest.approx(0, abs=1e-6)


def test_more_padding_on_either_side_changes_nothing() -> None:
    objective = made(distilbert_weight=1.0, minilm_weight=1.0, tinybert_weight=1.0)
    student, teacher = student_tokens(), teacher_tokens()
    expected = added(objective, student, teacher)
    found = added(objective, wider(student, 2, 1), wider(teacher, 1, 3))
    for name, term in expected.items():
        assert found[name].item() == pytest.approx(term.item(), rel=1e-6), name


def wider(given: TokenStates, before: int, after: int) -> TokenStates:
    pad, inside = torch.nn.functional.pad, given.internals
    assert inside is not None
    one = (0, 0, before, after)
    two = (before, after, before, after)
    more = Internals(pad(inside.hidden, one, value=5), pad(inside.attention, two), pad(inside.values, one, value=5))
    return replace(padded(given, before, after), internals=more)


def test_values_at_padding_affect_neither_loss_nor_gradient() -> None:
    objective = made(distilbert_weight=1.0, minilm_weight=1.0, tinybert_weight=1.0)
    student, teacher = student_tokens(), teacher_tokens()
    expected = added(objective, student, teacher)
    dirty = with_nan(student)
    assert dirty.internals is not None
    read = [dirty.states, dirty.internals.hidden, dirty.internals.attention, dirty.internals.values]
    for tensor in read:
        tensor.requires_grad_()
    found = added(objective, dirty, with_nan(teacher))
    torch.stack(list(found.values())).sum().backward()
    for name, term in expected.items():
        assert torch.equal(found[name], term), name
    for tensor in (*read, *objective.token_map.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()


def with_nan(given: TokenStates) -> TokenStates:
    """NaN at padding, also in the attention of padding."""
    inside = given.internals
    assert inside is not None
    away = ~given.mask
    dirty = Internals(
        inside.hidden.masked_fill(away[..., None], math.nan),
        inside.attention.masked_fill(away[:, None, :, None], math.nan),
        inside.values.masked_fill(away[:, None, :, None], math.nan),
    )
    return replace(given, states=given.states.masked_fill(away[..., None], math.nan), internals=dirty)


def test_a_text_that_one_model_truncates_is_skipped() -> None:
    objective = made(distilbert_weight=1.0, minilm_weight=1.0, tinybert_weight=1.0)
    kept = torch.tensor([0, 2])
    student, teacher = student_tokens(), teacher_tokens(torch.tensor([5, 7, 4]))
    expected = added(objective, student.take(kept), teacher.take(kept))
    found = added(objective, student, teacher)
    for name, term in expected.items():
        assert found[name].item() == pytest.approx(term.item(), rel=1e-6), name
    nothing = added(objective, student, teacher_tokens(torch.tensor([6, 7, 8])))
    assert {term.item() for term in nothing.values()} == {0}


def test_the_added_losses_train_the_student_and_its_map_but_not_the_teacher() -> None:
    objective = made(distilbert_weight=1.0, minilm_weight=1.0, tinybert_weight=1.0)
    student, teacher = student_tokens(), teacher_tokens()
    assert student.internals is not None
    assert teacher.internals is not None
    mine = [student.states, student.internals.hidden, student.internals.attention, student.internals.values]
    theirs = [teacher.states, teacher.internals.hidden, teacher.internals.attention, teacher.internals.values]
    for tensor in mine + theirs:
        tensor.requires_grad_()
    torch.stack(list(added(objective, student, teacher).values())).sum().backward()
    assert all(tensor.grad is None for tensor in theirs)
    for tensor in mine:
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
        assert tensor.grad.abs().sum() > 0
    hidden = mine[1].grad
    assert hidden is not None
    assert hidden.abs().sum((1, 2, 3)).nonzero().flatten().tolist() == [1, 2]  # not the embedding layer
    assert next(objective.token_map.parameters()).grad is not None
    assert objective.out.weight.grad is None


def test_attention_that_underflows_to_zero_gives_a_finite_loss() -> None:
    objective = made(minilm_weight=1.0)
    student = student_tokens()
    assert student.internals is not None
    sharp = torch.eye(5).expand(2, 3, 2, 5, 5).clone().requires_grad_()
    student = replace(student, internals=replace(student.internals, attention=sharp))
    loss = added(objective, student, teacher_tokens())["minilm"]
    loss.backward()
    assert loss.isfinite()
    assert sharp.grad is not None
    assert sharp.grad.isfinite().all()


@pytest.mark.parametrize(
    ("options", "needs", "mapped"),
    [
        ({}, Needs(), False),
        ({"distilbert_weight": 0.1}, Needs(tokens=True, same_tokens=True), True),
        ({"minilm_weight": 0.1}, Needs(tokens=True, same_tokens=True, internals=True), False),
        ({"tinybert_weight": 0.1}, Needs(tokens=True, same_tokens=True, internals=True), True),
    ],
)
def test_needs_of_the_added_losses(options: dict[str, Any], needs: Needs, mapped: bool) -> None:
    objective = made(**options)
    assert objective.needs == needs
    assert [tuple(weight.shape) for weight in objective.token_map.parameters()] == ([(8, 6)] if mapped else [])


@pytest.mark.parametrize(
    ("options", "teacher", "message"),
    [
        ({"minilm_weight": -1.0}, TEACHER, "minilm_weight: expected a number >= 0"),
        (
            {"distilbert_weight": 1.0},
            TeacherShape(7),
            "distilbert_weight: .* only sentence vectors of this teacher are available",
        ),
        (
            {"minilm_weight": 1.0},
            TeacherShape(7),
            "minilm_weight: .* only sentence vectors of this teacher are available",
        ),
        ({"minilm_weight": 1.0}, replace(TEACHER, heads=None), "minilm_weight: .* use teacher.mode=online"),
        ({"minilm_weight": 1.0}, replace(TEACHER, heads=3), "the student has 2 heads and the teacher 3"),
        ({"tinybert_weight": 1.0}, replace(TEACHER, heads=3), "tinybert_weight: .* the teacher 3"),
        ({"tinybert_weight": 1.0}, replace(TEACHER, layers=1), "the student has 2 and the teacher 1"),
    ],
)
def test_an_option_that_does_not_fit_the_models_is_refused_with_the_reason(
    options: dict[str, Any], teacher: TeacherShape, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        made(teacher=teacher, **options)


def test_distilbert_allows_unequal_heads() -> None:
    objective = made(teacher=replace(TEACHER, heads=3, layers=None), distilbert_weight=1.0)
    assert added(objective, student_tokens(), teacher_tokens()).keys() == {"distilbert"}


def test_an_added_loss_without_states_names_what_is_missing() -> None:
    states = StudentOutput(torch.ones(3, 3, 6), tokens=replace(student_tokens(), internals=None))
    vectors = TeacherTargets(torch.ones(3, 7), torch.arange(3))
    with pytest.raises(NeedsNotMet, match="need token states of student and teacher"):
        made(distilbert_weight=1.0)(states, vectors)
    with pytest.raises(NeedsNotMet, match="need all layers and heads of student and teacher"):
        made(minilm_weight=1.0)(states, replace(vectors, tokens=teacher_tokens()))
