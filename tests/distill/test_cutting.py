"""Students of some layers of another one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AlbertConfig,
    AutoModel,
    BertConfig,
    DebertaV2Config,
    DistilBertConfig,
    ElectraConfig,
    Gemma3TextConfig,
    ModernBertConfig,
    MPNetConfig,
    Qwen3Config,
    RobertaConfig,
    T5Config,
    T5EncoderModel,
    XLMConfig,
    XLMRobertaConfig,
)

from distill.config import StudentConfig
from distill.errors import StudentError
from distill.student.cut_spec import CutSpec, cut_folder, trained_student
from distill.student.cutting import cut_layers, first_and_last, layer_candidates, layers_config
from distill.student.student import Student, student_shape

SIZES: dict[str, Any] = {
    "vocab_size": 30,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
    "pad_token_id": 1,
}
TYPES = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
CONFIGS: dict[str, Any] = {
    "bert": BertConfig(**SIZES),
    "deberta-v2": DebertaV2Config(
        **SIZES, relative_attention=True, position_buckets=8, pos_att_type=["p2c", "c2p"], conv_kernel_size=3
    ),
    "distilbert": DistilBertConfig(vocab_size=30, dim=16, n_layers=4, n_heads=2, hidden_dim=24),
    "electra": ElectraConfig(**SIZES, embedding_size=8),
    "gemma3": Gemma3TextConfig(**SIZES, num_key_value_heads=1, head_dim=8, sliding_window=3, layer_types=TYPES),
    "modernbert": ModernBertConfig(
        **SIZES, local_attention=4, layer_types=TYPES, bos_token_id=0, eos_token_id=2, cls_token_id=0, sep_token_id=2
    ),
    "mpnet": MPNetConfig(**SIZES),
    "qwen3": Qwen3Config(
        **SIZES, num_key_value_heads=1, head_dim=8, use_sliding_window=True, sliding_window=3, layer_types=TYPES
    ),
    "roberta": RobertaConfig(**SIZES),
    "xlm": XLMConfig(vocab_size=30, emb_dim=16, n_layers=4, n_heads=2, pad_index=1),
    "xlm-roberta": XLMRobertaConfig(**SIZES),
}
IDS = torch.tensor([[5, 9, 12, 7, 20, 3, 28, 6], [8, 8, 21, 4, 17, 26, 11, 10]])


def student_of(encoder: Any) -> Student:
    tokenizer: Any = SimpleNamespace(padding_side="right")
    return Student(encoder.eval(), tokenizer, pooling="mean", max_length=32)


def random_student(config: Any) -> Student:
    torch.manual_seed(0)
    return student_of(AutoModel.from_config(config))


@torch.no_grad()
def states(student: Student) -> list[torch.Tensor]:
    encoder: Any = student.encoder
    return list(encoder(input_ids=IDS, attention_mask=torch.ones_like(IDS), output_hidden_states=True).hidden_states)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_first_layers_give_the_states_of_the_whole_model_and_are_saved_and_loaded(
    family: str, tmp_path: Path
) -> None:
    whole = random_student(CONFIGS[family])
    cut = cut_layers(whole, [0, 1, 2])
    found, expected = states(cut), states(whole)
    assert (len(found), cut.shape.layers, whole.shape.layers) == (4, 3, 4)
    # A final norm comes after the last state of some models.
    for mine, other in zip(found[:3], expected[:3], strict=True):
        assert torch.equal(mine, other)
    encoder: Any = cut.encoder
    encoder.save_pretrained(tmp_path)
    loaded = student_of(AutoModel.from_pretrained(tmp_path))
    assert torch.allclose(states(loaded)[-1], found[-1], atol=1e-6)


@pytest.mark.parametrize("family", ["bert", "mpnet", "distilbert"])
def test_chosen_blocks_run_one_after_another(family: str) -> None:
    whole = random_student(CONFIGS[family])
    encoder: Any = whole.encoder
    blocks = encoder.transformer.layer if family == "distilbert" else encoder.encoder.layer
    cut = cut_layers(whole, [1, 3])
    found = states(cut)
    # Remove blocks from the whole model itself: the last one first.
    del blocks[2], blocks[0]
    for mine, other in zip(found, states(whole), strict=True):
        assert torch.equal(mine, other)


def test_the_larger_model_is_copied_not_changed() -> None:
    whole = random_student(CONFIGS["bert"])
    before = states(whole)
    cut = cut_layers(whole, [0, 3])
    with torch.no_grad():
        for parameter in cut.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, states(whole), strict=True))


@pytest.mark.parametrize("family", ["gemma3", "modernbert", "qwen3"])
def test_blocks_keep_their_kind_of_attention(family: str) -> None:
    whole = random_student(CONFIGS[family])
    cut: Any = cut_layers(whole, [0, 2, 3]).encoder
    assert cut.config.layer_types == ["full_attention", "sliding_attention", "full_attention"]
    # Block 1 of the cut model is block 2 of the whole one: fed with the same state, it returns the same.
    whole_encoder: Any = whole.encoder
    seen: list[Any] = []
    cut.layers[1].register_forward_hook(
        lambda block, args, kwargs, out: seen.append((args, kwargs, out)), with_kwargs=True
    )
    with torch.no_grad():
        cut(input_ids=IDS, attention_mask=torch.ones_like(IDS))
        args, kwargs, out = seen[0]
        again = whole_encoder.layers[2](*args, **kwargs)
    first = out[0] if isinstance(out, tuple) else out
    assert torch.equal(first, again[0] if isinstance(again, tuple) else again)


def test_a_table_of_relative_positions_in_the_first_block_moves() -> None:
    torch.manual_seed(0)
    encoder = T5EncoderModel(T5Config(vocab_size=30, d_model=16, num_layers=4, num_heads=2, d_ff=24, d_kv=8))
    cut: Any = cut_layers(student_of(encoder), [1, 3]).encoder
    table = encoder.encoder.block[0].layer[0].SelfAttention.relative_attention_bias
    assert torch.equal(cut.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight, table.weight)
    assert torch.equal(
        cut.encoder.block[0].layer[0].SelfAttention.q.weight, encoder.encoder.block[1].layer[0].SelfAttention.q.weight
    )


def test_models_that_cannot_be_cut_say_why() -> None:
    with pytest.raises(StudentError, match="AlbertModel cannot be cut: it has no list of 4 blocks"):
        cut_layers(random_student(AlbertConfig(**SIZES, embedding_size=8)), [0])
    # The first block of ModernBERT has no norm of its own.
    with pytest.raises(StudentError, match=r"layers\.0\.attn_norm\.weight.*if block 0 was left out, keep it"):
        cut_layers(random_student(CONFIGS["modernbert"]), [1, 2])


def test_only_lists_with_a_value_per_block_are_cut() -> None:
    config = Qwen3Config(**SIZES, layer_types=TYPES, eos_token_id=[2, 3, 4, 5])
    cut = layers_config(config, [0, 2])
    assert (cut.num_hidden_layers, cut.layer_types) == (2, ["full_attention", "sliding_attention"])
    assert cut.eos_token_id == [2, 3, 4, 5]
    assert config.num_hidden_layers == 4


def test_candidates_are_different_sets_with_the_first_block() -> None:
    assert layer_candidates(6, 3) == {
        "first": (0, 1, 2),
        "first and last": (0, 1, 5),
        "evenly spaced": (0, 2, 5),
        "every few": (0, 2, 4),
    }
    assert layer_candidates(12, 4)["ends"] == (0, 1, 10, 11)
    assert layer_candidates(12, 4)["every few"] == (0, 3, 6, 9)
    assert layer_candidates(4, 4) == {"first": (0, 1, 2, 3)}
    assert layer_candidates(4, 1) == {"first": (0,)}
    assert layer_candidates(12, 4)["evenly spaced"] == (0, 4, 7, 11)
    assert first_and_last(12, 4) == (0, 1, 2, 11)
    assert first_and_last(12, 1) == (0,)
    assert first_and_last(4, 4) == (0, 1, 2, 3)


def test_a_specification_is_read_from_the_name_of_a_model() -> None:
    assert CutSpec.parse("cut:models/a,b,depth=3,keep=20000") == CutSpec("models/a,b", None, 3, 20000)
    assert CutSpec.parse("cut:owner/model,layers=0+2+5,keep=all") == CutSpec("owner/model", (0, 2, 5), None, "all")
    assert CutSpec.parse("cut:owner/model,layers=0+2+5,keep=all").name == "model-layers0+2+5-keepall"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cut:model", "names nothing to cut"),
        ("cut:,depth=3", "has no model"),
        ("cut:model,width=3", "unknown option 'width'"),
        ("cut:model,depth=three", "not a number"),
        ("cut:model,depth=0", "expected at least 1 layer"),
        ("cut:model,layers=2+1", "expected ascending block numbers"),
        ("cut:model,depth=1,layers=2", "keep one"),
        ("cut:model,keep=0", "expected a number of tokens"),
    ],
)
def test_a_wrong_specification_is_one_line(text: str, message: str) -> None:
    with pytest.raises(StudentError, match=message):
        CutSpec.parse(text)


def test_the_shape_after_a_cut_needs_no_weights(tiny_student: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Student, "load", None)
    whole = student_shape(StudentConfig(str(tiny_student)))
    shape = student_shape(StudentConfig(f"cut:{tiny_student},depth=1"))
    assert (whole.layers, shape.layers) == (2, 1)
    assert (shape.dim, shape.heads, shape.pooling) == (whole.dim, whole.heads, whole.pooling)
    with pytest.raises(StudentError, match=r"`depth` is 3, but .* has 2 layers"):
        student_shape(StudentConfig(f"cut:{tiny_student},depth=3"))
    with pytest.raises(StudentError, match=r"`layers` is 0,2, but the 2 layers of .* are 0 to 1"):
        student_shape(StudentConfig(f"cut:{tiny_student},layers=0+2"))


def test_a_run_trains_the_student_in_its_folder(tmp_path: Path) -> None:
    config = StudentConfig("cut:owner/model,depth=3", prompt="query: ")
    assert cut_folder(config, tmp_path) == tmp_path / "student" / "model-depth3"
    assert trained_student(config, tmp_path) == StudentConfig(str(tmp_path / "student/model-depth3"), prompt="query: ")
    assert trained_student(StudentConfig("owner/model"), tmp_path) == StudentConfig("owner/model")
