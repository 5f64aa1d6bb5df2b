import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from distill.errors import ConfigError
from distill.objectives.base import Objective, StudentOutput, TeacherTargets
from distill.objectives.simcse import SimCSE, info_nce
from tests.contracts.objective_contract import SHAPE, TEACHER_SHAPE, TEXT_IDS, ObjectiveContract

FIRST = torch.tensor([[2.0, 0.0], [0.0, 0.5]])
SECOND = torch.tensor([[3.0, 4.0], [0.0, 7.0]])


class TestSimCSE(ObjectiveContract):
    name = "simcse"
    used_states = frozenset({(0, 3), (1, 3)})

    def make(self) -> Objective:
        return SimCSE(SHAPE, TEACHER_SHAPE)

    def test_it_is_info_nce_of_the_last_layer_at_its_own_temperature(self) -> None:
        states = self.states(2)
        terms = SimCSE(SHAPE, TEACHER_SHAPE, temperature=0.3)(
            StudentOutput(states, views=2), TeacherTargets(self.vectors(), TEXT_IDS)
        )
        assert terms.keys() == {"simcse"}
        assert torch.equal(terms["simcse"], info_nce(states[-1, :6], states[-1, 6:], 0.3, TEXT_IDS))

    def test_the_official_preset_keeps_repeated_texts_as_negatives(self) -> None:
        states = self.states(2)
        student, teacher = StudentOutput(states, views=2), TeacherTargets(self.vectors(), TEXT_IDS)
        objective = SimCSE(SHAPE, TEACHER_SHAPE, mask_duplicates=False)
        assert SimCSE.presets["official"] == {"mask_duplicates": False}
        assert torch.equal(objective(student, teacher)["simcse"], info_nce(states[-1, :6], states[-1, 6:], 0.05))

    @pytest.mark.parametrize("temperature", [0, -0.1, math.inf, math.nan, "0.1", None])
    def test_a_temperature_that_is_no_positive_number_is_refused(self, temperature: Any) -> None:
        with pytest.raises(ConfigError, match="temperature: expected a number above 0"):
            SimCSE(SHAPE, TEACHER_SHAPE, temperature=temperature)


def test_info_nce_by_hand() -> None:
    # Unit rows: first (1, 0), (0, 1); second (0.6, 0.8), (0, 1). Cosines over 0.1:
    #     [6, 0]   row 0: -log(e^6 / (e^6 + e^0))  = log(1 + e^-6)
    #     [8, 10]  row 1: -log(e^10 / (e^8 + e^10)) = log(1 + e^-2)
    expected = (math.log(1 + math.exp(-6)) + math.log(1 + math.exp(-2))) / 2
    assert info_nce(FIRST, SECOND, 0.1).item() == pytest.approx(expected, rel=1e-5)


def test_info_nce_goes_from_the_first_view_to_the_second_only() -> None:
    # The other direction reads the columns: [6, 8] and [0, 10].
    backwards = (math.log(1 + math.exp(2)) + math.log(1 + math.exp(-10))) / 2
    assert info_nce(SECOND, FIRST, 0.1).item() == pytest.approx(backwards, rel=1e-5)


def test_another_row_of_the_same_text_is_not_a_negative() -> None:
    assert info_nce(FIRST, SECOND, 0.1, torch.tensor([5, 5])).item() == 0
    assert torch.equal(info_nce(FIRST, SECOND, 0.1, torch.tensor([5, 6])), info_nce(FIRST, SECOND, 0.1))


def test_no_gradient_pushes_the_same_text_apart() -> None:
    first, second = FIRST.clone().requires_grad_(), SECOND.clone().requires_grad_()
    info_nce(first, second, 0.1, torch.tensor([5, 5])).backward()
    assert first.grad is not None
    assert second.grad is not None
    assert torch.equal(first.grad, torch.zeros(2, 2))
    assert torch.equal(second.grad, torch.zeros(2, 2))


@pytest.mark.parametrize("text_ids", [None, torch.tensor([3, 1, 3, 3, 2])])
def test_info_nce_equals_numpy_in_double_precision(text_ids: Tensor | None) -> None:
    first, second = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    a, b = first.double().numpy(), second.double().numpy()
    total = 0.0
    for i in range(5):
        cosines = [a[i] @ b[j] / np.linalg.norm(a[i]) / np.linalg.norm(b[j]) for j in range(5)]
        rivals = [j for j in range(5) if j == i or text_ids is None or text_ids[i] != text_ids[j]]
        total -= math.log(math.exp(cosines[i] / 0.2) / sum(math.exp(cosines[j] / 0.2) for j in rivals))
    assert info_nce(first, second, 0.2, text_ids).item() == pytest.approx(total / 5, rel=1e-5)
