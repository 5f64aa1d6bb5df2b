import multiprocessing
import pickle
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from distill.data.collator import Collator
from distill.data.dataset import CachedDataset, ShuffledDataset
from distill.data.sampler import StreamingSampler
from distill.errors import ConfigError, RunFolderError
from teacher_cache.building.build import build, ingest
from teacher_cache.corpus.corpus import Corpus
from teacher_cache.errors import DamagedCache, MissingRows
from teacher_cache.reading.shuffle import WindowedShuffle
from teacher_cache.reading.stream import Batch
from teacher_cache.table.cache import TeacherCache
from teacher_cache.teachers import load_teacher, resolve
from teacher_cache.teachers.base import TeacherOptions
from tests.conftest import varied_texts

TOY = TeacherOptions(model="toy")


def dataset(cache: TeacherCache, corpus: str, **options: object) -> CachedDataset:
    return CachedDataset(cache, cache.space(), cache.corpus(corpus), **options)  # type: ignore[arg-type]


def teacher_vectors(texts: Sequence[str]) -> np.ndarray:
    return load_teacher(resolve(TOY)).encode(texts)


def assert_vectors_are_of_the_texts(records: Batch) -> None:
    # float16 keeps 11 bits; two different texts of the toy teacher are far apart.
    assert np.abs(records.vectors - teacher_vectors(records.texts[: len(records.rows)])).max() < 1e-3


def test_a_record_has_its_text_and_vector(toy_cache: Path) -> None:
    with TeacherCache.open(toy_cache) as cache:
        data = dataset(cache, "sentences")
        texts = varied_texts(360)
        corpus = [*texts[:200], *texts[:40], *texts[200:]]
        assert len(data) == 400  # duplicates are kept
        numbers = np.random.default_rng(0).permutation(400).tolist()
        records = data.__getitems__(numbers)
        assert records.texts == [corpus[number] for number in numbers]
        assert records.vectors.shape == (400, 32)
        assert records.vectors.dtype == np.float32
        assert cache.texts(records.rows) == records.texts
        assert_vectors_are_of_the_texts(records)
        assert data[7].texts == [corpus[7]]
        assert data[207].rows.tolist() == data[7].rows.tolist()  # the same text again


def test_held_out_texts_are_excluded_and_all_others_included(toy_cache: Path) -> None:
    with TeacherCache.open(toy_cache) as cache:
        held_out = np.array([0, 3, 39, 100, 359])  # the first three stand twice in the corpus
        data = dataset(cache, "sentences", left_out=held_out)
        assert len(data) == 392
        records = data.__getitems__(range(392))
        rows = cache.corpus("sentences").rows[:, 0]
        assert records.rows.tolist() == rows[~np.isin(rows, held_out)].tolist()
        assert_vectors_are_of_the_texts(records)


def test_a_pair_with_a_held_out_text_is_excluded(toy_cache: Path) -> None:
    with TeacherCache.open(toy_cache) as cache:
        first, second = cache.corpus("pairs").rows.T
        data = dataset(cache, "pairs", pairs=True, left_out=np.sort([first[5], second[9]]))
        records = data.__getitems__(range(len(data)))
        assert len(data) == 98
        assert not {first[5], second[9]} & set(cache.lookup(records.texts).tolist())


def test_pairs_have_both_texts_and_the_vector_of_the_first(toy_cache: Path) -> None:
    with TeacherCache.open(toy_cache) as cache:
        texts = varied_texts(360)
        records = dataset(cache, "pairs", pairs=True).__getitems__([4, 2])
        assert records.texts == [texts[4], texts[2], texts[355], texts[357]]
        assert_vectors_are_of_the_texts(records)
        assert dataset(cache, "pairs").__getitems__([4, 2]).texts == [texts[4], texts[2]]


def test_pairs_of_a_corpus_with_one_column_are_refused(toy_cache: Path) -> None:
    with TeacherCache.open(toy_cache) as cache, pytest.raises(ConfigError, match=r"only the column.*--text-key"):
        dataset(cache, "sentences", pairs=True)


def test_a_corpus_with_only_held_out_texts_is_refused(toy_cache: Path) -> None:
    with TeacherCache.open(toy_cache) as cache:
        rows = cache.corpus("few").distinct_rows(cache.rows)
        with pytest.raises(ConfigError, match=r"none is left.*data\.held_out=0"):
            dataset(cache, "few", left_out=rows)


@pytest.mark.parametrize(("start", "workers"), [("fork", 2), ("spawn", 1)])  # a spawned one imports torch
def test_loading_processes_return_the_batches_of_the_main_process(
    toy_cache: Path, tiny_student: Path, start: str, workers: int
) -> None:
    with TeacherCache.open(toy_cache) as cache:
        data = dataset(cache, "sentences", left_out=np.array([3, 100]))
        data[0]  # open handles must not cross into the processes
        collate = Collator(AutoTokenizer.from_pretrained(tiny_student), 16, repeat=2)
        order = WindowedShuffle(len(data), 64, window=128)
        shuffled = ShuffledDataset(data, order)
        sampler = StreamingSampler(order)
        expected = [collate(shuffled.__getitems__(positions)) for positions in sampler]
        loader = DataLoader(
            shuffled,
            batch_sampler=sampler,
            collate_fn=collate,
            num_workers=workers,
            multiprocessing_context=multiprocessing.get_context(start),
        )
        loaded = list(loader)
    assert len(loaded) == len(expected)
    for batch, wanted in zip(loaded, expected, strict=True):
        assert batch.keys() == wanted.keys()
        assert all(torch.equal(batch[name], wanted[name]) for name in batch)


def split(batch: Batch) -> tuple[list[str], list[str]]:
    """First and second texts of pairs."""
    return batch.texts[: len(batch.rows)], batch.texts[len(batch.rows) :]


def test_a_shuffled_epoch_has_every_included_record_once(toy_cache: Path) -> None:
    with TeacherCache.open(toy_cache) as cache:
        data = dataset(cache, "pairs", pairs=True, left_out=cache.corpus("pairs").rows[7, :1])
        order = WindowedShuffle(len(data), 8, window=32)
        shuffled = ShuffledDataset(data, order)
        for epoch in range(2):
            first = epoch * len(order)
            batches = [
                shuffled.__getitems__(range(first + start, first + min(start + 8, len(order))))
                for start in range(0, len(order), 8)
            ]
            pairs = [pair for batch in batches for pair in zip(*split(batch), strict=True)]
            expected = data.__getitems__(range(len(data)))
            assert sorted(pairs) == sorted(zip(*split(expected), strict=True))
            assert sorted(np.concatenate([batch.rows for batch in batches])) == sorted(expected.rows)
            for batch in batches:
                assert_vectors_are_of_the_texts(batch)
        shuffled.close()


def test_a_pickle_is_small_and_has_no_open_handle(toy_cache: Path) -> None:
    with TeacherCache.open(toy_cache) as cache:
        data = dataset(cache, "sentences")
        pickled = pickle.dumps(data)
    assert len(pickled) < 1000
    again: CachedDataset = pickle.loads(pickled)
    assert again[5].texts == data[5].texts


def small_cache(folder: Path, texts: Sequence[str]) -> Path:
    (folder / "texts.txt").write_text("".join(f"{text}\n" for text in texts))
    build(Corpus.open(folder / "texts.txt"), TOY, folder / "cache", name="texts")
    return folder / "cache"


def test_a_corpus_that_was_built_again_is_refused_in_a_loading_process(tmp_path: Path) -> None:
    path = small_cache(tmp_path, varied_texts(20))
    with TeacherCache.open(path) as cache:
        pickled = pickle.dumps(dataset(cache, "texts"))
    small_cache(tmp_path, varied_texts(30))
    again: CachedDataset = pickle.loads(pickled)
    with pytest.raises(RunFolderError, match="built again"):
        again[0]


def test_missing_vectors_are_counted_with_the_command_that_computes_them(tmp_path: Path) -> None:
    path = small_cache(tmp_path, varied_texts(20))
    (tmp_path / "more.txt").write_text("".join(f"{text}\n" for text in varied_texts(25)))
    with TeacherCache.open(path, "a") as cache:
        ingest(Corpus.open(tmp_path / "more.txt"), cache, "more", lambda progress: None)
    with TeacherCache.open(path) as cache, pytest.raises(MissingRows) as error:
        dataset(cache, "more")
    assert "5 of 25 texts of corpus 'more' have no vector in toy@" in str(error.value)
    assert "tcache build" in str(error.value)


def test_quarantined_texts_are_named_with_their_reason(tmp_path: Path) -> None:
    path = small_cache(tmp_path, varied_texts(20))
    texts = varied_texts(23)
    (tmp_path / "more.txt").write_text("".join(f"{text}\n" for text in texts))
    with TeacherCache.open(path, "a") as cache:
        ingest(Corpus.open(tmp_path / "more.txt"), cache, "more", lambda progress: None)
        rows = cache.lookup(texts[20:])
        vectors = np.full((3, 32), np.nan, dtype=np.float32)
        cache.space().write(0, rows, vectors)
    with TeacherCache.open(path) as cache, pytest.raises(MissingRows) as error:
        dataset(cache, "more")
    message = str(error.value)
    assert "3 texts of corpus 'more'" in message
    assert "quarantined" in message
    assert repr(texts[20]) in message
    assert "data.skip_quarantined=true" in message
    with TeacherCache.open(path) as cache:
        data = dataset(cache, "more", left_out=rows)
        assert [data[place].texts[0] for place in range(len(data))] == texts[:20]


def test_texts_that_do_not_match_their_keys_are_refused(
    toy_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(toy_cache, tmp_path / "cache")
    with TeacherCache.open(tmp_path / "cache") as cache:
        read = cache.texts_table.read
        monkeypatch.setattr(cache.texts_table, "read", lambda rows: read(rows)[::-1])
        with pytest.raises(DamagedCache, match="do not match their keys"):
            dataset(cache, "sentences")


def test_a_batch_has_each_text_once_per_view_after_the_prompt(tiny_student: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_student)
    records = Batch(
        ["cat sat", "dogs ran through town"], np.array([4, 9]), np.ones((2, 3), dtype=np.float32), np.arange(2)
    )
    batch = Collator(tokenizer, 5, prompt="the ", repeat=2)(records)
    ids = tokenizer(["the cat sat", "the dogs ran through town"]).input_ids
    end, pad = tokenizer.sep_token_id, tokenizer.pad_token_id
    first, second = ids[0], [*ids[1][:4], end]  # cut to 5 tokens, specials included
    assert len(first) == 5
    assert batch["input_ids"].tolist() == [first, second, first, second]
    assert batch["attention_mask"].tolist() == [[1] * 5] * 4
    assert batch["text_ids"].tolist() == [4, 9]
    assert batch["vectors"].shape == (2, 3)
    padded = Collator(tokenizer, 16)(replace(records, texts=["cat", "dogs ran"]))
    assert padded["input_ids"][0, -1] == pad
    assert padded["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
