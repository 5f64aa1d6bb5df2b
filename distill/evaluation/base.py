"""What an evaluation task is, how its file is read, and what a report of many tasks holds."""

import csv
import json
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


class Example(NamedTuple):
    """A text that a task shows, and its figure in the unit that the task says."""

    text: str
    value: float


class Task(ABC):
    """A score of an encoder on labelled texts, read from files when first needed.

    A kind of task is one file in this package: a subclass, and one line in `distill.evaluation.TASKS`.

    Attributes:
        metric: name of the figure that `score` returns and that averages are taken over.
        layout: its files by what they are for, with the names they have in a task folder.
        columns: the columns it reads.
        name: the task's name, which its files start with unless they are given.
        domain: "in" if the students' training corpus has texts of this source, "out" if not, "other" for a
            task that only counts in the average over all, "apart" for one that counts in none.
        split: which labelled part is scored. Choose models on "validation", report on "test".
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
            files: those of `layout` that stand elsewhere than in the folder, or are called otherwise.
            columns: those of `columns` that the files call otherwise, with the files' own names for them.

        Raises:
            EvaluationError: an unknown domain, file or column, or one column of the files in two places.
        """
        if domain not in DOMAINS:
            raise EvaluationError(f"task {name!r}: domain is {domain!r}, expected one of {', '.join(DOMAINS)}")
        refuse_unknown(files or {}, self.layout, f"task {name!r}: it has no file called")
        refuse_unknown(columns or {}, self.columns, f"task {name!r}: it reads no column called")
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
        usual = {part: file.format(name=self.name, split=self.split) for part, file in self.layout.items()}
        return [self._given.get(part, self.folder / file) for part, file in usual.items()]

    def column_name(self, column: str) -> str:
        """What the task's files call one of its `columns`."""
        return self._column_names[column]

    def rows(self, path: Path, columns: Mapping[str, Callable[[str], Any]]) -> Iterator[list[Any]]:
        """`read_columns` with the task's names for the columns, whatever the file calls them."""
        return read_columns(path, {self.column_name(column): parse for column, parse in columns.items()})

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

    def examples(self, vectors: Vectors) -> dict[str, list[Example]]:
        """Texts that show where the score comes from, by what they show; most kinds of task have none."""
        return {}


class SentencePair(NamedTuple):
    """Two sentences and what people said of them: a 0/1 label or a graded score."""

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
        """The rows of the file.

        Raises:
            EvaluationError: the file is missing or malformed, or has one number throughout.
        """
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
        """What `score` returns, for `(n,)` cosines of the pairs or anything that orders pairs as a cosine does."""

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


def refuse_unknown(given: Iterable[str], known: Iterable[str], what: str) -> None:
    """
    Raises:
        EvaluationError: one of `given` is not among `known`; it says `what` and the nearest name.
    """
    names = list(known)
    for name in given:
        if name not in names:
            nearest = get_close_matches(str(name), names, n=1)
            hint = f"did you mean {nearest[0]!r}? " if nearest else ""
            raise EvaluationError(f"{what} {name!r}: {hint}Known: {', '.join(names) or 'none'}")


def read_columns(path: Path, columns: Mapping[str, Callable[[str], Any]]) -> Iterator[list[Any]]:
    """The named cells of every row of a file in UTF-8, each put through its column's parser.

    A file is CSV unless it ends in .tsv, or in .jsonl or .ndjson: JSON lines, whose numbers are cells as they are
    written. The csv module and not pandas: "NA" and "null" are texts here. Blank lines are passed over. A parser
    refuses a cell with a ValueError that says what the cell is and what was expected.

    Raises:
        EvaluationError: the file cannot be read, lacks a column or has no row; or a row has too few or too
            many cells, or one that its parser refuses: the message names the line on which the row starts.
    """
    json_lines = path.suffix in (".jsonl", ".ndjson")
    kind = "JSON lines" if json_lines else "TSV" if path.suffix == ".tsv" else "CSV"
    empty = True
    try:
        for line, cells in (_json_rows if json_lines else _csv_rows)(path, list(columns)):
            yield [
                _parsed(parse, cell, f"{path}:{line}: {column}")
                for (column, parse), cell in zip(columns.items(), cells, strict=True)
            ]
            empty = False
    except (OSError, UnicodeDecodeError, csv.Error, json.JSONDecodeError) as error:
        raise EvaluationError(f"{path}: cannot be read as {kind} in UTF-8: {error}") from error
    if empty:
        raise EvaluationError(f"{path}: no rows" + ("" if json_lines else " below the header"))


def _csv_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Line on which each row starts, and its cells of `columns`."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True, delimiter="\t" if path.suffix == ".tsv" else ",")
        header = next(reader, [])
        _refuse_absent(path, columns, header)
        places = [header.index(column) for column in columns]
        # A quoted cell may hold line breaks, and the reader counts the lines it has consumed.
        line = reader.line_num + 1
        for row in reader:
            if row:
                if len(row) != len(header):
                    raise EvaluationError(f"{path}:{line}: {len(row)} cells, expected {len(header)} as in the header")
                yield line, [row[place] for place in places]
            line = reader.line_num + 1


def _json_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """As `_csv_rows`, of a file with one JSON object a line."""
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            # Numbers stay as they are written: a label 1 is not 1.0, and 0.1 has no further digits.
            record = json.loads(line, parse_int=str, parse_float=str)
            where = f"{path}:{number}"
            if not isinstance(record, dict):
                raise EvaluationError(f"{where}: a JSON {type(record).__name__}, expected an object")
            _refuse_absent(where, columns, record)
            for column in columns:
                if not isinstance(record[column], str):
                    raise EvaluationError(
                        f"{where}: {column} is {json.dumps(record[column])}, expected a text or a number"
                    )
            yield number, [record[column] for column in columns]


def _refuse_absent(where: object, columns: Iterable[str], found: Iterable[str]) -> None:
    present = list(found)
    absent = [column for column in columns if column not in present]
    if absent:
        raise EvaluationError(
            f"{where}: no column {', '.join(map(repr, absent))}; found: {', '.join(present) or 'none'}"
        )


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
        examples: texts that the task shows, by what they show, each with a figure.
    """

    metric: str
    score: float
    domain: str
    extra: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    examples: Mapping[str, Sequence[Example]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """`metric`, `score` and `domain`; `figures` and `examples` where there are any."""
        record: dict[str, Any] = {"metric": self.metric, "score": self.score, "domain": self.domain}
        if self.extra:
            record["figures"] = dict(self.extra)
        if self.examples:
            record["examples"] = {
                shown: [example._asdict() for example in examples] for shown, examples in self.examples.items()
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
            "tasks": {name: task.to_json() for name, task in self.tasks.items()},
            "average": {name: average.score for name, average in self.averages.items()},
            "texts": self.texts,
            "seconds": self.seconds,
        }
