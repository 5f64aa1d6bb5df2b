"""Label-free agreement of a student with its teacher."""

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from distill.errors import EvaluationError
from distill.evaluation.agreement import agreement

seeds = st.integers(0, 2**32 - 1)


def plane(*degrees: float) -> npt.NDArray[np.float64]:
    """Unit vectors at the given angles."""
    angles = np.radians(degrees)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def test_four_points_by_hand() -> None:
    # Pairs           ab  ac  ad   bc  bd  cd
    # teacher angles  10  30  70   20  60  40   so cosines rank 6 4 1 5 2 3
    # student angles  10  50  30   40  20  20   so cosines rank 6 1 3 2 4.5 4.5
    teacher = plane(0, 10, 30, 70)
    student = plane(0, 10, 50, 30)
    found = agreement(student, teacher, neighbours=1)
    # About their mean 3.5: products 2.5*2.5 + .5*-2.5 + -2.5*-.5 + 1.5*-1.5 + -1.5*1 + -.5*1 = 2.
    assert found.spearman == pytest.approx(2 / math.sqrt(17.5 * 17))
    # Nearest, teacher: a-b, b-a, c-b, d-c. Student: a-b, b-a, c-d, and d has b and c at 20 degrees, with weight
    # 1/2 each.
    assert found.overlap == pytest.approx((1 + 1 + 0 + 0.5) / 4)
    assert (found.neighbours, found.texts) == (1, 4)


def test_two_neighbors_by_hand() -> None:
    found = agreement(plane(0, 10, 50, 30), plane(0, 10, 30, 70), neighbours=2)
    # Teacher: a-bc, b-ac, c-ba, d-cb. Student: a-bd, b-ad, c-db, d-bc.
    assert found.overlap == pytest.approx((1 + 1 + 1 + 2) / 8)


@given(seed=seeds, neighbours=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_a_rotated_and_rescaled_copy_of_the_teacher_agrees_fully(seed: int, neighbours: int) -> None:
    rng = np.random.default_rng(seed)
    teacher = rng.normal(size=(20, 6))
    rotation, _ = np.linalg.qr(rng.normal(size=(6, 6)))
    # Wider than the teacher, and with other lengths: only angles count.
    student = np.hstack([teacher @ rotation, np.zeros((20, 3))]) * rng.uniform(0.1, 10, size=(20, 1))
    found = agreement(student, teacher, neighbours)
    assert found.spearman == pytest.approx(1, abs=1e-9)
    assert found.overlap == pytest.approx(1, abs=0.02)


@given(seed=seeds)
@settings(max_examples=40, deadline=None)
def test_agreement_does_not_depend_on_the_order_of_the_texts_even_with_duplicates(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 12, size=18)
    teacher, student = rng.normal(size=(12, 5))[rows], rng.normal(size=(12, 4))[rows]
    order = rng.permutation(18)
    found = agreement(student, teacher, 3)
    shuffled = agreement(student[order], teacher[order], 3)
    assert shuffled.spearman == pytest.approx(found.spearman, abs=1e-9)
    assert shuffled.overlap == pytest.approx(found.overlap, abs=1e-9)


@given(seed=seeds)
@settings(max_examples=40, deadline=None)
def test_agreement_is_in_its_range_and_symmetric(seed: int) -> None:
    rng = np.random.default_rng(seed)
    teacher, student = rng.normal(size=(15, 5)), rng.normal(size=(15, 4))
    found = agreement(student, teacher, 4)
    assert -1 <= found.spearman <= 1
    assert 0 <= found.overlap <= 1
    swapped = agreement(teacher, student, 4)
    assert swapped.spearman == pytest.approx(found.spearman, abs=1e-12)
    assert swapped.overlap == pytest.approx(found.overlap, abs=1e-12)


def test_agreement_without_ties_equals_a_direct_computation() -> None:
    rng = np.random.default_rng(5)
    teacher, student = rng.normal(size=(25, 8)), rng.normal(size=(25, 5))
    found = agreement(student, teacher, 4)

    def cosines(vectors: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.array([[a @ b / math.sqrt((a @ a) * (b @ b)) for b in vectors] for a in vectors])

    def nearest(row: npt.NDArray[np.float64], own: int) -> set[int]:
        return set([j for j in np.argsort(-row) if j != own][:4])

    s, t = cosines(student), cosines(teacher)
    pairs = [(i, j) for i in range(25) for j in range(i + 1, 25)]
    rho = spearmanr([s[p] for p in pairs], [t[p] for p in pairs]).statistic
    assert found.spearman == pytest.approx(rho, abs=1e-6)
    assert found.overlap == pytest.approx(np.mean([len(nearest(s[i], i) & nearest(t[i], i)) / 4 for i in range(25)]))


def test_float16_rounding_of_the_teacher_hardly_changes_agreement() -> None:
    teacher = np.random.default_rng(0).normal(size=(300, 64)).astype(np.float32)
    found = agreement(teacher.astype(np.float16), teacher)
    assert found.spearman > 0.9999
    assert found.overlap > 0.98


def test_agreement_of_a_collapsed_student_is_at_chance_level() -> None:
    teacher = np.random.default_rng(0).normal(size=(21, 4))
    found = agreement(np.ones((21, 3)), teacher, 5)
    assert found.spearman == 0
    assert found.overlap == pytest.approx(5 / 20)


def test_a_collapsed_teacher_is_an_error() -> None:
    with pytest.raises(EvaluationError, match="teacher gives all 12 texts the same cosine"):
        agreement(np.random.default_rng(0).normal(size=(12, 4)), np.ones((12, 3)), 5)


def test_agreement_with_a_zero_vector_is_finite() -> None:
    teacher = np.random.default_rng(0).normal(size=(12, 4))
    student = teacher.copy()
    student[3] = 0
    found = agreement(student, teacher, 3)
    assert 0 < found.overlap < 1
    assert math.isfinite(found.spearman)


@pytest.mark.parametrize(("count", "neighbours"), [(11, 10), (10, 10), (5, 0), (1, 1), (0, 1)])
def test_too_few_texts_or_neighbors_are_an_error(count: int, neighbours: int) -> None:
    with pytest.raises(EvaluationError, match="nearest neighbors"):
        agreement(np.ones((count, 2)), np.ones((count, 2)), neighbours)


def test_neighbors_plus_two_texts_are_enough() -> None:
    teacher = np.random.default_rng(0).normal(size=(12, 4))
    assert agreement(teacher, teacher, 10).overlap == 1


def test_different_numbers_of_texts_are_an_error() -> None:
    with pytest.raises(EvaluationError, match=r"student \(20, 3\), teacher \(19, 3\)"):
        agreement(np.ones((20, 3)), np.ones((19, 3)), 3)


def test_vectors_that_are_not_finite_are_an_error_with_their_number() -> None:
    teacher = np.random.default_rng(0).normal(size=(20, 3))
    student = teacher.copy()
    student[[2, 5], 0] = np.nan
    with pytest.raises(EvaluationError, match="2 student vectors hold NaN or infinity"):
        agreement(student, teacher, 3)
