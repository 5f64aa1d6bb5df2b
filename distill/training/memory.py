"""`training.memory`, `freeze_embeddings` and 8-bit optimizer states, applied to a student."""

import os
import re
import weakref

import torch
from torch import nn

from distill.config import TrainingConfig
from distill.errors import ConfigError
from distill.student.student import Student

# Settings of torch's GPU allocator.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = "expandable_segments"


def save_memory(student: Student, training: TrainingConfig) -> None:
    """Apply the memory settings to a student and the GPU allocator; Trainer enables activation checkpointing.

    Raises:
        ConfigError: the word embeddings are to be frozen, but are unknown.
    """
    student.recompute_micro_batches = training.memory == "low"
    if training.freeze_embeddings:
        if student.word_embeddings is None:
            raise ConfigError(
                f"the word embeddings of student {student.name!r} are unknown; set training.freeze_embeddings=false"
            )
        if student.is_static:
            raise ConfigError(
                f"student {student.name!r} is static, and its token vectors are all that is trained; set "
                "training.freeze_embeddings=false"
            )
        student.word_embeddings.requires_grad_(False)
    if torch.cuda.is_available() and _EXPANDABLE not in _environment_settings() and uses_expandable_segments(training):
        settings = torch._C._accelerator_getAllocatorSettings()
        if _EXPANDABLE not in settings:  # setting replaces all earlier settings
            torch._C._accelerator_setAllocatorSettings(",".join(filter(None, [settings, f"{_EXPANDABLE}:True"])))


def uses_expandable_segments(training: TrainingConfig) -> bool:
    """Whether the GPU allocator uses expandable segments: set by the environment, otherwise with low memory.

    Recomputed blocks leave gaps of many sizes, few of which can be reused in segments of a fixed size.
    """
    found = re.search(rf"{_EXPANDABLE}\s*:\s*(\w+)", _environment_settings())
    if found is not None:
        return found[1].lower() == "true"
    # Other allocators than torch's have no segments, and an older torch has no function for settings.
    settable = "backend" not in _environment_settings() and hasattr(torch._C, "_accelerator_setAllocatorSettings")
    return training.memory == "low" and settable


def _environment_settings() -> str:
    return ",".join(os.environ.get(variable, "") for variable in ALLOCATOR_VARIABLES)


def keep_embedding_states_32bit(student: Student) -> None:
    """Keep the optimizer states of embedding tables in float32, as bitsandbytes' authors and Trainer do.

    Dettmers et al. (8-bit Optimizers via Block-wise Quantization, ICLR 2022) found training unstable otherwise.
    """
    from bitsandbytes.optim.optimizer import GlobalOptimManager

    manager = GlobalOptimManager.get_instance()
    for module in student.modules():
        if isinstance(module, nn.Embedding) and module.weight.requires_grad:
            manager.override_config(module.weight, "optim_bits", 32)
            # The entry is keyed by id, which a later tensor may have.
            weakref.finalize(module.weight, manager.pid2config.pop, id(module.weight), None)
