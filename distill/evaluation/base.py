"""What an evaluation task is, and the report of many tasks."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from distill.errors import EvaluationError
from distill.evaluation.files import read_columns

DOMAINS = ("in", "out", "other", "apart")

# Role of a text: a plain text, a query or a document of the evaluated model, or one of these of the teacher.
TEXT, QUERY, DOCUMENT = "text", "query", "document"
TEACHER, TEACHER_QUERY, TEACHER_DOCUMENT = "teacher", "teacher query", "teacher document"
ROLES = (TEXT, QUERY, DOCUMENT, TEACHER, TEACHER_QUERY, TEACHER_DOCUMENT)

# Called with a line worth showing: how a model encodes, what is skipped.
Announce = Callable[[str], None]
# Called with a phase, how much of it is done, the total (0 is unknown), and details.
Progress = Callable[[str, int, int, str], None]


def silent(line: str) -> None:
    """An `Announce` that shows nothing."""


def no_progress(phase: str, done: int, total: int, detail: str) -> None:
    """A `Progress` that shows nothing."""


class Input(NamedTuple):
    """A text, and the role in which it is encoded: one of `ROLES`."""

    text: str
    role: str = TEXT


class Vectors(Protocol):
    """Gives the `(n, d)` float32 vectors of n texts in one role, in order, of the inputs that the task listed."""

    def __call__(self, texts: Sequence[str], role: str = TEXT, /) -> npt.NDArray[np.float32]: ...


class Encoder(Protocol):
    """Encodes n texts as `(n, d)` float32 vectors, in order."""

    def encode(self, texts: Sequence[str], /) -> npt.NDArray[np.float32]: ...


class Example(NamedTuple):
    """An example text of a task, with its value in the task's unit."""

    text: str
    value: float


class Task(ABC):
    """A score of an encoder on labeled texts, read from files at first use.

    A kind of task is one file in this package: a subclass, and one line in `distill.evaluation.TASKS`.

    Attributes:
        metric: name of the figure that `score` returns and that averages are taken over.
        layout: its files by part, with their default names.
        columns: the columns it reads.
        name: the task's name, with which its default file names start.
        domain: "in" if the students' training corpus has texts of this source, "out" if not, "other" for a task that
            counts only in the average over all, "apart" for one that counts in none.
        split: which labeled part is scored. Choose models on "validation", report on "test".
    """

    metric: ClassVar[str]
    layout: ClassVar[Mapping[str, str]] = {"file": "{name}_{split}.csv"}
    columns: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        domain: str = "other",
        split: str = "test",
        files: Mapping[str, Path] | None = None,
        columns: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            files: paths of those parts of `layout` that are not at their default path.
            columns: the files' names of those of `columns` that have another name there.

        Raises:
            EvaluationError: an unknown domain, file or column, or one column of the files in two places.
        """
        if domain not in DOMAINS:
            raise EvaluationError(f"task {name!r}: domain is {domain!r}, expected one of {', '.join(DOMAINS)}")
        require_known(files or {}, self.layout, f"task {name!r}: unknown file")
        require_known(columns or {}, self.columns, f"task {name!r}: unknown column")
        self.name = name
        self.folder = Path(folder)
        self.domain = domain
        self.split = split
        self._given = dict(files or {})
        self._column_names = {column: column for column in self.columns} | dict(columns or {})
        if len(set(self._column_names.values())) < len(self._column_names):
            raise EvaluationError(
                f"task {name!r}: {', '.join(self._column_names)} are {', '.join(self._column_names.values())} in its "
                "files; expected a column for each"
            )

    def files(self) -> list[Path]:
        """Every file that the task reads, whether it exists or not."""
        defaults = {part: file.format(name=self.name, split=self.split) for part, file in self.layout.items()}
        return [self._given.get(part, self.folder / file) for part, file in defaults.items()]

    def column_name(self, column: str) -> str:
        """The name that one of `columns` has in the task's files."""
        return self._column_names[column]

    def rows(self, path: Path, columns: Mapping[str, Callable[[str], Any]]) -> Iterator[list[Any]]:
        """`read_columns`, with the task's names of the columns."""
        return read_columns(path, {self.column_name(column): parse for column, parse in columns.items()})

    @abstractmethod
    def texts(self) -> list[str]:
        """Every text whose vector `score` needs, duplicates included.

        Raises:
            EvaluationError: a file is missing or malformed.
        """

    def inputs(self) -> list[Input]:
        """The texts with their roles; a task whose texts have several roles overrides it."""
        return [Input(text) for text in self.texts()]

    @abstractmethod
    def score(self, vectors: Vectors) -> dict[str, float]:
        """The value of `metric`, times 100, under its name, and further figures under theirs."""

    def examples(self, vectors: Vectors) -> dict[str, list[Example]]:
        """Example texts by kind, such as "worst"; most tasks have none."""
        return {}


class SentencePair(NamedTuple):
    """Two sentences and their gold value: a 0/1 label or a graded score."""

    first: str
    second: str
    value: float


class PairTask(Task):
    """A task over sentence pairs; its `columns` are the two sentences and a number."""

    @staticmethod
    @abstractmethod
    def parse(cell: str) -> float:
        """The number in a cell of the last column; see `read_columns` for what it raises."""

    @cached_property
    def pairs(self) -> list[SentencePair]:
        """The rows of the file."""
        (path,) = self.files()
        parsers: tuple[Callable[[str], Any], ...] = (str, str, self.parse)
        pairs = [SentencePair(*row) for row in self.rows(path, dict(zip(self.columns, parsers, strict=True)))]
        if len({pair.value for pair in pairs}) < 2:
            number = self.column_name(self.columns[-1])
            raise EvaluationError(f"{path}: every {number} is {pairs[0].value:g}, so nothing can be ranked")
        return pairs

    @property
    def values(self) -> npt.NDArray[np.float64]:
        """`(n,)` the numbers of the last column."""
        return np.array([pair.value for pair in self.pairs], dtype=np.float64)

    def texts(self) -> list[str]:
        return [pair.first for pair in self.pairs] + [pair.second for pair in self.pairs]

    @abstractmethod
    def rate(self, cosines: npt.NDArray[Any]) -> dict[str, float]:
        """What `score` returns, from `(n,)` cosines of the pairs or anything that orders pairs as the cosine does."""

    def score(self, vectors: Vectors) -> dict[str, float]:
        return self.rate(self.cosines(vectors))

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


def require_known(given: Iterable[str], known: Iterable[str], what: str) -> None:
    """Check that every one of `given` is among `known`; the error starts with `what` and has the nearest name."""
    names = list(known)
    for name in given:
        if name not in names:
            nearest = get_close_matches(str(name), names, n=1)
            hint = f"did you mean {nearest[0]!r}? " if nearest else ""
            raise EvaluationError(f"{what} {name!r}: {hint}Known: {', '.join(names) or 'none'}")


@dataclass(frozen=True)
class TaskScore:
    """One encoder's result on one task.

    Attributes:
        score: value of `metric`, times 100.
        seconds: time of scoring, without encoding.
    """

    metric: str
    score: float
    domain: str
    extra: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    examples: Mapping[str, Sequence[Example]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """`metric`, `score` and `domain`; `figures` and `examples` if there are any."""
        record: dict[str, Any] = {"metric": self.metric, "score": self.score, "domain": self.domain}
        if self.extra:
            record["figures"] = dict(self.extra)
        if self.examples:
            record["examples"] = {
                kind: [example._asdict() for example in examples] for kind, examples in self.examples.items()
            }
        return record


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
        texts: number of distinct texts.
        seconds: duration of the whole evaluation, `encode_seconds` of which was encoding.
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
        """Plain values under the names that scripts rely on: `tasks`, `average`, `model`, `texts`, `seconds`."""
        return {
            "model": self.model,
            "tasks": {name: task.to_json() for name, task in self.tasks.items()},
            "average": {name: average.score for name, average in self.averages.items()},
            "texts": self.texts,
            "seconds": self.seconds,
        }
