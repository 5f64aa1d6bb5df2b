import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.analyses.base import analyze
from distill.analyses.margin import Margin, approximation_error, fit_margin, in_skipped_epochs
from distill.analyses.trained_run import TrainedRun
from distill.errors import ConfigError, EvaluationError, NeedsNotMet
from distill.evaluation.sts import spearman
from distill.runs.run import run
from teacher_cache.errors import KnownError
from teacher_cache.table.cache import TeacherCache
from tests.conftest import varied_texts
from tests.distill.tiny_runs import tiny_config

LEAF = ("corpus=sentences", "objective.name=leaf")


NAMED = {"metric": "spearman", "task": "stsb", "student_step": 9, "student_error": 0.6, "student_score": 50.0}


def points(*pairs: tuple[float, float], left_out: tuple[tuple[float, float], ...] = ()) -> list[dict[str, Any]]:
    return [
        {"step": step, "epoch": step / 2, "error": error, "score": score, "fitted": (error, score) not in left_out}
        for step, (error, score) in enumerate(pairs, start=1)
    ]


def test_the_margin_is_the_error_at_which_the_line_reaches_the_teacher() -> None:
    found = fit_margin(points((1.0, 10), (0.8, 30), (0.6, 50)), teacher_score=70)
    assert found["fit"] == pytest.approx({"slope": -100, "intercept": 110, "r2": 1})
    assert found["margin"] == pytest.approx(0.4)


def test_points_of_a_first_epoch_are_excluded_from_the_fit() -> None:
    outlier = (1.3, 90.0)
    found = fit_margin(points(outlier, (1.0, 10), (0.8, 30), (0.6, 50), left_out=(outlier,)), teacher_score=70)
    assert found["margin"] == pytest.approx(0.4)
    assert len(found["points"]) == 4


@given(st.lists(st.tuples(st.floats(0.1, 1.9), st.floats(0, 100)), min_size=3, max_size=8), st.floats(50, 100))
def test_the_line_is_the_least_squares_fit(pairs: list[tuple[float, float]], teacher: float) -> None:
    errors, scores = np.array(pairs).T
    if np.ptp(errors) < 0.01:
        return
    found = fit_margin(points(*pairs), teacher)
    slope, intercept = np.polyfit(errors, scores, 1)
    assert found["fit"]["slope"] == pytest.approx(slope, rel=1e-4, abs=1e-3)
    assert found["fit"]["intercept"] == pytest.approx(intercept, rel=1e-4, abs=1e-3)
    if found["margin"] is not None:
        assert found["fit"]["slope"] * found["margin"] + found["fit"]["intercept"] == pytest.approx(teacher)
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("pairs", "reason", "has_line"),
    [
        (((1.0, 10), (0.8, 30)), "a line needs 3", False),
        (((1.0, 10), (1.0, 30), (1.0, 20)), "same error", False),
        (((1.0, 50), (0.8, 30), (0.6, 10)), "does not fall with a growing error", True),
        (((1.0, 50), (0.8, 50), (0.6, 50)), "does not fall with a growing error", True),
    ],
)
def test_without_a_falling_line_there_is_no_margin_but_a_reason(
    pairs: tuple[tuple[float, float], ...], reason: str, has_line: bool
) -> None:
    found = fit_margin(points(*pairs), teacher_score=70)
    assert found["margin"] is None
    assert reason in found["reason"]
    assert (found["fit"] is not None) == has_line
    text = Margin.conclusion(found | NAMED)
    assert reason in text
    assert "70.00" in text


def test_a_line_below_the_teacher_has_no_margin() -> None:
    found = fit_margin(points((1.0, 10), (0.8, 30), (0.6, 50)), teacher_score=120)
    assert found["margin"] == pytest.approx(-0.1)
    assert "even at no error" in Margin.conclusion(found | NAMED)


def test_the_conclusion_has_the_cost_of_error_the_margin_and_the_students_figures() -> None:
    found = fit_margin(points((1.0, 10), (0.8, 30), (0.6, 50)), teacher_score=70)
    text = Margin.conclusion(found | NAMED)
    for figure in ("3 checkpoints", "1.00 spearman on stsb", "r2 1.00", "70.00", "0.400", "step 9", "0.600", "50.00"):
        assert figure in text


def test_the_error_is_the_mean_distance_of_unit_vectors() -> None:
    teacher = np.array([[3.0, 0.0], [0.0, 0.5]])
    assert approximation_error(teacher * 7, teacher) == pytest.approx(0)
    assert approximation_error(teacher[::-1], teacher) == pytest.approx(2**0.5)
    assert approximation_error(np.array([[-1.0, 0.0], [1.0, 1.0]]), teacher) == pytest.approx(
        (2 + (2 - 2**0.5) ** 0.5) / 2
    )


def test_the_first_epoch_of_every_cycle_is_skipped() -> None:
    def first(steps: int, **options: Any) -> list[int]:
        return [step for step in range(1, steps + 1) if in_skipped_epochs(step, steps, 2, **options)]

    assert first(6) == [1, 2]
    assert first(12, cycles=3) == [1, 2, 5, 6, 9, 10]
    assert first(15, cycles=3, warmup=3) == [1, 2, 8, 9, 12, 13]
    assert first(12, cycles=3, skipped_epochs=0.5) == [1, 5, 9]
    assert first(12, cycles=3, skipped_epochs=0) == []


# On a run


def write_sts(folder: Path, texts: list[str]) -> Path:
    folder.mkdir(exist_ok=True)
    half = len(texts) // 2
    with (folder / "stsb_test.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["sentence1", "sentence2", "score"])
        writer.writerows(zip(texts[:half], texts[half:], [place % 6 for place in range(half)], strict=True))
    return folder


@pytest.fixture(scope="module")
def six_epochs(toy_cache: Path, tiny_student: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on "sentences" of 2 cycles, 3 epochs of 7 steps each, with a checkpoint per epoch."""
    folder = tmp_path_factory.mktemp("runs") / "three"
    run(
        tiny_config(
            toy_cache,
            tiny_student,
            folder,
            *LEAF,
            "training.lr_scheduler_type=linear_cycles",
            "training.cycles=2",
            "training.warmup_ratio=0",
            "training.per_device_train_batch_size=50",
            "training.max_steps=42",
            "training.save_steps=7",
            "training.save_total_limit=20",
        )
    )
    return folder


def test_every_checkpoint_of_a_run_is_a_point(six_epochs: Path, tmp_path: Path) -> None:
    data = write_sts(tmp_path / "data", varied_texts(80))
    with TrainedRun.open(six_epochs) as trained:
        found = Margin(data=data)(trained)
        rows, last = trained.held_out_rows(), trained.load()
        texts = trained.cache.texts(rows)
        weight = last.objective.projection()
        student = last.student.encode(texts, projection=weight)
        teacher = trained.space.gather(rows)
        pairs = varied_texts(80)
        theirs = dict(zip(pairs, last.student.encode(pairs, projection=weight), strict=True))
    cosines = (student * teacher).sum(1) / np.linalg.norm(student, axis=1) / np.linalg.norm(teacher, axis=1)
    point = found["points"][-1]
    assert [one["step"] for one in found["points"]] == [7, 14, 21, 28, 35, 42]
    assert [one["fitted"] for one in found["points"]] == [False, True, True, False, True, True]
    assert point["error"] == pytest.approx(np.sqrt(2 - 2 * cosines).mean(), rel=1e-5)
    expected = spearman(
        np.array(
            [
                theirs[a] @ theirs[b] / np.linalg.norm(theirs[a]) / np.linalg.norm(theirs[b])
                for a, b in zip(pairs[:40], pairs[40:], strict=True)
            ]
        ),
        np.array([place % 6 for place in range(40)]),
    )
    assert expected is not None
    assert point["score"] == found["student_score"] == pytest.approx(100 * expected)
    assert (found["metric"], found["task"], found["texts"]) == ("spearman", "stsb", len(rows))


def test_the_teachers_score_is_that_of_its_cached_vectors(six_epochs: Path, toy_cache: Path, tmp_path: Path) -> None:
    texts = varied_texts(80)
    with TrainedRun.open(six_epochs) as trained:
        found = Margin(data=write_sts(tmp_path / "data", texts))(trained)
    with TeacherCache.open(toy_cache) as cache:
        vectors = cache.space().gather(cache.lookup(texts)).astype(np.float64)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    expected = spearman((vectors[:40] * vectors[40:]).sum(1), np.array([place % 6 for place in range(40)]))
    assert expected is not None
    assert found["teacher_score"] == pytest.approx(100 * expected)


def write_collection(folder: Path, texts: list[str]) -> Path:
    """A collection in BEIR's layout: 10 queries, each with two relevant documents."""
    folder.mkdir()
    (folder / "queries.jsonl").write_text(
        "".join(json.dumps({"_id": f"q{place}", "text": text}) + "\n" for place, text in enumerate(texts[:10]))
    )
    (folder / "corpus.jsonl").write_text(
        "".join(json.dumps({"_id": f"d{place}", "text": text}) + "\n" for place, text in enumerate(texts[10:]))
    )
    (folder / "qrels.tsv").write_text(
        "".join(f"q{place}\td{place + part}\t1\n" for place in range(10) for part in (0, 9))
    )
    return folder


def test_with_a_collection_the_students_queries_search_the_teachers_documents(
    six_epochs: Path, toy_cache: Path, tmp_path: Path
) -> None:
    texts = varied_texts(60)
    with TrainedRun.open(six_epochs) as trained:
        found = Margin(retrieval=write_collection(tmp_path / "beir", texts))(trained)
        last = trained.load()
        student = last.student.encode(texts[:10], projection=last.objective.projection())
    with TeacherCache.open(toy_cache) as cache:
        teacher = cache.space().gather(cache.lookup(texts))

    def ndcg(queries: Any) -> float:
        documents = teacher[10:] / np.linalg.norm(teacher[10:], axis=1, keepdims=True)
        values = []
        for place, query in enumerate(queries):
            order = np.argsort(-(documents @ query), kind="stable")[:10].tolist()
            gain = sum(1 / np.log2(order.index(there) + 2) for there in (place, place + 9) if there in order)
            values.append(gain / (1 + 1 / np.log2(3)))
        return 100 * float(np.mean(values))

    assert (found["metric"], found["task"]) == ("ndcg_at_10", "beir (asymmetric)")
    assert found["points"][-1]["score"] == pytest.approx(ndcg(student))
    assert found["teacher_score"] == pytest.approx(ndcg(teacher[:10]))
    assert found["teacher_prompt"] == ""


def test_missing_texts_are_encoded_by_the_teacher_once(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    shutil.copytree(toy_cache, tmp_path / "cache")
    run(tiny_config(tmp_path / "cache", tiny_student, tmp_path / "run", *LEAF, "training.max_steps=2"))
    data = write_sts(tmp_path / "data", varied_texts(10, seed=9))
    said: list[str] = []
    with TrainedRun.open(tmp_path / "run") as trained:
        first = Margin(data=data, teacher="toy", announce=said.append)(trained)
        second = Margin(data=data)(trained)
    assert sum("lacks 10 of 10 texts" in line for line in said) == 1
    assert first == second
    assert "a line needs 3" in first["reason"]


def test_skipped_epochs_are_an_option(six_epochs: Path, tmp_path: Path) -> None:
    data = write_sts(tmp_path / "data", varied_texts(80))
    with TrainedRun.open(six_epochs) as trained:
        found = Margin(data=data, skipped_epochs=0)(trained)
    assert all(point["fitted"] for point in found["points"])
    with pytest.raises(ConfigError, match="skipped_epochs is -1"):
        Margin(data=data, skipped_epochs=-1)


def test_missing_texts_without_a_teacher_are_an_error(six_epochs: Path, tmp_path: Path) -> None:
    data = write_sts(tmp_path / "data", varied_texts(10, seed=9))
    with TrainedRun.open(six_epochs) as trained, pytest.raises(KnownError, match="10"):
        Margin(data=data)(trained)


def test_the_margin_is_saved_in_the_run_folder(six_epochs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(six_epochs, folder)
    analyze(folder, ["margin"], data=write_sts(tmp_path / "data", varied_texts(80)))
    kept = json.loads((folder / "analyses" / "margin.json").read_text())
    assert len(kept["result"]["points"]) == 6
    assert kept["conclusion"]


def test_a_student_outside_the_teachers_space_is_an_error(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    run(
        tiny_config(
            toy_cache,
            tiny_student,
            tmp_path / "run",
            "corpus=sentences",
            "objective.name=simcse",
            "training.max_steps=2",
        )
    )
    with TrainedRun.open(tmp_path / "run") as trained, pytest.raises(NeedsNotMet, match="in its teacher's space"):
        Margin(data=write_sts(tmp_path / "data", varied_texts(80)))(trained)


def test_a_run_without_held_out_texts_is_an_error(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    run(tiny_config(toy_cache, tiny_student, tmp_path / "run", "objective.name=leaf", "training.max_steps=2"))
    with TrainedRun.open(tmp_path / "run") as trained, pytest.raises(EvaluationError, match="has no held-out texts"):
        Margin(data=write_sts(tmp_path / "data", varied_texts(80)))(trained)
