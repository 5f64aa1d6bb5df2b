from pathlib import Path

import numpy as np
import pytest

from teacher_cache.errors import CacheError, MissingRows
from teacher_cache.reading.shuffle import WindowedShuffle
from teacher_cache.reading.stream import WindowedReader
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.joint import JointSpace
from teacher_cache.teachers.base import TeacherOptions
from tests.teacher_cache.small_caches import built

TEXTS = [f"sentence number {number}" for number in range(20)]
LONG = TeacherOptions(model="toy", dims=12, normalize=False)


@pytest.fixture
def cache(tmp_path: Path) -> TeacherCache:
    built(tmp_path, TEXTS)
    built(tmp_path, TEXTS, teacher=LONG)
    return TeacherCache.open(tmp_path / "cache")


def joint_of(cache: TeacherCache) -> JointSpace:
    return JointSpace([cache.space(slug) for slug in sorted(cache.space_records())])


def test_a_joint_cosine_is_the_mean_of_the_cosines_of_the_spaces(cache: TeacherCache) -> None:
    joint = joint_of(cache)
    rows = np.array([7, 0, 19, 3, 7])
    vectors = joint.gather(rows)
    assert vectors.shape == (5, joint.dims)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(5), rel=1e-6)
    cosines = []
    for space in joint.spaces:
        said = space.gather(rows)
        said /= np.linalg.norm(said, axis=1, keepdims=True)
        cosines.append(said @ said.T)
    assert vectors @ vectors.T == pytest.approx(np.mean(cosines, axis=0), abs=1e-6)


def test_a_joint_space_is_streamed_like_any_other(cache: TeacherCache) -> None:
    joint = joint_of(cache)
    manifest = cache.corpus("corpus")
    reader = WindowedReader(cache, joint, WindowedShuffle(len(manifest), 3, window=8, seed=1), manifest.rows_of)
    seen = []
    for batch in reader.epoch(0):
        assert np.array_equal(batch.vectors, joint.gather(batch.rows))
        assert np.array_equal(manifest.rows_of(batch.records)[:, 0], batch.rows)
        seen += batch.rows.tolist()
    reader.close()
    assert sorted(seen) == list(range(20))


def test_a_row_that_one_space_lacks_is_not_present(tmp_path: Path) -> None:
    built(tmp_path, TEXTS)
    built(tmp_path, TEXTS[:5], teacher=LONG, name="few")
    with TeacherCache.open(tmp_path / "cache") as cache:
        joint = joint_of(cache)
        assert joint.present(np.arange(20)).tolist() == [True] * 5 + [False] * 15
        with pytest.raises(MissingRows):
            joint.gather(np.array([4, 5]))


def test_one_space_or_one_twice_is_refused(cache: TeacherCache) -> None:
    space = cache.space(min(cache.space_records()))
    for spaces in ([space], [space, space]):
        with pytest.raises(CacheError, match="two or more different spaces"):
            JointSpace(spaces)
