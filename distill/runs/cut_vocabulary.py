"""A check of a model whose vocabulary was cut, on the texts whose tokens were counted."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from distill.errors import StudentError
from distill.evaluation.base import unit_rows
from distill.student.student import Student
from distill.student.vocabulary import KeptTokens, token_ids

# Texts whose vectors are compared.
COMPARED_TEXTS = 256
TOLERANCE = 1e-5


@dataclass(frozen=True)
class VocabularyCut:
    """What became of the vocabulary.

    Attributes:
        texts: of the corpus.
        same_tokens: texts with the same tokens as before; checked, each one.
        resegmented: texts with a dropped token, which have other tokens now.
        seen: different tokens in the corpus.
        kept: tokens of the new vocabulary.
        obligatory: kept tokens that are not among the chosen ones: special tokens, characters, parts of others.
        largest_difference: between unit vectors before and after, of texts with the same tokens.
    """

    texts: int
    same_tokens: int
    resegmented: int
    seen: int
    kept: int
    obligatory: int
    largest_difference: float


def with_prompts(counts: npt.NDArray[np.int64], student: Student, usage: dict[str, Any]) -> npt.NDArray[np.int64]:
    """Counts in which the tokens of the model's own prompts are the most frequent ones."""
    prompts = [student.prompt, *(usage.get("prompts") or {}).values()]
    counts, first = counts.copy(), counts.max(initial=0) + 1
    for ids in token_ids(student.tokenizer, [prompt for prompt in prompts if prompt] or [""]):
        counts[ids] = first
    return counts


def check_vocabulary(
    before: Student, after: Student, kept: KeptTokens, batches: Iterable[Sequence[str]]
) -> VocabularyCut:
    """Compare tokens of all texts, and vectors of some, before and after a vocabulary was cut.

    Raises:
        StudentError: a text has other tokens, or another vector, although all its tokens are kept.
    """
    new = kept.new_ids(len(before.tokenizer))
    same = resegmented = 0
    compared: list[str] = []
    for texts in batches:
        inputs = [before.prompt + text for text in texts]
        pairs = zip(texts, token_ids(before.tokenizer, inputs), token_ids(after.tokenizer, inputs), strict=True)
        for text, old, ids in pairs:
            if (new[old] < 0).any():
                resegmented += 1
                continue
            if not np.array_equal(kept.old_ids[ids], old):
                raise StudentError(
                    f"the tokenizer of {before.name} cannot be cut: with all its tokens kept, {text[:60]!r} is split "
                    "into others"
                )
            same += 1
            if len(compared) < COMPARED_TEXTS:
                compared.append(text)
    largest = 0.0
    if compared:
        largest = float(np.abs(unit_rows(before.encode(compared)) - unit_rows(after.encode(compared))).max())
    if not largest <= TOLERANCE:
        raise StudentError(
            f"the vocabulary of {before.name} cannot be cut: vectors of texts with the same tokens differ by "
            f"{largest:.1e}, expected at most {TOLERANCE:.0e}"
        )
    return VocabularyCut(same + resegmented, same, resegmented, kept.seen, len(kept.old_ids), kept.obligatory, largest)
