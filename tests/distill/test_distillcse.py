import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distill.errors import ConfigError
from distill.objectives.base import Objective, StudentOutput, TeacherTargets, unit
from distill.objectives.distillcse import DistillCSE, group_shuffle
from distill.objectives.simcse import info_nce
from tests.contracts.objective_contract import SHAPE, TEACHER_SHAPE, TEXT_IDS, ObjectiveContract


def made(**options: Any) -> DistillCSE:
    torch.manual_seed(0)
    return DistillCSE(SHAPE, TEACHER_SHAPE, **options)


def ranking(states: Tensor, vectors: Tensor, text_ids: Tensor, **options: Any) -> Tensor:
    """The distillation term of the states themselves, without shuffling."""
    objective = made(**{"head": "none", "group_shuffle_p": 0, "simcse_weight": 0} | options)
    found: dict[str, Tensor] = objective(StudentOutput(states[None]), TeacherTargets(vectors, text_ids))
    assert found.keys() == {"distill"}
    return found["distill"]


class TestDistillCSE(ObjectiveContract):
    name = "distillcse"
    used_states = frozenset({(0, 3), (1, 3)})

    def make(self) -> Objective:
        return made().eval()  # in training mode every call shuffles differently

    @pytest.mark.parametrize("mask_duplicates", [True, False])
    def test_it_equals_numpy_in_double_precision(self, mask_duplicates: bool) -> None:
        objective = made(distill_weight=0.5, mask_duplicates=mask_duplicates).eval()
        states, vectors = self.states(2), self.vectors()
        found = objective(StudentOutput(states, views=2), TeacherTargets(vectors, TEXT_IDS))

        weight, bias = (parameter.detach().double().numpy() for parameter in objective.head.parameters())
        z = np.tanh(states[-1, :6].double().numpy() @ weight.T + bias)
        t = vectors.double().numpy()
        z /= np.linalg.norm(z, axis=1, keepdims=True)
        t /= np.linalg.norm(t, axis=1, keepdims=True)
        total = 0.0
        for i in range(6):
            rivals = [j for j in range(6) if j != i and not (mask_duplicates and TEXT_IDS[i] == TEXT_IDS[j])]
            student, teacher = np.exp(z[rivals] @ z[i] / 0.025), np.exp(t[rivals] @ t[i] / 0.0125)
            total -= float(teacher / teacher.sum() @ np.log(student / student.sum()))
        assert found["distill"].item() == pytest.approx(0.5 * total / 6, rel=1e-4)

    def test_the_contrast_is_info_nce_of_the_heads_outputs(self) -> None:
        objective, states = made(temperature=0.3, simcse_weight=2.0).eval(), self.states(2)
        found = objective(StudentOutput(states, views=2), TeacherTargets(self.vectors(), TEXT_IDS))
        heads = objective.head(states[-1])
        assert torch.equal(found["simcse"], 2 * info_nce(heads[:6], heads[6:], 0.3, TEXT_IDS))

    def test_training_shuffles_and_evaluation_does_not(self) -> None:
        student, teacher = StudentOutput(self.states(2), views=2), TeacherTargets(self.vectors(), torch.arange(6))
        objective = made(group_shuffle_p=0.9)
        plain = made(group_shuffle_p=0)(student, teacher)["distill"]
        torch.manual_seed(1)
        drawn = {objective(student, teacher)["distill"].item() for _ in range(8)}
        assert len(drawn) > 1
        torch.manual_seed(1)
        assert objective(student, teacher)["distill"].item() in drawn
        assert torch.equal(objective.eval()(student, teacher)["distill"], plain)

    def test_the_head_is_no_projection_and_can_be_left_out(self) -> None:
        assert made().projection() is None
        assert not made().in_teacher_space
        assert sum(parameter.numel() for parameter in made().parameters()) == 5 * 5 + 5
        assert list(made(head="none").parameters()) == []


def test_ranking_by_hand() -> None:
    # Cosines of text 0 to the others: student 0 and 1/2, teacher 1/2 and 0; of text 1: student 0 and sqrt(3)/2,
    # teacher 1/2 and sqrt(3)/2; of text 2: student 1/2 and sqrt(3)/2, teacher 0 and sqrt(3)/2.
    half, root = 0.5, math.sqrt(3) / 2
    states = torch.tensor([[1.0, 0.0], [0.0, 1.0], [half, root]])
    vectors = torch.tensor([[1.0, 0.0], [half, root], [0.0, 1.0]])

    def cross_entropy(teacher: tuple[float, float], student: tuple[float, float]) -> float:
        p = [math.exp(x / 0.25) for x in teacher]
        q = [math.exp(x / 0.5) for x in student]
        return -sum(a / sum(p) * math.log(b / sum(q)) for a, b in zip(p, q, strict=True))

    rows = [
        cross_entropy((half, 0), (0, half)),
        cross_entropy((half, root), (0, root)),
        cross_entropy((0, root), (half, root)),
    ]
    found = ranking(states, vectors, torch.arange(3), student_temperature=0.5, teacher_temperature=0.25)
    assert found.item() == pytest.approx(sum(rows) / 3, rel=1e-5)


def test_the_ranking_is_lowest_if_student_equals_teacher() -> None:
    vectors = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    states, ids = vectors.clone().requires_grad_(), torch.arange(6)
    lowest = ranking(states, vectors, ids, student_temperature=0.2, teacher_temperature=0.2)
    lowest.backward()
    assert states.grad is not None
    assert states.grad.abs().max() < 1e-6
    for seed in range(1, 11):  # seed 0 is that of `vectors`: the same cosines
        moved = vectors + 0.3 * torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
        assert ranking(moved, vectors, ids, student_temperature=0.2, teacher_temperature=0.2) > lowest


def test_two_concatenated_teachers_count_with_the_mean_of_their_cosines() -> None:
    one, other = unit(torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0)))
    states = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    found = ranking(states, torch.cat([one, other], 1) / math.sqrt(2), torch.arange(5))
    wanted = (one @ one.T + other @ other.T) / 2 / 0.0125
    mine = unit(states) @ unit(states).T / 0.025
    for cosines in (wanted, mine):
        cosines.fill_diagonal_(-torch.inf)
    rows = [-(w.softmax(0) * m.log_softmax(0)).nansum() for w, m in zip(wanted, mine, strict=True)]
    assert found.item() == pytest.approx(torch.stack(rows).mean().item(), rel=1e-4)


def test_a_repeated_text_neither_ranks_itself_nor_changes_the_mean() -> None:
    states = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    vectors = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([3, 3, 1, 1])
    # Each row is compared with the two rows of the other text, equal for the teacher: log 2 if the student agrees.
    same = vectors[[0, 0, 2, 2]]
    assert ranking(same, same, ids).item() == pytest.approx(math.log(2), rel=1e-6)
    official = DistillCSE.presets["official"]
    assert ranking(same, same, ids, **official).item() == pytest.approx(0, abs=1e-6)
    # A batch of one text has no ranking.
    assert ranking(states, vectors, torch.zeros(4, dtype=torch.int64)).item() == 0


def test_group_shuffle_by_hand() -> None:
    # By descending similarity, the columns of row 0 are 2, 1, 3, 4 (0 is the text itself). Their shares are
    # 0.4, 0.3, 0.2, 0.1 and run up to 0.4, 0.7, 0.9, 1.0: with p = 0.8 the groups are {2, 1} and {3, 4}.
    row = torch.tensor([9.0, math.log(0.3), math.log(0.4), math.log(0.2), math.log(0.1)])
    rivals = torch.tensor([[False, True, True, True, True]])
    torch.manual_seed(0)
    drawn = {tuple(group_shuffle(row[None], rivals, 0.8)[0].tolist()) for _ in range(100)}
    assert drawn == {(0, 1, 2, 3, 4), (0, 2, 1, 3, 4), (0, 1, 2, 4, 3), (0, 2, 1, 4, 3)}


def batch_of_cosines(seed: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    vectors = unit(torch.randn(size, 3, generator=generator))
    ids = torch.randint(0, 4, (size,), generator=generator)
    return vectors @ vectors.T, ids[:, None] != ids[None, :]


@given(seed=st.integers(0, 1000), size=st.integers(1, 9), p=st.floats(0.01, 1))
def test_group_shuffle_permutes_inside_the_groups_of_a_numpy_version(seed: int, size: int, p: float) -> None:
    cosines, rivals = batch_of_cosines(seed, size)
    torch.manual_seed(seed)
    columns = group_shuffle(cosines, rivals, p)
    for i in range(size):
        places = [j for j in np.argsort(-cosines[i].numpy(), kind="stable") if rivals[i, j]]
        shares = np.exp(cosines[i].numpy()[places])
        running = np.cumsum(shares / shares.sum()) / p
        group = dict.fromkeys(range(size), -1)
        for j, share in zip(places, running, strict=True):
            if abs(share - round(share)) < 1e-4:
                return  # too close to a boundary
            group[int(j)] = min(math.floor(share), math.ceil(1 / p) - 1)
        assert sorted(columns[i].tolist()) == list(range(size))
        assert [group[j] for j in columns[i].tolist()] == [group[j] for j in range(size)]


def test_group_shuffle_draws_every_order_of_a_group_equally_often() -> None:
    cosines = torch.zeros(6000, 3)
    torch.manual_seed(0)
    columns = group_shuffle(cosines, torch.ones(6000, 3, dtype=torch.bool), 1.0)
    _, counts = columns.unique(dim=0, return_counts=True)
    assert len(counts) == 6
    assert (counts - 1000).abs().max() < 150  # five standard deviations


def test_small_groups_shuffle_nothing() -> None:
    cosines, rivals = batch_of_cosines(0, 8)
    rivals = ~torch.eye(8, dtype=torch.bool)
    assert torch.equal(group_shuffle(cosines, rivals, 1e-6), torch.arange(8).expand(8, 8))


def test_shuffling_is_repeatable_and_moves_only_the_students_entries() -> None:
    cosines, rivals = batch_of_cosines(3, 8)
    torch.manual_seed(5)
    first = group_shuffle(cosines, rivals, 0.5)
    torch.manual_seed(5)
    assert torch.equal(group_shuffle(cosines, rivals, 0.5), first)


@pytest.mark.parametrize(
    ("options", "views", "kept"),
    [({"simcse_weight": 0}, 1, {"distill"}), ({"distill_weight": 0}, 2, {"simcse"})],
)
def test_a_term_of_weight_zero_needs_no_second_view(options: dict[str, Any], views: int, kept: set[str]) -> None:
    objective = made(**options)
    assert objective.needs.views == views
    states = torch.randn(4, 3 * views, 5, generator=torch.Generator().manual_seed(0))
    assert objective(StudentOutput(states, views), TeacherTargets(torch.eye(3), torch.arange(3))).keys() == kept


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature: expected a number above 0"),
        ({"student_temperature": -1.0}, "student_temperature: expected a number above 0"),
        ({"teacher_temperature": math.nan}, "teacher_temperature: expected a number above 0"),
        ({"group_shuffle_p": 1.5}, "group_shuffle_p: expected a number from 0 to 1"),
        ({"group_shuffle_p": -0.1}, "group_shuffle_p: expected a number >= 0"),
        ({"head": "tanh"}, "head: expected one of mlp, none, found 'tanh'"),
        ({"distill_weight": "1"}, "distill_weight: expected a number >= 0"),
        ({"simcse_weight": 0, "distill_weight": 0}, "_weight above 0"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(**options)
