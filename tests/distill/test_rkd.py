import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distill.errors import ConfigError
from distill.objectives.base import Objective, StudentOutput, TeacherTargets
from distill.objectives.rkd import RKD, angles, differences, distances
from tests.contracts.objective_contract import SHAPE, TEACHER_SHAPE, TEXT_IDS, ObjectiveContract

# Three texts on a line, at distances 3, 4 and 7; and at the corners of a right triangle of sides 3, 4, 5.
LINE = torch.tensor([[0.0, 0.0], [3.0, 0.0], [7.0, 0.0]])
TRIANGLE = torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 4.0]])
THREE = torch.tensor([0, 1, 2])


def terms(states: Tensor, vectors: Tensor, text_ids: Tensor, **options: Any) -> dict[str, Tensor]:
    return RKD(SHAPE, TEACHER_SHAPE, **options).forward(StudentOutput(states[None]), TeacherTargets(vectors, text_ids))


def loss(states: Tensor, vectors: Tensor, text_ids: Tensor, **options: Any) -> Tensor:
    return torch.stack(list(terms(states, vectors, text_ids, **options).values())).sum()


class TestRKD(ObjectiveContract):
    name = "rkd"
    used_states = frozenset({(0, 3)})

    def make(self) -> Objective:
        return RKD(SHAPE, TEACHER_SHAPE)

    @pytest.mark.parametrize("mask_duplicates", [True, False])
    def test_it_equals_numpy_in_double_precision(self, mask_duplicates: bool) -> None:
        states, vectors = self.states(1), self.vectors()
        found = RKD(SHAPE, TEACHER_SHAPE, mask_duplicates=mask_duplicates)(
            StudentOutput(states), TeacherTargets(vectors, TEXT_IDS)
        )
        ids = TEXT_IDS.tolist() if mask_duplicates else list(range(6))
        distance, angle = in_numpy(states[-1].double().numpy(), vectors.double().numpy(), ids)
        assert found["distance"].item() == pytest.approx(25 * distance, rel=1e-5)
        assert found["angle"].item() == pytest.approx(50 * angle, rel=1e-5)


def in_numpy(student: npt.NDArray[Any], teacher: npt.NDArray[Any], ids: list[int]) -> tuple[float, float]:
    """The two unweighted terms, entry by entry."""

    def huber(x: float) -> float:
        return x * x / 2 if abs(x) < 1 else abs(x) - 0.5

    def cosine(e: npt.NDArray[Any], i: int, j: int, k: int) -> float:
        if ids[i] in (ids[j], ids[k]):
            return 0.0
        a, b = e[j] - e[i], e[k] - e[i]
        return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))

    n = len(ids)
    pairs = [(i, j) for i in range(n) for j in range(n) if ids[i] != ids[j]]
    length = [{(i, j): float(np.linalg.norm(e[i] - e[j])) for i, j in pairs} for e in (student, teacher)]
    mean = [sum(of.values()) / len(of) for of in length]
    distance = sum(huber(length[0][pair] / mean[0] - length[1][pair] / mean[1]) for pair in pairs) / n**2
    triplets = [(i, j, k) for i in range(n) for j in range(n) for k in range(n)]
    return distance, sum(huber(cosine(student, *t) - cosine(teacher, *t)) for t in triplets) / n**3


def test_distance_by_hand() -> None:
    # Over their means 14/3 and 4 the sides are 9/14, 12/14, 21/14 and 3/4, 1, 5/4 in the pairs (0, 1), (1, 2), (0, 2)
    # of the line and (0, 1), (0, 2), (1, 2) of the triangle.
    off = [9 / 14 - 3 / 4, 12 / 14 - 5 / 4, 21 / 14 - 1]
    expected = sum(2 * x * x / 2 for x in off) / 9
    found = terms(LINE, TRIANGLE, THREE, distance_weight=1, angle_weight=0)
    assert found.keys() == {"distance"}
    assert found["distance"].item() == pytest.approx(expected, rel=1e-5)


def test_angle_by_hand() -> None:
    # The cosines at the three corners are 1, -1, 1 on the line and 0, 3/5, 4/5 in the triangle, each in two of the
    # 27 triplets. The difference at the second corner, 1.6, is on the straight part of huber. Angles between a text
    # and itself have the cosine 1 in both.
    expected = 2 * (1.0 - 0.5 + 1.6 - 0.5 + 0.2**2 / 2) / 27
    found = terms(LINE, TRIANGLE, THREE, distance_weight=0, angle_weight=1)
    assert found.keys() == {"angle"}
    assert found["angle"].item() == pytest.approx(expected, rel=1e-5)


def test_the_weights_are_those_of_the_paper() -> None:
    plain = terms(LINE, TRIANGLE, THREE, distance_weight=1, angle_weight=1)
    weighted = terms(LINE, TRIANGLE, THREE)
    assert weighted["distance"].item() == pytest.approx(25 * plain["distance"].item())
    assert weighted["angle"].item() == pytest.approx(50 * plain["angle"].item())


@given(
    seed=st.integers(0, 1000),
    scale=st.floats(0.1, 10),
    shift=st.floats(-3, 3),
)
def test_the_loss_is_invariant_to_translation_rotation_and_scale(seed: int, scale: float, shift: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(5, 4, generator=generator)
    turn, _ = torch.linalg.qr(torch.randn(4, 4, generator=generator))
    found = terms(scale * (vectors + shift) @ turn, vectors, torch.arange(5))
    assert found["distance"].item() == pytest.approx(0, abs=1e-6)
    assert found["angle"].item() == pytest.approx(0, abs=1e-6)


def test_normalized_states_are_compared_by_direction_only() -> None:
    vectors = torch.nn.functional.normalize(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), dim=1)
    states = vectors * torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    ids = torch.arange(4)
    assert loss(states, vectors, ids, normalize=True).item() == pytest.approx(0, abs=1e-6)
    assert loss(states, vectors, ids).item() > 1


def test_two_rows_of_one_text_are_compared_with_others_but_not_with_each_other() -> None:
    apart = torch.tensor([[False, True, False], [True, False, True], [False, True, False]])
    between = differences(TRIANGLE)
    # Of the lengths 3 and 5 that are left, each counts twice: their mean is 4.
    assert torch.allclose(distances(between, apart), torch.tensor([[0, 0.75, 0], [0.75, 0, 1.25], [0, 1.25, 0]]))
    found = angles(between, apart)
    assert found[0].tolist() == [[0, 0, 0], [0, 1, 0], [0, 0, 0]]
    assert found[1, 0, 2].item() == pytest.approx(3 / 5)


@pytest.mark.parametrize("gap", [0.0, 1e-8])
def test_nearly_equal_states_of_one_text_have_small_gradients(gap: float) -> None:
    vectors = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    vectors[1] = vectors[0]
    states = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    states[1] = states[0] + gap * torch.tensor([1.0, 0.0, 0.0])
    states.requires_grad_()
    loss(states, vectors, torch.tensor([7, 7, 1, 2])).backward()
    assert states.grad is not None
    assert states.grad.abs().max() < 100


def test_rows_of_one_text_at_one_point_give_finite_gradients_in_the_official_preset() -> None:
    states = LINE.repeat(2, 1).requires_grad_()
    loss(states, TRIANGLE.repeat(2, 1), THREE.repeat(2), **RKD.presets["official"]).backward()
    assert states.grad is not None
    assert states.grad.isfinite().all()


def test_a_batch_of_one_text_repeated_has_no_loss() -> None:
    found = terms(LINE, TRIANGLE, torch.tensor([5, 5, 5]))
    assert {name: value.item() for name, value in found.items()} == {"distance": 0, "angle": 0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distance_weight": -1.0}, "distance_weight: expected a number >= 0"),
        ({"angle_weight": math.inf}, "angle_weight: expected a number >= 0"),
        ({"distance_weight": 0, "angle_weight": 0}, "_weight above 0"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RKD(SHAPE, TEACHER_SHAPE, **options)
