"""What every objective over pooled vectors must keep; a method's test class inherits it."""

import copy
from abc import ABC, abstractmethod

import pytest
import torch
from torch import Tensor

from distill.objectives import OBJECTIVES, load_objective
from distill.objectives.base import Objective, StudentOutput, StudentShape, TeacherTargets

SHAPE = StudentShape(dim=5, layers=3, pooling="mean")
TEACHER_DIM = 7
BATCH = 6
TEXT_IDS = torch.tensor([4, 9, 4, 1, 0, 7])  # rows 0 and 2 are the same text


class ObjectiveContract(ABC):
    """Inherit it and say how the objective is made and which pooled states it reads."""

    name: str
    # (view, layer) of every pooled state that its loss depends on, for `SHAPE`.
    used_states: frozenset[tuple[int, int]]

    @abstractmethod
    def make(self) -> Objective:
        """The objective with its default options, for `SHAPE` and `TEACHER_DIM`."""

    def states(self, views: int, batch: int = BATCH) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(SHAPE.layers + 1, views * batch, SHAPE.dim, generator=generator)

    def vectors(self, batch: int = BATCH) -> Tensor:
        return torch.randn(batch, TEACHER_DIM, generator=torch.Generator().manual_seed(2))

    def loss(self, objective: Objective, states: Tensor, vectors: Tensor, text_ids: Tensor) -> Tensor:
        student = StudentOutput(states, views=objective.needs.views)
        terms = objective(student, TeacherTargets(vectors, text_ids))
        return torch.stack(list(terms.values())).sum()

    def test_every_term_is_a_finite_float32_scalar(self) -> None:
        objective = self.make()
        student = StudentOutput(self.states(objective.needs.views), views=objective.needs.views)
        terms = objective(student, TeacherTargets(self.vectors(), TEXT_IDS))
        assert terms
        for value in terms.values():
            assert value.shape == ()
            assert value.dtype == torch.float32
            assert value.isfinite()

    def test_a_batch_of_one_text_gives_finite_loss_and_gradients(self) -> None:
        objective = self.make()
        states = self.states(objective.needs.views, batch=1).requires_grad_()
        loss = self.loss(objective, states, self.vectors(batch=1), TEXT_IDS[:1])
        loss.backward()
        assert loss.isfinite()
        assert states.grad is not None
        assert states.grad.isfinite().all()

    def test_gradients_reach_exactly_the_states_it_uses_and_all_it_owns(self) -> None:
        objective = self.make()
        views = objective.needs.views
        states = self.states(views).requires_grad_()
        self.loss(objective, states, self.vectors(), TEXT_IDS).backward()
        assert states.grad is not None
        assert states.grad.isfinite().all()
        per_state = states.grad.reshape(SHAPE.layers + 1, views, -1).abs().sum(-1)
        reached = {(view, layer) for layer, view in per_state.nonzero().tolist()}
        assert reached == self.used_states
        for name, parameter in objective.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name

    def test_no_gradient_reaches_the_teacher(self) -> None:
        objective = self.make()
        states = self.states(objective.needs.views).requires_grad_()
        vectors = self.vectors().requires_grad_()
        self.loss(objective, states, vectors, TEXT_IDS).backward()
        assert vectors.grad is None

    def test_the_order_of_the_batch_does_not_matter(self) -> None:
        objective = self.make()
        views = objective.needs.views
        states, vectors = self.states(views), self.vectors()
        order = torch.tensor([3, 5, 0, 2, 1, 4])
        shuffled = torch.cat([states[:, view * BATCH + order] for view in range(views)], dim=1)
        loss = self.loss(objective, states, vectors, TEXT_IDS)
        again = self.loss(objective, shuffled, vectors[order], TEXT_IDS[order])
        assert again.item() == pytest.approx(loss.item(), rel=1e-6)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_states_are_computed_in_float32(self, dtype: torch.dtype) -> None:
        objective = self.make()
        states = self.states(objective.needs.views).to(dtype)
        loss = self.loss(objective, states, self.vectors(), TEXT_IDS)
        assert loss.dtype == torch.float32
        assert torch.equal(loss, self.loss(objective, states.float(), self.vectors(), TEXT_IDS))

    def test_autocast_around_it_changes_neither_loss_nor_gradient(self) -> None:
        objective = self.make()
        plain = self.states(objective.needs.views).requires_grad_()
        mixed = plain.detach().clone().requires_grad_()
        expected = self.loss(objective, plain, self.vectors(), TEXT_IDS)
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.loss(objective, mixed, self.vectors(), TEXT_IDS)
        expected.backward()
        loss.backward()
        assert torch.equal(loss, expected)
        assert plain.grad is not None
        assert mixed.grad is not None
        assert torch.equal(mixed.grad, plain.grad)

    def test_a_copy_and_a_reloaded_state_give_the_same_loss(self) -> None:
        objective = self.make()
        states, vectors = self.states(objective.needs.views), self.vectors()
        expected = self.loss(objective, states, vectors, TEXT_IDS)
        copied = copy.deepcopy(objective)
        reloaded = self.make()
        reloaded.load_state_dict(objective.state_dict())
        assert torch.equal(self.loss(copied, states, vectors, TEXT_IDS), expected)
        assert torch.equal(self.loss(reloaded, states, vectors, TEXT_IDS), expected)

    def test_its_projection_leads_from_the_student_to_the_teacher(self) -> None:
        projection = self.make().projection()
        assert projection is None or projection.shape == (TEACHER_DIM, SHAPE.dim)

    def test_its_name_in_the_table_leads_to_it(self) -> None:
        assert load_objective(self.name) is type(self.make())
        assert OBJECTIVES[self.name].startswith("distill.objectives.")

    def test_every_preset_is_accepted(self) -> None:
        method = type(self.make())
        for preset, options in method.presets.items():
            objective = method(SHAPE, TEACHER_DIM, **options)
            states = self.states(objective.needs.views)
            assert self.loss(objective, states, self.vectors(), TEXT_IDS).isfinite(), preset

    def test_an_unknown_option_is_refused(self) -> None:
        with pytest.raises(TypeError, match="warmth"):
            type(self.make())(SHAPE, TEACHER_DIM, warmth=1)
