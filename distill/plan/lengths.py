"""How long the texts of a batch are: all alike, or as a corpus has them."""

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
DRAWN_BATCHES = 1000
QUANTILES = (0.5, 0.9, 0.99, 1.0)


@dataclass(frozen=True)
class Lengths:
    """Tokens of the texts of a batch, specials and prompt included.

    Attributes:
        typical: of a batch that takes an average step's time.
        largest: of one that takes the most memory that a run will see.
        quantiles: of the corpus, by share; empty where all texts are alike.
        texts: that were looked at.
        sampled: whether the corpus has more, and so may have longer ones.
    """

    typical: tuple[int, ...]
    largest: tuple[int, ...]
    quantiles: dict[str, int]
    texts: int = 0
    sampled: bool = False

    @classmethod
    def alike(cls, batch: int, length: int) -> "Lengths":
        """Every text has as many."""
        return cls((length,) * batch, (length,) * batch, {})


def corpus_lengths(
    cache: "TeacherCache", manifest: "Manifest", student: Model, prompt: str, batch: int, *, by_length: bool, seed: int
) -> Lengths:
    """Those of up to `SAMPLED_TEXTS` texts of a corpus under the student's tokenizer.

    The typical batch has the corpus's quantiles, so that its sum is the mean one. The largest is the largest of
    `DRAWN_BATCHES` random ones, and holds the longest text; with `by_length` it is made of the longest texts.

    Raises:
        ConfigError: the student is a shape, which has no tokenizer.
    """
    if student.folder is None:
        raise ConfigError(
            f"{student.name} has no tokenizer to measure the corpus with; give --length, or a student's folder"
        )
    from transformers import AutoTokenizer

    from teacher_cache.teachers.folder import ModelFolder

    tokenizer = AutoTokenizer.from_pretrained(
        ModelFolder(student.folder).encoder, local_files_only=True, trust_remote_code=student.trust_remote_code
    )
    rows = manifest.distinct_rows(cache.rows)
    draw = np.random.default_rng(seed)
    sampled = len(rows) > SAMPLED_TEXTS
    if sampled:
        rows = np.sort(draw.choice(rows, SAMPLED_TEXTS, replace=False))
    texts = [prompt + text for text in cache.texts(rows)]
    found = tokenizer(texts, truncation=True, max_length=student.max_length, return_length=True)["length"]
    tokens = np.sort(np.asarray(found, dtype=np.int64))
    places = (np.arange(batch) + 0.5) / batch
    return Lengths(
        tuple(np.quantile(tokens, places, method="nearest").tolist()),
        tuple(_largest(tokens, batch, by_length, draw).tolist()),
        {f"{share:g}": int(np.quantile(tokens, share, method="nearest")) for share in QUANTILES},
        len(tokens),
        sampled,
    )


def _largest(
    tokens: npt.NDArray[np.int64], batch: int, by_length: bool, draw: np.random.Generator
) -> npt.NDArray[np.int64]:
    if by_length:
        longest: npt.NDArray[np.int64] = np.resize(tokens[::-1][:batch], batch)
        return longest
    drawn = draw.choice(tokens, size=(DRAWN_BATCHES, batch))
    largest: npt.NDArray[np.int64] = drawn[drawn.sum(1).argmax()]
    largest[largest.argmax()] = tokens[-1]
    return largest
