"""Parameter groups of the optimizer: learning rates of heads and student layers, and what weight decay applies to.

With a layer decay d the learning rate of student layer l of L is `learning_rate * d^(L - l)`, lowest for the
embeddings, layer 0 (Clark et al., ELECTRA, arXiv 2003.10555; Bao et al., BEiT, arXiv 2106.08254).
"""

from collections.abc import Collection
from typing import Any

from distill.config import TrainingConfig
from distill.errors import ConfigError
from distill.objectives.base import Objective
from distill.student.cutting import block_lists
from distill.student.student import Student
from teacher_cache.teachers.attention import count_layers


def parameter_groups(
    student: Student, objective: Objective, training: TrainingConfig, decayed: Collection[str]
) -> list[dict[str, Any]]:
    """Groups of trainable parameters for an optimizer: the student's from its last layer down, then the heads'.

    Args:
        decayed: names within student and objective ("student.encoder...") of what weight decay applies to, if
            `training.decay_norms_and_biases` is off.
    """
    layers: dict[str, int] = {}
    last = 0
    if training.layer_decay < 1:
        layers, last = layer_numbers(student), count_layers(student.encoder)
    groups: dict[tuple[int, bool], dict[str, Any]] = {}
    for number, (prefix, module, rate) in enumerate(
        (("student.", student, training.learning_rate), ("objective.", objective, training.head_learning_rate))
    ):
        for name, parameter in module.named_parameters(prefix=prefix.rstrip(".")):
            if not parameter.requires_grad:
                continue
            # Layers below the last one: 0 for the heads and without a layer decay.
            below = last - layers[name] if number == 0 and layers else 0
            bare = not training.decay_norms_and_biases and name not in decayed
            key = (below if number == 0 else last + 1, bare)
            group = groups.setdefault(key, {"params": [], "lr": rate * training.layer_decay**below})
            group["params"].append(parameter)
            if bare:
                group["weight_decay"] = 0.0
    return [groups[key] for key in sorted(groups)]


def layer_numbers(student: Student) -> dict[str, int]:
    """The layer of each parameter of a student, by its name with "student." before it.

    Block number l of L, counted from 1, is layer l. Parameters that come before the blocks are layer 0, those after
    them (a final normalization, a position bias that all blocks share) layer L.

    Raises:
        ConfigError: the encoder has no list of blocks, or shares one among all layers.
    """
    encoder, count = student.encoder, count_layers(student.encoder)
    found = block_lists(encoder, count)
    if not found:
        raise ConfigError(
            f"training.layer_decay needs one module for each of the {count} layers of student {student.name!r}, but "
            "its architecture has none; set training.layer_decay=1"
        )
    blocks, numbers, layer = f"{found[0][0]}.", {}, 0
    for name, _ in encoder.named_parameters():
        inside = name.startswith(blocks)
        layer = int(name.removeprefix(blocks).partition(".")[0]) + 1 if inside else (count if layer else 0)
        numbers[f"student.encoder.{name}"] = layer
    return numbers
