"""Which parameters are perturbed, and what kind each of them is."""

from collections.abc import Iterable

from torch import Tensor, nn

from distill.errors import ConfigError

# How the trainer names the parameters that an objective owns.
OBJECTIVE_PREFIX = "objective."
SELECTIONS = ("all", "student", "norms")


def chosen_parameters(
    model: nn.Module | Iterable[tuple[str, nn.Parameter]], selection: str
) -> list[tuple[str, nn.Parameter]]:
    """The named parameters that a selection holds.

    Args:
        model: the model, or its named parameters.
        selection: "all"; "student", all but the objective's own projections; "norms", `norm_parameters`.

    Raises:
        ConfigError: an unknown or empty selection, or "norms" of parameters whose modules are not known.
    """
    if selection not in SELECTIONS:
        raise ConfigError(f"sharpness parameters: expected one of {', '.join(SELECTIONS)}, found {selection!r}")
    named = list(model.named_parameters()) if isinstance(model, nn.Module) else list(model)
    if selection == "student":
        named = [(name, parameter) for name, parameter in named if not name.startswith(OBJECTIVE_PREFIX)]
    if selection == "norms":
        if not isinstance(model, nn.Module):
            raise ConfigError(
                "sharpness parameters: which ones belong to normalisation layers only their modules tell; give the "
                "model itself instead of its named parameters"
            )
        norms = norm_parameters(model)
        named = [(name, parameter) for name, parameter in named if parameter in norms]
    if not named:
        raise ConfigError(
            f"sharpness parameters: {selection!r} selects none of the model's parameters; use a method that perturbs "
            "others, such as asam, or none"
        )
    return named


def norm_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Gains and biases of normalisation layers: of modules whose class is called ...Norm, torch's 1d to 3d too.

    Models bring norms of their own (LlamaRMSNorm, T5LayerNorm) that share no base class, only the name.
    """
    return {
        parameter
        for module in model.modules()
        if type(module).__name__.rstrip("123d").endswith("Norm")
        for parameter in module.parameters(recurse=False)
    }


def parameter_kind(name: str, parameter: Tensor) -> str:
    """ "projections" (the objective's own), "norm gains", "norm biases", "biases", "embeddings" or "matrices"."""
    if name.startswith(OBJECTIVE_PREFIX):
        return "projections"
    module, _, own = name.rpartition(".")
    if own == "bias":
        return "norm biases" if "norm" in module.rpartition(".")[2].lower() else "biases"
    if parameter.ndim < 2:
        return "norm gains"
    return "embeddings" if "embedding" in name.lower() else "matrices"
