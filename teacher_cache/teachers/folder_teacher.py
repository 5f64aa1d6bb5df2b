"""The base of teachers that torch runs from a model folder."""

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from teacher_cache.errors import TeacherError
from teacher_cache.teachers.base import Encoded, Teacher, TeacherOptions, TeacherSpec
from teacher_cache.teachers.folder import ModelFolder
from teacher_cache.tokens.request import TokenShape

if TYPE_CHECKING:
    import torch

    from teacher_cache.teachers.batching import LoadedModel


class FolderTeacher(Teacher):
    """A teacher with a model folder; a subclass resolves it and loads its forward pass.

    Attributes:
        checks_padding: whether to check at the start that padding does not change a vector.
    """

    checks_padding = True

    @classmethod
    def open_folder(cls, options: TeacherOptions, folder: Path | None) -> ModelFolder:
        """The checked files of the model."""
        if folder is None:
            raise TeacherError(f"{cls.__name__} needs a model folder, but {options.model} is none")
        return ModelFolder.open(folder)

    @classmethod
    def token_shape(cls, spec: TeacherSpec) -> TokenShape:
        return spec.model_folder.token_shape()

    def __init__(self, spec: TeacherSpec) -> None:
        from teacher_cache.teachers.batching import BatchedEncoder
        from teacher_cache.teachers.loading import choose_device

        self.spec = spec
        self.space = spec.space
        self.device = choose_device(spec.options.device)
        self._encoder = BatchedEncoder(
            spec.space,
            self.device,
            self.load,
            spec.options.batch_tokens,
            spec.request,
            check_padding=self.checks_padding,
        )

    @abstractmethod
    def load(self, dtype: "torch.dtype") -> "LoadedModel":
        """The forward pass in `dtype`; called again with float32 if `dtype` overflows."""

    def encode_counted(self, texts: Sequence[str]) -> Encoded:
        return self._encoder.encode_counted(texts)

    @property
    def network(self) -> "torch.nn.Module | None":
        return self._encoder.network
