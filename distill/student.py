"""The student: an encoder that gives the pooled state of every layer, and nothing more.

Pooling is one property, used alike in training, evaluation and export.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from distill.config import StudentConfig
from distill.errors import StudentError
from distill.objectives.base import StudentShape
from teacher_cache.errors import TeacherError
from teacher_cache.teachers import TeacherOptions, resolve
from teacher_cache.teachers.folder import ModelFolder
from teacher_cache.teachers.pooling import needs_position_ids, pool, position_ids
from teacher_cache.teachers.transformer import load_encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Longest training text where the folder allows more: the published protocol's value.
MAX_LENGTH = 256


class Student(nn.Module):
    """A transformers encoder with one pooling over all its layers.

    Attributes:
        tokenizer: the encoder's own.
        max_length: tokens, specials included.
        name: hub id or folder name, for people.
        digests: of the files it was loaded from, "weights" and "tokenizer".
    """

    def __init__(
        self,
        encoder: nn.Module,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        pooling: str,
        max_length: int,
        prompt: str = "",
        name: str = "student",
        digests: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.pooling = pooling
        self.max_length = max_length
        self.prompt = prompt
        self.name = name
        self.digests = dict(digests or {})
        self._with_positions = needs_position_ids(encoder, str(tokenizer.padding_side))

    @classmethod
    def load(cls, config: StudentConfig) -> Self:
        """The student of a run configuration, in float32.

        Raises:
            StudentError: the folder is not there, not a model, or its weights are incomplete.
        """
        from transformers import AutoTokenizer

        if not config.model:
            raise StudentError("no student given; name one with --student FOLDER or student.model in the YAML")
        options = TeacherOptions(
            model=config.model,
            backend="transformer",
            pooling=config.pooling,
            prompt=config.prompt,
            max_length=config.max_length,
            dtype="float32",
            trust_remote_code=config.trust_remote_code,
        )
        try:
            spec = resolve(options)
            if spec.folder is None:
                raise StudentError(f"student {config.model!r} is not a model that can be trained")
            folder = ModelFolder(spec.folder)
            encoder = load_encoder(folder.encoder, torch.float32, torch.device("cpu"), options)
        except TeacherError as error:
            raise StudentError(f"student {config.model!r} cannot be used: {error}") from error
        tokenizer = AutoTokenizer.from_pretrained(
            folder.encoder, local_files_only=True, trust_remote_code=config.trust_remote_code
        )
        length = spec.space.max_length if config.max_length else min(spec.space.max_length, MAX_LENGTH)
        return cls(
            encoder.train(),
            tokenizer,
            pooling=spec.space.pooling,
            max_length=length,
            prompt=config.prompt,
            name=spec.space.teacher,
            digests={"weights": spec.space.weights, "tokenizer": spec.space.tokenizer},
        )

    @property
    def shape(self) -> StudentShape:
        config: Any = self.encoder.config
        return StudentShape(
            int(config.hidden_size), int(config.num_hidden_layers), self.pooling, int(config.num_attention_heads)
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """`(L + 1, n, d_s)` float32: the pooled state of the embedding layer and of each block."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if self._with_positions:
            inputs["position_ids"] = position_ids(attention_mask)
        states = self.encoder(**inputs, output_hidden_states=True).hidden_states
        return torch.stack([pool(state, attention_mask, self.pooling) for state in states])

    @torch.no_grad()
    def encode(
        self, texts: Sequence[str], *, projection: Tensor | None = None, batch: int = 64
    ) -> npt.NDArray[np.float32]:
        """`(n, d_s)` float32 vectors of the last layer, without dropout, not normalised.

        Args:
            projection: `(d, d_s)` weight that carries them into another space; the result is `(n, d)`.
        """
        was_training = self.training
        self.eval()
        device = next(self.parameters()).device
        lengths = [len(text) for text in texts]
        order = np.argsort(lengths, kind="stable")
        vectors = np.empty((len(texts), self.shape.dim), dtype=np.float32)
        for start in range(0, len(texts), batch):
            chosen = order[start : start + batch]
            tokens = self.tokenizer(
                [self.prompt + texts[place] for place in chosen.tolist()],
                padding=True,
                truncation=True,
                max_length=self.max_length,
                return_tensors="pt",
            ).to(device)
            layers = self(tokens["input_ids"], tokens["attention_mask"])
            vectors[chosen] = layers[-1].float().cpu().numpy()
        self.train(was_training)
        if projection is not None:
            vectors = vectors @ projection.detach().float().cpu().numpy().T
        return vectors

    def save_encoder(self, folder: Path) -> None:
        """Encoder (safetensors) and tokenizer as a plain transformers folder."""
        encoder: Any = self.encoder
        encoder.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
