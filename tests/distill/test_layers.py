"""Layers: similarity to each other and to the teacher, and how much training changed them."""

from pathlib import Path

import numpy as np
import pytest
import torch

from distill.analyses.layers import Layers, centered_cosines, cka, compare_layers
from distill.analyses.trained_run import TrainedRun
from distill.errors import ConfigError, EvaluationError
from distill.runs.run import run
from distill.student.student import Student
from tests.distill.tiny_runs import tiny_config

RANDOM = np.random.default_rng(3)


def states(layers: int = 3, texts: int = 12, dims: int = 5, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(layers, texts, dims))


def unbiased_hsic(first: np.ndarray, second: np.ndarray) -> float:
    """Song et al. 2012, eq. 5."""
    n = len(first)
    k, m = first - np.diag(np.diag(first)), second - np.diag(np.diag(second))
    one = np.ones(n)
    product = (
        np.trace(k @ m) + (one @ k @ one) * (one @ m @ one) / ((n - 1) * (n - 2)) - 2 / (n - 2) * one @ k @ m @ one
    )
    return float(product / (n * (n - 3)))


def cosines(vectors: np.ndarray) -> np.ndarray:
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return units @ units.T


def test_cka_uses_the_unbiased_hsic_of_the_cosines() -> None:
    first, second = states(1)[0], states(1, dims=7, seed=1)[0]
    a, b = cosines(first), cosines(second)
    expected = unbiased_hsic(a, b) / np.sqrt(unbiased_hsic(a, a) * unbiased_hsic(b, b))
    found = cka(centered_cosines(first)[None], centered_cosines(second)[None])
    assert found.shape == (1, 1)
    assert found[0, 0] == pytest.approx(expected, abs=1e-12)


def test_rows_of_centered_cosines_sum_to_0_and_the_diagonal_is_0() -> None:
    centered = centered_cosines(states(1)[0])
    assert np.abs(centered.sum(0)).max() < 1e-12
    assert np.abs(np.diag(centered)).max() == 0
    assert np.allclose(centered, centered.T)


def test_cka_is_invariant_to_rotation_and_scale() -> None:
    layer = states(1)[0]
    rotation = np.linalg.qr(RANDOM.normal(size=(5, 5)))[0]
    lengths = RANDOM.uniform(0.5, 2, size=(12, 1))
    found = cka(centered_cosines(layer)[None], centered_cosines(lengths * layer @ rotation)[None])
    assert found[0, 0] == pytest.approx(1)


def test_cka_of_unrelated_states_is_near_0_also_for_few_texts() -> None:
    """20 texts in 400 dimensions, for which biased CKA is large."""
    found = [
        cka(
            centered_cosines(RANDOM.normal(size=(20, 400)))[None], centered_cosines(RANDOM.normal(size=(20, 400)))[None]
        )
        for _ in range(50)
    ]
    assert abs(np.mean(found)) < 0.03


def test_cka_ignores_the_common_direction_of_a_layer() -> None:
    common = 20 * np.ones(30)
    first, second = (RANDOM.normal(size=(200, 30)) + common for _ in range(2))
    plain = np.vdot(cosines(first), cosines(second)) / np.linalg.norm(cosines(first)) / np.linalg.norm(cosines(second))
    assert plain > 0.99
    assert abs(cka(centered_cosines(first)[None], centered_cosines(second)[None])[0, 0]) < 0.1


def test_an_unchanged_student_has_no_drift() -> None:
    found = compare_layers(states(), states(), states(1)[0])
    assert found["drift"] == [0, 0, 0]
    assert found["kept"] == [1, 1, 1]
    assert found["before"] == found["after"]
    assert found["layers"] == ["embeddings", "1", "2"]
    assert np.allclose(np.diag(found["before"]["between"]), 1)
    assert found["before"]["to_teacher"][0] == 1


def test_drift_is_1_minus_the_cosine_of_the_same_text() -> None:
    before = np.zeros((1, 4, 2))
    before[0] = [[1, 0], [0, 2], [1, 1], [3, 1]]
    after = before.copy()
    after[0, 0], after[0, 1] = [0, 5], [0, -1]  # a right angle and a half turn
    assert compare_layers(before, after, before[0])["drift"] == [(1 + 2 + 0 + 0) / 4]


def test_a_rotated_layer_has_drift_and_similarity_1() -> None:
    before = states(1)
    turned = before @ np.linalg.qr(RANDOM.normal(size=(5, 5)))[0]
    found = compare_layers(before, turned, states(1, seed=9)[0])
    assert found["drift"][0] > 0.1
    assert found["kept"] == [1]


def test_gaps_equal_the_unweighted_layer_term_of_talas() -> None:
    layers = states(2)
    expected = np.mean((cosines(layers[1]) - cosines(layers[0])) ** 2)
    assert compare_layers(layers, layers, layers[0])["after"]["gaps"] == [pytest.approx(expected, abs=1e-6)]


def test_a_constant_layer_is_named_and_has_similarity_0() -> None:
    layers = states()
    layers[0] = RANDOM.normal(size=5)
    found = compare_layers(layers, layers, layers[2])
    assert found["before"]["constant"] == ["embeddings"]
    assert found["before"]["between"][0] == [0, 0, 0]
    assert found["before"]["to_teacher"] == [0, found["before"]["between"][1][2], 1]


def test_fewer_than_four_texts_are_an_error() -> None:
    with pytest.raises(EvaluationError, match="at least 4 texts; there are 3"):
        compare_layers(states(texts=3), states(texts=3), states(1, texts=3)[0])


def test_pooled_layers_do_not_depend_on_the_batch(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    student = Student.load(tiny_config(toy_cache, tiny_student, tmp_path).student).eval()
    texts = ["the cat sat on the mat and ran", "sea", "a river ran through the old town"]
    together = student.encode_layers(texts)
    assert together.shape == (student.shape.layers + 1, 3, student.shape.dim)
    assert not student.training
    for place, text in enumerate(texts):
        alone = student.encode_layers([text])
        assert np.abs(together[:, place] - alone[:, 0]).max() < 1e-5
    assert np.abs(together[-1] - student.encode(texts)).max() < 1e-5


def test_the_student_before_and_after_training_is_compared_on_held_out_texts(
    toy_cache: Path, tiny_student: Path, tmp_path: Path
) -> None:
    config = tiny_config(
        toy_cache, tiny_student, tmp_path / "run", "corpus=sentences", "objective.name=leaf", "training.save_steps=12"
    )
    run(config)
    torch.manual_seed(7)
    with TrainedRun.open(tmp_path / "run") as trained:
        result = Layers(texts=30)(trained)
        rows, held_out = trained.sample_rows(30)
        assert held_out
        assert set(rows) <= set(trained.held_out_rows())
        texts = trained.cache.texts(rows)
        before, after = trained.initial().student.encode(texts), trained.load().student.encode(texts)
        teacher = trained.space.gather(rows)
        again = Layers(texts=30)(trained)
    assert result == again
    assert result["texts"] == len(rows) == 30
    expected = 1 - np.diag(cosines(np.concatenate([before, after]))[:30, 30:]).mean()
    assert expected > 0.001
    assert result["drift"][-1] == pytest.approx(expected, abs=1e-5)
    gram, theirs = cosines(after), cosines(teacher)
    to_teacher = unbiased_hsic(gram, theirs) / np.sqrt(unbiased_hsic(gram, gram) * unbiased_hsic(theirs, theirs))
    assert result["after"]["to_teacher"][-1] == pytest.approx(to_teacher, abs=1e-4)
    sentence = Layers.conclusion(result)
    assert f"drift {max(result['drift']):.3f}" in sentence
    assert "30 held-out texts" in sentence


def test_without_held_out_texts_the_corpus_is_used(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    run(tiny_config(toy_cache, tiny_student, tmp_path / "run", "training.max_steps=1", "training.save_steps=1"))
    with TrainedRun.open(tmp_path / "run") as trained:
        result = Layers(texts=20)(trained)
    assert result["texts"] == 20
    assert not result["held_out"]
    assert "20 training texts" in Layers.conclusion(result)


@pytest.mark.parametrize("texts", ["many", 3, True])
def test_an_invalid_number_of_texts_is_an_error(texts: object) -> None:
    with pytest.raises(ConfigError, match=r"layers\.texts is .*of at least 4"):
        Layers(texts=texts)  # type: ignore[arg-type]
