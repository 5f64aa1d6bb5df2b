"""Models without weights, from a shape's name or a folder's configuration."""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import nn

from distill.config import StudentConfig
from distill.errors import StudentError
from distill.objectives.base import TeacherShape
from distill.student.cut_spec import CutSpec, is_cut
from distill.student.cutting import first_and_last, layers_config
from distill.student.shapes import find_shape, has_shape, is_shape, shape_config
from distill.student.student import Student, student_options
from teacher_cache.building.align import STUDENT_LENGTH
from teacher_cache.errors import TeacherError
from teacher_cache.teachers import TeacherOptions, resolve
from teacher_cache.teachers.folder import ModelFolder
from teacher_cache.teachers.loading import pooler_arguments
from teacher_cache.teachers.token_table import TokenTable, table_config


@dataclass(frozen=True)
class Model:
    """An encoder that can be built without its weights.

    Attributes:
        name: for messages.
        config: transformers' configuration.
        positions: longest input in tokens; None without a bound.
        folder: of its files; None for a shape.
    """

    name: str
    config: Any
    pooling: str
    padding_side: str
    max_length: int
    positions: int | None
    causal: bool
    folder: Path | None = None
    trust_remote_code: bool = False

    def with_attention(self, implementation: str | None) -> Self:
        """This model with one of transformers' attention implementations; None keeps the default."""
        if implementation is None:
            return self
        config = copy.deepcopy(self.config)
        config._attn_implementation = implementation
        return replace(self, config=config)

    @property
    def teacher_shape(self) -> TeacherShape:
        """The sizes of its vectors and token states as a teacher."""
        config = self.config
        width = int(config.hidden_size)
        return TeacherShape(
            width,
            normalized=True,
            token_dim=width,
            layers=int(config.num_hidden_layers),
            heads=int(config.num_attention_heads),
            causal=self.causal,
        )

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The encoder, on the current default device or fake mode.

        Raises:
            StudentError: transformers cannot build it.
        """
        from transformers import AutoModel

        if self.config.num_hidden_layers == 0:
            return TokenTable(torch.empty(self.config.vocab_size, self.config.hidden_size, dtype=dtype))
        try:
            encoder: nn.Module = AutoModel.from_config(
                self.config, dtype=dtype, trust_remote_code=self.trust_remote_code, **pooler_arguments(self.config)
            )
        except (ValueError, TypeError, AttributeError, ImportError, KeyError) as error:
            raise StudentError(f"{self.name} cannot be built from its configuration: {error}") from error
        config: Any = encoder.config
        if hasattr(config, "use_cache"):
            config.use_cache = False
        return encoder

    def student(self) -> Student:
        """A student with this encoder; its tokenizer only has a padding side."""
        tokenizer: Any = SimpleNamespace(padding_side=self.padding_side)
        return Student(
            self.build().train(), tokenizer, pooling=self.pooling, max_length=self.max_length, name=self.name
        )


def student_model(config: StudentConfig) -> Model:
    """The student of a run configuration; of a `cut:` model with its first and last layers and `keep` tokens.

    Raises:
        StudentError: the shape or folder does not exist, or the folder is not a model.
    """
    if is_cut(config.model):
        cut = CutSpec.parse(config.model)
        return _cut(student_model(replace(config, model=cut.model)), cut)
    return _model(student_options(config), "student", STUDENT_LENGTH)


def _cut(model: Model, cut: CutSpec) -> Model:
    """The sizes of a model after a cut; which layers are chosen changes none of them."""
    count = int(model.config.num_hidden_layers)
    layers = cut.layers or first_and_last(count, cut.layer_count(count))
    cut.layer_count(count)
    config = layers_config(model.config, layers)
    if isinstance(cut.keep, int):
        config.vocab_size = min(cut.keep, config.vocab_size)
        if config.pad_token_id is not None:
            config.pad_token_id = min(config.pad_token_id, config.vocab_size - 1)
    return replace(model, name=cut.name, config=config)


def teacher_model(name: str, *, trust_remote_code: bool = False) -> Model:
    """An online teacher.

    Raises:
        StudentError: as `student_model`.
    """
    # Teachers that require a prompt accept an empty one; it changes no size.
    return _model(TeacherOptions(model=name, prompt="", trust_remote_code=trust_remote_code), "teacher", None)


def _model(options: TeacherOptions, role: str, longest: int | None) -> Model:
    # A published model of known sizes needs no download.
    if is_shape(options.model) or (not Path(options.model).expanduser().exists() and has_shape(options.model)):
        return _shape(options, longest)
    try:
        spec = resolve(options)
        if spec.folder is None:
            raise StudentError(f"{role} {options.model!r} has no model folder to read its sizes from")
        folder = ModelFolder(spec.folder)
    except TeacherError as error:
        raise StudentError(f"{role} {options.model!r} cannot be used: {error}") from error
    from transformers import AutoConfig

    try:
        config: Any = (
            table_config(*folder.table_shape)
            if folder.is_static
            else AutoConfig.from_pretrained(
                folder.encoder, local_files_only=True, trust_remote_code=options.trust_remote_code
            )
        )
    except (OSError, ValueError, KeyError) as error:
        raise StudentError(f"{role} {options.model!r} cannot be used: {' '.join(str(error).split())}") from error
    space = spec.space
    length = space.max_length if options.max_length or longest is None else min(space.max_length, longest)
    return Model(
        space.teacher,
        getattr(config, "text_config", config),
        space.pooling,
        space.padding_side,
        length,
        folder.positions,
        folder.is_causal,
        spec.folder,
        options.trust_remote_code,
    )


def _shape(options: TeacherOptions, longest: int | None) -> Model:
    shape = find_shape(options.model)
    config: Any = shape_config(options.model)
    length = options.max_length or min(shape.max_length, longest or shape.max_length)
    return Model(
        options.model,
        config,
        options.pooling or shape.pooling,
        "left" if shape.causal else "right",
        length,
        shape.positions,
        shape.causal,
    )
