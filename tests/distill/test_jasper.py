import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from distill.errors import ConfigError
from distill.objectives import jasper
from distill.objectives.base import Objective, StudentOutput, StudentShape, TeacherShape, TeacherTargets
from distill.objectives.jasper import Jasper, order_loss
from distill.objectives.simcse import info_nce
from tests.contracts.objective_contract import SHAPE, TEACHER_SHAPE, TEXT_IDS, ObjectiveContract

WIDE = TeacherShape(dim=7)
PORT: dict[str, Any] = Jasper.presets["talas-port"]


def unit_rows(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True))


def similarity(mine: NDArray[np.float64], theirs: NDArray[np.float64]) -> float:
    mine, theirs = unit_rows(mine), unit_rows(theirs)
    return float(np.mean((mine @ mine.T - theirs @ theirs.T) ** 2))


def order(mine: NDArray[np.float64], theirs: NDArray[np.float64], margin: float = 0.015) -> float:
    mine, theirs = unit_rows(mine), unit_rows(theirs)
    texts = list(itertools.combinations(range(len(mine)), 2))
    total, count = 0.0, 0
    for (a, b), (c, d) in itertools.combinations(texts, 2):
        label = 1 if theirs[a] @ theirs[b] < theirs[c] @ theirs[d] else -1
        total += max(0.0, label * (mine[a] @ mine[b] - mine[c] @ mine[d]) + margin)
        count += 1
    return total / count


class TestJasper(ObjectiveContract):
    name = "jasper"
    used_states = frozenset({(0, 3)})

    def make(self) -> Objective:
        torch.manual_seed(0)
        return Jasper(SHAPE, TEACHER_SHAPE)

    def test_it_equals_numpy_in_double_precision(self) -> None:
        objective = Jasper(SHAPE, WIDE, prefixes=(2, 4), bias=True)
        states, vectors = self.states(1), self.vectors()
        found = objective(StudentOutput(states), TeacherTargets(vectors, TEXT_IDS))

        t = vectors.double().numpy()
        s = objective.head.double()(states[3].double()).detach().numpy()
        assert found["cosine"].item() == pytest.approx(
            10 * np.mean(1 - np.sum(unit_rows(s) * unit_rows(t), axis=1)), rel=1e-5
        )
        widths = (7, 4, 2)
        assert found["similarity"].item() == pytest.approx(
            200 * np.mean([similarity(s[:, :width], t) for width in widths]), rel=1e-5
        )
        assert found["triplet"].item() == pytest.approx(
            20 * np.mean([order(s[:, :width], t) for width in widths]), rel=1e-5
        )

    def test_the_port_compares_its_short_heads_with_its_own_full_one(self) -> None:
        objective = Jasper(SHAPE, WIDE, **PORT | {"prefixes": (4, 2)})
        states, vectors = self.states(2), self.vectors()
        found = objective(StudentOutput(states, views=2), TeacherTargets(vectors, TEXT_IDS))

        contrast = info_nce(states[3, :6], states[3, 6:], 0.1)
        assert found["simcse"].item() == pytest.approx(0.5 * contrast.item(), rel=1e-6)
        objective.double()
        e, t = states[3, :6].double(), vectors.double().numpy()
        full = objective.head(e).detach().numpy()
        short = [head(e).detach().numpy() for head in objective.short_heads]
        assert [rows.shape[1] for rows in short] == [4, 2]
        expected = similarity(full, t) + sum(similarity(rows, full) for rows in short)
        assert found["similarity"].item() == pytest.approx(0.5 * 2 * expected, rel=1e-5)
        expected = order(full, t) + sum(order(rows, full) for rows in short)
        assert found["triplet"].item() == pytest.approx(0.5 * 0.5 * expected, rel=1e-5)
        cosines = np.sum(unit_rows(full) * unit_rows(t), axis=1)
        assert found["cosine"].item() == pytest.approx(0.5 * 0.5 * np.mean(1 - cosines), rel=1e-5)

    def test_in_stage_one_the_heads_learn_and_the_student_does_not(self) -> None:
        objective = Jasper(SHAPE, TEACHER_SHAPE)
        reached = []
        for epoch in (0.0, 1.99, 2.0, 6.5):
            objective.advance(epoch)
            objective.zero_grad()
            states = self.states(1).requires_grad_()
            self.loss(objective, StudentOutput(states), self.teacher(objective)).backward()
            assert objective.head.weight.grad is not None
            assert objective.head.weight.grad.abs().sum() > 0
            reached.append(states.grad is not None and bool(states.grad.abs().sum() > 0))
        assert reached == [False, False, True, True]
        assert Jasper.head_only_epochs == 2

    def test_stage_one_of_the_port_is_its_full_head_at_full_weight_alone(self) -> None:
        objective = Jasper(SHAPE, WIDE, **PORT | {"prefixes": (4, 2)})
        student, teacher = self.student(objective), self.teacher(objective)
        alone = Jasper(SHAPE, WIDE, cosine_weight=0.5, similarity_weight=2, triplet_weight=0.5, prefixes=(), bias=True)
        alone.head.load_state_dict(objective.head.state_dict())
        objective.advance(0.0)
        terms = objective(student, teacher)
        expected = alone(student, teacher)
        assert terms.keys() == {"cosine", "similarity", "triplet"}
        for name, value in terms.items():
            assert torch.equal(value, expected[name]), name

    def test_without_stages_the_first_epoch_trains_the_student(self) -> None:
        objective = Jasper(SHAPE, TEACHER_SHAPE, stage_one_epochs=0)
        objective.advance(0.0)
        states = self.states(1).requires_grad_()
        self.loss(objective, StudentOutput(states), self.teacher(objective)).backward()
        assert states.grad is not None

    def test_an_optimizer_leaves_a_student_in_stage_one_bit_for_bit(self) -> None:
        objective, encoder = Jasper(SHAPE, TEACHER_SHAPE), torch.nn.Linear(SHAPE.dim, SHAPE.dim)
        optimizer = torch.optim.AdamW([*encoder.parameters(), *objective.parameters()], lr=0.1, weight_decay=0.5)
        before = [parameter.clone() for parameter in encoder.parameters()]
        head = objective.head.weight.clone()
        objective.advance(0.0)
        for _ in range(3):
            optimizer.zero_grad()
            states = encoder(self.states(1))
            self.loss(objective, StudentOutput(states), self.teacher(objective)).backward()
            optimizer.step()
        assert all(torch.equal(one, other) for one, other in zip(before, encoder.parameters(), strict=True))
        assert not torch.equal(head, objective.head.weight)


class TestJasperAsPorted(ObjectiveContract):
    name = "jasper"
    used_states = frozenset({(0, 3), (1, 3)})

    def make(self) -> Objective:
        torch.manual_seed(0)
        return Jasper(SHAPE, TEACHER_SHAPE, **PORT | {"prefixes": (4, 2)})


def test_order_loss_by_hand() -> None:
    # Guide 3 > 2 > 1. Gaps of the scores in its direction: 0.2 of (0, 1), 0.5 of (0, 2), 0.3 of (1, 2); the margin
    # of 0.4 is missed by 0.2 and 0.1.
    scores, guide = torch.tensor([0.9, 0.7, 0.4]), torch.tensor([3.0, 2.0, 1.0])
    assert order_loss(scores, guide, 0.4).item() == pytest.approx((0.2 + 0.1) / 3)
    # Reversed, every pair is in the wrong order.
    assert order_loss(scores, -guide, 0.4).item() == pytest.approx((0.6 + 0.9 + 0.7) / 3)


def test_ties_of_the_teacher_have_no_order() -> None:
    scores = torch.tensor([0.9, 0.1], requires_grad=True)
    loss = order_loss(scores, torch.tensor([1.0, 1.0]), 0.4)
    loss.backward()
    assert loss.item() == 0
    assert scores.grad is not None
    assert scores.grad.abs().sum() == 0


@given(
    count=st.integers(0, 9),
    seed=st.integers(0, 2**32 - 1),
    margin=st.sampled_from([0.0, 0.015, 0.5]),
    block=st.sampled_from([1, 7, 20, 1 << 20]),
)
@settings(max_examples=60, deadline=None)
def test_order_loss_and_its_gradient_are_those_of_all_pairs_at_once(
    count: int, seed: int, margin: float, block: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    guide = torch.randint(0, 4, (count,), generator=generator).float()
    scores = torch.rand(count, generator=generator, dtype=torch.float64).requires_grad_()
    above = torch.sign(guide[:, None] - guide)
    misses = torch.relu(margin - above * (scores[:, None] - scores)) * above.abs()
    expected = misses.triu(1).sum() / max(1, count * (count - 1) // 2)
    (gradient,) = torch.autograd.grad(expected, scores)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jasper, "BLOCK", block)
        found = order_loss(scores, guide, margin)
    (mine,) = torch.autograd.grad(found, scores)
    assert found.item() == pytest.approx(expected.item(), abs=1e-12)
    assert torch.allclose(mine, gradient, atol=1e-12)


def test_the_triplet_of_a_large_batch_never_holds_all_differences_at_once() -> None:
    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            if isinstance(made, Tensor):
                self.numbers = max(self.numbers, made.numel())
            return made

    scores = torch.rand(4000, requires_grad=True)  # of about 90 texts: 16 million differences
    with Largest() as largest:
        order_loss(scores, torch.rand(4000), 0.015).backward()
    assert scores.grad is not None
    assert largest.numbers <= jasper.BLOCK


def test_prefixes_not_shorter_than_the_teacher_are_ignored() -> None:
    assert Jasper(SHAPE, TeacherShape(dim=512)).prefixes == [256, 128]
    assert Jasper(SHAPE, TeacherShape(dim=768), prefixes=[64, 768, 64]).prefixes == [64]
    assert Jasper(SHAPE, TeacherShape(dim=7)).prefixes == []


def test_two_concatenated_teachers_count_with_the_mean_of_their_cosines() -> None:
    one, two = (torch.nn.functional.normalize(torch.randn(4, width), dim=1) for width in (3, 5))
    both = torch.cat([one, two], dim=1) / math.sqrt(2)
    shape = StudentShape(dim=8, layers=1, pooling="mean")
    objective = Jasper(shape, TeacherShape(dim=8), cosine_weight=0, triplet_weight=0, similarity_weight=1)
    torch.nn.init.eye_(objective.head.weight)
    states = torch.randn(2, 4, 8)
    found = objective(StudentOutput(states), TeacherTargets(both, torch.arange(4)))["similarity"]
    mine = torch.nn.functional.normalize(states[1], dim=1)
    expected = (mine @ mine.T - (one @ one.T + two @ two.T) / 2).square().mean()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_head_with_bias_is_not_exported() -> None:
    plain = Jasper(SHAPE, WIDE)
    assert plain.projection() is plain.head.weight
    assert plain.head.bias is None
    assert Jasper(SHAPE, WIDE, bias=True).projection() is None
    assert Jasper.presets["paper"] == {"bias": True}


@pytest.mark.parametrize("kept", ["cosine", "similarity", "triplet"])
def test_a_term_of_weight_zero_is_left_out(kept: str) -> None:
    weights: dict[str, Any] = {f"{name}_weight": float(name == kept) for name in ("cosine", "similarity", "triplet")}
    objective = Jasper(SHAPE, WIDE, **weights)
    vectors = torch.randn(6, 7)
    assert objective(StudentOutput(torch.randn(4, 6, 5)), TeacherTargets(vectors, TEXT_IDS)).keys() == {kept}
    assert objective.needs.views == 1


def test_short_heads_exist_only_if_a_term_trains_them() -> None:
    objective = Jasper(SHAPE, WIDE, matryoshka="heads", prefixes=(2,), similarity_weight=0, triplet_weight=0)
    assert len(objective.short_heads) == 0
    assert len(Jasper(SHAPE, WIDE, matryoshka="heads", prefixes=(2,)).short_heads) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cosine_weight": -1.0}, "cosine_weight: expected a number >= 0"),
        ({"similarity_weight": math.nan}, "similarity_weight"),
        ({"cosine_weight": 0, "similarity_weight": 0, "triplet_weight": 0}, "_weight above 0"),
        ({"simcse_weight": 1.0}, "simcse_weight: expected a number below 1"),
        ({"margin": -0.1}, "margin"),
        ({"prefixes": 512}, "prefixes: expected a list of widths, found 512"),
        ({"prefixes": "512"}, "prefixes: expected a list of widths"),
        ({"prefixes": (0,)}, "prefixes: expected a whole number of at least 1"),
        ({"matryoshka": "dolls"}, "matryoshka: expected one of prefixes, heads, found 'dolls'"),
        ({"stage_one_epochs": -1}, "stage_one_epochs"),
        ({"temperature": 0}, "temperature"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Jasper(SHAPE, WIDE, **options)
