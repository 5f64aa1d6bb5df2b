"""The ascent loss: minus DISAM's variance over domains, and of some terms only."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from distill.errors import ConfigError
from distill.objectives.base import Needs, Objective, StudentOutput, StudentShape, TeacherShape, TeacherTargets
from distill.objectives.talas import Talas
from distill.sharpness import AscentLoss, build_sharpness
from distill.sharpness.disam import domain_variance

DOMAINS = torch.tensor([7, 2, 7, 5, 2, 7, 9, 9])  # 5 has only one text


class Mean(Objective):
    """Mean over texts, and a second term; checks that sub-batches are consistent."""

    needs = Needs(views=2)
    second_view_terms = frozenset({"views"})

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, student: StudentOutput, teacher: TeacherTargets) -> dict[str, Tensor]:
        self.seen.append(len(teacher.vectors))
        difference = (student.view(0)[-1] - teacher.vectors).square().sum(-1)
        terms = {"mean": difference.mean(), "size": 0.5 * student.view(0)[-1].square().mean()}
        if student.views > 1:
            terms["views"] = (student.view(0)[-1] - student.view(1)[-1]).square().mean()
        return terms


def batch(views: int = 1, domains: Tensor | None = DOMAINS) -> tuple[Tensor, StudentOutput, TeacherTargets]:
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(1, views * 8, 4, generator=generator).requires_grad_()
    vectors = torch.randn(8, 4, generator=generator)
    return states, StudentOutput(states, views), TeacherTargets(vectors, torch.arange(8), domains)


def ascended(ascent_loss: AscentLoss, objective: Objective, student: StudentOutput, teacher: TeacherTargets) -> Tensor:
    return ascent_loss(objective, student, teacher, objective(student, teacher))


def numpy_terms(states: Tensor, teacher: TeacherTargets, places: Sequence[int]) -> np.ndarray[Any, Any]:
    s = states.detach().numpy()[0, :8][list(places)]
    t = teacher.vectors.numpy()[list(places)]
    return np.array([((s - t) ** 2).sum(-1).mean(), 0.5 * (s**2).mean()])


@pytest.mark.parametrize(("terms", "chosen"), [(None, [1, 1]), (("mean",), [1, 0]), (("size",), [0, 1])])
def test_the_ascent_loss_of_disam_is_the_loss_minus_its_variance_over_domains(terms: Any, chosen: list[int]) -> None:
    states, student, teacher = batch()
    objective = Mean()
    found = ascended(AscentLoss(terms, 0.3), objective, student, teacher)
    parts = [numpy_terms(states, teacher, places) @ chosen for places in ([1, 4], [0, 2, 5], [6, 7])]
    whole = numpy_terms(states, teacher, range(8)) @ chosen
    assert found.item() == pytest.approx(whole - 0.3 * np.var(parts), rel=1e-5)
    assert objective.seen == [8, 2, 3, 2]


def test_the_variance_is_the_mean_squared_deviation() -> None:
    losses = {0: 1.0, 1: 4.0, 2: 7.0}
    found = domain_variance(lambda places: torch.tensor(losses[int(places[0]) // 2]), torch.tensor([0, 0, 1, 1, 2, 2]))
    assert found.item() == pytest.approx(6.0)  # (9 + 0 + 9) / 3


@pytest.mark.parametrize("domains", [[3] * 8, [0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 0, 0, 0, 0, 1]])
def test_fewer_than_two_domains_of_two_texts_have_no_variance(domains: list[int]) -> None:
    _, student, teacher = batch(domains=torch.tensor(domains))
    objective = Mean()
    found = ascended(AscentLoss(None, 0.3), objective, student, teacher)
    plain = torch.stack(list(objective(student, teacher).values())).sum()
    assert found.item() == plain.item()


def test_the_ascent_favors_domains_below_the_mean_as_in_the_closed_form() -> None:
    # Two domains, losses a w and b w at w = 1: L = (a + b) w / 2, V = ((a - b) w / 2)^2.
    # d(L - lambda V)/dw = (a + b) / 2 - lambda (a - b)^2 w / 2 = 2 - 0.1 * 16 / 2 = 1.2 at a = 4, b = 0.
    class Linear(Objective):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(1.0))

        def forward(self, student: StudentOutput, teacher: TeacherTargets) -> dict[str, Tensor]:
            return {"linear": (self.weight * teacher.vectors[:, 0]).mean()}

    objective = Linear()
    states = torch.zeros(1, 4, 1)
    vectors = torch.tensor([[4.0], [4.0], [0.0], [0.0]])
    teacher = TeacherTargets(vectors, torch.arange(4), torch.tensor([0, 0, 1, 1]))
    loss = ascended(AscentLoss(None, 0.1), objective, StudentOutput(states), teacher)
    (gradient,) = torch.autograd.grad(loss, [objective.weight])
    assert gradient.item() == pytest.approx(1.2)


def test_disam_perturbs_as_in_the_closed_form_and_descends_the_plain_loss() -> None:
    # One weight a domain: L_d = c_d w_d^2 / 2, c = (3, 2), w = (1, -2); L = (3/2 + 4) / 2, V = ((4 - 3/2) / 2)^2.
    # dL = (3, -4) / 2; dV = (L_2 - L_1) / 2 * (-3, -4) = 1.25 * (-3, -4); ascent: dL - 0.1 dV = (1.875, -1.5).
    weights = nn.Parameter(torch.tensor([1.0, -2.0]))

    class Quadratic(Objective):
        def forward(self, student: StudentOutput, teacher: TeacherTargets) -> dict[str, Tensor]:
            domains = teacher.vectors[:, 0].long()
            return {"q": (torch.tensor([3.0, 2.0])[domains] * weights[domains].square() / 2).mean()}

    domains = torch.tensor([0, 0, 1, 1])
    teacher = TeacherTargets(domains[:, None].float(), torch.arange(4), domains)
    student = StudentOutput(torch.zeros(1, 4, 1))
    sharpness = build_sharpness("disam", [("weights", weights)], rho=0.5)
    assert sharpness is not None
    assert sharpness.ascent_loss is not None
    with sharpness.ascended(ascended(sharpness.ascent_loss, Quadratic(), student, teacher)):
        length = np.hypot(1.875, 1.5)
        there = np.array([1 + 0.5 * 1.875 / length, -2 - 0.5 * 1.5 / length])
        np.testing.assert_allclose(weights.detach().numpy(), there, rtol=1e-6)
        Quadratic()(student, teacher)["q"].backward()
    assert weights.grad is not None
    np.testing.assert_allclose(weights.grad.numpy(), np.array([3, 2]) * there / 2, rtol=1e-6)
    assert weights.tolist() == [1, -2]


def test_disam_without_domains_is_refused_with_the_command_that_adds_them() -> None:
    _, student, teacher = batch(domains=None)
    with pytest.raises(ConfigError, match="`tcache build CORPUS --domain-key COLUMN`"):
        ascended(AscentLoss(None, 0.1), Mean(), student, teacher)


def test_only_named_terms_are_ascended() -> None:
    states, student, teacher = batch()
    found = ascended(AscentLoss(("size",)), Mean(), student, teacher)
    assert found.item() == pytest.approx(numpy_terms(states, teacher, range(8))[1], rel=1e-6)


def test_an_unknown_term_is_refused_with_the_known_ones() -> None:
    _, student, teacher = batch()
    with pytest.raises(ConfigError, match="no term 'lasd' in this step; known here: mean, size, views"):
        ascended(AscentLoss(("mean", "lasd")), Mean(), student, teacher)


def test_the_second_view_is_skipped_if_no_ascent_term_compares_views() -> None:
    objective = Mean()
    inputs = {
        "input_ids": torch.arange(24).view(12, 2),
        "attention_mask": torch.ones(12, 2),
        "vectors": torch.zeros(6, 3),
        "text_ids": torch.arange(6),
        "domains": None,
    }
    trimmed = AscentLoss(("mean", "size")).select_inputs(objective, inputs)
    assert torch.equal(trimmed["input_ids"], inputs["input_ids"][:6])  # type: ignore[index]
    assert len(trimmed["attention_mask"]) == 6
    assert trimmed["vectors"] is inputs["vectors"]
    for kept in (AscentLoss(("mean", "views")), AscentLoss(None, 0.1)):
        assert kept.select_inputs(objective, inputs) == inputs


def test_one_view_terms_of_talas_do_not_depend_on_the_second_view() -> None:
    torch.manual_seed(0)
    objective = Talas(StudentShape(4, 2, "mean"), TeacherShape(6))
    layers, vectors = torch.randn(3, 16, 4), torch.randn(8, 6)
    teacher = TeacherTargets(vectors, torch.arange(8), DOMAINS)
    ascent_loss = AscentLoss(("tamd", "lasd"), 0.1)
    assert ascent_loss.is_one_view(objective)
    assert not AscentLoss(("tamd", "simcse")).is_one_view(objective)
    one = ascended(ascent_loss, objective, StudentOutput(layers[:, :8]), teacher)
    two = ascended(ascent_loss, objective, StudentOutput(layers, 2), teacher)
    assert one.item() == pytest.approx(two.item(), rel=1e-6)


def test_disam_with_two_views_selects_a_domains_rows_of_both() -> None:
    torch.manual_seed(0)
    objective = Talas(StudentShape(4, 2, "mean"), TeacherShape(6), simcse_weight=1.0)
    layers, vectors = torch.randn(3, 16, 4), torch.randn(8, 6)
    teacher = TeacherTargets(vectors, torch.arange(8), DOMAINS)
    found = ascended(AscentLoss(None, 0.2), objective, StudentOutput(layers, 2), teacher)

    def loss_of(places: list[int]) -> float:
        rows = places + [place + 8 for place in places]
        part = TeacherTargets(vectors[places], torch.arange(len(places)))
        return float(torch.stack(list(objective(StudentOutput(layers[:, rows], 2), part).values())).sum().detach())

    parts = [loss_of(places) for places in ([1, 4], [0, 2, 5], [6, 7])]
    assert found.item() == pytest.approx(loss_of(list(range(8))) - 0.2 * np.var(parts), rel=1e-5)
