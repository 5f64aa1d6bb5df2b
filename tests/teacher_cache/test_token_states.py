"""Token-level teacher output, compared with a forward pass of transformers over one text at a time."""

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from teacher_cache.errors import TeacherError
from teacher_cache.teachers import (
    Teacher,
    TeacherOptions,
    TeacherSpec,
    batching,
    load_teacher,
    resolve,
    resolve_dtype,
    token_shape,
)
from teacher_cache.teachers.folder import ModelFolder
from teacher_cache.tokens.request import (
    CLOSING,
    ID,
    OPENING,
    OTHER,
    ROLE,
    TEXT_TOKEN,
    TextTokens,
    TokenRequest,
    TokenShape,
)
from tests.contracts.teacher_contract import LONG, TEXTS
from tests.teacher_cache import tiny_teachers

NAMES = ("bert", "xlm-roberta", "mpnet", "qwen3", "st")
EVERYTHING = TokenRequest(attention=(1, 2))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return tiny_teachers.write_models(tmp_path_factory.mktemp("models"))


def spec_of(model: Path | str, request: TokenRequest | None = EVERYTHING, **more: Any) -> TeacherSpec:
    options = TeacherOptions(model=str(model), **{"dtype": "float32", "device": "cpu", **more})
    return replace(resolve_dtype(resolve(options)), request=request)


def teach(model: Path | str, request: TokenRequest | None = EVERYTHING, **more: Any) -> Teacher:
    return load_teacher(spec_of(model, request, **more))


def outputs_of(teacher: Teacher, texts: list[str]) -> list[TextTokens]:
    by_token = teacher.encode_counted(texts).by_token
    assert by_token is not None
    return by_token


def directly(folder: Path, texts: list[str], max_length: int) -> list[tuple[Any, ...]]:
    """Ids, last hidden states and mean maps `(layers, T, T)` of each text, computed with transformers."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    found = []
    for text in texts:
        tokens = tokenizer([text], truncation=True, max_length=max_length, return_tensors="pt")
        ids = tokens["input_ids"]
        if not ids.numel():
            ids = torch.tensor([[tokenizer.eos_token_id]])
        with torch.no_grad():
            out = model(input_ids=ids, attention_mask=torch.ones_like(ids), output_attentions=True)
        maps = torch.stack(out.attentions).mean(2)[:, 0]
        found.append((ids[0].numpy(), out.last_hidden_state[0].numpy(), maps.numpy()))
    return found


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("name", NAMES)
def test_states_maps_and_importance_are_those_of_the_model(
    models: dict[str, Path], name: str, padding_side: str
) -> None:
    texts = [*TEXTS, LONG]
    teacher = teach(models[name], max_length=30, padding_side=padding_side)
    expected = directly(ModelFolder(models[name]).encoder, texts, 30)
    for one, (ids, states, maps) in zip(outputs_of(teacher, texts), expected, strict=True):
        assert one.pieces[:, ID].tolist() == ids.tolist()
        assert one.states.dtype == np.float32
        assert one.attention is not None
        assert one.importance is not None
        np.testing.assert_allclose(one.states, states, atol=1e-5)
        np.testing.assert_allclose(one.attention, maps, atol=1e-6)
        np.testing.assert_allclose(one.attention.sum(axis=2), 1, atol=1e-5)
        np.testing.assert_allclose(one.importance, maps[-1].sum(axis=0), atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_vectors_and_counts_are_those_of_a_teacher_without_a_request(models: dict[str, Path], name: str) -> None:
    plain = teach(models[name], None).encode_counted(TEXTS)
    assert plain.by_token is None
    spoken = teach(models[name]).encode_counted(TEXTS)
    np.testing.assert_allclose(spoken.vectors, plain.vectors, atol=1e-5)
    assert spoken.by_token is not None
    assert spoken.tokens.tolist() == plain.tokens.tolist() == [len(one.states) for one in spoken.by_token]


@pytest.mark.parametrize("name", ["bert", "qwen3", "st"])
def test_the_token_budget_and_the_order_of_texts_change_nothing(models: dict[str, Path], name: str) -> None:
    small = outputs_of(teach(models[name], batch_tokens=17), TEXTS[::-1])[::-1]
    for one, other in zip(small, outputs_of(teach(models[name]), TEXTS), strict=True):
        for a, b in ((one.states, other.states), (one.attention, other.attention), (one.importance, other.importance)):
            np.testing.assert_allclose(a, b, atol=1e-5)  # type: ignore[arg-type]
        assert one.pieces.tolist() == other.pieces.tolist()


def test_only_requested_layers_are_returned_and_importance_is_of_the_last_layer(models: dict[str, Path]) -> None:
    (both,) = outputs_of(teach(models["bert"]), TEXTS[:1])
    (first,) = outputs_of(teach(models["bert"], TokenRequest(attention=(1,))), TEXTS[:1])
    (none,) = outputs_of(teach(models["bert"], TokenRequest(attention=())), TEXTS[:1])
    assert both.attention is not None
    assert first.attention is not None
    assert none.attention is not None
    np.testing.assert_array_equal(first.attention, both.attention[:1])
    assert none.attention.shape == (0, len(none.states), len(none.states))
    np.testing.assert_array_equal(none.importance, both.importance)  # type: ignore[arg-type]


def test_a_request_of_states_returns_no_attention(models: dict[str, Path]) -> None:
    (one,) = outputs_of(teach(models["bert"], TokenRequest()), TEXTS[:1])
    assert one.attention is None
    assert one.importance is None


def test_a_causal_teacher_attends_only_backwards(models: dict[str, Path]) -> None:
    for one in outputs_of(teach(models["qwen3"]), TEXTS):
        assert one.attention is not None
        assert not np.triu(one.attention, 1).any()


def test_states_come_before_pooling_and_dense(models: dict[str, Path]) -> None:
    encoded = teach(models["st"]).encode_counted(TEXTS)
    assert encoded.vectors.shape[1] == 12
    assert encoded.by_token is not None
    assert {one.states.shape[1] for one in encoded.by_token} == {16}


@pytest.mark.parametrize("name", NAMES)
def test_token_offsets_cover_the_words(models: dict[str, Path], name: str) -> None:
    for text, one in zip(TEXTS, outputs_of(teach(models[name]), TEXTS), strict=True):
        spans = [text[start:end] for _, start, end, role in one.pieces.tolist() if role == TEXT_TOKEN]
        assert spans == text.split()


@pytest.mark.parametrize(
    ("name", "around"),
    [("bert", [OPENING, CLOSING]), ("xlm-roberta", [OPENING, CLOSING]), ("qwen3", [CLOSING])],
)
def test_specials_have_their_roles_and_no_characters(models: dict[str, Path], name: str, around: list[int]) -> None:
    (one,) = outputs_of(teach(models[name]), TEXTS[:1])
    special = one.pieces[one.pieces[:, ROLE] != TEXT_TOKEN]
    assert special[:, ROLE].tolist() == around
    assert not special[:, 1:3].any()


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_text_has_only_special_tokens(models: dict[str, Path], name: str) -> None:
    (one,) = outputs_of(teach(models[name]), [""])
    assert len(one.states) == len(one.pieces) == (1 if name == "qwen3" else 2)
    assert TEXT_TOKEN not in one.pieces[:, ROLE]


def test_an_empty_text_has_one_token_if_the_tokenizer_has_no_special_tokens(
    models: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(models["qwen3"], tmp_path / "bare")
    for file in folder.glob("tokenizer*.json"):
        file.unlink()
    tiny_teachers.write_tokenizer(folder, bos=None, eos=None, pad="<|end|>", max_length=64)
    empty, full = outputs_of(teach(folder), ["", "the cat"])
    assert empty.pieces.tolist() == [[1, 0, 0, OTHER]]
    assert full.pieces[:, ROLE].tolist() == [TEXT_TOKEN, TEXT_TOKEN]


def test_no_texts_give_no_tokens(models: dict[str, Path]) -> None:
    assert outputs_of(teach(models["bert"]), []) == []


@pytest.mark.parametrize("name", NAMES)
def test_prompt_tokens_are_returned_but_are_not_of_the_text(models: dict[str, Path], name: str) -> None:
    teacher = teach(models[name], prompt="a river ")
    (one,) = outputs_of(teacher, ["the cat"])
    (whole,) = directly(ModelFolder(models[name]).encoder, ["a river the cat"], 60)
    np.testing.assert_allclose(one.states, whole[1], atol=1e-5)
    text = one.pieces[one.pieces[:, ROLE] == TEXT_TOKEN]
    assert text[:, 1:3].tolist() == [[0, 3], [4, 7]]
    prompt = one.pieces[one.pieces[:, ROLE] == OTHER]
    assert len(prompt) == 2
    assert not prompt[:, 1:3].any()


def test_a_token_across_prompt_and_text_covers_only_the_text(models: dict[str, Path]) -> None:
    (one,) = outputs_of(teach(models["bert"], prompt="a ri"), ["ver ran"])
    assert one.pieces[:, 1:].tolist() == [
        [0, 0, OPENING],
        [0, 0, OTHER],
        [0, 3, TEXT_TOKEN],
        [4, 7, TEXT_TOKEN],
        [0, 0, CLOSING],
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_truncated_text_keeps_its_closing_special_token(models: dict[str, Path], name: str) -> None:
    encoded = teach(models[name], max_length=7).encode_counted([LONG, "the cat"])
    assert encoded.truncated.tolist() == [True, False]
    assert encoded.by_token is not None
    cut = encoded.by_token[0].pieces
    assert len(cut) == 7
    assert cut[-1, ROLE] == CLOSING
    assert [LONG[start:end] for _, start, end, role in cut.tolist() if role == TEXT_TOKEN] == LONG.split()[
        : 6 if name == "qwen3" else 5
    ]


def test_offsets_of_a_text_truncated_on_the_left_are_those_of_its_end(models: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(models["bert"], tmp_path / "left")
    tiny_teachers.edit_json(folder / "tokenizer_config.json", truncation_side="left")
    text = "the cat sat on the mat"
    (one,) = outputs_of(teach(folder, max_length=4), [text])
    assert [text[start:end] for _, start, end, _ in one.pieces.tolist()] == ["", "the", "mat", ""]


def test_tokens_that_overflow_are_computed_again_in_float32(models: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(models["bert"], tmp_path / "hot")
    weights = load_file(folder / "model.safetensors")
    weights["encoder.layer.1.intermediate.dense.weight"] *= 50000
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    encoded = teach(folder, dtype="float16").encode_counted(TEXTS)
    assert encoded.repaired.any()
    assert encoded.by_token is not None
    exact = outputs_of(teach(folder), TEXTS)
    for row in np.flatnonzero(encoded.repaired).tolist():
        np.testing.assert_allclose(encoded.by_token[row].states, exact[row].states, atol=1e-4)


def test_a_batch_out_of_memory_is_split(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = teach(models["bert"])
    expected = outputs_of(teacher, TEXTS)
    sizes: list[int] = []
    encoder = teacher._encoder  # type: ignore[attr-defined]
    model = encoder._model

    def tight(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        sizes.append(len(batch["input_ids"]))
        vectors = model.forward(batch)
        if len(batch["input_ids"]) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return vectors

    monkeypatch.setattr(encoder, "_model", replace(model, forward=tight))
    for one, other in zip(outputs_of(teacher, TEXTS), expected, strict=True):
        np.testing.assert_allclose(one.states, other.states, atol=1e-5)
    assert max(sizes) > 2 >= sizes[-1]


class TestRefusals:
    def test_layers_that_the_model_does_not_have(self, models: dict[str, Path]) -> None:
        for layers in ((0,), (3,), (2, 1), (1, 1)):
            with pytest.raises(TeacherError, match="ascending numbers from 1 to 2"):
                load_teacher(spec_of(models["bert"], TokenRequest(attention=layers)))

    @pytest.mark.parametrize("name", ["bert", "st"])
    def test_attention_that_shows_no_maps(self, models: dict[str, Path], name: str) -> None:
        with pytest.raises(TeacherError, match="is sdpa, but attention maps need eager"):
            teach(models[name], attn_implementation="sdpa")
        assert outputs_of(teach(models[name], TokenRequest(), attn_implementation="sdpa"), TEXTS[:1])

    def test_a_slow_tokenizer(self, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("transformers.PreTrainedTokenizerFast.is_fast", False)
        with pytest.raises(TeacherError, match="returns no character offsets") as caught:
            teach(models["bert"])
        assert "\n" not in str(caught.value)

    def test_maps_whose_rows_do_not_sum_to_one(self, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        record = batching.TokenPass.record_attention
        monkeypatch.setattr(
            batching.TokenPass,
            "record_attention",
            lambda self, layer, maps, values: record(self, layer, 2 * maps, values),
        )
        with pytest.raises(TeacherError, match=r"do not sum to 1 \(off by 1\.000\)"):
            teach(models["bert"])

    def test_a_backend_that_returns_vectors_only(self) -> None:
        spec = spec_of("toy", TokenRequest())
        mute = replace(spec, space=replace(spec.space, backend=f"{__name__}:Mute"))
        with pytest.raises(TeacherError, match="returns vectors only"):
            load_teacher(mute)
        with pytest.raises(TeacherError, match="returns vectors only"):
            token_shape(mute)


class Mute(Teacher):
    """A custom backend without token-level output."""

    resolve = None  # type: ignore[assignment]
    encode_counted = None  # type: ignore[assignment]

    def __init__(self, spec: TeacherSpec) -> None:
        raise AssertionError("loaded")


class TestShape:
    @pytest.mark.parametrize("name", NAMES)
    def test_it_is_read_from_the_encoders_configuration(self, models: dict[str, Path], name: str) -> None:
        assert token_shape(spec_of(models[name], None)) == TokenShape(16, 2, 2, causal=name == "qwen3")

    def test_other_architectures_name_sizes_differently(self, models: dict[str, Path], tmp_path: Path) -> None:
        folder = shutil.copytree(models["bert"], tmp_path / "distilbert")
        (folder / "config.json").unlink()
        tiny_teachers.edit_json(
            folder / "config.json", model_type="distilbert", dim=768, n_layers=6, n_heads=12, hidden_dim=3072
        )
        assert token_shape(spec_of(folder, None)) == TokenShape(768, 6, 12, causal=False)

    def test_a_missing_size_is_refused_by_name(self, models: dict[str, Path], tmp_path: Path) -> None:
        folder = shutil.copytree(models["bert"], tmp_path / "copy")
        tiny_teachers.edit_json(folder / "config.json", num_attention_heads=None)
        with pytest.raises(TeacherError, match=r"config\.json has no num_attention_heads"):
            token_shape(spec_of(folder, None))


class TestToy:
    def test_words_are_its_tokens(self) -> None:
        text = "the  cat\nsat the"
        (one,) = outputs_of(teach("toy", prompt="a "), [text])
        assert [text[start:end] for _, start, end, _ in one.pieces.tolist()] == ["", *text.split()]
        assert one.pieces[:, ROLE].tolist() == [OTHER, TEXT_TOKEN, TEXT_TOKEN, TEXT_TOKEN, TEXT_TOKEN]
        assert one.pieces[1, ID] == one.pieces[4, ID] != one.pieces[2, ID]
        shape = token_shape(spec_of("toy", None))
        assert one.states.shape == (5, shape.width)
        assert not np.allclose(one.states[1], one.states[4])  # a word elsewhere in the text

    def test_attention_weights_follow_the_formula(self) -> None:
        (one,) = outputs_of(teach("toy", TokenRequest(attention=(1, 3))), ["a b"])
        assert one.attention is not None
        np.testing.assert_allclose(one.attention[:, 0], [[1 / 3, 2 / 3], [3 / 7, 4 / 7]], rtol=1e-6)
        np.testing.assert_allclose(one.attention[:, 0], one.attention[:, 1])
        np.testing.assert_allclose(one.importance, [6 / 7, 8 / 7], rtol=1e-6)  # type: ignore[arg-type]

    def test_an_empty_text_has_no_tokens(self) -> None:
        (one,) = outputs_of(teach("toy"), [""])
        assert one.attention is not None
        assert one.importance is not None
        assert (len(one.states), len(one.pieces), one.importance.shape, one.attention.shape) == (0, 0, (0,), (2, 0, 0))

    def test_truncated_tokens_are_reproducible(self) -> None:
        encoded = teach("toy", max_length=3).encode_counted([LONG])
        assert encoded.by_token is not None
        assert len(encoded.by_token[0].states) == encoded.tokens[0] == 3
        (again,) = outputs_of(teach("toy", max_length=3), [LONG])
        np.testing.assert_array_equal(again.states, encoded.by_token[0].states)


def real(name: str) -> Path:
    root = os.environ.get("TEACHER_CACHE_MODELS")
    if root is None or not (Path(root) / name).is_dir():
        pytest.skip(f"no {name} in TEACHER_CACHE_MODELS")
    return Path(root) / name


REAL_TEXTS = ["Unbelievable weather: naïve tourists!", "", "Rain.", "It's 5 o'clock, isn't it? " * 40]


class TestRealModels:
    def test_minilm_has_the_word_pieces_and_states_of_transformers(self, minilm: Path) -> None:
        from transformers import AutoTokenizer

        teacher = teach(minilm, TokenRequest(attention=(3, 6)), max_length=64)
        tokenizer = AutoTokenizer.from_pretrained(minilm)
        expected = directly(ModelFolder.open(minilm).encoder, REAL_TEXTS, 64)
        for text, one, (ids, states, maps) in zip(REAL_TEXTS, outputs_of(teacher, REAL_TEXTS), expected, strict=True):
            assert one.pieces[:, ID].tolist() == ids.tolist()
            np.testing.assert_allclose(one.states, states, atol=1e-4)
            np.testing.assert_allclose(one.attention, maps[[2, 5]], atol=1e-5)  # type: ignore[arg-type]
            np.testing.assert_allclose(one.importance, maps[5].sum(axis=0), atol=1e-4)  # type: ignore[arg-type]
            for token, start, end, role in one.pieces.tolist():
                if role == TEXT_TOKEN and text[start:end].isascii():
                    piece = tokenizer.convert_ids_to_tokens(token).removeprefix("##")
                    assert text[start:end].lower() == piece

    @pytest.mark.weights
    @pytest.mark.parametrize("name", ["e5-small-enpt-deq", "all-mpnet-base-v2"])
    def test_other_models_have_the_word_pieces_and_states_of_transformers(self, name: str) -> None:
        folder = real(name)
        layers = token_shape(spec_of(folder, None, prompt="")).layers
        teacher = teach(folder, TokenRequest(attention=(1, layers)), prompt="", max_length=64)
        expected = directly(ModelFolder.open(folder).encoder, REAL_TEXTS, 64)
        for text, one, (ids, states, maps) in zip(REAL_TEXTS, outputs_of(teacher, REAL_TEXTS), expected, strict=True):
            assert one.pieces[:, ID].tolist() == ids.tolist()
            np.testing.assert_allclose(one.states, states, atol=1e-4)
            np.testing.assert_allclose(one.attention, maps[[0, -1]], atol=1e-5)  # type: ignore[arg-type]
            spans = [text[start:end] for _, start, end, role in one.pieces.tolist() if role == TEXT_TOKEN]
            spelt = re.sub(r"\s", "", "".join(spans))
            assert re.sub(r"\s", "", text).startswith(spelt)
            assert len(spelt) > 0 or not text
