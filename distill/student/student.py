"""The student: an encoder that gives the pooled state of every layer, and nothing more.

Pooling is one property, used alike in training, evaluation and export.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distill.config import StudentConfig
from distill.errors import StudentError
from distill.objectives.base import Internals, Needs, StudentShape, TokenStates
from distill.student.internals import capture_internals
from distill.student.micro_batches import in_order, pieces
from distill.student.packing import Packing, is_packable, make_packable, packed_arguments
from teacher_cache.building.align import STUDENT_LENGTH
from teacher_cache.errors import TeacherError
from teacher_cache.teachers import TeacherOptions, TeacherSpec, resolve
from teacher_cache.teachers.attention import make_recordable, watching
from teacher_cache.teachers.folder import ModelFolder
from teacher_cache.teachers.pooling import needs_position_ids, pool, position_ids
from teacher_cache.teachers.transformer import load_encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Tokens that are encoded again at a time: one view of 32 texts of 64. What the blocks of a student keep of fewer is
# small beside its weights, gradients and optimiser states, and not worth a forward pass.
PORTION = 2048


class Student(nn.Module):
    """A transformers encoder with one pooling over all its layers.

    Attributes:
        tokenizer: the encoder's own.
        max_length: tokens, specials included.
        name: hub id or folder name, for people.
        digests: of the files it was loaded from, "weights" and "tokenizer".
        recompute_portions: of a forward pass over more than `PORTION` tokens keep the pooled states alone; portion by
            portion the batch is encoded again, with the same dropout masks, when its gradient is due (as GradCache of
            Gao et al., Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup, 2021). Two portions
            of a batch with two views are these.
    """

    recompute_portions: bool = False

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
        make_packable(encoder)
        self._with_positions = needs_position_ids(encoder, str(tokenizer.padding_side))
        # RoBERTa-like models find their positions from the ids where padding comes first.
        positions_known = self._with_positions or tokenizer.padding_side == "right"
        self._takes_embeddings = positions_known and "inputs_embeds" in signature(encoder.forward).parameters

    @classmethod
    def load(cls, config: StudentConfig) -> Self:
        """The student of a run configuration, in float32.

        Raises:
            StudentError: the folder is not there, not a model, or its weights are incomplete.
        """
        from transformers import AutoTokenizer

        options, spec, folder = _resolved(config)
        try:
            encoder = load_encoder(folder.encoder, torch.float32, torch.device("cpu"), options)
        except TeacherError as error:
            raise StudentError(f"student {config.model!r} cannot be used: {error}") from error
        tokenizer = AutoTokenizer.from_pretrained(
            folder.encoder, local_files_only=True, trust_remote_code=config.trust_remote_code
        )
        length = spec.space.max_length if config.max_length else min(spec.space.max_length, STUDENT_LENGTH)
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

    @property
    def word_embeddings(self) -> nn.Module | None:
        """The table with a row for every token of the vocabulary; None of an encoder that does not say which it is."""
        encoder: Any = self.encoder
        try:
            table: nn.Module = encoder.get_input_embeddings()
        except (AttributeError, NotImplementedError):
            return None
        return table

    def prepare(self, needs: Needs) -> None:
        """Switch to an attention whose maps can be seen, where an objective compares them; once, before training.

        Raises:
            StudentError: the encoder's attention cannot be looked into.
        """
        if needs.attention or needs.internals:
            try:
                make_recordable(self.encoder)
            except TeacherError as error:
                raise StudentError(f"student {self.name!r} cannot be used: {error}") from error

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """`(L + 1, n, d_s)` float32: the pooled state of the embedding layer and of each block."""
        portions = 1
        if self.recompute_portions and torch.is_grad_enabled():
            portions = min(len(input_ids), math.ceil(int(attention_mask.sum()) / PORTION))
        if portions <= 1:
            return self._states("input_ids", input_ids, attention_mask)
        name, inputs = self._looked_up(input_ids)
        parts = zip(inputs.tensor_split(portions), attention_mask.tensor_split(portions), strict=True)
        return torch.cat([checkpoint(self._states, name, *part, use_reentrant=False) for part in parts], dim=1)

    def _states(self, name: str, inputs: Tensor, attention_mask: Tensor) -> Tensor:
        """What `forward` gives, of the encoder's argument `name`."""
        found = pieces(attention_mask)
        if self._packs(attention_mask):
            packing = Packing(attention_mask, found)
            said = self.encoder(**packed_arguments(self.encoder, packing, name, inputs), output_hidden_states=True)
            return in_order(found, [torch.stack([packing.pool(state, self.pooling) for state in said.hidden_states])])
        if name == "input_ids" and len(found) > 1:
            name, inputs = self._looked_up(inputs)
        states = []
        for piece in found:
            mask = attention_mask[piece.rows, piece.columns]
            said = self._encode(mask, **{name: inputs[piece.rows, piece.columns]})
            states.append(self._pooled(said.hidden_states, mask))
        return in_order(found, states)

    def _looked_up(self, input_ids: Tensor) -> tuple[str, Tensor]:
        """The word embeddings of a batch, once: every look-up has a gradient of the whole table."""
        table = self.word_embeddings if self._takes_embeddings else None
        return ("input_ids", input_ids) if table is None else ("inputs_embeds", table(input_ids))

    def _packs(self, attention_mask: Tensor) -> bool:
        """Whether a batch has padding to leave out, an encoder that can, and no text without a token."""
        return is_packable(self.encoder) and not bool(attention_mask.all()) and bool(attention_mask.any(1).all())

    def forward_tokens(
        self, input_ids: Tensor, attention_mask: Tensor, special: Tensor, needs: Needs
    ) -> tuple[Tensor, TokenStates]:
        """What `forward` gives of n texts, and the tokens of the first B.

        Args:
            special: `(B, t)` bool, tokens that are no part of the text; B <= n.
            needs: which attention maps are wanted; `prepare` has been told.
        """
        batch = len(special)
        maps = AttentionMaps(needs, attention_mask[:batch])
        passes: list[Internals] = []
        with ExitStack() as stack:
            if needs.attention:
                stack.enter_context(watching(self.encoder, visit=maps.visit))
            if needs.internals:
                passes = stack.enter_context(capture_internals(self.encoder))
            said = self._encode(attention_mask, input_ids=input_ids)
        internals = passes[0].take(torch.arange(batch, device=special.device)) if passes else None
        tokens = token_states(said.last_hidden_state, special, maps, internals)
        return self._pooled(said.hidden_states, attention_mask), tokens

    def _encode(self, attention_mask: Tensor, **inputs: Tensor) -> Any:
        if self._with_positions:
            inputs["position_ids"] = position_ids(attention_mask)
        return self.encoder(**inputs, attention_mask=attention_mask, output_hidden_states=True)

    def _pooled(self, states: Sequence[Tensor], attention_mask: Tensor) -> Tensor:
        return torch.stack([pool(state, attention_mask, self.pooling) for state in states])

    def encode(
        self, texts: Sequence[str], *, projection: Tensor | None = None, batch: int = 64
    ) -> npt.NDArray[np.float32]:
        """`(n, d_s)` float32 vectors of the last layer, without dropout, not normalised.

        Args:
            projection: `(d, d_s)` weight that carries them into another space; the result is `(n, d)`.
        """
        vectors = np.empty((len(texts), self.shape.dim), dtype=np.float32)
        for chosen, layers in self._passes(texts, batch):
            vectors[chosen] = layers[-1].float().cpu().numpy()
        if projection is not None:
            vectors = vectors @ projection.detach().float().cpu().numpy().T
        return vectors

    def encode_layers(self, texts: Sequence[str], *, batch: int = 64) -> npt.NDArray[np.float32]:
        """`(L + 1, n, d_s)` float32 pooled states of every layer, as `encode` gives those of the last."""
        states = np.empty((self.shape.layers + 1, len(texts), self.shape.dim), dtype=np.float32)
        for chosen, layers in self._passes(texts, batch):
            states[:, chosen] = layers.float().cpu().numpy()
        return states

    @torch.no_grad()
    def _passes(self, texts: Sequence[str], batch: int) -> Iterator[tuple[npt.NDArray[np.int64], Tensor]]:
        """Places of texts of similar length, and what `forward` says of them; without dropout."""
        was_training = self.training
        self.eval()
        device = next(self.parameters()).device
        lengths = [len(text) for text in texts]
        order = np.argsort(lengths, kind="stable")
        for start in range(0, len(texts), batch):
            chosen = order[start : start + batch]
            tokens = self.tokenizer(
                [self.prompt + texts[place] for place in chosen.tolist()],
                padding=True,
                truncation=True,
                max_length=self.max_length,
                return_tensors="pt",
            ).to(device)
            yield chosen, self(tokens["input_ids"], tokens["attention_mask"])
        self.train(was_training)

    def save_encoder(self, folder: Path) -> None:
        """Encoder (safetensors) and tokenizer as a plain transformers folder."""
        encoder: Any = self.encoder
        encoder.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


class AttentionMaps:
    """Keeps, while an encoder runs, the attention maps that an objective compares: mean over heads, first B texts."""

    def __init__(self, needs: Needs, attention_mask: Tensor) -> None:
        """Made for each pass.

        Args:
            attention_mask: `(B, t)`.
        """
        self.mask = attention_mask.bool()
        self._layers = [layer for layer, _ in needs.attention]
        self._kept: dict[int, Tensor] = {}

    def visit(self, layer: int, attention: Tensor, values: Tensor) -> None:
        """Called in every layer, as `teacher_cache.teachers.attention.watching` does."""
        if layer in self._layers:  # as it is: a checkpointed block computes again what it computed, and no more
            self._kept[layer] = attention

    def stacked(self) -> Tensor | None:
        """`(z, B, t, t)` in the objective's order, padding 0; None where it compares none."""
        if not self._layers:
            return None
        seen = self.mask[:, :, None] & self.mask[:, None, :]
        texts = len(self.mask)
        return torch.stack([self._kept[layer][:texts].float().mean(1) * seen for layer in self._layers])


def token_states(
    states: Tensor, special: Tensor, maps: AttentionMaps, internals: Internals | None = None
) -> TokenStates:
    """The student's tokens of the first B texts of a pass.

    Args:
        states: `(n, t, d_s)` last hidden states, n >= B.
        special: `(B, t)` bool.
    """
    mine = states[: len(special)].masked_fill(~maps.mask.unsqueeze(-1), 0)  # not a product: padding may be NaN
    return TokenStates(mine, maps.mask, special, maps.stacked(), internals=internals)


def student_shape(config: StudentConfig) -> StudentShape:
    """The sizes of a student from its files; no weights are loaded.

    Raises:
        StudentError: the folder is not there or no model.
    """
    _, spec, folder = _resolved(config)
    try:
        known = folder.token_shape()
    except TeacherError as error:
        raise StudentError(f"student {config.model!r} cannot be used: {error}") from error
    return StudentShape(known.width, known.layers, spec.space.pooling, known.heads)


def student_options(config: StudentConfig) -> TeacherOptions:
    """A student as a teacher of its kind, in float32.

    Raises:
        StudentError: the configuration names none.
    """
    if not config.model:
        raise StudentError("no student given; name one with --student FOLDER or student.model in the YAML")
    return TeacherOptions(
        model=config.model,
        backend="transformer",
        pooling=config.pooling,
        prompt=config.prompt,
        max_length=config.max_length,
        dtype="float32",
        trust_remote_code=config.trust_remote_code,
    )


def _resolved(config: StudentConfig) -> tuple[TeacherOptions, TeacherSpec, ModelFolder]:
    """How a student is asked, who that is, and its files."""
    options = student_options(config)
    try:
        spec = resolve(options)
        if spec.folder is None:
            raise StudentError(f"student {config.model!r} is not a model that can be trained")
        return options, spec, ModelFolder(spec.folder)
    except TeacherError as error:
        raise StudentError(f"student {config.model!r} cannot be used: {error}") from error
