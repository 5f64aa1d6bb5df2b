"""Texts to vectors under a budget of padded tokens; shared by every teacher that runs on torch.

A back end brings a tokenizer and a way to load a forward pass; sorting by length, padding, counting, cutting,
normalising, the float32 repair and running out of memory are the same for all and live here.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from teacher_cache.errors import TeacherError
from teacher_cache.space import EmbeddingSpace
from teacher_cache.teachers.base import Encoded

logger = logging.getLogger("teacher_cache")

# One padded batch on the device -> (b, width) vectors, neither cut nor normalised.
Forward = Callable[[dict[str, Tensor]], Tensor]


@dataclass(frozen=True)
class LoadedModel:
    """A forward pass in one precision, and the transformers tokenizer that goes with it."""

    forward: Forward
    tokenizer: Any


_BATCH_TOKENS_CUDA = 16384
_BATCH_TOKENS_ELSEWHERE = 4096

# Agreement of a text alone with the same text among padding. Rounding in bfloat16 stays above 0.9995.
_SELF_CHECK_COSINE = 0.999
_SELF_CHECK_TEXTS = (
    "A short text.",
    "A longer text, so that the short one is padded next to it: the harbour was quiet that morning, and the "
    "two of them walked along the pier, counting the boats that had come in during the night.",
)


@dataclass(frozen=True)
class _Tokens:
    """Token ids of n texts without padding; `types` where the model takes token types."""

    ids: list[list[int]]
    types: list[list[int]] | None
    truncated: npt.NDArray[np.bool_]


class BatchedEncoder:
    """Encodes texts with a forward pass that `load` provides for a precision.

    Raises:
        TeacherError: the model's answer depends on padding, or its vectors are narrower than the space.
    """

    def __init__(
        self,
        space: EmbeddingSpace,
        device: torch.device,
        load: Callable[[torch.dtype], LoadedModel],
        batch_tokens: int | None,
    ) -> None:
        if batch_tokens is not None and batch_tokens < 1:
            raise TeacherError(f"batch tokens is {batch_tokens}, expected at least 1")
        self.space = space
        self.batch_tokens = batch_tokens or (_BATCH_TOKENS_CUDA if device.type == "cuda" else _BATCH_TOKENS_ELSEWHERE)
        self._device = device
        self._load = load
        self._dtype: torch.dtype = getattr(torch, space.dtype)
        model = load(self._dtype)
        self._forward = model.forward
        self._float32_forward: Forward | None = None
        self._may_repair = self._dtype != torch.float32
        self._tokenizer = model.tokenizer
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
        vectors = self._vectors(self._forward, tokens, rows)
        broken = _broken(vectors)
        repaired = np.zeros(len(texts), dtype=np.bool_)
        if broken.any() and (forward := self._in_float32()) is not None:
            vectors[broken] = self._vectors(forward, tokens, rows[broken])
            repaired = broken & ~_broken(vectors)
        return Encoded(
            vectors=vectors,
            tokens=np.fromiter(map(len, tokens.ids), dtype=np.int32, count=len(texts)),
            truncated=tokens.truncated,
            repaired=repaired,
        )

    def _in_float32(self) -> Forward | None:
        """The float32 copy that answers where the compute precision overflows, loaded when first needed.

        None when the teacher runs in float32 as it is, or the device has no room for a second copy.
        """
        if not self._may_repair:
            return None
        if self._float32_forward is None:
            logger.info("%s overflows %s: loading it in float32 too", self.space.teacher, self.space.dtype)
            try:
                self._float32_forward = self._load(torch.float32).forward
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
        return self._float32_forward

    def _tokenize(self, texts: Sequence[str]) -> _Tokens:
        if not texts:
            return _Tokens([], None, np.zeros(0, dtype=np.bool_))
        prompted = [self.space.prompt + text for text in texts]
        whole = self._tokenizer(prompted, truncation=False, return_attention_mask=False, verbose=False)
        ids: list[list[int]] = whole["input_ids"]
        types: list[list[int]] | None = whole.get("token_type_ids")
        truncated = np.array([len(one) > self.space.max_length for one in ids], dtype=np.bool_)
        if truncated.any():
            # Cut by the tokenizer, which puts the closing specials back: last-token models read them.
            rows = np.flatnonzero(truncated)
            cut = self._tokenizer(
                [prompted[row] for row in rows],
                truncation=True,
                max_length=self.space.max_length,
                return_attention_mask=False,
            )
            for i, row in enumerate(rows.tolist()):
                ids[row] = cut["input_ids"][i]
                if types is not None:
                    types[row] = cut["token_type_ids"][i]
        # An empty text under a tokenizer without specials: attention needs one token to see.
        for row in (row for row, one in enumerate(ids) if not one):
            ids[row] = [self._first_id("eos_token_id", "pad_token_id")]
            if types is not None:
                types[row] = [0]
        return _Tokens(ids, types, truncated)

    def _first_id(self, *names: str) -> int:
        found = (getattr(self._tokenizer, name, None) for name in names)
        return next((token for token in found if token is not None), 0)

    def _vectors(self, forward: Forward, tokens: _Tokens, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """`(len(rows), dims)` float32 of the given rows of `tokens`."""
        out = np.empty((len(rows), self.space.dims), dtype=np.float32)
        lengths = np.array([len(tokens.ids[row]) for row in rows], dtype=np.int64)
        # Longest first: texts of like length share a batch, and a batch too large fails at once.
        order = np.argsort(-lengths, kind="stable")
        done = 0
        waiting: tuple[npt.NDArray[np.int64], Tensor] | None = None
        while done < len(order):
            longest = int(lengths[order[done]])
            chosen = order[done : done + max(1, self.batch_tokens // longest)]
            result = self._attempt(forward, tokens, rows[chosen])
            if result is None:
                self._shrink(longest, len(chosen))
                continue
            # Fetched one batch late, so that the device works while the next batch is prepared.
            if waiting is not None:
                out[waiting[0]] = waiting[1].cpu().numpy()
            waiting = (chosen, result)
            done += len(chosen)
        if waiting is not None:
            out[waiting[0]] = waiting[1].cpu().numpy()
        return out

    @torch.inference_mode()
    def _attempt(self, forward: Forward, tokens: _Tokens, rows: npt.NDArray[np.int64]) -> Tensor | None:
        """Vectors of one batch, None when the device's memory does not hold it."""
        try:
            vectors = forward(self._pad(tokens, rows)).float()
        except torch.OutOfMemoryError:
            return None
        if vectors.shape[1] < self.space.dims:
            raise TeacherError(
                f"{self.space.teacher} gives vectors of {vectors.shape[1]} numbers, its configuration "
                f"promised at least {self.space.dims}"
            )
        vectors = vectors[:, : self.space.dims]
        return functional.normalize(vectors, dim=1) if self.space.normalize else vectors

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
        """Refuse a model whose vectors depend on the padding beside them."""
        tokens = self._tokenize(_SELF_CHECK_TEXTS)
        alone = np.concatenate([self._vectors(self._forward, tokens, np.array([row])) for row in (0, 1)])
        result = self._attempt(self._forward, tokens, np.array([0, 1]))
        if result is None:
            return
        together = result.cpu().numpy()
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


def _broken(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    """Rows that are not finite, or null."""
    return np.logical_not(np.isfinite(vectors).all(axis=1) & vectors.any(axis=1))


def _cosine(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> float:
    norms = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    return float(a @ b) / norms if norms > 0 else float(np.array_equal(a, b))
