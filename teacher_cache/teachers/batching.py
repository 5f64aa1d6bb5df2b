"""Texts to vectors under a budget of padded tokens; shared by every teacher that runs on torch.

A back end brings a tokenizer and a way to load a forward pass; sorting by length, padding, counting, cutting,
normalising, what is said token by token, the float32 repair and running out of memory are the same for all and
live here.
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
from teacher_cache.teachers.attention import layers_of, make_recordable, watching
from teacher_cache.teachers.base import Encoded
from teacher_cache.teachers.pieces import pieces_of, require_offsets
from teacher_cache.teachers.token_states import TokenPass
from teacher_cache.tokens.request import OTHER, TextTokens, TokenRequest

logger = logging.getLogger("teacher_cache")

# One padded batch on the device -> (b, width) vectors, neither cut nor normalised.
Forward = Callable[[dict[str, Tensor]], Tensor]


@dataclass(frozen=True)
class LoadedModel:
    """A forward pass in one precision, and the transformers tokenizer that goes with it.

    Attributes:
        network: the transformers model that the forward pass runs, for what is said token by token.
    """

    forward: Forward
    tokenizer: Any
    network: nn.Module | None = None


_BATCH_TOKENS_CUDA = 16384
_BATCH_TOKENS_MPS = 4096
# Of each thread of a processor: what one layer makes of them still fits into its caches.
_BATCH_TOKENS_THREAD = 1024

# Agreement of a text alone with the same text among padding. Rounding in bfloat16 stays above 0.9995.
_SELF_CHECK_COSINE = 0.999
# What a row of an attention map may miss of 1: the sum over hundreds of weights that are rounded to bfloat16.
_ROW_SUM_ERROR = 0.02
_SELF_CHECK_TEXTS = (
    "A short text.",
    "A longer text, so that the short one is padded next to it: the harbour was quiet that morning, and the "
    "two of them walked along the pier, counting the boats that had come in during the night.",
)


@dataclass(frozen=True)
class _Tokens:
    """Token ids of n texts without padding.

    Attributes:
        types: where the model takes token types.
        pieces: as `TextTokens` has them, where the teacher speaks token by token.
    """

    ids: list[list[int]]
    types: list[list[int]] | None
    truncated: npt.NDArray[np.bool_]
    pieces: list[npt.NDArray[np.int32]] | None


@dataclass(frozen=True)
class _Answer:
    """What came out of one forward pass, still on the device."""

    vectors: Tensor
    by_token: TokenPass | None


class BatchedEncoder:
    """Encodes texts with a forward pass that `load` provides for a precision.

    Args:
        request: what is wanted token by token; None for vectors alone.

    Raises:
        TeacherError: the model's answer depends on padding, its vectors are narrower than the space, or it cannot
            give what is requested.
    """

    def __init__(
        self,
        space: EmbeddingSpace,
        device: torch.device,
        load: Callable[[torch.dtype], LoadedModel],
        batch_tokens: int | None,
        request: TokenRequest | None = None,
    ) -> None:
        if batch_tokens is not None and batch_tokens < 1:
            raise TeacherError(f"batch tokens is {batch_tokens}, expected at least 1")
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
            require_offsets(self._tokenizer)
        self._tokenizer.truncation_side = space.truncation_side
        fixed = len(self._tokenizer([space.prompt], truncation=False, verbose=False)["input_ids"][0])
        if fixed >= space.max_length:
            raise TeacherError(
                f"max length is {space.max_length}, but prompt and special tokens of {space.teacher} take "
                f"{fixed}: nothing of the text would be left"
            )
        self._self_check()

    def encode_counted(self, texts: Sequence[str]) -> Encoded:
        """Vectors and counts of n texts, in order."""
        tokens = self._tokenize(texts)
        rows = np.arange(len(texts))
        vectors, by_token = self._encode(self._model, tokens, rows)
        broken = _broken(vectors, by_token)
        repaired = np.zeros(len(texts), dtype=np.bool_)
        if broken.any() and (model := self._in_float32()) is not None:
            vectors[broken], again = self._encode(model, tokens, rows[broken])
            for row, said in zip(rows[broken].tolist(), again, strict=False):
                by_token[row] = said
            repaired = broken & ~_broken(vectors, by_token)
        return Encoded(
            vectors=vectors,
            tokens=np.fromiter(map(len, tokens.ids), dtype=np.int32, count=len(texts)),
            truncated=tokens.truncated,
            repaired=repaired,
            by_token=by_token if self._request is not None else None,
        )

    @property
    def network(self) -> nn.Module | None:
        """The transformers model behind the vectors, in the space's precision."""
        return self._model.network

    def _load(self, dtype: torch.dtype) -> LoadedModel:
        model = self._load_dtype(dtype)
        if self._request is not None and self._request.attention is not None:
            make_recordable(model.network)
        return model

    def _in_float32(self) -> LoadedModel | None:
        """The float32 copy that answers where the compute precision overflows, loaded when first needed.

        None when the teacher runs in float32 as it is, or the device has no room for a second copy.
        """
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
                    "%s gives vectors that are not finite in %s, and its float32 copy does not fit on %s: "
                    "these texts are left out; use --dtype float32",
                    self.space.teacher,
                    self.space.dtype,
                    self._device,
                )
        return self._float32_model

    def _tokenize(self, texts: Sequence[str]) -> _Tokens:
        if not texts:
            return _Tokens([], None, np.zeros(0, dtype=np.bool_), [])
        spans = self._request is not None
        more = {"return_offsets_mapping": spans, "return_special_tokens_mask": spans, "return_attention_mask": False}
        prompted = [self.space.prompt + text for text in texts]
        whole = self._tokenizer(prompted, truncation=False, verbose=False, **more)
        ids: list[list[int]] = whole["input_ids"]
        types: list[list[int]] | None = whole.get("token_type_ids")
        pieces = self._pieces(whole) if spans else None
        truncated = np.array([len(one) > self.space.max_length for one in ids], dtype=np.bool_)
        if truncated.any():
            # Cut by the tokenizer, which puts the closing specials back: last-token models read them.
            rows = np.flatnonzero(truncated)
            cut = self._tokenizer(
                [prompted[row] for row in rows],
                truncation=True,
                max_length=self.space.max_length,
                **more,
            )
            cut_pieces = self._pieces(cut) if spans else None
            for i, row in enumerate(rows.tolist()):
                ids[row] = cut["input_ids"][i]
                if types is not None:
                    types[row] = cut["token_type_ids"][i]
                if pieces is not None and cut_pieces is not None:
                    pieces[row] = cut_pieces[i]
        # An empty text under a tokenizer without specials: attention needs one token to see.
        for row in (row for row, one in enumerate(ids) if not one):
            ids[row] = [self._first_id("eos_token_id", "pad_token_id")]
            if types is not None:
                types[row] = [0]
            if pieces is not None:
                pieces[row] = np.array([[ids[row][0], 0, 0, OTHER]], dtype=np.int32)
        return _Tokens(ids, types, truncated, pieces)

    def _pieces(self, tokens: Any) -> list[npt.NDArray[np.int32]]:
        parts = zip(tokens["offset_mapping"], tokens["special_tokens_mask"], tokens["input_ids"], strict=True)
        return [pieces_of(offsets, special, ids, len(self.space.prompt)) for offsets, special, ids in parts]

    def _first_id(self, *names: str) -> int:
        found = (getattr(self._tokenizer, name, None) for name in names)
        return next((token for token in found if token is not None), 0)

    def _encode(
        self, model: LoadedModel, tokens: _Tokens, rows: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.float32], list[TextTokens]]:
        """`(len(rows), dims)` float32 of the given rows of `tokens`, and what was said token by token."""
        out = np.empty((len(rows), self.space.dims), dtype=np.float32)
        said: dict[int, TextTokens] = {}

        def fetch(places: npt.NDArray[np.int64], answer: _Answer) -> None:
            out[places] = answer.vectors.cpu().numpy()
            if answer.by_token is not None and tokens.pieces is not None:
                pieces = [tokens.pieces[row] for row in rows[places]]
                said.update(zip(places.tolist(), answer.by_token.fetch(pieces), strict=True))

        lengths = np.array([len(tokens.ids[row]) for row in rows], dtype=np.int64)
        order = longest_first(lengths)
        done = 0
        waiting: tuple[npt.NDArray[np.int64], _Answer] | None = None
        while done < len(order):
            longest = int(lengths[order[done]])
            chosen = order[done : done + max(1, self.batch_tokens // longest)]
            answer = self._attempt(model, tokens, rows[chosen])
            if answer is None:
                self._shrink(longest, len(chosen))
                continue
            # Fetched one batch late, so that the device works while the next batch is prepared.
            if waiting is not None:
                fetch(*waiting)
            waiting = (chosen, answer)
            done += len(chosen)
        if waiting is not None:
            fetch(*waiting)
        return out, [said[place] for place in range(len(said))]

    @torch.inference_mode()
    def _attempt(self, model: LoadedModel, tokens: _Tokens, rows: npt.NDArray[np.int64]) -> _Answer | None:
        """The answer of one batch, None when the device's memory does not hold it."""
        try:
            batch = self._pad(tokens, rows)
            by_token, watched = self._watched(model, batch["attention_mask"])
            with watched:
                vectors = model.forward(batch).float()
        except torch.OutOfMemoryError:
            return None
        if vectors.shape[1] < self.space.dims:
            raise TeacherError(
                f"{self.space.teacher} gives vectors of {vectors.shape[1]} numbers, its configuration "
                f"promised at least {self.space.dims}"
            )
        vectors = vectors[:, : self.space.dims]
        return _Answer(functional.normalize(vectors, dim=1) if self.space.normalize else vectors, by_token)

    def _watched(self, model: LoadedModel, mask: Tensor) -> tuple[TokenPass | None, AbstractContextManager[None]]:
        """A context for one forward pass, and what it fills."""
        if self._request is None:
            return None, nullcontext()
        maps = self._request.attention is not None
        by_token = TokenPass(self._request, layers_of(model.network) if maps else 0, mask)
        watched = watching(model.network, visit=by_token.visit if maps else None, output=by_token.output)
        return by_token, watched

    def _shrink(self, longest: int, texts: int) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        if texts == 1:
            raise TeacherError(
                f"one text of {longest} tokens does not fit into the memory of {self._device}: lower "
                "--max-length, or use a smaller --dtype or a larger device"
            )
        self.batch_tokens = longest * (texts // 2)
        logger.info("out of memory: batches of at most %d tokens from now on", self.batch_tokens)

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
        """Refuse a model whose vectors depend on the padding beside them, or whose attention is none."""
        tokens = self._tokenize(_SELF_CHECK_TEXTS)
        alone = np.concatenate([self._encode(self._model, tokens, np.array([row]))[0] for row in (0, 1)])
        answer = self._attempt(self._model, tokens, np.array([0, 1]))
        if answer is None:
            return
        together = answer.vectors.cpu().numpy()
        for row in (0, 1):
            if not np.isfinite(alone[row]).all():
                continue  # overflow of the precision, not of the padding: the float32 repair answers it
            cosine = _cosine(alone[row], together[row])
            if not cosine >= _SELF_CHECK_COSINE:
                raise TeacherError(
                    f"{self.space.teacher} gives a text another vector when it is padded (cosine "
                    f"{cosine:.4f}): {self.space.padding_side} padding and its attention implementation do "
                    "not go together; "
                    "try --attn-implementation eager or the other --padding-side"
                )
        for said in answer.by_token.fetch(tokens.pieces or []) if answer.by_token is not None else ():
            self._check_attention(said)

    def _check_attention(self, said: TextTokens) -> None:
        if said.attention is None or said.importance is None or not np.isfinite(said.states).all():
            return
        worst = max(
            float(np.abs(said.attention.sum(axis=2) - 1).max(initial=0.0)),
            abs(float(said.importance.mean()) - 1),  # its rows all together
        )
        if not worst <= _ROW_SUM_ERROR:
            raise TeacherError(
                f"the attention maps of {self.space.teacher} have rows whose sum misses 1 by {worst:.3f}: they are "
                "no softmax over the text's own tokens, and of no use as attention"
            )


def _default_batch_tokens(device: torch.device) -> int:
    if device.type == "cpu":
        return min(_BATCH_TOKENS_CUDA, _BATCH_TOKENS_THREAD * torch.get_num_threads())
    return _BATCH_TOKENS_CUDA if device.type == "cuda" else _BATCH_TOKENS_MPS


def longest_first(lengths: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """The order in which texts go through the model, by their tokens.

    Texts of like length share a batch, and a batch too large fails at once.
    """
    return np.argsort(-lengths, kind="stable")


def _broken(vectors: npt.NDArray[np.float32], by_token: Sequence[TextTokens]) -> npt.NDArray[np.bool_]:
    """Rows that are null, or that are not finite in their vector or token by token."""
    broken = np.logical_not(np.isfinite(vectors).all(axis=1) & vectors.any(axis=1))
    for row, said in enumerate(by_token):
        broken[row] |= not np.isfinite(said.states).all()
    return broken


def _cosine(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> float:
    norms = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    return float(a @ b) / norms if norms > 0 else float(np.array_equal(a, b))
