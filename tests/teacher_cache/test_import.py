"""Imports of exports and of vectors computed elsewhere, and their checks."""

import dataclasses
import json
import pickle
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teacher_cache.corpus.corpus import Corpus
from teacher_cache.errors import (
    CacheError,
    CorpusError,
    KnownError,
    SpaceMismatch,
)
from teacher_cache.maintenance.check import verify
from teacher_cache.space import EmbeddingSpace
from teacher_cache.storage.codec import ENCODINGS
from teacher_cache.table import intake
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.view import SpaceView
from teacher_cache.teachers import BACKENDS, resolve
from teacher_cache.transfer import EXPORT_FORMATS, exporter, importer
from teacher_cache.transfer.exporter import export
from teacher_cache.transfer.foreign import foreign_space
from teacher_cache.transfer.importer import import_vectors
from tests.teacher_cache.copies import (
    RECORDS,
    TEXTS,
    all_vectors,
    empty_cache,
    files,
    killed_until_done,
    named,
    npy,
    same_vectors,
)
from tests.teacher_cache.small_caches import (
    SHARD_ROWS,
    TOY,
    built,
    corpus_of,
    numbered,
    passing_folder,
    teacher_vectors,
)

# Exports of a cache


@pytest.mark.parametrize(
    ("form", "storage"),
    [*(("npy", storage) for storage in ENCODINGS), ("parquet", "float16-raw"), ("hf-dataset", "int8")],
)
def test_a_build_after_an_import_encodes_nothing(tmp_path: Path, form: str, storage: str) -> None:
    built(tmp_path / "a", RECORDS, storage=storage)
    export(tmp_path / "a/cache", named(tmp_path, form), form, corpus="corpus")
    report = import_vectors(named(tmp_path, form), empty_cache(tmp_path / "b/cache"))
    assert (report.rows, report.distinct, report.stored, report.held, report.quarantined) == (22, 20, 20, 0, 0)
    assert report.corpus == "corpus"
    with TeacherCache.open(tmp_path / "b/cache") as cache:
        assert cache.space().record.storage == storage
        assert cache.texts(cache.corpus().rows[:, 0]) == RECORDS
    assert same_vectors(tmp_path / "a/cache", tmp_path / "b/cache")
    assert verify(tmp_path / "b/cache", deep=True).ok
    again = built(tmp_path / "b", RECORDS, name="again")
    assert (again.cached, again.encoded, again.space) == (20, 0, report.space)


texts_of_any_kind = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
    lambda text: not text.isspace()
)


@settings(deadline=None, max_examples=25)
@given(st.lists(texts_of_any_kind, min_size=1, max_size=30), st.sampled_from(list(EXPORT_FORMATS)), st.integers(1, 9))
def test_any_text_survives_export_and_import(texts: list[str], form: str, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch, passing_folder() as name:
        folder = Path(name)
        patch.setattr(exporter, "BLOCK_RECORDS", block)
        patch.setattr(importer, "READ_RECORDS", block)
        built(folder / "a", texts)
        export(folder / "a/cache", named(folder, form), form, corpus="corpus")
        import_vectors(named(folder, form), folder / "b")
        with TeacherCache.open(folder / "b") as cache:
            assert cache.texts(cache.corpus().rows[:, 0]) == texts
        assert same_vectors(folder / "a/cache", folder / "b")


def test_an_import_adds_only_what_a_cache_lacks(tmp_path: Path) -> None:
    built(tmp_path / "a", RECORDS)
    export(tmp_path / "a/cache", tmp_path / "out", "npy", corpus="corpus")
    built(tmp_path / "b", ["own", *TEXTS[5:9]], name="own", storage="float16-raw")
    report = import_vectors(tmp_path / "out", tmp_path / "b/cache")
    assert (report.stored, report.held) == (16, 4)
    again = import_vectors(tmp_path / "out", tmp_path / "b/cache")
    assert (again.stored, again.held) == (0, 20)
    with TeacherCache.open(tmp_path / "b/cache") as cache:
        assert cache.space().record.storage == "float16-raw"
        assert set(cache.corpora()) == {"own", "corpus"}
    assert verify(tmp_path / "b/cache", deep=True).ok


def test_rows_in_any_order_are_written_one_shard_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built(tmp_path / "a", random.Random(0).sample(TEXTS, 20))
    export(tmp_path / "a/cache", tmp_path / "out", "npy")
    built(tmp_path / "b", TEXTS, teacher=dataclasses.replace(TOY, prompt="query: "))
    monkeypatch.setattr(intake, "WINDOW_ROWS", SHARD_ROWS)
    written: list[int] = []
    real = SpaceView.write

    def noted(self: SpaceView, number: int, *arguments: Any, **options: Any) -> Any:
        written.append(number)
        return real(self, number, *arguments, **options)

    monkeypatch.setattr(SpaceView, "write", noted)
    import_vectors(tmp_path / "out", tmp_path / "b/cache")
    assert written == [0, 1, 2]
    held = all_vectors(tmp_path / "b/cache", resolve(TOY).space.slug)
    assert np.array_equal(np.stack([held[text] for text in TEXTS]), teacher_vectors(TEXTS).astype(np.float16))


def test_a_corpus_of_the_same_texts_is_not_changed(tmp_path: Path) -> None:
    built(tmp_path / "a", RECORDS)
    export(tmp_path / "a/cache", tmp_path / "out", "npy", corpus="corpus")
    built(tmp_path / "b", RECORDS, teacher=dataclasses.replace(TOY, prompt="query: "))
    with TeacherCache.open(tmp_path / "b/cache") as cache:
        before = cache.corpora()
    import_vectors(tmp_path / "out", tmp_path / "b/cache")
    with TeacherCache.open(tmp_path / "b/cache") as cache:
        assert cache.corpora() == before


def test_another_corpus_of_that_name_is_replaced_only_if_named(tmp_path: Path) -> None:
    built(tmp_path / "a", RECORDS)
    export(tmp_path / "a/cache", tmp_path / "out", "npy", corpus="corpus")
    built(tmp_path / "b", TEXTS)
    before = files(tmp_path / "b/cache")
    with pytest.raises(CacheError, match=r"another corpus 'corpus'.*give this one a `name`"):
        import_vectors(tmp_path / "out", tmp_path / "b/cache")
    assert files(tmp_path / "b/cache") == before
    assert import_vectors(tmp_path / "out", tmp_path / "b/cache", name="corpus").rows == 22
    with TeacherCache.open(tmp_path / "b/cache") as cache:
        assert cache.corpus("corpus").record.records == 22


def test_a_whole_table_is_imported_under_the_name_of_its_folder(tmp_path: Path) -> None:
    built(tmp_path, TEXTS)
    export(tmp_path / "cache", tmp_path / "my vectors", "npy")
    export(tmp_path / "cache", tmp_path / "more.parquet", "parquet")
    assert import_vectors(tmp_path / "my vectors", tmp_path / "b").corpus == "my-vectors"
    assert import_vectors(tmp_path / "more.parquet", tmp_path / "b").corpus == "more"


def change_space(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        record = json.loads((folder / "space.json").read_text(encoding="utf-8"))
        change(record)
        (folder / "space.json").write_text(json.dumps(record))

    return apply


def change_array(name: str, change: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        np.save(folder / name, change(np.load(folder / name)), allow_pickle=True)

    return apply


def with_value(value: float) -> Callable[[npt.NDArray[Any]], npt.NDArray[Any]]:
    def change(vectors: npt.NDArray[Any]) -> npt.NDArray[Any]:
        vectors[7, 3] = value
        return vectors

    return change


BROKEN: dict[str, tuple[Callable[[Path], object], type[KnownError], str]] = {
    "a prompt changed": (
        change_space(lambda r: r["space"].update(prompt="query: ")),
        SpaceMismatch,
        "has fingerprint .* its fields give",
    ),
    "a field lost": (change_space(lambda r: r["space"].pop("prompt")), CorpusError, "missing fields .'prompt'"),
    "no JSON": (lambda folder: (folder / "space.json").write_text("{"), CorpusError, "does not describe"),
    "an unknown encoding": (change_space(lambda r: r.update(storage="f8")), CacheError, "unknown encoding"),
    "a path for a name": (change_space(lambda r: r.update(corpus="../../x")), CacheError, "is not a corpus name"),
    "another width": (
        change_array("vectors.npy", lambda v: v[:, :8]),
        SpaceMismatch,
        "of 8 numbers, but its space has 32",
    ),
    "one vector less": (
        change_array("vectors.npy", lambda v: v[:-1]),
        CorpusError,
        "21 vectors and 22 keys for 22 texts",
    ),
    "one key less": (change_array("keys.npy", lambda k: k[:-1]), CorpusError, "22 vectors and 21 keys for 22 texts"),
    "keys in another order": (
        change_array("keys.npy", lambda k: np.roll(k, 1, axis=0)),
        CorpusError,
        "the key of record 2 does not match",
    ),
    "keys of another width": (
        change_array("keys.npy", lambda k: k[:, :8]),
        CorpusError,
        r"expected uint8 \(rows, 16\)",
    ),
    "a NaN": (change_array("vectors.npy", with_value(np.nan)), CorpusError, "record 8 has NaN or an infinite"),
    "an infinity": (change_array("vectors.npy", with_value(-np.inf)), CorpusError, "record 8 has NaN or an infinite"),
    "integers": (change_array("vectors.npy", lambda v: v.astype(np.int8)), CorpusError, "holds int8 of shape"),
    "one dimension": (change_array("vectors.npy", lambda v: v[:, 0]), CorpusError, r"shape \(22,\), expected floats"),
    "no rows": (change_array("vectors.npy", lambda v: v[:0]), CorpusError, r"shape \(0, 32\), expected floats"),
    "a pickle": (
        change_array("vectors.npy", lambda v: v.astype(object)),
        CorpusError,
        "can be memory-mapped.*Python objects",
    ),
    "a text changed": (
        lambda folder: (folder / "texts.jsonl").write_text(
            (folder / "texts.jsonl").read_text().replace('"text 1 ', '"text one ')
        ),
        CorpusError,
        "the key of record 2 does not match its text 'text one and more'",
    ),
    "an empty text": (
        lambda folder: (folder / "texts.jsonl").write_text('{"text": " "}\n' * 22),
        CorpusError,
        "no texts",
    ),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    built(folder, RECORDS)
    export(folder / "cache", folder / "out", "npy", corpus="corpus")
    built(folder / "own", ["own"], name="own")
    return folder / "out"


@pytest.mark.parametrize("fault", BROKEN)
def test_an_inconsistent_source_is_an_error_and_writes_nothing(tmp_path: Path, exported: Path, fault: str) -> None:
    apply, error, message = BROKEN[fault]
    shutil.copytree(exported, tmp_path / "out")
    apply(tmp_path / "out")
    with pytest.raises(error, match=message):
        import_vectors(tmp_path / "out", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    shutil.copytree(exported.parent / "own/cache", tmp_path / "cache")
    before = files(tmp_path / "cache")
    with pytest.raises(error, match=message):
        import_vectors(tmp_path / "out", tmp_path / "cache")
    assert files(tmp_path / "cache") == before


def test_an_export_needs_no_description(tmp_path: Path, exported: Path) -> None:
    for options in ({"teacher": "mine"}, {"fields": {"prompt": "x"}}):
        with pytest.raises(CorpusError, match=r"describes its vectors .* leave `teacher` and `fields` out"):
            import_vectors(exported, tmp_path / "cache", **options)
    with pytest.raises(CorpusError, match="has texts: leave `corpus` out"):
        import_vectors(exported, tmp_path / "cache", corpus=corpus_of(tmp_path, TEXTS))


def test_a_different_vector_for_a_known_text_is_an_error_and_writes_nothing(tmp_path: Path, exported: Path) -> None:
    built(tmp_path, ["own", TEXTS[6]], name="own")
    before = files(tmp_path / "cache")
    shutil.copytree(exported, tmp_path / "out")
    change_array("vectors.npy", lambda v: np.roll(v, 1, axis=0))(tmp_path / "out")
    with pytest.raises(CacheError, match="have different vectors for 'text 6 and more': 1 - cos"):
        import_vectors(tmp_path / "out", tmp_path / "cache")
    assert files(tmp_path / "cache") == before


# Vectors computed elsewhere


@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8", ">f4"])
def test_vectors_of_a_corpus_become_a_new_space(tmp_path: Path, dtype: str) -> None:
    vectors = teacher_vectors(RECORDS)
    report = import_vectors(
        npy(tmp_path, np.asfortranarray(vectors.astype(dtype))),
        tmp_path / "cache",
        corpus=corpus_of(tmp_path, RECORDS),
        teacher="lab/my-model",
    )
    assert (report.rows, report.stored, report.corpus) == (22, 20, "corpus-0")
    with TeacherCache.open(tmp_path / "cache") as cache:
        view = cache.space("my-model")
        assert np.array_equal(view.gather(cache.corpus().rows[:, 0]), vectors.astype(np.float16))
        space = view.space
    assert (space.backend, space.weights, space.dims) == ("imported", "imported:lab/my-model@", 32)
    assert (space.normalize, space.prompt, space.pooling, space.max_length) == (True, "", "unknown", 0)
    assert verify(tmp_path / "cache", deep=True).ok


def test_an_imported_space_never_equals_a_built_one(tmp_path: Path) -> None:
    assert "imported" not in BACKENDS
    space = resolve(TOY).space
    stated = {
        name: getattr(space, name)
        for name in (
            "revision",
            "tokenizer",
            "pooling",
            "padding_side",
            "prompt",
            "max_length",
            "truncation_side",
            "dtype",
        )
    }
    foreign = foreign_space("toy", stated, dims=space.dims, unit_length=space.normalize)
    assert set(space.difference(foreign)) == {"backend", "weights"}
    import_vectors(
        npy(tmp_path, teacher_vectors(TEXTS)),
        tmp_path / "cache",
        corpus=corpus_of(tmp_path, TEXTS),
        teacher="toy",
        fields=stated,
    )
    assert built(tmp_path, TEXTS).encoded == 20


def test_each_foreign_teacher_has_its_own_space() -> None:
    def of(teacher: str, **fields: Any) -> EmbeddingSpace:
        return foreign_space(teacher, fields, dims=4, unit_length=True)

    spaces = [of("a"), of("b"), of("a", revision="2"), of("a", prompt="q: "), of("a", max_length="512")]
    assert len({space.fingerprint for space in spaces}) == len(spaces)
    assert of("a", max_length="512") == of("a", max_length=512)
    assert of("a", normalize="True") == of("a")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"backend": "toy"}, "unknown field 'backend' in `fields`; expected one of revision, tokenizer"),
        ({"max_length": "long"}, "max_length=long: expected a number"),
        ({"normalize": "maybe"}, "normalize=maybe: expected true or false"),
        ({"prompt": 3}, "prompt=3: expected text"),
        ({"normalize": "false"}, "normalize=false: the vectors all have unit length"),
    ],
)
def test_an_invalid_field_is_an_error(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        foreign_space("a", fields, dims=4, unit_length=True)


def test_lengths_are_kept_and_measured(tmp_path: Path) -> None:
    vectors = teacher_vectors(TEXTS) * np.linspace(0.5, 40, 20)[:, None]
    source, corpus = npy(tmp_path, vectors), corpus_of(tmp_path, TEXTS)
    with pytest.raises(CorpusError, match="normalize=true: the vectors do not all have unit length"):
        import_vectors(source, tmp_path / "cache", corpus=corpus, teacher="a", fields={"normalize": True})
    assert not (tmp_path / "cache").exists()
    import_vectors(source, tmp_path / "cache", corpus=corpus, teacher="a")
    with TeacherCache.open(tmp_path / "cache") as cache:
        assert not cache.space().space.normalize
        lengths = np.linalg.norm(cache.space().gather(np.arange(20)), axis=1)
    assert np.allclose(lengths, np.linspace(0.5, 40, 20), rtol=1e-3)


def test_vectors_of_pairs_follow_the_texts(tmp_path: Path) -> None:
    pairs = [("a", "b"), ("c", "a")]
    import_vectors(
        npy(tmp_path, teacher_vectors(["a", "b", "c", "a"])),
        tmp_path / "cache",
        corpus=corpus_of(tmp_path, pairs),
        teacher="t",
    )
    with TeacherCache.open(tmp_path / "cache") as cache:
        rows = cache.corpus().rows
        assert rows.tolist() == [[0, 1], [2, 0]]
        assert np.array_equal(cache.space().gather(rows[:, 1]), teacher_vectors(["b", "a"]).astype(np.float16))


def test_an_unusable_source_is_an_error_that_says_what_is_expected(tmp_path: Path) -> None:
    vectors = npy(tmp_path, teacher_vectors(TEXTS))
    with pytest.raises(CorpusError, match="has only vectors: name the files of their texts with `corpus`"):
        import_vectors(vectors, tmp_path / "cache", teacher="a")
    with pytest.raises(CorpusError, match="does not name the model of its vectors: name it with `teacher`"):
        import_vectors(vectors, tmp_path / "cache", corpus=corpus_of(tmp_path, TEXTS))
    (tmp_path / "vectors.pkl").write_bytes(pickle.dumps(teacher_vectors(TEXTS)))
    np.savez(tmp_path / "vectors.npz", teacher_vectors(TEXTS))
    (tmp_path / "not.npy").write_bytes((tmp_path / "vectors.npz").read_bytes())
    for name in ("vectors.pkl", "vectors.npz"):
        with pytest.raises(CorpusError, match=r"numpy\.save writes one"):
            import_vectors(tmp_path / name, tmp_path / "cache", corpus=corpus_of(tmp_path, TEXTS), teacher="a")
    with pytest.raises(CorpusError, match=r"not\.npy .* not a \.npy file"):
        import_vectors(tmp_path / "not.npy", tmp_path / "cache", corpus=corpus_of(tmp_path, TEXTS), teacher="a")
    with pytest.raises(CorpusError, match="no such file or folder"):
        import_vectors(tmp_path / "none", tmp_path / "cache")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CorpusError, match="save_to_disk did not write"):
        import_vectors(tmp_path / "folder", tmp_path / "cache", teacher="a")
    with pytest.raises(CacheError, match="not a teacher cache"):
        import_vectors(vectors, tmp_path, corpus=corpus_of(tmp_path, TEXTS), teacher="a")
    assert not (tmp_path / "cache").exists()


def test_skipped_records_are_counted_if_texts_and_vectors_differ_in_number(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("one\n\ntwo\n")
    with pytest.raises(CorpusError, match=r"3 vectors for 2 texts \(1 more records were skipped as empty\)"):
        import_vectors(
            npy(tmp_path, teacher_vectors(["a", "b", "c"])), tmp_path / "c", corpus=Corpus.open(path), teacher="a"
        )


def test_records_of_one_text_may_differ_only_by_rounding(tmp_path: Path) -> None:
    vectors = teacher_vectors(RECORDS)
    noise = np.random.default_rng(0).normal(size=vectors.shape) * 2.0**-9 / np.sqrt(32)
    close = npy(tmp_path, vectors + noise, "close.npy")
    first = import_vectors(close, tmp_path / "cache", corpus=corpus_of(tmp_path, RECORDS), teacher="a", name="c")
    assert first.stored == 20
    other = vectors.copy()
    other[12] += 0.1  # the second record of text 3
    path = npy(tmp_path, other, "other.npy")
    with pytest.raises(CorpusError, match=r"records 4 and 13 have the same text and different vectors: 1 - cos 0\."):
        import_vectors(path, tmp_path / "d", corpus=corpus_of(tmp_path, RECORDS), teacher="a")
    longer = vectors.copy()
    longer[21] *= 1.1  # the second record of text 0
    path = npy(tmp_path, longer, "longer.npy")
    with pytest.raises(CorpusError, match=r"records 1 and 22 .* lengths 1 and 1\.1"):
        import_vectors(path, tmp_path / "d", corpus=corpus_of(tmp_path, RECORDS), teacher="a")
    assert not (tmp_path / "d").exists()


def test_an_invalid_vector_is_quarantined_until_a_valid_one_is_imported(tmp_path: Path) -> None:
    vectors = teacher_vectors(TEXTS) * 3
    vectors[4] = 1e6
    vectors[5] = 0
    corpus = corpus_of(tmp_path, TEXTS)
    report = import_vectors(npy(tmp_path, vectors), tmp_path / "cache", corpus=corpus, teacher="a")
    assert (report.stored, report.quarantined) == (18, 2)
    assert report.reasons == {
        "overflows float16: largest value 1e+06": 1,
        "zero vector": 1,
    }
    vectors[5] = 2
    again = import_vectors(npy(tmp_path, vectors), tmp_path / "cache", corpus=corpus, teacher="a")
    assert (again.stored, again.held, again.quarantined) == (1, 18, 1)
    with TeacherCache.open(tmp_path / "cache") as cache:
        assert set(cache.space().quarantined()) == {4}
        assert cache.space().gather(np.array([5])).tolist() == [[2.0] * 32]


def arrow_lists(kind: str, vectors: npt.NDArray[Any]) -> Any:
    import pyarrow

    number = {"double": pyarrow.float64(), "half": pyarrow.float16()}.get(kind, pyarrow.float32())
    lists = pyarrow.large_list(number) if kind == "large" else pyarrow.list_(number)
    return pyarrow.array([list(vector) for vector in vectors.astype(number.to_pandas_dtype())], lists)


@pytest.mark.parametrize("kind", ["float", "double", "half", "large"])
def test_any_parquet_file_or_dataset_of_texts_and_vectors_is_imported(tmp_path: Path, kind: str) -> None:
    import datasets
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table(
        {"id": list(range(22)), "body": RECORDS, "embedding": arrow_lists(kind, teacher_vectors(RECORDS))}
    )
    pyarrow.parquet.write_table(table, tmp_path / "theirs.parquet", row_group_size=7)
    dataset = datasets.Dataset(table).select(range(21, 6, -1))
    dataset.save_to_disk(str(tmp_path / "theirs"))
    options = {"text_key": "body", "vector_key": "embedding", "teacher": "t"}
    for name, count in (("theirs.parquet", 20), ("theirs", 15)):
        import_vectors(tmp_path / name, tmp_path / f"cache-{name}", **options)  # type: ignore[arg-type]
        held = all_vectors(tmp_path / f"cache-{name}")
        assert len(held) == count
        assert all(np.array_equal(held[text], teacher_vectors([text])[0].astype(np.float16)) for text in held)
    for name in ("theirs.parquet", "theirs"):
        with pytest.raises(CorpusError, match=r"no column 'label', found .*embedding.*`vector_key`"):
            import_vectors(tmp_path / name, tmp_path / "c", text_key="body", teacher="t")
        with pytest.raises(CorpusError, match="no column 'text'"):
            import_vectors(tmp_path / name, tmp_path / "c", vector_key="embedding", teacher="t")
        with pytest.raises(CorpusError, match="column 'id' is int64, expected lists of floats"):
            import_vectors(tmp_path / name, tmp_path / "c", text_key="body", vector_key="id", teacher="t")


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ([[1.0, 2.0], [1.0]], "row 2 has a vector of 1 numbers, row 1 one of 2"),
        ([[1.0, 2.0], None], "has a null in rows 1 to 2"),
        ([[1.0, None], [1.0, 2.0]], "has a null in rows 1 to 2"),
        ([], "holds no rows"),
    ],
)
def test_lists_that_are_not_a_matrix_are_an_error(tmp_path: Path, lists: list[Any], message: str) -> None:
    import pyarrow
    import pyarrow.parquet

    column = pyarrow.array(lists, pyarrow.list_(pyarrow.float32()))
    texts = pyarrow.array([f"text {i}" for i in range(len(lists))], pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "label": column}), tmp_path / "x.parquet")
    with pytest.raises(CorpusError, match=message):
        import_vectors(tmp_path / "x.parquet", tmp_path / "cache", teacher="t")
    assert not (tmp_path / "cache").exists()


def test_row_groups_of_different_widths_are_an_error(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    lists = [[1.0, 2.0]] * 3 + [[1.0]] * 3
    table = pyarrow.table({"text": numbered(6), "label": pyarrow.array(lists, pyarrow.list_(pyarrow.float32()))})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet", row_group_size=3)
    with pytest.raises(CorpusError, match="row 4 has a vector of 1 numbers, row 1 one of 2"):
        import_vectors(tmp_path / "x.parquet", tmp_path / "cache", teacher="t")


def test_a_truncated_parquet_file_is_an_error(tmp_path: Path) -> None:
    built(tmp_path, TEXTS)
    export(tmp_path / "cache", tmp_path / "x.parquet", "parquet")
    body = bytearray((tmp_path / "x.parquet").read_bytes())
    (tmp_path / "x.parquet").write_bytes(body[: len(body) // 2])
    with pytest.raises(CorpusError, match=r"x\.parquet: cannot be read"):
        import_vectors(tmp_path / "x.parquet", tmp_path / "b")


# Interruption


@pytest.mark.parametrize("shard", [0, 1, 2])
def test_an_interrupted_import_resumes(
    tmp_path: Path, exported: Path, monkeypatch: pytest.MonkeyPatch, shard: int
) -> None:
    path = empty_cache(tmp_path / "cache")
    real = SpaceView.write

    def cut_off(self: SpaceView, number: int, *arguments: Any, **options: Any) -> Any:
        if number == shard:
            raise KeyboardInterrupt
        return real(self, number, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(SpaceView, "write", cut_off)
        with pytest.raises(KeyboardInterrupt):
            import_vectors(exported, path)
    assert verify(path, deep=True).ok
    report = import_vectors(exported, path)
    assert (report.held, report.stored) == (shard * SHARD_ROWS, 20 - shard * SHARD_ROWS)
    assert verify(path, deep=True).ok
    assert len(all_vectors(path)) == 20


KILLED = """
import sys
import time
from teacher_cache.building import build
from teacher_cache.table import intake
from teacher_cache.table.cache import TeacherCache
from teacher_cache.transfer import importer
from teacher_cache.table.view import SpaceView

importer.READ_RECORDS = build.READ_RECORDS = 200
write = SpaceView.write

def slow(self, *arguments, **options):
    time.sleep(0.01)
    return write(self, *arguments, **options)

SpaceView.write = slow
source, cache = sys.argv[1:]
TeacherCache.open(cache, "a", shard_rows=64).close()
importer.import_vectors(source, cache)
"""


@pytest.mark.slow
def test_an_import_killed_at_any_moment_loses_only_uncommitted_data(tmp_path: Path) -> None:
    texts = numbered(3000)
    built(tmp_path / "a", texts)
    export(tmp_path / "a/cache", tmp_path / "out", "npy", corpus="corpus")
    path = tmp_path / "cache"
    command = [sys.executable, "-c", KILLED, str(tmp_path / "out"), str(path)]
    assert killed_until_done(command, path, random.Random(3), 5) > 0
    assert verify(path, deep=True).ok
    assert same_vectors(tmp_path / "a/cache", path)
    with TeacherCache.open(path) as cache:
        assert cache.texts(cache.corpus("corpus").rows[:, 0]) == texts


# Parts


@given(
    st.lists(st.integers(0, 30), max_size=40),
    st.integers(1, 40),
    st.integers(1, 7),
    st.sampled_from([np.int64, np.uint64]),
)
def test_sorted_windows_yield_each_position_once_in_order_of_value(
    values: list[int], window: int, scanned: int, kind: type[np.integer[Any]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intake, "_SCANNED", scanned)
        array = np.array(values, dtype=kind)
        groups = [group.tolist() for group in intake.sorted_windows(array, 31, window)]
    assert [place for group in groups for place in group] == sorted(range(len(values)), key=lambda place: values[place])
    assert all(values[group[-1]] // window == values[group[0]] // window for group in groups)


def test_vectors_are_equal_up_to_the_rounding_of_bfloat16() -> None:
    # 1 - cos of (1, 0) and (1, t) is 1 - 1 / sqrt(1 + t^2), about t^2 / 2: 5e-4 and 2e-3.
    held = np.array([[1.0, 0.0]] * 6, dtype=np.float32)
    given_ = np.array([[1, 0], [1, 0.0316], [1, 0.0632], [1.04, 0], [1.06, 0], [0, 0]], dtype=np.float32)
    assert intake.differing_rows(held, given_).tolist() == [2, 4, 5]
    zero = np.zeros((1, 2), dtype=np.float32)
    assert intake.differing_rows(zero, zero).tolist() == []
