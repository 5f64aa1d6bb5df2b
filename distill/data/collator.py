"""From records to the tensors of a step: tokens of the texts, teacher output, and token alignments."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from distill.errors import NeedsNotMet, StudentError
from distill.objectives.base import Needs
from teacher_cache.building.align import AlignmentColumn
from teacher_cache.errors import TeacherError
from teacher_cache.reading.stream import Batch
from teacher_cache.teachers.token_offsets import check_fast_tokenizer, ignores_case, word_pieces
from teacher_cache.tokens.alignment import Alignment, align, dense_matrices
from teacher_cache.tokens.request import ID, ROLE, TEXT_TOKEN, TextTokens

if TYPE_CHECKING:
    from distill.data.online import OnlineTeacher

# Alignments kept in memory, about a kilobyte each.
MEMORIZED_ALIGNMENTS = 2**16


class Collator:
    """From records to the tensors of a step.

    The batch has `input_ids` and `attention_mask` of V * B encodings (view by view), `vectors` `(B, d_T)` and
    `text_ids` `(B,)`; optionally `domains` `(B,)`, and for the tokens of the first view `special` `(B, n_s)`,
    `teacher_tokens` (see `TokenStates`) and `alignment` `(B, n_s, n_T)`.

    Args:
        tokenizer: of the student; copied.
        prompt: put before every text.
        repeat: number of encodings of each text (views with different dropout masks).
        needs: of the objective.
        restore: decodes the stored tokens of a text.
        attention_layers: layers of the teacher's attention maps, in their order.
        stored_alignments: alignments of the cache; others are computed here and memorized.
        domains_of: maps record numbers of the corpus to domain numbers.
        online: encodes every batch, instead of the cache.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_length: int,
        *,
        prompt: str = "",
        repeat: int = 1,
        needs: Needs | None = None,
        restore: Callable[[Any], TextTokens] | None = None,
        attention_layers: Sequence[int] = (),
        stored_alignments: AlignmentColumn | None = None,
        domains_of: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.integer]] | None = None,
        online: "OnlineTeacher | None" = None,
    ) -> None:
        if needs is not None and needs.tokens:
            try:
                check_fast_tokenizer(tokenizer)
            except TeacherError as error:
                raise StudentError(f"the student cannot be used: {error}") from error
        # A copy, because every call changes the tokenizer's truncation and padding, possibly in a thread.
        self.tokenizer = copy.deepcopy(tokenizer)
        self.max_length = max_length
        self.prompt = prompt
        self.repeat = repeat
        self.needs = needs or Needs()
        self.restore = restore
        self.stored_alignments = stored_alignments
        self._maps = [attention_layers.index(layer) for _, layer in self.needs.attention]
        self.domains_of = domains_of
        self.online = online
        self.uncased = ignores_case(tokenizer)
        self._left = tokenizer.padding_side == "left"
        self._alignments: OrderedDict[int, Alignment] = OrderedDict()

    def __call__(self, records: Batch) -> dict[str, Any]:
        texts = [self.prompt + text for text in records.texts] if self.prompt else records.texts
        tokens = self.tokenizer(
            texts,
            padding=True,
            truncation=True,
            max_length=self.max_length,
            return_tensors="pt",
            return_offsets_mapping=self.needs.tokens,
            return_special_tokens_mask=self.needs.tokens,
        )
        ids, mask = tokens["input_ids"], tokens["attention_mask"]
        vectors, by_token, internals = records.vectors, None, None
        if self.online is not None:
            first_texts = records.texts[: len(records.rows)]
            if self.needs.internals:
                side = self.tokenizer.padding_side
                encoded, internals = self.online.encode_with_internals(first_texts, padding_side=side)
            else:
                encoded = self.online.encode(first_texts)
            vectors, by_token = encoded.vectors, encoded.by_token
        elif self.needs.tokens and self.restore is not None:
            by_token = [self.restore(stored) for stored in records.tokens or ()]
        batch: dict[str, Any] = {
            "input_ids": ids.repeat(self.repeat, 1),
            "attention_mask": mask.repeat(self.repeat, 1),
            "vectors": torch.from_numpy(vectors),
            "text_ids": torch.from_numpy(records.rows),
        }
        if self.domains_of is not None:
            batch["domains"] = torch.from_numpy(self.domains_of(records.records).astype(np.int64))
        if by_token is not None:
            batch |= self._tokens(records, tokens, by_token)
        if internals is not None:
            batch["teacher_tokens"]["internals"] = vars(internals)
        return batch

    def _tokens(self, records: Batch, tokens: Any, by_token: Sequence[TextTokens]) -> dict[str, Any]:
        size = len(records.rows)
        mask = tokens["attention_mask"][:size].bool()
        student_pieces = [
            word_pieces(
                tokens["offset_mapping"][row][mask[row]].numpy(),
                tokens["special_tokens_mask"][row][mask[row]].bool().numpy(),
                tokens["input_ids"][row][mask[row]].numpy(),
                len(self.prompt),
            )
            for row in range(size)
        ]
        if self.needs.same_tokens:
            _check_same_tokens(records, student_pieces, by_token)
        special = torch.zeros_like(mask)
        for row, pieces in enumerate(student_pieces):
            special[row, mask[row]] = torch.from_numpy(pieces[:, ROLE] != TEXT_TOKEN)
        batch: dict[str, Any] = {"special": special, "teacher_tokens": self._padded(by_token)}
        if self.needs.alignment is not None:
            alignments = self._aligned(records, by_token, student_pieces)
            teacher_mask = batch["teacher_tokens"]["mask"]
            batch["alignment"] = torch.from_numpy(dense_matrices(alignments, mask.numpy(), teacher_mask.numpy()))
        return batch

    def _aligned(
        self, records: Batch, by_token: Sequence[TextTokens], student_pieces: Sequence[npt.NDArray[np.int32]]
    ) -> list[Alignment]:
        stored = self.stored_alignments
        if stored is not None and stored.present(records.rows).all():
            return stored.gather(records.rows)
        rows = zip(records.rows.tolist(), records.texts, by_token, student_pieces, strict=False)
        return [self._computed(row, text, tokens.pieces, pieces) for row, text, tokens, pieces in rows]

    def _computed(
        self, row: int, text: str, teacher_pieces: npt.NDArray[np.int32], student_pieces: npt.NDArray[np.int32]
    ) -> Alignment:
        found = self._alignments.get(row)
        if found is None:
            found = align(text, teacher_pieces, student_pieces, str(self.needs.alignment), lower=self.uncased)
            self._alignments[row] = found
            if len(self._alignments) > MEMORIZED_ALIGNMENTS:
                self._alignments.popitem(last=False)
        return found

    def _padded(self, by_token: Sequence[TextTokens]) -> dict[str, Tensor]:
        """The teacher's tokens as one batch, padded on the side of the student's."""
        lengths = [len(tokens.pieces) for tokens in by_token]
        batch, longest = len(by_token), max(lengths)
        places = [slice(longest - length, None) if self._left else slice(length) for length in lengths]
        tensors = {
            "states": torch.zeros(batch, longest, by_token[0].states.shape[1]),
            "mask": torch.zeros(batch, longest, dtype=torch.bool),
            "special": torch.zeros(batch, longest, dtype=torch.bool),
        }
        if self.needs.importance:
            tensors["importance"] = torch.zeros(batch, longest)
        if self._maps:
            tensors["attention"] = torch.zeros(len(self._maps), batch, longest, longest)
        for row, (tokens, place) in enumerate(zip(by_token, places, strict=True)):
            tensors["states"][row, place] = torch.from_numpy(tokens.states)
            tensors["mask"][row, place] = True
            tensors["special"][row, place] = torch.from_numpy(tokens.pieces[:, ROLE] != TEXT_TOKEN)
            if self.needs.importance and tokens.importance is not None:
                tensors["importance"][row, place] = torch.from_numpy(tokens.importance)
            if self._maps and tokens.attention is not None:
                tensors["attention"][:, row, place, place] = torch.from_numpy(tokens.attention[self._maps])
        return tensors


def _check_same_tokens(
    records: Batch, student_pieces: Sequence[npt.NDArray[np.int32]], by_token: Sequence[TextTokens]
) -> None:
    """Check that student and teacher have the same tokens."""
    for text, pieces, tokens in zip(records.texts, student_pieces, by_token, strict=False):
        student, teacher = pieces[:, ID], tokens.pieces[:, ID]
        # If one model truncates a text to fewer tokens, all but its closing token must match.
        same = len(student) if len(student) == len(teacher) else min(len(student), len(teacher)) - 1
        if not np.array_equal(student[:same], teacher[:same]):
            raise NeedsNotMet(
                f"the objective compares token by token, but student and teacher split {text[:60]!r} into "
                f"{len(student)} and {len(teacher)} tokens that are not the same; it needs one tokenizer and prompt "
                "for both"
            )
