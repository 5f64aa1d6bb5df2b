"""Encodings and the check of stored rows."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from teacher_cache.errors import CacheError
from teacher_cache.storage.codec import ENCODINGS, CheckedRows, check_rows, find_encoding, stored_name
from teacher_cache.table.view import create_vectors

FLOAT16 = ENCODINGS["float16"]


def check(*rows: list[float]) -> CheckedRows:
    return check_rows(np.array(rows, dtype=np.float32), FLOAT16)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([1.0, float("nan"), 0.0], "NaN in the teacher output"),
        ([float("nan"), float("inf"), 0.0], "NaN in the teacher output"),
        ([1.0, float("-inf"), 0.0], "infinite value in the teacher output"),
        ([0.0, 0.0, -0.0], "zero vector"),
        ([1.0, 65536.0, 0.0], "overflows float16: largest value 6.554e+04"),
        ([1e-9, 1e-9, 1e-9], "vanishes in float16: largest value 1e-09"),
        # 2e-7 lies between float16's smallest steps of 6e-8: the row turns and grows.
        ([2e-7, 8e-8, 0.0], "float16 would change it too much: 1 - cos"),
    ],
)
def test_a_row_that_the_encoding_cannot_hold_is_quarantined_with_a_reason(row: list[float], reason: str) -> None:
    checked = check([0.6, 0.8, 0.0], row)
    assert list(checked.quarantined) == [1]
    assert checked.quarantined[1].startswith(reason)
    assert np.isnan(checked.cosine_error[1])
    assert checked.cosine_error[0] <= FLOAT16.max_cosine_error


@pytest.mark.parametrize(
    "row",
    [[65504.0, 0.0], [-65504.0, 1.0], [0.6, 0.8], [3.0, -4.0], [1.0, 1e-9], [6.2e-5, 6.2e-5], [2.0**-14, 0]],
)
def test_a_row_within_the_bounds_is_stored(row: list[float]) -> None:
    checked = check(row)
    assert checked.quarantined == {}
    np.testing.assert_allclose(checked.stored[0].astype(np.float32), row, rtol=1e-3, atol=1e-7)


def test_the_reported_error_is_one_minus_the_cosine() -> None:
    # Halves and quarters are exact; 0.1 becomes 0.0999755859375 in float16.
    checked = check([0.5, 0.25], [1.0, 0.1])
    assert checked.cosine_error[0] == 0
    exact, back = float(np.float32(0.1)), 0.0999755859375
    by_hand = (exact - back) ** 2 / (2 * (1 + exact**2) * (1 + back**2))  # sin^2 / 2, for a small angle
    assert checked.cosine_error[1] == pytest.approx(by_hand, rel=1e-6)


@given(
    arrays.arrays(
        np.float32,
        st.tuples(st.integers(1, 5), st.integers(1, 40)),
        elements=st.floats(-1, 1, width=32),
    )
)
def test_the_reported_error_agrees_with_an_independent_computation(vectors: np.ndarray) -> None:
    checked = check_rows(vectors, FLOAT16)
    for row, vector in enumerate(vectors):
        if row in checked.quarantined:
            continue
        a, b = vector.astype(np.longdouble), checked.stored[row].astype(np.longdouble)
        cosine = (a @ b) / np.sqrt((a @ a) * (b @ b))
        assert checked.cosine_error[row] == pytest.approx(float(1 - cosine), abs=1e-15)
        assert checked.cosine_error[row] <= 1e-6
        assert abs(float(np.sqrt((b @ b) / (a @ a))) - 1) <= 1e-3 + 1e-12


@given(
    arrays.arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.integers(1, 6)),
        elements=st.floats(width=32) | st.sampled_from([0.0, 1e-8, 65504.0, 65520.0]),
    )
)
def test_every_row_is_either_quarantined_or_finite_and_close(vectors: np.ndarray) -> None:
    checked = check_rows(vectors, FLOAT16)
    for row, vector in enumerate(vectors):
        error = checked.cosine_error[row]
        assert np.isnan(error) == (row in checked.quarantined)
        if row not in checked.quarantined:
            assert np.isfinite(checked.stored[row]).all()
            assert checked.stored[row].any()
            assert np.linalg.norm(vector.astype(float) - checked.stored[row]) <= 0.0025 * np.linalg.norm(
                vector.astype(float)
            )


def test_rows_of_a_large_batch_keep_their_place() -> None:
    vectors = np.ones((2500, 2), dtype=np.float32)
    vectors[[3, 1024, 2499]] = np.nan
    checked = check_rows(vectors, FLOAT16)
    assert sorted(checked.quarantined) == [3, 1024, 2499]
    assert sorted(np.flatnonzero(np.isnan(checked.cosine_error)).tolist()) == [3, 1024, 2499]


def test_zero_rows_are_checked() -> None:
    assert check_rows(np.empty((0, 4), dtype=np.float32), FLOAT16).quarantined == {}


def test_an_unknown_encoding_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(CacheError, match="'float17'; expected one of float16, float16-raw"):
        find_encoding("float17")


@pytest.mark.parametrize(("old", "name"), [("raw", "float16-raw"), ("compact", "int8")])
def test_older_names_of_encodings_are_accepted_and_written(old: str, name: str) -> None:
    assert find_encoding(old) is find_encoding(name) is ENCODINGS[name]
    assert stored_name(name) == old


def test_int8_keeps_a_scale_for_each_64_numbers() -> None:
    """By hand: max 127 * 0.5 in the first block, 127 * 0.25 in the second, of 70 numbers."""
    vector = np.zeros((1, 70), dtype=np.float32)
    vector[0, [0, 1, 2, 63]] = [63.5, -63.5, 0.6, 0.2]
    vector[0, [64, 69]] = [-31.75, 1.0]
    int8 = ENCODINGS["int8"]
    stored = int8.store(vector)
    assert stored.shape == (1, int8.width(70)) == (1, 74)
    assert stored[0, [0, 1, 2, 63, 64, 69]].tolist() == [127, -127, 1, 0, -127, 4]
    assert stored[:, 70:].copy().view("<f2").tolist() == [[0.5, 0.25]]
    back = np.empty_like(vector)
    int8.restore(stored, back)
    assert back[0, [0, 1, 2, 63, 64, 69]].tolist() == [63.5, -63.5, 0.5, 0.0, -31.75, 1.0]


@pytest.mark.parametrize("name", ENCODINGS)
@given(data=st.data())
def test_every_stored_row_is_within_the_bounds_of_its_encoding(name: str, data: st.DataObject) -> None:
    encoding = ENCODINGS[name]
    numbers = st.floats(-1e5, 1e5, width=32)
    vectors = data.draw(arrays.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 130)), elements=numbers))
    checked = check_rows(vectors, encoding)
    back = np.empty_like(vectors)
    encoding.restore(checked.stored, back)
    for row in set(range(len(vectors))) - checked.quarantined.keys():
        exact, read = vectors[row].astype(np.float64), back[row].astype(np.float64)
        cosine = exact @ read / np.linalg.norm(exact) / np.linalg.norm(read)
        assert 1 - cosine <= encoding.max_cosine_error + 1e-12
        assert abs(np.linalg.norm(read) / np.linalg.norm(exact) - 1) <= encoding.max_norm_error + 1e-12
        assert not encoding.is_blank(checked.stored[row : row + 1])[0]
    assert all(np.isnan(checked.cosine_error[row]) for row in checked.quarantined)


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([1.0, np.nan], "NaN in the teacher output"),
        ([1.0, -np.inf], "infinite value in the teacher output"),
        ([0.0, 0.0], "zero vector"),
    ],
)
def test_no_encoding_stores_nan_infinity_or_zero_vectors(name: str, row: list[float], reason: str) -> None:
    assert check_rows(np.array([row], dtype=np.float32), ENCODINGS[name]).quarantined == {0: reason}


def test_int8_quarantines_scales_beyond_float16() -> None:
    int8 = ENCODINGS["int8"]
    quarantined = check_rows(np.array([[9e6, 1.0], [1e-9, 1e-9]], dtype=np.float32), int8).quarantined
    assert quarantined[0].startswith("overflows int8")
    assert quarantined[1].startswith("vanishes in int8")


def test_float32_changes_nothing() -> None:
    vectors = np.random.default_rng(0).normal(size=(5, 9)).astype(np.float32) * 1e-30
    checked = check_rows(vectors, ENCODINGS["float32"])
    np.testing.assert_array_equal(checked.stored, vectors)
    assert checked.quarantined == {}
    assert (checked.cosine_error == 0).all()


@pytest.mark.parametrize("name", ENCODINGS)
def test_a_row_that_was_never_written_is_blank(name: str, tmp_path: Path) -> None:
    encoding = ENCODINGS[name]
    array = create_vectors(tmp_path / "a", encoding, 5, 8)
    assert encoding.is_blank(array.codec.blank(3)).all()
