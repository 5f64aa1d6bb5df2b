"""Records to the tensors of a step: texts to tokens, what the teacher said to floats, tokens to their counterparts."""

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

# Alignments kept in memory, about a kilobyte each: those of a corpus that fits are worked out once.
KEPT_ALIGNMENTS = 2**16


class Collator:
    """Records to the tensors a step takes.

    The batch holds `input_ids` and `attention_mask` of V * B encodings (view by view), `vectors` `(B, d_T)` and
    `text_ids` `(B,)`; where they are asked for `domains` `(B,)`, and of the first view's tokens `special` `(B, n_s)`,
    `teacher_tokens` (see `TokenStates`) and `alignment` `(B, n_s, n_T)`.

    Args:
        tokenizer: the student's; copied.
        prompt: put in front of every text.
        repeat: encode each text this many times (views under different dropout masks).
        needs: of the objective.
        restore: stored tokens of a text to what the teacher said of it.
        attention_layers: whose maps a teacher's answer holds, in its order.
        kept_alignments: those that the cache keeps; others are worked out here, once while they fit into memory.
        domains_of: numbers of records in the corpus to those of their domains.
        online: asked at every batch, in place of what the cache holds.

    Raises:
        StudentError: tokens are compared, and the tokenizer cannot say which characters a token covers.
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
        kept_alignments: AlignmentColumn | None = None,
        domains_of: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.integer]] | None = None,
        online: "OnlineTeacher | None" = None,
    ) -> None:
        if needs is not None and needs.tokens:
            try:
                check_fast_tokenizer(tokenizer)
            except TeacherError as error:
                raise StudentError(f"the student cannot be used: {error}") from error
        # Its own: every call sets how the tokenizer cuts and pads, and this one may be used in a thread.
        self.tokenizer = copy.deepcopy(tokenizer)
        self.max_length = max_length
        self.prompt = prompt
        self.repeat = repeat
        self.needs = needs or Needs()
        self.restore = restore
        self.kept_alignments = kept_alignments
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
        size = len(records.rows)
        vectors, by_token, internals = records.vectors, None, None
        if self.online is not None:
            asked, side = records.texts[:size], self.tokenizer.padding_side
            if self.needs.internals:
                said, internals = self.online.encode_with_internals(asked, padding_side=side)
            else:
                said = self.online.said(asked)
            vectors, by_token = said.vectors, said.by_token
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
        mine = [
            word_pieces(
                tokens["offset_mapping"][place][mask[place]].numpy(),
                tokens["special_tokens_mask"][place][mask[place]].bool().numpy(),
                tokens["input_ids"][place][mask[place]].numpy(),
                len(self.prompt),
            )
            for place in range(size)
        ]
        if self.needs.same_tokens:
            self._refuse_other_tokens(records, mine, by_token)
        special = torch.zeros_like(mask)
        for place, pieces in enumerate(mine):
            special[place, mask[place]] = torch.from_numpy(pieces[:, ROLE] != TEXT_TOKEN)
        batch: dict[str, Any] = {"special": special, "teacher_tokens": self._padded(by_token)}
        if self.needs.alignment is not None:
            found = self._aligned(records, by_token, mine)
            theirs_mask = batch["teacher_tokens"]["mask"]
            batch["alignment"] = torch.from_numpy(dense_matrices(found, mask.numpy(), theirs_mask.numpy()))
        return batch

    def _aligned(
        self, records: Batch, by_token: Sequence[TextTokens], mine: Sequence[npt.NDArray[np.int32]]
    ) -> list[Alignment]:
        kept = self.kept_alignments
        if kept is not None and kept.present(records.rows).all():
            return kept.gather(records.rows)
        texts = zip(records.rows.tolist(), records.texts, by_token, mine, strict=False)
        return [self._worked_out(row, text, said.pieces, pieces) for row, text, said, pieces in texts]

    def _worked_out(self, row: int, text: str, theirs: npt.NDArray[np.int32], mine: npt.NDArray[np.int32]) -> Alignment:
        known = self._alignments.get(row)
        if known is None:
            known = align(text, theirs, mine, str(self.needs.alignment), lower=self.uncased)
            self._alignments[row] = known
            if len(self._alignments) > KEPT_ALIGNMENTS:
                self._alignments.popitem(last=False)
        return known

    def _padded(self, by_token: Sequence[TextTokens]) -> dict[str, Tensor]:
        """What the teacher said as one batch, padded on the side that the student's tokens are."""
        lengths = [len(said.pieces) for said in by_token]
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
        for number, (said, place) in enumerate(zip(by_token, places, strict=True)):
            tensors["states"][number, place] = torch.from_numpy(said.states)
            tensors["mask"][number, place] = True
            tensors["special"][number, place] = torch.from_numpy(said.pieces[:, ROLE] != TEXT_TOKEN)
            if self.needs.importance and said.importance is not None:
                tensors["importance"][number, place] = torch.from_numpy(said.importance)
            if self._maps and said.attention is not None:
                tensors["attention"][:, number, place, place] = torch.from_numpy(said.attention[self._maps])
        return tensors

    def _refuse_other_tokens(
        self, records: Batch, mine: Sequence[npt.NDArray[np.int32]], by_token: Sequence[TextTokens]
    ) -> None:
        for text, pieces, said in zip(records.texts, mine, by_token, strict=False):
            ours, theirs = pieces[:, ID], said.pieces[:, ID]
            # Where one model cuts a long text shorter, all but its closing token must still be the other's.
            same = len(ours) if len(ours) == len(theirs) else min(len(ours), len(theirs)) - 1
            if not np.array_equal(ours[:same], theirs[:same]):
                raise NeedsNotMet(
                    f"the objective compares token by token, but student and teacher cut {text[:60]!r} into "
                    f"{len(pieces)} and {len(said.pieces)} tokens that are not the same; it needs one tokenizer "
                    "and prompt for both"
                )
