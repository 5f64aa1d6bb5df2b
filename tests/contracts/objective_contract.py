"""Tests that every objective must pass; the test class of a method inherits them."""

import copy
from abc import ABC, abstractmethod
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from distill.objectives import OBJECTIVES, load_objective
from distill.objectives.base import (
    Objective,
    StudentOutput,
    StudentShape,
    TeacherShape,
    TeacherTargets,
    TokenStates,
)

SHAPE = StudentShape(dim=5, layers=3, pooling="mean", heads=1)
TEACHER_SHAPE = TeacherShape(dim=7, token_dim=8, layers=6, heads=2, causal=False)
BATCH = 6
TEXT_IDS = torch.tensor([4, 9, 4, 1, 0, 7])  # rows 0 and 2 are the same text
# Tokens of each text: more of the teacher's than of the student's, padded on the right and on the left.
STUDENT_LENGTHS = torch.tensor([7, 4, 7, 6, 3, 5])
TEACHER_LENGTHS = torch.tensor([9, 5, 9, 8, 4, 5])


def tokens(lengths: Tensor, dim: int, seed: int, *, left: bool, maps: int, importance: bool) -> TokenStates:
    """Random token states of texts with these lengths; the first and last token of each are special."""
    generator = torch.Generator().manual_seed(seed)
    batch, longest = len(lengths), int(lengths.max())
    places = torch.arange(longest).expand(batch, longest)
    if left:
        places = places.flip(1)
    mask = places < lengths[:, None]
    special = (places == 0) | (places == lengths[:, None] - 1)
    states = torch.randn(batch, longest, dim, generator=generator) * mask[..., None]
    seen = mask[:, :, None] & mask[:, None, :]
    attention = None
    if maps:
        scores = torch.randn(maps, batch, longest, longest, generator=generator)
        attention = scores.masked_fill(~seen, -1e9).softmax(-1) * seen
    received = torch.rand(batch, longest, generator=generator) * mask if importance else None
    return TokenStates(states, mask, special, attention, received)


def one_to_one(student: TokenStates, teacher: TokenStates) -> Tensor:
    """Alignment of the k-th tokens of both; the last tokens of the longer text have none."""
    batch = len(student.mask)
    alignment = torch.zeros(batch, student.mask.shape[1], teacher.mask.shape[1])
    for text in range(batch):
        mine, theirs = student.mask[text].nonzero()[:, 0], teacher.mask[text].nonzero()[:, 0]
        pairs = min(len(mine), len(theirs))
        alignment[text, mine[:pairs], theirs[:pairs]] = 1
    return alignment


class ObjectiveContract(ABC):
    """Subclass it with a function that creates the objective, and the pooled states that it reads."""

    name: str
    # (view, layer) of every pooled state that its loss depends on, for `SHAPE`.
    used_states: frozenset[tuple[int, int]]
    # Whether its loss depends on the student's token states.
    uses_tokens: bool = False
    # Largest relative difference between the losses of one batch in two orders: sums in another order.
    order_tolerance: float = 1e-6

    @abstractmethod
    def make(self) -> Objective:
        """The objective with its default options, for `SHAPE` and `TEACHER_SHAPE`."""

    def states(self, views: int, batch: int = BATCH) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(SHAPE.layers + 1, views * batch, SHAPE.dim, generator=generator)

    def vectors(self, batch: int = BATCH) -> Tensor:
        return torch.randn(batch, TEACHER_SHAPE.dim, generator=torch.Generator().manual_seed(2))

    def student(self, objective: Objective, batch: int = BATCH, states: Tensor | None = None) -> StudentOutput:
        """Random student output, with everything that the objective needs."""
        needs = objective.needs
        layers = self.states(needs.views, batch) if states is None else states
        states = None
        if needs.tokens:
            states = tokens(
                STUDENT_LENGTHS[:batch], SHAPE.dim, 3, left=False, maps=len(needs.attention), importance=False
            )
        return StudentOutput(layers, needs.views, states)

    def teacher(self, objective: Objective, batch: int = BATCH) -> TeacherTargets:
        needs = objective.needs
        targets = TeacherTargets(self.vectors(batch), TEXT_IDS[:batch])
        if not needs.tokens:
            return targets
        theirs = tokens(
            TEACHER_LENGTHS[:batch],
            int(TEACHER_SHAPE.token_dim or 0),
            4,
            left=True,
            maps=len(needs.attention),
            importance=needs.importance,
        )
        mine = self.student(objective, batch).tokens
        assert mine is not None
        return replace(targets, tokens=theirs, alignment=one_to_one(mine, theirs) if needs.alignment else None)

    def loss(self, objective: Objective, student: StudentOutput, teacher: TeacherTargets) -> Tensor:
        return torch.stack(list(objective(student, teacher).values())).sum()

    def test_every_term_is_a_finite_float32_scalar(self) -> None:
        objective = self.make()
        terms = objective(self.student(objective), self.teacher(objective))
        assert terms
        assert terms.keys() <= set(objective.terms)
        for value in terms.values():
            assert value.shape == ()
            assert value.dtype == torch.float32
            assert value.isfinite()

    def test_a_batch_of_one_text_gives_finite_loss_and_gradients(self) -> None:
        objective = self.make()
        states = self.states(objective.needs.views, batch=1).requires_grad_()
        loss = self.loss(objective, self.student(objective, 1, states), self.teacher(objective, 1))
        if loss.requires_grad:  # a loss that only compares texts is constant for one text
            loss.backward()
        assert loss.isfinite()
        assert states.grad is None or states.grad.isfinite().all()

    def test_gradients_reach_exactly_the_states_it_uses_and_all_its_parameters(self) -> None:
        objective = self.make()
        views = objective.needs.views
        student = self.student(objective)
        student.layers.requires_grad_()
        if student.tokens is not None:
            student.tokens.states.requires_grad_()
        self.loss(objective, student, self.teacher(objective)).backward()
        gradient = torch.zeros_like(student.layers) if student.layers.grad is None else student.layers.grad
        assert gradient.isfinite().all()
        per_state = gradient.reshape(SHAPE.layers + 1, views, -1).abs().sum(-1)
        reached = {(view, layer) for layer, view in per_state.nonzero().tolist()}
        assert reached == self.used_states
        if student.tokens is not None:
            found = student.tokens.states.grad
            assert (found is not None and bool(found.abs().sum() > 0)) == self.uses_tokens
            assert found is None or found.isfinite().all()
        for name, parameter in objective.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name

    def test_no_gradient_reaches_the_teacher(self) -> None:
        objective = self.make()
        student, teacher = self.student(objective), self.teacher(objective)
        student.layers.requires_grad_()
        targets = [teacher.vectors]
        if student.tokens is not None and teacher.tokens is not None:
            student.tokens.states.requires_grad_()
            targets += [teacher.tokens.states]
        for tensor in targets:
            tensor.requires_grad_()
        self.loss(objective, student, teacher).backward()
        assert all(tensor.grad is None for tensor in targets)

    def test_the_order_of_the_batch_does_not_matter(self) -> None:
        objective = self.make()
        student, teacher = self.student(objective), self.teacher(objective)
        order = torch.tensor([3, 5, 0, 2, 1, 4])
        loss = self.loss(objective, student, teacher)
        again = self.loss(objective, student.take(order), teacher.take(order))
        assert again.item() == pytest.approx(loss.item(), rel=self.order_tolerance)

    def test_padding_does_not_matter(self) -> None:
        objective = self.make()
        student, teacher = self.student(objective), self.teacher(objective)
        if student.tokens is None or teacher.tokens is None:
            return
        wider = replace(student, tokens=padded(student.tokens, before=2, after=1))
        targets = replace(
            teacher,
            tokens=padded(teacher.tokens, before=1, after=3),
            alignment=None if teacher.alignment is None else torch.nn.functional.pad(teacher.alignment, (1, 3, 2, 1)),
        )
        loss = self.loss(objective, student, teacher)
        assert self.loss(objective, wider, targets).item() == pytest.approx(loss.item(), rel=1e-5)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_states_are_computed_in_float32(self, dtype: torch.dtype) -> None:
        objective = self.make()
        student, teacher = self.student(objective), self.teacher(objective)
        half = replace(student, layers=student.layers.to(dtype))
        if student.tokens is not None:
            half = replace(half, tokens=replace(student.tokens, states=student.tokens.states.to(dtype)))
        full = replace(half, layers=half.layers.float())
        if half.tokens is not None:
            full = replace(full, tokens=replace(half.tokens, states=half.tokens.states.float()))
        loss = self.loss(objective, half, teacher)
        assert loss.dtype == torch.float32
        assert torch.equal(loss, self.loss(objective, full, teacher))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_autocast_changes_neither_loss_nor_gradient(self, dtype: torch.dtype) -> None:
        objective = self.make()
        plain, mixed = self.student(objective), self.student(objective)
        teacher = self.teacher(objective)
        plain.layers.requires_grad_()
        mixed.layers.requires_grad_()
        for student in (plain, mixed):
            if student.tokens is not None:
                student.tokens.states.requires_grad_()
        expected = self.loss(objective, plain, teacher)
        with torch.autocast("cpu", dtype):
            loss = self.loss(objective, mixed, teacher)
        expected.backward()
        loss.backward()
        assert torch.equal(loss, expected)
        for one, other in ((plain.layers, mixed.layers), *_token_states(plain, mixed)):
            assert (one.grad is None) == (other.grad is None)
            assert one.grad is None or other.grad is None or torch.equal(one.grad, other.grad)

    def test_a_copy_and_a_reloaded_state_give_the_same_loss(self) -> None:
        objective = self.make()
        student, teacher = self.student(objective), self.teacher(objective)
        expected = self.loss(objective, student, teacher)
        copied = copy.deepcopy(objective)
        reloaded = self.make()
        reloaded.load_state_dict(objective.state_dict())
        assert torch.equal(self.loss(copied, student, teacher), expected)
        assert torch.equal(self.loss(reloaded, student, teacher), expected)

    def test_without_the_second_view_the_other_terms_are_the_same(self) -> None:
        objective = self.make()
        if objective.needs.views == 1:
            assert not objective.second_view_terms & objective(self.student(objective), self.teacher(objective)).keys()
            return
        student, teacher = self.student(objective), self.teacher(objective)
        both = objective(student, teacher)
        first = objective(replace(student, layers=student.view(0), views=1), teacher)
        assert first.keys() == both.keys() - objective.second_view_terms
        for name, value in first.items():
            assert torch.equal(value, both[name]), name

    def test_every_weight_has_one_name(self) -> None:
        """A checkpoint stores one name of each weight, and a resumed run needs all names."""
        objective = self.make()
        assert len(list(objective.named_parameters(remove_duplicate=False))) == len(list(objective.parameters()))

    def test_its_projection_maps_student_to_teacher_width(self) -> None:
        projection = self.make().projection()
        assert projection is None or projection.shape == (TEACHER_SHAPE.dim, SHAPE.dim)

    def test_the_table_has_its_name(self) -> None:
        assert load_objective(self.name) is type(self.make())
        assert OBJECTIVES[self.name].startswith("distill.objectives.")

    def test_every_preset_is_accepted(self) -> None:
        method = type(self.make())
        assert "paper" in method.presets
        for preset, options in method.presets.items():
            objective = method(SHAPE, TEACHER_SHAPE, **options)
            assert self.loss(objective, self.student(objective), self.teacher(objective)).isfinite(), preset

    def test_an_unknown_option_is_refused(self) -> None:
        with pytest.raises(TypeError, match="warmth"):
            type(self.make())(SHAPE, TEACHER_SHAPE, warmth=1)


def padded(states: TokenStates, before: int, after: int) -> TokenStates:
    """The same tokens with more padding on both sides."""
    pad = torch.nn.functional.pad
    one, two = (before, after), (before, after, before, after)
    return TokenStates(
        pad(states.states, (0, 0, *one)),
        pad(states.mask, one),
        pad(states.special, one),
        None if states.attention is None else pad(states.attention, two),
        None if states.importance is None else pad(states.importance, one),
    )


def _token_states(first: StudentOutput, second: StudentOutput) -> list[tuple[Tensor, Tensor]]:
    if first.tokens is None or second.tokens is None:
        return []
    return [(first.tokens.states, second.tokens.states)]
