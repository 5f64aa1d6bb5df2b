"""What every evaluation task promises; a new kind of task inherits these tests."""

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
    """Gives each text its own vector and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def encode(self, texts: Sequence[str], /) -> npt.NDArray[np.float32]:
        self.asked += texts
        return text_vectors(texts)


class TaskContract(ABC):
    @abstractmethod
    def write_files(self, folder: Path) -> None:
        """Write the task's files, well formed, with at least two rows each."""

    @abstractmethod
    def task(self, folder: Path) -> Task:
        """The task over the files in `folder`."""

    @pytest.fixture
    def written(self, tmp_path: Path) -> Task:
        self.write_files(tmp_path)
        return self.task(tmp_path)

    def test_nothing_is_read_before_it_is_needed(self, tmp_path: Path) -> None:
        task = self.task(tmp_path / "absent")
        assert task.domain in DOMAINS
        assert task.files()

    def test_its_files_are_the_files_it_reads(self, written: Task) -> None:
        assert [path for path in written.files() if not path.is_file()] == []

    @pytest.mark.parametrize("number", [0, -1])
    def test_each_file_it_names_is_missed_by_name(self, written: Task, number: int) -> None:
        path = written.files()[number]
        path.unlink()
        with pytest.raises(EvaluationError, match=path.name):
            written.texts()

    def test_a_missing_column_is_named_with_those_found(self, written: Task) -> None:
        path = written.files()[-1]
        path.write_text("alpha,beta\n1,2\n", encoding="utf-8")
        with pytest.raises(EvaluationError, match=rf"{path.name}: no column .*found: alpha, beta"):
            written.texts()

    def test_it_asks_for_no_text_that_it_does_not_list(self, written: Task) -> None:
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

    def test_an_encoder_that_tells_no_texts_apart_gets_a_finite_score(self, written: Task) -> None:
        figures = written.score(lambda texts, role=TEXT: np.ones((len(texts), 4), dtype=np.float32))
        assert np.isfinite(figures[written.metric])

    def test_zero_vectors_get_a_finite_score(self, written: Task) -> None:
        figures = written.score(lambda texts, role=TEXT: np.zeros((len(texts), 4), dtype=np.float32))
        assert np.isfinite(figures[written.metric])

    def test_the_evaluator_runs_it(self, written: Task) -> None:
        encoder = CountingEncoder()
        report = Evaluator([written])(encoder)
        assert report.tasks[written.name].metric == written.metric
        assert sorted(encoder.asked) == sorted(set(written.texts()))
