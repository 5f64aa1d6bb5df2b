"""What `training.memory`, `freeze_embeddings` and 8-bit optimiser states change about a student."""

import os
import re
import weakref

import torch
from torch import nn

from distill.config import TrainingConfig
from distill.errors import ConfigError
from distill.student.student import Student

# Where a user tells torch how to allocate on a GPU.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = "expandable_segments"


def save_memory(student: Student, training: TrainingConfig) -> None:
    """Prepare a student, and a GPU's allocator, for what training may take; block by block is Trainer's part.

    Raises:
        ConfigError: its word embeddings are to be frozen, and cannot be told from its other weights.
    """
    student.recompute_portions = training.memory == "low"
    if training.freeze_embeddings:
        if student.word_embeddings is None:
            raise ConfigError(
                f"student {student.name!r} does not say which of its weights are word embeddings; set "
                "training.freeze_embeddings=false"
            )
        student.word_embeddings.requires_grad_(False)
    if torch.cuda.is_available() and _EXPANDABLE not in _told() and uses_expandable_segments(training):
        said = torch._C._accelerator_getAllocatorSettings()
        if _EXPANDABLE not in said:  # what was said before would be reset if it were not said again
            torch._C._accelerator_setAllocatorSettings(",".join(filter(None, [said, f"{_EXPANDABLE}:True"])))


def uses_expandable_segments(training: TrainingConfig) -> bool:
    """Whether a GPU's memory is taken in segments that grow: as the environment says, else where memory is low.

    Blocks that are computed again leave holes of many sizes; in segments of a fixed size few of them are used again.
    """
    said = re.search(rf"{_EXPANDABLE}\s*:\s*(\w+)", _told())
    if said is not None:
        return said[1].lower() == "true"
    # Another allocator than torch's own has no segments, and an older torch cannot be told.
    settable = "backend" not in _told() and hasattr(torch._C, "_accelerator_setAllocatorSettings")
    return training.memory == "low" and settable


def _told() -> str:
    return ",".join(os.environ.get(variable, "") for variable in ALLOCATOR_VARIABLES)


def keep_embedding_states_32bit(student: Student) -> None:
    """Leave the optimiser states of embedding tables in float32, as bitsandbytes' authors and Trainer do.

    Dettmers et al. (8-bit Optimizers via Block-wise Quantization, ICLR 2022) found training unstable otherwise.
    """
    from bitsandbytes.optim.optimizer import GlobalOptimManager

    manager = GlobalOptimManager.get_instance()
    for module in student.modules():
        if isinstance(module, nn.Embedding) and module.weight.requires_grad:
            manager.override_config(module.weight, "optim_bits", 32)
            # It is known there by its address, which another tensor may have later in this process.
            weakref.finalize(module.weight, manager.pid2config.pop, id(module.weight), None)
