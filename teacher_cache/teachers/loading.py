"""What loading a torch teacher needs whichever library does it: device, silence, and no random weights."""

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from teacher_cache.errors import TeacherError

# Parts of a checkpoint that no pooled vector is computed from.
_UNUSED = ("pooler", "position_ids", "token_type_ids")


def choose_device(name: str | None) -> torch.device:
    """The device called `name`; without one CUDA, then MPS, then CPU.

    Raises:
        TeacherError: no such device here.
    """
    if name is None:
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise TeacherError(f"unknown device {name!r}: expected cpu, mps, cuda or cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise TeacherError(f"device {name!r} was asked for, but torch sees {torch.cuda.device_count()} GPUs")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise TeacherError("device 'mps' was asked for, but torch sees none")
    return device


@contextmanager
def loading(folder: Path) -> Iterator[None]:
    """Load without the library's bars and reports; what goes wrong is one line about `folder`."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TeacherError(
            f"{folder.name} does not fit on the device: use --dtype bfloat16, another --device, or a smaller teacher"
        ) from error
    except pickle.UnpicklingError as error:
        raise TeacherError(
            f"{folder} cannot be loaded: its pickled weights are damaged or hold more than tensors, which could run "
            "any code; nothing of it was run: get the model with safetensors, or from someone you trust"
        ) from error
    except (OSError, ValueError, RuntimeError, ImportError, KeyError, AttributeError, EOFError) as error:
        if isinstance(error, TeacherError):
            raise
        reason = " ".join(str(error).split())[:300]
        raise TeacherError(f"{folder} cannot be loaded: {reason or type(error).__name__}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def require_all_weights(folder: Path, loading_info: Mapping[str, Any]) -> None:
    """Check transformers' loading report: a weight that the checkpoint lacks would be random.

    Raises:
        TeacherError: the checkpoint lacks weights or holds them in another shape.
    """
    missing = sorted(key for key in loading_info["missing_keys"] if not any(part in key.split(".") for part in _UNUSED))
    mismatched = sorted(str(key[0]) for key in loading_info.get("mismatched_keys", ()))
    if missing or mismatched:
        raise TeacherError(
            f"{folder} does not hold the weights its config.json asks for: {len(missing)} missing, "
            f"{len(mismatched)} of another shape, the first is {(missing or mismatched)[0]}; "
            "download or save the model again"
        )
