"""What an evaluation task is, how its file is read, and what a report of many tasks holds."""

import csv
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from distill.errors import EvaluationError

DOMAINS = ("in", "out", "other", "apart")

# Who encodes a text, and as what: the evaluated model a plain text, a query or a document, or the teacher.
TEXT, QUERY, DOCUMENT = "text", "query", "document"
TEACHER, TEACHER_QUERY, TEACHER_DOCUMENT = "teacher", "teacher query", "teacher document"
ROLES = (TEXT, QUERY, DOCUMENT, TEACHER, TEACHER_QUERY, TEACHER_DOCUMENT)


class Input(NamedTuple):
    """A text, and the role in which it is encoded: one of `ROLES`."""

    text: str
    role: str = TEXT


class Vectors(Protocol):
    """Gives the `(n, d)` float32 vectors of n texts in one role, in order; it knows all that the task listed."""

    def __call__(self, texts: Sequence[str], role: str = TEXT, /) -> npt.NDArray[np.float32]: ...


class Encoder(Protocol):
    """Anything that turns n texts into `(n, d)` float32 vectors, in order."""

    def encode(self, texts: Sequence[str], /) -> npt.NDArray[np.float32]: ...


class Task(ABC):
    """A score of an encoder on labelled texts, read from files of one folder when first needed.

    A kind of task is one file in this package: a subclass, and one line in `distill.evaluation.TASKS`.

    Attributes:
        metric: name of the figure that `score` returns and that averages are taken over.
        name: the task's name, which its files start with.
        domain: "in" if the students' training corpus has texts of this source, "out" if not, "other" for a
            task that only counts in the average over all, "apart" for one that counts in none.
        split: which labelled part is scored. Choose models on "validation", report on "test".
    """

    metric: ClassVar[str]

    def __init__(self, name: str, folder: Path, *, domain: str = "other", split: str = "test") -> None:
        if domain not in DOMAINS:
            raise EvaluationError(f"task {name!r}: domain is {domain!r}, expected one of {', '.join(DOMAINS)}")
        self.name = name
        self.folder = Path(folder)
        self.domain = domain
        self.split = split

    def files(self) -> list[Path]:
        """Every file that the task reads, whether it exists or not."""
        return [self.folder / f"{self.name}_{self.split}.csv"]

    @abstractmethod
    def texts(self) -> list[str]:
        """Every text whose vector `score` will ask for, duplicates included.

        Raises:
            EvaluationError: a file is missing or malformed.
        """

    def inputs(self) -> list[Input]:
        """The texts with their roles; a task whose texts have several roles says so here."""
        return [Input(text) for text in self.texts()]

    @abstractmethod
    def score(self, vectors: Vectors) -> dict[str, float]:
        """The value of `metric`, times 100, under its name, and any further figures under theirs."""


class SentencePair(NamedTuple):
    """Two sentences and what people said of them: a 0/1 label or a graded score."""

    first: str
    second: str
    value: float


class PairTask(Task):
    """A task over sentence pairs: `sentence1`, `sentence2` and one column of numbers."""

    column: ClassVar[str]

    @staticmethod
    @abstractmethod
    def parse(cell: str) -> float:
        """The number in a cell of `column`; see `read_columns` for what it raises."""

    @cached_property
    def pairs(self) -> list[SentencePair]:
        """The rows of the file.

        Raises:
            EvaluationError: the file is missing or malformed, or has one value of `column` throughout.
        """
        (path,) = self.files()
        columns: dict[str, Callable[[str], Any]] = {
            "sentence1": str,
            "sentence2": str,
            self.column: self.parse,
        }
        pairs = [SentencePair(*row) for row in read_columns(path, columns)]
        if len({pair.value for pair in pairs}) < 2:
            raise EvaluationError(f"{path}: every {self.column} is {pairs[0].value:g}, so nothing can be ranked")
        return pairs

    @property
    def values(self) -> npt.NDArray[np.float64]:
        """`(n,)` the numbers of `column`."""
        return np.array([pair.value for pair in self.pairs], dtype=np.float64)

    def texts(self) -> list[str]:
        return [pair.first for pair in self.pairs] + [pair.second for pair in self.pairs]

    def cosines(self, vectors: Vectors) -> npt.NDArray[np.float64]:
        """`(n,)` cosine of the two sentences of each pair."""
        return cosine(vectors([pair.first for pair in self.pairs]), vectors([pair.second for pair in self.pairs]))


def unit_rows(vectors: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Rows scaled to length 1 in float64; a zero row stays zero."""
    rows = np.asarray(vectors, dtype=np.float64)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    units: npt.NDArray[np.float64] = rows / np.where(norms > 0, norms, 1.0)
    return units


def cosine(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """`(n,)` cosines of row i of two `(n, d)` arrays, in float64; 0 where either row is zero."""
    products: npt.NDArray[np.float64] = np.einsum("ij,ij->i", unit_rows(first), unit_rows(second))
    return products


def read_columns(path: Path, columns: Mapping[str, Callable[[str], Any]]) -> Iterator[list[Any]]:
    """The named cells of every row of a CSV file in UTF-8, each put through its column's parser.

    The csv module and not pandas: "NA" and "null" are texts here. Blank lines are passed over. A parser
    refuses a cell with a ValueError that says what the cell is and what was expected.

    Raises:
        EvaluationError: the file cannot be read, lacks a column or has no row; or a row has too few or too
            many cells, or one that its parser refuses: the message names the line on which the row starts.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            absent = [column for column in columns if column not in header]
            if absent:
                raise EvaluationError(
                    f"{path}: no column {', '.join(map(repr, absent))}; found: {', '.join(header) or 'none'}"
                )
            places = [header.index(column) for column in columns]
            # A quoted cell may hold line breaks, and the reader counts the lines it has consumed.
            line = reader.line_num + 1
            empty = True
            for row in reader:
                if row:
                    if len(row) != len(header):
                        raise EvaluationError(
                            f"{path}:{line}: {len(row)} cells, expected {len(header)} as in the header"
                        )
                    yield [
                        _parsed(parse, row[place], f"{path}:{line}: {column}")
                        for (column, parse), place in zip(columns.items(), places, strict=True)
                    ]
                    empty = False
                line = reader.line_num + 1
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise EvaluationError(f"{path}: cannot be read as CSV in UTF-8: {error}") from error
    if empty:
        raise EvaluationError(f"{path}: no rows below the header")


def _parsed(parse: Callable[[str], Any], cell: str, where: str) -> Any:
    try:
        return parse(cell)
    except ValueError as error:
        raise EvaluationError(f"{where} is {error}") from error


@dataclass(frozen=True)
class TaskScore:
    """What one task said of one encoder.

    Attributes:
        score: value of `metric`, times 100.
        extra: the task's further figures.
        seconds: time that scoring took, encoding not included.
    """

    metric: str
    score: float
    domain: str
    extra: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Average:
    """A mean over tasks that ran: None over no task."""

    score: float | None
    tasks: int

    @classmethod
    def of(cls, scores: Sequence[float]) -> "Average":
        return cls(math.fsum(scores) / len(scores) if scores else None, len(scores))


@dataclass(frozen=True)
class Report:
    """One encoder's scores, all on the scale 0-100.

    Attributes:
        tasks: by task name, in the order they ran.
        texts: distinct texts; each is encoded once by an encoder, whatever its roles.
        seconds: the whole evaluation; `encode_seconds` of it went into the encoder.
    """

    model: str
    tasks: Mapping[str, TaskScore]
    texts: int
    seconds: float
    encode_seconds: float

    @property
    def averages(self) -> dict[str, Average]:
        """`in_domain`, `out_of_domain` and `all`, each over those of its tasks that ran; "apart" is in none."""
        by_domain = {
            domain: [task.score for task in self.tasks.values() if task.domain == domain] for domain in DOMAINS
        }
        return {
            "in_domain": Average.of(by_domain["in"]),
            "out_of_domain": Average.of(by_domain["out"]),
            "all": Average.of([task.score for task in self.tasks.values() if task.domain != "apart"]),
        }

    def to_json(self) -> dict[str, Any]:
        """The names that scripts rely on: `tasks`, `average`, `model`, `texts`, `seconds`."""
        return {
            "model": self.model,
            "tasks": {name: {"metric": task.metric, "score": task.score} for name, task in self.tasks.items()},
            "average": {name: average.score for name, average in self.averages.items()},
            "texts": self.texts,
            "seconds": self.seconds,
        }
