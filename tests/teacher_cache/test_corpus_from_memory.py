"""Corpora of texts in memory: strings, pairs and `datasets.Dataset`, by the policy that files follow."""

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from teacher_cache.building.build import Progress, build
from teacher_cache.building.plan import plan
from teacher_cache.corpus.corpus import Corpus, to_corpus
from teacher_cache.errors import CacheError, CorpusError
from teacher_cache.maintenance.check import verify
from teacher_cache.maintenance.info import describe
from teacher_cache.maintenance.repair import repair
from teacher_cache.table.cache import TeacherCache
from teacher_cache.transfer.importer import import_vectors
from tests.teacher_cache.small_caches import TOY, numbered

datasets = pytest.importorskip("datasets")

TEXTS = numbered(20)


def records(corpus: Corpus, n: int = 3) -> list[tuple[str, ...]]:
    return [record for batch in corpus.batches(n) for record in batch]


def from_file(folder: Path, rows: list[dict[str, str]], key: str = "text") -> Corpus:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Corpus.open(path, key)


def test_texts_in_memory_have_the_fingerprint_of_the_same_texts_in_a_file(tmp_path: Path) -> None:
    texts = ["a", "", "NA", " x ", "a\nb", "a"]
    memory, file = Corpus.from_texts(texts), from_file(tmp_path, [{"text": text} for text in texts])
    assert records(memory) == records(file) == [("a",), ("NA",), (" x ",), ("a\nb",), ("a",)]
    assert memory.fingerprint == file.fingerprint
    assert memory.counts == file.counts
    assert memory.counts["skipped_empty"] == 1
    assert memory.columns == ("text",)
    assert (memory.name, memory.origins, memory.sources) == ("texts", ["memory"], [("memory", 0, 5)])


@pytest.mark.parametrize("kind", [tuple, list])
def test_tuples_and_lists_are_records_of_several_texts(tmp_path: Path, kind: type) -> None:
    pairs = [("q1", "a1"), ("q2", " "), ("q3", "a3")]
    memory = Corpus.from_texts([kind(pair) for pair in pairs], name="pairs")
    file = from_file(tmp_path, [{"a": a, "b": b} for a, b in pairs], "a,b")
    assert records(memory) == records(file) == [("q1", "a1"), ("q3", "a3")]
    assert memory.fingerprint == file.fingerprint
    assert memory.name == "pairs"
    assert memory.columns == ("text_1", "text_2")


def test_a_list_can_be_read_again(tmp_path: Path) -> None:
    corpus = Corpus.from_texts(["a", "b"])
    assert records(corpus) == records(corpus) == [("a",), ("b",)]


def test_an_iterator_is_read_once_and_then_refused() -> None:
    corpus = Corpus.from_texts(text for text in ["a", "b", "c"])
    assert records(corpus) == [("a",), ("b",), ("c",)]
    with pytest.raises(CorpusError, match="an iterator can be read only once"):
        records(corpus)


def test_reading_an_iterable_holds_one_batch_in_memory() -> None:
    class Lines:
        def __iter__(self) -> Iterator[str]:
            return (f"{number} " * 100 for number in range(20_000))

    corpus = Corpus.from_texts(Lines())
    tracemalloc.start()
    try:
        for _ in range(2):
            assert sum(len(batch) for batch in corpus.batches(100)) == 20_000
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("bad", "found"),
    [
        (None, "None"),
        (float("nan"), "nan"),
        (7, "7"),
        (b"a", "b'a'"),
        ({"text": "a"}, "{'text': 'a'}"),
        (("a", "b"), "('a', 'b')"),
        ((), "()"),
    ],
)
@pytest.mark.parametrize("place", [0, 2])
def test_a_record_that_is_not_a_string_is_refused_at_its_position(bad: Any, found: str, place: int) -> None:
    texts: list[Any] = ["a", " ", "b", "c"]
    texts[place] = bad
    if place == 0 and bad == ("a", "b"):
        place, found = 1, "' '"  # the first record decides
    with pytest.raises(CorpusError) as caught:
        records(Corpus.from_texts(texts, name="mine"))
    message = str(caught.value)
    assert message.startswith(f"mine: record {place + 1}: found {found}, expected ")
    assert "\n" not in message


@pytest.mark.parametrize("bad", [None, float("nan"), 3])
def test_a_text_of_a_pair_that_is_not_a_string_is_refused_at_its_position(bad: Any) -> None:
    with pytest.raises(CorpusError, match=r"^texts: record 2: found \('b', .*\), expected a tuple of 2 strings"):
        records(Corpus.from_texts([("a", "x"), ("b", bad)]))


def test_a_pair_among_triples_is_refused_at_its_position() -> None:
    with pytest.raises(CorpusError, match=r"record 2: found \('d', 'e'\), expected a tuple of 3 strings"):
        records(Corpus.from_texts([("a", "b", "c"), ("d", "e")]))


@pytest.mark.parametrize("bad", ["one text", b"bytes", {"text": "a"}, np.zeros((2, 2)), 7, None, Path("a.txt")])
def test_what_is_no_iterable_of_texts_is_a_type_error(bad: Any) -> None:
    with pytest.raises(TypeError, match="expected an iterable of strings"):
        Corpus.from_texts(bad)


def test_a_data_frame_is_a_type_error_and_its_column_is_a_corpus() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"text": ["a", None, "b"]})
    with pytest.raises(TypeError, match="expected an iterable of strings"):
        Corpus.from_texts(frame)
    with pytest.raises(CorpusError, match="record 2: found "):
        records(Corpus.from_texts(frame["text"]))
    assert records(Corpus.from_texts(frame["text"].dropna())) == [("a",), ("b",)]


def test_lone_surrogates_are_replaced_in_memory_too() -> None:
    corpus = Corpus.from_texts(["a\ud800"])
    assert records(corpus) == [("a\ufffd",)]
    assert corpus.counts["replaced_surrogates"] == 1


# datasets.Dataset


def test_a_dataset_is_read_by_its_column() -> None:
    data = datasets.Dataset.from_dict({"id": [1, 2, 3], "text": ["a", " ", "b"]})
    corpus = Corpus.from_dataset(data)
    assert records(corpus) == records(corpus) == [("a",), ("b",)]
    assert corpus.counts["skipped_empty"] == 1
    assert (corpus.name, corpus.columns, corpus.sources) == ("texts", ("text",), [("memory", 0, 2)])


def test_a_dataset_gives_pairs_and_domains() -> None:
    data = datasets.Dataset.from_dict({"q": ["a", "b"], "d": ["x", "y"], "source": [3, 4]})
    corpus = Corpus.from_dataset(data, "q,d", domain_key="source", name="pairs")
    assert records(corpus) == [("a", "x"), ("b", "y")]
    assert (corpus.name, corpus.domains) == ("pairs", {"3": 1, "4": 1})


def test_a_selected_and_shuffled_dataset_is_read_in_its_own_order() -> None:
    data = datasets.Dataset.from_dict({"text": TEXTS}).select([5, 3, 9])
    assert records(Corpus.from_dataset(data)) == [(TEXTS[5],), (TEXTS[3],), (TEXTS[9],)]


def test_a_null_in_a_dataset_is_refused_at_its_row() -> None:
    data = datasets.Dataset.from_dict({"text": ["a", None]})
    with pytest.raises(CorpusError, match=r"^mine: row 2: 'text' is null, expected a string"):
        records(Corpus.from_dataset(data, name="mine"))


def test_a_dataset_without_the_column_or_of_another_type_is_refused() -> None:
    data = datasets.Dataset.from_dict({"number": [1.5, 2.5]})
    with pytest.raises(CorpusError, match="no column 'text', found 'number'"):
        records(Corpus.from_dataset(data))
    with pytest.raises(CorpusError, match="column 'number' is double, expected strings"):
        records(Corpus.from_dataset(data, "number"))
    with pytest.raises(CorpusError, match="distinct names"):
        Corpus.from_dataset(data, "a,a")


def test_what_is_no_dataset_is_a_type_error() -> None:
    data = datasets.Dataset.from_dict({"text": ["a"]})
    for bad in (datasets.DatasetDict(train=data), data.to_iterable_dataset(), ["a"], None):
        with pytest.raises(TypeError, match=r"expected a `datasets\.Dataset`"):
            Corpus.from_dataset(bad)


# What `build` takes as a corpus


def test_a_path_a_list_of_paths_texts_and_a_dataset_are_corpora(tmp_path: Path) -> None:
    for name in ("1.txt", "2.txt"):
        (tmp_path / name).write_text(f"{name}\n")
    data = datasets.Dataset.from_dict({"text": ["a"]})
    assert records(to_corpus(str(tmp_path / "1.txt"))) == [("1.txt",)]
    assert records(to_corpus(tmp_path / "*.txt")) == [("1.txt",), ("2.txt",)]
    assert records(to_corpus([tmp_path / "2.txt", tmp_path / "1.txt"])) == [("2.txt",), ("1.txt",)]
    assert records(to_corpus(["1.txt", "2.txt"])) == [("1.txt",), ("2.txt",)]  # strings in a list are texts
    assert records(to_corpus(text for text in ["a", "b"])) == [("a",), ("b",)]
    assert records(to_corpus(data)) == [("a",)]
    corpus = Corpus.from_texts(["a"])
    assert to_corpus(corpus) is corpus
    assert to_corpus(["a"], name="mine").name == "mine"
    with pytest.raises(TypeError, match="expected an iterable of strings"):
        to_corpus(7)  # type: ignore[arg-type]


def test_a_build_from_a_list_and_a_teacher_name_encodes_each_text_once(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    report = build(["a", "b", "", "a"], teacher="toy", cache=path)
    assert (report.corpus, report.rows, report.distinct, report.encoded) == ("texts", 3, 2, 2)
    assert report.counts["skipped_empty"] == 1
    again = build(["a", "b", "c"], teacher="toy", cache=str(path))
    assert (again.distinct, again.cached, again.encoded) == (3, 2, 1)
    with TeacherCache.open(path) as cache:
        assert list(cache.corpora()) == ["texts"]  # the newer list of the same name takes its place
        assert cache.texts(cache.corpus().rows[:, 0]) == ["a", "b", "c"]
    corpus = describe(path)["corpora"]["texts"]
    assert (corpus["rows"], corpus["sources"], corpus["columns"]) == (3, ["memory"], ["text"])
    assert verify(path, deep=True).ok


def test_a_build_reads_a_generator_once(tmp_path: Path) -> None:
    report = build((text for text in TEXTS), teacher=TOY, cache=tmp_path / "cache", name="generated")
    assert (report.corpus, report.rows, report.encoded) == ("generated", 20, 20)


def test_a_build_takes_pairs_and_a_dataset(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    assert build([("a", "b"), ("a", "c")], teacher="toy", cache=path, name="pairs").distinct == 3
    report = build(datasets.Dataset.from_dict({"text": ["a", "d"]}), teacher="toy", cache=path)
    assert (report.corpus, report.cached, report.encoded) == ("texts", 1, 1)


def test_a_build_writes_to_an_open_cache_and_leaves_it_open(tmp_path: Path) -> None:
    with TeacherCache.open(tmp_path / "cache", "a") as cache:
        report = build(TEXTS, teacher="toy", cache=cache)
        assert report.cache == str(tmp_path / "cache")
        assert build([*TEXTS, "new"], teacher="toy", cache=cache).encoded == 1
        assert cache.space().present_count() == 21
    with TeacherCache.open(tmp_path / "cache") as cache, pytest.raises(CacheError, match="open for reading only"):
        build(TEXTS, teacher="toy", cache=cache)


def test_an_interrupted_build_from_a_list_resumes(tmp_path: Path) -> None:
    TeacherCache.open(tmp_path / "cache", "a", shard_rows=8).close()

    def stop(progress: Progress) -> None:
        if progress.phase == "encoding" and progress.done >= 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(TEXTS, teacher="toy", cache=tmp_path / "cache", report=stop)
    report = build(TEXTS, teacher="toy", cache=tmp_path / "cache")
    assert (report.cached, report.encoded) == (8, 12)


def test_a_plan_takes_a_list_and_a_teacher_name(tmp_path: Path) -> None:
    build(TEXTS, teacher="toy", cache=tmp_path / "cache")
    estimate = plan([*TEXTS, "new"], teacher="toy", cache=tmp_path / "cache")
    assert (estimate.rows, estimate.cached, estimate.missing) == (21, 20, 1)


def test_vectors_are_imported_for_texts_in_memory(tmp_path: Path) -> None:
    vectors = np.eye(3, dtype=np.float32)
    np.save(tmp_path / "vectors.npy", vectors)
    texts = ["a", "b", "c"]
    import_vectors(tmp_path / "vectors.npy", tmp_path / "cache", corpus=Corpus.from_texts(texts), teacher="other")
    with TeacherCache.open(tmp_path / "cache") as cache:
        np.testing.assert_array_equal(cache.space().gather(cache.lookup(texts)), vectors)
    with pytest.raises(CorpusError, match="an iterator can be read only once"):
        import_vectors(tmp_path / "vectors.npy", tmp_path / "b", corpus=Corpus.from_texts(iter(texts)), teacher="other")


def test_a_build_from_memory_does_not_replace_a_corpus_from_a_file_by_default(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("from a file\n")
    build(tmp_path / "texts.txt", teacher="toy", cache=tmp_path / "cache")
    with pytest.raises(
        CacheError, match=r"corpus 'texts' of .* came from .*texts\.txt, this one from memory; .*`name`"
    ):
        build(["a"], teacher="toy", cache=tmp_path / "cache")
    assert build(["a"], teacher="toy", cache=tmp_path / "cache", name="texts").rows == 1


def test_a_name_that_is_no_name_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="is not a corpus name"):
        build(Corpus.from_texts(["a"], name="../a"), teacher="toy", cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


# Repair


def test_repair_restores_texts_from_a_corpus_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    build(TEXTS, teacher="toy", cache=path)
    (shard,) = (path / "texts").glob("text/c/0")
    shard.write_bytes(b"garbage")
    left = repair(path).unrepaired
    assert any(
        "20 texts are lost" in done.action and "these texts came from memory and cannot be read again" in done.action
        for done in left
    )
    assert repair(path, Corpus.from_texts(TEXTS)).ok
    assert verify(path, deep=True).ok


def test_repair_restores_a_manifest_from_a_corpus_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    build(TEXTS, teacher="toy", cache=path)
    (manifest,) = (path / "corpora/texts").glob("rows-*.npy")
    manifest.unlink()
    (left,) = repair(path).unrepaired
    assert "these texts came from memory and cannot be read again" in left.action
    assert "tcache build memory" not in left.action
    assert "pass its texts as `corpus`" in left.action
    assert repair(path, Corpus.from_texts(TEXTS)).ok
    assert verify(path, deep=True).ok
