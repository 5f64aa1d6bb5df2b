"""Methods by name: their values, their options and the parameters they perturb."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from distill.errors import ConfigError
from distill.sharpness import (
    PRESETS,
    AscentLoss,
    LookSam,
    MomentumSam,
    SharpnessAware,
    build_sharpness,
)
from distill.sharpness.parameters import norm_parameters, select_parameters


class LlamaRMSNorm(nn.Module):
    """A norm of a model, not a subclass of a torch norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Model(nn.Module):
    """Parameter names as in the trainer: of the student, and of the objective's projection."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student = nn.Sequential(
            nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8), LlamaRMSNorm(8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        )
        self.objective = nn.ModuleDict({"head": nn.Linear(8, 4, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        return self.objective["head"](self.student(x)).square().mean()


NORMS = {"student.1.weight", "student.1.bias", "student.3.weight", "student.5.weight", "student.5.bias"}
INPUTS = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))


def built(name: str, model: nn.Module | Iterable[tuple[str, nn.Parameter]], **options: Any) -> SharpnessAware:
    sharpness = build_sharpness(name, model, **options)
    assert sharpness is not None
    return sharpness


def moved(sharpness: SharpnessAware, model: Model) -> set[str]:
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with sharpness.ascended(model(INPUTS)):
        return {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("sam", SharpnessAware, {"scaling": "none", "rho": 0.05, "eta": 0, "every": 1, "ascent_loss": None}),
        ("asam", SharpnessAware, {"scaling": "abs", "rho": 0.05, "eta": 0, "every": 1, "ascent_loss": None}),
        ("asam-kwon", SharpnessAware, {"scaling": "kwon", "rho": 0.5, "eta": 0.01, "every": 1, "ascent_loss": None}),
        ("norm-only", SharpnessAware, {"scaling": "abs", "rho": 0.05, "every": 1, "ascent_loss": None}),
        (
            "norm-one-view",
            SharpnessAware,
            {"scaling": "abs", "rho": 0.05, "every": 2, "ascent_loss": AscentLoss(first_view=True)},
        ),
        ("disam", SharpnessAware, {"scaling": "none", "rho": 0.05, "ascent_loss": AscentLoss(None, 0.1)}),
        ("looksam", LookSam, {"scaling": "none", "rho": 0.05, "every": 5, "alpha": 0.7}),
        ("msam", MomentumSam, {"rho": 3.0, "passes": 1}),
    ],
)
def test_a_preset_has_the_values_of_its_paper_or_code(
    name: str, kind: type[SharpnessAware], expected: dict[str, Any]
) -> None:
    sharpness = built(name, Model())
    assert type(sharpness) is kind
    assert {attribute: getattr(sharpness, attribute) for attribute in expected} == expected


def test_every_preset_has_a_description() -> None:
    assert all(preset.description.endswith(".") for preset in PRESETS.values())


def test_an_option_overrides_the_presets_value_unless_none() -> None:
    sharpness: Any = built("asam-kwon", Model(), rho=0.9, eta=0.2, every=3, ascent_terms=["tamd"], parameters=None)
    assert (sharpness.rho, sharpness.eta, sharpness.every) == (0.9, 0.2, 3)
    assert sharpness.ascent_loss == AscentLoss(("tamd",))
    sharpness = built("disam", Model(), variance_weight=0.5, ascent_terms=("tamd", "lasd"))
    assert sharpness.ascent_loss == AscentLoss(("tamd", "lasd"), 0.5)
    sharpness = built("looksam", Model(), every=2, alpha=0.1)
    assert (sharpness.every, sharpness.alpha) == (2, 0.1)


def test_none_is_no_sharpness_and_has_no_options() -> None:
    assert build_sharpness("none", Model(), rho=None) is None
    with pytest.raises(ConfigError, match="sharpness alpha: method 'none' has no such option"):
        build_sharpness("none", Model(), rho=0.5, alpha=0.3)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("asan", {}, "no method 'asan'; did you mean 'asam'"),
        ("flat", {}, "known: none, sam, asam, asam-kwon, norm-only, norm-one-view, disam, looksam, msam"),
        ("asam", {"radius": 1}, "unknown option 'radius'; the options are rho, eta, every"),
        ("asam", {"rho": 0}, "rho: expected a number above 0, found 0"),
        ("asam", {"rho": math.nan}, "rho"),
        ("asam", {"rho": "1e-2"}, "rho"),
        ("asam-kwon", {"eta": -1}, "eta: expected a number >= 0"),
        ("asam", {"eta": 0.01}, "eta: method 'asam' has no such option; its options are rho, parameters, every"),
        ("sam", {"alpha": 0.7}, "alpha: method 'sam' has no such option"),
        ("sam", {"variance_weight": 0.1}, "variance_weight: method 'sam' has no such option"),
        ("msam", {"every": 2}, "every: method 'msam' has no such option; its options are rho, parameters"),
        ("msam", {"ascent_terms": ("tamd",)}, "ascent_terms: method 'msam' has no such option"),
        ("looksam", {"ascent_terms": ("tamd",)}, "ascent_terms: method 'looksam' has no such option"),
        ("norm-only", {"parameters": "all"}, "parameters: method 'norm-only' has no such option"),
        ("sam", {"parameters": "heads"}, "parameters: expected one of all, student, norms, found 'heads'"),
        ("sam", {"ascent_terms": ()}, "ascent_terms: expected names"),
        ("sam", {"ascent_terms": "tamd"}, "ascent_terms: expected names"),
        ("disam", {"variance_weight": -0.1}, "variance_weight: expected a number >= 0"),
        ("looksam", {"alpha": math.inf}, "alpha: expected a number >= 0"),
        ("looksam", {"every": 0}, "every"),
    ],
)
def test_an_invalid_name_or_option_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_sharpness(name, Model(), **options)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_no_method_ignores_an_option_that_it_accepts(name: str) -> None:
    other = {"rho": 0.7, "eta": 0.3, "every": 4, "parameters": "student", "ascent_terms": ("tamd",)}
    other |= {"alpha": 0.2, "variance_weight": 0.6}
    plain = built(name, Model())
    for option in PRESETS[name].options:
        changed = built(name, Model(), **{option: other[option]})
        assert _settings(changed) != _settings(plain), option


def _settings(sharpness: SharpnessAware) -> dict[str, Any]:
    names = ("scaling", "rho", "eta", "every", "ascent_loss", "alpha")
    return {name: getattr(sharpness, name, None) for name in names} | {"names": list(sharpness._names.values())}


def test_norms_are_found_by_the_class_of_their_module() -> None:
    model = Model()
    names = {name for name, parameter in model.named_parameters() if parameter in norm_parameters(model)}
    assert names == NORMS


def test_norms_of_a_real_architecture_are_all_its_layer_norms(tiny_student: Path) -> None:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(tiny_student)
    names = {name for name, parameter in model.named_parameters() if parameter in norm_parameters(model)}
    assert names == {name for name, _ in model.named_parameters() if "LayerNorm" in name}
    assert len(names) == 2 * (1 + 2 * 2)  # of the embeddings, and two in each of two layers


def test_all_student_and_norms_move_those_parameters_and_no_others() -> None:
    model = Model()
    everything = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    # The gradient of a bias before a norm over the batch is only rounding.
    everything -= {"student.4.bias"}
    assert moved(built("sam", model), model) - {"student.4.bias"} == everything
    assert moved(built("sam", model, parameters="student"), model) - {"student.4.bias"} == everything - {
        "objective.head.weight"
    }
    assert moved(built("sam", model, parameters="norms"), model) == NORMS


def test_norms_need_the_model() -> None:
    with pytest.raises(ConfigError, match="'norms' needs the model"):
        build_sharpness("norm-only", Model().named_parameters())


def test_an_empty_selection_is_refused() -> None:
    with pytest.raises(ConfigError, match="'norms' selects none"):
        select_parameters(nn.Linear(2, 2), "norms")


def test_norm_only_is_asam_on_the_norms_closed_form() -> None:
    model = Model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    weights = {name: p.detach().double() for name, p in model.named_parameters() if name in NORMS}
    gradients = torch.autograd.grad(model(INPUTS), [p for n, p in model.named_parameters() if n in NORMS])
    g = {name: gradient.double() for name, gradient in zip(weights, gradients, strict=True)}
    norm = math.sqrt(sum(float((weights[name] * g[name]).square().sum()) for name in NORMS))
    sharpness = built("norm-only", model)
    with sharpness.ascended(model(INPUTS)):
        for name, parameter in model.named_parameters():
            if name in NORMS:
                expected = weights[name] + 0.05 * weights[name].square() * g[name] / norm
                torch.testing.assert_close(parameter.detach().double(), expected, rtol=1e-5, atol=1e-7)
    shares = sharpness.perturbation_shares()
    assert sum(shares.values()) == pytest.approx(1)


def test_norm_only_copies_no_other_weight() -> None:
    model = Model()
    sharpness = built("norm-only", model)
    with sharpness.ascended(model(INPUTS)):
        pass
    copies = sum(backup.nbytes for backup in sharpness._backups.values())
    assert copies == sum(parameter.nbytes for parameter in norm_parameters(model)) == 4 * (8 + 8 + 8 + 8 + 8)


def test_the_first_pass_of_norm_only_multiplies_no_matrix_for_a_weight() -> None:
    model = Model()
    operations = {}
    for name in ("asam", "norm-only"):
        loss = model(INPUTS)
        with FlopCounterMode(display=False) as counter, built(name, model).ascended(loss):
            pass
        operations[name] = counter.get_total_flops()
    # Products in the backward pass, batch 16: for inputs of the layers after the first norm, and for weights.
    inputs = 2 * 16 * (8 * 8 + 8 * 8 + 8 * 4)
    weights = 2 * 16 * (6 * 8 + 8 * 8 + 8 * 8 + 8 * 4)
    assert operations == {"asam": inputs + weights, "norm-only": inputs}
