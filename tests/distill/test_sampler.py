from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.data.sampler import BLOCK, StreamingSampler


@st.composite
def settings(draw: st.DrawFn) -> dict[str, Any]:
    batch = draw(st.integers(1, 40))
    return {
        "records": draw(st.integers(1, 500)),
        "batch": batch,
        "window": draw(st.integers(batch, 400)),
        "seed": draw(st.integers(0, 3)),
        "drop_last": draw(st.booleans()),
    }


@given(settings())
def test_every_record_comes_exactly_once_an_epoch(options: dict[str, Any]) -> None:
    sampler = StreamingSampler(**options)
    batches = list(sampler)
    seen = list(chain.from_iterable(batches))
    records, batch = options["records"], options["batch"]
    kept = records // batch * batch if options["drop_last"] else records
    assert len(batches) == len(sampler)
    assert len(seen) == len(set(seen)) == kept
    assert set(seen) <= set(range(records))
    assert all(len(numbers) == batch for numbers in batches[:-1])


@given(settings(), st.integers(2, 5))
def test_ranks_share_one_order_in_equal_and_disjoint_parts(options: dict[str, Any], ranks: int) -> None:
    parts = [list(StreamingSampler(**options, rank=rank, ranks=ranks)) for rank in range(ranks)]
    assert len({len(part) for part in parts}) == 1
    assert [len(StreamingSampler(**options, rank=rank, ranks=ranks)) for rank in range(ranks)] == [
        len(part) for part in parts
    ]
    together = [batch for turn in zip(*parts, strict=True) for batch in turn]
    alone = list(StreamingSampler(**options))
    assert together == alone[: len(together)]
    assert len(alone) - len(together) < ranks


@given(settings(), st.integers(0, 5))
def test_the_order_is_a_function_of_seed_and_epoch_alone(options: dict[str, Any], epoch: int) -> None:
    first, second = StreamingSampler(**options), StreamingSampler(**options)
    list(first)  # an epoch before leaves nothing behind
    first.set_epoch(epoch)
    second.set_epoch(epoch)
    order = list(first)
    assert order == list(second)
    assert order == list(first)


def test_another_epoch_and_another_seed_have_another_order() -> None:
    sampler = StreamingSampler(300, 8, window=64)
    order = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != order
    assert list(StreamingSampler(300, 8, window=64, seed=1)) != order


@given(settings(), st.integers(1, 3), st.data())
def test_a_loaded_state_goes_on_with_the_next_batch(options: dict[str, Any], ranks: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, ranks - 1))
    epoch = data.draw(st.integers(0, 3))
    running = StreamingSampler(**options, rank=rank, ranks=ranks)
    running.set_epoch(epoch)
    whole = list(running)
    taken = data.draw(st.integers(0, len(running)))
    batches = iter(running)
    begun = [next(batches) for _ in range(taken)]

    resumed = StreamingSampler(**options, rank=rank, ranks=ranks)
    resumed.load_state_dict(running.state_dict() if taken else {"epoch": epoch, "position": 0})
    assert resumed.state_dict() == {"epoch": epoch, "position": taken}
    resumed.set_epoch(epoch)  # what a training loop says at the start of an epoch
    assert begun + list(resumed) == whole
    assert list(resumed) == whole  # once is enough: the next pass is a whole one


def test_a_new_epoch_begins_at_its_start_whatever_was_loaded() -> None:
    sampler = StreamingSampler(100, 10, window=64)
    sampler.load_state_dict({"epoch": 1, "position": 4})
    sampler.set_epoch(2)
    assert len(list(sampler)) == 10


def test_a_batch_mixes_records_from_blocks_all_over_a_wide_window() -> None:
    sampler = StreamingSampler(64 * BLOCK, 32, window=64 * BLOCK)
    blocks = [len({number // BLOCK for number in batch}) for batch in sampler]
    assert min(blocks) > 15


def test_a_narrow_window_reads_few_blocks_at_a_time() -> None:
    window = 4 * BLOCK
    sampler = StreamingSampler(64 * BLOCK, 32, window=window)
    order = list(chain.from_iterable(sampler))
    for start in range(0, len(order), window):
        assert len({number // BLOCK for number in order[start : start + window]}) == 4


@pytest.mark.parametrize(
    "wrong",
    [{"records": 0}, {"batch": 0}, {"window": 7}, {"rank": 2, "ranks": 2}, {"rank": -1}],
)
def test_numbers_that_make_no_order_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected records >= 1"):
        StreamingSampler(**{"records": 100, "batch": 8, "window": 64, **wrong})  # type: ignore[arg-type]
