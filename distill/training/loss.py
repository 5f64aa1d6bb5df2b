"""Objectives in sentence-transformers' own trainer: a loss that asks the cache where others ask for labels."""

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
from distill.training.targets import require_tokens
from teacher_cache.reading.stream import Batch
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.joint import JointSpace
from teacher_cache.table.view import SpaceView
from teacher_cache.teachers.attention import make_recordable, watching
from teacher_cache.teachers.pooling import pool

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

POOLINGS = {"mean": "mean", "cls": "cls", "lasttoken": "last_token"}

Features = Mapping[str, Any]


class CachedLoss(nn.Module):
    """An objective as a loss of `SentenceTransformerTrainer`, whose label column holds rows of the cache.

    The terms come back by name: the trainer minimises their sum, logs each, and trains the objective's projections
    with the student. Where the second view is another text, the data set has a second text column.

    Args:
        model: a transformer, mean, cls or last-token pooling, and at most Normalize behind it: the pooled states are
            trained, as everywhere here, not their unit vectors.
        objective: made for `student_shape(model)` and `teacher_shape(space)`.
        space: that the teacher's vectors, and tokens, come from.
        cache: of the space, for objectives that compare tokens: it holds the texts.

    Raises:
        StudentError: another kind of model.
        NeedsNotMet: the space keeps too little for the objective.
    """

    def __init__(
        self,
        model: "SentenceTransformer",
        objective: Objective,
        space: SpaceView | JointSpace,
        cache: TeacherCache | None = None,
    ) -> None:
        super().__init__()
        self.model = model  # by this name the trainer finds it, and puts a wrapped one in its place
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
            labels: `(B,)` rows of the first column's texts, as `TeacherCache.lookup` gives them. They are waited for,
                as what the teacher said is looked up on the processor.

        Raises:
            MissingRows: a row has no vector.
            StudentError: other columns than the objective takes, or, where tokens are compared, texts that are not
                those of the rows.
            ConfigError: several processes, and an objective with projections.
        """
        self._refuse_unsynchronised()
        columns, needs = list(sentence_features), self.objective.needs
        rows = labels.detach().cpu().numpy().astype(np.int64)
        paired = self.objective.views == "pair" and needs.views == 2
        if len(columns) != 1 + paired:
            raise StudentError(
                f"the data set has {len(columns)} text columns, the objective takes {1 + paired}, and a column 'label' "
                "of cache rows"
            )
        passes = [self._encoded(features, 1 if paired else needs.views) for features in columns]
        layers = torch.cat([self._pooled(said, mask) for said, mask, _ in passes], dim=1)
        vectors = torch.from_numpy(self.space.gather(rows)).to(labels.device)
        output, targets = StudentOutput(layers, needs.views), TeacherTargets(vectors, labels)
        if self._tokens is not None:
            said, _, maps = passes[0]
            batch = self._tokens.batch(columns[0]["input_ids"], rows)
            output = replace(output, tokens=token_states(said.last_hidden_state, batch["special"], maps))
            targets = replace(targets, tokens=TokenStates(**batch["teacher_tokens"]), alignment=batch.get("alignment"))
        terms: dict[str, Tensor] = self.objective(output, targets)
        return terms

    def _refuse_unsynchronised(self) -> None:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if distributed and torch.distributed.get_world_size() > 1 and any(True for _ in self.objective.parameters()):
            raise ConfigError(
                "sentence-transformers trains a loss's own parameters in each process for itself, so the objective's "
                "projections would differ from process to process; use one process, or `distill run`"
            )

    def _encoded(self, features: Features, repeat: int) -> tuple[Any, Tensor, AttentionMaps]:
        """The encoder's output and attention mask of the texts, `repeat` times in a row; maps of the first time."""
        if "attention_mask" not in features:
            raise StudentError("the texts of a batch came in one piece: turn off the flattening of inputs")
        texts = len(features["attention_mask"])
        # The model writes into what it is given.
        repeated = {
            key: torch.cat([value] * repeat)
            if repeat > 1 and isinstance(value, Tensor) and value.ndim and len(value) == texts
            else value
            for key, value in features.items()
        }
        needs, mask = self.objective.needs, repeated["attention_mask"]
        maps = AttentionMaps(needs, mask[:texts])
        outputs: list[Any] = []
        visit = maps.visit if needs.attention else None
        # Through the whole model, so that whatever the trainer has wrapped it in sees the pass.
        with watching(_encoder(self.model), visit=visit, output=outputs.append, output_hidden_states=True):
            self.model(repeated)
        return outputs[-1], mask, maps

    def _pooled(self, said: Any, mask: Tensor) -> Tensor:
        return torch.stack([pool(state, mask, self._pooling) for state in said.hidden_states])


class _CachedTokens:
    """What the teacher said token by token, for the texts of a batch."""

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
            raise NeedsNotMet("the objective compares tokens, so CachedLoss needs the cache too, which holds the texts")
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
        """`special`, `teacher_tokens` and `alignment`, as `Collator` makes them, for texts cut into these `(B, t)` ids.

        Raises:
            StudentError: they are not the ids of the texts of these rows.
        """
        stored = self._columns.gather_stored(rows, attention=self._maps)
        no_vectors = np.empty((len(rows), 0), dtype=np.float32)
        batch = self._collator(Batch(self._cache.texts(rows), rows, no_vectors, rows, list(stored)))
        mine = batch["input_ids"][: len(rows)].to(ids.device)
        if mine.shape != ids.shape or not bool((mine == ids).all()):
            raise StudentError(
                "the trainer's tokens are not those of the texts that the labels name: the first text column must hold "
                "the texts of these rows, without prompts, cut at the model's own maximum length"
            )
        return {key: _moved(value, ids.device) for key, value in batch.items()}


def _moved(value: Any, device: torch.device) -> Any:
    return {key: part.to(device) for key, part in value.items()} if isinstance(value, dict) else value.to(device)


def student_shape(model: "SentenceTransformer") -> StudentShape:
    """The sizes of a student for its objective.

    Raises:
        StudentError: it is not a transformer with a pooling that objectives know, and at most Normalize behind it.
    """
    kinds = [type(module).__name__ for module in model]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise StudentError(
            f"the model is made of {', '.join(kinds)}; expected Transformer, Pooling and maybe Normalize"
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
