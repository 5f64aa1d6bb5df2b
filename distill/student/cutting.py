"""A student of some layers of another: chosen blocks, renumbered, in a model of the same class.

The encoder is built again from a configuration with fewer layers, and must take over every weight: whatever depends on
a block's number (per-layer lists of the configuration, windows, caches) is then what the class itself makes of it.
Students that start from some layers of their teacher: DistilBERT (arXiv 1910.01108); which layers: Sajjad et al., On
the Effect of Dropping Layers of Pre-trained Transformer Models (arXiv 2004.03844).
"""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from distill.errors import StudentError
from distill.student.student import Student
from teacher_cache.teachers.attention import count_layers
from teacher_cache.teachers.loading import pooler_arguments

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def first_and_last(count: int, depth: int) -> tuple[int, ...]:
    """`depth` of `count` block numbers: the first ones and the last one; the first one alone for 1.

    Close to the best set where sets were compared; evenly spaced ones can be far from it (docs/decisions/0024-cut.md).
    """
    return (*range(depth - 1), count - 1) if depth > 1 else (0,)


def layer_candidates(count: int, depth: int) -> dict[str, tuple[int, ...]]:
    """Name -> block numbers of sets of `depth` of `count` blocks, all with the first block; equal sets once.

    The first ones drop the top (Sajjad et al., 2020); "first and last" replaces the last of them by the last block;
    "ends" drop the middle; the others are spread over all blocks, with and without the last.
    """
    front = -(-depth // 2)
    sets = {
        "first": range(depth),
        "first and last": first_and_last(count, depth),
        "ends": (*range(front), *range(count - (depth - front), count)),
        "evenly spaced": (round(place * (count - 1) / max(depth - 1, 1)) for place in range(depth)),
        "every few": (place * count // depth for place in range(depth)),
    }
    found: dict[tuple[int, ...], str] = {}
    for name, layers in sets.items():
        chosen = tuple(layers)
        if chosen[0] == 0:
            found.setdefault(chosen, name)
    return {name: layers for layers, name in found.items()}


def cut_layers(student: Student, layers: Sequence[int]) -> Student:
    """A student of the blocks `layers`, numbered from 0, with copies of their weights; the other one is not changed.

    Raises:
        StudentError: the architecture has no list of blocks, or a weight has no place in the smaller model.
    """
    encoder: Any = student.encoder
    count = count_layers(encoder)
    lists = [name for name, blocks in block_lists(encoder, count)]
    if not lists:
        raise StudentError(f"the layers of {type(encoder).__name__} cannot be cut: it has no list of {count} blocks")
    weights = _chosen_weights(encoder.state_dict(), lists, layers)
    return with_encoder(student, rebuild(encoder, layers_config(encoder.config, layers), weights))


def layers_config(config: "PretrainedConfig", layers: Sequence[int]) -> Any:
    """A copy of a configuration with these blocks only: their number, and each list with one value per block."""
    cut = copy_config(config)
    text = cut.get_text_config()
    count = int(text.num_hidden_layers)
    for key, values in text.to_dict().items():
        if isinstance(values, list) and len(values) == count and _is_per_layer(key):
            setattr(text, key, [values[layer] for layer in layers])
    text.num_hidden_layers = len(layers)
    return cut


def _is_per_layer(key: str) -> bool:
    """Whether a list of a configuration can have one value per block; other lists may be as long by chance."""
    return key != "architectures" and not key.endswith("token_id")


def copy_config(config: "PretrainedConfig") -> Any:
    """A copy of a configuration, without the attention implementation that a model was switched to."""
    return type(config).from_dict(config.to_dict())


def block_lists(module: nn.Module, count: int, prefix: str = "") -> list[tuple[str, nn.ModuleList]]:
    """Name and module of each list with one entry per block, those inside blocks excluded; XLM has several."""
    found = []
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, nn.ModuleList) and len(child) == count:
            found.append((path, child))
        else:
            found += block_lists(child, count, f"{path}.")
    return found


def _chosen_weights(state: Mapping[str, Tensor], lists: Sequence[str], layers: Sequence[int]) -> dict[str, Tensor]:
    """A state dict with the weights of the chosen blocks under their new numbers."""
    new = {old: number for number, old in enumerate(layers)}
    numbered = re.compile(rf"({'|'.join(map(re.escape, lists))})\.(\d+)\.(.*)")
    weights = {}
    for key, weight in state.items():
        found = numbered.fullmatch(key)
        if found is None:
            weights[key] = weight
        elif int(found[2]) in new:
            weights[f"{found[1]}.{new[int(found[2])]}.{found[3]}"] = weight
        elif int(found[2]) == 0:
            # T5 keeps the table of relative positions of all blocks in the first one: kept if the class wants it there.
            weights.setdefault(f"{_OF_FIRST_BLOCK}{found[1]}.0.{found[3]}", weight)
    return weights


_OF_FIRST_BLOCK = "first block: "


def rebuild(encoder: Any, config: Any, weights: Mapping[str, Tensor]) -> Any:
    """A model of the encoder's class with this configuration and copies of these weights.

    Raises:
        StudentError: a weight is missing, left over or of another shape.
    """
    try:
        built: Any = type(encoder)._from_config(config, dtype=torch.float32, **pooler_arguments(config))
    except (ValueError, TypeError, AttributeError, IndexError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise StudentError(f"{type(encoder).__name__} cannot be built with these sizes: {reason}") from error
    shapes = {key: weight.shape for key, weight in built.state_dict().items()}
    spare = {key.removeprefix(_OF_FIRST_BLOCK): w for key, w in weights.items() if key.startswith(_OF_FIRST_BLOCK)}
    given = {key: weight for key, weight in weights.items() if not key.startswith(_OF_FIRST_BLOCK)}
    given |= {key: spare[key] for key in shapes.keys() - given.keys() if key in spare}
    # A pooler is built without, as students are loaded.
    given = {key: weight for key, weight in given.items() if key in shapes or "pooler" not in key.split(".")}
    wrong = sorted(shapes.keys() ^ given.keys()) or sorted(key for key in shapes if shapes[key] != given[key].shape)
    if wrong:
        raise StudentError(
            f"{type(encoder).__name__} cannot be cut like this: {wrong[0]} of the model and of the smaller one differ; "
            "if block 0 was left out, keep it"
        )
    built.load_state_dict(given)
    if hasattr(built.config, "use_cache"):
        built.config.use_cache = False
    return built.to(next(encoder.parameters()).device).train(encoder.training)


def with_encoder(student: Student, encoder: nn.Module, tokenizer: Any = None) -> Student:
    """A student like another one with another encoder, and optionally another tokenizer."""
    return Student(
        encoder,
        student.tokenizer if tokenizer is None else tokenizer,
        pooling=student.pooling,
        max_length=student.max_length,
        prompt=student.prompt,
        name=student.name,
    )
