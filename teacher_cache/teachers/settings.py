"""What a user's options and a model's files together mean: one embedding space.

Whatever the two leave open is never guessed in silence: an option that contradicts the model, an unknown
prompt name or a precision the model overflows in is an error that says what would be possible.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from teacher_cache.errors import TeacherError
from teacher_cache.space import EmbeddingSpace
from teacher_cache.teachers.base import TeacherOptions
from teacher_cache.teachers.families import Family, family_of
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

# Activations of these pass 65,504, the largest float16: published reports of NaN or null vectors.
_FLOAT16_OVERFLOWS_TYPES = ("gemma", "t5", "mt5", "umt5")
_FLOAT16_OVERFLOWS_NAMES = ("stella_en_1.5b", "stella-1.5b")

# Tokenizers without a limit name an astronomical one.
_NO_LIMIT = 10**6
_FALLBACK_LENGTH = 512


def space_from_folder(
    options: TeacherOptions,
    folder: ModelFolder,
    *,
    backend: str,
    pooling: str,
    normalize: bool,
    width: int,
) -> EmbeddingSpace:
    """The space of a teacher whose files lie in `folder`.

    Args:
        pooling, normalize: already settled by the back end, which knows its modules.
        width: numbers in the vector the model gives before any cut.

    Raises:
        TeacherError: an option that this model cannot follow.
    """
    family = family_of(folder.label)
    if family and family.trust_remote_code and not options.trust_remote_code:
        raise TeacherError(
            f"{folder.label} runs code from its own repository: read that code, then allow it with --trust-remote-code"
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
        truncation_side=_side(folder.tokenizer_config.get("truncation_side", "right"), "truncation side"),
        normalize=normalize,
        dims=_dims(options, folder, width),
        dtype=_dtype(options, folder),
    )


def normal_dtype(dtype: str) -> str:
    """The torch name of a precision, or "auto".

    Raises:
        TeacherError: no such precision.
    """
    if dtype not in DTYPES:
        raise TeacherError(f"unknown dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def chosen_pooling(options: TeacherOptions) -> str | None:
    """The pooling a user asked for.

    Raises:
        TeacherError: no such pooling.
    """
    if options.pooling is not None and options.pooling not in POOLINGS:
        raise TeacherError(f"unknown pooling {options.pooling!r}: expected one of {', '.join(POOLINGS)}")
    return options.pooling


def chosen_prompt(options: TeacherOptions, prompts: Mapping[str, str], *, default: str | None = None) -> str | None:
    """The prompt's text a user asked for, that of `default` without a wish, None when there is neither.

    Raises:
        TeacherError: two wishes at once, or a name that is not in `prompts`.
    """
    if options.prompt is not None and options.prompt_name is not None:
        raise TeacherError(
            f"both a prompt ({options.prompt!r}) and a prompt name ({options.prompt_name!r}) were given: keep one"
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
    """The prompts that a model's files or its model card name, by name."""
    family = family_of(folder.label)
    prompts = dict(family.prompts) if family else {}
    # sentence-transformers saves empty prompts as placeholders: they do not outrank the model card's.
    for name, text in (folder.usage_config.get("prompts") or {}).items():
        if text or not prompts.get(name):
            prompts[name] = text or ""
    return prompts


def asked_as(space: EmbeddingSpace, options: TeacherOptions) -> TeacherOptions:
    """The options that ask `options.model` as `space` was asked; where and how fast it runs stays as it is."""
    of_hub = not Path(options.model).expanduser().is_dir()
    return replace(
        options,
        backend=space.backend,
        revision=(space.revision or None) if of_hub else None,
        # Any other was not chosen, but read from the model's own files.
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
    prompt = chosen_prompt(options, prompts, default=default)
    if prompt is None and family and family.prompt_required:
        raise TeacherError(
            f"{folder.label} was trained with a prompt on every text and is worse without one: choose "
            f"--prompt-name {' or '.join(sorted(prompts))} (or --prompt '' for none)"
        )
    return prompt or ""


def _side(side: object, what: str) -> str:
    if side not in ("left", "right"):
        raise TeacherError(f"unknown {what} {side!r}: expected left or right")
    return str(side)


def _padding_side(options: TeacherOptions, folder: ModelFolder, family: Family | None) -> str:
    if options.padding_side is not None:
        return _side(options.padding_side, "padding side")
    if family is not None:
        return family.padding_side
    return _side(folder.tokenizer_config.get("padding_side", "right"), "padding side")


def _max_length(options: TeacherOptions, folder: ModelFolder, family: Family | None) -> int:
    positions = folder.positions
    if options.max_length is not None:
        if options.max_length < 1:
            raise TeacherError(f"max length is {options.max_length}, expected at least 1 token")
        if positions is not None and options.max_length > positions:
            raise TeacherError(
                f"max length is {options.max_length} tokens, but {folder.label} has positions for {positions}"
            )
        return options.max_length
    said = (
        folder.sentence_config.get("max_seq_length"),
        family.max_length if family else None,
        folder.tokenizer_config.get("model_max_length"),
    )
    length = next((int(n) for n in said if isinstance(n, int | float) and 0 < n < _NO_LIMIT), None)
    if length is None:
        length = _FALLBACK_LENGTH
    return length if positions is None else min(length, positions)


def _dims(options: TeacherOptions, folder: ModelFolder, width: int) -> int:
    dims = options.dims if options.dims is not None else folder.usage_config.get("truncate_dim")
    if dims is None:
        return width
    if not 1 <= dims <= width:
        raise TeacherError(f"{dims} dims were asked of {folder.label}, whose vectors have {width}")
    return int(dims)


def _dtype(options: TeacherOptions, folder: ModelFolder) -> str:
    dtype = normal_dtype(options.dtype)
    types = {folder.model_type, str(folder.text_config.get("model_type", ""))}
    overflows = any(t.startswith(_FLOAT16_OVERFLOWS_TYPES) for t in types) or folder.label.rsplit("/", 1)[
        -1
    ].lower().startswith(_FLOAT16_OVERFLOWS_NAMES)
    if dtype == "float16" and overflows:
        raise TeacherError(
            f"{folder.label} overflows float16 and would give NaN or null vectors: use --dtype bfloat16 or float32"
        )
    return dtype
