"""The interface of a teacher: its options, its embedding space, and texts to vectors."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from teacher_cache.errors import TeacherError
from teacher_cache.space import EmbeddingSpace
from teacher_cache.teachers.folder import ModelFolder
from teacher_cache.tokens.request import TextTokens, TokenRequest, TokenShape

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Encoded:
    """Teacher output for n texts, in order.

    Attributes:
        vectors: `(n, dims)` float32. A row that is still non-finite or zero after a float32 retry is returned as it
            is, even with `normalize`: the caller must quarantine it.
        tokens: `(n,)` int32, tokens after truncation, special tokens and prompt included.
        truncated: `(n,)` bool, texts longer than the `max_length` of the space.
        repaired: `(n,)` bool, rows that were non-finite or zero in the compute precision and valid in float32.
        by_token: token-level output of each text; None if the spec has no request.
    """

    vectors: npt.NDArray[np.float32]
    tokens: npt.NDArray[np.int32]
    truncated: npt.NDArray[np.bool_]
    repaired: npt.NDArray[np.bool_]
    by_token: list[TextTokens] | None = None


@dataclass(frozen=True, kw_only=True)
class TeacherOptions:
    """Model options of a user; None means the default of the model's files.

    Attributes:
        model: short name of a known family, hub id, local folder, or "toy".
        batch_tokens: token budget of a forward pass, padding included; None picks one for the device.
        device: torch device; None picks CUDA, then MPS, then CPU.
    """

    model: str
    backend: str | None = None
    revision: str | None = None
    pooling: str | None = None
    padding_side: str | None = None
    prompt: str | None = None
    prompt_name: str | None = None
    max_length: int | None = None
    normalize: bool | None = None
    dims: int | None = None
    dtype: str = "auto"
    batch_tokens: int | None = None
    device: str | None = None
    attn_implementation: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True, kw_only=True)
class TeacherSpec:
    """A resolved teacher that is not loaded yet; picklable.

    Attributes:
        folder: local folder of the model's files; None for a teacher without files.
        request: token-level output to compute besides the vectors; None for vectors only.
    """

    options: TeacherOptions
    space: EmbeddingSpace
    folder: Path | None
    request: TokenRequest | None = None

    def with_dtype(self, dtype: str) -> Self:
        """The same teacher in the given compute precision."""
        return replace(self, space=replace(self.space, dtype=dtype))

    @property
    def model_folder(self) -> ModelFolder:
        """The model's files; `TeacherError` for a teacher without files."""
        if self.folder is None:
            raise TeacherError(f"{self.space.teacher} has no model folder, expected one written by save_pretrained")
        return ModelFolder(self.folder)


class Teacher(ABC):
    """A loaded teacher.

    A backend is one file in this folder, a subclass with `resolve` and `__init__(spec)`, and one line in
    `teacher_cache.teachers.BACKENDS`.
    """

    space: EmbeddingSpace

    @classmethod
    @abstractmethod
    def resolve(cls, options: TeacherOptions, folder: Path | None) -> TeacherSpec:
        """The space of these options, from configuration files only: loads no weights and no torch.

        Raises:
            TeacherError: files are missing or contradict the options.
        """

    @classmethod
    def token_shape(cls, spec: TeacherSpec) -> TokenShape:
        """The sizes of the token-level output, from configuration files only.

        Raises:
            TeacherError: the backend returns vectors only, which is the default.
        """
        raise TeacherError(
            f"the backend {spec.space.backend} of {spec.space.teacher} returns vectors only: token-level output needs "
            "a model folder and `backend` transformer or sentence_transformer"
        )

    @abstractmethod
    def __init__(self, spec: TeacherSpec) -> None:
        """Load the model of `spec`, whose dtype is resolved."""

    @abstractmethod
    def encode_counted(self, texts: Sequence[str]) -> Encoded:
        """Vectors and counts of n texts, in order; the order of the texts changes nothing but rounding."""

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """`(n, dims)` float32 vectors of n texts, in order."""
        return self.encode_counted(texts).vectors

    @property
    def network(self) -> "torch.nn.Module | None":
        """The transformers model that computes the vectors; None for other teachers."""
        return None
