import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import normalize

from distill.config import StudentConfig
from distill.errors import ExportError
from distill.export.card import model_card
from distill.export.sentence_transformer import export
from distill.student.student import Student
from tests.conftest import varied_texts
from tests.teacher_cache import tiny_teachers

TEXTS = varied_texts(20, seed=5)


@pytest.fixture
def student(tiny_student: Path) -> Student:
    loaded = Student.load(StudentConfig(model=str(tiny_student), max_length=12))
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.mul_(1.25)  # as if trained: unlike the weights in the folder
    return loaded


def load(folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu", local_files_only=True)


def encode(folder: Path, texts: list[str] = TEXTS) -> np.ndarray:
    return np.asarray(load(folder).encode(texts, show_progress_bar=False))


@pytest.mark.parametrize("pooling", ["mean", "cls", "last_token"])
def test_the_folder_has_the_trained_vectors(tiny_student: Path, tmp_path: Path, pooling: str) -> None:
    student = Student.load(StudentConfig(model=str(tiny_student), pooling=pooling))
    worst = export(student, None, True, tmp_path / "final", TEXTS)
    assert worst > 1 - 1e-6
    expected = normalize(torch.from_numpy(student.encode(TEXTS)), dim=-1).numpy()
    assert np.abs(encode(tmp_path / "final") - expected).max() < 1e-5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final"]


def test_a_model_that_pads_on_the_left_is_exported_too(tmp_path: Path) -> None:
    folder = tiny_teachers.write_qwen3(tmp_path / "qwen")
    student = Student.load(StudentConfig(model=str(folder)))
    assert export(student, None, True, tmp_path / "final", TEXTS) > 1 - 1e-6


def test_without_normalize_the_lengths_are_preserved(student: Student, tmp_path: Path) -> None:
    export(student, None, False, tmp_path / "final", TEXTS)
    assert np.abs(encode(tmp_path / "final") - student.encode(TEXTS)).max() < 1e-5


def test_with_the_projection_the_vectors_are_in_the_teachers_space(student: Student, tmp_path: Path) -> None:
    weight = torch.randn(7, 16, generator=torch.Generator().manual_seed(0))
    export(student, torch.nn.Parameter(weight), True, tmp_path / "final", TEXTS)
    expected = normalize(torch.from_numpy(student.encode(TEXTS)) @ weight.T, dim=-1).numpy()
    vectors = encode(tmp_path / "final")
    assert vectors.shape == (20, 7)
    assert np.abs(vectors - expected).max() < 1e-5


def test_maximum_length_and_prompt_are_exported(student: Student, tmp_path: Path) -> None:
    student.prompt = "the old "
    export(student, None, True, tmp_path / "final", TEXTS)
    model = load(tmp_path / "final")
    assert model.max_seq_length == 12
    assert model.default_prompt_name == "default"
    assert model.prompts["default"] == "the old "
    plain = Student.load(StudentConfig(model=str(tmp_path / "final")))
    assert (plain.max_length, plain.pooling) == (12, "mean")  # a student can be the start of another run
    assert np.allclose(plain.encode(["the old sea"]), student.encode(["sea"]), atol=1e-5)


def test_untrained_weights_are_not_exported(
    student: Student, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    def files() -> dict[str, torch.Tensor]:
        export(student, None, True, tmp_path / "final", TEXTS)
        return load_file(tmp_path / "final" / "model.safetensors")

    torch.manual_seed(1)
    first = files()
    torch.manual_seed(2)
    second = files()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)  # a random pooler would differ
    assert not any("pooler" in name for name in first)
    with caplog.at_level(logging.WARNING):
        load(tmp_path / "final")
    assert "pooler" not in caplog.text
    captured = capfd.readouterr()
    assert "pooler" not in captured.out + captured.err


def test_weights_have_the_permissions_of_the_other_files(student: Student, tmp_path: Path) -> None:
    projection = torch.eye(student.shape.dim)
    export(student, projection, True, tmp_path / "final", TEXTS)
    files = [path for path in (tmp_path / "final").rglob("*") if path.is_file()]
    assert sum(path.suffix == ".safetensors" for path in files) == 2
    assert len({path.stat().st_mode for path in files}) == 1


def test_export_prints_nothing(student: Student, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    export(student, None, True, tmp_path / "final", TEXTS)
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_other_vectors_are_an_error_and_the_older_folder_is_kept(
    student: Student, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(student, None, True, tmp_path / "final", TEXTS)
    before = encode(tmp_path / "final")

    def sabotage(folder: Path) -> None:
        tiny_teachers.write_bert(folder, seed=3)

    monkeypatch.setattr(student, "save_encoder", sabotage)
    with pytest.raises(ExportError, match=r"smallest cosine .*final\.writing") as error:
        export(student, None, True, tmp_path / "final", TEXTS)
    assert error.value.exit_code == 3
    assert np.array_equal(encode(tmp_path / "final"), before)
    assert (tmp_path / "final.writing").is_dir()
    monkeypatch.undo()
    export(student, None, True, tmp_path / "final", TEXTS)
    assert not (tmp_path / "final.writing").exists()


def test_vectors_of_another_length_are_an_error(
    student: Student, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distill.export import sentence_transformer

    honest = sentence_transformer.expected_vectors
    monkeypatch.setattr(sentence_transformer, "expected_vectors", lambda *given: 2 * honest(*given))
    with pytest.raises(ExportError, match="lengths differ"):
        export(student, None, False, tmp_path / "final", TEXTS)
    assert not (tmp_path / "final").exists()


def test_a_folder_that_cannot_be_loaded_is_an_error(
    student: Student, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(student, "save_encoder", lambda folder: folder.mkdir())
    with pytest.raises(ExportError, match=r"^the exported student cannot be loaded: [^\n]*$"):
        export(student, None, True, tmp_path / "final", TEXTS)


def card(**change: Any) -> str:
    record: dict[str, Any] = {
        "space": {
            "dims": 32,
            "slug": "toy@12345678",
            "teacher": "toy",
            "revision": "",
            "description": "toy, mean pooling",
            "fingerprint": "f" * 32,
        },
        "corpus": {"name": "wiki", "records": 4000, "distinct": 3600, "fingerprint": "c" * 32},
        "student": {
            "name": "tiny",
            "dim": 16,
            "layers": 2,
            "pooling": "mean",
            "max_length": 64,
            "prompt": "",
            "parameters": 1_500_000,
        },
        "objective": {"name": "talas"},
        "sharpness": {"name": "asam"},
        "training": {"per_device_train_batch_size": 32, "learning_rate": 2e-5, "seed": 42},
        "precision": "fp32",
        "steps": 2310,
        "export": {"projection": False},
        "in_teacher_space": False,
        "agreement": None,
        "versions": {"torch": "2.13"},
    }
    return model_card(record | change)


def test_the_card_names_the_space_of_the_vectors() -> None:
    assert "16 dimensions) are in the student's own space" in card()
    assert "32 dimensions) are in the teacher's space" in card(in_teacher_space=True)
    assert "`toy@12345678`" in card()
    for part in ("tiny distilled from toy", "4,000 records", "2,310 steps", "1.5 M", "seed 42", "torch 2.13"):
        assert part in card()


def test_the_card_has_agreement_before_and_after_training() -> None:
    assert "Agreement" not in card()
    before = {"spearman": 0.5, "overlap": 0.25, "neighbours": 10, "texts": 256}
    text = card(agreement={"before": before, "after": before | {"spearman": 0.75, "overlap": 0.5}, "projected": None})
    assert "| Spearman of pairwise cosines | 0.5000 | 0.7500 |" in text
    assert "| Overlap of the 10 nearest neighbors | 0.2500 | 0.5000 |" in text


def test_the_exported_configuration_is_json(student: Student, tmp_path: Path) -> None:
    export(student, None, True, tmp_path / "final", TEXTS)
    record = json.loads((tmp_path / "final" / "sentence_bert_config.json").read_text())
    assert record["model_args"] == {"add_pooling_layer": False}
