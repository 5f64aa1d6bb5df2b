"""Loading encoders from model folders: device, dtype, no pickled code, no random weights."""

import inspect
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from teacher_cache.errors import TeacherError
from teacher_cache.teachers.base import TeacherOptions
from teacher_cache.teachers.folder import ModelFolder, weight_files
from teacher_cache.teachers.linear import prepare_linear_layers, uses_bfloat16_linear
from teacher_cache.teachers.token_table import load_token_table

# Parts of a checkpoint that pooled vectors do not depend on.
_UNUSED = ("pooler", "position_ids", "token_type_ids")


def choose_device(name: str | None) -> torch.device:
    """The device called `name`; by default CUDA, then MPS, then CPU."""
    if name is None:
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise TeacherError(f"unknown `device` {name!r}: expected cpu, mps, cuda or cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise TeacherError(f"`device` is {name!r}, but torch finds {torch.cuda.device_count()} GPUs")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise TeacherError("`device` is 'mps', but torch finds none")
    return device


@contextmanager
def loading(folder: Path) -> Iterator[None]:
    """Hide the progress bars and reports of transformers, and turn what fails into one line about `folder`."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TeacherError(
            f"{folder} does not fit into the memory of the device: use `dtype` bfloat16, another `device` or a smaller "
            "model"
        ) from error
    except pickle.UnpicklingError as error:
        raise TeacherError(
            f"{folder} cannot be loaded: its pickled weights are damaged or contain more than tensors, which could "
            "run any code; nothing was run. Use a version of the model with safetensors, or from a source you trust"
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


def load_encoder(files: ModelFolder, dtype: torch.dtype, device: torch.device, options: TeacherOptions) -> Any:
    """The transformers model of `files`, or their token table, on `device`, in `dtype`, ready for inference."""
    from transformers import AutoConfig, AutoModel

    folder = files.encoder
    with loading(folder):
        if files.is_static:
            return load_token_table(folder).to(device, dtype).eval()
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=options.trust_remote_code)
        model, info = AutoModel.from_pretrained(
            folder,
            config=config,
            local_files_only=True,
            trust_remote_code=options.trust_remote_code,
            output_loading_info=True,
            **safe_weights(folder),
            **dtype_and_attention(dtype, device, options),
            **pooler_arguments(config),
        )
        check_weights(folder, info)
        return prepare_encoder(model, dtype, device)


def safe_weights(folder: Path) -> dict[str, Any]:
    """Arguments of `from_pretrained` that prefer safetensors and never run pickled code."""
    safe = any(path.suffix == ".safetensors" for path in weight_files(folder))
    return {"use_safetensors": safe, "weights_only": True}


def dtype_and_attention(dtype: torch.dtype, device: torch.device, options: TeacherOptions) -> dict[str, Any]:
    """Arguments of `from_pretrained` for the dtype and the attention of a model."""
    # With "auto" a model takes no more memory than its file until its linear layers are rounded.
    arguments: dict[str, Any] = {"dtype": "auto" if uses_bfloat16_linear(dtype, device) else dtype}
    if options.attn_implementation is not None:
        arguments["attn_implementation"] = options.attn_implementation
    return arguments


def pooler_arguments(config: Any) -> dict[str, Any]:
    """Arguments of `AutoModel` that leave out the pooler: it is not used, and many checkpoints lack its weights."""
    from transformers import MODEL_MAPPING

    model: Any = MODEL_MAPPING.get(type(config), None)
    has_argument = isinstance(model, type) and "add_pooling_layer" in inspect.signature(model).parameters
    return {"add_pooling_layer": False} if has_argument else {}


def prepare_encoder(model: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """A transformers model ready for inference in `dtype` on `device`."""
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    prepare_linear_layers(model, dtype, device)
    return model.to(device).eval()


def check_weights(folder: Path, loading_info: Mapping[str, Any]) -> None:
    """Check the loading report of transformers: a missing weight would be random."""
    missing = sorted(key for key in loading_info["missing_keys"] if not any(part in key.split(".") for part in _UNUSED))
    mismatched = sorted(str(key[0]) for key in loading_info.get("mismatched_keys", ()))
    if missing or mismatched:
        raise TeacherError(
            f"{folder} does not contain the weights that its config.json describes: {len(missing)} missing, "
            f"{len(mismatched)} of another shape, the first is {(missing or mismatched)[0]}; "
            "download or save the model again"
        )
