"""From model options and model files to an embedding space.

An option that contradicts the model, an unknown prompt name, or a dtype in which the model overflows is an error that
names what would work.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from teacher_cache.errors import TeacherError
from teacher_cache.space import EmbeddingSpace
from teacher_cache.teachers.base import TeacherOptions
from teacher_cache.teachers.families import Family, find_family
from teacher_cache.teachers.folder import ModelFolder

POOLINGS = ("mean", "cls", "last_token")
DTYPES = {
    "auto": "auto",
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
}

# Models with activations above 65,504, the largest float16: published reports of NaN or zero vectors.
_FLOAT16_OVERFLOWS_TYPES = ("gemma", "t5", "mt5", "umt5")
_FLOAT16_OVERFLOWS_NAMES = ("stella_en_1.5b", "stella-1.5b")

# Tokenizers without a limit have a model_max_length above this.
_NO_LIMIT = 10**6
_FALLBACK_LENGTH = 512


def space_from_folder(
    options: TeacherOptions, folder: ModelFolder, *, backend: str, pooling: str, normalize: bool, width: int
) -> EmbeddingSpace:
    """The space of a teacher with files in `folder`; `width` is that of its vectors before a cut to `dims`."""
    family = find_family(folder.label)
    if family and family.trust_remote_code and not options.trust_remote_code:
        raise TeacherError(
            f"{folder.path} runs code from its repository: read that code, then allow it with `trust_remote_code`"
        )
    return EmbeddingSpace(
        teacher=folder.label,
        revision=folder.revision,
        backend=backend,
        weights=folder.weights_digest(),
        tokenizer=folder.tokenizer_digest(),
        pooling=pooling,
        padding_side=_padding_side(options, folder, family),
        prompt=_prompt(options, folder, family),
        max_length=_max_length(options, folder, family),
        truncation_side=_side(folder.tokenizer_config.get("truncation_side", "right"), "truncation_side"),
        normalize=normalize if options.normalize is None else options.normalize,
        dims=_dims(options, folder, width),
        dtype=_dtype(options, folder),
    )


def dtype_name(dtype: str) -> str:
    """The torch name of a dtype, or "auto"."""
    if dtype not in DTYPES:
        raise TeacherError(f"unknown `dtype` {dtype!r}: expected one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def check_pooling(options: TeacherOptions) -> str | None:
    """The pooling of the options, or None."""
    if options.pooling is not None and options.pooling not in POOLINGS:
        raise TeacherError(f"unknown `pooling` {options.pooling!r}: expected one of {', '.join(POOLINGS)}")
    return options.pooling


def choose_prompt(options: TeacherOptions, prompts: Mapping[str, str], *, default: str | None = None) -> str | None:
    """The text of the prompt of the options, by default that of the prompt named `default`, or None."""
    if options.prompt is not None and options.prompt_name is not None:
        raise TeacherError(
            f"both `prompt` ({options.prompt!r}) and `prompt_name` ({options.prompt_name!r}) were given: keep one"
        )
    if options.prompt is not None:
        return options.prompt
    name = options.prompt_name if options.prompt_name is not None else default
    if name is None:
        return None
    if name not in prompts:
        known = ", ".join(sorted(prompts)) or "none"
        raise TeacherError(f"{options.model} has no prompt named {name!r}: its prompts are {known}")
    return prompts[name]


def named_prompts(folder: ModelFolder) -> dict[str, str]:
    """The prompts of a model's files or model card, by name."""
    family = find_family(folder.label)
    prompts = dict(family.prompts) if family else {}
    # sentence-transformers saves empty prompts as placeholders: those of the model card come before them.
    for name, text in (folder.usage_config.get("prompts") or {}).items():
        if text or not prompts.get(name):
            prompts[name] = text or ""
    return prompts


def options_for_space(space: EmbeddingSpace, options: TeacherOptions) -> TeacherOptions:
    """`options` with every field that `space` defines; where and how fast the model runs stays as it is."""
    on_hub = not Path(options.model).expanduser().is_dir()
    return replace(
        options,
        backend=space.backend,
        revision=(space.revision or None) if on_hub else None,
        # Other poolings cannot be options: they come from the model's files.
        pooling=space.pooling if space.pooling in POOLINGS else None,
        padding_side=space.padding_side,
        prompt=space.prompt,
        prompt_name=None,
        max_length=space.max_length,
        normalize=space.normalize,
        dims=space.dims,
        dtype=space.dtype,
    )


def _prompt(options: TeacherOptions, folder: ModelFolder, family: Family | None) -> str:
    prompts = named_prompts(folder)
    default = folder.usage_config.get("default_prompt_name")
    prompt = choose_prompt(options, prompts, default=default)
    if prompt is None and family and family.prompt_required:
        raise TeacherError(
            f"{folder.path} was trained with a prompt on every text and is worse without one: choose `prompt_name` "
            f"{' or '.join(sorted(prompts))} (or `prompt` '' for none)"
        )
    return prompt or ""


def _side(side: object, name: str) -> str:
    if side not in ("left", "right"):
        raise TeacherError(f"unknown `{name}` {side!r}: expected left or right")
    return str(side)


def _padding_side(options: TeacherOptions, folder: ModelFolder, family: Family | None) -> str:
    if options.padding_side is not None:
        return _side(options.padding_side, "padding_side")
    if family is not None:
        return family.padding_side
    return _side(folder.tokenizer_config.get("padding_side", "right"), "padding_side")


def _max_length(options: TeacherOptions, folder: ModelFolder, family: Family | None) -> int:
    positions = folder.positions
    if options.max_length is not None:
        if options.max_length < 1:
            raise TeacherError(f"`max_length` is {options.max_length}, expected at least 1 token")
        if positions is not None and options.max_length > positions:
            raise TeacherError(
                f"`max_length` is {options.max_length} tokens, but {folder.path} has positions for {positions}: use at "
                "most these"
            )
        return options.max_length
    if folder.is_static:
        return folder.static_length
    candidates = (
        folder.sentence_config.get("max_seq_length"),
        family.max_length if family else None,
        folder.tokenizer_config.get("model_max_length"),
    )
    lengths = (int(n) for n in candidates if isinstance(n, int | float) and 0 < n < _NO_LIMIT)
    length = next(lengths, _FALLBACK_LENGTH)
    return length if positions is None else min(length, positions)


def _dims(options: TeacherOptions, folder: ModelFolder, width: int) -> int:
    dims = options.dims if options.dims is not None else folder.usage_config.get("truncate_dim")
    if dims is None:
        return width
    if not 1 <= dims <= width:
        raise TeacherError(f"`dims` is {dims}, expected 1 to {width}, the width of the vectors of {folder.path}")
    return int(dims)


def _dtype(options: TeacherOptions, folder: ModelFolder) -> str:
    dtype = dtype_name(options.dtype)
    types = {folder.model_type, str(folder.text_config.get("model_type", ""))}
    name = folder.label.rsplit("/", 1)[-1].lower()
    overflows = name.startswith(_FLOAT16_OVERFLOWS_NAMES) or any(t.startswith(_FLOAT16_OVERFLOWS_TYPES) for t in types)
    if dtype == "float16" and overflows:
        raise TeacherError(
            f"{folder.path} overflows float16 and would return NaN or zero vectors: use `dtype` bfloat16 or float32"
        )
    return dtype
