"""Texts to vectors within a token budget; shared by all teachers that run on torch.

A backend supplies a tokenizer and a forward pass. Sorting by length, padding, counting, truncating, normalizing, token
output, the retry in float32 and running out of memory are handled here.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from teacher_cache.errors import TeacherError
from teacher_cache.space import EmbeddingSpace
from teacher_cache.teachers.attention import TokenPass, count_layers, make_recordable, record_forward
from teacher_cache.teachers.base import Encoded
from teacher_cache.teachers.token_offsets import check_fast_tokenizer, encoding_word_pieces
from teacher_cache.tokens.request import OTHER, TextTokens, TokenRequest

logger = logging.getLogger("teacher_cache")

# One padded batch on the device -> (b, width) vectors, neither cut to `dims` nor normalized.
Forward = Callable[[dict[str, Tensor]], Tensor]


@dataclass(frozen=True)
class LoadedModel:
    """A forward pass in one dtype, its transformers tokenizer, and the network it runs, for token-level output."""

    forward: Forward
    tokenizer: Any
    network: nn.Module | None = None


_BATCH_TOKENS_CUDA = 16384
_BATCH_TOKENS_MPS = 4096
# Per thread of a CPU: the activations of one layer still fit into its caches.
_BATCH_TOKENS_THREAD = 1024

# Lowest cosine of a text alone and the same text with padding. With bfloat16 rounding it is above 0.9995.
_SELF_CHECK_COSINE = 0.999
# Largest error of the sum of an attention row: hundreds of weights rounded to bfloat16.
_ROW_SUM_ERROR = 0.02
_SELF_CHECK_TEXTS = (
    "A short text.",
    "A longer text, so that the short one is padded next to it: the harbor was quiet that morning, and the "
    "two of them walked along the pier, counting the boats that had come in during the night.",
)


@dataclass(frozen=True)
class _Tokens:
    """Token ids of n texts without padding."""

    ids: list[list[int]]
    types: list[list[int]] | None
    truncated: npt.NDArray[np.bool_]
    pieces: list[npt.NDArray[np.int32]] | None


@dataclass(frozen=True)
class _Output:
    """The output of one forward pass, on the device."""

    vectors: Tensor
    by_token: TokenPass | None


class BatchedEncoder:
    """Encodes texts with the forward pass that `load` returns for a dtype.

    Args:
        check_padding: check at the start that padding does not change a vector.

    Raises:
        TeacherError: vectors depend on padding or are narrower than the space, or the request cannot be fulfilled.
    """

    def __init__(
        self,
        space: EmbeddingSpace,
        device: torch.device,
        load: Callable[[torch.dtype], LoadedModel],
        batch_tokens: int | None,
        request: TokenRequest | None = None,
        *,
        check_padding: bool = True,
    ) -> None:
        if batch_tokens is not None and batch_tokens < 1:
            raise TeacherError(f"`batch_tokens` is {batch_tokens}, expected at least 1")
        self.space = space
        self.batch_tokens = batch_tokens or _default_batch_tokens(device)
        self._device = device
        self._load_dtype = load
        self._request = request
        self._dtype: torch.dtype = getattr(torch, space.dtype)
        self._model = self._load(self._dtype)
        self._float32_model: LoadedModel | None = None
        self._may_repair = self._dtype != torch.float32
        self._tokenizer = self._model.tokenizer
        if request is not None:
            check_fast_tokenizer(self._tokenizer)
        self._tokenizer.truncation_side = space.truncation_side
        fixed = len(self._tokenizer([space.prompt], truncation=False, verbose=False)["input_ids"][0])
        if fixed >= space.max_length:
            raise TeacherError(
                f"`max_length` is {space.max_length}, but prompt and special tokens of {space.teacher} take {fixed}: "
                "nothing of the text would be left; use a larger one or a shorter prompt"
            )
        if check_padding:
            self._self_check()

    def encode_counted(self, texts: Sequence[str]) -> Encoded:
        """Vectors and counts of n texts, in order."""
        tokens = self._tokenize(texts)
        rows = np.arange(len(texts))
        vectors, by_token = self._encode(self._model, tokens, rows)
        invalid = _invalid(vectors, by_token)
        repaired = np.zeros(len(texts), dtype=np.bool_)
        if invalid.any() and (model := self._in_float32()) is not None:
            vectors[invalid], again = self._encode(model, tokens, rows[invalid])
            for row, text_tokens in zip(rows[invalid].tolist(), again, strict=False):
                by_token[row] = text_tokens
            repaired = invalid & ~_invalid(vectors, by_token)
        return Encoded(
            vectors=vectors,
            tokens=np.fromiter(map(len, tokens.ids), dtype=np.int32, count=len(texts)),
            truncated=tokens.truncated,
            repaired=repaired,
            by_token=by_token if self._request is not None else None,
        )

    @property
    def network(self) -> nn.Module | None:
        """The transformers model that computes the vectors, in the dtype of the space."""
        return self._model.network

    def _load(self, dtype: torch.dtype) -> LoadedModel:
        model = self._load_dtype(dtype)
        if self._request is not None and self._request.attention is not None:
            make_recordable(model.network)
        return model

    def _in_float32(self) -> LoadedModel | None:
        """A float32 copy of the model, loaded when first needed; None in float32 or if it does not fit the device."""
        if not self._may_repair:
            return None
        if self._float32_model is None:
            logger.info("%s overflows %s: loading it in float32 too", self.space.teacher, self.space.dtype)
            try:
                self._float32_model = self._load(torch.float32)
            except TeacherError as error:
                if not isinstance(error.__cause__, torch.OutOfMemoryError):
                    raise
                self._may_repair = False
                logger.warning(
                    "vectors of %s are not finite in %s, and a float32 copy does not fit on %s: "
                    "these texts get no vector; use `dtype` float32",
                    self.space.teacher,
                    self.space.dtype,
                    self._device,
                )
        return self._float32_model

    def _tokenize(self, texts: Sequence[str]) -> _Tokens:
        if not texts:
            return _Tokens([], None, np.zeros(0, dtype=np.bool_), [])
        offsets = self._request is not None
        more = {
            "return_offsets_mapping": offsets,
            "return_special_tokens_mask": offsets,
            "return_attention_mask": False,
            "verbose": False,
        }
        prompted = [self.space.prompt + text for text in texts]
        whole = self._tokenizer(prompted, truncation=False, **more)
        ids: list[list[int]] = whole["input_ids"]
        types: list[list[int]] | None = whole.get("token_type_ids")
        pieces = encoding_word_pieces(whole, self.space.prompt) if offsets else None
        truncated = np.array([len(text_ids) > self.space.max_length for text_ids in ids], dtype=np.bool_)
        if truncated.any():
            # Truncated by the tokenizer, which keeps the closing special tokens: last-token models read them.
            rows = np.flatnonzero(truncated)
            cut = self._tokenizer(
                [prompted[row] for row in rows], truncation=True, max_length=self.space.max_length, **more
            )
            cut_pieces = encoding_word_pieces(cut, self.space.prompt) if offsets else None
            for i, row in enumerate(rows.tolist()):
                ids[row] = cut["input_ids"][i]
                if types is not None:
                    types[row] = cut["token_type_ids"][i]
                if pieces is not None and cut_pieces is not None:
                    pieces[row] = cut_pieces[i]
        # An empty text with a tokenizer without special tokens: attention needs at least one token.
        for row in (row for row, text_ids in enumerate(ids) if not text_ids):
            ids[row] = [self._first_id("eos_token_id", "pad_token_id")]
            if types is not None:
                types[row] = [0]
            if pieces is not None:
                pieces[row] = np.array([[ids[row][0], 0, 0, OTHER]], dtype=np.int32)
        return _Tokens(ids, types, truncated, pieces)

    def _first_id(self, *names: str) -> int:
        found = (getattr(self._tokenizer, name, None) for name in names)
        return next((token for token in found if token is not None), 0)

    def _encode(
        self, model: LoadedModel, tokens: _Tokens, rows: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.float32], list[TextTokens]]:
        """`(len(rows), dims)` float32 vectors of rows of `tokens`, and their token-level output."""
        vectors = np.empty((len(rows), self.space.dims), dtype=np.float32)
        by_token: dict[int, TextTokens] = {}

        def fetch(places: npt.NDArray[np.int64], output: _Output) -> None:
            vectors[places] = output.vectors.cpu().numpy()
            if output.by_token is not None and tokens.pieces is not None:
                pieces = [tokens.pieces[row] for row in rows[places]]
                by_token.update(zip(places.tolist(), output.by_token.fetch(pieces), strict=True))

        lengths = np.array([len(tokens.ids[row]) for row in rows], dtype=np.int64)
        order = longest_first(lengths)
        done = 0
        waiting: tuple[npt.NDArray[np.int64], _Output] | None = None
        while done < len(order):
            longest = int(lengths[order[done]])
            chosen = order[done : done + max(1, self.batch_tokens // longest)]
            output = self._attempt(model, tokens, rows[chosen])
            if output is None:
                self._shrink(longest, len(chosen))
                continue
            # Fetched one batch later, so that the device computes while the next batch is prepared.
            if waiting is not None:
                fetch(*waiting)
            waiting = (chosen, output)
            done += len(chosen)
        if waiting is not None:
            fetch(*waiting)
        return vectors, [by_token[place] for place in range(len(by_token))]

    @torch.inference_mode()
    def _attempt(self, model: LoadedModel, tokens: _Tokens, rows: npt.NDArray[np.int64]) -> _Output | None:
        """The output of one batch; None if the device runs out of memory."""
        try:
            batch = self._pad(tokens, rows)
            by_token, recording = self._recording(model, batch["attention_mask"])
            with recording:
                vectors = model.forward(batch).float()
        except torch.OutOfMemoryError:
            return None
        if vectors.shape[1] < self.space.dims:
            raise TeacherError(
                f"vectors of {self.space.teacher} have width {vectors.shape[1]}, but its configuration says at least "
                f"{self.space.dims}: set `dims` to {vectors.shape[1]}"
            )
        vectors = vectors[:, : self.space.dims]
        return _Output(functional.normalize(vectors, dim=1) if self.space.normalize else vectors, by_token)

    def _recording(self, model: LoadedModel, mask: Tensor) -> tuple[TokenPass | None, AbstractContextManager[None]]:
        """The token-level output of one forward pass, and the context that records it."""
        if self._request is None:
            return None, nullcontext()
        maps = self._request.attention is not None
        by_token = TokenPass(self._request, count_layers(model.network) if maps else 0, mask)
        on_attention = by_token.record_attention if maps else None
        return by_token, record_forward(model.network, on_attention=on_attention, on_output=by_token.record_output)

    def _shrink(self, longest: int, texts: int) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        if texts == 1:
            raise TeacherError(
                f"one text of {longest} tokens does not fit into the memory of {self._device}: use a lower "
                "`max_length`, a smaller `dtype` or a larger device"
            )
        self.batch_tokens = longest * (texts // 2)
        logger.info("out of memory: token budget is now %d", self.batch_tokens)

    def _pad(self, tokens: _Tokens, rows: npt.NDArray[np.int64]) -> dict[str, Tensor]:
        length = max(len(tokens.ids[row]) for row in rows)
        shape = (len(rows), length)
        arrays = {
            "input_ids": np.full(shape, self._first_id("pad_token_id", "eos_token_id"), dtype=np.int64),
            "attention_mask": np.zeros(shape, dtype=np.int64),
        }
        if tokens.types is not None:
            arrays["token_type_ids"] = np.full(shape, self._tokenizer.pad_token_type_id, dtype=np.int64)
        for i, row in enumerate(rows):
            count = len(tokens.ids[row])
            at = slice(length - count, None) if self.space.padding_side == "left" else slice(count)
            arrays["input_ids"][i, at] = tokens.ids[row]
            arrays["attention_mask"][i, at] = 1
            if tokens.types is not None:
                arrays["token_type_ids"][i, at] = tokens.types[row]
        return {name: torch.from_numpy(array).to(self._device) for name, array in arrays.items()}

    def _self_check(self) -> None:
        """Check that padding does not change a vector, and that attention rows sum to 1."""
        tokens = self._tokenize(_SELF_CHECK_TEXTS)
        alone = np.concatenate([self._encode(self._model, tokens, np.array([row]))[0] for row in (0, 1)])
        output = self._attempt(self._model, tokens, np.array([0, 1]))
        if output is None:
            return
        together = output.vectors.cpu().numpy()
        for row in (0, 1):
            if not np.isfinite(alone[row]).all():
                continue  # an overflow, which encode_counted repairs
            cosine = _cosine(alone[row], together[row])
            if not cosine >= _SELF_CHECK_COSINE:
                raise TeacherError(
                    f"padding changes the vectors of {self.space.teacher} (cosine {cosine:.4f}): "
                    f"{self.space.padding_side} padding and its attention implementation do not work together; try "
                    "`attn_implementation` eager or the other `padding_side`"
                )
        for text in output.by_token.fetch(tokens.pieces or []) if output.by_token is not None else ():
            self._check_attention(text)

    def _check_attention(self, text: TextTokens) -> None:
        if text.attention is None or text.importance is None or not np.isfinite(text.states).all():
            return
        worst = max(
            float(np.abs(text.attention.sum(axis=2) - 1).max(initial=0.0)),
            abs(float(text.importance.mean()) - 1),  # the mean over the rows of the last layer
        )
        if not worst <= _ROW_SUM_ERROR:
            raise TeacherError(
                f"rows of the attention maps of {self.space.teacher} do not sum to 1 (off by {worst:.3f}), expected a "
                "softmax over the tokens of the text: request no attention of this model"
            )


def _default_batch_tokens(device: torch.device) -> int:
    if device.type == "cpu":
        return min(_BATCH_TOKENS_CUDA, _BATCH_TOKENS_THREAD * torch.get_num_threads())
    return _BATCH_TOKENS_CUDA if device.type == "cuda" else _BATCH_TOKENS_MPS


def longest_first(lengths: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """The order in which texts are encoded, given their numbers of tokens.

    Texts of similar length share a batch, and a token budget that is too large fails at once.
    """
    return np.argsort(-lengths, kind="stable")


def _invalid(vectors: npt.NDArray[np.float32], by_token: Sequence[TextTokens]) -> npt.NDArray[np.bool_]:
    """Rows whose vector is zero or not finite, or whose token states are not finite."""
    invalid = np.logical_not(np.isfinite(vectors).all(axis=1) & vectors.any(axis=1))
    for row, text in enumerate(by_token):
        invalid[row] |= not np.isfinite(text.states).all()
    return invalid


def _cosine(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> float:
    norms = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    return float(a @ b) / norms if norms > 0 else float(np.array_equal(a, b))
