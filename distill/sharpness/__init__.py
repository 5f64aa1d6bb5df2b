"""Sharpness-aware minimization: the gradient is taken at a point near the weights, not at them.

    none           plain steps
    sam            the worst point of a ball                                     `distill.sharpness.ascent`
    asam           of an ellipsoid along |w|, as in the published TALAS code
    asam-kwon      as in the code of ASAM's authors
    norm-only      asam, only on the parameters of normalization layers
    norm-one-view  the default: the same at every second step; if the objective compares views of a text, the first pass
                   encodes only one
    disam          sam, its ascent loss minus the variance over domains          `distill.sharpness.disam`
    looksam        sam at every k-th step, its direction reused in between       `distill.sharpness.looksam`
    msam           perturbed along the optimizer's momentum, in one pass         `distill.sharpness.msam`

`norm-only` keeps the effective part of `asam`: in a sentence encoder most of its perturbation is on LayerNorm weights
anyway. The first backward pass then needs no matrix gradients, and only the weights and biases of normalization layers
are copied (SAM-ON: Mueller et al., NeurIPS 2023, also perturb only these).

`norm-one-view` is new in this package: `norm-only` without the largest cost of its first pass. The TALAS term that
compares views has a weight of 0.001 and is the only one that needs a second encoding; an ascent at every second step
(`every=1`: at all) suffices: students score like those of `asam`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from distill.errors import ConfigError
from distill.objectives.options import check_weight
from distill.registry import suggestion
from distill.sharpness.ascent import SharpnessAware
from distill.sharpness.ascent_loss import AscentLoss
from distill.sharpness.looksam import LookSam
from distill.sharpness.msam import MomentumSam
from distill.sharpness.parameters import select_parameters

__all__ = ["PRESETS", "AscentLoss", "LookSam", "MomentumSam", "Preset", "SharpnessAware", "build_sharpness"]


@dataclass(frozen=True)
class Preset:
    """A named method.

    Attributes:
        description: one line.
        options: its options, with the values of its paper or code.
        fixed: arguments of `kind` that define the method.
    """

    description: str
    options: Mapping[str, Any]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    kind: type[SharpnessAware] = SharpnessAware


_STEPS: dict[str, Any] = {"every": 1, "ascent_terms": None}
PRESETS: dict[str, Preset] = {
    "sam": Preset(
        "Gradient at the worst point of a ball around the weights (SAM, arXiv 2010.01412).",
        {"rho": 0.05, "parameters": "all", **_STEPS},
        {"scaling": "none"},
    ),
    "asam": Preset(
        "SAM scaled by the size of each weight, as in the TALAS code (ASAM, arXiv 2102.11600).",
        {"rho": 0.05, "parameters": "all", **_STEPS},
        {"scaling": "abs"},
    ),
    "asam-kwon": Preset(
        "SAM scaled by the size of each weight, as in the code of ASAM's authors (arXiv 2102.11600).",
        {"rho": 0.5, "eta": 0.01, "parameters": "all", **_STEPS},
        {"scaling": "kwon"},
    ),
    "norm-only": Preset(
        "asam on normalization layers only (SAM-ON, NeurIPS 2023).",
        {"rho": 0.05, **_STEPS},
        {"scaling": "abs", "parameters": "norms"},
    ),
    "norm-one-view": Preset(
        "norm-only at every second step, with one view in the first pass: the default.",
        {"rho": 0.05, "every": 2},
        {"scaling": "abs", "parameters": "norms", "ascent_loss": AscentLoss(first_view=True)},
    ),
    "disam": Preset(
        "SAM whose ascent loss subtracts the variance over domains (DISAM, arXiv 2405.18861).",
        {"rho": 0.05, "parameters": "all", "variance_weight": 0.1, **_STEPS},
        {"scaling": "none"},
    ),
    # No ascent_terms: a direction orthogonal to the gradient of some terms is not orthogonal to that of the loss.
    "looksam": Preset(
        "SAM at every k-th step, its direction reused in between (LookSAM, arXiv 2203.02714).",
        {"rho": 0.05, "parameters": "all", "every": 5, "alpha": 0.7},
        kind=LookSam,
    ),
    "msam": Preset(
        "Perturbation along the optimizer's momentum, in one pass (MSAM, arXiv 2401.12033).",
        {"rho": 3.0, "parameters": "all"},
        kind=MomentumSam,
    ),
}
OPTIONS = ("rho", "eta", "every", "parameters", "ascent_terms", "alpha", "variance_weight")


def build_sharpness(
    name: str, model: nn.Module | Iterable[tuple[str, nn.Parameter]], **options: Any
) -> SharpnessAware | None:
    """The method of a name; None for "none", which has no options.

    Args:
        model: the model, or its named parameters if the method does not select normalization layers.
        options: override the preset's values unless None: `rho` radius, `eta` added to |w|, `every` k,
            `parameters` one of `SELECTIONS`, `ascent_terms` names of the terms that the first pass ascends, `alpha` of
            looksam, `variance_weight` of disam.

    Raises:
        ConfigError: the name is unknown, the method does not have an option, or a value is out of range.
    """
    unknown = sorted(options.keys() - set(OPTIONS))
    if unknown:
        raise ConfigError(f"sharpness: unknown option {unknown[0]!r}; the options are {', '.join(OPTIONS)}")
    given = {option: value for option, value in options.items() if value is not None}
    if name == "none":
        if given:
            raise ConfigError(f"sharpness {min(given)}: method 'none' has no such option; remove it")
        return None
    if name not in PRESETS:
        raise ConfigError(f"sharpness: no method {name!r}; {suggestion(str(name), ['none', *PRESETS])}")
    preset = PRESETS[name]
    for option in given:
        if option not in preset.options:
            raise ConfigError(
                f"sharpness {option}: method {name!r} has no such option; its options are {', '.join(preset.options)}"
            )
    arguments = {**preset.options, **preset.fixed, **given}
    ascent_loss = _ascent_loss(arguments.pop("ascent_terms", None), arguments.pop("variance_weight", 0.0))
    if ascent_loss is not None:
        arguments["ascent_loss"] = ascent_loss
    return preset.kind(select_parameters(model, arguments.pop("parameters")), **arguments)


def _ascent_loss(terms: Any, variance_weight: Any) -> AscentLoss | None:
    check_weight("variance_weight", variance_weight, of="sharpness")
    if terms is None and not variance_weight:
        return None
    if terms is not None and not (
        isinstance(terms, list | tuple) and terms and all(isinstance(term, str) for term in terms)
    ):
        raise ConfigError(f"sharpness ascent_terms: expected names of the objective's terms, found {terms!r}")
    return AscentLoss(None if terms is None else tuple(terms), float(variance_weight))
