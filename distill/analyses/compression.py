"""Compression: scores of vectors that are truncated to their first dimensions and stored in fewer bits.

Matryoshka prefixes (Kusupati et al. 2022) of 32, 64, 128 ... d dimensions, each in three precisions:

    truncate -> length 1 -> float32, or int8, or binary

int8: 255 steps between the smallest and the largest value of each dimension, offset -128, as sentence-transformers'
`quantize_embeddings` does; the ranges are those of the documents' vectors, and queries use the same. A code stands for
the middle of its step, and the cosine is of the vectors that the codes stand for. `codes` is the score with the cosine
of the codes themselves, as an int8 index compares them: dimensions then weigh by 1 / step^2.
binary: the sign of each dimension; vectors are ranked by Hamming distance, ties stay ties.

Three sides are measured: the student, its teacher and, if the student is in the teacher's space, the asymmetric use of
LEAF: the student encodes queries and first sentences, the teacher documents and second sentences. A student with a
learned projection is measured after it, in the teacher's space, and as `own` without it. `relative` is the share of the
same side's score with all dimensions in float32; LEAF claims that the curves of student and teacher are equal.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from distill.analyses.base import Analysis, choice_option, names_option
from distill.analyses.trained_run import TrainedRun
from distill.errors import ConfigError, EvaluationError
from distill.evaluation.base import DOCUMENT, QUERY, TEXT, Encoder, Input, PairTask, Task, unit_rows
from distill.evaluation.evaluator import NINE, nine_tasks
from distill.evaluation.retrieval import Retrieval, retrieval_tasks
from distill.evaluation.task_file import read_task_file
from distill.evaluation.vectors import TaskVectors

PRECISIONS = ("float32", "int8", "binary")
SMALLEST = 32

Floats = npt.NDArray[np.float32]
# The score of `(n, d)` queries against `(m, d)` documents that are compared by their dot products.
Score = Callable[[Floats, Floats], float]


class Compression(Analysis):
    """Scores a run's student and teacher at every size, on pair and STS tasks and on retrieval."""

    name: ClassVar[str] = "compression"
    needs_tasks: ClassVar[bool] = True

    def __init__(self, *, tasks: Sequence[str] | None = None, split: str = "test", **options: Any) -> None:
        """
        Args:
            tasks: of the nine, those over pairs; None is all six of them. `data` may also be a YAML file of tasks.
            split: "test" or "validation", of those tasks.
        """
        super().__init__(**options)
        self.tasks = names_option("compression.tasks", tasks)
        self.split: str = choice_option("compression.split", split, ("test", "validation"))
        nine = self.data is not None and not self.data.is_file()
        if self.tasks and not nine:
            raise ConfigError("compression.tasks chooses among the nine tasks; name the folder of their files (`data`)")
        if self.split != "test" and (not nine or self.retrieval is not None):
            raise ConfigError(
                "compression.split chooses among the nine tasks' files in the folder `data`; it cannot be used with a "
                "collection (`retrieval`) or a file of tasks"
            )

    def __call__(self, run: TrainedRun) -> dict[str, Any]:
        """`tasks`: of each its `curves` by side and precision, and `own`, as `scores_by_size` returns them.

        Each model encodes every text once; missing vectors of the teacher are encoded and stored in the cache.
        `teacher_prompt` is the teacher's prompt, also for queries.
        """
        compared = [_compared(task) for task in self._tasks()]
        model = run.load()
        # The teacher first: its missing vectors raise before the student has encoded anything.
        teacher_encoder = self.teacher_encoder(run)
        teacher, own = (self._encoded(encoder, compared) for encoder in (teacher_encoder, model.student))
        projection = model.objective.projection()
        weight = None if projection is None else projection.detach().float().numpy()
        result: list[dict[str, Any]] = []
        for number, (task, teacher_sides, own_sides) in enumerate(zip(compared, teacher, own, strict=True)):
            self.progress("scoring compressed vectors", number, len(compared), task.name)
            student = own_sides if weight is None else [side @ weight.T for side in own_sides]
            sides = {"student": student, "teacher": teacher_sides}
            if weight is not None or model.objective.in_teacher_space:
                sides["asymmetric"] = [student[0], teacher_sides[1]]
            curves = {
                side: scores_by_size(queries, documents, task.score) for side, (queries, documents) in sides.items()
            }
            result.append({"task": task.name, "metric": task.metric, "curves": curves})
            if weight is not None:
                result[-1]["own"] = scores_by_size(own_sides[0], own_sides[1], task.score)
        return {"tasks": result, "projected": weight is not None, "teacher_prompt": teacher_encoder.space.prompt}

    @staticmethod
    def conclusion(result: Mapping[str, Any]) -> str:
        tasks = result["tasks"]
        shares, excluded = [], []
        for side in tasks[0]["curves"]:
            by_task = {task["task"]: task["curves"][side] for task in tasks}
            without = [name for name, curve in by_task.items() if curve["float32"][-1]["relative"] is None]
            curves = [curve for name, curve in by_task.items() if name not in without]
            shares += [f"{side} {_shares(curves)}"] if curves else []
            excluded += [f"{side} on {name}" for name in without]
        text = f"Share of the same side's score with all dimensions in float32, mean over {len(tasks)} tasks: "
        text += f"{'; '.join(shares) or 'undefined'}."
        return text + (f" Excluded, with a full score of at most 0: {', '.join(excluded)}." if excluded else "")

    def _tasks(self) -> list[Task]:
        tasks: list[Task] = []
        if self.data is not None and self.data.is_file():
            tasks += read_task_file(self.data)
        elif self.data is not None:
            names = self.tasks or [name for name, (kind, _) in NINE.items() if kind != "classification"]
            tasks += nine_tasks(self.data, names, split=self.split)
        if self.retrieval is not None:
            tasks += retrieval_tasks(self.retrieval)
        return tasks

    def _encoded(self, encoder: Encoder, compared: Sequence["Compared"]) -> list[list[Floats]]:
        """`(n, d)` vectors of the queries and `(m, d)` of the documents of each task."""
        roles = dict.fromkeys((TEXT, QUERY, DOCUMENT), encoder)
        inputs = {task.name: [*task.queries, *task.documents] for task in compared}
        vectors = TaskVectors(roles, inputs, self.progress)
        sides = [(vectors.of_task(task.name), (task.queries, task.documents)) for task in compared]
        return [[of_task([text for text, _ in side], side[0].role) for side in pair] for of_task, pair in sides]


@dataclass(frozen=True)
class Compared:
    """A task that compares queries with documents, or first sentences with second ones; each side has one role."""

    name: str
    metric: str
    queries: Sequence[Input]
    documents: Sequence[Input]
    score: Score


def _compared(task: Task) -> Compared:
    if isinstance(task, PairTask):
        sides = [Input(pair.first) for pair in task.pairs], [Input(pair.second) for pair in task.pairs]
        products = partial(np.einsum, "ij,ij->i", dtype=np.float64)
        return Compared(task.name, task.metric, *sides, lambda a, b: task.rate(products(a, b))[task.metric])
    if not isinstance(task, Retrieval):
        raise EvaluationError(
            f"task {task.name!r} does not compare vectors; compression is measured on pairs, STS and retrieval"
        )
    queries, documents = list(task.collection.queries.values()), list(task.collection.documents.values())
    rows = [{text: row for row, text in enumerate(side)} for side in (queries, documents)]

    def score(query_vectors: Floats, document_vectors: Floats) -> float:
        def vectors(texts: Sequence[str], role: str = TEXT, /) -> Floats:
            side, places = (query_vectors, rows[0]) if role == QUERY else (document_vectors, rows[1])
            return side[[places[text] for text in texts]]

        return task.score(vectors)[task.metric]

    inputs = [Input(text, QUERY) for text in queries], [Input(text, DOCUMENT) for text in documents]
    return Compared(task.name, task.metric, *inputs, score)


def _shares(curves: Sequence[Mapping[str, Any]]) -> str:
    """Mean shares of the full score: with about a quarter of the dimensions, in int8 and in binary."""
    dims = [point["dims"] for point in curves[0]["float32"]]
    quarter = max((place for place, size in enumerate(dims) if 4 * size <= dims[-1]), default=0)
    shares = {
        f"at {dims[quarter]} of {dims[-1]} dims": [curve["float32"][quarter]["relative"] for curve in curves],
        "in int8": [curve["int8"][-1]["relative"] for curve in curves],
        "in binary": [curve["binary"][-1]["relative"] for curve in curves],
    }
    return ", ".join(f"{100 * np.mean(values):.1f} % {what}" for what, values in shares.items())


def prefixes(dims: int) -> list[int]:
    """Powers of two from 32 below `dims`, and `dims` itself."""
    powers = (2**power for power in range(SMALLEST.bit_length() - 1, dims.bit_length()))
    return [*(size for size in powers if size < dims), dims]


def truncate(vectors: npt.NDArray[Any], dims: int) -> Floats:
    """`(n, dims)` the first dimensions of n vectors, scaled to length 1; a zero row stays zero."""
    return unit_rows(vectors[:, :dims]).astype(np.float32)


def ranges_of(vectors: Floats) -> Floats:
    """`(2, d)` smallest and largest value of each dimension."""
    return np.stack([vectors.min(0), vectors.max(0)])


def quantize(vectors: Floats, precision: str, ranges: Floats) -> npt.NDArray[Any]:
    """Codes of `(n, d)` vectors: `(n, d)` float32 or int8, or `(n, ceil(d / 8))` uint8 of signs.

    Args:
        ranges: for int8, see `ranges_of`; values outside are clipped.
    """
    from sentence_transformers.util.quantization import quantize_embeddings

    codes: npt.NDArray[Any] = quantize_embeddings(
        vectors, precision={"binary": "ubinary"}.get(precision, precision), ranges=ranges
    )
    return codes


def restore(codes: npt.NDArray[Any], precision: str, ranges: Floats) -> Floats:
    """`(n, d)` vectors that are compared by their dot products.

    Those are cosines in float32 and int8, and d - 2 times the Hamming distance in binary.
    """
    if precision == "float32":
        return codes
    if precision == "int8":
        # A constant dimension has steps of 0: every code stands for its one value.
        steps = (ranges[1] - ranges[0]) / 255
        return unit_rows(ranges[0] + (codes.astype(np.float32) + 128.5) * steps).astype(np.float32)
    signs = np.unpackbits(codes, axis=1, count=ranges.shape[1])
    return 2 * signs.astype(np.float32) - 1


def scores_by_size(queries: npt.NDArray[Any], documents: npt.NDArray[Any], score: Score) -> dict[str, list[Any]]:
    """By precision, for each prefix: `dims`, `bytes` of a vector, `score`, `relative` to all dimensions in float32.

    int8 also has `codes`, the score of the codes themselves. `relative` is None if the full score is at most 0.

    Args:
        queries: `(n, d)` vectors of any length.
        documents: `(m, d)`; int8 takes its ranges from them.
    """
    dims = queries.shape[1]
    curves: dict[str, list[Any]] = {precision: [] for precision in PRECISIONS}
    for size in prefixes(dims):
        cut_queries, cut_documents = truncate(queries, size), truncate(documents, size)
        ranges = ranges_of(cut_documents)
        for precision in PRECISIONS:
            pair = [quantize(side, precision, ranges) for side in (cut_queries, cut_documents)]
            first, second = (restore(codes, precision, ranges) for codes in pair)
            point = {"dims": size, "bytes": pair[1].nbytes // len(pair[1]), "score": score(first, second)}
            if precision == "int8":
                point["codes"] = score(*(unit_rows(codes).astype(np.float32) for codes in pair))
            curves[precision].append(point)
    full = curves["float32"][-1]["score"]
    for point in (point for points in curves.values() for point in points):
        point["relative"] = round(point["score"] / full, 6) if full > 0 else None
        point |= {name: round(point[name], 4) for name in ("score", "codes") if name in point}
    return curves
