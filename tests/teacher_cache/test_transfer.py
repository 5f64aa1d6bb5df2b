"""Exports: their contents, formats and errors."""

import dataclasses
import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from teacher_cache.errors import (
    CacheError,
    CorpusNotFound,
    DamagedCache,
    MissingDependency,
    MissingRows,
)
from teacher_cache.space import EmbeddingSpace
from teacher_cache.storage.codec import ENCODINGS
from teacher_cache.table import intake
from teacher_cache.teachers import resolve
from teacher_cache.text_key import text_keys
from teacher_cache.transfer import EXPORT_FORMATS, exporter
from teacher_cache.transfer.exporter import export
from tests.teacher_cache.copies import (
    RECORDS,
    TEXTS,
    all_vectors,
    jsonl,
    named,
    worst_error,
)
from tests.teacher_cache.small_caches import TOY, built, teacher_vectors
from tests.teacher_cache.toy_variants import BadVectors


def test_an_npy_export_of_a_corpus_has_its_records_in_order_with_keys_and_space(tmp_path: Path) -> None:
    built(tmp_path, RECORDS)
    report = export(tmp_path / "cache", tmp_path / "out", "npy", corpus="corpus")
    vectors = np.load(tmp_path / "out/vectors.npy", allow_pickle=False)
    assert vectors.dtype == np.float16
    assert np.array_equal(vectors, teacher_vectors(RECORDS).astype(np.float16))
    keys = np.load(tmp_path / "out/keys.npy", allow_pickle=False)
    assert [key.tobytes() for key in keys] == text_keys(RECORDS)
    assert jsonl(tmp_path / "out/texts.jsonl") == RECORDS
    space = resolve(TOY).space
    assert json.loads((tmp_path / "out/space.json").read_text(encoding="utf-8")) == {
        "space": space.to_json(),
        "fingerprint": space.fingerprint,
        "storage": "float16",
        "corpus": "corpus",
        "worst_error": worst_error(tmp_path / "cache"),
    }
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "vectors.npy",
        "keys.npy",
        "texts.jsonl",
        "space.json",
    }
    assert (report.rows, report.dims, report.dtype, report.quarantined, report.missing) == (22, 32, "float16", 0, 0)


def test_without_a_corpus_each_distinct_text_is_exported_once(tmp_path: Path) -> None:
    built(tmp_path, RECORDS)
    built(tmp_path, ["another", TEXTS[0]], name="second")
    built(tmp_path, ["not of this space"], name="third", teacher=dataclasses.replace(TOY, prompt="query: "))
    slug = resolve(TOY).space.slug
    report = export(tmp_path / "cache", tmp_path / "out", "npy", space=slug)
    assert jsonl(tmp_path / "out/texts.jsonl") == [*TEXTS, "another"]
    assert (report.rows, report.missing, report.corpus) == (21, 1, None)


def test_the_texts_of_a_pair_are_exported_next_to_each_other(tmp_path: Path) -> None:
    pairs = [("a", "b"), ("nan 1", "c"), ("a", "d"), ("e", "nan 1"), ("f", "f")]
    built(tmp_path, pairs, teacher=BadVectors.options())
    report = export(tmp_path / "cache", tmp_path / "out", "npy", corpus="corpus")
    assert jsonl(tmp_path / "out/texts.jsonl") == ["a", "b", "a", "d", "f", "f"]
    vectors = np.load(tmp_path / "out/vectors.npy").reshape(-1, 2, 32)
    assert np.array_equal(vectors[:, 0], teacher_vectors(["a", "a", "f"]).astype(np.float16))
    assert (report.rows, report.quarantined) == (6, 2)


def test_quarantined_texts_are_skipped_and_counted(tmp_path: Path) -> None:
    built(tmp_path, ["fine 1", "nan 1", "fine 2", "nan 1", "inf 1"], teacher=BadVectors.options())
    listed = export(tmp_path / "cache", tmp_path / "listed", "npy", corpus="corpus")
    assert (listed.rows, listed.quarantined) == (2, 3)
    whole = export(tmp_path / "cache", tmp_path / "whole", "npy")
    assert (whole.rows, whole.quarantined, whole.missing) == (2, 2, 0)
    for folder in ("listed", "whole"):
        assert jsonl(tmp_path / folder / "texts.jsonl") == ["fine 1", "fine 2"]


def test_an_incompletely_encoded_corpus_is_not_exported(tmp_path: Path) -> None:
    built(tmp_path, TEXTS)
    built(tmp_path, ["new", *TEXTS[:2]], name="half", teacher=dataclasses.replace(TOY, prompt="query: "))
    with pytest.raises(MissingRows, match=r"corpus 'half' has texts without a vector in space toy@.*first.*row 20"):
        export(tmp_path / "cache", tmp_path / "out", "npy", corpus="half", space=resolve(TOY).space.slug)
    with pytest.raises(CorpusNotFound):
        export(tmp_path / "cache", tmp_path / "out", "npy", corpus="none", space=resolve(TOY).space.slug)
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "corpus-0.jsonl", "corpus-1.jsonl"}


@pytest.mark.parametrize(
    ("form", "storage"),
    [
        *(("npy", storage) for storage in ENCODINGS),
        ("parquet", "float16-raw"),
        ("parquet", "int8"),
        ("hf-dataset", "float16"),
        ("hf-dataset", "float32"),
    ],
)
def test_exported_vectors_equal_the_stored_ones(tmp_path: Path, form: str, storage: str) -> None:
    built(tmp_path, TEXTS, storage=storage)
    report = export(tmp_path / "cache", named(tmp_path, form), form)
    half = ENCODINGS[storage].dtype == "<f2"
    assert report.dtype == ("float16" if half else "float32")
    texts, vectors = load(named(tmp_path, form))
    assert vectors.dtype == report.dtype
    held = all_vectors(tmp_path / "cache")
    assert np.array_equal(vectors, np.stack([held[text] for text in texts]))
    assert texts == TEXTS


def load(path: Path) -> tuple[list[str], npt.NDArray[Any]]:
    """Texts and vectors of an export, read without this package."""
    if (path / "vectors.npy").exists():
        return jsonl(path / "texts.jsonl"), np.load(path / "vectors.npy", allow_pickle=False)
    if path.suffix == ".parquet":
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(path)
    else:
        import datasets

        table = datasets.load_from_disk(str(path)).with_format("arrow")[:]
    assert table.column_names == ["text", "label"]
    label = table.column("label").combine_chunks()
    return table.column("text").to_pylist(), label.flatten().to_numpy().reshape(len(label), -1)


def test_a_parquet_file_contains_its_space(tmp_path: Path) -> None:
    import pyarrow.parquet

    built(tmp_path, TEXTS)
    export(tmp_path / "cache", tmp_path / "out.parquet", "parquet")
    described = json.loads(pyarrow.parquet.read_schema(tmp_path / "out.parquet").metadata[b"teacher_cache"])
    assert EmbeddingSpace.from_json(described["space"]) == resolve(TOY).space
    assert described["corpus"] is None


def test_a_dataset_folder_returns_tensors_and_describes_its_space(tmp_path: Path) -> None:
    import datasets
    import torch

    built(tmp_path, RECORDS)
    export(tmp_path / "cache", tmp_path / "out", "hf-dataset")
    built(tmp_path, ["new"], name="second")
    export(tmp_path / "cache", tmp_path / "other", "hf-dataset")
    dataset = datasets.load_from_disk(str(tmp_path / "out"))
    label = dataset.with_format("torch")[0]["label"]
    assert isinstance(label, torch.Tensor)
    assert label.tolist() == teacher_vectors(TEXTS[:1]).astype(np.float16)[0].tolist()
    assert dataset.info.description == resolve(TOY).space.describe()
    # The library names the cached results of `map` after it.
    assert dataset._fingerprint != datasets.load_from_disk(str(tmp_path / "other"))._fingerprint


@pytest.mark.slow
def test_sentence_transformers_trains_on_an_exported_dataset(tmp_path: Path, tiny_student: Path) -> None:
    import datasets
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import MSELoss

    built(tmp_path, TEXTS, teacher=dataclasses.replace(TOY, dims=16))
    export(tmp_path / "cache", tmp_path / "out", "hf-dataset")
    model = SentenceTransformer(str(tiny_student), device="cpu")
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path / "run"), max_steps=2, report_to="none", save_strategy="no", dataloader_pin_memory=False
    )
    trainer = SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=datasets.load_from_disk(str(tmp_path / "out")), loss=MSELoss(model)
    )
    assert np.isfinite(trainer.train().training_loss)


@pytest.mark.parametrize("form", EXPORT_FORMATS)
def test_an_existing_output_is_not_changed(tmp_path: Path, form: str) -> None:
    built(tmp_path, TEXTS)
    output = named(tmp_path, form)
    output.write_text("mine")
    with pytest.raises(CacheError, match="exists; choose another name"):
        export(tmp_path / "cache", output, form)
    assert output.read_text() == "mine"


@pytest.mark.parametrize("form", EXPORT_FORMATS)
def test_an_export_that_fails_leaves_nothing(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built(tmp_path, TEXTS)
    before = {path.name for path in tmp_path.iterdir()}
    monkeypatch.setattr(exporter, "BLOCK_RECORDS", 5)
    real = intake.CheckedReader.gather

    def cut_off(self: intake.CheckedReader, rows: npt.NDArray[np.int64], *arguments: Any) -> Any:
        if 10 in rows:
            raise KeyboardInterrupt
        return real(self, rows, *arguments)

    monkeypatch.setattr(intake.CheckedReader, "gather", cut_off)
    with pytest.raises(KeyboardInterrupt):
        export(tmp_path / "cache", named(tmp_path, form), form)
    assert {path.name for path in tmp_path.iterdir()} == before


def test_an_export_of_a_space_that_loses_vectors_meanwhile_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built(tmp_path, TEXTS)
    monkeypatch.setattr(exporter._Rows, "blocks", lambda self: iter([np.arange(5)]))
    with pytest.raises(CacheError, match="changed while it was exported: it had 20 vectors, then 5"):
        export(tmp_path / "cache", tmp_path / "out", "npy")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("which", ["spaces/*/vectors.zarr/c/0/0", "texts/keys/c/0/0"])
def test_damage_is_not_exported(tmp_path: Path, which: str) -> None:
    built(tmp_path, TEXTS, storage="float16-raw")  # float16-raw has no checksum, only the digest
    (path,) = (tmp_path / "cache").glob(which)
    body = bytearray(path.read_bytes())
    body[5] ^= 0x10
    path.write_bytes(body)
    with pytest.raises(DamagedCache):
        export(tmp_path / "cache", tmp_path / "out", "npy")
    assert not (tmp_path / "out").exists()


def test_invalid_exports_are_errors_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built(tmp_path, ["nan 1"], teacher=BadVectors.options())
    with pytest.raises(CacheError, match="unknown export format 'lance'; expected one of npy, parquet, hf-dataset"):
        export(tmp_path / "cache", tmp_path / "out", "lance")
    with pytest.raises(CacheError, match=r"must end with \.parquet"):
        export(tmp_path / "cache", tmp_path / "out", "parquet")
    with pytest.raises(CacheError, match="nothing to export"):
        export(tmp_path / "cache", tmp_path / "out", "npy")
    monkeypatch.setattr(exporter, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"hf-dataset needs datasets: pip install 'teacher-cache\[formats\]'"):
        export(tmp_path / "cache", tmp_path / "out", "hf-dataset")
    assert not (tmp_path / "out").exists()


def test_progress_of_an_export_ends_at_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "BLOCK_RECORDS", 8)
    built(tmp_path, TEXTS)
    seen: list[tuple[str, int, int]] = []
    export(tmp_path / "cache", tmp_path / "out", "npy", report=lambda p: seen.append((p.phase, p.done, p.total)))
    assert seen == [("writing", 8, 20), ("writing", 16, 20), ("writing", 20, 20)]


def test_exported_keys_can_be_computed_without_this_package(tmp_path: Path) -> None:
    built(tmp_path, TEXTS)
    export(tmp_path / "cache", tmp_path / "out", "npy")
    assert np.load(tmp_path / "out/keys.npy")[0].tobytes() == blake2b(TEXTS[0].encode(), digest_size=16).digest()
