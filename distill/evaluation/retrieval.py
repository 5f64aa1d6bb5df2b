"""Retrieval in BEIR's layout: documents ranked by cosine, by the student, its teacher, or one against the other."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from distill.errors import EvaluationError
from distill.evaluation.base import (
    DOCUMENT,
    QUERY,
    TEACHER_DOCUMENT,
    TEACHER_QUERY,
    Input,
    Task,
    Vectors,
    refuse_unknown,
    unit_rows,
)

# Mode -> roles of its queries and of its documents.
MODES: dict[str, tuple[str, str]] = {
    "student": (QUERY, DOCUMENT),
    "asymmetric": (QUERY, TEACHER_DOCUMENT),
    "teacher": (TEACHER_QUERY, TEACHER_DOCUMENT),
}
CUT = 10
DEPTH = 100
# Cosines of float32 vectors are known to about 1e-7: those that agree to 6 decimals are one value, a tie.
TIE = 10**6
# Documents and queries whose cosines are in memory at a time: 32 MiB.
DOCUMENTS_AT_A_TIME = 8192
QUERIES_AT_A_TIME = 512

Rows = npt.NDArray[np.int64]


class Collection:
    """A folder in BEIR's layout, read when first needed: documents, queries, and who is relevant to whom.

    Args:
        corpus: JSON lines with `_id`, `text` and, if they have one, `title`.
        queries: JSON lines with `_id` and `text`.
        qrels: lines of query id, document id and grade between tabs, with or without a header.
    """

    def __init__(self, corpus: Path, queries: Path, qrels: Path) -> None:
        self._corpus = corpus
        self._queries = queries
        self._qrels = qrels

    @cached_property
    def documents(self) -> dict[str, str]:
        """Text of each document by id, title in front of it; one that has neither is not there.

        Raises:
            EvaluationError: the file is missing or malformed, or has no document.
        """
        found: dict[str, str] = {}
        for where, record in _records(self._corpus):
            title = _text(where, record, "title") if record.get("title") is not None else ""
            _add(found, where, record, f"{title} {_text(where, record, 'text')}".strip())
        found = {name: text for name, text in found.items() if text}
        if not found:
            raise EvaluationError(f"{self._corpus}: no document with a text")
        return found

    @cached_property
    def queries(self) -> dict[str, str]:
        """Text of each query by id, of those that have a relevant document.

        Raises:
            EvaluationError: a file is missing or malformed, a query is empty, or none has a relevant document.
        """
        found: dict[str, str] = {}
        for where, record in _records(self._queries):
            _add(found, where, record, _text(where, record, "text"))
            if not record["text"].strip():
                raise EvaluationError(f"{where}: the query is empty")
        unknown = self.judgements.keys() - found.keys()
        if unknown:
            raise EvaluationError(
                f"{self._qrels} judges {len(unknown)} queries that {self._queries} lacks, such as {min(unknown)!r}"
            )
        found = {name: text for name, text in found.items() if self.relevant.get(name)}
        if not found:
            raise EvaluationError(f"{self._qrels} finds no document relevant to any query of {self._queries}")
        return found

    @cached_property
    def judgements(self) -> dict[str, dict[str, int]]:
        """Grade of each judged document, by query and document.

        Raises:
            EvaluationError: the file is missing or malformed, or gives a document two grades.
        """
        found: dict[str, dict[str, int]] = {}
        for where, (query, document, grade) in _judged(self._qrels):
            known = found.setdefault(query, {})
            if known.setdefault(document, grade) != grade:
                raise EvaluationError(
                    f"{where}: query {query!r} gives document {document!r} {grade}, and {known[document]} before"
                )
        return found

    @cached_property
    def relevant(self) -> dict[str, dict[str, int]]:
        """The judgements above 0."""
        return {
            query: positive
            for query, judged in self.judgements.items()
            if (positive := {document: grade for document, grade in judged.items() if grade > 0})
        }


class Retrieval(Task):
    """How high the relevant documents stand among all, ranked by cosine; nDCG at 10.

    nDCG = DCG / ideal DCG, DCG = sum over ranks i <= 10 of g_i / log2(i + 1), as trec_eval's ndcg_cut: a gain is the
    grade itself, not 2^grade - 1, and the ideal order is over every relevant document that was judged, be it in the
    corpus or not. Further figures: `recall_at_100`, the share of a query's relevant documents among the first 100;
    `mrr_at_10`, the mean of 1 / rank of the first relevant one, 0 behind the tenth (both times 100); `queries` and
    `documents`, how many there were. Queries without a relevant document, and documents without a text, are left out.

    The search is exact. Documents whose cosines agree to 6 decimals stand in the order of trec_eval, the greater id
    first.

    Args:
        mode: "student" or "teacher" encodes queries and documents; "asymmetric": the student queries, the teacher
            documents, as where a teacher's index stays and only queries have to be fast.
        collection: the folder's, where several tasks share it.
    """

    metric: ClassVar[str] = "ndcg_at_10"
    layout: ClassVar[Mapping[str, str]] = {
        "corpus": "corpus.jsonl",
        "queries": "queries.jsonl",
        "qrels": "qrels/{split}.tsv",
    }

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        mode: str = "student",
        domain: str = "apart",
        split: str = "test",
        collection: Collection | None = None,
        **given: Any,
    ) -> None:
        super().__init__(name, folder, domain=domain, split=split, **given)
        refuse_unknown([mode], MODES, f"task {name!r}: no mode of retrieval is called")
        self.mode = mode
        self.roles = MODES[mode]
        self._collection = collection

    def files(self) -> list[Path]:
        corpus, queries, qrels = super().files()
        # A folder of one split may have it as a file.
        if self.split == "test" and qrels == self.folder / "qrels" / "test.tsv" and not qrels.is_file():
            qrels = self.folder / "qrels.tsv"
        return [corpus, queries, qrels]

    @property
    def collection(self) -> Collection:
        """What the files hold."""
        if self._collection is None:
            self._collection = Collection(*self.files())
        return self._collection

    def texts(self) -> list[str]:
        return [text for text, _ in self.inputs()]

    def inputs(self) -> list[Input]:
        of_queries, of_documents = self.roles
        return [
            *(Input(text, of_queries) for text in self.collection.queries.values()),
            *(Input(text, of_documents) for text in self.collection.documents.values()),
        ]

    def score(self, vectors: Vectors) -> dict[str, float]:
        queries, relevant = self.collection.queries, self.collection.relevant
        ndcg, recall, reciprocal = [], [], []
        for query, ranked in zip(queries, self.ranking(vectors), strict=True):
            grades = relevant[query]
            gains = [grades.get(document, 0) for document in ranked]
            ndcg.append(dcg(gains[:CUT]) / dcg(sorted(grades.values(), reverse=True)[:CUT]))
            recall.append(sum(gain > 0 for gain in gains) / len(grades))
            reciprocal.append(next((1 / rank for rank, gain in enumerate(gains[:CUT], start=1) if gain > 0), 0.0))
        return {
            self.metric: 100 * float(np.mean(ndcg)),
            f"recall_at_{DEPTH}": 100 * float(np.mean(recall)),
            f"mrr_at_{CUT}": 100 * float(np.mean(reciprocal)),
            "queries": float(len(queries)),
            "documents": float(len(self.collection.documents)),
        }

    def ranking(self, vectors: Vectors) -> list[list[str]]:
        """Ids of the first 100 documents for each query, best first.

        A document that is the query itself (one id, and the query's text in the document's) is passed over, as BEIR
        does for collections whose queries are taken from the documents.
        """
        of_queries, of_documents = self.roles
        queries = unit_rows(vectors(list(self.collection.queries.values()), of_queries))
        # The greater id first: what comes later loses a tie.
        ids = sorted(self.collection.documents, key=str.encode, reverse=True)
        scores = np.empty((len(queries), 0), dtype=np.int64)
        places = np.empty((len(queries), 0), dtype=np.int64)
        for start in range(0, len(ids), DOCUMENTS_AT_A_TIME):
            some = ids[start : start + DOCUMENTS_AT_A_TIME]
            documents = unit_rows(vectors([self.collection.documents[name] for name in some], of_documents))
            if documents.shape[1] != queries.shape[1]:
                raise EvaluationError(
                    f"task {self.name!r}: queries have {queries.shape[1]} numbers, documents {documents.shape[1]}; a "
                    "cosine needs as many of both: the student has to end in its teacher's space"
                )
            merged = [
                _best(scores[part], places[part], queries[part] @ documents.T, start)
                for part in _parts(len(queries), QUERIES_AT_A_TIME)
            ]
            scores = np.concatenate([best for best, _ in merged])
            places = np.concatenate([place for _, place in merged])
        ranked = zip(self.collection.queries.items(), places.tolist(), strict=True)
        return [
            [ids[n] for n in row if not self._is_itself(query, text, ids[n])][:DEPTH] for (query, text), row in ranked
        ]

    def _is_itself(self, query: str, text: str, document: str) -> bool:
        """Whether a document is a query of the collection; a number that both happen to have is not enough."""
        return query == document and text in self.collection.documents[document]


def retrieval_tasks(folder: Path, modes: Sequence[str] = ("student",)) -> list[Task]:
    """A task for each mode over one folder in BEIR's layout, read once: NAME, "NAME (asymmetric)", "NAME (teacher)".

    Raises:
        EvaluationError: an unknown mode, or files that are missing; the message lists every one.
    """
    folder = Path(folder)
    tasks = []
    collection: Collection | None = None
    for mode in dict.fromkeys(modes):
        name = folder.resolve().name
        task = Retrieval(name if mode == "student" else f"{name} ({mode})", folder, mode=mode, collection=collection)
        collection = task.collection
        tasks.append(task)
    missing = [path.name for path in tasks[0].files() if not path.is_file()] if tasks else []
    if missing:
        raise EvaluationError(
            f"{folder}: missing {', '.join(missing)}; expected BEIR's layout: corpus.jsonl, queries.jsonl, and "
            "qrels.tsv or qrels/test.tsv"
        )
    return list(tasks)


def dcg(gains: Sequence[int]) -> float:
    """Discounted cumulative gain: sum of g_i / log2(i + 1) over ranks i counted from 1."""
    return float(sum(gain / np.log2(rank + 1) for rank, gain in enumerate(gains, start=1)))


def _best(scores: Rows, places: Rows, cosines: npt.NDArray[np.float64], start: int) -> tuple[Rows, Rows]:
    """`(q, k)` best scores and places, those held so far among `(q, n)` cosines of the places from `start` on."""
    found = np.broadcast_to(np.arange(start, start + cosines.shape[1]), cosines.shape)
    scores = np.concatenate([scores, np.rint(cosines * TIE).astype(np.int64)], axis=1)
    places = np.concatenate([places, found], axis=1)
    width = scores.shape[1]
    # No two keys are equal: what stands in front, and what is held does, wins a tie.
    keys = scores * width - np.arange(width)
    deep = DEPTH + 1  # one of them may be the query itself
    if width > deep:
        kept = np.argpartition(keys, width - deep, axis=1)[:, width - deep :]
        keys, scores, places = (np.take_along_axis(part, kept, axis=1) for part in (keys, scores, places))
    order = np.argsort(-keys, axis=1)
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(places, order, axis=1)


def _parts(count: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, count, size))


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file with one JSON object a line, each with where it stands."""
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                try:
                    record = json.loads(line)
                except json.JSONDecodeError as error:
                    raise EvaluationError(f"{where} is not JSON: {error}") from error
                if not isinstance(record, dict):
                    raise EvaluationError(f"{where}: a JSON {type(record).__name__}, expected an object")
                yield where, record
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"{path}: cannot be read as JSON lines in UTF-8: {error}") from error


def _text(where: str, record: Mapping[str, Any], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        found = f"is {json.dumps(value)[:60]}" if key in record else f"is absent, found: {', '.join(record)}"
        raise EvaluationError(f"{where}: {key} {found}; expected a text")
    return value


def _add(found: dict[str, str], where: str, record: Mapping[str, Any], text: str) -> None:
    name = _text(where, record, "_id")
    if name in found:
        raise EvaluationError(f"{where}: the id {name!r} stands here a second time")
    found[name] = text


def _judged(path: Path) -> Iterator[tuple[str, tuple[str, str, int]]]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                cells = line.rstrip("\r\n").split("\t")
                where = f"{path}:{number}"
                if cells == [""]:
                    continue
                if len(cells) != 3:
                    raise EvaluationError(
                        f"{where}: {len(cells)} cells between tabs, expected 3: query id, document id, grade"
                    )
                try:
                    yield where, (cells[0], cells[1], int(cells[2]))
                except ValueError:
                    if number > 1:  # the first line may be a header
                        raise EvaluationError(f"{where}: the grade is {cells[2]!r}, expected a whole number") from None
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"{path}: cannot be read as lines in UTF-8: {error}") from error
