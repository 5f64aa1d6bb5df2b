"""The lengths of a batch's texts: uniform, or as in a corpus."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from distill.errors import ConfigError
from distill.plan.models import Model

if TYPE_CHECKING:
    from teacher_cache.storage.manifest import Manifest
    from teacher_cache.table.cache import TeacherCache

SAMPLED_TEXTS = 2**16
SAMPLED_BATCHES = 1000
QUANTILES = (0.5, 0.9, 0.99, 1.0)


@dataclass(frozen=True)
class Lengths:
    """Tokens per text of a batch, special tokens and prompt included.

    Attributes:
        typical: of a batch with an average step time.
        largest: of the batch that needs the most memory.
        quantiles: of the corpus, by share; empty if all texts have the same length.
        texts: number of texts that were tokenized.
        sampled: whether these were a sample, so that the corpus may hold longer texts.
    """

    typical: tuple[int, ...]
    largest: tuple[int, ...]
    quantiles: dict[str, int]
    texts: int = 0
    sampled: bool = False

    @classmethod
    def uniform(cls, batch: int, length: int) -> "Lengths":
        """Every text has `length` tokens."""
        return cls((length,) * batch, (length,) * batch, {})


def corpus_lengths(
    cache: "TeacherCache", manifest: "Manifest", student: Model, prompt: str, batch: int, *, by_length: bool, seed: int
) -> Lengths:
    """Lengths of up to `SAMPLED_TEXTS` texts of a corpus under the student's tokenizer.

    The typical batch has the corpus's quantiles, so that its sum is the mean one. The largest is the largest of
    `SAMPLED_BATCHES` random batches and contains the longest text; with `by_length` it has the longest texts.

    Raises:
        ConfigError: the student is a shape, which has no tokenizer.
    """
    if student.folder is None:
        raise ConfigError(
            f"{student.name} has no tokenizer to measure the corpus with; give `length`, or a student folder"
        )
    from transformers import AutoTokenizer

    from teacher_cache.teachers.folder import ModelFolder

    tokenizer = AutoTokenizer.from_pretrained(
        ModelFolder(student.folder).encoder, local_files_only=True, trust_remote_code=student.trust_remote_code
    )
    rows = manifest.distinct_rows(cache.rows)
    random = np.random.default_rng(seed)
    sampled = len(rows) > SAMPLED_TEXTS
    if sampled:
        rows = np.sort(random.choice(rows, SAMPLED_TEXTS, replace=False))
    texts = [prompt + text for text in cache.texts(rows)]
    counts = tokenizer(texts, truncation=True, max_length=student.max_length, return_length=True)["length"]
    tokens = np.sort(np.asarray(counts, dtype=np.int64))
    shares = (np.arange(batch) + 0.5) / batch
    return Lengths(
        tuple(np.quantile(tokens, shares, method="nearest").tolist()),
        tuple(_largest(tokens, batch, by_length, random).tolist()),
        {f"{share:g}": int(np.quantile(tokens, share, method="nearest")) for share in QUANTILES},
        len(tokens),
        sampled,
    )


def _largest(
    tokens: npt.NDArray[np.int64], batch: int, by_length: bool, random: np.random.Generator
) -> npt.NDArray[np.int64]:
    if by_length:
        longest: npt.NDArray[np.int64] = np.resize(tokens[::-1][:batch], batch)
        return longest
    batches = random.choice(tokens, size=(SAMPLED_BATCHES, batch))
    largest: npt.NDArray[np.int64] = batches[batches.sum(1).argmax()]
    largest[largest.argmax()] = tokens[-1]
    return largest
