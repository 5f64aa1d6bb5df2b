"""Selection of the parameters to perturb, and the kind of each."""

from collections.abc import Iterable

from torch import Tensor, nn

from distill.errors import ConfigError
from distill.objectives.options import check_choice

# Prefix of the objective's parameters in the trainer's model.
OBJECTIVE_PREFIX = "objective."
SELECTIONS = ("all", "student", "norms")


def select_parameters(
    model: nn.Module | Iterable[tuple[str, nn.Parameter]], selection: str
) -> list[tuple[str, nn.Parameter]]:
    """The named parameters of a selection.

    Args:
        model: the model, or its named parameters.
        selection: "all"; "student", all but the objective's projections; "norms", `norm_parameters`.
    """
    check_choice("parameters", selection, SELECTIONS, of="sharpness")
    named = list(model.named_parameters()) if isinstance(model, nn.Module) else list(model)
    if selection == "student":
        named = [(name, parameter) for name, parameter in named if not name.startswith(OBJECTIVE_PREFIX)]
    if selection == "norms":
        if not isinstance(model, nn.Module):
            raise ConfigError(
                "sharpness parameters: 'norms' needs the model instead of its named parameters, to find the "
                "normalization layers"
            )
        norms = norm_parameters(model)
        named = [(name, parameter) for name, parameter in named if parameter in norms]
    if not named:
        raise ConfigError(
            f"sharpness parameters: {selection!r} selects none of the model's parameters; use a method with other "
            "parameters, such as asam, or none"
        )
    return named


def norm_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Weights and biases of normalization layers: modules whose class name ends in Norm, or Norm1d to Norm3d.

    Norms of models (LlamaRMSNorm, T5LayerNorm) have no common base class, only the name.
    """
    return {
        parameter
        for module in model.modules()
        if type(module).__name__.rstrip("123d").endswith("Norm")
        for parameter in module.parameters(recurse=False)
    }


def parameter_kind(name: str, parameter: Tensor) -> str:
    """ "projections" (of the objective), "norm gains", "norm biases", "biases", "embeddings" or "matrices"."""
    if name.startswith(OBJECTIVE_PREFIX):
        return "projections"
    module, _, own = name.rpartition(".")
    if own == "bias":
        return "norm biases" if "norm" in module.rpartition(".")[2].lower() else "biases"
    if parameter.ndim < 2:
        return "norm gains"
    return "embeddings" if "embedding" in name.lower() else "matrices"
