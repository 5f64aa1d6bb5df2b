"""Sharpness-aware minimisation: the gradient is taken at a point near the weights, not at them.

    none           one pass, no ascent
    sam            the worst point of a ball                                     `distill.sharpness.ascent`
    asam           of an ellipsoid along |w|, as the published TALAS code has it
    asam-kwon      as the code of ASAM's authors has it
    norm-only      asam on the parameters of normalisation layers alone
    norm-one-view  the default: the same at every second step; of an objective that compares views of a text the first
                   pass encodes one
    disam          sam, away from what drives the domains' losses apart          `distill.sharpness.disam`
    looksam        sam at every k-th step, its direction kept for those between  `distill.sharpness.looksam`
    msam           ahead along the optimizer's momentum, in one pass             `distill.sharpness.msam`

`norm-only` keeps the part of `asam` that does something: in a sentence encoder most of its perturbation sits on
LayerNorm gains anyway. The first backward then computes no gradient of a matrix, and the copy of the weights is
that of the gains and biases (SAM-ON: Mueller et al., NeurIPS 2023, who perturb normalisation layers alone too).

`norm-one-view` is this package's own, of no paper: `norm-only` without what costs most of its first pass. The term of
TALAS that compares views has a weight of 0.001, and is the only one that needs a second encoding; and an ascent at
every second step (`every=1` has it at all of them) is enough: students score what those of `asam` do.
"""

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from distill.errors import ConfigError
from distill.sharpness.ascent import SCALINGS, Ascent, SharpnessAware
from distill.sharpness.ascent_loss import AscentLoss
from distill.sharpness.looksam import LookSam
from distill.sharpness.msam import MomentumSam
from distill.sharpness.parameters import OBJECTIVE_PREFIX, SELECTIONS, chosen_parameters, norm_parameters

__all__ = [
    "OBJECTIVE_PREFIX",
    "OPTIONS",
    "PRESETS",
    "SCALINGS",
    "SELECTIONS",
    "Ascent",
    "AscentLoss",
    "LookSam",
    "MomentumSam",
    "Preset",
    "SharpnessAware",
    "build_sharpness",
    "norm_parameters",
]


@dataclass(frozen=True)
class Preset:
    """A method under a name.

    Attributes:
        options: all that it has a place for, with the values of its paper or code.
        fixed: what makes it this method.
    """

    options: Mapping[str, Any]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    kind: type[SharpnessAware] = SharpnessAware


_STEPS: dict[str, Any] = {"every": 1, "ascent_terms": None}
PRESETS: dict[str, Preset] = {
    "sam": Preset({"rho": 0.05, "parameters": "all", **_STEPS}, {"scaling": "none"}),
    "asam": Preset({"rho": 0.05, "parameters": "all", **_STEPS}, {"scaling": "abs"}),
    "asam-kwon": Preset({"rho": 0.5, "eta": 0.01, "parameters": "all", **_STEPS}, {"scaling": "kwon"}),
    "norm-only": Preset({"rho": 0.05, **_STEPS}, {"scaling": "abs", "parameters": "norms"}),
    "norm-one-view": Preset(
        {"rho": 0.05, "every": 2},
        {"scaling": "abs", "parameters": "norms", "ascent_loss": AscentLoss(first_view=True)},
    ),
    "disam": Preset({"rho": 0.05, "parameters": "all", "variance_weight": 0.1, **_STEPS}, {"scaling": "none"}),
    # No ascent_terms: what is orthogonal to the gradient of a part of the loss is not orthogonal to descent.
    "looksam": Preset({"rho": 0.05, "parameters": "all", "every": 5, "alpha": 0.7}, kind=LookSam),
    "msam": Preset({"rho": 3.0, "parameters": "all"}, kind=MomentumSam),
}
OPTIONS = ("rho", "eta", "every", "parameters", "ascent_terms", "alpha", "variance_weight")


def build_sharpness(
    name: str, model: nn.Module | Iterable[tuple[str, nn.Parameter]], **options: Any
) -> SharpnessAware | None:
    """The method of that name; None for "none", which has none of the options.

    Args:
        model: the model, or its named parameters where no normalisation layers have to be told from others.
        options: in place of the preset's; None keeps the preset's. `rho` radius, `eta` added to |w|, `every` k,
            `parameters` one of `SELECTIONS`, `ascent_terms` names of terms that the first pass climbs, `alpha` of
            looksam, `variance_weight` of disam.

    Raises:
        ConfigError: an unknown name, an option that is unknown or that the method has no place for, or a value out
            of its range.
    """
    unknown = sorted(options.keys() - set(OPTIONS))
    if unknown:
        raise ConfigError(f"sharpness: unknown option {unknown[0]!r}; the options are {', '.join(OPTIONS)}")
    given = {option: value for option, value in options.items() if value is not None}
    if name == "none":
        if given:
            raise ConfigError(f"sharpness {min(given)}: method 'none' has no place for it; leave it out")
        return None
    if name not in PRESETS:
        known = ["none", *PRESETS]
        near = difflib.get_close_matches(str(name).lower(), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        raise ConfigError(f"sharpness: nothing is called {name!r}; {hint}")
    preset = PRESETS[name]
    for option in given:
        if option not in preset.options:
            raise ConfigError(
                f"sharpness {option}: method {name!r} has no place for it; its options are {', '.join(preset.options)}"
            )
    settled = {**preset.options, **preset.fixed, **given}
    ascent_loss = _climbs(settled.pop("ascent_terms", None), settled.pop("variance_weight", 0.0))
    if ascent_loss is not None:
        settled["ascent_loss"] = ascent_loss
    return preset.kind(chosen_parameters(model, settled.pop("parameters")), **settled)


def _climbs(terms: Any, variance_weight: Any) -> AscentLoss | None:
    if not (isinstance(variance_weight, int | float) and 0 <= variance_weight < math.inf):
        raise ConfigError(f"sharpness variance_weight: expected a number >= 0, found {variance_weight!r}")
    if terms is None and not variance_weight:
        return None
    if terms is not None and not (
        isinstance(terms, list | tuple) and terms and all(isinstance(term, str) for term in terms)
    ):
        raise ConfigError(f"sharpness ascent_terms: expected names of the objective's terms, found {terms!r}")
    return AscentLoss(None if terms is None else tuple(terms), float(variance_weight))
