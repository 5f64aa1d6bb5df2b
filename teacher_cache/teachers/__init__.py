"""Teachers: a model name resolves to a spec, and a spec loads to a teacher that encodes texts.

`resolve` reads configuration files and digests and does not import torch, so that a plan or a fully cached build loads
no model.
"""

import importlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from teacher_cache.errors import SpaceMismatch, TeacherError, optional_import
from teacher_cache.space import EmbeddingSpace
from teacher_cache.teachers.base import Encoded as Encoded
from teacher_cache.teachers.base import Teacher as Teacher
from teacher_cache.teachers.base import TeacherOptions as TeacherOptions
from teacher_cache.teachers.base import TeacherSpec as TeacherSpec
from teacher_cache.teachers.folder import ModelFolder
from teacher_cache.teachers.hub import find_folder
from teacher_cache.teachers.precision import choose_dtype
from teacher_cache.teachers.settings import named_prompts, options_for_space
from teacher_cache.tokens.request import TokenShape

# name -> "module:Class"; `TeacherOptions.backend` also takes a "package.module:Class" that is not listed.
BACKENDS: dict[str, str] = {
    "toy": "teacher_cache.teachers.toy:ToyTeacher",
    "transformer": "teacher_cache.teachers.transformer:TransformerTeacher",
    "sentence_transformer": "teacher_cache.teachers.sentence_transformer:SentenceTransformerTeacher",
}


def resolve(options: TeacherOptions) -> TeacherSpec:
    """The teacher of `options` and its space; loads no weights."""
    backend = options.backend or ("toy" if options.model == "toy" else None)
    # A Teacher class outside the table may have model names that are not folders.
    custom = backend is not None and ":" in backend and not Path(options.model).expanduser().is_dir()
    if backend is not None and (custom or backend == "toy"):
        return backend_class(backend).resolve(options, None)
    folder = _folder(options)
    # A static model is an encoder too, and runs faster in full batches.
    backend = backend or ("sentence_transformer" if folder.modules and not folder.is_static else "transformer")
    return backend_class(backend).resolve(options, folder.path)


def resolve_for_space(space: EmbeddingSpace, options: TeacherOptions) -> TeacherSpec:
    """The teacher `options.model` with the fields of `space`; `SpaceMismatch` if the space is another model's.

    Args:
        options: the model and where it runs; other fields come from the space.
    """
    message = f"the model {options.model} does not match the cached space {space.slug}"
    hint = "use the model that the cache was built with"
    try:
        spec = resolve(options_for_space(space, options))
    except TeacherError as error:
        raise SpaceMismatch(f"{message}: {error}; {hint}") from error
    different = spec.space.difference(space)
    if different:
        fields = "; ".join(f"{name} is {found!r}, cached {cached!r}" for name, (found, cached) in different.items())
        raise SpaceMismatch(f"{message}: {fields}; {hint}")
    return spec


def model_prompts(options: TeacherOptions) -> dict[str, str]:
    """The named prompts of a model; empty for a teacher without files."""
    if options.model == "toy" or (options.backend is not None and ":" in options.backend):
        return {}
    return named_prompts(_folder(options))


def load_teacher(spec: TeacherSpec) -> Teacher:
    """Load the teacher of a spec with a resolved dtype.

    Raises:
        TeacherError: the dtype is "auto", the folder is not on this machine, loading failed, or the teacher cannot
            fulfill the request.
        MissingDependency: torch, transformers or sentence-transformers is not installed.
    """
    if spec.space.dtype == "auto":
        raise TeacherError(f"the dtype of {spec.space.teacher} is 'auto': call `resolve_dtype` first")
    if spec.folder is not None and not spec.folder.is_dir():
        raise TeacherError(
            f"the folder of {spec.space.teacher} is not on this machine: {spec.folder}; copy the model to where every "
            "worker can read it"
        )
    if spec.request is not None:
        _check_request(spec)
    with optional_import(f"teacher {spec.space.teacher}"):
        return backend_class(spec.space.backend)(spec)


def load_tokenizer(spec: TeacherSpec) -> Any:
    """The transformers tokenizer of a teacher or student."""
    folder = spec.model_folder.encoder
    with optional_import(f"the tokenizer of {spec.space.teacher}"):
        from tokenizers import Tokenizer
        from transformers import AutoTokenizer

        from teacher_cache.teachers.loading import loading
        from teacher_cache.teachers.token_table import static_tokenizer
    with loading(folder):
        if spec.model_folder.is_static:
            return static_tokenizer(Tokenizer.from_file(str(folder / "tokenizer.json")))
        return AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=spec.options.trust_remote_code
        )


def token_shape(spec: TeacherSpec) -> TokenShape:
    """The sizes of a teacher's token-level output, from configuration files only."""
    return backend_class(spec.space.backend).token_shape(spec)


def resolve_dtype(spec: TeacherSpec, present: Iterable[EmbeddingSpace] = ()) -> TeacherSpec:
    """The spec with its dtype "auto" replaced; any other spec unchanged.

    Args:
        present: spaces of a cache. If one differs from the spec only in its dtype, that dtype is used, so that a
            resumed build does not depend on a time measurement.
    """
    if spec.space.dtype != "auto":
        return spec
    for space in present:
        if space.dtype != "auto" and spec.space.matches(space):
            return spec.with_dtype(space.dtype)
    if spec.folder is None:
        return spec.with_dtype("float32")
    with optional_import(f"teacher {spec.space.teacher}"):
        # Measured without token-level output, so that the dtype is the same with and without a request.
        return spec.with_dtype(choose_dtype(replace(spec, request=None), load_teacher))


def _check_request(spec: TeacherSpec) -> None:
    """Refuse a request that the teacher cannot fulfill, before its weights are loaded."""
    shape = token_shape(spec)
    layers = spec.request.attention if spec.request is not None else None
    if layers is None:
        return
    if list(layers) != sorted(set(layers)) or not all(1 <= layer <= shape.layers for layer in layers):
        raise TeacherError(
            f"the attention layers requested of {spec.space.teacher} are {', '.join(map(str, layers))}, expected "
            f"ascending numbers from 1 to {shape.layers}"
        )
    if spec.options.attn_implementation not in (None, "eager"):
        raise TeacherError(
            f"`attn_implementation` of {spec.space.teacher} is {spec.options.attn_implementation}, but attention maps "
            "need eager: leave it out"
        )


def _folder(options: TeacherOptions) -> ModelFolder:
    return ModelFolder.open(find_folder(options.model, options.revision, trust_remote_code=options.trust_remote_code))


def backend_class(name: str) -> type[Teacher]:
    """The class of a backend, by its name in `BACKENDS` or as "package.module:Class"."""
    target = BACKENDS.get(name, name)
    module, colon, attribute = target.partition(":")
    if not colon:
        raise TeacherError(f"unknown `backend` {name!r}: expected {', '.join(BACKENDS)} or package.module:Class")
    try:
        with optional_import(f"`backend` {name!r}"):
            found = getattr(importlib.import_module(module), attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        raise TeacherError(f"`backend` {name!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Teacher)):
        raise TeacherError(f"`backend` {name!r} is not a Teacher class")
    return found
