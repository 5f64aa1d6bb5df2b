"""Scores of truncated and quantized vectors."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import spearmanr
from sentence_transformers.util.quantization import quantize_embeddings
from sklearn.metrics import average_precision_score

from distill.analyses.compression import (
    PRECISIONS,
    Compression,
    prefixes,
    quantize,
    ranges_of,
    restore,
    scores_by_size,
    truncate,
)
from distill.analyses.trained_run import TrainedRun
from distill.errors import ConfigError, EvaluationError
from distill.evaluation.base import DOCUMENT, QUERY, TEACHER_DOCUMENT, TEACHER_QUERY
from distill.evaluation.evaluator import Evaluator, nine_tasks
from distill.evaluation.retrieval import retrieval_tasks
from distill.runs.run import run
from distill.student.student import Student
from teacher_cache.errors import MissingRows
from teacher_cache.teachers import TeacherOptions, load_teacher, resolve, resolve_dtype
from tests.conftest import varied_texts
from tests.distill.tiny_runs import tiny_config
from tests.distill.tiny_tasks import TASKS, write_tasks

RANDOM = np.random.default_rng(11)


def random(count: int, dims: int) -> Any:
    return RANDOM.normal(size=(count, dims)).astype(np.float32)


def mean_cosine(first: Any, second: Any) -> float:
    return float(np.einsum("ij,ij->i", first, second).mean())


def units(vectors: Any) -> Any:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_prefixes_are_powers_of_two_and_all_dimensions() -> None:
    assert prefixes(768) == [32, 64, 128, 256, 512, 768]
    assert prefixes(64) == [32, 64]
    assert prefixes(33) == [32, 33]
    assert prefixes(32) == [32]
    assert prefixes(16) == [16]


def test_vectors_are_truncated_before_they_are_scaled() -> None:
    vectors = np.array([[3.0, 4.0, 12.0], [0.0, 0.0, 5.0]], dtype=np.float32)
    found = truncate(vectors, 2)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [[0.6, 0.8], [0, 0]], atol=1e-7)


def test_int8_has_255_steps_from_the_smallest_to_the_largest_value() -> None:
    # Steps of 1/64 and of 1.
    ranges = np.array([[-1.0, 0.0], [-1 + 255 / 64, 255.0]], dtype=np.float32)
    vectors = np.array([[-1, 0], [-1 + 255 / 64, 255], [-1 + 2.5 / 64, 1.9], [-7, 900]], dtype=np.float32)
    codes = quantize(vectors, "int8", ranges)
    assert codes.dtype == np.int8
    assert codes.tolist() == [[-128, -128], [127, 127], [-126, -127], [-128, 127]]  # the last is clipped


def test_int8_codes_equal_those_of_sentence_transformers() -> None:
    documents, queries = random(120, 40), random(9, 40)
    expected = quantize_embeddings(queries, "int8", calibration_embeddings=documents)
    assert np.array_equal(quantize(queries, "int8", ranges_of(documents)), expected)


def test_a_restored_value_is_at_most_half_a_step_away() -> None:
    vectors = units(random(200, 24))
    ranges = ranges_of(vectors)
    steps = (ranges[1] - ranges[0]) / 255
    codes = quantize(vectors, "int8", ranges)
    values = ranges[0] + (codes.astype(float) + 128.5) * steps
    assert (np.abs(values - vectors) <= steps * 0.5001).all()
    np.testing.assert_allclose(restore(codes, "int8", ranges), units(values), atol=1e-6)


def test_a_constant_dimension_is_restored_exactly() -> None:
    documents = random(30, 4)
    documents[:, 1], documents[:, 3] = 0.25, 0.0
    ranges = ranges_of(documents)
    restored = restore(quantize(documents, "int8", ranges), "int8", ranges)
    assert np.isfinite(restored).all()
    assert (restored[:, 3] == 0).all()
    np.testing.assert_allclose(restored, units(documents), atol=0.05)


def test_a_single_document_is_restored_exactly() -> None:
    document = truncate(random(1, 8), 8)
    ranges = ranges_of(document)
    for precision in ("float32", "int8"):
        found = restore(quantize(document, precision, ranges), precision, ranges)
        np.testing.assert_allclose(found, document, atol=1e-6)
    assert mean_cosine(*[restore(quantize(document, "binary", ranges), "binary", ranges)] * 2) == 8


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 21).flatmap(
        lambda dims: st.tuples(*[arrays(np.float32, (n, dims), elements=st.floats(-1, 1, width=32)) for n in (2, 5)])
    )
)
def test_binary_ranks_by_hamming_distance_and_keeps_ties(sides: tuple[Any, Any]) -> None:
    ranges = ranges_of(sides[1])
    first, second = (restore(quantize(side, "binary", ranges), "binary", ranges) for side in sides)
    dims = sides[0].shape[1]
    hamming = [
        [sum((a > 0) != (b > 0) for a, b in zip(one, other, strict=True)) for other in sides[1]] for one in sides[0]
    ]
    assert np.array_equal(first @ second.T, dims - 2 * np.array(hamming))


def test_bytes_are_of_one_stored_vector() -> None:
    curves = scores_by_size(random(3, 300), random(5, 300), lambda a, b: 1.0)
    assert {precision: [(p["dims"], p["bytes"]) for p in points] for precision, points in curves.items()} == {
        "float32": [(32, 128), (64, 256), (128, 512), (256, 1024), (300, 1200)],
        "int8": [(32, 32), (64, 64), (128, 128), (256, 256), (300, 300)],
        "binary": [(32, 4), (64, 8), (128, 16), (256, 32), (300, 38)],
    }


def test_all_dimensions_in_float32_score_like_the_vectors() -> None:
    first, second = random(40, 48), random(40, 48)
    curves = scores_by_size(first, second, mean_cosine)
    expected = mean_cosine(units(first), units(second))
    assert curves["float32"][-1]["score"] == pytest.approx(expected, abs=1e-4)
    assert curves["float32"][0]["score"] == pytest.approx(
        mean_cosine(units(first[:, :32]), units(second[:, :32])), abs=1e-4
    )


def test_int8_uses_the_ranges_of_the_documents_for_queries_too() -> None:
    queries, documents = 3 * random(40, 40), random(60, 40)
    asked, stored = units(queries[:, :32]), units(documents[:, :32])
    low, high = stored.min(0), stored.max(0)
    steps = (high - low) / 255
    codes = [np.clip(np.floor((side - low) / steps), 0, 255) for side in (asked, stored)]
    values = [units(low + (code + 0.5) * steps) for code in codes]
    curves = scores_by_size(queries, documents, lambda a, b: 100 * float((a @ b.T).max(1).mean()))
    assert curves["int8"][0]["score"] == pytest.approx(100 * (values[0] @ values[1].T).max(1).mean(), abs=0.01)
    as_they_are = [units(code - 128) for code in codes]
    expected = 100 * (as_they_are[0] @ as_they_are[1].T).max(1).mean()
    assert curves["int8"][0]["codes"] == pytest.approx(expected, abs=0.05)
    assert "codes" not in curves["float32"][0]
    # Ranges of the queries would result in other codes.
    assert not np.array_equal(quantize(asked, "int8", ranges_of(asked)), codes[0] - 128)


def test_relative_is_the_share_of_the_same_sides_full_score() -> None:
    given_scores = iter([40.0, 30.0, 28.0, 20.0, 50.0, 49.0, 48.0, 60.0])
    curves = scores_by_size(random(3, 40), random(3, 40), lambda a, b: next(given_scores))
    assert [(p["score"], p["relative"]) for p in curves["float32"]] == [(40, 0.8), (50, 1)]
    assert [(p["score"], p["codes"], p["relative"]) for p in curves["int8"]] == [(30, 28, 0.6), (49, 48, 0.98)]
    assert [(p["score"], p["relative"]) for p in curves["binary"]] == [(20, 0.4), (60, 1.2)]


@pytest.mark.parametrize("full_score", [0.0, -4.0])
def test_relative_is_none_if_the_full_score_is_not_above_0(full_score: float) -> None:
    curves = scores_by_size(random(3, 8), random(3, 8), lambda a, b: full_score)
    assert [points[0]["relative"] for points in curves.values()] == [None, None, None]


def test_the_conclusion_excludes_tasks_without_a_share_and_names_them() -> None:
    halved = iter([40.0, 20.0, 20.0, 20.0])
    good = scores_by_size(random(3, 8), random(3, 8), lambda a, b: next(halved))
    bad = scores_by_size(random(3, 8), random(3, 8), lambda a, b: -4.0)
    tasks = [
        {"task": "stsb", "curves": {"student": good, "teacher": good}},
        {"task": "sick", "curves": {"student": bad, "teacher": good}},
    ]
    said = Compression.conclusion({"tasks": tasks})
    assert said.count("50.0 % in int8") == 2  # not a mean with 0 % of the student on sick
    assert said.endswith("Excluded, with a full score of at most 0: student on sick.")
    assert "student nothing" not in said
    nothing = Compression.conclusion({"tasks": [{"task": "sick", "curves": {"student": bad}}]})
    assert "undefined" in nothing


def test_options_that_choose_among_tasks_are_checked(tmp_path: Path) -> None:
    assert Compression(data=tmp_path, tasks="stsb").tasks == ["stsb"]
    with pytest.raises(ConfigError, match=r"compression\.split is 'dev'; expected one of test, validation"):
        Compression(data=tmp_path, split="dev")
    with pytest.raises(ConfigError, match=r"compression\.split chooses .*\(`retrieval`\)"):
        Compression(data=tmp_path, retrieval=tmp_path, split="validation")
    with pytest.raises(ConfigError, match=r"compression\.tasks chooses among the nine"):
        Compression(retrieval=tmp_path, tasks=["stsb"])


def write_collection(folder: Path) -> Path:
    """20 documents, 6 queries, each with three judged documents."""
    folder.mkdir()
    texts = varied_texts(26, seed=8)
    documents = [{"_id": f"d{place}", "text": text} for place, text in enumerate(texts[:20])]
    queries = [{"_id": f"q{place}", "text": text} for place, text in enumerate(texts[20:])]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in documents))
    (folder / "queries.jsonl").write_text("".join(json.dumps(line) + "\n" for line in queries))
    judged = [f"q{query}\td{(3 * query + place) % 20}\t{place}" for query in range(6) for place in (1, 2, 3)]
    (folder / "qrels.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *judged]))
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, toy_cache: Path, tiny_student: Path) -> Path:
    """Runs "leaf" and "rkd" on a cache that evaluations may fill, with tasks and a collection."""
    folder = tmp_path_factory.mktemp("compressed")
    shutil.copytree(toy_cache, folder / "cache")
    for name in ("leaf", "rkd"):
        run(tiny_config(folder / "cache", tiny_student, folder / name, f"objective.name={name}"))
    write_tasks(folder / "data")
    write_collection(folder / "beir")
    return folder


def asked(made: Path, **options: Any) -> Compression:
    return Compression(**{"data": made / "data", "tasks": TASKS, "teacher": "toy"} | options)


class InTeacherSpace:
    """A run's student with its projection, scaled to length 1."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def encode(self, texts: Any) -> Any:
        return units(self.model.student.encode(texts, projection=self.model.objective.projection()))


def full(curves: Any) -> float:
    return curves["float32"][-1]["score"]


def toy() -> Any:
    return load_teacher(resolve_dtype(resolve(TeacherOptions(model="toy"))))


def test_the_full_scores_of_a_run_equal_those_of_an_evaluation(made: Path) -> None:
    with TrainedRun.open(made / "leaf") as trained:
        result = asked(made)(trained)
        model = trained.load()
        evaluator = Evaluator(nine_tasks(made / "data", TASKS))
        expected = {
            "student": evaluator(InTeacherSpace(model)).tasks,
            "teacher": evaluator(toy()).tasks,
            "own": evaluator(model.student).tasks,
        }
        assert [(task["task"], task["metric"]) for task in result["tasks"]] == [
            ("stsb", "spearman"),
            ("mrpc", "average_precision"),
        ]
        for task in result["tasks"]:
            for side, scores in expected.items():
                found = task["own"] if side == "own" else task["curves"][side]
                assert full(found) == pytest.approx(scores[task["task"]].score, abs=0.01)
        # Asymmetric: the student encodes the first sentence, the teacher the second.
        pairs = evaluator.tasks[0].pairs  # type: ignore[attr-defined]
        first = InTeacherSpace(model).encode([pair.first for pair in pairs])
        second = units(toy().encode([pair.second for pair in pairs]))
        rho = spearmanr((first * second).sum(1), [pair.value for pair in pairs]).statistic
        assert full(result["tasks"][0]["curves"]["asymmetric"]) == pytest.approx(100 * rho, abs=0.01)
        pairs = evaluator.tasks[1].pairs  # type: ignore[attr-defined]
        signs = [
            np.where(encoder.encode([getattr(pair, side) for pair in pairs]) > 0, 1, -1)
            for encoder, side in ((InTeacherSpace(model), "first"), (toy(), "second"))
        ]
        precision = average_precision_score([pair.value for pair in pairs], (signs[0] * signs[1]).sum(1))
        binary = result["tasks"][1]["curves"]["asymmetric"]["binary"][-1]
        assert binary["score"] == pytest.approx(100 * precision, abs=0.01)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    said = Compression.conclusion(result)
    assert "mean over 2 tasks" in said
    assert all(f"{side} " in said for side in ("student", "teacher", "asymmetric"))


def test_retrieval_scores_equal_those_of_the_three_modes(made: Path) -> None:
    with TrainedRun.open(made / "leaf") as trained:
        result = asked(made, data=None, tasks=None, retrieval=made / "beir")(trained)
        student, teacher = InTeacherSpace(trained.load()), toy()
    (task,) = result["tasks"]
    assert task["metric"] == "ndcg_at_10"
    by_role = {QUERY: student, DOCUMENT: student, TEACHER_QUERY: teacher, TEACHER_DOCUMENT: teacher}
    modes = ("student", "asymmetric", "teacher")
    report = Evaluator(retrieval_tasks(made / "beir", modes))(by_role)
    for mode, score in zip(modes, report.tasks.values(), strict=True):
        assert full(task["curves"][mode]) == pytest.approx(score.score, abs=0.01)


def test_the_teacher_encodes_as_in_training_also_if_its_files_name_a_query_prompt(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distill.evaluation.encoders.model_prompts", lambda options: {"query": "search: "})
    with TrainedRun.open(made / "leaf") as trained:
        with_model = asked(made, data=None, tasks=None, retrieval=made / "beir")(trained)
        without = asked(made, data=None, tasks=None, retrieval=made / "beir", teacher=None)(trained)
    assert with_model == without
    assert with_model["teacher_prompt"] == ""


def test_a_student_outside_its_teachers_space_has_no_asymmetric_side(made: Path) -> None:
    with TrainedRun.open(made / "rkd") as trained:
        result = asked(made)(trained)
    assert not result["projected"]
    assert [list(task["curves"]) for task in result["tasks"]] == [["student", "teacher"]] * 2
    assert not any("own" in task for task in result["tasks"])
    assert [list(curve) for curve in result["tasks"][0]["curves"].values()] == [list(PRECISIONS)] * 2
    assert "asymmetric" not in Compression.conclusion(result)


def test_every_text_is_encoded_once_for_all_tasks_and_sizes(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    encode = Student.encode

    def watched(self: Student, texts: Any, **options: Any) -> Any:
        seen.extend(texts)
        return encode(self, texts, **options)

    monkeypatch.setattr(Student, "encode", watched)
    with TrainedRun.open(made / "leaf") as trained:
        asked(made, retrieval=made / "beir")(trained)
    assert len(seen) == len(set(seen)) == len({*varied_texts(60, 1), *varied_texts(26, seed=8)})


def test_missing_texts_are_stored_and_an_error_without_a_teacher(made: Path, toy_cache: Path, tmp_path: Path) -> None:
    write_tasks(tmp_path / "data", seed=77)
    with TrainedRun.open(made / "leaf") as trained:
        with pytest.raises(MissingRows, match="`teacher`"):
            asked(made, data=tmp_path / "data", teacher=None)(trained)
        said: list[str] = []
        first = asked(made, data=tmp_path / "data", announce=said.append)(trained)
        assert any("lacks" in line for line in said)
        assert asked(made, data=tmp_path / "data", teacher=None)(trained) == first


def test_tasks_without_two_sides_and_no_tasks_are_an_error(made: Path, tmp_path: Path) -> None:
    for part in ("train", "test"):
        (tmp_path / f"emotion_{part}.csv").write_text("text,label\nthe cat,0\nthe sea,1\n")
    with (
        TrainedRun.open(made / "leaf") as trained,
        pytest.raises(EvaluationError, match="'emotion' does not compare vectors"),
    ):
        asked(made, data=tmp_path, tasks=["emotion"])(trained)
    with pytest.raises(ConfigError, match="`data` or `retrieval`"):
        Compression()


def test_a_student_with_nan_vectors_is_an_error(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Student, "encode", lambda self, texts, **options: np.full((len(texts), 16), np.nan, np.float32))
    with TrainedRun.open(made / "leaf") as trained, pytest.raises(EvaluationError, match="60 of 60 texts"):
        asked(made)(trained)
