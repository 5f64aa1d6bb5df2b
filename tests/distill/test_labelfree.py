"""Agreement and approximation on a user's own texts, for a model and its teacher."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from cli.distill import main
from distill.errors import EvaluationError
from distill.evaluation.base import TEACHER, TEXT
from distill.evaluation.evaluator import Evaluator
from distill.evaluation.label_free import (
    Agreement,
    Approximation,
    label_free_tasks,
    sample_texts,
    without_approximation,
)
from distill.evaluation.task_file import read_task_file
from teacher_cache.errors import CorpusError
from tests.contracts.task_contract import CountingEncoder, text_vectors

TEXTS = [f"text number {i}" for i in range(40)]


class Near(CountingEncoder):
    """The vectors of another encoder, rotated and with noise per text."""

    def __init__(self, noise: float, width: int = 8) -> None:
        super().__init__()
        self.noise = noise
        self.width = width

    def encode(self, texts: Sequence[str], /) -> npt.NDArray[np.float32]:
        moved = super().encode(texts) + self.noise * text_vectors([f"{text} noise" for text in texts])
        return 3 * moved[:, : self.width]


def write_corpus(folder: Path, texts: Sequence[str] = TEXTS) -> Path:
    path = folder / "corpus.txt"
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def roles(model: CountingEncoder, teacher: CountingEncoder) -> Mapping[str, CountingEncoder]:
    return {TEXT: model, TEACHER: teacher}


def test_both_tasks_share_a_sample_that_each_model_encodes_once_and_count_in_no_average(tmp_path: Path) -> None:
    tasks = label_free_tasks(write_corpus(tmp_path), sample=20)
    model, teacher = Near(0.1), CountingEncoder()
    report = Evaluator(tasks)(roles(model, teacher))
    assert list(report.tasks) == ["agreement", "approximation"]
    assert len(model.encoded) == len(set(model.encoded)) == 20
    assert sorted(model.encoded) == sorted(teacher.encoded)
    assert [average.tasks for average in report.averages.values()] == [0, 0, 0]


def test_agreement_is_the_rank_correlation_of_all_pairs_of_cosines(tmp_path: Path) -> None:
    task = Agreement("agreement", tmp_path, files={"file": write_corpus(tmp_path)})
    score = Evaluator([task])(roles(Near(0.5, width=6), CountingEncoder())).tasks["agreement"]
    pairs = np.triu_indices(40, k=1)
    units = [v / np.linalg.norm(v, axis=1, keepdims=True) for v in (Near(0.5, 6).encode(TEXTS), text_vectors(TEXTS))]
    own, teachers = [np.round((u.astype(np.float64) @ u.T)[pairs], 6) for u in units]
    assert score.score == pytest.approx(100 * spearmanr(own, teachers).statistic, abs=1e-3)
    assert 0 < score.extra["overlap"] <= 100
    assert score.extra["texts"] == 40


def test_errors_are_distances_of_unit_vectors(tmp_path: Path) -> None:
    task = Approximation("approximation", tmp_path, files={"file": write_corpus(tmp_path)})
    score = Evaluator([task])(roles(Near(0.3), CountingEncoder())).tasks["approximation"]
    own, teachers = (
        (v / np.linalg.norm(v, axis=1, keepdims=True)).astype(np.float64)
        for v in (Near(0.3).encode(TEXTS), text_vectors(TEXTS))
    )
    errors = np.linalg.norm(own - teachers, axis=1)
    assert score.score == pytest.approx(100 * np.sum(own * teachers, axis=1).mean(), abs=1e-4)
    assert score.extra["error"] == pytest.approx(errors.mean(), abs=1e-5)
    assert score.extra["error_median"] == pytest.approx(np.median(errors), abs=1e-5)
    assert score.extra["error_p90"] == pytest.approx(np.quantile(errors, 0.9), abs=1e-5)
    assert score.extra["error_max"] == pytest.approx(errors.max(), abs=1e-5)
    order = np.argsort(errors)
    assert [text for text, _ in score.examples["best"]] == [TEXTS[i] for i in order[:10]]
    assert [text for text, _ in score.examples["worst"]] == [TEXTS[i] for i in order[::-1][:10]]
    assert [value for _, value in score.examples["worst"]] == pytest.approx(sorted(errors, reverse=True)[:10], abs=1e-5)
    shown = json.loads(json.dumps(score.to_json()))["examples"]["worst"][0]
    assert shown == {"text": TEXTS[order[-1]], "value": score.examples["worst"][0].value}


def test_a_model_that_is_its_teacher_has_full_agreement_and_no_error(tmp_path: Path) -> None:
    tasks = label_free_tasks(write_corpus(tmp_path))
    report = Evaluator(tasks)(roles(Near(0.0), CountingEncoder()))
    assert report.tasks["agreement"].score == pytest.approx(100)
    assert report.tasks["agreement"].extra["overlap"] == pytest.approx(100)
    assert report.tasks["approximation"].score == pytest.approx(100)
    assert report.tasks["approximation"].extra["error_max"] == pytest.approx(0, abs=1e-3)


def test_approximation_of_a_model_of_another_width_is_an_error(tmp_path: Path) -> None:
    task = Approximation("approximation", tmp_path, files={"file": write_corpus(tmp_path)})
    with pytest.raises(EvaluationError, match="6 dimensions and the teacher's 8, so it is not in the teacher's space"):
        Evaluator([task])(roles(Near(0.1, width=6), CountingEncoder()))


def test_optional_approximation_is_skipped_and_announced(tmp_path: Path) -> None:
    said: list[str] = []
    tasks = without_approximation(label_free_tasks(write_corpus(tmp_path)), "its space is another", said.append)
    assert [task.name for task in tasks] == ["agreement"]
    assert said == ["approximation is skipped: its space is another"]
    named = Approximation("mine", tmp_path, files={"file": write_corpus(tmp_path)})
    with pytest.raises(EvaluationError, match="task 'mine': its space is another"):
        without_approximation([named], "its space is another", said.append)


def test_a_corpus_of_json_lines_is_read_by_its_key(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"body": text, "id": i}) + "\n" for i, text in enumerate(TEXTS)))
    for task in label_free_tasks(path, text_key="body"):
        assert sorted(task.texts()) == sorted(TEXTS)


def test_a_task_file_may_have_label_free_tasks(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    (tmp_path / "tasks.yaml").write_text("own: {kind: approximation, file: corpus.txt}\n")
    (task,) = read_task_file(tmp_path / "tasks.yaml")
    assert isinstance(task, Approximation)
    assert task.domain == "apart"
    assert sorted(task.texts()) == sorted(TEXTS)


def test_a_missing_or_empty_corpus_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"absent\.txt"):
        label_free_tasks(tmp_path / "absent.txt")
    with pytest.raises(CorpusError, match="no texts"):
        label_free_tasks(write_corpus(tmp_path, ["", " "]))[0].texts()


def test_the_sample_depends_on_the_seed_and_not_on_order_and_duplicates() -> None:
    found = sample_texts(TEXTS, 10, seed=1)
    assert found == sample_texts([*reversed(TEXTS), *TEXTS[:15]], 10, seed=1)
    assert set(found) < set(TEXTS)
    assert set(found) != set(sample_texts(TEXTS, 10, seed=2))


@given(st.lists(st.text(max_size=3), max_size=30), st.integers(1, 12))
def test_a_sample_has_distinct_texts_and_at_most_all(texts: list[str], count: int) -> None:
    texts = [text.encode("utf-8", "replace").decode() for text in texts]
    found = sample_texts(texts, count, seed=0)
    assert len(found) == len(set(found)) == min(count, len(set(texts)))
    assert set(found) <= set(texts)


def test_all_texts_are_equally_likely() -> None:
    drawn = [text for seed in range(300) for text in sample_texts(TEXTS, 10, seed)]
    counts = np.array([drawn.count(text) for text in TEXTS])
    # Binomial with 300 draws of probability 1/4: five standard deviations are 37.5.
    assert np.abs(counts - 75).max() < 37.5


def test_the_command_compares_a_model_with_its_teacher_and_shows_the_texts(tmp_path: Path) -> None:
    shown = CliRunner().invoke(
        main, ["eval", "toy", "--dtype", "fp32", "--texts", str(write_corpus(tmp_path)), "--teacher", "toy"]
    )
    assert shown.exit_code == 0, shown.output
    assert "approximation: distance to the teacher's vector, both of length 1: mean 0.000" in shown.output
    assert shown.output.count("text number") == 20
    said = CliRunner().invoke(
        main,
        ["eval", "toy", "--dtype", "fp32", "--texts", str(write_corpus(tmp_path)), "--teacher", "toy", "--json", "-q"],
    )
    record = json.loads(said.stdout)
    assert record["tasks"]["agreement"]["score"] == pytest.approx(100)
    assert len(record["tasks"]["approximation"]["examples"]["worst"]) == 10


def test_the_command_needs_a_teacher_for_texts(tmp_path: Path) -> None:
    refused = CliRunner().invoke(main, ["eval", "toy", "--dtype", "fp32", "--texts", str(write_corpus(tmp_path))])
    assert refused.exit_code == 1
    assert "--teacher" in refused.output


@pytest.mark.parametrize("by_name", [False, True])
def test_a_model_of_another_width_than_its_teacher_has_no_approximation(
    tmp_path: Path, tiny_student: Path, by_name: bool
) -> None:
    corpus = write_corpus(tmp_path)
    (tmp_path / "tasks.yaml").write_text("own: {kind: approximation, file: corpus.txt}\n")
    given = ["--tasks-file", str(tmp_path / "tasks.yaml")] if by_name else ["--texts", str(corpus)]
    done = CliRunner().invoke(main, ["eval", str(tiny_student), *given, "--teacher", "toy", "--dtype", "fp32"])
    assert done.exit_code == by_name
    assert ("own" if by_name else "approximation is skipped") in done.stderr
    assert "vectors of 16 dimensions" in done.stderr
