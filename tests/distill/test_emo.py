"""EMO against numpy loops over single texts, and properties of its parts."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distill.errors import ConfigError
from distill.objectives.base import Objective, StudentOutput, StudentShape, TeacherShape, TeacherTargets
from distill.objectives.emo import ALIGNMENTS, EMO, layer_pairs, masses, root_cka, sinkhorn
from distill.objectives.simcse import info_nce
from teacher_cache.tokens.alignment import ONE_TO_ONE
from tests.contracts.objective_contract import (
    SHAPE,
    TEACHER_SHAPE,
    TEXT_IDS,
    ObjectiveContract,
    one_to_one,
    padded,
    tokens,
)

Array = npt.NDArray[np.float64]
MAPS = ((2, 4), (3, 6))  # z = 2 of the 3 layers of SHAPE, the teacher having 6


class TestEMO(ObjectiveContract):
    name = "emo"
    used_states = frozenset({(0, 3), (1, 3)})
    uses_tokens = True

    def make(self) -> Objective:
        torch.manual_seed(0)
        return EMO(SHAPE, TEACHER_SHAPE)


class TestEMOComparingAllPairs(TestEMO):
    """Uses all pairs, because a third of the contract's tokens are too few."""

    def make(self) -> Objective:
        torch.manual_seed(0)
        return EMO(SHAPE, TEACHER_SHAPE, divisor=1)

    def test_gradients_reach_the_attention_maps_and_never_the_teachers(self) -> None:
        objective = self.make()
        student, teacher = self.student(objective), self.teacher(objective)
        assert student.tokens is not None
        assert student.tokens.attention is not None
        assert teacher.tokens is not None
        assert teacher.tokens.attention is not None
        assert teacher.tokens.importance is not None
        maps = [student.tokens.attention, teacher.tokens.attention, teacher.tokens.importance]
        for tensor in maps:
            tensor.requires_grad_()
        self.loss(objective, student, teacher).backward()
        gradient = maps[0].grad
        assert gradient is not None
        assert gradient.isfinite().all()
        seen = student.tokens.mask[:, :, None] & student.tokens.mask[:, None, :]
        assert (gradient.abs().sum((0, 2, 3)) > 0).tolist() == [True] * 6
        assert gradient.masked_select(~seen.expand_as(gradient)).abs().sum() == 0
        assert [tensor.grad for tensor in maps[1:]] == [None, None]


def batch(seed: int = 0) -> tuple[StudentOutput, TeacherTargets]:
    """Texts of 4 to 24 tokens, the student's padded on the right and the teacher's on the left."""
    mine = tokens(torch.tensor([18, 11, 22, 4, 16, 9]), SHAPE.dim, seed, left=False, maps=2, importance=False)
    theirs = tokens(torch.tensor([20, 10, 24, 5, 16, 12]), 8, seed + 1, left=True, maps=2, importance=True)
    alignment = one_to_one(mine, theirs)
    generator = torch.Generator().manual_seed(seed)
    alignment = alignment * (torch.rand(alignment.shape[:2], generator=generator) < 0.8)[..., None]
    layers = torch.randn(SHAPE.layers + 1, 12, SHAPE.dim, generator=generator)
    vectors = torch.randn(6, TEACHER_SHAPE.dim, generator=generator)
    return StudentOutput(layers, 2, mine), TeacherTargets(vectors, TEXT_IDS, None, theirs, alignment)


def by_text(student: StudentOutput, teacher: TeacherTargets) -> list[dict[str, Array]]:
    """Each text separately, without padding, in double precision."""
    mine, theirs = student.tokens, teacher.tokens
    assert mine is not None
    assert mine.attention is not None
    assert theirs is not None
    assert theirs.attention is not None
    assert theirs.importance is not None
    assert teacher.alignment is not None
    texts = []
    for text in range(len(mine.mask)):
        s, t = mine.mask[text].numpy(), theirs.mask[text].numpy()
        texts.append(
            {
                "states": mine.states[text].detach().double().numpy()[s],
                "targets": theirs.states[text].double().numpy()[t],
                "maps": mine.attention[:, text].detach().double().numpy()[:, s][:, :, s],
                "target_maps": theirs.attention[:, text].double().numpy()[:, t][:, :, t],
                "scores": theirs.importance[text].double().numpy()[t],
                "alignment": teacher.alignment[text].double().numpy()[s][:, t],
            }
        )
    return texts


def softmax(values: Array, axis: int = -1) -> Array:
    powers: Array = np.exp(values - values.max(axis=axis, keepdims=True))
    return powers / powers.sum(axis=axis, keepdims=True)


def numpy_ira(text: dict[str, Array], divisor: int, *, cut: bool) -> list[float]:
    """Of each layer; empty for a text with fewer than three rows."""
    pairs = sorted(zip(*np.nonzero(text["alignment"]), strict=True), key=lambda pair: -text["scores"][pair[1]])
    chosen = pairs[: len(pairs) // divisor]
    if len(chosen) < 3:
        return []
    found = []
    for layer in range(len(text["maps"])):
        x = text["maps"][layer][[s for s, _ in chosen]]
        y = text["target_maps"][layer][[t for _, t in chosen]]
        if cut:
            width = min(x.shape[1], y.shape[1])
            x, y = x[:, :width], y[:, :width]
        x, y = x - x.mean(0), y - y.mean(0)
        norm = np.linalg.norm
        found.append(1 - float(norm(x.T @ y) / math.sqrt(norm(x.T @ x) * norm(y.T @ y))))
    return found


def numpy_masses(text: dict[str, Array], kind: str) -> tuple[Array, Array]:
    scores = text["scores"]
    if kind == "causal":
        scores = scores / np.arange(len(scores), 0, -1)
    b = softmax(scores) if kind == "official" else scores / scores.sum()
    a = np.full(len(text["alignment"]), b.min())
    for s, t in zip(*np.nonzero(text["alignment"]), strict=True):
        a[s] = b[t]
    return b, softmax(a) if kind == "official" else a / a.sum()


def numpy_otis(text: dict[str, Array], weight: Array, kind: str, iterations: int) -> float:
    b, a = numpy_masses(text, kind)
    states = text["states"]
    cost = 1 - softmax(states @ (text["targets"] @ weight.T).T / math.sqrt(states.shape[1]))
    kernel = np.exp(-cost / 0.1)
    u = np.ones(len(a))
    for _ in range(iterations):
        v = b / (kernel.T @ u)
        u = a / (kernel @ v)
    return float((u[:, None] * kernel * v * cost).sum())


def double(objective: EMO) -> Array:
    assert objective.to_student is not None
    weight: Array = objective.to_student.weight.detach().double().numpy()
    return weight


@pytest.mark.parametrize("divisor", [1, 2, 3])
def test_it_equals_loops_over_texts_in_double_precision(divisor: int) -> None:
    student, teacher = batch()
    objective = EMO(SHAPE, TEACHER_SHAPE, divisor=divisor, alpha=0.25, ira_weight=2.0, otis_weight=0.5)
    found = objective(student, teacher)
    texts = by_text(student, teacher)
    ira = [value for text in texts for value in numpy_ira(text, divisor, cut=False)]
    otis = [numpy_otis(text, double(objective), "paper", 50) for text in texts]
    assert found["ira"].item() == pytest.approx(0.75 * 2.0 * np.mean(ira), rel=1e-5)
    assert found["otis"].item() == pytest.approx(0.75 * 0.5 * np.mean(otis), rel=1e-5)
    contrast = info_nce(student.view(0)[-1], student.view(1)[-1], 0.05, TEXT_IDS)
    assert found["simcse"].item() == pytest.approx(0.25 * contrast.item())
    assert found.keys() == {"simcse", "ira", "otis"}


def test_the_official_preset_equals_the_ports_formulas() -> None:
    student, teacher = batch(seed=5)
    objective = EMO(SHAPE, TEACHER_SHAPE, **EMO.presets["official"])  # type: ignore[arg-type]
    assert objective.needs.attention == MAPS[1:]
    assert objective.needs.alignment == "mined_types"
    assert student.tokens is not None
    assert student.tokens.attention is not None
    assert teacher.tokens is not None
    assert teacher.tokens.attention is not None
    student = replace(student, tokens=replace(student.tokens, attention=student.tokens.attention[1:]))
    teacher = replace(teacher, tokens=replace(teacher.tokens, attention=teacher.tokens.attention[1:]))
    found = objective(student, teacher)
    texts = by_text(student, teacher)
    ira = sum(value for text in texts for value in numpy_ira(text, 3, cut=True))
    otis = [numpy_otis(text, double(objective), "official", 100) for text in texts]
    assert found["ira"].item() == pytest.approx(0.5 * 0.1 * ira, rel=1e-5)
    assert found["otis"].item() == pytest.approx(0.5 * np.mean(otis), rel=1e-5)
    contrast = info_nce(student.view(0)[-1], student.view(1)[-1], 0.05)
    assert found["simcse"].item() == pytest.approx(0.5 * contrast.item())


def test_causal_masses_are_divided_by_the_rows_that_see_a_token() -> None:
    student, teacher = batch()
    objective = EMO(SHAPE, replace(TEACHER_SHAPE, causal=True), mass="causal")
    expected = np.mean([numpy_otis(text, double(objective), "causal", 50) for text in by_text(student, teacher)])
    assert objective(student, teacher)["otis"].item() == pytest.approx(0.5 * expected, rel=1e-5)


def test_only_the_most_attended_pairs_are_compared() -> None:
    student, teacher = batch()
    objective = EMO(SHAPE, TEACHER_SHAPE)
    assert student.tokens is not None
    assert student.tokens.attention is not None
    maps = student.tokens.attention.requires_grad_()
    objective(student, teacher)["ira"].backward()
    assert maps.grad is not None
    reached = maps.grad.abs().sum((0, 3)) > 0
    for number, text in enumerate(by_text(student, teacher)):
        pairs = sorted(zip(*np.nonzero(text["alignment"]), strict=True), key=lambda pair: -text["scores"][pair[1]])
        chosen = pairs[: len(pairs) // 3]
        expected = {int(s) for s, _ in chosen} if len(chosen) >= 3 else set()
        assert set(reached[number].nonzero()[:, 0].tolist()) == expected


def test_the_teachers_own_attention_has_no_loss() -> None:
    student, teacher = batch()
    assert teacher.tokens is not None
    assert student.tokens is not None
    here = replace(student, tokens=replace(teacher.tokens, states=torch.randn(6, 24, SHAPE.dim), importance=None))
    there = replace(teacher, alignment=torch.diag_embed(teacher.tokens.mask.float()))
    assert EMO(SHAPE, TEACHER_SHAPE)(here, there)["ira"].item() == pytest.approx(0, abs=1e-6)


def test_texts_without_mapped_tokens_are_skipped_and_an_unmapped_batch_is_finite() -> None:
    student, teacher = batch()
    assert teacher.alignment is not None
    objective = EMO(SHAPE, TEACHER_SHAPE)
    only = torch.tensor([0, 1, 2, 4])  # the others have fewer than nine pairs
    expected = objective(student.take(only), teacher.take(only))["ira"]
    assert objective(student, teacher)["ira"].item() == pytest.approx(expected.item(), rel=1e-6)
    assert student.tokens is not None
    student.tokens.states.requires_grad_()
    terms = objective(student, replace(teacher, alignment=torch.zeros_like(teacher.alignment)))
    assert terms["ira"].item() == 0
    terms["otis"].backward()
    assert student.tokens.states.grad is not None
    assert student.tokens.states.grad.isfinite().all()


def test_a_text_without_tokens_neither_counts_nor_breaks() -> None:
    student, teacher = batch()
    objective = EMO(SHAPE, TEACHER_SHAPE)
    assert student.tokens is not None
    assert teacher.tokens is not None
    assert teacher.alignment is not None
    mask, their_mask, alignment = student.tokens.mask.clone(), teacher.tokens.mask.clone(), teacher.alignment.clone()
    mask[3], their_mask[3], alignment[3] = False, False, 0
    mine = replace(student.tokens, mask=mask)
    mine.states.requires_grad_()
    theirs = replace(teacher.tokens, mask=their_mask)
    terms = objective(replace(student, tokens=mine), replace(teacher, tokens=theirs, alignment=alignment))
    torch.stack(list(terms.values())).sum().backward()
    assert mine.states.grad is not None
    assert mine.states.grad.isfinite().all()
    assert mine.states.grad[3].abs().sum() == 0


@pytest.mark.parametrize("columns", ["all", "common"])
def test_padding_on_either_side_changes_nothing(columns: str) -> None:
    student, teacher = batch()
    objective = EMO(SHAPE, TEACHER_SHAPE, attention_columns=columns)
    assert student.tokens is not None
    assert teacher.tokens is not None
    assert teacher.alignment is not None
    wider = replace(student, tokens=padded(student.tokens, before=3, after=0))
    targets = replace(
        teacher,
        tokens=padded(teacher.tokens, before=0, after=2),
        alignment=torch.nn.functional.pad(teacher.alignment, (0, 2, 3, 0)),
    )
    expected = objective(student, teacher)
    for name, value in objective(wider, targets).items():
        assert value.item() == pytest.approx(expected[name].item(), rel=1e-5), name


def test_the_envelope_has_the_same_loss_and_takes_the_plan_as_a_constant() -> None:
    student, teacher = batch()
    assert student.tokens is not None
    states = student.tokens.states.requires_grad_()
    unrolled = EMO(SHAPE, TEACHER_SHAPE, alpha=0, ira_weight=0)
    envelope = EMO(SHAPE, TEACHER_SHAPE, alpha=0, ira_weight=0, gradient="envelope")
    envelope.load_state_dict(unrolled.state_dict())
    losses, gradients = [], []
    for objective in (unrolled, envelope):
        loss = objective(student, teacher)["otis"]
        losses.append(loss.item())
        gradients.append(torch.autograd.grad(loss, states)[0])
    assert losses[0] == losses[1]
    assert not torch.allclose(gradients[0], gradients[1])

    text = by_text(student, teacher)[0]
    b, a = (torch.from_numpy(mass)[None].float() for mass in numpy_masses(text, "paper"))
    mine = torch.from_numpy(text["states"]).float().requires_grad_()
    target = torch.from_numpy(text["targets"] @ double(unrolled).T).float()
    cost = 1 - (mine @ target.T / math.sqrt(SHAPE.dim)).softmax(-1)
    plan = sinkhorn(cost[None].detach(), a, b, epsilon=0.1, iterations=50)[0]
    (plan * cost).sum().backward()
    assert mine.grad is not None
    assert torch.allclose(gradients[1][0][: len(mine)], mine.grad / 6, atol=1e-7)


@pytest.mark.parametrize("preset", EMO.presets)
def test_it_never_synchronizes_with_the_device(preset: str) -> None:
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    student, teacher = batch()
    objective = EMO(SHAPE, TEACHER_SHAPE, **EMO.presets[preset])  # type: ignore[arg-type]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:  # tensors without values, which cannot be read

        def without_values(part: Any) -> Any:
            tensors = {name: value for name, value in vars(part).items() if isinstance(value, Tensor)}
            return replace(part, **{name: mode.from_tensor(value) for name, value in tensors.items()})

        mine, theirs = without_values(student.tokens), without_values(teacher.tokens)
        terms = objective(
            replace(without_values(student), tokens=mine), replace(without_values(teacher), tokens=theirs)
        )
        assert terms.keys() == {"simcse", "ira", "otis"}
        with pytest.raises(DataDependentOutputException):
            terms["ira"].item()


def test_masses_worked_out_by_hand() -> None:
    scores = torch.tensor([[0.0, 1.0, 3.0, 4.0]])  # the first is padding
    mask = torch.tensor([[False, True, True, True]])
    alignment = torch.zeros(1, 4, 4)
    alignment[0, 0, 3] = alignment[0, 2, 2] = 1
    student_mask = torch.tensor([[True, True, True, False]])
    teacher, student = masses(scores, mask, alignment, student_mask)
    assert teacher[0].tolist() == pytest.approx([0, 1 / 8, 3 / 8, 4 / 8])
    assert student[0].tolist() == pytest.approx([4 / 8, 1 / 8, 3 / 8, 0])  # 4, the least, 3, padding
    teacher, student = masses(scores, mask, alignment, student_mask, twice_softmax=True)
    powers = np.exp([1, 3, 4])
    shares = powers / powers.sum()
    assert teacher[0].tolist() == pytest.approx([0, *shares])
    again = np.exp([shares[2], shares[0], shares[1]])
    assert student[0].tolist() == pytest.approx([*(again / again.sum()), 0])


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Costs within [0, 1] of two texts of up to 6 x 7 tokens, with masses that are 0 on padding."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    rows, columns = (torch.rand(2, size, generator=generator) + 0.05 for size in (6, 7))
    for mass in (rows, columns):
        mass[1, draw(st.integers(1, 6)) :] = 0
        mass /= mass.sum(1, keepdim=True)
    return torch.rand(2, 6, 7, generator=generator), rows, columns


@given(problems())
def test_a_plan_has_the_masses_as_its_margins(problem: tuple[Tensor, Tensor, Tensor]) -> None:
    cost, rows, columns = problem
    plan = sinkhorn(cost, rows, columns, epsilon=0.1, iterations=200)
    assert torch.allclose(plan.sum(2), rows, atol=1e-6)
    assert torch.allclose(plan.sum(1), columns, atol=1e-3)
    assert (plan >= 0).all()
    assert (plan[1][rows[1] == 0] == 0).all()
    assert (plan[1][:, columns[1] == 0] == 0).all()


@given(problems())
def test_the_log_domain_gives_what_the_plain_one_gives(problem: tuple[Tensor, Tensor, Tensor]) -> None:
    cost, rows, columns = problem
    plan = sinkhorn(cost, rows, columns, epsilon=0.1, iterations=20)
    for text in range(2):
        s, t = rows[text] > 0, columns[text] > 0
        kernel = np.exp(-cost[text][s][:, t].double().numpy() / 0.1)
        a, b = rows[text][s].double().numpy(), columns[text][t].double().numpy()
        u = np.ones(len(a))
        for _ in range(20):
            v = b / (kernel.T @ u)
            u = a / (kernel @ v)
        assert np.allclose(plan[text][s][:, t].numpy(), u[:, None] * kernel * v, atol=1e-6)


@pytest.mark.parametrize("contrast", [0.3, 1.0, 3.0, 10.0, 30.0])
def test_fifty_steps_are_as_good_as_a_thousand(contrast: float) -> None:
    generator = torch.Generator().manual_seed(0)
    cost = 1 - (torch.randn(32, 24, 32, generator=generator) * contrast).softmax(-1)
    rows, columns = torch.rand(32, 24, generator=generator) ** 3, torch.rand(32, 32, generator=generator) ** 3
    rows, columns = (mass / mass.sum(1, keepdim=True) for mass in (rows, columns))
    some, many = (
        (sinkhorn(cost, rows, columns, epsilon=0.1, iterations=steps) * cost).sum((1, 2)) for steps in (50, 1000)
    )
    assert torch.allclose(some, many, rtol=1e-3)
    assert torch.allclose(some.mean(), many.mean(), rtol=1e-4)


def test_equal_costs_move_mass_in_proportion_and_a_small_epsilon_does_not_overflow() -> None:
    rows, columns = torch.tensor([[0.25, 0.75]]), torch.tensor([[0.5, 0.3, 0.2]])
    plan = sinkhorn(torch.full((1, 2, 3), 0.4), rows, columns, epsilon=0.1, iterations=1)
    assert torch.allclose(plan[0], rows[0][:, None] * columns[0])
    cost = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
    plan = sinkhorn(cost, torch.tensor([[0.5, 0.5]]), torch.tensor([[0.5, 0.5]]), epsilon=1e-3, iterations=10)
    assert torch.allclose(plan[0], torch.eye(2) / 2)


@given(st.integers(0, 10**6), st.integers(3, 7))
def test_cka_is_invariant_to_rotation_scale_and_shift(seed: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.randn(1, 1, 7, 5, generator=generator), torch.randn(1, 1, 7, 4, generator=generator)
    chosen = (torch.arange(7) < count)[None]
    turn = torch.linalg.qr(torch.randn(5, 5, generator=generator)).Q
    expected = root_cka(first, second, chosen).item()
    assert 0 <= expected <= 1
    changed = 3.7 * first @ turn + torch.randn(5, generator=generator)
    assert root_cka(changed, second, chosen).item() == pytest.approx(expected, abs=1e-4)
    assert root_cka(second, first, chosen).item() == pytest.approx(expected, abs=1e-5)
    assert root_cka(first, changed, chosen).item() == pytest.approx(1, abs=1e-5)
    other = first.clone()
    other[:, :, count:] = 100
    assert root_cka(other, second, chosen).item() == pytest.approx(expected, abs=1e-5)


def test_cka_of_two_rows_is_1_and_without_variation_0() -> None:
    rows = torch.randn(1, 1, 3, 4, generator=torch.Generator().manual_seed(0))
    others = torch.randn(1, 1, 3, 6, generator=torch.Generator().manual_seed(1))
    two = torch.tensor([[True, True, False]])
    assert root_cka(rows, others, two).item() == pytest.approx(1, abs=1e-5)
    flat = torch.ones(1, 1, 3, 4, requires_grad=True)
    like = root_cka(flat, others, torch.ones(1, 3, dtype=torch.bool))
    like.sum().backward()
    assert like.item() == pytest.approx(0, abs=1e-3)
    assert flat.grad is not None
    assert flat.grad.isfinite().all()


def test_layers_are_paired_from_the_bottom_as_published_or_from_the_top() -> None:
    assert layer_pairs(6, 28, 2, "bottom") == ((5, 20), (6, 24))
    assert layer_pairs(6, 28, 2, "top") == ((5, 24), (6, 28))
    assert layer_pairs(6, 12, 1, "bottom") == layer_pairs(6, 12, 1, "top") == ((6, 12),)
    with pytest.raises(ConfigError, match="teacher has 2 layers and the student 6"):
        layer_pairs(6, 2, 1, "bottom")


def test_it_needs_the_maps_of_its_layer_pairs() -> None:
    needs = EMO(SHAPE, TEACHER_SHAPE).needs
    assert (needs.views, needs.tokens, needs.alignment, needs.importance) == (2, True, "offset", True)
    assert needs.attention == MAPS
    assert EMO(SHAPE, TEACHER_SHAPE, ira_weight=0).needs.attention == ()
    assert EMO(SHAPE, TEACHER_SHAPE, alpha=0).needs.views == 1


def test_terms_of_weight_0_need_nothing_and_have_no_parameters() -> None:
    plain = EMO(SHAPE, TeacherShape(dim=7), alpha=1)
    assert (plain.needs.tokens, plain.needs.alignment, plain.needs.attention) == (False, None, ())
    assert not list(plain.parameters())
    student, teacher = batch()
    assert plain(replace(student, tokens=None), replace(teacher, tokens=None, alignment=None)).keys() == {"simcse"}
    assert not list(EMO(SHAPE, TEACHER_SHAPE, otis_weight=0).parameters())


def test_a_cache_of_sentence_vectors_is_refused_with_the_command_that_adds_tokens() -> None:
    command = r"tcache build --columns vectors,tokens,attention --attention-layers"
    student = StudentShape(dim=5, layers=6, pooling="mean")
    with pytest.raises(ConfigError, match=command + " 10,12`$"):
        EMO(student, TeacherShape(dim=7, layers=12))
    with pytest.raises(ConfigError, match=command + " 10,12` for a teacher of 12 layers"):
        EMO(student, TeacherShape(dim=7))


def test_it_takes_every_alignment_that_is_one_to_one() -> None:
    assert ALIGNMENTS == ONE_TO_ONE


def test_a_missing_input_is_named() -> None:
    student, teacher = batch()
    objective = EMO(SHAPE, TEACHER_SHAPE)
    with pytest.raises(ConfigError, match="given no alignment"):
        objective(student, replace(teacher, alignment=None))
    with pytest.raises(ConfigError, match="given no student token states"):
        objective(replace(student, tokens=None), teacher)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 1.5}, "alpha: expected a number from 0 to 1, found 1.5"),
        ({"alpha": 0, "ira_weight": 0, "otis_weight": 0}, "expected at least one term above 0"),
        ({"alignment": "dtw_mean"}, "alignment: expected one of offset, mined_types"),
        ({"attention_layers": 4}, r"attention_layers: expected a whole number from 1 to 3 \(a student of 3 layers\)"),
        ({"divisor": 0}, "divisor: expected a whole number of at least 1"),
        ({"mass": "causal"}, "mass: expected 'paper' or 'official' for a teacher that is not causal"),
        ({"mass": "equal"}, "mass: expected one of paper, official, causal"),
        ({"epsilon": 0}, "epsilon: expected a number above 0"),
        ({"gradient": "none"}, "gradient: expected one of unrolled, envelope"),
        ({"counted_from": "middle"}, "counted_from: expected one of bottom, top"),
    ],
)
def test_an_option_out_of_its_range_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EMO(SHAPE, TEACHER_SHAPE, **options)
