"""Retrieval: reading, ranking, and the metrics against trec_eval."""

import json
from collections.abc import Sequence
from math import log2
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.errors import EvaluationError
from distill.evaluation import retrieval
from distill.evaluation.base import DOCUMENT, QUERY, TEACHER_DOCUMENT, TEACHER_QUERY, TEXT, Task
from distill.evaluation.evaluator import Evaluator
from distill.evaluation.retrieval import Retrieval, dcg, retrieval_tasks
from tests.contracts.task_contract import CountingEncoder, TaskContract, text_vectors

DOCUMENTS = [
    {"_id": "d1", "title": "Cats", "text": "They sit on mats."},
    {"_id": "d2", "title": "", "text": "Dogs ran through the town."},
    {"_id": "d3", "text": "The river"},
    {"_id": "d4", "title": "", "text": " "},
    {"_id": "d5", "title": "The sea", "text": ""},
]
QUERIES = [
    {"_id": "q1", "text": "who sits"},
    {"_id": "q2", "text": "who ran"},
    {"_id": "q3", "text": "nobody judged me"},
    {"_id": "q4", "text": "nothing fits me"},
]
QRELS = ["q1\td1\t2", "q1\td3\t1", "q1\td5\t0", "q2\td2\t1", "q2\tgone\t3", "q4\td1\t0"]
HEADER = "query-id\tcorpus-id\tscore"


def write(
    folder: Path,
    documents: Sequence[dict[str, Any]] = DOCUMENTS,
    queries: Sequence[dict[str, Any]] = QUERIES,
    qrels: Sequence[str] = (HEADER, *QRELS),
) -> Path:
    folder.mkdir(exist_ok=True)
    for name, records in (("corpus", documents), ("queries", queries)):
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "qrels.tsv").write_text("".join(f"{line}\n" for line in qrels), encoding="utf-8")
    return folder


class TestContract(TaskContract):
    def write_files(self, folder: Path) -> None:
        write(folder)

    def task(self, folder: Path) -> Task:
        return Retrieval("small", folder)

    def test_a_missing_column_is_an_error_with_those_found(self, written: Task) -> None:
        (written.folder / "corpus.jsonl").write_text('{"alpha": "1", "beta": "2"}\n', encoding="utf-8")
        with pytest.raises(EvaluationError, match=r"corpus\.jsonl:1: text is absent, found: alpha, beta"):
            written.texts()


def placed(cosines: dict[str, dict[str, float]]) -> Any:
    """Unit vectors with these cosines between queries and documents, by text."""
    documents = list(next(iter(cosines.values())))
    axes = {text: np.eye(len(documents))[place] for place, text in enumerate(documents)}

    def vectors(texts: Sequence[str], role: str = TEXT) -> npt.NDArray[np.float32]:
        rows = []
        for text in texts:
            if text in axes:
                rows.append([*axes[text], 0.0])
            else:
                near = [cosines[text][document] for document in documents]
                rows.append([*near, np.sqrt(1 - np.square(near).sum())])
        return np.array(rows, dtype=np.float32)

    return vectors


NAMES = {
    "d1": "Cats They sit on mats.",
    "d2": "Dogs ran through the town.",
    "d3": "The river",
    "d5": "The sea",
}


def by_text(**cosines: float) -> dict[str, float]:
    return {NAMES[name]: value for name, value in cosines.items()}


def test_a_document_is_its_title_and_text_and_one_without_either_is_left_out(tmp_path: Path) -> None:
    task = Retrieval("small", write(tmp_path))
    assert task.collection.documents == NAMES


def test_queries_without_a_relevant_document_are_left_out(tmp_path: Path) -> None:
    task = Retrieval("small", write(tmp_path))
    assert list(task.collection.queries) == ["q1", "q2"]
    assert task.score(text_vectors)["queries"] == 2


def test_metrics_by_hand(tmp_path: Path) -> None:
    vectors = placed(
        {
            "who sits": by_text(d5=0.5, d1=0.4, d2=0.3, d3=0.2),  # grades 0, 2, 0, 1
            "who ran": by_text(d2=0.6, d1=0.1, d3=0.0, d5=-0.1),  # grade 1; one of grade 3 is not in the corpus
        }
    )
    figures = Retrieval("small", write(tmp_path)).score(vectors)
    first = (2 / log2(3) + 1 / log2(5)) / (2 + 1 / log2(3))
    second = 1 / (3 + 1 / log2(3))
    assert figures["ndcg_at_10"] == pytest.approx(100 * (first + second) / 2)
    assert figures["recall_at_100"] == pytest.approx(100 * (1 + 1 / 2) / 2)
    assert figures["mrr_at_10"] == pytest.approx(100 * (1 / 2 + 1) / 2)
    assert figures["documents"] == 4


def test_dcg_discounts_by_the_logarithm_of_the_rank() -> None:
    assert dcg([3, 2, 0, 1]) == pytest.approx(3 + 2 / 1.5849625 + 1 / 2.3219281)
    assert dcg([]) == 0


def test_equal_cosines_are_ranked_by_descending_id(tmp_path: Path) -> None:
    documents = [{"_id": name, "text": "the same"} for name in ("10", "9", "b", "a", "é")]
    task = Retrieval("small", write(tmp_path, documents, QUERIES[:1], ["q1\t9\t1"]))
    assert task.ranking(text_vectors) == [["é", "b", "a", "9", "10"]]


@pytest.mark.parametrize("seed", range(3))
def test_it_agrees_with_trec_eval(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytrec_eval = pytest.importorskip("pytrec_eval")
    monkeypatch.setattr(retrieval, "DOCUMENTS_AT_A_TIME", 37)
    monkeypatch.setattr(retrieval, "QUERIES_AT_A_TIME", 4)
    random = np.random.default_rng(seed)
    # Few words, so that many documents have the same text and tie.
    documents = [{"_id": f"d{n}", "text": f"text {random.integers(60)}"} for n in range(300)]
    queries = [{"_id": f"q{n}", "text": f"query {n}"} for n in range(9)]
    judged = {
        query["_id"]: {
            f"d{n}": int(random.integers(-1, 5)) for n in random.choice(310, random.integers(1, 140), replace=False)
        }
        for query in queries
    }
    qrels = [f"{query}\t{document}\t{grade}" for query, row in judged.items() for document, grade in row.items()]
    task = Retrieval("small", write(tmp_path, documents, queries, qrels))
    figures = task.score(text_vectors)

    units = {
        text: vector / np.linalg.norm(vector)
        for text in [*(d["text"] for d in documents), *(q["text"] for q in queries)]
        for vector in [text_vectors([text])[0].astype(np.float64)]
    }
    run = {
        q["_id"]: {d["_id"]: round(float(units[q["text"]] @ units[d["text"]]), 6) for d in documents} for q in queries
    }
    # recip_rank has no cutoff: it gets the first ten.
    first = {
        query: dict(sorted(row.items(), key=lambda item: (item[1], item[0]), reverse=True)[:10])
        for query, row in run.items()
    }
    relevant = {query: {d: max(grade, 0) for d, grade in row.items()} for query, row in judged.items()}
    relevant = {query: row for query, row in relevant.items() if any(row.values())}
    found = pytrec_eval.RelevanceEvaluator(relevant, {"ndcg_cut.10", "recall.100"}).evaluate(run)
    reciprocal = pytrec_eval.RelevanceEvaluator(relevant, {"recip_rank"}).evaluate(first)
    for name, rows, key in (
        ("ndcg_at_10", found, "ndcg_cut_10"),
        ("recall_at_100", found, "recall_100"),
        ("mrr_at_10", reciprocal, "recip_rank"),
    ):
        expected = 100 * np.mean([rows[query][key] for query in relevant])
        assert figures[name] == pytest.approx(expected, abs=1e-4), name
    assert figures["queries"] == len(relevant)


def test_chunks_do_not_change_the_ranking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [{"_id": f"d{n}", "text": f"text {n % 50}"} for n in range(120)]
    queries = [{"_id": f"q{n}", "text": f"query {n}"} for n in range(5)]
    task = Retrieval("small", write(tmp_path, documents, queries, [f"q{n}\td1\t1" for n in range(5)]))
    whole = task.ranking(text_vectors)
    assert [len(row) for row in whole] == [100] * 5
    monkeypatch.setattr(retrieval, "DOCUMENTS_AT_A_TIME", 7)
    monkeypatch.setattr(retrieval, "QUERIES_AT_A_TIME", 2)
    assert task.ranking(text_vectors) == whole


@given(order=st.permutations(range(12)), grades=st.lists(st.integers(0, 3), min_size=12, max_size=12))
def test_metrics_do_not_depend_on_the_order_of_the_files(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], grades: list[int]
) -> None:
    documents = [{"_id": f"d{n}", "text": f"text {n // 2}"} for n in range(12)]
    qrels = [f"q\td{n}\t{grade}" for n, grade in enumerate([*grades[:-1], 3])]
    folder = tmp_path_factory.mktemp("orders")
    query = [{"_id": "q", "text": "query"}]
    figures = Retrieval("a", write(folder / "a", documents, query, qrels)).score(text_vectors)
    shuffled = write(folder / "b", [documents[n] for n in order], query, [qrels[n] for n in order])
    assert Retrieval("b", shuffled).score(text_vectors) == figures
    assert 0 < figures["ndcg_at_10"] <= 100
    assert figures["recall_at_100"] == 100


def test_each_mode_uses_its_own_encoders(tmp_path: Path) -> None:
    student, teacher = CountingEncoder(), CountingEncoder()
    tasks = retrieval_tasks(write(tmp_path / "small"), ["student", "asymmetric", "teacher"])
    assert [task.name for task in tasks] == ["small", "small (asymmetric)", "small (teacher)"]
    assert {task.domain for task in tasks} == {"apart"}
    roles = {QUERY: student, DOCUMENT: student, TEACHER_QUERY: teacher, TEACHER_DOCUMENT: teacher}
    Evaluator(tasks[1:2])(roles)
    assert (set(student.encoded), set(teacher.encoded)) == ({"who sits", "who ran"}, set(NAMES.values()))
    report = Evaluator(tasks)(roles)
    assert report.texts == 6
    assert report.averages["all"].tasks == 0
    scores = {task.score for task in report.tasks.values()}
    assert len(scores) == 1  # both encoders have the same vectors


def test_judgments_are_read_with_a_header_or_without_and_from_a_split(tmp_path: Path) -> None:
    with_header = Retrieval("small", write(tmp_path / "a")).collection.judgments
    without = Retrieval("small", write(tmp_path / "b", qrels=QRELS)).collection.judgments
    assert with_header == without
    assert with_header["q2"] == {"d2": 1, "gone": 3}
    folder = write(tmp_path / "c")
    (folder / "qrels").mkdir()
    (folder / "qrels.tsv").rename(folder / "qrels" / "test.tsv")
    assert Retrieval("small", folder).collection.judgments == with_header
    (folder / "qrels" / "dev.tsv").write_text("q1\td1\t1\n")
    assert Retrieval("small", folder, split="dev").collection.judgments == {"q1": {"d1": 1}}
    # A single file is the test split and no other.
    assert Retrieval("small", tmp_path / "a", split="dev").files()[-1].name == "dev.tsv"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"documents": [*DOCUMENTS, DOCUMENTS[0]]}, r"corpus\.jsonl:6: duplicate id 'd1'"),
        ({"documents": [{"_id": "d1", "text": None}]}, r"corpus\.jsonl:1: text is null; expected a text"),
        ({"documents": [{"_id": 1, "text": "a"}]}, r"corpus\.jsonl:1: _id is 1; expected a text"),
        ({"documents": [{"_id": "d1", "text": ""}]}, r"corpus\.jsonl: no document with a text"),
        ({"queries": [*QUERIES, {"_id": "q5", "text": " "}]}, r"queries\.jsonl:5: the query is empty"),
        ({"queries": QUERIES[1:]}, r"qrels\.tsv judges 1 queries that are not in .*queries\.jsonl, such as 'q1'"),
        ({"qrels": ["q1\td1\t0"]}, "has no relevant document"),
        ({"qrels": [HEADER, "q1\td1\thigh"]}, r"qrels\.tsv:2: the grade is 'high', expected a whole number"),
        ({"qrels": ["q1 0 d1 1"]}, r"qrels\.tsv:1: 1 tab-separated cells, expected 3"),
        ({"qrels": ["q1\td1\t1", "q1\td1\t2"]}, r"qrels\.tsv:2: query 'q1' has document 'd1' with grade 2, before 1"),
    ],
)
def test_a_malformed_file_is_an_error_with_its_line(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        Retrieval("small", write(tmp_path, **change)).texts()


def test_a_line_that_is_not_json_is_an_error_with_its_number(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "corpus.jsonl").write_text('{"_id": "d1", "text": "a"}\n[1]\n')
    with pytest.raises(EvaluationError, match=r"corpus\.jsonl:2: a JSON list, expected an object"):
        Retrieval("small", tmp_path).texts()
    (tmp_path / "corpus.jsonl").write_text("{\n")
    with pytest.raises(EvaluationError, match=r"corpus\.jsonl:1 is not JSON"):
        Retrieval("small", tmp_path).texts()


def test_a_folder_without_the_files_is_an_error_that_lists_them(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"missing corpus\.jsonl, queries\.jsonl, qrels\.tsv; expected BEIR's"):
        retrieval_tasks(tmp_path)


def test_an_unknown_mode_is_an_error_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="'asymetric': did you mean 'asymmetric'"):
        retrieval_tasks(write(tmp_path), ["asymetric"])


def test_queries_and_documents_of_different_widths_are_an_error(tmp_path: Path) -> None:
    def vectors(texts: Sequence[str], role: str = TEXT) -> npt.NDArray[np.float32]:
        return np.ones((len(texts), 4 if role == QUERY else 6), dtype=np.float32)

    task = Retrieval("small", write(tmp_path), mode="asymmetric")
    assert task.roles == (QUERY, TEACHER_DOCUMENT)
    with pytest.raises(EvaluationError, match="queries have 4 dimensions, documents 6"):
        task.score(vectors)


def test_a_query_that_is_a_document_does_not_retrieve_itself_unless_only_the_id_is_equal(tmp_path: Path) -> None:
    documents = [
        {"_id": "1", "title": "On war", "text": "war is bad"},
        {"_id": "2", "text": "war is old"},
        {"_id": "3", "text": "the sea"},
    ]
    queries = [{"_id": "1", "text": "war is bad"}, {"_id": "3", "text": "water"}]
    folder = write(tmp_path / "own", documents, queries, ["1\t2\t1", "3\t3\t1"])
    near = {
        "war is bad": {"On war war is bad": 0.9, "war is old": 0.3, "the sea": 0.1},
        "water": {"On war war is bad": 0.1, "war is old": 0.2, "the sea": 0.8},
    }
    task = Retrieval("own", folder)
    assert task.ranking(placed(near)) == [["2", "3"], ["3", "2", "1"]]
    assert task.score(placed(near))["ndcg_at_10"] == 100
