"""bfloat16 on a CPU: which layers are rounded, and how close vectors are to float32."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2Model

from teacher_cache.teachers import linear, load_teacher, resolve
from teacher_cache.teachers.base import TeacherOptions
from teacher_cache.teachers.folder import ModelFolder
from teacher_cache.teachers.linear import Bfloat16Linear, use_bfloat16
from teacher_cache.teachers.loading import load_encoder
from tests.teacher_cache.tiny_teachers import write_bert, write_mpnet, write_qwen3, write_xlm_roberta

CPU = torch.device("cpu")
WORDS = ["the", "cat", "sat", "on", "mat", "and", "a", "river", "ran", "through", "old", "town", "sea", "dogs"]
TEXTS = [" ".join(np.random.default_rng(i).choice(WORDS, 2 + i % 18)) for i in range(100)]
# Relative error of rounding to bfloat16.
ROUNDING = 2.0**-8


@pytest.fixture(params=["oneDNN", "torch"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(linear, "_ONEDNN_BFLOAT16", None)
    elif linear._ONEDNN_BFLOAT16 is None:
        pytest.skip("oneDNN does not multiply in bfloat16 here")
    return str(request.param)


@pytest.mark.usefixtures("backend")
@torch.inference_mode()
def test_a_layer_multiplies_rounded_numbers_and_returns_float32() -> None:
    torch.manual_seed(0)
    exact = nn.Linear(24, 40)
    network = nn.Sequential(exact)
    states = torch.randn(5, 3, 24)
    expected = states.bfloat16().double() @ exact.weight.bfloat16().double().T + exact.bias.bfloat16().double()
    use_bfloat16(network)
    found = network(states)
    assert found.dtype == torch.float32
    assert torch.equal(found, found.bfloat16().float())
    assert (found - expected).abs().max() <= ROUNDING * expected.abs().max()


@pytest.mark.usefixtures("backend")
@torch.inference_mode()
def test_a_layer_with_its_activation_equals_the_two(tmp_path: Path) -> None:
    folder = write_bert(tmp_path)
    exact = load_encoder(ModelFolder.open(folder), torch.float32, CPU, TeacherOptions(model=str(folder)))
    rounded = load_encoder(ModelFolder.open(folder), torch.bfloat16, CPU, TeacherOptions(model=str(folder)))
    states = torch.randn(4, 16)
    expected, found = (network.encoder.layer[0].intermediate(states) for network in (exact, rounded))
    assert found.dtype == torch.bfloat16  # the next layer would round it
    assert (found - expected).abs().max() <= 4 * ROUNDING * expected.abs().max()


def test_only_linear_layers_are_rounded(tmp_path: Path) -> None:
    folder = write_xlm_roberta(tmp_path)
    exact = load_encoder(ModelFolder.open(folder), torch.float32, CPU, TeacherOptions(model=str(folder)))
    rounded = load_encoder(ModelFolder.open(folder), torch.bfloat16, CPU, TeacherOptions(model=str(folder)))
    weights = dict(exact.named_parameters())
    layers = {name for name, module in rounded.named_modules() if isinstance(module, nn.Linear)}
    for name, parameter in rounded.named_parameters():
        if name.rpartition(".")[0] in layers:
            assert parameter.dtype == torch.bfloat16
            assert torch.equal(parameter, weights[name].bfloat16())
        else:
            assert torch.equal(parameter, weights[name])
    assert layers


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("write", [write_bert, write_xlm_roberta, write_mpnet, write_qwen3])
def test_vectors_are_closer_to_float32_than_those_of_a_bfloat16_model(
    tmp_path: Path, write: Callable[..., Path]
) -> None:
    folder = str(write(tmp_path, seed=2))
    exact, found = (
        load_teacher(resolve(TeacherOptions(model=folder, device="cpu", dtype=dtype))).encode(TEXTS)
        for dtype in ("float32", "bfloat16")
    )
    throughout: Any = load_teacher(resolve(TeacherOptions(model=folder, device="cpu", dtype="float32")))
    throughout.network.to(torch.bfloat16)
    errors = [np.square(one - exact).mean() for one in (found, throughout.encode(TEXTS))]
    assert 0 < errors[0] < errors[1]


def test_a_model_without_linear_layers_is_rounded_throughout() -> None:
    network = GPT2Model(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=20, n_positions=16))
    use_bfloat16(network)
    assert {parameter.dtype for parameter in network.parameters()} == {torch.bfloat16}


@torch.inference_mode()
def test_a_weight_shared_with_an_embedding_is_rounded_for_the_layer_only() -> None:
    embedding, layer = nn.Embedding(7, 16), nn.Linear(16, 7, bias=False)
    layer.weight = embedding.weight
    table = embedding.weight.detach().clone()
    network = nn.Sequential(embedding, layer)
    use_bfloat16(network)
    assert torch.equal(embedding.weight, table)
    assert isinstance(layer, Bfloat16Linear)
    assert network(torch.tensor([3])).shape == (1, 7)
