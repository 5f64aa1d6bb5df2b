"""Losses that compare with the teacher are 0 if student equals teacher, and above 0 otherwise."""

import pytest
import torch
from torch import Tensor, nn

from distill.objectives.base import Objective, StudentOutput, StudentShape, TeacherShape, TeacherTargets, TokenStates
from distill.objectives.cdm import CDM
from distill.objectives.jasper import Jasper
from distill.objectives.rkd import RKD

STUDENT, TEACHER = StudentShape(6, 2, "mean"), TeacherShape(6, token_dim=6, layers=2, heads=1, causal=False)
VECTORS = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


def with_identity(objective: Objective) -> Objective:
    for module in objective.modules():
        if isinstance(module, nn.Linear):
            nn.init.eye_(module.weight)
    return objective


def terms(objective: Objective, vectors_of_student: Tensor) -> dict[str, Tensor]:
    """Terms for a student with these vectors, and three tokens a text made of them."""
    mask, special = torch.ones(5, 3, dtype=torch.bool), torch.zeros(5, 3, dtype=torch.bool)

    def tokens(vectors: Tensor) -> TokenStates:
        return TokenStates(torch.stack([vectors, vectors.flip(1), -vectors], dim=1), mask, special)

    student = StudentOutput(torch.stack([vectors_of_student] * 3), 1, tokens(vectors_of_student))
    targets = TeacherTargets(
        VECTORS, torch.arange(5), tokens=tokens(VECTORS), alignment=torch.eye(3).expand(5, 3, 3).contiguous()
    )
    found: dict[str, Tensor] = objective(student, targets)
    return found


@pytest.mark.parametrize(
    "objective",
    [
        RKD(STUDENT, TEACHER),
        Jasper(STUDENT, TEACHER, triplet_weight=0, stage_one_epochs=0),
        CDM(STUDENT, TEACHER, simcse_weight=0),
    ],
    ids=lambda objective: type(objective).__name__,
)
def test_a_loss_is_zero_only_if_student_equals_teacher(objective: Objective) -> None:
    objective = with_identity(objective)
    for name, value in terms(objective, VECTORS).items():
        assert value.item() == pytest.approx(0, abs=1e-5), name
    other = VECTORS + 0.1 * torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    for name, value in terms(objective, other).items():
        assert value.item() > 1e-5, name
