"""Retrieval in BEIR's layout: documents ranked by cosine, with the student's or the teacher's vectors."""

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
    require_known,
    unit_rows,
)
from distill.evaluation.files import read_json_lines

# Mode -> roles of its queries and of its documents.
MODES: dict[str, tuple[str, str]] = {
    "student": (QUERY, DOCUMENT),
    "asymmetric": (QUERY, TEACHER_DOCUMENT),
    "teacher": (TEACHER_QUERY, TEACHER_DOCUMENT),
}
CUT = 10
DEPTH = 100
# Cosines of float32 vectors are accurate to about 1e-7: those that are equal to 6 decimals are ties.
TIE = 10**6
# Documents and queries whose cosines are in memory at once: 32 MiB.
DOCUMENTS_AT_A_TIME = 8192
QUERIES_AT_A_TIME = 512

Rows = npt.NDArray[np.int64]


class Collection:
    """Documents, queries and relevance judgments in BEIR's layout, read at first use.

    Args:
        corpus: JSON lines with `_id`, `text` and optionally `title`.
        queries: JSON lines with `_id` and `text`.
        qrels: tab-separated query id, document id and grade, with or without a header.
    """

    def __init__(self, corpus: Path, queries: Path, qrels: Path) -> None:
        self._corpus = corpus
        self._queries = queries
        self._qrels = qrels

    @cached_property
    def documents(self) -> dict[str, str]:
        """Title and text of each document by id; documents with neither are left out."""
        found: dict[str, str] = {}
        for where, record in read_json_lines(self._corpus):
            title = _text(where, record, "title") if record.get("title") is not None else ""
            _add(found, where, record, f"{title} {_text(where, record, 'text')}".strip())
        found = {name: text for name, text in found.items() if text}
        if not found:
            raise EvaluationError(f"{self._corpus}: no document with a text")
        return found

    @cached_property
    def queries(self) -> dict[str, str]:
        """Text of each query with a relevant document, by id."""
        found: dict[str, str] = {}
        for where, record in read_json_lines(self._queries):
            _add(found, where, record, _text(where, record, "text"))
            if not record["text"].strip():
                raise EvaluationError(f"{where}: the query is empty")
        unknown = self.judgments.keys() - found.keys()
        if unknown:
            raise EvaluationError(
                f"{self._qrels} judges {len(unknown)} queries that are not in {self._queries}, such as {min(unknown)!r}"
            )
        found = {name: text for name, text in found.items() if self.relevant.get(name)}
        if not found:
            raise EvaluationError(f"{self._qrels} has no relevant document for any query of {self._queries}")
        return found

    @cached_property
    def judgments(self) -> dict[str, dict[str, int]]:
        """Grade of each judged document, by query and document."""
        found: dict[str, dict[str, int]] = {}
        for where, (query, document, grade) in _judgments(self._qrels):
            known = found.setdefault(query, {})
            if known.setdefault(document, grade) != grade:
                raise EvaluationError(
                    f"{where}: query {query!r} has document {document!r} with grade {grade}, before {known[document]}"
                )
        return found

    @cached_property
    def relevant(self) -> dict[str, dict[str, int]]:
        """The grades above 0, by query and document."""
        return {
            query: positive
            for query, judged in self.judgments.items()
            if (positive := {document: grade for document, grade in judged.items() if grade > 0})
        }


class Retrieval(Task):
    """nDCG at 10 of ranking all documents by their cosine with a query.

    nDCG = DCG / ideal DCG, DCG = sum over ranks i <= 10 of g_i / log2(i + 1), as trec_eval's ndcg_cut: a gain is the
    grade itself, not 2^grade - 1, and the ideal order is over all judged relevant documents, also those that the corpus
    lacks. Further figures: `recall_at_100`, the share of a query's relevant documents among the first 100;
    `mrr_at_10`, the mean of 1 / rank of the first relevant one, 0 after rank 10 (both times 100); the numbers of
    `queries` and `documents`. Queries without a relevant document, and documents without a text, are left out.

    The search is exact. Cosines that are equal to 6 decimals are ties, ordered as in trec_eval, the greater id first.

    Args:
        mode: "student" or "teacher" encodes queries and documents; "asymmetric": the student queries, the teacher
            documents, as if an existing index of the teacher is searched with fast queries.
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
        require_known([mode], MODES, f"task {name!r}: unknown mode")
        self.mode = mode
        self.roles = MODES[mode]
        self._collection = collection

    def files(self) -> list[Path]:
        corpus, queries, qrels = super().files()
        # A folder with one split may have it as a file.
        if self.split == "test" and qrels == self.folder / "qrels" / "test.tsv" and not qrels.is_file():
            qrels = self.folder / "qrels.tsv"
        return [corpus, queries, qrels]

    @property
    def collection(self) -> Collection:
        """The contents of the files."""
        if self._collection is None:
            self._collection = Collection(*self.files())
        return self._collection

    def texts(self) -> list[str]:
        return [text for text, _ in self.inputs()]

    def inputs(self) -> list[Input]:
        query_role, document_role = self.roles
        return [
            *(Input(text, query_role) for text in self.collection.queries.values()),
            *(Input(text, document_role) for text in self.collection.documents.values()),
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
        """Ids of the 100 nearest documents of each query, nearest first; those that are the query itself are skipped.

        As in BEIR, for queries taken from the documents: same id, and the query's text in the document's.
        """
        query_role, document_role = self.roles
        queries = unit_rows(vectors(list(self.collection.queries.values()), query_role))
        # The greater id first: later documents lose ties.
        ids = sorted(self.collection.documents, key=str.encode, reverse=True)
        scores = np.empty((len(queries), 0), dtype=np.int64)
        places = np.empty((len(queries), 0), dtype=np.int64)
        for start in range(0, len(ids), DOCUMENTS_AT_A_TIME):
            some = ids[start : start + DOCUMENTS_AT_A_TIME]
            documents = unit_rows(vectors([self.collection.documents[name] for name in some], document_role))
            if documents.shape[1] != queries.shape[1]:
                raise EvaluationError(
                    f"task {self.name!r}: queries have {queries.shape[1]} dimensions, documents {documents.shape[1]}; "
                    "a cosine needs equal ones: the student must be in its teacher's space"
                )
            merged = [
                _best(scores[part], places[part], queries[part] @ documents.T, start)
                for first in range(0, len(queries), QUERIES_AT_A_TIME)
                for part in [slice(first, first + QUERIES_AT_A_TIME)]
            ]
            scores = np.concatenate([best for best, _ in merged])
            places = np.concatenate([place for _, place in merged])
        ranked = zip(self.collection.queries, places.tolist(), strict=True)
        # An equal id alone, such as a number, is not enough.
        itself = {
            query for query, text in self.collection.queries.items() if text in self.collection.documents.get(query, "")
        }
        return [[ids[n] for n in row if ids[n] != query or query not in itself][:DEPTH] for query, row in ranked]


def retrieval_tasks(folder: Path, modes: Sequence[str] = ("student",)) -> list[Task]:
    """A task for each mode, over one folder in BEIR's layout: NAME, "NAME (asymmetric)", "NAME (teacher)"."""
    folder = Path(folder)
    tasks: list[Task] = []
    name, collection = folder.resolve().name, None
    for mode in dict.fromkeys(modes):
        task = Retrieval(name if mode == "student" else f"{name} ({mode})", folder, mode=mode, collection=collection)
        collection = task.collection
        tasks.append(task)
    missing = [path.name for path in tasks[0].files() if not path.is_file()] if tasks else []
    if missing:
        raise EvaluationError(
            f"{folder}: missing {', '.join(missing)}; expected BEIR's layout: corpus.jsonl, queries.jsonl, and "
            "qrels.tsv or qrels/test.tsv"
        )
    return tasks


def dcg(gains: Sequence[int]) -> float:
    """Discounted cumulative gain: sum of g_i / log2(i + 1) over ranks i from 1."""
    return float(sum(gain / np.log2(rank + 1) for rank, gain in enumerate(gains, start=1)))


def _best(scores: Rows, places: Rows, cosines: npt.NDArray[np.float64], start: int) -> tuple[Rows, Rows]:
    """`(q, k)` best scores and places among those so far and `(q, n)` cosines of the places from `start` on."""
    found = np.broadcast_to(np.arange(start, start + cosines.shape[1]), cosines.shape)
    scores = np.concatenate([scores, np.rint(cosines * TIE).astype(np.int64)], axis=1)
    places = np.concatenate([places, found], axis=1)
    width = scores.shape[1]
    # Keys are unique: the earlier place wins a tie.
    keys = scores * width - np.arange(width)
    deep = DEPTH + 1  # one may be the query itself
    if width > deep:
        kept = np.argpartition(keys, width - deep, axis=1)[:, width - deep :]
        keys, scores, places = (np.take_along_axis(part, kept, axis=1) for part in (keys, scores, places))
    order = np.argsort(-keys, axis=1)
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(places, order, axis=1)


def _text(where: str, record: Mapping[str, Any], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        found = f"is {json.dumps(value)[:60]}" if key in record else f"is absent, found: {', '.join(record)}"
        raise EvaluationError(f"{where}: {key} {found}; expected a text")
    return value


def _add(found: dict[str, str], where: str, record: Mapping[str, Any], text: str) -> None:
    name = _text(where, record, "_id")
    if name in found:
        raise EvaluationError(f"{where}: duplicate id {name!r}")
    found[name] = text


def _judgments(path: Path) -> Iterator[tuple[str, tuple[str, str, int]]]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                cells = line.rstrip("\r\n").split("\t")
                where = f"{path}:{number}"
                if cells == [""]:
                    continue
                if len(cells) != 3:
                    raise EvaluationError(
                        f"{where}: {len(cells)} tab-separated cells, expected 3: query id, document id, grade"
                    )
                try:
                    yield where, (cells[0], cells[1], int(cells[2]))
                except ValueError:
                    if number > 1:  # the first line may be a header
                        raise EvaluationError(f"{where}: the grade is {cells[2]!r}, expected a whole number") from None
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"{path}: cannot be read as lines in UTF-8: {error}") from error
