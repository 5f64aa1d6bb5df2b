"""Tests that every kind of evaluation task inherits."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from distill.errors import EvaluationError
from distill.evaluation.base import DOMAINS, TEXT, Task
from distill.evaluation.evaluator import Evaluator


def text_vector(text: str, dims: int = 8) -> npt.NDArray[np.float32]:
    """A vector that is a function of the text alone."""
    return np.random.default_rng(list(text.encode())).normal(size=dims).astype(np.float32)


def text_vectors(texts: Sequence[str], role: str = TEXT) -> npt.NDArray[np.float32]:
    return np.stack([text_vector(text) for text in texts])


class CountingEncoder:
    """Encodes each text as its own vector and records the texts."""

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode(self, texts: Sequence[str], /) -> npt.NDArray[np.float32]:
        self.encoded += texts
        return text_vectors(texts)


class TaskContract(ABC):
    @abstractmethod
    def write_files(self, folder: Path) -> None:
        """Write well-formed files of the task, with at least two rows each."""

    @abstractmethod
    def task(self, folder: Path) -> Task:
        """The task over the files in `folder`."""

    @pytest.fixture
    def written(self, tmp_path: Path) -> Task:
        self.write_files(tmp_path)
        return self.task(tmp_path)

    def test_files_are_read_at_first_use(self, tmp_path: Path) -> None:
        task = self.task(tmp_path / "absent")
        assert task.domain in DOMAINS
        assert task.files()

    def test_files_lists_the_files_it_reads(self, written: Task) -> None:
        assert [path for path in written.files() if not path.is_file()] == []

    @pytest.mark.parametrize("number", [0, -1])
    def test_each_missing_file_is_an_error_with_its_name(self, written: Task, number: int) -> None:
        path = written.files()[number]
        path.unlink()
        with pytest.raises(EvaluationError, match=path.name):
            written.texts()

    def test_a_missing_column_is_an_error_with_those_found(self, written: Task) -> None:
        path = written.files()[-1]
        path.write_text("alpha,beta\n1,2\n", encoding="utf-8")
        with pytest.raises(EvaluationError, match=rf"{path.name}: no column .*found: alpha, beta"):
            written.texts()

    def test_it_uses_only_the_texts_it_lists(self, written: Task) -> None:
        asked: set[str] = set()

        def vectors(texts: Sequence[str], role: str = TEXT) -> npt.NDArray[np.float32]:
            asked.update(texts)
            return text_vectors(texts)

        written.score(vectors)
        assert asked == set(written.texts())

    def test_its_metric_is_among_its_figures_and_between_minus_100_and_100(self, written: Task) -> None:
        figures = written.score(text_vectors)
        assert -100 <= figures[written.metric] <= 100
        assert all(np.isfinite(value) for value in figures.values())

    def test_the_same_vectors_give_the_same_score(self, written: Task, tmp_path: Path) -> None:
        assert written.score(text_vectors) == self.task(tmp_path).score(text_vectors)

    def test_a_collapsed_encoder_has_a_finite_score(self, written: Task) -> None:
        figures = written.score(lambda texts, role=TEXT: np.ones((len(texts), 4), dtype=np.float32))
        assert np.isfinite(figures[written.metric])

    def test_zero_vectors_have_a_finite_score(self, written: Task) -> None:
        figures = written.score(lambda texts, role=TEXT: np.zeros((len(texts), 4), dtype=np.float32))
        assert np.isfinite(figures[written.metric])

    def test_the_evaluator_runs_it(self, written: Task) -> None:
        encoder = CountingEncoder()
        report = Evaluator([written])(encoder)
        assert report.tasks[written.name].metric == written.metric
        assert sorted(encoder.encoded) == sorted(set(written.texts()))
