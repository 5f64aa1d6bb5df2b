import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from distill.errors import ConfigError
from distill.objectives.base import Objective, StudentOutput, StudentShape, TeacherShape, TeacherTargets
from distill.objectives.simcse import info_nce
from distill.objectives.talas import Talas
from tests.contracts.objective_contract import SHAPE, TEACHER_SHAPE, TEXT_IDS, ObjectiveContract

TWO_LAYERS = StudentShape(dim=2, layers=2, pooling="mean")
# Batch of two texts, layers 0, 1, 2.
STATES = torch.tensor(
    [
        [[1.0, 0.0], [0.0, 3.0]],
        [[2.0, 0.0], [3.0, 4.0]],
        [[0.5, 0.0], [9.0, 0.0]],
    ]
)
TEACHER = TeacherTargets(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1]))


def only(term: str, **options: Any) -> dict[str, Any]:
    """Options that leave one term, with weight 1."""
    return {f"{name}_weight": float(name == term) for name in ("tamd", "lasd", "simcse")} | options


def with_identity_heads(objective: Talas) -> Talas:
    for head in objective.heads.parameters():
        torch.nn.init.eye_(head)
    return objective


def terms(objective: Talas, states: Tensor, teacher: TeacherTargets, views: int = 1) -> dict[str, Tensor]:
    return objective.forward(StudentOutput(states, views=views), teacher)


class TestTalas(ObjectiveContract):
    name = "talas"
    used_states = frozenset({(0, 0), (0, 1), (0, 2), (0, 3), (1, 3)})

    def make(self) -> Objective:
        torch.manual_seed(0)
        return Talas(SHAPE, TEACHER_SHAPE)

    def test_it_equals_numpy_in_double_precision(self) -> None:
        objective = Talas(SHAPE, TEACHER_SHAPE, anchored_layers=3, start_layer=1, head_init_std=0.5, simcse_weight=0.2)
        states, vectors = self.states(2), self.vectors()
        found = terms(objective, states, TeacherTargets(vectors, TEXT_IDS), views=2)

        e = states[:, :6].double().numpy()
        t = vectors.double().numpy()
        unit_t = t / np.linalg.norm(t, axis=1, keepdims=True)
        heads = [head.detach().double().numpy() for head in objective.heads.parameters()]
        distances = []
        for layer, head in zip((1, 2, 3), heads, strict=True):
            z = e[layer] @ head.T
            distances.append(np.mean(1 - np.sum(z / np.linalg.norm(z, axis=1, keepdims=True) * unit_t, axis=1)))
        unit_e = e / np.linalg.norm(e, axis=2, keepdims=True)
        grams = [rows @ rows.T for rows in unit_e]
        gaps = [np.linalg.norm(grams[layer + 1] - grams[layer], "fro") ** 2 / 36 for layer in (1, 2)]

        assert found["tamd"].item() == pytest.approx(0.75 * np.mean(distances), rel=1e-5)
        assert found["lasd"].item() == pytest.approx(np.mean(gaps), rel=1e-5)
        contrast = info_nce(states[3, :6], states[3, 6:], 0.1, TEXT_IDS)
        assert found["simcse"].item() == pytest.approx(0.2 * contrast.item(), rel=1e-6)


def test_the_weights_of_the_paper_are_the_default() -> None:
    objective = Talas(SHAPE, TEACHER_SHAPE)
    assert (objective.tamd_weight, objective.lasd_weight, objective.simcse.weight) == (0.75, 1.0, 0.001)
    assert objective.simcse.temperature == 0.1
    assert objective.needs.views == 2
    assert Talas.presets["paper"] == {}


def test_tamd_by_hand() -> None:
    # Through identity heads: layer 1 cosines 1 and 0.8 -> mean distance 0.1; layer 2 cosines 1 and 0 -> 0.5.
    both = with_identity_heads(Talas(TWO_LAYERS, TeacherShape(2), **only("tamd")))
    assert terms(both, STATES, TEACHER)["tamd"].item() == pytest.approx(0.3)
    top = with_identity_heads(Talas(TWO_LAYERS, TeacherShape(2), anchored_layers=1, **only("tamd")))
    assert terms(top, STATES, TEACHER)["tamd"].item() == pytest.approx(0.5)


def test_tamd_is_zero_for_equal_directions() -> None:
    vectors = torch.randn(4, 5, generator=torch.Generator().manual_seed(3))
    states = torch.stack([vectors * scale for scale in (1.0, 0.1, 7.0, 3.0)])
    objective = with_identity_heads(Talas(SHAPE, TeacherShape(5), **only("tamd")))
    loss = terms(objective, states, TeacherTargets(vectors, torch.arange(4)))["tamd"]
    assert loss.item() == pytest.approx(0, abs=1e-6)


def test_the_length_of_a_teacher_vector_does_not_matter() -> None:
    objective = with_identity_heads(Talas(TWO_LAYERS, TeacherShape(2), **only("tamd")))
    long = TeacherTargets(TEACHER.vectors * 4, TEACHER.text_ids)
    assert torch.equal(terms(objective, STATES, long)["tamd"], terms(objective, STATES, TEACHER)["tamd"])


def test_lasd_by_hand() -> None:
    # The cosine between the two texts is 0, 0.6, 1 at layers 0, 1, 2; the diagonals are equal. Each pair has
    # two such entries of four: (0, 1) gives 2 * 0.6^2 / 4 = 0.18, (1, 2) gives 2 * 0.4^2 / 4 = 0.08.
    loss = terms(Talas(TWO_LAYERS, TeacherShape(2), **only("lasd")), STATES, TEACHER)["lasd"]
    assert loss.item() == pytest.approx((0.18 + 0.08) / 2)


@pytest.mark.parametrize("options", [{"start_layer": 1}, {"depth": 1}, {"start_layer": 0, "depth": 1}])
def test_start_layer_and_depth_choose_the_upper_pairs(options: dict[str, Any]) -> None:
    loss = terms(Talas(TWO_LAYERS, TeacherShape(2), **only("lasd"), **options), STATES, TEACHER)["lasd"]
    assert loss.item() == pytest.approx(0.08)


@pytest.mark.parametrize(
    ("pooling", "options", "expected"),
    [
        ("cls", {}, 0.08),
        ("mean", {}, 0.13),
        ("last_token", {}, 0.13),
        ("cls", {"start_layer": 0}, 0.13),
        ("cls", Talas.presets["official"], 0.13),
    ],
)
def test_the_embedding_layer_is_aligned_unless_cls_pooling_makes_it_constant(
    pooling: str, options: dict[str, Any], expected: float
) -> None:
    objective = Talas(StudentShape(2, 2, pooling), TeacherShape(2), **only("lasd"), **options)
    assert terms(objective, STATES, TEACHER)["lasd"].item() == pytest.approx(expected)


def test_a_detached_guide_gets_no_gradient() -> None:
    # The rows of layer 2 are parallel, where a cosine is stationary: move one, so that a gradient can show.
    states = STATES + torch.tensor([[0.0, 0.0], [0.1, 0.2]])
    losses = []
    for detach_guide, reached in ((False, {0, 1, 2}), (True, {0, 1})):
        layers = states.clone().requires_grad_()
        loss = terms(Talas(TWO_LAYERS, TeacherShape(2), detach_guide=detach_guide, **only("lasd")), layers, TEACHER)[
            "lasd"
        ]
        loss.backward()
        losses.append(loss.item())
        assert layers.grad is not None
        assert set(layers.grad.abs().sum((1, 2)).nonzero().flatten().tolist()) == reached
    assert losses[0] == losses[1]


@pytest.mark.parametrize("kept", ["tamd", "lasd", "simcse"])
def test_a_term_of_weight_zero_needs_nothing(kept: str) -> None:
    objective = Talas(TWO_LAYERS, TeacherShape(2), **only(kept))
    views = 2 if kept == "simcse" else 1
    assert objective.needs.views == views
    assert Talas.needs.views == 2
    assert terms(objective, STATES.repeat(1, views, 1), TEACHER, views).keys() == {kept}
    assert len(objective.heads) == (2 if kept == "tamd" else 0)
    assert (objective.projection() is None) == (kept != "tamd")


def test_repeated_texts_are_negatives_only_without_the_mask() -> None:
    teacher = TeacherTargets(TEACHER.vectors, torch.tensor([8, 8]))
    views = STATES.repeat(1, 2, 1)
    masked = terms(Talas(TWO_LAYERS, TeacherShape(2), **only("simcse")), views, teacher, 2)["simcse"]
    official = Talas(TWO_LAYERS, TeacherShape(2), **only("simcse", **Talas.presets["official"]))
    assert masked.item() == 0
    # All four cosines at layer 2 are 1.
    assert terms(official, views, teacher, 2)["simcse"].item() == pytest.approx(math.log(2))


def test_only_anchored_layers_have_heads_and_they_start_small() -> None:
    objective = Talas(StudentShape(200, 6, "mean"), TeacherShape(300), anchored_layers=4)
    weights: list[Tensor] = list(objective.heads.parameters())
    assert [tuple(weight.shape) for weight in weights] == [(300, 200)] * 4
    assert torch.stack(weights).std().item() == pytest.approx(1e-3, rel=0.02)


def test_the_projection_is_the_head_of_the_last_layer() -> None:
    objective = Talas(SHAPE, TEACHER_SHAPE, anchored_layers=3)
    states = torch.zeros(4, 1, 5)
    states[3] = 1
    projection = objective.projection()
    assert projection is not None
    with torch.no_grad():
        projection.fill_(1)
    teacher = TeacherTargets(torch.ones(1, TEACHER_SHAPE.dim), torch.zeros(1))
    # The other two anchored states are zero, with cosine 0: (1 + 1 + 0) / 3 * 0.75.
    found = objective(StudentOutput(states.repeat(1, 2, 1), views=2), teacher)
    assert found["tamd"].item() == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"anchored_layers": 0}, "anchored_layers: expected a whole number from 1 to 3"),
        ({"anchored_layers": 4}, "anchored_layers: expected a whole number from 1 to 3"),
        ({"anchored_layers": 1.5}, "anchored_layers"),
        ({"start_layer": 3}, "start_layer: expected a whole number from 0 to 2"),
        ({"start_layer": -1}, "start_layer"),
        ({"depth": 4}, "depth: expected a whole number from 1 to 3"),
        ({"depth": 3, "start_layer": 1}, "depth: expected a whole number from 1 to 2"),
        ({"depth": 0}, "depth"),
        ({"tamd_weight": -1.0}, "tamd_weight: expected a number >= 0"),
        ({"lasd_weight": math.nan}, "lasd_weight"),
        ({"simcse_weight": "0.1"}, "simcse_weight"),
        ({"tamd_weight": 0, "lasd_weight": 0, "simcse_weight": 0}, "_weight above 0"),
        ({"temperature": 0.0}, "temperature"),
        ({"views": "both"}, "views: expected one of dropout, pair, found 'both'"),
        ({"head_init_std": 0.0}, "head_init_std"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Talas(SHAPE, TEACHER_SHAPE, **options)


def test_a_cls_student_of_one_layer_is_refused() -> None:
    shape = StudentShape(5, 1, "cls")
    with pytest.raises(ConfigError, match="set start_layer=0 or lasd_weight=0"):
        Talas(shape, TEACHER_SHAPE, anchored_layers=1)
    assert Talas(shape, TEACHER_SHAPE, anchored_layers=1, lasd_weight=0).lasd_weight == 0


def test_identity_heads_anchor_the_states_themselves() -> None:
    shape = StudentShape(dim=2, layers=1, pooling="mean")
    objective = Talas(shape, TeacherShape(2), anchored_layers=1, head="identity", **only("tamd"))
    states = torch.tensor([[[9.0, 9.0]], [[3.0, 4.0]]])  # layers 0 and 1 of one text
    teacher = TeacherTargets(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    terms = objective(StudentOutput(states), teacher)
    assert terms["tamd"].item() == pytest.approx(1 - 0.6)  # cos((3, 4), (1, 0)) = 3/5
    assert list(objective.parameters()) == []
    assert objective.projection() is None
    assert objective.in_teacher_space


def test_identity_heads_need_equal_widths() -> None:
    with pytest.raises(ConfigError, match="equal widths; the student's is 5 and the teacher's 7"):
        Talas(StudentShape(dim=5, layers=3, pooling="mean"), TeacherShape(7), head="identity")
