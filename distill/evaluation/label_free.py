"""Comparison of a model with its teacher on texts without labels: agreement and approximation."""

import heapq
from collections.abc import Iterable, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from distill.errors import EvaluationError
from distill.evaluation.agreement import agreement
from distill.evaluation.base import TEACHER, TEXT, Announce, Example, Input, Task, Vectors, cosine
from teacher_cache.corpus.corpus import Corpus

# Agreement takes about 80 n^2 bytes of memory: it is measured on a sample of the corpus.
SAMPLE = 2000
SEED = 42
# Example texts of each kind.
EXAMPLES = 10
QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99}


class LabelFree(Task):
    """A comparison with the teacher on a sample of a corpus; both models encode the texts.

    The sample is the `sample` distinct texts with the smallest keyed digests: drawn without replacement, each text
    equally likely, independent of order and duplicates, in memory that does not grow with the corpus. The file is any
    that `Corpus.open` takes.

    Args:
        sample: number of distinct texts; all of a smaller corpus.
        seed: another one draws other texts.
    """

    columns: ClassVar[tuple[str, ...]] = ("text",)

    def __init__(
        self, name: str, folder: Path, *, domain: str = "apart", sample: int = SAMPLE, seed: int = SEED, **given: Any
    ) -> None:
        super().__init__(name, folder, domain=domain, **given)
        self.sample = sample
        self.seed = seed

    @cached_property
    def sampled(self) -> list[str]:
        """The texts of the sample, by digest."""
        (path,) = self.files()
        corpus = Corpus.open(path, text_key=[self.column_name("text")])
        found = sample_texts((text for batch in corpus.batches(1024) for (text,) in batch), self.sample, self.seed)
        corpus.require_records()
        return found

    def texts(self) -> list[str]:
        return self.sampled

    def inputs(self) -> list[Input]:
        return [Input(text, role) for role in (TEXT, TEACHER) for text in self.texts()]


class Agreement(LabelFree):
    """Spearman correlation of the model's and the teacher's cosines of all pairs.

    Further figure: `overlap` of the 10 nearest neighbors, times 100. See `distill.evaluation.agreement`; widths may
    differ.
    """

    metric: ClassVar[str] = "spearman"

    def score(self, vectors: Vectors) -> dict[str, float]:
        found = agreement(vectors(self.sampled), vectors(self.sampled, TEACHER))
        return {self.metric: 100 * found.spearman, "overlap": 100 * found.overlap, "texts": float(found.texts)}


class Approximation(LabelFree):
    """Mean cosine of a text's two vectors, for a model in its teacher's space.

    The error of a text is ||y - y'|| = sqrt(2 - 2 cos) of the two vectors, scaled to length 1: 0 is equal, 1.41
    unrelated, 2 opposite. Further figures are its mean as `error`, and its quantiles; examples are the texts with the
    smallest and largest errors.

    Args:
        optional: skip the task, instead of raising, for a model that is not in its teacher's space.
    """

    metric: ClassVar[str] = "cosine"

    def __init__(self, name: str, folder: Path, *, optional: bool = False, **given: Any) -> None:
        super().__init__(name, folder, **given)
        self.optional = optional

    def score(self, vectors: Vectors) -> dict[str, float]:
        cosines = self._cosines(vectors)
        errors = _distances(cosines)
        quantiles = {name: float(np.quantile(errors, share)) for name, share in QUANTILES.items()}
        return {
            self.metric: 100 * float(cosines.mean()),
            "error": float(errors.mean()),
            **{f"error_{name}": value for name, value in quantiles.items()},
            "error_max": float(errors.max()),
            "texts": float(len(errors)),
        }

    def examples(self, vectors: Vectors) -> dict[str, list[Example]]:
        """`worst`: the texts of the largest errors, largest first; `best`: of the smallest, smallest first."""
        errors = _distances(self._cosines(vectors))
        order = np.argsort(errors, kind="stable").tolist()
        rows_of = {"worst": order[::-1][:EXAMPLES], "best": order[:EXAMPLES]}
        return {kind: [Example(self.sampled[i], float(errors[i])) for i in rows] for kind, rows in rows_of.items()}

    def _cosines(self, vectors: Vectors) -> npt.NDArray[np.float64]:
        own, teacher = vectors(self.sampled), vectors(self.sampled, TEACHER)
        if own.shape[1] != teacher.shape[1]:
            raise EvaluationError(
                f"task {self.name!r}: the model's vectors have {own.shape[1]} dimensions and the teacher's "
                f"{teacher.shape[1]}, so it is not in the teacher's space; use agreement to compare them"
            )
        return cosine(own, teacher)


def label_free_tasks(corpus: Path, *, text_key: str = "text", sample: int = SAMPLE) -> list[Task]:
    """Agreement and, for a model in its teacher's space, approximation, on one sample of a corpus."""
    if not corpus.exists():
        raise EvaluationError(f"{corpus}: no such corpus of texts")
    given: dict[str, Any] = {"files": {"file": corpus}, "columns": {"text": text_key}, "sample": sample}
    return [
        Agreement("agreement", corpus.parent, **given),
        Approximation("approximation", corpus.parent, optional=True, **given),
    ]


def without_approximation(tasks: Sequence[Task], reason: str, announce: Announce) -> list[Task]:
    """The tasks without optional approximations, for a model that is not in its teacher's space."""
    kept = []
    for task in tasks:
        if not isinstance(task, Approximation):
            kept.append(task)
        elif task.optional:
            announce(f"{task.name} is skipped: {reason}")
        else:
            raise EvaluationError(f"task {task.name!r}: {reason}")
    return kept


def sample_texts(texts: Iterable[str], count: int, seed: int) -> list[str]:
    """The `count` distinct texts whose digests under `seed` are smallest, in that order; all if there are fewer."""
    key = seed.to_bytes(8, "little", signed=True)
    # Negated digests: the top of the heap is the next text to drop.
    heap: list[tuple[int, str]] = []
    held: set[str] = set()
    for text in texts:
        if text in held:
            continue
        digest = -int.from_bytes(blake2b(text.encode(), digest_size=16, key=key).digest())
        if len(heap) < count:
            heapq.heappush(heap, (digest, text))
        elif digest > heap[0][0]:
            held.discard(heapq.heapreplace(heap, (digest, text))[1])
        else:
            continue
        held.add(text)
    return [text for _, text in sorted(heap, reverse=True)]


def _distances(cosines: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Distances of unit vectors; rounding can make a cosine slightly larger than 1."""
    distances: npt.NDArray[np.float64] = np.sqrt(np.maximum(2 - 2 * cosines, 0.0))
    return distances
