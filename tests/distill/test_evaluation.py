"""Kinds of task, the evaluator, the nine tasks and their table."""

import csv
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from rich.console import Console
from scipy.stats import spearmanr
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, f1_score

import distill
from distill.errors import ConfigError, EvaluationError
from distill.evaluation import TASKS, encoders, load_task
from distill.evaluation.base import Report, Task, TaskScore, cosine
from distill.evaluation.classification import Classification
from distill.evaluation.evaluator import NINE, Evaluator, evaluate, nine_tasks
from distill.evaluation.pairs import PairClassification
from distill.evaluation.sts import TextualSimilarity, spearman
from distill.report.tables import task_table
from teacher_cache.teachers import TeacherOptions
from tests.contracts.task_contract import CountingEncoder, TaskContract, text_vectors

Row = tuple[object, ...]


def write_csv(path: Path, header: Sequence[str], rows: Sequence[Row]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def write_classes(folder: Path, name: str, train: int = 60, test: int = 40) -> None:
    header = ("text", "label", "label_text")
    for part, count in (("train", train), ("test", test)):
        rows = [(f"{name} {part} {i}", i % 3, "abc"[i % 3]) for i in range(count)]
        write_csv(folder / f"{name}_{part}.csv", header, rows)


def write_pairs(folder: Path, name: str, labels: Sequence[object], column: str = "label") -> None:
    rows = [(f"{name} left {i}", f"{name} right {i}", label) for i, label in enumerate(labels)]
    write_csv(folder / f"{name}_test.csv", ("sentence1", "sentence2", column), rows)


def write_nine(folder: Path) -> None:
    for name, (kind, _) in NINE.items():
        if kind == "classification":
            write_classes(folder, name)
        elif kind == "pairs":
            write_pairs(folder, name, [i % 2 for i in range(12)])
        else:
            write_pairs(folder, name, [i / 2 for i in range(12)], column="score")


def vectors_with_cosines(cosines: Sequence[float]) -> "dict[str, npt.NDArray[np.float32]]":
    """Plane vectors for "x left i" and "x right i" whose cosine is the i-th given one."""
    vectors: dict[str, npt.NDArray[np.float32]] = {}
    for i, value in enumerate(cosines):
        vectors[f"x left {i}"] = np.array([1, 0], dtype=np.float32)
        # Not of unit length: the cosine must not depend on it.
        vectors[f"x right {i}"] = np.array([value, math.sqrt(1 - value**2)], dtype=np.float32) * (i + 1)
    return vectors


class TestClassificationContract(TaskContract):
    def write_files(self, folder: Path) -> None:
        write_classes(folder, "x")

    def task(self, folder: Path) -> Task:
        return Classification("x", folder)


class TestPairClassificationContract(TaskContract):
    def write_files(self, folder: Path) -> None:
        write_pairs(folder, "x", [0, 1, 1, 0, 1, 0, 0])

    def task(self, folder: Path) -> Task:
        return PairClassification("x", folder)


class TestTextualSimilarityContract(TaskContract):
    def write_files(self, folder: Path) -> None:
        write_pairs(folder, "x", [0.5, 3, 4.25, 0, 5, 1, 2.2], column="score")

    def task(self, folder: Path) -> Task:
        return TextualSimilarity("x", folder)


def test_macro_f1_equals_scikit_learns(tmp_path: Path) -> None:
    write_classes(tmp_path, "x")
    figures = Classification("x", tmp_path).score(text_vectors)
    train = text_vectors([f"x train {i}" for i in range(60)])
    test = text_vectors([f"x test {i}" for i in range(40)])
    probe = LogisticRegression(random_state=42, max_iter=200).fit(train, [i % 3 for i in range(60)])
    truth = [i % 3 for i in range(40)]
    predicted = probe.predict(test)
    assert figures["macro_f1"] == pytest.approx(100 * f1_score(truth, predicted, average="macro"))
    assert figures["accuracy"] == pytest.approx(100 * np.mean(predicted == truth))
    assert figures["converged"] == 1


def test_macro_f1_weighs_classes_equally_and_a_class_never_predicted_counts_0(tmp_path: Path) -> None:
    write_csv(tmp_path / "x_train.csv", ("text", "label"), [("a", 0), ("b", 1), ("c", 0), ("d", 1)])
    write_csv(tmp_path / "x_test.csv", ("text", "label"), [("a", 0), ("c", 0), ("e", 0), ("f", 1)])
    side = {"a": -1, "c": -1, "e": -1, "f": -1, "b": 1, "d": 1}
    figures = Classification("x", tmp_path).score(
        lambda texts: np.array([[side[t] * 10] for t in texts], dtype=np.float32)
    )
    # Class 0: precision 3/4, recall 1, F1 = 6/7. Class 1: F1 = 0.
    assert figures["macro_f1"] == pytest.approx(100 * 3 / 7)
    assert figures["accuracy"] == pytest.approx(75)


def test_a_fit_that_stops_at_its_limit_is_marked_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr("distill.evaluation.classification.MAX_ITER", 1)
    write_classes(tmp_path, "x")
    assert Classification("x", tmp_path).score(text_vectors)["converged"] == 0
    assert len(recwarn) == 0


def test_average_precision_by_hand(tmp_path: Path) -> None:
    write_pairs(tmp_path, "x", [1, 0, 1, 0, 1])
    vectors = vectors_with_cosines([0.9, 0.8, 0.7, 0.2, -0.5])
    figures = PairClassification("x", tmp_path).score(lambda texts: np.stack([vectors[t] for t in texts]))
    # Positives at ranks 1, 3 and 5, precision there 1/1, 2/3, 3/5.
    assert figures == {"average_precision": pytest.approx(100 * (1 + 2 / 3 + 3 / 5) / 3)}


def test_average_precision_of_a_constant_cosine_is_the_share_of_positives(tmp_path: Path) -> None:
    write_pairs(tmp_path, "x", [1, 0, 0, 0])
    figures = PairClassification("x", tmp_path).score(lambda texts: np.ones((len(texts), 3), np.float32))
    assert figures["average_precision"] == pytest.approx(25)


def test_spearman_by_hand_with_a_tie_in_the_scores(tmp_path: Path) -> None:
    write_pairs(tmp_path, "x", [1, 2, 2, 5], column="score")
    vectors = vectors_with_cosines([-0.2, 0.1, 0.9, 0.4])
    figures = TextualSimilarity("x", tmp_path).score(lambda texts: np.stack([vectors[t] for t in texts]))
    # Ranks of the scores 1, 2.5, 2.5, 4 and of the cosines 1, 2, 4, 3; about their mean 2.5 the products
    # sum to 3, the squares to 4.5 and 5.
    assert figures["spearman"] == pytest.approx(100 * 3 / math.sqrt(4.5 * 5))
    assert figures["constant"] == 0


def test_pair_scores_equal_those_of_scikit_learn_and_scipy(tmp_path: Path) -> None:
    labels = [int(i % 3 == 0) for i in range(30)]
    scores = [(i * 7) % 11 / 2 for i in range(30)]
    write_pairs(tmp_path, "p", labels)
    write_pairs(tmp_path, "s", scores, column="score")

    def cosines(name: str) -> list[float]:
        left = text_vectors([f"{name} left {i}" for i in range(30)]).astype(np.float64)
        right = text_vectors([f"{name} right {i}" for i in range(30)]).astype(np.float64)
        return [a @ b / math.sqrt((a @ a) * (b @ b)) for a, b in zip(left, right, strict=True)]

    report = Evaluator([PairClassification("p", tmp_path), TextualSimilarity("s", tmp_path)])(CountingEncoder())
    assert report.tasks["p"].score == pytest.approx(100 * average_precision_score(labels, cosines("p")))
    assert report.tasks["s"].score == pytest.approx(100 * spearmanr(scores, cosines("s")).statistic)


def test_the_sts_score_of_a_collapsed_encoder_is_0_and_marked(tmp_path: Path) -> None:
    write_pairs(tmp_path, "x", [1, 2, 3], column="score")
    figures = TextualSimilarity("x", tmp_path).score(lambda texts: np.full((len(texts), 3), 0.1, np.float32))
    assert figures == {"spearman": 0, "constant": 1}


def test_spearman_of_a_constant_is_undefined() -> None:
    assert spearman(np.ones(4), np.arange(4)) is None
    assert spearman(np.arange(4), np.ones(4)) is None


def test_cosine_with_a_zero_vector_is_0() -> None:
    first = np.array([[0, 0], [3, 4], [1e-30, 0]], dtype=np.float32)
    second = np.array([[1, 2], [4, 3], [2e-30, 0]], dtype=np.float32)
    assert cosine(first, second) == pytest.approx([0, 24 / 25, 1])


def test_each_distinct_text_of_all_tasks_is_encoded_once_in_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoders, "CHUNK", 7)
    write_nine(tmp_path)
    # Two tasks and both sides of one pair share a text.
    rows = [("banking77 test 0", "banking77 test 0", 1), ("emotion test 0", "a", 0)]
    write_csv(tmp_path / "mrpc_test.csv", ("sentence1", "sentence2", "label"), rows)
    tasks = nine_tasks(tmp_path)
    encoder = CountingEncoder()
    report = Evaluator(tasks)(encoder)
    wanted = {text for task in tasks for text in task.texts()}
    assert len(encoder.encoded) == len(set(encoder.encoded)) == report.texts
    assert set(encoder.encoded) == wanted


def test_scores_do_not_depend_on_the_chunk_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_nine(tmp_path)
    whole = Evaluator(nine_tasks(tmp_path))(CountingEncoder())
    monkeypatch.setattr(encoders, "CHUNK", 5)
    chunked = Evaluator(nine_tasks(tmp_path))(CountingEncoder())
    assert {n: t.score for n, t in whole.tasks.items()} == {n: t.score for n, t in chunked.tasks.items()}


def test_the_nine_tasks_run_and_their_json_has_the_names_scripts_rely_on(tmp_path: Path) -> None:
    write_nine(tmp_path)
    report = Evaluator(nine_tasks(tmp_path))(CountingEncoder(), "a student")
    record = json.loads(json.dumps(report.to_json()))
    assert set(record) == {"model", "tasks", "average", "texts", "seconds"}
    assert record["model"] == "a student"
    assert list(record["tasks"]) == list(NINE)
    assert set(record["average"]) == {"in_domain", "out_of_domain", "all"}
    assert record["tasks"]["stsb"]["metric"] == "spearman"
    assert record["tasks"]["stsb"]["score"] == report.tasks["stsb"].score
    assert {n: (a.tasks) for n, a in report.averages.items()} == {
        "in_domain": 3,
        "out_of_domain": 6,
        "all": 9,
    }


def scored(score: float, domain: str, **extra: float) -> TaskScore:
    return TaskScore(metric="spearman", score=score, domain=domain, extra=extra)


def report_of(**tasks: TaskScore) -> Report:
    return Report(model="", tasks=tasks, texts=0, seconds=0, encode_seconds=0)


def test_averages_are_plain_means_over_the_tasks_that_ran() -> None:
    report = report_of(a=scored(10, "in"), b=scored(20, "out"), c=scored(60, "out"), mine=scored(90, "other"))
    assert report.to_json()["average"] == {"in_domain": 10, "out_of_domain": 40, "all": 45}
    assert [average.tasks for average in report.averages.values()] == [1, 2, 4]


def test_the_average_over_no_task_is_none() -> None:
    report = report_of(a=scored(10, "out"))
    assert report.to_json()["average"] == {"in_domain": None, "out_of_domain": 10, "all": 10}


def test_the_error_lists_all_missing_files(tmp_path: Path) -> None:
    write_nine(tmp_path)
    (tmp_path / "emotion_train.csv").unlink()
    (tmp_path / "stsb_test.csv").unlink()
    with pytest.raises(EvaluationError, match=r"missing emotion_train\.csv, stsb_test\.csv;"):
        nine_tasks(tmp_path)
    assert [task.name for task in nine_tasks(tmp_path, ["wic", "sick"])] == ["wic", "sick"]


def test_the_validation_split_is_read_from_its_own_file(tmp_path: Path) -> None:
    write_csv(tmp_path / "stsb_validation.csv", ("sentence1", "sentence2", "score"), [("a", "b", 1), ("c", "d", 2)])
    (task,) = nine_tasks(tmp_path, ["stsb"], split="validation")
    assert sorted(task.texts()) == ["a", "b", "c", "d"]


def test_an_unknown_task_is_an_error_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="did you mean 'emotion'"):
        nine_tasks(tmp_path, ["emotions"])


def test_an_unknown_kind_of_task_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'pairs'"):
        load_task("pair")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_module:Thing", "no module 'no_such_module'"),
        ("distill.evaluation.sts:Thing", "must name a subclass of .*Task; .* has no 'Thing'"),
        ("distill.evaluation.base:Report", "must name a subclass"),
    ],
)
def test_a_class_that_is_not_a_task_is_an_error(target: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_task(target)


@pytest.mark.parametrize("kind", TASKS)
def test_every_kind_in_the_table_is_a_task(kind: str) -> None:
    assert issubclass(load_task(kind), Task)


def test_a_custom_task_class_runs_with_the_nine(tmp_path: Path) -> None:
    write_nine(tmp_path)
    write_pairs(tmp_path, "TextualSimilarity", [1, 2, 3], column="score")
    tasks = nine_tasks(tmp_path, ["stsb", "distill.evaluation.sts:TextualSimilarity"])
    report = Evaluator(tasks)(CountingEncoder())
    assert list(report.tasks) == ["stsb", "TextualSimilarity"]
    assert [average.tasks for average in report.averages.values()] == [1, 0, 2]


@pytest.mark.parametrize("label", ["2", "", "yes", "1.0"])
def test_a_pair_label_other_than_0_and_1_is_an_error_with_its_line(tmp_path: Path, label: str) -> None:
    write_pairs(tmp_path, "x", [0, 1, label])
    with pytest.raises(EvaluationError, match=rf"x_test\.csv:4: label is '{label}', expected 0 or 1"):
        PairClassification("x", tmp_path).texts()


@pytest.mark.parametrize("score", ["", "high", "nan", "inf"])
def test_a_score_that_is_not_a_number_is_an_error_with_its_line(tmp_path: Path, score: str) -> None:
    write_pairs(tmp_path, "x", [score, 1, 2], column="score")
    with pytest.raises(EvaluationError, match=rf"x_test\.csv:2: score is '{score}', expected a number"):
        TextualSimilarity("x", tmp_path).texts()


def test_a_class_that_is_not_a_number_is_an_error_with_its_line(tmp_path: Path) -> None:
    write_classes(tmp_path, "x")
    (tmp_path / "x_test.csv").write_text('text,label\n"two\nlines",0\nthree,joy\n', encoding="utf-8")
    with pytest.raises(EvaluationError, match=r"x_test\.csv:4: label is 'joy', expected a whole number"):
        Classification("x", tmp_path).texts()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no column 'sentence1', 'sentence2', 'score'; found: none"),
        ("sentence1,sentence2,score\n", "no rows below the header"),
        ("sentence1,sentence2,score\na,b,1\nc,2\n", r"x_test\.csv:3: 2 cells, expected 3"),
        ('sentence1,sentence2,score\na,b,1\n"c,d,2\n', "cannot be read as CSV"),
        ("sentence1,sentence2,score\na,b,1\nc,d,1\n", "every score is 1, so nothing can be ranked"),
    ],
)
def test_a_malformed_file_is_an_error_each_time_it_is_read(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "x_test.csv").write_text(content, encoding="utf-8")
    task = TextualSimilarity("x", tmp_path)
    for _ in range(2):
        with pytest.raises(EvaluationError, match=message):
            task.texts()


def test_a_file_in_another_encoding_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x_test.csv").write_bytes("sentence1,sentence2,score\ncafé,b,1\n".encode("latin-1"))
    with pytest.raises(EvaluationError, match="UTF-8"):
        TextualSimilarity("x", tmp_path).texts()


def test_a_training_file_of_one_class_is_an_error(tmp_path: Path) -> None:
    write_classes(tmp_path, "x")
    write_csv(tmp_path / "x_train.csv", ("text", "label"), [("a", 1), ("b", 1)])
    with pytest.raises(EvaluationError, match=r"x_train\.csv: one class only"):
        Classification("x", tmp_path).texts()


def test_texts_are_read_unchanged(tmp_path: Path) -> None:
    texts = ["NA", "null", " padded ", 'a "quoted", word', "two\r\nlines", "é", ""]
    write_csv(
        tmp_path / "x_test.csv",
        ("sentence1", "sentence2", "score"),
        [(t, "b", i) for i, t in enumerate(texts)],
    )
    assert TextualSimilarity("x", tmp_path).texts()[: len(texts)] == texts


def test_a_byte_order_mark_and_further_columns_are_ignored(tmp_path: Path) -> None:
    content = "score,id,sentence1,sentence2\n1,x,a,b\n2,y,c,d\n"
    (tmp_path / "x_test.csv").write_text(content, encoding="utf-8-sig")
    assert TextualSimilarity("x", tmp_path).pairs == [("a", "b", 1), ("c", "d", 2)]


class BrokenEncoder(CountingEncoder):
    """NaN or infinity for the given texts."""

    def __init__(self, *broken: str) -> None:
        super().__init__()
        self.broken = broken

    def encode(self, texts: Sequence[str], /) -> npt.NDArray[np.float32]:
        vectors = super().encode(texts)
        for i, text in enumerate(texts):
            if text in self.broken:
                vectors[i, 3] = np.inf if "left" in text else np.nan
        return vectors


def test_vectors_that_are_not_finite_are_an_error_with_tasks_and_counts(tmp_path: Path) -> None:
    write_nine(tmp_path)
    encoder = BrokenEncoder("sick left 3", "sick right 3", "wic left 0")
    with pytest.raises(EvaluationError, match=r"^3 of \d+ texts .*\(by task: wic 1, sick 2\)"):
        Evaluator(nine_tasks(tmp_path))(encoder)


class ShapeEncoder:
    def __init__(self, *shapes: tuple[int, ...]) -> None:
        self.shapes = iter(shapes)

    def encode(self, texts: Sequence[str], /) -> npt.NDArray[np.float32]:
        return np.ones(next(self.shapes), dtype=np.float32)


@pytest.mark.parametrize("shapes", [[(3, 4)], [(4,)], [(4, 0)], [(4, 4), (2, 5)]])
def test_vectors_of_the_wrong_shape_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shapes: list[tuple[int, ...]]
) -> None:
    monkeypatch.setattr(encoders, "CHUNK", 4)
    write_pairs(tmp_path, "x", [1, 2, 3], column="score")
    with pytest.raises(EvaluationError, match="shape"):
        Evaluator([TextualSimilarity("x", tmp_path)])(ShapeEncoder(*shapes))


def test_no_task_or_two_with_one_name_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="empty"):
        Evaluator([])
    with pytest.raises(EvaluationError, match="two are called x"):
        Evaluator([TextualSimilarity("x", tmp_path), PairClassification("x", tmp_path)])


def test_an_unknown_domain_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="expected one of in, out, other"):
        TextualSimilarity("x", tmp_path, domain="inside")


@pytest.mark.parametrize("model", ["toy", Path("toy"), TeacherOptions(model="toy", dtype="float32")])
def test_evaluate_takes_a_model_by_name_path_or_options(tmp_path: Path, model: Any) -> None:
    write_nine(tmp_path)
    report = distill.evaluate(model, data=tmp_path)
    assert report.model == "toy"
    assert list(report.tasks) == list(NINE)


def test_evaluate_takes_an_object_that_encodes_and_keeps_the_order_of_tasks(tmp_path: Path) -> None:
    write_nine(tmp_path)
    write_pairs(tmp_path, "x", [1, 2, 3], column="score")
    own = TextualSimilarity("x", tmp_path)
    report = evaluate(CountingEncoder(), ["mrpc", own, "stsb"], str(tmp_path), names=["sick"])
    assert report.model == "CountingEncoder"
    assert list(report.tasks) == ["mrpc", "x", "stsb", "sick"]
    assert (
        report.tasks["stsb"].score == Evaluator(nine_tasks(tmp_path, ["stsb"]))(CountingEncoder()).tasks["stsb"].score
    )
    assert list(evaluate(CountingEncoder(), [own]).tasks) == ["x"]
    assert list(evaluate(CountingEncoder(), data=tmp_path, names=["wic"]).tasks) == ["wic"]


def test_evaluate_scores_another_split_of_the_nine_tasks(tmp_path: Path) -> None:
    write_pairs(tmp_path, "stsb", [1, 2, 3], column="score")
    (tmp_path / "stsb_test.csv").rename(tmp_path / "stsb_validation.csv")
    assert evaluate(CountingEncoder(), ["stsb"], tmp_path, split="validation").texts == 6
    with pytest.raises(EvaluationError, match=r"missing stsb_test\.csv"):
        evaluate(CountingEncoder(), ["stsb"], tmp_path)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"model": 3}, TypeError, "`model` is a int; expected a folder"),
        ({"model": LogisticRegression()}, TypeError, "`model` is a LogisticRegression; expected"),
        ({"model": CountingEncoder}, TypeError, "`model` is a type; expected"),
        ({"tasks": "stsb"}, TypeError, "must be lists"),
        ({"names": "stsb"}, TypeError, "must be lists"),
        ({"tasks": [3]}, TypeError, "`tasks` has a int; expected Task objects"),
        ({}, EvaluationError, "`data` is missing"),
        ({"tasks": ["stsb"]}, EvaluationError, "`data` is missing"),
        ({"tasks": []}, EvaluationError, "nothing to evaluate"),
        ({"tasks": [], "model": "toy"}, EvaluationError, "nothing to evaluate"),
        ({"tasks": ["stsd"], "data": "."}, EvaluationError, "did you mean 'stsb'"),
        ({"data": "absent"}, EvaluationError, "no such folder"),
    ],
)
def test_wrong_arguments_of_evaluate_are_an_error_in_one_line(
    arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match) as raised:
        evaluate(**{"model": CountingEncoder(), **arguments})
    assert "\n" not in str(raised.value)


def test_an_object_that_encodes_has_no_teacher_to_be_compared_with(tmp_path: Path) -> None:
    (tmp_path / "texts_test.csv").write_text("text\na\nb\nc\nd\n")
    task = load_task("agreement")("texts", tmp_path)
    with pytest.raises(EvaluationError, match="teacher"):
        evaluate(CountingEncoder(), [task])


class Careless(TextualSimilarity):
    def __init__(self, folder: Path, figures: dict[str, float] | None = None) -> None:
        super().__init__("x", folder)
        self.figures = figures

    def texts(self) -> list[str]:
        return ["only this"]

    def score(self, vectors: object) -> dict[str, float]:
        return super().score(vectors) if self.figures is None else self.figures  # type: ignore[arg-type]


def test_a_vector_of_an_unlisted_text_is_an_error(tmp_path: Path) -> None:
    write_pairs(tmp_path, "x", [1, 2], column="score")
    with pytest.raises(EvaluationError, match=r"'x' uses the vector of a text .* 'x left 0'"):
        Evaluator([Careless(tmp_path)])(CountingEncoder())


@pytest.mark.parametrize("figures", [{}, {"spearman": math.nan}])
def test_a_score_that_is_not_finite_is_an_error(tmp_path: Path, figures: dict[str, float]) -> None:
    with pytest.raises(EvaluationError, match="'x': spearman is not finite"):
        Evaluator([Careless(tmp_path, figures)])(CountingEncoder())


def rendered(reports: dict[str, Report]) -> list[str]:
    console = Console(width=160, no_color=True)
    with console.capture() as capture:
        console.print(task_table(reports))
    return [" ".join(line.replace("│", " ").replace("┃", " ").split()) for line in capture.get().splitlines()]


def test_the_table_has_no_averages_over_tasks_that_count_in_none() -> None:
    lines = rendered({"model": report_of(cranfield=scored(37.36, "apart"))})
    assert "cranfield spearman 37.4" in lines
    assert not any("average" in line for line in lines)


def test_the_table_has_a_row_per_task_and_a_column_per_model() -> None:
    before = report_of(stsb=scored(55.94, "in"), sick=scored(61.06, "out"))
    after = report_of(stsb=scored(80, "in"), sick=scored(70, "out"))
    lines = rendered({"before": before, "after": after})
    assert "task metric before after" in lines
    assert "stsb * spearman 55.9 80.0" in lines
    assert "sick spearman 61.1 70.0" in lines
    assert "average in-domain 1 task 55.9 80.0" in lines
    assert "average all 2 tasks 58.5 75.0" in lines
    assert "* in-domain" in lines


def test_the_table_has_a_dash_for_a_missing_score_and_the_number_of_tasks_of_each_average() -> None:
    lines = rendered(
        {"a": report_of(sick=scored(60, "out")), "b": report_of(sick=scored(50, "out"), x=scored(0, "out"))}
    )
    assert "x spearman - 0.0" in lines
    assert "average all 60.0 (1 task) 25.0 (2 tasks)" in lines
    assert "average in-domain 0 tasks - -" in lines


def test_the_table_marks_an_unconverged_classifier_and_an_undefined_correlation() -> None:
    report = report_of(
        banking77=scored(60, "out", converged=0),
        sick=scored(0, "out", constant=1),
        emotion=scored(5, "out", converged=1),
    )
    lines = rendered({"m": report})
    assert "banking77 spearman 60.0†" in lines
    assert "sick spearman 0.0‡" in lines
    assert "emotion spearman 5.0" in lines
    assert any("† the classifier stopped" in line for line in lines)


def test_the_package_and_the_evaluator_load_no_scientific_library() -> None:
    code = (
        "import sys, distill.evaluation.evaluator, distill.report.tables\n"
        "print(sorted({'sklearn', 'scipy', 'torch', 'transformers', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
