"""What a teacher is: something with an embedding space that turns texts into vectors."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from teacher_cache.errors import TeacherError
from teacher_cache.space import EmbeddingSpace
from teacher_cache.tokens.request import TextTokens, TokenRequest, TokenShape


@dataclass(frozen=True)
class Encoded:
    """What a teacher said about n texts, in the order they were given.

    Attributes:
        vectors: `(n, dims)` float32. A row that stayed non-finite or null after a float32 retry is left as it
            is, whatever the space's `normalize` says: the caller must quarantine it.
        tokens: `(n,)` int32, tokens after truncation, specials and prompt included.
        truncated: `(n,)` bool, texts that were longer than the space's `max_length`.
        repaired: `(n,)` bool, rows that were non-finite or null in the compute precision and sound in float32.
        by_token: n texts token by token, where the spec has a request.
    """

    vectors: npt.NDArray[np.float32]
    tokens: npt.NDArray[np.int32]
    truncated: npt.NDArray[np.bool_]
    repaired: npt.NDArray[np.bool_]
    by_token: list[TextTokens] | None = None


@dataclass(frozen=True, kw_only=True)
class TeacherOptions:
    """What a user may say about a teacher; None means "as the model's own files say".

    Attributes:
        model: short name of a known family, hub id, local folder, or "toy".
        batch_tokens: padded tokens a forward pass may hold; None picks a value for the device.
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
    """A resolved teacher that is not loaded yet: picklable, cheap, enough to know its space.

    Attributes:
        folder: local folder that holds the model's files; None for a teacher without files.
        request: what is wanted besides sentence vectors; None for these alone.
    """

    options: TeacherOptions
    space: EmbeddingSpace
    folder: Path | None
    request: TokenRequest | None = None

    def with_dtype(self, dtype: str) -> Self:
        """The same teacher with its compute precision settled."""
        return replace(self, space=replace(self.space, dtype=dtype))


class Teacher(ABC):
    """A loaded teacher.

    A back end is one file in this folder: a subclass with `resolve` and `__init__(spec)`, and one line in
    `teacher_cache.teachers.BACKENDS`.
    """

    space: EmbeddingSpace

    @classmethod
    @abstractmethod
    def resolve(cls, options: TeacherOptions, folder: Path | None) -> TeacherSpec:
        """The space these options mean, from configuration files alone: no weights are loaded, no torch.

        Raises:
            TeacherError: the files are missing or contradict the options.
        """

    @classmethod
    def token_shape(cls, spec: TeacherSpec) -> TokenShape:
        """The sizes of what it says token by token, from configuration files alone.

        Raises:
            TeacherError: it gives vectors alone, as any back end does that does not say otherwise.
        """
        raise TeacherError(
            f"{spec.space.teacher} speaks through the back end {spec.space.backend}, which gives vectors alone: what "
            "is said token by token needs a model folder and --backend transformer or sentence_transformer"
        )

    @abstractmethod
    def __init__(self, spec: TeacherSpec) -> None:
        """Load the model that `spec` describes; `spec.space.dtype` is settled."""

    @abstractmethod
    def encode_counted(self, texts: Sequence[str]) -> Encoded:
        """Vectors and counts for n texts; the order of the texts changes nothing but rounding."""

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """`(n, dims)` float32 vectors of n texts, in order."""
        return self.encode_counted(texts).vectors
