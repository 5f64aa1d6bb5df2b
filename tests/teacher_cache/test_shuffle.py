"""Windowed shuffle: every record once per epoch, fully shuffled inside a window, in constant memory."""

import dataclasses
import tracemalloc
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teacher_cache.reading.shuffle import BLOCK, BlockPermutation, WindowedShuffle

Numbers = npt.NDArray[np.int64]


def epoch_of(order: WindowedShuffle, epoch: int) -> Numbers:
    """The records of an epoch of one rank, in order."""
    return np.concatenate(
        [order.records_of(epoch, window)[order.permutation(epoch, window)] for window in range(order.windows)]
    )


@st.composite
def orders(draw: st.DrawFn) -> WindowedShuffle:
    batch = draw(st.integers(1, 40))
    return WindowedShuffle(
        records=draw(st.integers(1, 3000)),
        batch=batch,
        window=draw(st.integers(batch, 600)),
        seed=draw(st.integers(0, 3)),
    )


def ranks_of(order: WindowedShuffle, ranks: int) -> list[WindowedShuffle]:
    return [dataclasses.replace(order, rank=rank, ranks=ranks) for rank in range(ranks)]


@given(st.integers(1, 5000), st.integers(0, 2**32))
def test_a_block_permutation_is_a_bijection(size: int, seed: int) -> None:
    permuted = BlockPermutation(size, np.random.default_rng(seed))(np.arange(size))
    assert np.array_equal(np.sort(permuted), np.arange(size))


def test_a_block_permutation_of_a_range_equals_that_range_of_the_whole() -> None:
    permutation = BlockPermutation(1000, np.random.default_rng(0))
    assert np.array_equal(permutation(np.arange(1000))[300:317], permutation(np.arange(300, 317)))


def test_a_block_permutation_separates_neighbors_and_is_uniform() -> None:
    size, seeds = 64, 2000
    places = np.array([BlockPermutation(size, np.random.default_rng(seed))(np.arange(size)) for seed in range(seeds)])
    # Images of number 0 over many seeds: a chi-square of 63 degrees of freedom exceeds 120 with probability 10^-5.
    counts = np.bincount(places[:, 0], minlength=size)
    assert ((counts - seeds / size) ** 2 / (seeds / size)).sum() < 120
    assert abs((np.diff(places, axis=1) == 1).mean() - 1 / size) < 0.005


@settings(deadline=None)
@given(orders(), st.integers(0, 3))
def test_every_record_appears_exactly_once_per_epoch(order: WindowedShuffle, epoch: int) -> None:
    assert np.array_equal(np.sort(epoch_of(order, epoch)), np.arange(order.records))


@settings(deadline=None)
@given(orders(), st.integers(2, 5), st.integers(0, 2))
def test_ranks_read_disjoint_parts_of_equal_size_and_omit_fewer_records_than_ranks(
    order: WindowedShuffle, ranks: int, epoch: int
) -> None:
    if order.records < ranks:
        return
    parts = [epoch_of(part, epoch) for part in ranks_of(order, ranks)]
    seen = np.concatenate(parts)
    assert {len(part) for part in parts} == {order.records // ranks}
    assert len(np.unique(seen)) == len(seen)
    assert order.records - len(seen) < ranks
    assert 0 <= seen.min() <= seen.max() < order.records


@settings(deadline=None)
@given(orders())
def test_windows_split_an_epoch_at_batch_boundaries(order: WindowedShuffle) -> None:
    bounds = [order.bounds(window) for window in range(order.windows)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == len(order)
    assert [stop for _, stop in bounds[:-1]] == [start for start, _ in bounds[1:]]
    assert all(start % order.batch == 0 for start, _ in bounds)
    assert all(0 < stop - start < order.window + order.batch for start, stop in bounds)
    for window, (start, stop) in enumerate(bounds):
        assert order.window_of(start) == order.window_of(stop - 1) == window


@settings(deadline=None)
@given(orders(), st.integers(0, 3))
def test_the_order_depends_only_on_seed_and_epoch(order: WindowedShuffle, epoch: int) -> None:
    assert np.array_equal(epoch_of(order, epoch), epoch_of(dataclasses.replace(order), epoch))


def test_the_order_changes_with_epoch_and_seed() -> None:
    order = WindowedShuffle(3000, 8, window=512)
    assert not np.array_equal(epoch_of(order, 0), epoch_of(order, 1))
    assert not np.array_equal(epoch_of(order, 0), epoch_of(dataclasses.replace(order, seed=1), 0))


def test_the_omitted_records_change_with_the_epoch() -> None:
    order = WindowedShuffle(10 * BLOCK + 5, 8, window=128)
    omitted = {
        frozenset(set(range(order.records)) - set(np.concatenate([epoch_of(part, epoch) for part in parts]).tolist()))
        for parts in [ranks_of(order, 7)]
        for epoch in range(6)
    }
    assert len(omitted) > 3


def test_a_window_reads_whole_blocks_and_a_batch_mixes_them() -> None:
    order = WindowedShuffle(64 * BLOCK, 32, window=16 * BLOCK)
    for window in range(order.windows):
        records = order.records_of(0, window)
        assert len(np.unique(records // BLOCK)) == 16
        first = records[order.permutation(0, window)][:32]
        assert len(np.unique(first // BLOCK)) > 8


@pytest.mark.parametrize(("window", "bound"), [(16_384, 1.4), (65_536, 1.1)])
def test_a_batch_mixes_sources_almost_as_well_as_a_full_permutation(window: int, bound: float) -> None:
    """100 sources of 10,000 consecutive records: the chance that two records of a batch share one."""
    order = WindowedShuffle(1_000_000, 256, window=window)
    sources = [
        (order.records_of(0, number)[order.permutation(0, number)] // 10_000)[: len(order) // 256 * 256]
        for number in range(0, order.windows, max(1, order.windows // 12))
    ]
    same = pairs = 0.0
    for window_sources in sources:
        for start in range(0, len(window_sources) - 255, 256):
            counts = np.bincount(window_sources[start : start + 256], minlength=100)
            same += float((counts * (counts - 1)).sum())
            pairs += 256 * 255
    assert same / pairs / (9_999 / 999_999) <= bound


def test_memory_does_not_depend_on_the_number_of_records() -> None:
    peaks = []
    for records in (10**6, 10**12):
        order = WindowedShuffle(records, 32, window=4096)
        tracemalloc.start()
        order.records_of(0, order.windows // 2)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


@pytest.mark.parametrize(
    "wrong", [{"records": 0}, {"batch": 0}, {"window": 7}, {"rank": 2, "ranks": 2}, {"rank": -1}, {"ranks": 101}]
)
def test_invalid_numbers_are_refused(wrong: dict[str, int]) -> None:
    options: dict[str, Any] = {"records": 100, "batch": 8, "window": 64, **wrong}
    with pytest.raises(ValueError, match="expected 1 <= batch <= window"):
        WindowedShuffle(**options)


def test_a_position_outside_of_the_epoch_is_refused() -> None:
    with pytest.raises(IndexError, match="position 100 is outside an epoch of 100 records"):
        WindowedShuffle(100, 8, window=64).window_of(100)
