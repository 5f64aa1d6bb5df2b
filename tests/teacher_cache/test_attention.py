"""Recording attention: outputs and maps are those of eager attention, and nothing remains afterwards."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModel

from teacher_cache.errors import TeacherError
from teacher_cache.teachers.attention import count_layers, make_recordable, record_forward

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
}
ONE_VALUE = {"num_key_value_heads": 1, "head_dim": 8}
DISTILBERT = {"vocab_size": 50, "dim": 16, "n_layers": 3, "n_heads": 2, "hidden_dim": 32, "pad_token_id": 1}
SPECIALS = {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
MODELS: dict[str, dict[str, Any]] = {
    "Bert": SIZES,
    "MPNet": SIZES,
    "XLMRoberta": SIZES,
    "Roberta": SIZES,
    "Electra": SIZES | {"embedding_size": 16},
    "Albert": SIZES | {"embedding_size": 16},
    "DistilBert": DISTILBERT,
    "ModernBert": SIZES | SPECIALS | {"global_attn_every_n_layers": 2, "local_attention": 8},
    "Qwen3": SIZES | ONE_VALUE,
    "Mistral": SIZES | {"num_key_value_heads": 1},
}
GROUPED = {"Qwen3", "Mistral"}

IDS = torch.randint(4, 50, (3, 9), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[1] * 9, [1] * 5 + [0] * 4, [1] * 7 + [0] * 2])


def tiny(name: str, attention: str = "eager", **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**MODELS[name], **more)
    model = AutoModel.from_config(config, attn_implementation=attention)
    model.config.use_cache = False
    return model


def run(model: Any, **options: Any) -> Any:
    torch.manual_seed(1)
    return model(input_ids=IDS, attention_mask=MASK, **options)


class Recorded:
    def __init__(self) -> None:
        self.layers: list[int] = []
        self.maps: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, layer: int, maps: Tensor, values: Tensor) -> None:
        self.layers.append(layer)
        self.maps.append(maps)
        self.values.append(values)


@pytest.mark.parametrize("name", MODELS)
def test_maps_are_those_of_eager_attention(name: str) -> None:
    model = tiny(name).eval()
    expected = run(model, output_attentions=True)
    make_recordable(model)
    recorded = Recorded()
    with record_forward(model, on_attention=recorded):
        output = run(model)
    assert torch.equal(output[0], expected[0])
    assert recorded.layers == [1, 2, 3]
    for mine, theirs in zip(recorded.maps, expected.attentions, strict=True):
        assert torch.equal(mine, theirs)
    assert {tuple(values.shape) for values in recorded.values} == {(3, 1 if name in GROUPED else 2, 9, 8)}


@pytest.mark.parametrize("name", MODELS)
def test_training_is_that_of_eager_attention_and_maps_are_before_dropout(name: str) -> None:
    dropout = {"Qwen3": "attention_dropout", "Mistral": "attention_dropout", "ModernBert": "attention_dropout"}
    dropout["DistilBert"] = "attention_dropout"
    model = tiny(name, **{dropout.get(name, "attention_probs_dropout_prob"): 0.5}).train()
    expected = run(model, output_attentions=True)
    (gradient,) = torch.autograd.grad(expected[0].square().sum(), [model.get_input_embeddings().weight])
    assert (expected.attentions[0].sum(-1) - 1).abs().max() > 0.1
    make_recordable(model)
    recorded = Recorded()
    with record_forward(model, on_attention=recorded):
        output = run(model)
    assert torch.equal(output[0], expected[0])
    (same,) = torch.autograd.grad(output[0].square().sum(), [model.get_input_embeddings().weight])
    torch.testing.assert_close(same, gradient)
    for maps in recorded.maps:
        torch.testing.assert_close(maps.sum(-1), torch.ones(3, 2, 9))
        assert maps.requires_grad


def test_nothing_is_recorded_or_left_outside_the_context() -> None:
    for name in ("Bert", "MPNet"):
        model = tiny(name).eval()
        make_recordable(model)
        recorded = Recorded()
        with (
            pytest.raises(ZeroDivisionError),
            record_forward(model, on_attention=recorded, on_output=lambda _: 1 / 0),
        ):
            run(model)
        recorded.layers.clear()
        run(model)
        assert recorded.layers == []
        assert "forward" not in vars(model)
        assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("name", ["Bert", "MPNet"])
def test_contexts_can_be_nested_and_models_recorded_together(name: str) -> None:
    one, other = tiny(name).eval(), tiny(name).eval()
    for model in (one, other):
        make_recordable(model)
    outer, inner, beside = Recorded(), Recorded(), Recorded()
    with record_forward(other, on_attention=beside), record_forward(one, on_attention=outer):
        with record_forward(one, on_attention=inner):
            run(one)
        run(one)
    assert (outer.layers, inner.layers, beside.layers) == ([1, 2, 3] * 2, [1, 2, 3], [])


def test_the_output_is_recorded_with_the_given_arguments_without_hooks() -> None:
    model = tiny("Bert", "sdpa").eval()
    found: list[Any] = []
    with record_forward(model, on_output=found.append, output_hidden_states=True):
        model.forward(input_ids=IDS, attention_mask=MASK)
    assert len(found[0].hidden_states) == count_layers(model) + 1
    assert model.config._attn_implementation == "sdpa"


def test_maps_survive_activation_checkpointing() -> None:
    model = tiny("Bert").train()
    make_recordable(model)
    plain, again = Recorded(), Recorded()
    with record_forward(model, on_attention=plain):
        run(model)
    torch.stack(plain.maps).square().sum().backward()
    expected = model.embeddings.word_embeddings.weight.grad.clone()
    model.zero_grad()
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    with record_forward(model, on_attention=again):
        output = run(model)
    (torch.stack(again.maps).square().sum() + 0 * output[0].sum()).backward()
    torch.testing.assert_close(model.embeddings.word_embeddings.weight.grad, expected)
    assert again.layers == [1, 2, 3]


def test_a_saved_model_has_no_trace_of_recording(tmp_path: Any) -> None:
    model = tiny("Bert")
    make_recordable(model)
    make_recordable(model)
    model.save_pretrained(tmp_path)
    assert "recorded" not in (tmp_path / "config.json").read_text()


def test_a_model_with_custom_attention_is_refused() -> None:
    config = transformers.DebertaV2Config(**SIZES)
    with pytest.raises(TeacherError, match="the attention of DebertaV2Model cannot be recorded"):
        make_recordable(AutoModel.from_config(config))


def test_a_layer_that_is_not_recorded_is_an_error() -> None:
    model = tiny("Bert").eval()
    make_recordable(model)
    del model.encoder.layer[2]
    with (
        pytest.raises(TeacherError, match="maps of 2 layers, expected those of its 3"),
        record_forward(model, on_attention=Recorded()),
    ):
        run(model)
