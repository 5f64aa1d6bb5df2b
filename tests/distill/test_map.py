"""The map of teacher and student vectors, and their distances."""

from pathlib import Path

import numpy as np
import pytest
from scipy.spatial.distance import cdist

from distill.analyses.map import Map, distances, pad, procrustes, project, rotate
from distill.analyses.trained_run import TrainedRun
from distill.errors import ConfigError, EvaluationError
from distill.runs.run import run
from tests.distill.tiny_runs import tiny_config

RANDOM = np.random.default_rng(5)


def units(count: int, dims: int) -> np.ndarray:
    vectors = RANDOM.normal(size=(count, dims))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_procrustes_reverts_a_rotation() -> None:
    teacher = units(30, 6)
    student = teacher @ np.linalg.qr(RANDOM.normal(size=(6, 6)))[0]
    rotation = procrustes(student, teacher)
    assert np.allclose(rotation @ rotation.T, np.eye(6))
    assert np.allclose(rotate(student, rotation), teacher)


def test_the_rotation_is_the_polar_factor_of_the_products() -> None:
    student, teacher = units(30, 6), units(30, 6)
    left, _, right = np.linalg.svd(student.T @ teacher)
    assert np.allclose(procrustes(student, teacher), left @ right)


@pytest.mark.parametrize(("mine", "theirs"), [(4, 9), (9, 4)])
def test_the_narrower_vectors_are_padded_and_no_cosine_changes(mine: int, theirs: int) -> None:
    student, teacher = units(30, mine), units(30, theirs)
    rotation = procrustes(student, teacher)
    assert rotation.shape == (9, 9)
    there = rotate(student, rotation)
    assert np.allclose(there @ there.T, student @ student.T)
    wide = pad(teacher, 9)
    assert wide.shape == (30, 9)
    assert np.allclose(wide @ wide.T, teacher @ teacher.T)


def test_distances_by_hand() -> None:
    teacher = np.eye(4)
    student = np.eye(4)[[0, 1, 3, 2]]  # two texts are correct, two are swapped
    found = distances(student, teacher)
    root = np.sqrt(2)
    assert found["same"] == pytest.approx((0 + 0 + root + root) / 4, abs=1e-6)
    assert found["random"] == pytest.approx(10 * root / 12, abs=1e-6)
    assert found["nearest"] == 0.5


def test_distances_equal_scipys() -> None:
    student, teacher = units(20, 6), units(20, 6)
    apart = cdist(student, teacher)
    found = distances(student, teacher)
    assert found["same"] == pytest.approx(np.diag(apart).mean(), abs=1e-6)
    assert found["random"] == pytest.approx(apart[~np.eye(20, dtype=bool)].mean(), abs=1e-6)
    assert found["nearest"] == (apart.argmin(1) == np.arange(20)).mean()


def test_pca_preserves_distances_of_points_in_a_plane() -> None:
    flat = RANDOM.normal(size=(15, 2)) @ np.linalg.qr(RANDOM.normal(size=(7, 7)))[0][:2]
    assert np.allclose(cdist(*[project(flat, "pca")] * 2), cdist(flat, flat))


def test_tsne_is_reproducible_and_preserves_clusters() -> None:
    centres = 10 * np.eye(3, 8)
    points = np.repeat(centres, 8, axis=0) + RANDOM.normal(scale=0.1, size=(24, 8))
    plane = project(points, "tsne", 1)
    assert plane.shape == (24, 2)
    assert np.array_equal(plane, project(points, "tsne", 1))
    apart = cdist(plane, plane)
    np.fill_diagonal(apart, np.inf)
    assert (apart.argmin(1) // 8 == np.arange(24) // 8).all()


def test_an_unknown_method_and_too_few_texts_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"map\.method is 'umap'; expected one of tsne, pca"):
        Map(method="umap")
    for option, value in {"texts": -3, "fitted_on": 0, "seed": "x", "method": ["tsne"]}.items():
        with pytest.raises(ConfigError, match=rf"map\.{option} is "):
            Map(**{option: value})  # type: ignore[arg-type]
    with pytest.raises(EvaluationError, match="at least 4 texts; there are 3"):
        distances(units(3, 2), units(3, 2))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, toy_cache: Path, tiny_student: Path) -> Path:
    """Runs "leaf", whose projection maps the student to the teacher's space, and "rkd", which has none."""
    folder = tmp_path_factory.mktemp("mapped")
    for name in ("leaf", "rkd"):
        run(tiny_config(toy_cache, tiny_student, folder / name, "corpus=sentences", f"objective.name={name}"))
    return folder


def test_a_student_with_a_projection_is_drawn_projected(finished: Path) -> None:
    with TrainedRun.open(finished / "leaf") as trained:
        result = Map(method="pca")(trained)
        model, rows = trained.load(), trained.held_out_rows()
        texts = trained.cache.texts(rows)
        vectors = model.student.encode(texts) @ model.objective.out.weight.detach().numpy().T
        sides = [side / np.linalg.norm(side, axis=1, keepdims=True) for side in (trained.space.gather(rows), vectors)]
    assert result["texts"] == texts
    assert result["same"] == pytest.approx(np.linalg.norm(sides[1] - sides[0], axis=1).mean(), abs=1e-5)
    assert [(point["of"], point["text"]) for point in result["points"]] == [
        (of, text) for of in ("teacher", "student") for text in range(len(texts))
    ]
    plane = np.array([[point["x"], point["y"]] for point in result["points"]])
    centred = np.concatenate(sides) - np.concatenate(sides).mean(0)
    assert np.allclose(plane.std(0) * np.sqrt(len(plane)), np.linalg.svd(centred)[1][:2], atol=1e-2)
    assert result["fitted_on"] == 0
    assert result["held_out"]
    assert f"of {len(texts)} held-out texts" in Map.conclusion(result)
    assert "its learned projection" in Map.conclusion(result)


def test_a_student_in_its_own_space_is_rotated_by_a_fit_to_other_texts(finished: Path) -> None:
    with TrainedRun.open(finished / "rkd") as trained:
        result = Map(method="pca", texts=20, fitted_on=100)(trained)
        drawn = set(result["texts"])
        rows = Map(fitted_on=100)._others(trained, trained.cache.lookup(result["texts"]))
        assert not drawn & set(trained.cache.texts(rows))
        student = trained.load().student
        sides = [student.encode(trained.cache.texts(rows)), trained.space.gather(rows)]
        rotation = procrustes(*(side / np.linalg.norm(side, axis=1, keepdims=True) for side in sides))
        own = student.encode(result["texts"])
        there = rotate(own / np.linalg.norm(own, axis=1, keepdims=True), rotation)
        teacher = pad(trained.space.gather(trained.cache.lookup(result["texts"])), len(rotation))
    assert result["fitted_on"] == 100
    # Rounding errors rotate the few directions in which the tiny models hardly agree.
    assert result["same"] == pytest.approx(np.linalg.norm(there - teacher, axis=1).mean(), abs=1e-3)
    assert "a rotation fitted to 100 other texts" in Map.conclusion(result)


def test_a_map_of_the_whole_corpus_has_no_texts_to_fit_to(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    run(tiny_config(toy_cache, tiny_student, tmp_path / "run", "objective.name=rkd", "training.max_steps=1"))
    with (
        TrainedRun.open(tmp_path / "run") as trained,
        pytest.raises(EvaluationError, match=r"none is left to fit a rotation to; set map\.texts lower"),
    ):
        Map()(trained)


def test_a_map_of_training_texts_is_marked(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    run(tiny_config(toy_cache, tiny_student, tmp_path / "run", "objective.name=leaf", "training.max_steps=1"))
    with TrainedRun.open(tmp_path / "run") as trained:
        result = Map(method="pca", texts=20)(trained)
    assert not result["held_out"]
    assert "of 20 training texts" in Map.conclusion(result)


def test_maps_are_reproducible(finished: Path) -> None:
    with TrainedRun.open(finished / "leaf") as trained:
        assert Map(texts=12)(trained) == Map(texts=12)(trained)
