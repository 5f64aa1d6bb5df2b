from itertools import chain
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from distill.data.sampler import StreamingSampler
from teacher_cache.reading.shuffle import WindowedShuffle


@st.composite
def orders(draw: st.DrawFn) -> WindowedShuffle:
    batch = draw(st.integers(1, 40))
    ranks = draw(st.integers(1, 3))
    return WindowedShuffle(
        draw(st.integers(ranks, 500)), batch, draw(st.integers(batch, 400)), rank=ranks - 1, ranks=ranks
    )


@given(orders(), st.booleans(), st.integers(0, 3))
def test_every_position_of_an_epoch_comes_once_in_order(order: WindowedShuffle, drop_last: bool, epoch: int) -> None:
    sampler = StreamingSampler(order, drop_last=drop_last)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    kept = len(order) // order.batch * order.batch if drop_last else len(order)
    first = epoch * len(order)
    assert len(batches) == len(sampler)
    assert list(chain.from_iterable(batches)) == list(range(first, first + kept))
    assert all(len(positions) == order.batch for positions in batches[:-1])


@given(orders(), st.integers(0, 3), st.data())
def test_a_loaded_state_resumes_at_the_next_batch(order: WindowedShuffle, epoch: int, data: st.DataObject) -> None:
    running = StreamingSampler(order)
    running.set_epoch(epoch)
    whole = list(running)
    taken = data.draw(st.integers(0, len(running)))
    batches = iter(running)
    begun: list[Any] = [next(batches) for _ in range(taken)]

    resumed = StreamingSampler(order)
    resumed.load_state_dict(running.state_dict() if taken else {"epoch": epoch, "position": 0})
    assert resumed.state_dict() == {"epoch": epoch, "position": taken}
    resumed.set_epoch(epoch)  # as a training loop does at the start of an epoch
    assert begun + list(resumed) == whole
    assert list(resumed) == whole  # only the first pass resumes


def test_a_new_epoch_starts_at_its_first_batch() -> None:
    sampler = StreamingSampler(WindowedShuffle(100, 10, window=64))
    sampler.load_state_dict({"epoch": 1, "position": 4})
    sampler.set_epoch(2)
    assert len(list(sampler)) == 10
