"""What `Corpus` reads, refuses and counts."""

import csv
import gzip
import io
import json
import random
import sys
import tracemalloc
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from teacher_cache.corpus.corpus import Corpus
from teacher_cache.errors import CorpusError, MissingDependency
from teacher_cache.table.layout import checked_name

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
zstandard = pytest.importorskip("zstandard")

AWKWARD = [
    "NA",
    "null",
    "nan",
    "007",
    " x ",
    "a,b",
    'say "hi"',
    "tab\there",
    "naïve 😀",
    "a\u2028b\x85c",
    "1e5",
]


def records(corpus: Corpus, n: int = 3) -> list[tuple[str, ...]]:
    return [record for batch in corpus.batches(n) for record in batch]


def texts_of(path: Path | str, text_key: str = "text") -> list[str]:
    return [text for (text,) in records(Corpus.open([path], text_key))]


def jsonl_bytes(rows: Sequence[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def csv_bytes(rows: Sequence[Sequence[str]], delimiter: str = ",") -> bytes:
    out = io.StringIO(newline="")
    csv.writer(out, delimiter=delimiter, quoting=csv.QUOTE_ALL).writerows(rows)
    return out.getvalue().encode()


def write(path: Path, data: bytes) -> Path:
    if path.suffix == ".gz":
        data = gzip.compress(data)
    elif path.suffix == ".zst":
        data = zstandard.ZstdCompressor().compress(data)
    path.write_bytes(data)
    return path


def write_parquet(path: Path, **columns: Any) -> Path:
    parquet.write_table(pyarrow.table(columns), path)
    return path


def save_dataset(path: Path, **columns: Any) -> Path:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(columns).save_to_disk(str(path))
    return path


def write_format(folder: Path, name: str, texts: Sequence[str]) -> Path:
    path = folder / name
    if name.startswith("saved"):
        return save_dataset(path, id=list(range(len(texts))), text=list(texts))
    if ".parquet" in name:
        return write_parquet(path, id=list(range(len(texts))), text=pyarrow.array(texts, pyarrow.string()))
    if ".txt" in name:
        return write(path, "".join(text + "\n" for text in texts).encode())
    if "json" in name.lower():
        return write(path, jsonl_bytes([{"id": i, "text": text} for i, text in enumerate(texts)]))
    rows = [["id", "text"], *([str(i), text] for i, text in enumerate(texts))]
    return write(path, csv_bytes(rows, "\t" if ".tsv" in name else ","))


def refusal(paths: Any, text_key: str | Sequence[str] = "text") -> str:
    """The one-line error message of opening or reading."""
    with pytest.raises(CorpusError) as caught:
        records(Corpus.open(paths, text_key))
    message = str(caught.value)
    assert "\n" not in message
    return message


def feed_stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


FORMATS = [
    *(f"c{kind}{how}" for kind in (".jsonl", ".csv", ".tsv", ".txt") for how in ("", ".gz", ".zst")),
    *("c.ndjson", "c.json-lines", "c.JSONL", "c.v1.csv", "c.parquet", "saved"),
]


@pytest.mark.parametrize("name", FORMATS)
def test_texts_of_every_format_are_kept_exactly_as_they_are(tmp_path: Path, name: str) -> None:
    corpus = Corpus.open([write_format(tmp_path, name, AWKWARD)])
    assert records(corpus) == [(text,) for text in AWKWARD]
    assert corpus.counts["records"] == len(AWKWARD)
    assert corpus.counts["skipped_empty"] == corpus.counts["replaced_surrogates"] == corpus.counts["nul"] == 0


def test_the_fingerprint_is_the_same_in_every_format(tmp_path: Path) -> None:
    fingerprints = set()
    for name in FORMATS:
        corpus = Corpus.open([write_format(tmp_path, name, AWKWARD)])
        records(corpus)
        fingerprints.add(corpus.fingerprint)
    assert len(fingerprints) == 1


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n"), min_size=1)))
def test_any_texts_round_trip_with_one_fingerprint(tmp_path: Path, texts: list[str]) -> None:
    kept = [text for text in texts if text.strip()]
    fingerprints = set()
    for name in ("c.jsonl", "c.csv", "c.parquet"):
        corpus = Corpus.open([write_format(tmp_path, name, texts)])
        assert records(corpus) == [(text,) for text in kept]
        assert corpus.counts["records"] == len(kept)
        assert corpus.counts["skipped_empty"] == len(texts) - len(kept)
        assert corpus.counts["nul"] == sum("\0" in text for text in kept)
        fingerprints.add(corpus.fingerprint)
    assert len(fingerprints) == 1


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r"))))
def test_any_lines_round_trip_through_a_text_file(tmp_path: Path, texts: list[str]) -> None:
    path = write(tmp_path / "c.txt", "".join(text + "\n" for text in texts).encode())
    expected = [text for text in texts if text.strip()]
    if texts and texts[0].startswith("\ufeff"):
        expected = [text for text in [texts[0][1:], *texts[1:]] if text.strip()]
    assert texts_of(path) == expected


def test_the_fingerprint_is_blake2b_of_length_prefixed_texts(tmp_path: Path) -> None:
    corpus = Corpus.open([write(tmp_path / "c.txt", "é\nab\n".encode())])
    records(corpus)
    framed = b"\1" + bytes(7) + b"\2" + bytes(7) + "é".encode() + b"\2" + bytes(7) + b"ab"
    assert corpus.fingerprint == blake2b(framed, digest_size=16).hexdigest()


def test_the_fingerprint_depends_on_columns_and_text_boundaries(tmp_path: Path) -> None:
    def fingerprint(name: str, rows: list[dict[str, str]], key: str) -> str:
        corpus = Corpus.open([write(tmp_path / name, jsonl_bytes(rows))], key)
        records(corpus)
        return corpus.fingerprint

    found = [
        fingerprint("1.jsonl", [{"a": "ab", "b": "c"}], "a,b"),
        fingerprint("2.jsonl", [{"a": "a", "b": "bc"}], "a,b"),
        fingerprint("3.jsonl", [{"a": "c", "b": "ab"}], "a,b"),
        fingerprint("4.jsonl", [{"a": "ab"}, {"a": "c"}], "a"),
        fingerprint("5.jsonl", [{"a": "abc"}], "a"),
    ]
    assert len(set(found)) == len(found)


def test_the_fingerprint_ignores_batch_size_file_borders_blank_lines_and_names(tmp_path: Path) -> None:
    one = Corpus.open([write(tmp_path / "1.txt", b"a\nb\nc\n")])
    records(one, 1)
    split = Corpus.open(
        [
            write(tmp_path / "2.jsonl", b'{"other": "a"}\n\n'),
            write(tmp_path / "3.csv", b"other\nb\nc\n"),
        ],
        "other",
    )
    records(split, 100)
    assert split.fingerprint == one.fingerprint


def test_fingerprint_and_sources_are_unknown_before_a_complete_pass(tmp_path: Path) -> None:
    corpus = Corpus.open([write(tmp_path / "c.txt", b"a\nb\n")])
    with pytest.raises(CorpusError, match="fingerprint is known only after"):
        _ = corpus.fingerprint
    records(corpus)
    assert len(corpus.fingerprint) == 32
    unfinished = corpus.batches(1)
    next(unfinished)
    with pytest.raises(CorpusError, match="fingerprint is known only after"):
        _ = corpus.fingerprint
    with pytest.raises(CorpusError, match="sources is known only after"):
        _ = corpus.sources


def test_batches_are_full_and_cross_file_borders(tmp_path: Path) -> None:
    paths = [write(tmp_path / "1.txt", b"a\nb\nc\n"), write(tmp_path / "2.txt", b"d\ne\n")]
    batches = list(Corpus.open(paths).batches(2))
    assert batches == [[("a",), ("b",)], [("c",), ("d",)], [("e",)]]


def test_a_batch_size_below_one_is_refused_before_iterating(tmp_path: Path) -> None:
    corpus = Corpus.open([write(tmp_path / "c.txt", b"a\n")])
    with pytest.raises(ValueError, match="expected 1 or more"):
        corpus.batches(0)


def test_sources_give_the_records_of_each_file(tmp_path: Path) -> None:
    first = write(tmp_path / "1.txt", b"a\n\nb\n")
    empty = write(tmp_path / "2.txt", b"")
    last = write(tmp_path / "3.jsonl", b'{"text": "c"}\n')
    corpus = Corpus.open([first, empty, last])
    records(corpus)
    assert corpus.sources == [(str(first), 0, 2), (str(empty), 2, 0), (str(last), 2, 1)]


def test_a_second_pass_gives_the_same_records_and_new_counts(tmp_path: Path) -> None:
    corpus = Corpus.open([write(tmp_path / "c.txt", b"a\n\nb\n")])
    first = records(corpus)
    counts, fingerprint = dict(corpus.counts), corpus.fingerprint
    assert records(corpus) == first == [("a",), ("b",)]
    assert corpus.counts == counts
    assert corpus.counts["records"] == 2
    assert corpus.fingerprint == fingerprint


def test_duplicates_are_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "c.txt", b"a\na\n")
    assert records(Corpus.open([path, path])) == [("a",)] * 4


@pytest.mark.parametrize("key", ["s1,s2", ["s1", "s2"], ("s1", "s2")])
def test_several_keys_give_one_text_each_in_the_given_order(tmp_path: Path, key: Any) -> None:
    corpus = Corpus.open(
        [
            write(tmp_path / "1.jsonl", jsonl_bytes([{"s2": "b", "s1": "a", "label": 1}])),
            write(tmp_path / "2.csv", b"s2,label,s1\nd,0,c\n"),
            write(tmp_path / "3.tsv", b"s2\tlabel\ts1\nf\t0\te\n"),
            write_parquet(tmp_path / "4.parquet", s2=["h"], label=[0], s1=["g"]),
            save_dataset(tmp_path / "5", s2=["j"], label=[0], s1=["i"]),
        ],
        key,
    )
    assert corpus.columns == ("s1", "s2")
    assert records(corpus) == [("a", "b"), ("c", "d"), ("e", "f"), ("g", "h"), ("i", "j")]


def test_a_single_path_need_not_be_in_a_list(tmp_path: Path) -> None:
    path = write(tmp_path / "c.txt", b"a\n")
    assert records(Corpus.open(path)) == records(Corpus.open(str(path))) == [("a",)]


@pytest.mark.parametrize("key", ["", "a,", "a,a", []])
def test_empty_or_repeated_keys_are_refused(tmp_path: Path, key: Any) -> None:
    assert "distinct names" in refusal([write(tmp_path / "c.txt", b"a\n")], key)


def test_a_glob_is_expanded_in_sorted_order(tmp_path: Path) -> None:
    for name in ("part-2", "part-0", "part-1"):
        write(tmp_path / f"{name}.txt", name.encode())
    (tmp_path / "deep").mkdir()
    write(tmp_path / "deep" / "part-3.txt", b"part-3")
    assert texts_of(tmp_path / "part-*.txt") == ["part-0", "part-1", "part-2"]
    assert sorted(texts_of(f"{tmp_path}/**/*.txt")) == ["part-0", "part-1", "part-2", "part-3"]


def test_a_file_with_glob_characters_in_its_name_is_not_a_glob(tmp_path: Path) -> None:
    assert texts_of(write(tmp_path / "c[1].txt", b"a\n")) == ["a"]


def test_missing_paths_are_refused_when_opening(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "no.txt", "no such file"), (tmp_path / "*.txt", "matches no file")):
        with pytest.raises(CorpusError, match=reason) as caught:
            Corpus.open([path])
        assert str(path) in str(caught.value)
    with pytest.raises(CorpusError, match="no corpus given"):
        Corpus.open([])


@pytest.mark.parametrize("name", ["c.json", "c", "c.gz", "c.xlsx", "c.parquet.gz"])
def test_an_unknown_format_is_refused_with_the_known_ones(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"")
    message = refusal([path])
    assert str(path) in message
    for known in (".jsonl", ".ndjson", ".json-lines", ".csv", ".tsv", ".txt", ".parquet", ".gz", ".zst"):
        assert known in message


def test_a_dataset_dict_is_refused_with_its_splits(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    split = datasets.Dataset.from_dict({"text": ["a"]})
    datasets.DatasetDict(train=split, test=split).save_to_disk(str(tmp_path / "d"))
    message = refusal([tmp_path / "d"])
    assert str(tmp_path / "d" / "train") in message
    assert str(tmp_path / "d" / "test") in message
    assert texts_of(tmp_path / "d" / "train") == ["a"]


def test_a_folder_that_is_not_a_dataset_is_refused(tmp_path: Path) -> None:
    assert "state.json" in refusal([tmp_path])


@pytest.mark.parametrize("name", ["c.parquet", "saved"])
def test_more_rows_than_one_read_are_complete_and_in_order(tmp_path: Path, name: str) -> None:
    texts = [f"text {i}" for i in range(3000)]
    assert texts_of(write_format(tmp_path, name, texts)) == texts


def test_dictionary_encoded_and_large_strings_are_texts(tmp_path: Path) -> None:
    plain = pyarrow.array(["a", "b", "a"])
    path = write_parquet(tmp_path / "c.parquet", text=plain.dictionary_encode())
    assert texts_of(path) == ["a", "b", "a"]
    assert texts_of(write_parquet(tmp_path / "d.parquet", text=plain.cast("large_string"))) == ["a", "b", "a"]


# Errors


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('{"text": 7}', "'text' is a number"),
        ('{"text": 1.5}', "'text' is a number"),
        ('{"text": null}', "'text' is null"),
        ('{"text": true}', "'text' is a boolean"),
        ('{"text": ["a"]}', "'text' is a list"),
        ('{"text": {"a": 1}}', "'text' is an object"),
        ('{"sentence": "a", "label": 1}', "no key 'text', found 'sentence', 'label'"),
        ("{}", "no key 'text', found none"),
        ('["a"]', "found a list, expected a JSON object"),
        ('"a"', "found a string, expected a JSON object"),
        ('{"text": "a"', "not JSON"),
        ("plain words", "not JSON"),
        ('{"text": "a"} {"text": "b"}', "not JSON (Extra data: character 15"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_json_line_without_a_text_is_refused_at_its_line(tmp_path: Path, line: str, found: str) -> None:
    path = write(tmp_path / "c.jsonl", b'{"text": "fine"}\n\n' + line.encode() + b"\n")
    message = refusal([path])
    assert message.startswith(f"{path}:3: ")
    assert found in message


def test_records_before_an_invalid_one_are_returned_and_reading_can_restart(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", b'{"text": "a"}\n{"text": 1}\n')
    corpus = Corpus.open([path])
    stream = corpus.batches(1)
    assert next(stream) == [("a",)]
    with pytest.raises(CorpusError):
        next(stream)
    with pytest.raises(CorpusError, match="known only after"):
        _ = corpus.fingerprint
    write(path, b'{"text": "a"}\n{"text": "1"}\n')
    assert records(corpus) == [("a",), ("1",)]


@pytest.mark.parametrize("name", ["c.parquet", "saved"])
def test_a_null_in_a_column_is_refused_at_its_row(tmp_path: Path, name: str) -> None:
    texts: list[Any] = ["a"] * 2000
    texts[1500] = None
    path = write_format(tmp_path, name, texts)
    assert refusal([path]).startswith(f"{path}: row 1501: 'text' is null")


def test_a_null_in_a_dictionary_encoded_column_is_refused(tmp_path: Path) -> None:
    encoded = pyarrow.array(["a", None]).dictionary_encode()
    assert "row 2: 'text' is null" in refusal([write_parquet(tmp_path / "c.parquet", text=encoded)])


@pytest.mark.parametrize("write_columns", [write_parquet, save_dataset])
def test_a_column_of_another_type_or_name_is_refused(tmp_path: Path, write_columns: Any) -> None:
    path = write_columns(tmp_path / "c.parquet", text=[1, 2], other=["a", "b"])
    assert f"{path}: column 'text' is int64, expected strings" in refusal([path])
    assert "no column 'sentence', found 'text', 'other'" in refusal([path], "sentence")


def test_parquet_bytes_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    broken = pyarrow.array([b"a", b"\xff"]).view(pyarrow.string())
    path = write_parquet(tmp_path / "c.parquet", text=broken)
    assert "'text' is not UTF-8" in refusal([path])


def test_a_csv_without_the_column_is_refused_with_its_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "c.csv", b"sentence,label\na,1\n")
    assert f"{path}: no column 'text', found 'sentence', 'label'" in refusal([path])


def test_a_csv_without_a_header_or_with_the_column_twice_is_refused(tmp_path: Path) -> None:
    assert "no header line" in refusal([write(tmp_path / "1.csv", b"")])
    assert "occurs 2 times" in refusal([write(tmp_path / "2.csv", b"text,text\na,b\n")])


@pytest.mark.parametrize("row", [b"a,1,2", b"a"])
def test_a_csv_row_with_a_wrong_number_of_fields_is_refused_at_its_line(tmp_path: Path, row: bytes) -> None:
    path = write(tmp_path / "c.csv", b'text,label\n"two\nlines",0\n' + row + b"\n")
    message = refusal([path])
    assert message.startswith(f"{path}:4: {row.count(b',') + 1} fields, the header has 2")


@pytest.mark.parametrize("row", [b'"never closed\nb\nc\n', b'"a" b\n', b"a\rb\n"])
def test_broken_csv_quoting_is_refused_where_the_record_starts(tmp_path: Path, row: bytes) -> None:
    path = write(tmp_path / "c.csv", b"text\nfine\n" + row)
    assert refusal([path]).startswith(f"{path}:3: not CSV")


@pytest.mark.parametrize("name", ["c.txt", "c.jsonl", "c.csv", "c.tsv", "c.txt.gz", "c.txt.zst"])
@pytest.mark.parametrize("bad", [b"caf\xe9", b"\xed\xa0\x80"], ids=["latin-1", "encoded surrogate"])
def test_bytes_that_are_not_utf8_are_refused_at_their_line(tmp_path: Path, name: str, bad: bytes) -> None:
    rows = [b'{"text": "a"}', b'{"text": "' + bad + b'"}'] if "json" in name else [b"text", bad]
    path = write(tmp_path / name, b"\n".join(rows) + b"\n")
    message = refusal([path])
    assert message.startswith(f"{path}:2: ")
    assert "not UTF-8" in message


def test_utf16_is_refused_at_the_first_line(tmp_path: Path) -> None:
    path = write(tmp_path / "c.txt", "a\n".encode("utf-16"))
    assert refusal([path]).startswith(f"{path}:1: byte 1 of the line, 0xff, is not UTF-8")


@pytest.mark.parametrize("name", ["c.txt.gz", "c.txt.zst", "c.parquet"])
@pytest.mark.parametrize("damage", ["cut", "other"])
def test_a_truncated_or_mislabeled_file_is_refused(tmp_path: Path, name: str, damage: str) -> None:
    path = write_format(tmp_path, name, [f"text {i} {i * i}" for i in range(2000)])
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] if damage == "cut" else b"just words " * 99)
    assert refusal([path]).startswith(f"{path}: cannot be read")


def test_a_damaged_saved_dataset_is_refused(tmp_path: Path) -> None:
    path = save_dataset(tmp_path / "saved", text=["a"])
    next(path.glob("*.arrow")).unlink()
    assert refusal([path]).startswith(f"{path}: cannot be read")


def test_two_keys_are_refused_for_a_text_file_when_opening(tmp_path: Path) -> None:
    path = write(tmp_path / "c.txt", b"a\n")
    with pytest.raises(CorpusError, match=r"`text_key` names 2 \('a', 'b'\)"):
        Corpus.open([path], "a,b")


@pytest.mark.parametrize(
    ("name", "library"),
    [("c.parquet", "pyarrow"), ("c.csv.zst", "pyarrow"), ("saved", "datasets")],
)
def test_a_missing_library_is_named_with_its_extra_when_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, library: str
) -> None:
    path = write_format(tmp_path, name, ["a"])
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingDependency, match=rf"{library}: pip install 'teacher-cache\[formats\]'"):
        Corpus.open([path])


# Changes, skips and counts


@pytest.mark.parametrize("name", ["c.jsonl", "c.csv", "c.tsv", "c.txt"])
def test_a_byte_order_mark_is_dropped_and_counted_by_file(tmp_path: Path, name: str) -> None:
    path = write_format(tmp_path, name, ["a", "\ufeffb"])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    corpus = Corpus.open([path, write(tmp_path / "other.txt", b"c\n")])
    assert records(corpus) == [("a",), ("\ufeffb",), ("c",)]
    assert corpus.counts["bom"] == 1


def test_the_first_csv_column_is_found_after_a_byte_order_mark(tmp_path: Path) -> None:
    assert texts_of(write(tmp_path / "c.csv", b"\xef\xbb\xbftext,label\na,1\n")) == ["a"]


def test_lf_and_crlf_both_end_a_line_and_crlf_is_counted(tmp_path: Path) -> None:
    corpus = Corpus.open(
        [
            write(tmp_path / "1.txt", b"a\r\nb\nc"),
            write(tmp_path / "2.jsonl", b'{"text": "d"}\r\n{"text": "e\\r\\nf"}\n'),
            write(tmp_path / "3.csv", b'text\r\ng\r\n"h\r\ni"\n'),
        ]
    )
    assert records(corpus) == [("a",), ("b",), ("c",), ("d",), ("e\r\nf",), ("g",), ("h\r\ni",)]
    assert corpus.counts["crlf"] == 4


@pytest.mark.parametrize("name", ["c.txt", "c.jsonl", "c.csv"])
@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_no_other_character_ends_a_line(tmp_path: Path, name: str, mark: str) -> None:
    text = f"a{mark}b"
    raw = json.dumps({"text": text}, ensure_ascii=mark < " ") if "json" in name else text
    header = "text\n" if "csv" in name else ""
    assert texts_of(write(tmp_path / name, f"{header}{raw}\n".encode())) == [text]


def test_a_lone_carriage_return_stays_in_the_text(tmp_path: Path) -> None:
    assert texts_of(write(tmp_path / "c.txt", b"a\rb\nc\r\r\n")) == ["a\rb", "c\r"]
    assert texts_of(write(tmp_path / "c.csv", b'text\n"a\rb"\n')) == ["a\rb"]


def test_lone_surrogates_are_replaced_and_their_texts_counted(tmp_path: Path) -> None:
    lines = [rb'{"text": "a\ud800b\udfff"}', rb'{"text": "\ud83d\ude00"}', rb'{"text": "\udc00"}']
    corpus = Corpus.open([write(tmp_path / "c.jsonl", b"\n".join(lines))])
    assert records(corpus) == [("a\ufffdb\ufffd",), ("😀",), ("\ufffd",)]
    assert corpus.counts["replaced_surrogates"] == 2


@pytest.mark.parametrize("name", ["c.jsonl", "c.csv", "c.tsv", "c.txt", "c.parquet", "saved"])
def test_nul_is_kept_and_counted_by_text(tmp_path: Path, name: str) -> None:
    corpus = Corpus.open([write_format(tmp_path, name, ["a\0b\0", "\0", "c"])])
    assert records(corpus) == [("a\0b\0",), ("\0",), ("c",)]
    assert corpus.counts["nul"] == 2


@pytest.mark.parametrize("name", ["c.jsonl", "c.csv", "c.tsv", "c.txt", "c.parquet", "saved"])
def test_an_empty_text_is_skipped_and_counted(tmp_path: Path, name: str) -> None:
    corpus = Corpus.open([write_format(tmp_path, name, ["a", "", "b", " \t\u3000", "c"])])
    assert records(corpus) == [("a",), ("b",), ("c",)]
    assert corpus.counts["skipped_empty"] == 2
    assert corpus.counts["records"] == 3


@pytest.mark.parametrize("data", [b"text\na\n\nb\n", b"text\r\na\r\n\r\nb\r\n"])
def test_a_blank_line_of_a_csv_is_skipped_and_counted(tmp_path: Path, data: bytes) -> None:
    corpus = Corpus.open([write(tmp_path / "c.csv", data)])
    assert records(corpus) == [("a",), ("b",)]
    assert corpus.counts["skipped_empty"] == 1


def test_a_pair_with_one_empty_text_is_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "c.csv", b"a,b\nx,\n,y\nx,y\n , \n\n")
    corpus = Corpus.open([path], "a,b")
    assert records(corpus) == [("x", "y")]
    assert corpus.counts["skipped_empty"] == 4


def test_a_text_of_a_million_characters_is_read_from_every_line_format(tmp_path: Path) -> None:
    long = "word " * 200_000
    csv.field_size_limit(131_072)
    for name in ("c.csv", "c.tsv", "c.jsonl", "c.txt"):
        assert texts_of(write_format(tmp_path, name, [long])) == [long]


def test_an_empty_file_has_no_records(tmp_path: Path) -> None:
    for name in ("c.txt", "c.jsonl", "c.txt.gz", "c.jsonl.zst"):
        assert texts_of(write(tmp_path / name, b"")) == []
    assert texts_of(write(tmp_path / "bom.txt", b"\xef\xbb\xbf")) == []
    assert texts_of(write_format(tmp_path, "c.parquet", [])) == []


@pytest.mark.parametrize("name", ["c.txt.gz", "c.txt.zst"])
def test_concatenated_compressed_files_are_read_completely(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, b"a\nb")
    path.write_bytes(path.read_bytes() + write(tmp_path / f"more-{name}", b"c\nd\n").read_bytes())
    assert texts_of(path) == ["a", "bc", "d"]


@pytest.mark.parametrize(
    ("files", "name"),
    [
        (["deep/train.jsonl"], "train"),
        (["train.v2.JSONL.GZ", "other.txt"], "train.v2"),
        (["my corpus (1).txt"], "my-corpus-1"),
        ([".hidden.txt"], "hidden"),
        (["данные.txt"], "corpus"),
        ([f"{'x' * 120}.txt"], "x" * 100),
        (["saved.data"], "saved.data"),
        (["part-*.txt"], "part-0"),
    ],
)
def test_a_corpus_is_named_after_its_first_file(tmp_path: Path, files: list[str], name: str) -> None:
    (tmp_path / "deep").mkdir()
    for file in ("part-0.txt", "part-1.txt", *files):
        if file == "saved.data":
            save_dataset(tmp_path / file, text=["a"])
        elif "*" not in file:
            (tmp_path / file).write_text("a")
    assert Corpus.open([tmp_path / file for file in files]).name == name
    assert checked_name(name) == name


def test_a_folder_given_as_a_dot_has_its_real_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(save_dataset(tmp_path / "saved", text=["a"]))
    corpus = Corpus.open(".")
    assert (corpus.name, corpus.origins) == ("saved", [str(tmp_path / "saved")])


# Standard input


def test_stdin_is_a_name_and_an_origin() -> None:
    corpus = Corpus.open("-")
    assert (corpus.name, corpus.origins) == ("stdin", ["stdin"])


def test_stdin_is_json_lines_when_its_first_line_is_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    feed_stdin(monkeypatch, b'\xef\xbb\xbf\n \n{"a": "x", "b": "y"}\r\n')
    corpus = Corpus.open(["-"], "a,b")
    assert records(corpus) == [("x", "y")]
    assert corpus.counts["skipped_empty"] == 2
    assert corpus.counts["bom"] == corpus.counts["crlf"] == 1
    assert corpus.sources == [("stdin", 0, 1)]


def test_stdin_is_otherwise_one_text_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    feed_stdin(monkeypatch, b"\nNA\n{not json}\n")
    corpus = Corpus.open([write(tmp_path / "c.txt", b"first\n"), "-"])
    assert records(corpus) == [("first",), ("NA",), ("{not json}",)]
    assert corpus.counts["skipped_empty"] == 1


def test_errors_in_stdin_name_stdin_and_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    feed_stdin(monkeypatch, b'\n{"text": "a"}\n{"text": 1}\n')
    assert refusal(["-"]).startswith("stdin:3: 'text' is a number")
    feed_stdin(monkeypatch, b"plain\n")
    assert "`text_key` names 2" in refusal(["-"], "a,b")


def test_stdin_cannot_be_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    feed_stdin(monkeypatch, b"a\n")
    corpus = Corpus.open(["-"])
    assert records(corpus) == [("a",)]
    with pytest.raises(CorpusError, match="cannot be read twice"):
        records(corpus)
    assert "more than once" in refusal(["-", "-"])


# Memory


@pytest.fixture(scope="module")
def long_texts() -> list[str]:
    """15 MB."""
    numbers = random.Random(0)
    return [numbers.randbytes(500).hex() for _ in range(15_000)]


@pytest.mark.parametrize("name", ["c.jsonl", "c.csv", "c.txt.gz", "c.txt.zst", "c.parquet"])
def test_reading_holds_one_batch_in_memory_not_the_file(tmp_path: Path, name: str, long_texts: list[str]) -> None:
    path = write_format(tmp_path, name, long_texts)
    corpus = Corpus.open([path])
    arrow_before = pyarrow.total_allocated_bytes()
    stream = corpus.batches(100)
    next(stream)  # modules imported on the first read do not count
    tracemalloc.start()
    try:
        arrow_peak = max(pyarrow.total_allocated_bytes() - arrow_before for _ in stream)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert corpus.counts["records"] == 15_000
    assert peak < 4_000_000
    assert arrow_peak < 8_000_000
