"""Teachers: a name becomes a spec, a spec becomes vectors.

`resolve` reads configuration files and digests and imports no torch, so that a plan or a fully cached build
costs no model; `load_teacher` loads.
"""

import importlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from teacher_cache.errors import SpaceMismatch, TeacherError, optional_import
from teacher_cache.space import EmbeddingSpace
from teacher_cache.teachers.base import Encoded, Teacher, TeacherOptions, TeacherSpec
from teacher_cache.teachers.folder import ModelFolder
from teacher_cache.teachers.hub import find_folder
from teacher_cache.teachers.precision import choose_dtype
from teacher_cache.teachers.settings import asked_as, named_prompts
from teacher_cache.tokens.request import TokenShape

__all__ = [
    "BACKENDS",
    "Encoded",
    "Teacher",
    "TeacherOptions",
    "TeacherSpec",
    "load_teacher",
    "prompts_of",
    "resolve",
    "resolve_as",
    "settle_dtype",
    "token_shape",
]

# name -> "module:Class"; `TeacherOptions.backend` also takes a "package.module:Class" that is not listed.
BACKENDS: dict[str, str] = {
    "toy": "teacher_cache.teachers.toy:ToyTeacher",
    "transformer": "teacher_cache.teachers.transformer:TransformerTeacher",
    "sentence_transformer": "teacher_cache.teachers.sentence_transformer:SentenceTransformerTeacher",
}


def resolve(options: TeacherOptions) -> TeacherSpec:
    """Find the teacher that `options` mean and say which space it speaks; loads nothing.

    Raises:
        TeacherError: no such teacher, or one that cannot do what the options ask.
        MissingDependency: the model has to come from the hub and huggingface_hub is absent.
    """
    if options.backend is not None and ":" in options.backend and not Path(options.model).expanduser().is_dir():
        # A back end of one's own may know its models by names that are no folders.
        return backend_class(options.backend).resolve(options, None)
    backend = options.backend or ("toy" if options.model == "toy" else None)
    if backend == "toy":
        return backend_class(backend).resolve(options, None)
    folder = _folder(options)
    backend = backend or ("sentence_transformer" if folder.modules else "transformer")
    return backend_class(backend).resolve(options, folder.path)


def resolve_as(space: EmbeddingSpace, options: TeacherOptions) -> TeacherSpec:
    """The teacher that `options.model` means, asked in the very way of `space`.

    Args:
        space: as a cache holds it.
        options: which model, and where it runs; how it is asked comes from the space.

    Raises:
        SpaceMismatch: the model is another teacher, or cannot be asked in this way.
    """
    refused = f"the teacher {options.model} does not speak the cached space {space.slug}"
    hint = "name the model that the cache was built with"
    try:
        spec = resolve(asked_as(space, options))
    except TeacherError as error:
        raise SpaceMismatch(f"{refused}: {error}; {hint}") from error
    different = spec.space.difference(space)
    if different:
        fields = "; ".join(f"{name} is {mine!r}, cached {theirs!r}" for name, (mine, theirs) in different.items())
        raise SpaceMismatch(f"{refused}: {fields}; {hint}")
    return spec


def prompts_of(options: TeacherOptions) -> dict[str, str]:
    """The prompts that a model names itself, by name; none of a teacher without files.

    Raises:
        TeacherError: no such model.
    """
    if options.model == "toy" or (options.backend is not None and ":" in options.backend):
        return {}
    return named_prompts(_folder(options))


def load_teacher(spec: TeacherSpec) -> Teacher:
    """Load the teacher of a spec whose dtype is settled.

    Raises:
        TeacherError: the dtype is still "auto", the folder is not on this machine, loading failed, or the teacher
            cannot say what the spec requests.
        MissingDependency: torch, transformers or sentence-transformers is absent.
    """
    if spec.space.dtype == "auto":
        raise TeacherError(f"the precision of {spec.space.teacher} is still 'auto': call settle_dtype first")
    if spec.folder is not None and not spec.folder.is_dir():
        raise TeacherError(
            f"the folder of {spec.space.teacher} is not on this machine: {spec.folder}; put the model where "
            "every worker sees it"
        )
    if spec.request is not None:
        _require_sayable(spec)
    with optional_import(f"teacher {spec.space.teacher}"):
        return backend_class(spec.space.backend)(spec)


def token_shape(spec: TeacherSpec) -> TokenShape:
    """The sizes of what a teacher says token by token, from configuration files alone.

    Raises:
        TeacherError: its back end gives vectors alone, or its configuration leaves a size open.
    """
    return backend_class(spec.space.backend).token_shape(spec)


def resolve_dtype(spec: TeacherSpec, present: Iterable[EmbeddingSpace] = ()) -> TeacherSpec:
    """Turn an "auto" precision into a real one; any other spec comes back as it is.

    Args:
        present: spaces that a cache already holds. One that differs from the spec in nothing but the
            precision decides, so that a resumed build never hangs on a stopwatch.

    Raises:
        TeacherError, MissingDependency: as `load_teacher`, which the probe needs.
    """
    if spec.space.dtype != "auto":
        return spec
    for space in present:
        if space.dtype != "auto" and spec.space.matches(space):
            return spec.with_dtype(space.dtype)
    if spec.folder is None:
        return spec.with_dtype("float32")
    with optional_import(f"teacher {spec.space.teacher}"):
        # Measured on vectors alone, so that one precision is right with tokens and without.
        return spec.with_dtype(choose_dtype(replace(spec, request=None), load_teacher))


def _require_sayable(spec: TeacherSpec) -> None:
    """Refuse a request that the teacher cannot follow before its weights are loaded."""
    shape = token_shape(spec)
    asked = spec.request.attention if spec.request is not None else None
    if asked is None:
        return
    if list(asked) != sorted(set(asked)) or not all(1 <= layer <= shape.layers for layer in asked):
        raise TeacherError(
            f"attention of the layers {', '.join(map(str, asked))} was asked of {spec.space.teacher}: expected "
            f"ascending numbers from 1 to {shape.layers}"
        )
    if spec.options.attn_implementation not in (None, "eager"):
        raise TeacherError(
            f"attention maps need eager attention, but {spec.options.attn_implementation} was asked of "
            f"{spec.space.teacher}: leave --attn-implementation out"
        )


def _folder(options: TeacherOptions) -> ModelFolder:
    return ModelFolder.open(find_folder(options.model, options.revision, trust_remote_code=options.trust_remote_code))


def backend_class(name: str) -> type[Teacher]:
    """The class of a back end, by its name in `BACKENDS` or as "package.module:Class".

    Raises:
        TeacherError: no such back end.
    """
    target = BACKENDS.get(name, name)
    module, colon, attribute = target.partition(":")
    if not colon:
        raise TeacherError(f"unknown teacher back end {name!r}: expected {', '.join(BACKENDS)} or package.module:Class")
    try:
        with optional_import(f"teacher back end {name!r}"):
            found = getattr(importlib.import_module(module), attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        raise TeacherError(f"teacher back end {name!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Teacher)):
        raise TeacherError(f"teacher back end {name!r} is not a Teacher class")
    return found
