from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distill.config import StudentConfig
from distill.errors import StudentError
from distill.objectives.base import Needs
from distill.student.student import Student
from teacher_cache.building.align import STUDENT_LENGTH
from tests.teacher_cache import tiny_teachers

TEXTS = ["the cat sat", "a river ran through the old town and the sea", "dogs", "sea sea sea"]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that pads on the left and needs position ids."""
    return tiny_teachers.write_qwen3(tmp_path_factory.mktemp("models") / "tiny-qwen3")


def states_by_hand(student: Student, texts: list[str]) -> list[torch.Tensor]:
    """Per layer `(n, d)` states of each text, encoded without padding and pooled."""
    layers: list[list[torch.Tensor]] = []
    encoder: Any = student.encoder
    for text in texts:
        ids = torch.tensor([student.tokenizer(text).input_ids])
        with torch.no_grad():
            states = encoder(input_ids=ids, output_hidden_states=True).hidden_states
        how = {"mean": lambda s: s.mean(0), "cls": lambda s: s[0], "last_token": lambda s: s[-1]}[student.pooling]
        layers.append([how(state[0]) for state in states])
    return [torch.stack(layer) for layer in zip(*layers, strict=True)]


@pytest.mark.parametrize("pooling", ["mean", "cls", "last_token"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["bert", "qwen"])
def test_every_layer_is_pooled_over_the_tokens_of_each_text(
    tiny_student: Path, qwen: Path, kind: str, side: str, pooling: str
) -> None:
    model = tiny_student if kind == "bert" else qwen
    student = Student.load(StudentConfig(model=str(model), pooling=pooling)).eval()
    student.tokenizer.padding_side = side
    student = Student(student.encoder, student.tokenizer, pooling=pooling, max_length=student.max_length).eval()
    tokens = student.tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        layers = student(tokens["input_ids"], tokens["attention_mask"])
    assert layers.shape == (3, 4, 16)
    assert layers.dtype == torch.float32
    for layer, expected in zip(layers, states_by_hand(student, TEXTS), strict=True):
        assert torch.allclose(layer, expected, atol=1e-5)
    assert np.allclose(student.encode(TEXTS), layers[-1].numpy(), atol=1e-5)


def test_the_shape_has_width_layers_and_pooling(tiny_student: Path) -> None:
    shape = Student.load(StudentConfig(model=str(tiny_student), pooling="cls")).shape
    assert (shape.dim, shape.layers, shape.pooling) == (16, 2, "cls")


def test_a_student_loads_from_a_folder_name(tiny_student: Path) -> None:
    by_name, by_config = Student.load(str(tiny_student)), Student.load(StudentConfig(model=str(tiny_student)))
    assert by_name.shape == by_config.shape


def test_a_student_loads_in_float32_and_training_mode(tiny_student: Path) -> None:
    student = Student.load(StudentConfig(model=str(tiny_student)))
    assert student.training
    assert student.encoder.training
    assert {parameter.dtype for parameter in student.parameters()} == {torch.float32}
    assert all(parameter.requires_grad for parameter in student.parameters())
    assert not any("pooler" in name for name, _ in student.named_parameters())


def test_encoding_has_no_dropout_and_restores_the_mode(tiny_student: Path) -> None:
    student = Student.load(StudentConfig(model=str(tiny_student)))
    assert np.array_equal(student.encode(TEXTS), student.encode(TEXTS))
    assert student.training
    student.eval()
    student.encode(TEXTS)
    assert not student.training


def test_vectors_do_not_depend_on_order_or_batch(tiny_student: Path) -> None:
    student = Student.load(StudentConfig(model=str(tiny_student)))
    vectors = student.encode(TEXTS)
    assert np.allclose(student.encode(TEXTS[::-1], batch=1), vectors[::-1], atol=1e-6)
    assert student.encode([]).shape == (0, 16)


def test_the_prompt_is_part_of_every_text(tiny_student: Path) -> None:
    plain = Student.load(StudentConfig(model=str(tiny_student)))
    prompted = Student.load(StudentConfig(model=str(tiny_student), prompt="the old "))
    assert np.allclose(prompted.encode(["town"]), plain.encode(["the old town"]), atol=1e-6)


def test_encode_equals_sentence_transformers(minilm: Path) -> None:
    from sentence_transformers import SentenceTransformer

    texts = ["A cat sat on the mat.", "Rivers run through old towns. " * 60, "Ärger über Öl", "x"]
    student = Student.load(StudentConfig(model=str(minilm)))
    model = SentenceTransformer(str(minilm), device="cpu", local_files_only=True)
    assert student.max_length == model.max_seq_length
    ours = torch.nn.functional.normalize(torch.from_numpy(student.encode(texts)), dim=-1).numpy()
    assert np.abs(ours - model.encode(texts, show_progress_bar=False)).max() < 1e-5


def test_the_default_length_is_the_folders_and_at_most_256(tiny_student: Path, tmp_path: Path) -> None:
    long = tiny_teachers.write_qwen3(tmp_path / "long")
    tiny_teachers.edit_json(long / "config.json", max_position_embeddings=4096)
    assert Student.load(StudentConfig(model=str(tiny_student))).max_length == 64
    assert Student.load(StudentConfig(model=str(tiny_student), max_length=32)).max_length == 32
    assert Student.load(StudentConfig(model=str(long))).max_length == STUDENT_LENGTH == 256
    assert Student.load(StudentConfig(model=str(long), max_length=512)).max_length == 512


def one_line(config: StudentConfig) -> str:
    with pytest.raises(StudentError) as error:
        Student.load(config)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_an_invalid_student_is_refused_in_one_line(tiny_student: Path, tmp_path: Path) -> None:
    assert "student.model" in one_line(StudentConfig())
    (tmp_path / "notes").mkdir()
    assert "no model in" in one_line(StudentConfig(model=str(tmp_path / "notes")))
    assert str(tmp_path / "absent") in one_line(StudentConfig(model=str(tmp_path / "absent")))
    assert "max" in one_line(StudentConfig(model=str(tiny_student), max_length=1000)).lower()
    assert "pooling" in one_line(StudentConfig(model=str(tiny_student), pooling="average"))


def test_a_checkpoint_without_some_weights_is_refused(tiny_student: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(tiny_student, tmp_path / "cut")
    tiny_teachers.edit_json(tmp_path / "cut" / "config.json", num_hidden_layers=3)
    assert "does not contain the weights" in one_line(StudentConfig(model=str(tmp_path / "cut")))


def test_a_saved_encoder_loads_again(tiny_student: Path, tmp_path: Path) -> None:
    student = Student.load(StudentConfig(model=str(tiny_student)))
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.mul_(1.5)
    student.save_encoder(tmp_path / "saved")
    again = Student.load(StudentConfig(model=str(tmp_path / "saved")))
    assert np.array_equal(again.encode(TEXTS), student.encode(TEXTS))


def test_attention_maps_survive_activation_checkpointing(tiny_student: Path) -> None:
    def gradients(checkpointed: bool) -> list[torch.Tensor]:
        student = Student.load(StudentConfig(model=str(tiny_student))).eval()
        needs = Needs(tokens=True, attention=((2, 2), (1, 1)))
        student.prepare(needs)
        encoder: Any = student.encoder
        if checkpointed:
            encoder.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
            encoder.train()
            for module in student.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
        tokens = student.tokenizer(["the cat sat on the old mat", "dogs"], padding=True, return_tensors="pt")
        special = torch.zeros_like(tokens["input_ids"], dtype=torch.bool)
        _, states = student.forward_tokens(tokens["input_ids"], tokens["attention_mask"], special, needs)
        assert states.attention is not None
        states.attention.square().sum().backward()
        return [p.grad for p in student.parameters() if p.grad is not None]

    for plain, checkpointed in zip(gradients(False), gradients(True), strict=True):
        assert torch.allclose(plain, checkpointed, atol=1e-6)
