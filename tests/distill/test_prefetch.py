"""Prefetched batches are the same as others, and prefetching changes nothing else."""

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import skip_first_batches
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from distill.data.dataset import CachedDataset, ShuffledDataset
from distill.data.prefetch import PrefetchedBatches, pass_through
from distill.data.sampler import StreamingSampler
from distill.training.measurement import DATA, StepTime
from distill.training.trainer import DistillTrainer
from teacher_cache.errors import DamagedCache
from teacher_cache.reading.shuffle import WindowedShuffle
from teacher_cache.reading.stream import Batch
from teacher_cache.table.cache import TeacherCache
from tests.distill.tiny_runs import Stopped, parts, stop_at, tiny_config

Collate = Callable[[Batch], Any]


@pytest.fixture(scope="module")
def few(toy_cache: Path) -> Iterator[CachedDataset]:
    with TeacherCache.open(toy_cache) as cache:
        yield CachedDataset(cache, cache.space(), cache.corpus("few"))


def collated(batch: Batch) -> dict[str, Any]:
    return {"texts": batch.texts, "rows": batch.rows.tolist(), "vectors": torch.from_numpy(batch.vectors)}


COLLATED: Any = collated  # torch declares that it collates a list


def order_of(data: CachedDataset, batch: int = 9, window: int = 20, seed: int = 0) -> WindowedShuffle:
    return WindowedShuffle(len(data), batch, window=window, seed=seed)


def plain(data: CachedDataset, order: WindowedShuffle, workers: int = 0, **options: bool) -> DataLoader[Any]:
    shuffled: Any = ShuffledDataset(data, order)
    sampler = StreamingSampler(order, **options)
    return DataLoader(shuffled, batch_sampler=sampler, collate_fn=COLLATED, num_workers=workers)


def prefetched(
    data: CachedDataset, order: WindowedShuffle, ahead: int = 2, collate: Collate = collated, **options: bool
) -> DataLoader[Any]:
    sampler = StreamingSampler(order, **options)
    batches = PrefetchedBatches(ShuffledDataset(data, order), collate, sampler.following, ahead)
    return DataLoader(batches, batch_sampler=sampler, collate_fn=pass_through)


def epochs(loader: DataLoader[Any], count: int) -> list[dict[str, Any]]:
    found = []
    for epoch in range(count):
        sampler: Any = loader.batch_sampler
        sampler.set_epoch(epoch)
        found += list(loader)
    close(loader)
    return found


def close(loader: DataLoader[Any]) -> None:
    dataset: Any = loader.dataset
    dataset.close()


def reading_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("batches", "window"))]


def assert_equal(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [batch["texts"] for batch in found] == [batch["texts"] for batch in expected]
    assert [batch["rows"] for batch in found] == [batch["rows"] for batch in expected]
    assert all(torch.equal(one["vectors"], other["vectors"]) for one, other in zip(found, expected, strict=True))


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 60),
    window=st.integers(0, 80),
    ahead=st.integers(1, 5),
    drop_last=st.booleans(),
)
def test_prefetched_batches_are_the_same_in_the_same_order(
    few: CachedDataset, seed: int, batch: int, window: int, ahead: int, drop_last: bool
) -> None:
    order = order_of(few, batch, batch + window, seed)
    expected = epochs(plain(few, order, drop_last=drop_last), 3)
    assert_equal(epochs(prefetched(few, order, ahead, drop_last=drop_last), 3), expected)
    assert not reading_threads()


@pytest.mark.parametrize("workers", [1, 2])
def test_loading_processes_return_the_same_batches_as_the_thread(few: CachedDataset, workers: int) -> None:
    order = order_of(few)
    found = epochs(prefetched(few, order), 2)
    assert_equal(epochs(plain(few, order, workers), 2), found)


@pytest.mark.parametrize("skipped", [1, 4, 6])
def test_a_loader_that_skips_batches_continues_into_the_next_epoch(few: CachedDataset, skipped: int) -> None:
    order = order_of(few)
    expected = epochs(plain(few, order), 2)
    loader = prefetched(few, order)
    found = list(skip_first_batches(loader, skipped))
    sampler: Any = loader.batch_sampler
    sampler.set_epoch(1)
    assert_equal(found + list(loader), expected[skipped:])
    close(loader)


@given(data=st.data())
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_batch_can_be_requested(few: CachedDataset, data: st.DataObject) -> None:
    order = order_of(few)
    sampler = StreamingSampler(order)
    batches = PrefetchedBatches(ShuffledDataset(few, order), collated, sampler.following, 2)
    expected = epochs(plain(few, order), 2)
    positions = [order_positions for epoch in (0, 1) for order_positions in _batches(sampler, epoch)]
    for number in data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=12)):
        assert_equal([batches.__getitems__(positions[number])], [expected[number]])
    batches.close()


def _batches(sampler: StreamingSampler, epoch: int) -> list[list[int]]:
    sampler.set_epoch(epoch)
    return list(sampler)


def test_the_sampler_predicts_the_following_batches(few: CachedDataset) -> None:
    for drop_last in (False, True):
        sampler = StreamingSampler(order_of(few), drop_last=drop_last)
        yielded = [batch for epoch in range(3) for batch in _batches(sampler, epoch)]
        assert [sampler.following(batch) for batch in yielded[:-1]] == yielded[1:]


def test_the_sampler_counts_only_yielded_batches(few: CachedDataset) -> None:
    loader = prefetched(few, order_of(few), ahead=4)
    sampler: Any = loader.batch_sampler
    iterator = iter(loader)
    next(iterator), next(iterator)
    assert sampler.state_dict() == {"epoch": 0, "position": 2}
    close(loader)


def test_at_most_the_given_number_of_batches_is_prefetched(few: CachedDataset) -> None:
    made: list[int] = []

    def counting(batch: Batch) -> int:
        made.append(len(batch.rows))
        return len(made)

    loader = prefetched(few, order_of(few, batch=4), ahead=3, collate=counting)
    most = [len(made) - number for number in loader]
    assert max(most) <= 3
    close(loader)


def test_an_error_in_the_thread_is_raised_when_its_batch_is_requested(few: CachedDataset) -> None:
    made = 0

    def third_fails(batch: Batch) -> dict[str, Any]:
        nonlocal made
        made += 1
        if made == 3:
            raise DamagedCache("shard 7 is damaged")
        return collated(batch)

    order = order_of(few)
    loader = prefetched(few, order, collate=third_fails)
    iterator = iter(loader)
    assert_equal([next(iterator), next(iterator)], epochs(plain(few, order), 1)[:2])
    with pytest.raises(DamagedCache, match="shard 7"):
        next(iterator)
    close(loader)
    assert not reading_threads()


def test_prefetching_draws_no_random_numbers(few: CachedDataset) -> None:
    def draws(loader: DataLoader[Any]) -> list[tuple[float, float, float]]:
        torch.manual_seed(3)
        np.random.seed(3)
        random.seed(3)
        found = [(float(torch.rand(())), np.random.random(), random.random()) for _ in loader]
        close(loader)
        return found

    assert draws(prefetched(few, order_of(few))) == draws(plain(few, order_of(few)))


@pytest.mark.parametrize("how", [Stopped, KeyboardInterrupt, None])
def test_no_thread_remains_after_training(
    toy_cache: Path, tiny_student: Path, tmp_path: Path, how: type[BaseException] | None
) -> None:
    def report(progress: Any) -> None:
        assert reading_threads()
        if progress.step == 3 and how is not None:
            raise how

    trainer = parts(tiny_config(toy_cache, tiny_student, tmp_path)).trainer(report=report)
    if how is None:
        trainer.train()
    else:
        with pytest.raises(how):
            trainer.train()
    assert not reading_threads()


def test_training_raises_the_error_of_a_batch_and_ends_the_thread(
    toy_cache: Path, tiny_student: Path, tmp_path: Path
) -> None:
    made = parts(tiny_config(toy_cache, tiny_student, tmp_path))
    whole, calls = type(made.collator).__call__, 0

    class Failing(type(made.collator)):  # type: ignore[misc]
        def __call__(self, records: Batch) -> dict[str, Any]:
            nonlocal calls
            calls += 1
            if calls == 5:
                raise DamagedCache("shard 7 is damaged")
            return whole(self, records)

    made.collator.__class__ = Failing
    trainer = made.trainer()
    with pytest.raises(DamagedCache, match="shard 7"):
        trainer.train()
    assert trainer.state.global_step == 4
    assert not reading_threads()


def test_batches_are_prefetched_without_loading_processes_and_online_teacher(
    toy_cache: Path, tiny_student: Path, tmp_path: Path
) -> None:
    def prefetches(trainer: DistillTrainer) -> bool:
        return isinstance(trainer.get_train_dataloader().dataset, PrefetchedBatches)

    assert prefetches(parts(tiny_config(toy_cache, tiny_student, tmp_path)).trainer())
    workers = "training.dataloader_num_workers=1"
    assert not prefetches(parts(tiny_config(toy_cache, tiny_student, tmp_path, workers)).trainer())
    online = ("teacher.mode=online", "teacher.model=toy")
    assert not prefetches(parts(tiny_config(toy_cache, tiny_student, tmp_path, *online)).trainer())


def test_all_batches_of_an_accumulated_step_are_prefetched(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    config = tiny_config(toy_cache, tiny_student, tmp_path, "training.gradient_accumulation_steps=3")
    loader: Any = parts(config).trainer().get_train_dataloader()
    assert loader.dataset.ahead == 4


def test_collating_does_not_change_the_students_tokenizer(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    made = parts(tiny_config(toy_cache, tiny_student, tmp_path, "student.max_length=5"))
    mine: Any = made.student.tokenizer
    mine(["a"], truncation=True, max_length=11)
    batch = made.collator(made.dataset.__getitems__([0, 1, 2]))
    assert batch["input_ids"].shape[1] == 5
    assert mine.backend_tokenizer.truncation["max_length"] == 11


def test_the_wait_share_is_relative_to_the_whole_step_time(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    trainer = parts(tiny_config(toy_cache, tiny_student, tmp_path)).trainer(report=stop_at(-1))
    trainer.train()
    timed = [(9.0, 9.0), (1.0, 0.5), (2.0, 1.0), (3.0, 1.0)]  # computing, waiting
    trainer.clock.timer.steps = [StepTime(step + wait, 0.0, {DATA: wait}) for step, wait in timed]
    cost = trainer.clock.cost()
    assert cost is not None
    assert cost["data_wait_share"] == pytest.approx(2 / 7)  # half of the steps warm up
