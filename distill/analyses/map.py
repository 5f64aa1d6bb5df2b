"""Map: a run's teacher and student vectors of the same texts as points of one plane.

Both models' vectors are scaled to length 1. A student in the teacher's space is drawn with its own vectors, or with
those that its learned projection maps there. For any other student, the narrower vectors are padded with zeros and the
student's are rotated by the orthogonal matrix that fits its vectors of other texts of the corpus to the teacher's:

    R = argmin over R^T R = I of ||S R - T||_F      (orthogonal Procrustes, Schonemann 1966)

A rotation changes no cosine between two of the student's vectors. It is fitted to other texts than those on the map,
because with at most as many texts as dimensions it fits even unrelated vectors.

The plane is t-SNE's (van der Maaten and Hinton 2008) of all points, initialized with their first two principal
components and seeded, or those components themselves. t-SNE preserves neighborhoods, not large distances. The result
therefore also has distances in the full space: of a text's two vectors, of vectors of different texts, and how often a
text's own vector is the nearest.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from distill.analyses.base import LARGEST_SEED, Analysis, choice_option, int_option
from distill.analyses.trained_run import TrainedRun, evenly_spread
from distill.errors import EvaluationError
from distill.evaluation.base import unit_rows
from teacher_cache.errors import optional_import

METHODS = ("tsne", "pca")
FEWEST_TEXTS = 4
PERPLEXITY = 30.0
# Characters of a text that are saved with its points.
EXCERPT = 200

Matrix = npt.NDArray[np.float64]


class Map(Analysis):
    """Projects teacher and student vectors onto a plane."""

    name: ClassVar[str] = "map"

    def __init__(
        self, *, method: str = "tsne", texts: int = 256, fitted_on: int = 1024, seed: int = 0, **options: Any
    ) -> None:
        """
        Args:
            texts: at most this many are drawn, at least 4.
            fitted_on: at most this many other texts that a rotation is fitted to, if one is needed.
        """
        super().__init__(**options)
        self.method: str = choice_option("map.method", method, METHODS)
        self.texts = int_option("map.texts", texts, FEWEST_TEXTS)
        self.fitted_on = int_option("map.fitted_on", fitted_on, 1)
        self.seed = int_option("map.seed", seed, 0, LARGEST_SEED)

    def __call__(self, run: TrainedRun) -> dict[str, Any]:
        """`points` (x, y, of, text), `texts`, whether they were `held_out`, and the distances."""
        model = run.load()
        projection = model.objective.projection()
        rows, held_out = run.sample_rows(self.texts)
        texts = run.cache.texts(rows)
        self.progress("encoding texts", 0, len(texts), "")
        student = unit_rows(model.student.encode(texts, projection=projection))
        teacher = unit_rows(run.space.gather(rows))
        fitted = 0
        if projection is not None:
            fit = "its learned projection"
        elif model.objective.in_teacher_space:
            fit = "nothing: it was trained there"
        else:
            others = self._others(run, rows)
            fitted = len(others)
            fit = f"a rotation fitted to {fitted} other texts"
            own = unit_rows(model.student.encode(run.cache.texts(others)))
            rotation = procrustes(own, unit_rows(run.space.gather(others)))
            student, teacher = rotate(student, rotation), pad(teacher, len(rotation))
        self.progress(f"projecting with {self.method}", 0, 0, "")
        plane = project(np.concatenate([teacher, student]), self.method, self.seed)
        return {
            "method": self.method,
            "brought_by": fit,
            "fitted_on": fitted,
            "held_out": held_out,
            **distances(student, teacher),
            "points": [
                {"x": x, "y": y, "of": "teacher" if place < len(rows) else "student", "text": place % len(rows)}
                for place, (x, y) in enumerate(np.round(plane, 4).tolist())
            ],
            "texts": [text[:EXCERPT] for text in texts],
        }

    @staticmethod
    def conclusion(result: Mapping[str, Any]) -> str:
        return (
            f"The distance of student and teacher vectors is {result['same']:.2f} for the same text and "
            f"{result['random']:.2f} for different texts (unit vectors; aligned by {result['brought_by']}); of "
            f"{len(result['texts'])} {'held-out' if result['held_out'] else 'training'} texts "
            f"{100 * result['nearest']:.0f} % are nearest to their own teacher vector."
        )

    def _others(self, run: TrainedRun, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Rows of the corpus to fit a rotation to: none of the drawn ones."""
        others = np.setdiff1d(run.corpus_rows(), rows)
        if not len(others):
            raise EvaluationError(
                f"the student of {run.folder} is not in its teacher's space, and every text of the corpus is drawn: "
                "none is left to fit a rotation to; set map.texts lower"
            )
        return evenly_spread(others, self.fitted_on)


def pad(vectors: Matrix, dims: int) -> Matrix:
    """`(n, dims)`: the `(n, d)` vectors padded with zeros; unchanged if d >= dims."""
    return np.pad(vectors, ((0, 0), (0, max(0, dims - vectors.shape[1]))))


def procrustes(student: Matrix, teacher: Matrix) -> Matrix:
    """`(d, d)` orthogonal matrix that rotates `(n, d_s)` vectors onto `(n, d_T)` vectors; d is the larger width."""
    with optional_import("fitting a rotation"):
        from scipy.linalg import orthogonal_procrustes
    dims = max(student.shape[1], teacher.shape[1])
    rotation: Matrix = orthogonal_procrustes(pad(student, dims), pad(teacher, dims))[0]
    return rotation


def rotate(vectors: Matrix, rotation: Matrix) -> Matrix:
    """`(n, d)`: the vectors, padded to the rotation's width d, times it."""
    return pad(vectors, len(rotation)) @ rotation


def distances(student: Matrix, teacher: Matrix) -> dict[str, float]:
    """Distances between `(n, d)` unit vectors of student and teacher, of the same n >= 4 texts.

    Returns:
        "same": mean Euclidean distance between a text's two vectors. "random": between one text's student vector and
        another's teacher vector, mean over all n (n - 1). "nearest": share of texts whose student vector is nearer to
        their own teacher vector than to any other's.
    """
    count = len(student)
    if count < FEWEST_TEXTS:
        raise EvaluationError(f"a map is drawn of at least {FEWEST_TEXTS} texts; there are {count}")
    cosines = student @ teacher.T
    apart = np.sqrt(np.maximum(2 - 2 * cosines, 0))
    own = np.diag(apart)
    return {
        "same": round(float(own.mean()), 6),
        "random": round(float((apart.sum() - own.sum()) / (count * (count - 1))), 6),
        "nearest": float(np.mean(np.argmax(cosines, axis=1) == np.arange(count))),
    }


def project(points: Matrix, method: str, seed: int = 0) -> Matrix:
    """`(m, 2)` coordinates of m >= 8 points on one plane; the same for the same seed."""
    with optional_import("a map"):
        from sklearn.decomposition import PCA
        from sklearn.manifold import TSNE
    if method == "pca":
        plane: Matrix = PCA(n_components=2, svd_solver="full").fit_transform(points)
        return plane
    # There must be several times as many points as the perplexity.
    perplexity = min(PERPLEXITY, (len(points) - 1) / 3)
    plane = TSNE(perplexity=perplexity, init="pca", random_state=seed, n_jobs=1).fit_transform(
        points.astype(np.float32)
    )
    return plane.astype(np.float64)
