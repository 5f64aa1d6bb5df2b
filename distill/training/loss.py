"""Objectives as a loss of sentence-transformers' trainer, with cache rows as labels."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from distill.data.collator import Collator
from distill.errors import ConfigError, NeedsNotMet, StudentError
from distill.objectives.base import (
    Objective,
    StudentOutput,
    StudentShape,
    TeacherTargets,
    TokenStates,
)
from distill.student.student import AttentionMaps, token_states
from distill.training.targets import require_tokens, uses_pairs
from teacher_cache.reading.stream import Batch
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.joint import JointSpace
from teacher_cache.table.view import SpaceView
from teacher_cache.teachers.attention import make_recordable, record_forward
from teacher_cache.teachers.pooling import pool

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

POOLINGS = {"mean": "mean", "cls": "cls", "lasttoken": "last_token"}

Features = Mapping[str, Any]


class CachedLoss(nn.Module):
    """An objective as a loss of `SentenceTransformerTrainer`, whose label column holds rows of the cache.

    The trainer minimizes the sum of the terms, logs each by name, and trains the objective's projections with the
    student. If the second view is another text, the data set has a second text column.

    Args:
        model: a transformer, mean, cls or last-token pooling, and optionally Normalize. The pooled states before
            Normalize are trained.
        objective: created for `student_shape(model)` and `teacher_shape(space)`.
        space: of the teacher's vectors and tokens.
        cache: of the space, for the texts; needed by objectives that compare tokens.

    Raises:
        StudentError: another kind of model.
        NeedsNotMet: the space lacks something that the objective needs.
    """

    def __init__(
        self,
        model: "SentenceTransformer",
        objective: Objective,
        space: SpaceView | JointSpace,
        cache: TeacherCache | None = None,
    ) -> None:
        super().__init__()
        self.model = model  # the trainer replaces this attribute with the wrapped model
        self.objective = objective.to(model.device)
        self.space = space
        self._pooling = student_shape(model).pooling
        self._tokens = _CachedTokens(model, objective, space, cache) if objective.needs.tokens else None
        if objective.needs.attention:
            make_recordable(_encoder(model))

    def forward(self, sentence_features: Iterable[Features], labels: Tensor) -> dict[str, Tensor]:
        """The objective's terms.

        Args:
            sentence_features: tokens of B texts, of one column or of two.
            labels: `(B,)` rows of the texts of the first column, from `TeacherCache.lookup`. They are copied to the
                CPU to read the teacher's output.

        Raises:
            MissingRows: a row has no vector.
            StudentError: the objective needs other columns or, if it compares tokens, the texts are not those of the
                rows.
            ConfigError: an objective with projections in several processes.
        """
        self._check_processes()
        columns, needs = list(sentence_features), self.objective.needs
        rows = labels.detach().cpu().numpy().astype(np.int64)
        paired = uses_pairs(self.objective)
        if len(columns) != 1 + paired:
            raise StudentError(
                f"the data set has {len(columns)} text columns; the objective needs {1 + paired}, and a column 'label' "
                "of cache rows"
            )
        passes = [self._encoded(features, 1 if paired else needs.views) for features in columns]
        layers = torch.cat([self._pooled(encoded, mask) for encoded, mask, _ in passes], dim=1)
        vectors = torch.from_numpy(self.space.gather(rows)).to(labels.device)
        output, targets = StudentOutput(layers, needs.views), TeacherTargets(vectors, labels)
        if self._tokens is not None:
            encoded, _, maps = passes[0]
            batch = self._tokens.batch(columns[0]["input_ids"], rows)
            output = replace(output, tokens=token_states(encoded.last_hidden_state, batch["special"], maps))
            targets = replace(targets, tokens=TokenStates(**batch["teacher_tokens"]), alignment=batch.get("alignment"))
        terms: dict[str, Tensor] = self.objective(output, targets)
        return terms

    def _check_processes(self) -> None:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if (
            distributed
            and torch.distributed.get_world_size() > 1
            and next(self.objective.parameters(), None) is not None
        ):
            raise ConfigError(
                "sentence-transformers does not synchronize the parameters of a loss, so the objective's projections "
                "would differ between processes; use one process, or `distill run`"
            )

    def _encoded(self, features: Features, repeat: int) -> tuple[Any, Tensor, AttentionMaps]:
        """Encoder output and attention mask of the texts, repeated `repeat` times; attention maps of the first copy."""
        if "attention_mask" not in features:
            raise StudentError("the texts of a batch are flattened; load the model without flattening of inputs")
        texts = len(features["attention_mask"])
        # A copy, because the model adds keys to its input.
        repeated = {
            key: torch.cat([value] * repeat)
            if repeat > 1 and isinstance(value, Tensor) and value.ndim and len(value) == texts
            else value
            for key, value in features.items()
        }
        needs, mask = self.objective.needs, repeated["attention_mask"]
        maps = AttentionMaps(needs, mask[:texts])
        outputs: list[Any] = []
        on_attention = maps.record if needs.attention else None
        # Through the whole model, for wrappers of the trainer.
        with record_forward(
            _encoder(self.model), on_attention=on_attention, on_output=outputs.append, output_hidden_states=True
        ):
            self.model(repeated)
        return outputs[-1], mask, maps

    def _pooled(self, encoded: Any, mask: Tensor) -> Tensor:
        return torch.stack([pool(state, mask, self._pooling) for state in encoded.hidden_states])


class _CachedTokens:
    """Token states of the teacher for the texts of a batch."""

    def __init__(
        self,
        model: "SentenceTransformer",
        objective: Objective,
        space: SpaceView | JointSpace,
        cache: TeacherCache | None,
    ) -> None:
        needs = objective.needs
        tokens = require_tokens("the objective", objective, space)
        if cache is None:
            raise NeedsNotMet("the objective compares tokens, so CachedLoss needs `cache`, which holds the texts")
        self._maps = bool(needs.attention) or needs.importance
        self._cache = cache
        self._columns = tokens
        self._collator = Collator(
            model.tokenizer,
            model.max_seq_length or model.tokenizer.model_max_length,
            needs=needs,
            restore=tokens.restore,
            attention_layers=tokens.record.attention or (),
        )

    def batch(self, ids: Tensor, rows: npt.NDArray[np.int64]) -> dict[str, Any]:
        """`special`, `teacher_tokens` and `alignment` of `Collator`, for texts with these `(B, t)` token ids."""
        stored = self._columns.gather_stored(rows, attention=self._maps)
        no_vectors = np.empty((len(rows), 0), dtype=np.float32)
        batch = self._collator(Batch(self._cache.texts(rows), rows, no_vectors, rows, list(stored)))
        mine = batch["input_ids"][: len(rows)].to(ids.device)
        if mine.shape != ids.shape or not bool((mine == ids).all()):
            raise StudentError(
                "the trainer's tokens are not those of the texts of the label rows; the first text column must hold "
                "the texts of these rows, without prompts, truncated at the model's maximum length"
            )
        return {key: _moved(value, ids.device) for key, value in batch.items()}


def _moved(value: Any, device: torch.device) -> Any:
    return {key: part.to(device) for key, part in value.items()} if isinstance(value, dict) else value.to(device)


def student_shape(model: "SentenceTransformer") -> StudentShape:
    """Sizes of a student for its objective."""
    kinds = [type(module).__name__ for module in model]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise StudentError(
            f"the model consists of {', '.join(kinds)}; expected Transformer, Pooling and optionally Normalize"
        )
    pooling: Any = model[1]
    mode = pooling.pooling_mode
    if mode not in POOLINGS or not pooling.include_prompt:
        raise StudentError(
            f"the model pools by {mode!r}{'' if pooling.include_prompt else ' without its prompt'}; expected one of "
            f"{', '.join(POOLINGS)} over all tokens"
        )
    config: Any = _encoder(model).config
    return StudentShape(
        int(config.hidden_size), int(config.num_hidden_layers), POOLINGS[mode], int(config.num_attention_heads)
    )


def _encoder(model: Any) -> Any:
    """The transformers model inside a SentenceTransformer, wrapped or not."""
    return getattr(model, "module", model)[0].auto_model
