"""Domains of records: read with the texts, stored with the manifest, checked and repaired."""

import io
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from teacher_cache.building.build import BuildReport, build
from teacher_cache.corpus import corpus as corpus_module
from teacher_cache.corpus.corpus import Corpus
from teacher_cache.errors import CacheError, CorpusError, DamagedCache
from teacher_cache.maintenance.check import verify
from teacher_cache.maintenance.gc import reclaim
from teacher_cache.maintenance.info import describe
from teacher_cache.maintenance.rebuild import reindex
from teacher_cache.maintenance.repair import repair
from teacher_cache.storage.manifest import CorpusRecord
from teacher_cache.table.cache import TeacherCache
from teacher_cache.transfer.merge import merge
from tests.teacher_cache.small_caches import SHARD_ROWS, TOY, passing_folder

TEXTS = ["a train", "a boat", "a train", "a plane"]
DOMAINS = ["land", "sea", "sea", "air"]
NUMBERS = [0, 1, 1, 2]


def jsonl(path: Path, texts: Sequence[str] = TEXTS, domains: Sequence[Any] = DOMAINS, **more: Sequence[Any]) -> Path:
    columns = {"text": texts, "source": domains, **more}
    lines = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(corpus: Corpus, n: int = 3) -> tuple[list[str], list[str]]:
    """Texts and the names of their domains."""
    batches = list(corpus.batches_with_domains(n))
    names = list(corpus.domains)
    texts = [text for records, _ in batches for (text,) in records]
    return texts, [names[number] for _, numbers in batches for number in numbers]


def refusal(path: Path | str, domain_key: str = "source") -> str:
    with pytest.raises(CorpusError) as caught:
        read(Corpus.open(path, domain_key=domain_key))
    message = str(caught.value)
    assert "\n" not in message
    return message


def filled(folder: Path, path: Path, domain_key: str | None = "source", name: str = "corpus") -> BuildReport:
    """Build `folder / "cache"` with small shards from one file."""
    TeacherCache.open(folder / "cache", "a", shard_rows=SHARD_ROWS).close()
    return build(Corpus.open(path, domain_key=domain_key), TOY, folder / "cache", name=name)


def stored_domains(folder: Path) -> list[str]:
    """The name of the domain of every record."""
    with TeacherCache.open(folder / "cache") as cache:
        manifest = cache.corpus("corpus")
        numbers = manifest.domains_of(np.arange(len(manifest)))
        assert numbers.dtype == np.int64
        return [manifest.record.domains[number] for number in numbers]


def domain_files(folder: Path) -> list[Path]:
    return sorted((folder / "cache/corpora/corpus").glob("domains*"))


# Reading


@pytest.mark.parametrize("name", ["c.jsonl", "c.csv", "c.tsv", "c.parquet", "saved", "-"])
def test_every_format_with_columns_gives_the_same_domains(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path: Path | str = tmp_path / name
    lines = jsonl(tmp_path / "reference.jsonl")
    if name == "c.jsonl":
        path = lines
    elif name == "-":
        path = name
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.read_bytes())))
    elif name == "c.parquet":
        pyarrow = pytest.importorskip("pyarrow")
        source = pyarrow.array(DOMAINS).dictionary_encode()
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"source": source, "text": TEXTS}), path)
    elif name == "saved":
        datasets = pytest.importorskip("datasets")
        datasets.disable_progress_bars()
        datasets.Dataset.from_dict({"source": DOMAINS, "text": TEXTS}).save_to_disk(str(path))
    else:
        delimiter = "," if name == "c.csv" else "\t"
        rows = [["source", "text"], *zip(DOMAINS, TEXTS, strict=True)]
        Path(path).write_text("".join(delimiter.join(row) + "\n" for row in rows))
    reference, corpus = Corpus.open(lines, domain_key="source"), Corpus.open(path, domain_key="source")
    assert read(corpus) == read(reference) == (TEXTS, DOMAINS)
    assert corpus.domains == {"land": 1, "sea": 2, "air": 1}
    assert corpus.domains_fingerprint == reference.domains_fingerprint
    assert corpus.fingerprint == reference.fingerprint


def test_texts_have_one_fingerprint_with_and_without_domains(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "c.jsonl")
    plain, with_domains = Corpus.open(path), Corpus.open(path, domain_key="source")
    assert [text for records in plain.batches(9) for (text,) in records] == read(with_domains)[0]
    assert plain.fingerprint == with_domains.fingerprint
    assert (plain.domains, plain.domains_fingerprint) == ({}, "")


@given(
    st.lists(st.tuples(st.text(st.characters(codec="utf-8"), min_size=1), st.sampled_from("abcde"))), st.integers(1, 9)
)
def test_domains_stay_with_their_records_in_batches_of_any_size(records: list[tuple[str, str]], n: int) -> None:
    with passing_folder() as folder:
        path = jsonl(Path(folder) / "c.jsonl", [text for text, _ in records], [domain for _, domain in records])
        texts, domains = read(Corpus.open(path, domain_key="source"), n)
    assert list(zip(texts, domains, strict=True)) == [record for record in records if not record[0].isspace()]


def test_an_integer_is_a_domain_named_by_its_digits(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    numbers = [7, -1, 7, 10**18]
    path = tmp_path / "c.parquet"
    parquet.write_table(pyarrow.table({"text": TEXTS, "source": numbers}), path)
    for source in (jsonl(tmp_path / "c.jsonl", domains=numbers), path):
        assert read(Corpus.open(source, domain_key="source"))[1] == ["7", "-1", "7", str(10**18)]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, ":3: 'source' is null, expected the name of a domain"),
        (True, ":3: 'source' is a boolean, expected"),
        (1.5, ":3: 'source' is a number, expected .*a string or a whole number"),
        (["a"], ":3: 'source' is a list, expected"),
        ("", ":3: 'source' is empty, expected"),
        (" \t", ":3: 'source' is empty, expected"),
    ],
)
def test_an_invalid_domain_is_refused_at_its_line(tmp_path: Path, value: object, message: str) -> None:
    assert_matches(refusal(jsonl(tmp_path / "c.jsonl", domains=["a", "b", value, "c"])), message)


def assert_matches(message: str, pattern: str) -> None:
    assert re.search(pattern, message), message


def test_a_missing_domain_is_refused_at_its_position(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "c.jsonl"
    path.write_text('{"text": "x", "source": "a"}\n{"text": "y"}\n')
    assert_matches(refusal(path), r":2: no key 'source', found 'text'; name the right key with `domain_key`")
    (tmp_path / "c.csv").write_text("text,source\nx,a\ny,\n")
    assert_matches(refusal(tmp_path / "c.csv"), "c.csv:3: 'source' is empty")
    assert_matches(
        refusal(tmp_path / "c.csv", "origin"), "no column 'origin', .* name the right column with `domain_key`"
    )
    parquet.write_table(pyarrow.table({"text": ["x", "y"], "source": ["a", None]}), tmp_path / "c.parquet")
    assert_matches(refusal(tmp_path / "c.parquet"), "c.parquet: row 2: 'source' is null")
    parquet.write_table(pyarrow.table({"text": ["x"], "source": [0.5]}), tmp_path / "d.parquet")
    assert_matches(refusal(tmp_path / "d.parquet"), "column 'source' is double, expected strings or whole numbers")


def test_a_skipped_record_needs_no_domain(tmp_path: Path) -> None:
    (tmp_path / "c.csv").write_text("text,source\nx,a\n,\n\ny,b\n")
    corpus = Corpus.open(tmp_path / "c.csv", domain_key="source")
    assert read(corpus) == (["x", "y"], ["a", "b"])
    assert corpus.counts["skipped_empty"] == 2
    assert corpus.domains == {"a": 1, "b": 1}


def test_a_text_file_has_no_domains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.txt").write_text("x\n")
    with pytest.raises(CorpusError, match=r"c\.txt: a text file has one text a line and no column 'source'"):
        Corpus.open(tmp_path / "c.txt", domain_key="source")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"x\n")))
    assert_matches(refusal("-"), "stdin: a text file has one text a line and no column 'source'")


@pytest.mark.parametrize("key", ["", "text"])
def test_a_domain_key_must_differ_from_the_text_key(tmp_path: Path, key: str) -> None:
    with pytest.raises(CorpusError, match="expected the name of a column that is not"):
        Corpus.open(jsonl(tmp_path / "c.jsonl"), domain_key=key)


def test_a_column_with_too_many_values_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "MAX_DOMAINS", 3)
    path = jsonl(tmp_path / "c.jsonl", domains=["a", "b", "c", "a"])
    assert read(Corpus.open(path, domain_key="source"))[1] == ["a", "b", "c", "a"]
    message = refusal(jsonl(tmp_path / "d.jsonl", domains=["a", "b", "c", "d"]))
    assert_matches(message, "d.jsonl: 'source' has more than 3 different values")


def test_a_lone_surrogate_in_a_domain_is_replaced_as_in_a_text(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"text": "x", "source": "a\\ud800"}\n')
    assert read(Corpus.open(path, domain_key="source"))[1] == ["a\ufffd"]


# Storage


def test_a_build_stores_the_domain_of_every_record(tmp_path: Path) -> None:
    filled(tmp_path, jsonl(tmp_path / "c.jsonl"))
    assert stored_domains(tmp_path) == DOMAINS
    with TeacherCache.open(tmp_path / "cache") as cache:
        manifest = cache.corpus()
        record = manifest.record
        assert (record.domains, record.domain_records, record.domain_key) == (
            ("land", "sea", "air"),
            (1, 2, 1),
            "source",
        )
        assert manifest.domains_of(np.array([3, 0, 1])).tolist() == [2, 0, 1]
        assert manifest.domains_of(np.empty(0, dtype=np.int64)).shape == (0,)
        with pytest.raises(IndexError, match="has 4 records, counted from 0"):
            manifest.domains_of(np.array([4]))
        (file,) = domain_files(tmp_path)
        assert file == record.domains_file(cache.path)
    stored = np.load(file)
    assert (stored.tolist(), stored.dtype) == (NUMBERS, np.dtype("<u2"))


def test_the_error_for_missing_domains_names_the_command_that_adds_them(tmp_path: Path) -> None:
    filled(tmp_path, jsonl(tmp_path / "c.jsonl"), None)
    assert domain_files(tmp_path) == []
    with (
        TeacherCache.open(tmp_path / "cache") as cache,
        pytest.raises(CacheError, match=r"tcache build \.\.\. --name corpus --domain-key COLUMN"),
    ):
        cache.corpus().domains_of(np.array([0]))


def test_a_corpus_record_of_an_older_version_has_no_domains() -> None:
    old = b'{"name": "c", "fingerprint": "ab", "columns": ["text"], "records": 1, "distinct": 1, "sources": []}'
    record = CorpusRecord.from_json(old)
    assert (record.domains, record.domains_file(Path())) == ((), None)
    assert CorpusRecord.from_json(record.to_json()) == record


def test_domains_are_added_without_encoding(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "c.jsonl")
    first = filled(tmp_path, path, None)
    again = filled(tmp_path, path)
    assert (first.encoded, again.encoded) == (3, 0)
    assert stored_domains(tmp_path) == DOMAINS


def test_the_same_texts_built_without_domains_keep_the_stored_ones(tmp_path: Path) -> None:
    filled(tmp_path, jsonl(tmp_path / "c.jsonl"))
    filled(tmp_path, tmp_path / "c.jsonl", None)
    assert stored_domains(tmp_path) == DOMAINS
    filled(tmp_path, jsonl(tmp_path / "c.jsonl", ["a bus"], ["land"]), None)
    assert domain_files(tmp_path) == []
    with TeacherCache.open(tmp_path / "cache") as cache:
        assert cache.corpus().record.domains == ()


def test_new_domains_replace_old_ones_and_open_manifests_keep_the_old(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "c.jsonl", split=["b", "a", "b", "b"])
    filled(tmp_path, path)
    with TeacherCache.open(tmp_path / "cache") as cache:
        old = cache.corpus()
        filled(tmp_path, path, "split")
        assert stored_domains(tmp_path) == ["b", "a", "b", "b"]
        assert old.domains_of(np.arange(4)).tolist() == NUMBERS
    assert len(domain_files(tmp_path)) == 1


def test_info_counts_the_records_of_each_domain(tmp_path: Path) -> None:
    filled(tmp_path, jsonl(tmp_path / "c.jsonl"))
    filled(tmp_path, jsonl(tmp_path / "d.jsonl"), None, name="plain")
    corpora = describe(tmp_path / "cache")["corpora"]
    assert corpora["corpus"]["domains"] == {"land": 1, "sea": 2, "air": 1}
    assert corpora["plain"]["domains"] == {}


# Checks and repair


def lost(file: Path) -> None:
    file.unlink()


def cut(file: Path) -> None:
    np.save(file, np.load(file)[:-1])


def out_of_range(file: Path) -> None:
    numbers = np.load(file)
    numbers[2] = 3
    np.save(file, numbers)


def changed(file: Path) -> None:
    numbers = np.load(file)
    numbers[2] = 0
    np.save(file, numbers)


@pytest.mark.parametrize(
    ("damage", "deep", "message"),
    [
        (lost, False, "the domain list of corpus 'corpus' .* cannot be read"),
        (cut, False, r"has uint16 of shape \(3,\), expected uint16 of shape \(4,\)"),
        (out_of_range, False, "names domain 3, counted from 0, of its 3"),
        (changed, True, "the domain list of corpus 'corpus' is not the one that was written"),
    ],
)
def test_repair_and_build_restore_a_damaged_domain_list(tmp_path: Path, damage: Any, deep: bool, message: str) -> None:
    path = jsonl(tmp_path / "c.jsonl")
    filled(tmp_path, path)
    (file,) = domain_files(tmp_path)
    cache = tmp_path / "cache"
    for fix in (lambda: repair(cache), lambda: filled(tmp_path, path)):
        damage(file)
        (found,) = verify(cache, deep=deep).damage
        assert (found.kind, found.rows) == ("corpus", 4)
        assert_matches(found.where, message)
        fix()
        assert verify(cache, deep=True).damage == []
        assert stored_domains(tmp_path) == DOMAINS


def test_a_missing_domain_list_is_reported_with_the_command_that_restores_it(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "c.jsonl")
    filled(tmp_path, path)
    lost(*domain_files(tmp_path))
    with (
        TeacherCache.open(tmp_path / "cache") as cache,
        pytest.raises(DamagedCache, match=r"tcache build .* --name corpus --domain-key source"),
    ):
        cache.corpus()
    path.unlink()
    report = repair(tmp_path / "cache", Corpus.open(jsonl(tmp_path / "copy.jsonl")))
    (left,) = report.unrepaired
    assert "--text-key text --domain-key source" in left.action
    assert repair(tmp_path / "cache", Corpus.open(tmp_path / "copy.jsonl", domain_key="source")).ok
    assert stored_domains(tmp_path) == DOMAINS


def test_repair_restores_a_manifest_and_keeps_its_intact_domain_list(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "c.jsonl")
    filled(tmp_path, path)
    (tmp_path / "copy.jsonl").write_bytes(path.read_bytes())
    path.unlink()
    (rows,) = (tmp_path / "cache/corpora/corpus").glob("rows-*")
    rows.unlink()
    report = repair(tmp_path / "cache", Corpus.open(tmp_path / "copy.jsonl"))
    assert report.ok
    assert report.repaired
    assert stored_domains(tmp_path) == DOMAINS
    assert {file.name for file in (tmp_path / "cache/corpora/corpus").iterdir()} == {
        rows.name,
        domain_files(tmp_path)[0].name,
        "corpus.json",
    }


def test_repair_refuses_sources_with_changed_domains(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "c.jsonl")
    filled(tmp_path, path)
    lost(*domain_files(tmp_path))
    jsonl(path, domains=["land", "sea", "land", "air"])
    assert not repair(tmp_path / "cache").ok


def test_reindex_keeps_only_domains_that_match_their_fingerprint(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "c.jsonl")
    filled(tmp_path, path)
    assert reindex(tmp_path / "cache").ok
    assert stored_domains(tmp_path) == DOMAINS
    changed(*domain_files(tmp_path))
    (left,) = reindex(tmp_path / "cache").left_out
    assert "is not the one that was written" in left.why


# Merge and gc


def test_merge_copies_domains(tmp_path: Path) -> None:
    filled(tmp_path / "one", jsonl(tmp_path / "a.jsonl", ["a sledge"], ["snow"]), name="other")
    filled(tmp_path / "two", jsonl(tmp_path / "c.jsonl"))
    merge([tmp_path / "one/cache", tmp_path / "two/cache"], tmp_path / "cache")
    assert stored_domains(tmp_path) == DOMAINS
    assert verify(tmp_path / "cache", deep=True).damage == []


@pytest.mark.parametrize("first", ["with", "without"])
def test_merging_a_corpus_with_and_without_domains_keeps_them(tmp_path: Path, first: str) -> None:
    path = jsonl(tmp_path / "c.jsonl")
    filled(tmp_path / "with", path)
    filled(tmp_path / "without", path, None)
    second = "without" if first == "with" else "with"
    merge([tmp_path / first / "cache", tmp_path / second / "cache"], tmp_path / "cache")
    assert stored_domains(tmp_path) == DOMAINS


def test_merge_refuses_different_domains_for_one_corpus(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "c.jsonl", split=["b", "a", "b", "b"])
    filled(tmp_path / "one", path)
    filled(tmp_path / "none", path, None)
    filled(tmp_path / "two", path, "split")
    caches = [tmp_path / name / "cache" for name in ("none", "one", "two")]
    with pytest.raises(CacheError, match=r"have different domains of corpus 'corpus' \(by source and by split\)"):
        merge(caches, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_gc_removes_only_unreferenced_domain_lists(tmp_path: Path) -> None:
    filled(tmp_path, jsonl(tmp_path / "c.jsonl"))
    (file,) = domain_files(tmp_path)
    old = file.with_name("domains-0123456789abcdef.npy")
    old.write_bytes(file.read_bytes())
    (freed,) = reclaim(tmp_path / "cache").freed
    assert (freed.what, freed.where) == ("old row list", str(old.relative_to(tmp_path / "cache")))
    assert domain_files(tmp_path) == [file]
    reclaim(tmp_path / "cache", corpora=["corpus"])
    assert domain_files(tmp_path) == []
