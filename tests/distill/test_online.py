"""The teacher in the training loop returns the output that the cache stores."""

import dataclasses
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distill.data.online import OnlineTeacher, load_online_teacher
from distill.errors import NeedsNotMet
from teacher_cache.errors import SpaceMismatch
from teacher_cache.teachers import TeacherOptions, load_teacher, resolve
from teacher_cache.teachers.batching import BatchedEncoder
from teacher_cache.tokens.request import TokenRequest
from tests.teacher_cache import tiny_teachers

TEXTS = ["the cat sat", "dogs", "", "a river ran through the old town and on to the sea"]
EVERYTHING = TokenRequest(attention=(1, 2))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return tiny_teachers.write_models(tmp_path_factory.mktemp("models"))


def options(model: Path | str, **more: Any) -> TeacherOptions:
    return TeacherOptions(model=str(model), device="cpu", **{"dtype": "float32", **more})


def online(model: Path, *, internals: bool = True, **more: Any) -> OnlineTeacher:
    space = resolve(options(model, **more)).space
    return load_online_teacher(str(model), space, "cpu", EVERYTHING, internals)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"prompt": "a river ", "max_length": 8, "normalize": False},
    {"dims": 8, "padding_side": "left", "pooling": "cls"},
]


@pytest.mark.parametrize("changes", OPTIONS, ids=["plain", "prompted", "cut"])
@pytest.mark.parametrize("name", ["bert", "mpnet", "st", "qwen3"])
def test_the_online_teacher_returns_the_cached_output(
    models: dict[str, Path], name: str, changes: dict[str, Any]
) -> None:
    spec = resolve(options(models[name], **changes))
    cached = load_teacher(replace(spec, request=EVERYTHING)).encode_counted(TEXTS)
    teacher = load_online_teacher(str(models[name]), spec.space, "cpu", EVERYTHING)
    encoded = teacher.encode(TEXTS)
    assert teacher.space == spec.space
    np.testing.assert_array_equal(encoded.vectors, cached.vectors)
    assert encoded.by_token is not None
    assert cached.by_token is not None
    for mine, theirs in zip(encoded.by_token, cached.by_token, strict=True):
        for field in dataclasses.fields(mine):
            np.testing.assert_array_equal(getattr(mine, field.name), getattr(theirs, field.name))


def test_the_toy_teacher_works_online() -> None:
    space = resolve(TeacherOptions(model="toy", dims=12, prompt="ask ")).space
    teacher = load_online_teacher("toy", space, None, TokenRequest())
    encoded = teacher.encode(["one two"])
    np.testing.assert_array_equal(
        encoded.vectors, load_teacher(resolve(TeacherOptions(model="toy", dims=12, prompt="ask "))).encode(["one two"])
    )
    assert encoded.by_token is not None
    assert len(encoded.by_token[0].states) == 3


def test_another_teacher_is_refused_with_the_field_that_differs(models: dict[str, Path], tmp_path: Path) -> None:
    space = resolve(options(models["bert"])).space
    other = tiny_teachers.write_bert(tmp_path / "other", seed=1)
    with pytest.raises(SpaceMismatch, match=r"does not match the cached space .*: weights is '.*', cached '") as caught:
        load_online_teacher(str(other), space, "cpu")
    assert "tokenizer" not in str(caught.value)
    copy = shutil.copytree(models["bert"], tmp_path / "left")
    tiny_teachers.edit_json(copy / "tokenizer_config.json", truncation_side="left")
    with pytest.raises(SpaceMismatch, match="truncation_side is 'left', cached 'right'"):
        load_online_teacher(str(copy), space, "cpu")


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("teacher_side", ["left", "right"])
@pytest.mark.parametrize("name", ["bert", "mpnet", "st"])
def test_internals_are_in_the_order_of_texts_and_tokens(
    models: dict[str, Path], name: str, teacher_side: str, padding_side: str
) -> None:
    teacher = online(models[name], padding_side=teacher_side)
    encoded, internals = teacher.encode_with_internals(TEXTS, padding_side=padding_side)
    assert encoded.by_token is not None
    longest = max(encoded.tokens)
    assert internals.hidden.shape == (3, len(TEXTS), longest, 16)
    for row, one in enumerate(encoded.by_token):
        count = len(one.states)
        at = slice(count) if padding_side == "right" else slice(longest - count, None)
        np.testing.assert_allclose(internals.hidden[-1, row, at], one.states, atol=1e-6)
        maps = internals.attention[:, row, :, at, at]
        np.testing.assert_allclose(maps.mean(1), one.attention, atol=1e-6)  # type: ignore[arg-type]
        torch.testing.assert_close(maps.sum(-1), torch.ones(2, 2, count))
        _, alone = teacher.encode_with_internals([TEXTS[row]])
        torch.testing.assert_close(internals.values[row, :, at], alone.values[0], atol=1e-5, rtol=1e-4)
        for tensor in (internals.hidden[:, row], internals.attention[:, row], internals.values[row]):
            place = 1 if tensor.dim() == 3 and tensor.shape[1] == longest else -2
            outside = torch.ones(longest, dtype=torch.bool)
            outside[at] = False
            assert not tensor.transpose(0, place)[outside].any()


def test_internals_are_constants_that_a_loss_can_use(models: dict[str, Path]) -> None:
    teacher = online(models["bert"])
    weight = torch.ones(16, requires_grad=True)
    _, internals = teacher.encode_with_internals(TEXTS)
    assert not internals.hidden.requires_grad
    assert not any(tensor.is_inference() for tensor in vars(internals).values())
    (internals.hidden * weight).sum().backward()  # fails for inference tensors
    assert weight.grad is not None


def test_autocast_does_not_change_the_online_teacher(models: dict[str, Path]) -> None:
    teacher = online(models["bert"])
    plain = teacher.encode(TEXTS).vectors
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = teacher.encode(TEXTS).vectors
        _, internals = teacher.encode_with_internals(TEXTS)
    np.testing.assert_array_equal(inside, plain)
    torch.testing.assert_close(internals.attention, teacher.encode_with_internals(TEXTS)[1].attention, atol=0, rtol=0)


def test_the_online_teacher_draws_no_random_numbers(models: dict[str, Path]) -> None:
    teacher = online(models["bert"])
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    teacher.encode_with_internals(TEXTS)
    assert torch.equal(torch.rand(3), expected)


def test_internals_need_a_single_pass(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = online(models["bert"])
    many = [f"the cat sat on {'the ' * (place % 30)}mat" for place in range(300)]
    encoded, internals = teacher.encode_with_internals(many)
    assert internals.hidden.shape[1] == len(encoded.vectors) == 300
    attempt = BatchedEncoder._attempt
    monkeypatch.setattr(
        BatchedEncoder,
        "_attempt",
        lambda self, model, tokens, rows: attempt(self, model, tokens, rows) if len(rows) < 3 else None,
    )
    with pytest.raises(NeedsNotMet, match="a batch of 4 texts took 2 passes"):
        teacher.encode_with_internals(TEXTS)


def test_internals_of_other_teachers_are_refused(models: dict[str, Path]) -> None:
    toy = resolve(TeacherOptions(model="toy")).space
    with pytest.raises(NeedsNotMet, match="need a transformers model"):
        load_online_teacher("toy", toy, internals=True)
    with pytest.raises(NeedsNotMet, match="loaded without internals"):
        online(models["bert"], internals=False).encode_with_internals(TEXTS)
    with pytest.raises(NeedsNotMet, match="grouped queries"):
        online(models["qwen3"]).encode_with_internals(TEXTS)
