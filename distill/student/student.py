"""The student: an encoder that returns the pooled state of every layer.

Training, evaluation and export all use the one `pooling` of the student.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
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
from distill.student.cut_spec import CutSpec, is_cut
from distill.student.internals import capture_internals
from distill.student.micro_batches import in_batch_order, micro_batches
from distill.student.packing import Packing, is_packable, make_packable, packed_arguments
from teacher_cache.building.align import STUDENT_LENGTH
from teacher_cache.errors import TeacherError
from teacher_cache.teachers import TeacherOptions, TeacherSpec, load_tokenizer, resolve
from teacher_cache.teachers.attention import make_recordable, record_forward
from teacher_cache.teachers.loading import load_encoder
from teacher_cache.teachers.pooling import needs_position_ids, pool, position_ids
from teacher_cache.teachers.token_table import TokenTable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Tokens of a micro-batch that is recomputed: one view of 32 texts of 64. The activations of a smaller one are small
# beside the weights, gradients and optimizer states, and not worth another forward pass.
MICRO_BATCH_TOKENS = 2048


class Student(nn.Module):
    """A transformers encoder with the same pooling over all its layers, or a table of token vectors (no layers).

    Attributes:
        tokenizer: that of the encoder.
        max_length: tokens, special tokens included.
        name: hub id or folder name.
        digests: "weights" and "tokenizer" of the files it was loaded from.
        recompute_micro_batches: keep only the pooled states of a forward pass over more than `MICRO_BATCH_TOKENS`
            tokens, and encode the batch again in the backward pass, a micro-batch at a time, with the same dropout
            masks (as GradCache of Gao et al., Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup,
            2021). With two micro-batches and two views, each one holds a view.
    """

    recompute_micro_batches: bool = False

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
        # With left padding, RoBERTa-like models compute positions from the ids, and so need them.
        positions_known = self._with_positions or tokenizer.padding_side == "right"
        self._takes_embeddings = positions_known and "inputs_embeds" in signature(encoder.forward).parameters

    @classmethod
    def load(cls, config: StudentConfig | str) -> Self:
        """The student of a run configuration, or of a folder or hub id, in float32.

        Raises:
            StudentError: the model is not found, is not an encoder, or lacks weights.
        """
        if isinstance(config, str):
            config = StudentConfig(model=config)
        spec = resolve_student(config)
        static = spec.model_folder.is_static
        if static and config.prompt:
            raise StudentError(
                f"student.prompt is {config.prompt!r}, but student {config.model!r} is static: a prompt would add the "
                "same vectors to every text; leave it out"
            )
        try:
            encoder = load_encoder(spec.model_folder, torch.float32, torch.device("cpu"), spec.options)
            tokenizer = load_tokenizer(spec)
        except TeacherError as error:
            raise _unusable(config.model, error) from error
        length = spec.space.max_length if config.max_length or static else min(spec.space.max_length, STUDENT_LENGTH)
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
    def is_static(self) -> bool:
        """Whether it is a table of token vectors, with no layer above it."""
        return isinstance(self.encoder, TokenTable)

    @property
    def word_embeddings(self) -> nn.Module | None:
        """The embedding table of the vocabulary; None if the encoder does not expose it."""
        encoder: Any = self.encoder
        try:
            table: nn.Module = encoder.get_input_embeddings()
        except (AttributeError, NotImplementedError):
            return None
        return table

    def prepare(self, needs: Needs) -> None:
        """Switch to recordable attention if an objective compares attention maps; call it once, before training.

        Raises:
            StudentError: the attention of the encoder cannot be recorded.
        """
        if needs.attention or needs.internals:
            try:
                make_recordable(self.encoder)
            except TeacherError as error:
                raise _unusable(self.name, error) from error

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """`(L + 1, n, d_s)` float32: the pooled state of the embedding layer and of each block."""
        if isinstance(self.encoder, TokenTable):
            return self.encoder.means(input_ids, attention_mask).float().unsqueeze(0)
        count = 1
        if self.recompute_micro_batches and torch.is_grad_enabled():
            count = min(len(input_ids), math.ceil(int(attention_mask.sum()) / MICRO_BATCH_TOKENS))
        if count <= 1:
            return self._states("input_ids", input_ids, attention_mask)
        name, inputs = self._embedded(input_ids)
        parts = zip(inputs.tensor_split(count), attention_mask.tensor_split(count), strict=True)
        return torch.cat([checkpoint(self._states, name, *part, use_reentrant=False) for part in parts], dim=1)

    def _states(self, name: str, inputs: Tensor, attention_mask: Tensor) -> Tensor:
        """The result of `forward` for `inputs`, the encoder argument `name`."""
        parts = micro_batches(attention_mask)
        if self._packs(attention_mask):
            packing = Packing(attention_mask, parts)
            output = self.encoder(**packed_arguments(self.encoder, packing, name, inputs), output_hidden_states=True)
            pooled = torch.stack([packing.pool(state, self.pooling) for state in output.hidden_states])
            return in_batch_order(parts, [pooled])
        if name == "input_ids" and len(parts) > 1:
            name, inputs = self._embedded(inputs)
        states = []
        for part in parts:
            mask = attention_mask[part.rows, part.columns]
            output = self._encode(mask, **{name: inputs[part.rows, part.columns]})
            states.append(self._pooled(output.hidden_states, mask))
        return in_batch_order(parts, states)

    def _embedded(self, input_ids: Tensor) -> tuple[str, Tensor]:
        """Name and value of the encoder's input: word embeddings where it takes them, otherwise the ids.

        Embedded once per batch, because the gradient of each lookup is as large as the whole table.
        """
        table = self.word_embeddings if self._takes_embeddings else None
        return ("input_ids", input_ids) if table is None else ("inputs_embeds", table(input_ids))

    def _packs(self, attention_mask: Tensor) -> bool:
        """Whether the encoder is packable, the batch has padding, and every text has a token."""
        return is_packable(self.encoder) and not bool(attention_mask.all()) and bool(attention_mask.any(1).all())

    def forward_tokens(
        self, input_ids: Tensor, attention_mask: Tensor, special: Tensor, needs: Needs
    ) -> tuple[Tensor, TokenStates]:
        """The result of `forward` for n texts, and the tokens of the first B.

        Args:
            special: `(B, t)` bool, tokens that are not part of the text; B <= n.
            needs: which attention maps to return; `prepare` was called with the same.
        """
        batch = len(special)
        maps = AttentionMaps(needs, attention_mask[:batch])
        passes: list[Internals] = []
        with ExitStack() as stack:
            if needs.attention:
                stack.enter_context(record_forward(self.encoder, on_attention=maps.record))
            if needs.internals:
                passes = stack.enter_context(capture_internals(self.encoder))
            output = self._encode(attention_mask, input_ids=input_ids)
        internals = passes[0].take(torch.arange(batch, device=special.device)) if passes else None
        tokens = token_states(output.last_hidden_state, special, maps, internals)
        return self._pooled(output.hidden_states, attention_mask), tokens

    def _encode(self, attention_mask: Tensor, **inputs: Tensor) -> Any:
        if self._with_positions:
            inputs["position_ids"] = position_ids(attention_mask)
        return self.encoder(**inputs, attention_mask=attention_mask, output_hidden_states=True)

    def _pooled(self, states: Sequence[Tensor], attention_mask: Tensor) -> Tensor:
        return torch.stack([pool(state, attention_mask, self.pooling) for state in states])

    def encode(
        self, texts: Sequence[str], *, projection: Tensor | None = None, batch: int = 64
    ) -> npt.NDArray[np.float32]:
        """`(n, d_s)` float32 vectors of the last layer, without dropout, not normalized.

        Args:
            projection: `(d, d_s)` weight that maps the vectors to another space; the result is `(n, d)`.
        """
        vectors = np.empty((len(texts), self.shape.dim), dtype=np.float32)
        for chosen, layers in self._passes(texts, batch):
            vectors[chosen] = layers[-1].float().cpu().numpy()
        if projection is not None:
            vectors = vectors @ projection.detach().float().cpu().numpy().T
        return vectors

    def encode_layers(self, texts: Sequence[str], *, batch: int = 64) -> npt.NDArray[np.float32]:
        """`(L + 1, n, d_s)` float32 pooled states of every layer; the last one is the result of `encode`."""
        states = np.empty((self.shape.layers + 1, len(texts), self.shape.dim), dtype=np.float32)
        for chosen, layers in self._passes(texts, batch):
            states[:, chosen] = layers.float().cpu().numpy()
        return states

    @torch.no_grad()
    def _passes(self, texts: Sequence[str], batch: int) -> Iterator[tuple[npt.NDArray[np.int64], Tensor]]:
        """Indices of texts of similar length, and the result of `forward` for them, without dropout."""
        was_training = self.training
        self.eval()
        device = next(self.parameters()).device
        order = np.argsort([len(text) for text in texts], kind="stable")
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
        """Save encoder (safetensors) and tokenizer as a plain transformers folder."""
        encoder: Any = self.encoder
        encoder.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


class AttentionMaps:
    """The attention maps that an objective compares, recorded while an encoder runs.

    Args:
        attention_mask: `(B, t)` of the first B texts of the batch.
    """

    def __init__(self, needs: Needs, attention_mask: Tensor) -> None:
        self.mask = attention_mask.bool()
        self._layers = [layer for layer, _ in needs.attention]
        self._kept: dict[int, Tensor] = {}

    def record(self, layer: int, attention: Tensor, values: Tensor) -> None:
        """Keep the maps of a layer; an `on_attention` of `teacher_cache.teachers.attention.record_forward`."""
        # Only stored, not reduced: a checkpointed block must recompute exactly what it computed before.
        if layer in self._layers:
            self._kept[layer] = attention

    def stacked(self) -> Tensor | None:
        """`(z, B, t, t)` means over heads in the objective's order, 0 at padding; None if it compares no maps."""
        if not self._layers:
            return None
        seen = self.mask[:, :, None] & self.mask[:, None, :]
        texts = len(self.mask)
        return torch.stack([self._kept[layer][:texts].float().mean(1) * seen for layer in self._layers])


def token_states(
    states: Tensor, special: Tensor, maps: AttentionMaps, internals: Internals | None = None
) -> TokenStates:
    """The student's tokens of the first B texts of a forward pass.

    Args:
        states: `(n, t, d_s)` last hidden states, n >= B.
        special: `(B, t)` bool.
    """
    mine = states[: len(special)].masked_fill(~maps.mask.unsqueeze(-1), 0)  # not a product: padding may be NaN
    return TokenStates(mine, maps.mask, special, maps.stacked(), internals=internals)


def student_shape(config: StudentConfig) -> StudentShape:
    """The sizes of a student from its files, or those it will have after a `cut:`; loads no weights."""
    if is_cut(config.model):
        cut = CutSpec.parse(config.model)
        whole = student_shape(replace(config, model=cut.model))
        return replace(whole, layers=cut.layer_count(whole.layers))
    spec = resolve_student(config)
    try:
        shape = spec.model_folder.token_shape()
    except TeacherError as error:
        raise _unusable(config.model, error) from error
    return StudentShape(shape.width, shape.layers, spec.space.pooling, shape.heads)


def student_options(config: StudentConfig) -> TeacherOptions:
    """The model options of a student, in float32."""
    if not config.model:
        raise StudentError("no student given: set student.model (--student) to a model folder or a hub id")
    return TeacherOptions(
        model=config.model,
        backend="transformer",
        pooling=config.pooling,
        prompt=config.prompt,
        max_length=config.max_length,
        dtype="float32",
        trust_remote_code=config.trust_remote_code,
    )


def resolve_student(config: StudentConfig) -> TeacherSpec:
    """The student as a resolved model; loads no weights."""
    try:
        return resolve(student_options(config))
    except TeacherError as error:
        raise _unusable(config.model, error) from error


def _unusable(name: str, error: TeacherError) -> StudentError:
    return StudentError(f"student {name!r} cannot be used: {error}")
