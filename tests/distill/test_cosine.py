import pytest
import torch

from distill.errors import ConfigError
from distill.objectives.base import StudentOutput, StudentShape, TeacherShape, TeacherTargets
from distill.objectives.cosine import Cosine
from distill.objectives.talas import Talas

STUDENT = StudentShape(3, 2, "mean")
TEACHER = TeacherShape(2, normalized=True)


def batch() -> tuple[StudentOutput, TeacherTargets]:
    layers = torch.zeros(3, 2, 3)
    layers[-1] = torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    return StudentOutput(layers), TeacherTargets(torch.tensor([[1.0, 0.0], [0.6, 0.8]]), torch.arange(2))


def test_the_loss_is_the_mean_of_one_minus_the_cosine() -> None:
    objective = Cosine(STUDENT, TEACHER)
    weight = objective.projection()
    assert weight is not None
    weight.data.copy_(torch.tensor([[3.0, 0.0, 0.0], [0.0, 1.0, 0.0]]))
    # Cosines 1 and 0.8.
    assert objective(*batch())["cosine"].item() == pytest.approx(0.1)
    assert not objective.in_teacher_space


def test_an_identity_head_compares_the_vectors_themselves() -> None:
    objective = Cosine(StudentShape(2, 2, "mean"), TEACHER, head="identity")
    student = StudentOutput(torch.tensor([[[0.0, 1.0], [1.0, 0.0]]]).repeat(3, 1, 1))
    assert objective(student, batch()[1])["cosine"].item() == pytest.approx(1 - (0 + 0.6) / 2)
    assert objective.in_teacher_space
    assert objective.projection() is None
    assert not list(objective.parameters())


def test_it_is_the_anchor_of_talas_for_one_layer_from_equal_initial_values() -> None:
    student = StudentOutput(torch.randn(3, 8, 3, generator=torch.Generator().manual_seed(1)))
    teacher = TeacherTargets(torch.randn(8, 2, generator=torch.Generator().manual_seed(2)), torch.arange(8))
    losses = []
    for make in (
        lambda: Cosine(STUDENT, TEACHER),
        lambda: Talas(STUDENT, TEACHER, anchored_layers=1, tamd_weight=1, lasd_weight=0, simcse_weight=0),
    ):
        torch.manual_seed(0)
        losses.append(sum(make()(student, teacher).values()))
    assert losses[0] == losses[1]


def test_an_identity_head_needs_equal_widths() -> None:
    with pytest.raises(ConfigError, match="equal widths; the student's is 3 and the teacher's 2"):
        Cosine(STUDENT, TEACHER, head="identity")


@pytest.mark.parametrize("make", [Cosine, Talas])
def test_an_auto_head_is_learned_only_between_different_widths(make: type[Cosine] | type[Talas]) -> None:
    equal = make(StudentShape(2, 2, "mean"), TEACHER, head="auto")
    assert equal.in_teacher_space
    assert equal.projection() is None
    other = make(STUDENT, TEACHER, head="auto")
    assert not other.in_teacher_space
    assert other.projection() is not None
