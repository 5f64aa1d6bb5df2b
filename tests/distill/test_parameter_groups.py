"""Learning rates by step and layer, and what weight decay applies to."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel

from distill.config import RunConfig, StudentConfig
from distill.errors import ConfigError
from distill.student.student import Student
from distill.training.parameter_groups import layer_numbers
from tests.distill.tiny_runs import Stopped, metrics, parts, stop_at, tiny_config

SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 50}
DISTILBERT = {"dim": 16, "n_layers": 3, "n_heads": 2, "hidden_dim": 16, "vocab_size": 50}
WSD = "training.lr_scheduler_type=warmup_stable_decay"


def numbers(model_type: str, tiny_student: Path, **sizes: Any) -> dict[str, int]:
    student = Student.load(StudentConfig(model=str(tiny_student)))
    student.encoder = AutoModel.from_config(AutoConfig.for_model(model_type, **sizes))
    return layer_numbers(student)


@pytest.mark.parametrize(
    ("model_type", "sizes", "first", "block", "after"),
    [
        ("bert", SIZES, "embeddings.word_embeddings", "encoder.layer", "pooler.dense"),
        ("mpnet", SIZES, "embeddings.word_embeddings", "encoder.layer", "encoder.relative_attention_bias"),
        ("modernbert", {**SIZES, "vocab_size": 50368}, "embeddings.tok_embeddings", "layers", "final_norm"),
        ("qwen3", {**SIZES, "num_key_value_heads": 2, "head_dim": 8}, "embed_tokens", "layers", "norm"),
        ("distilbert", DISTILBERT, "embeddings.word_embeddings", "transformer.layer", None),
        ("electra", {**SIZES, "embedding_size": 8}, "embeddings_project", "encoder.layer", None),
    ],
)
def test_layers_are_numbered_in_every_family(
    tiny_student: Path, model_type: str, sizes: dict[str, Any], first: str, block: str, after: str | None
) -> None:
    found = numbers(model_type, tiny_student, **sizes)
    assert set(found.values()) == {0, 1, 2, 3}
    for name, layer in found.items():
        name = name.removeprefix("student.encoder.")
        if name.startswith(f"{block}."):
            assert layer == int(name.removeprefix(f"{block}.")[0]) + 1
        if name.startswith(first):
            assert layer == 0
        if after is not None and name.startswith(after):
            assert layer == 3


def test_a_student_whose_layers_share_a_block_is_refused(tiny_student: Path) -> None:
    with pytest.raises(ConfigError, match="3 layers of student 'tiny-bert'"):
        numbers("albert", tiny_student, **SIZES, embedding_size=8)


def test_each_layer_has_its_learning_rate_at_every_step(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    schedule = ("training.lr_scheduler_type=linear", "training.warmup_ratio=0", "training.max_steps=4")
    config = tiny_config(toy_cache, tiny_student, tmp_path, "training.layer_decay=0.5", *schedule)
    trainer = parts(config).trainer()
    seen: list[dict[str, float]] = []

    def rates(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        names = {parameter: name for name, parameter in trainer.model.named_parameters()}
        seen.append({names[p]: group["lr"] for group in optimizer.param_groups for p in group["params"]})

    trainer.create_optimizer().register_step_pre_hook(rates)
    trainer.train()
    assert seen[0].keys() == dict(trainer.model.named_parameters()).keys()
    # 2 layers, rates of 1e-3 and 5e-3, linear from 1 to 0 in 4 steps.
    for factor, by_name in zip([1, 0.75, 0.5, 0.25], seen, strict=True):
        for name, rate in by_name.items():
            expected = 1e-3
            if "embeddings" in name:
                expected = 1e-3 / 4
            elif "layer.0." in name:
                expected = 1e-3 / 2
            elif name.startswith("objective."):
                expected = 5e-3
            assert rate == pytest.approx(factor * expected), name
    assert [line["learning_rate"] for line in metrics(tmp_path)] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])


def test_without_these_options_there_is_a_group_for_the_student_and_one_for_the_heads(
    toy_cache: Path, tiny_student: Path, tmp_path: Path
) -> None:
    made = parts(tiny_config(toy_cache, tiny_student, tmp_path))
    student, heads = made.trainer().create_optimizer().param_groups
    assert [*map(id, student["params"])] == [*map(id, made.student.parameters())]
    assert [*map(id, heads["params"])] == [*map(id, made.objective.parameters())]
    assert student["weight_decay"] == heads["weight_decay"] == 0.01


def test_norms_and_biases_can_be_left_out_of_weight_decay(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    config = tiny_config(
        toy_cache,
        tiny_student,
        tmp_path,
        "training.decay_norms_and_biases=false",
        "objective.name=jasper",
        "objective.options={bias: true, stage_one_epochs: 0}",
    )
    made = parts(config)
    trainer = made.trainer()
    groups = trainer.create_optimizer().param_groups
    decays = {p: group["weight_decay"] for group in groups for p in group["params"]}
    norms = {p for module in made.student.modules() if isinstance(module, nn.LayerNorm) for p in module.parameters()}
    for name, parameter in trainer.model.named_parameters():
        assert decays[parameter] == (0.0 if parameter in norms or name.endswith("bias") else 0.01), name
    assert len(groups) == 4
    assert decays[made.objective.head.bias] == 0.0


def test_warmup_stable_decay_by_hand(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    config = tiny_config(
        toy_cache, tiny_student, tmp_path, WSD, "training.warmup_ratio=0.25", "training.decay_ratio=0.34"
    )
    trainer = parts(config).trainer()
    trainer.train()
    # 12 steps: 3 of warm-up from 0.1, 5 at 1, and 4 of 1 - sqrt down to 0.1.
    shape = [0, 1 / 3, 2 / 3, *[1] * 5, *(1 - math.sqrt(k / 4) for k in range(4))]
    assert [line["learning_rate"] for line in metrics(tmp_path)] == pytest.approx(
        [1e-3 * (0.1 + 0.9 * x) for x in shape]
    )
    student, heads = trainer.optimizer.param_groups
    assert (student["lr"], heads["lr"]) == pytest.approx((1e-4, 5e-4))


@pytest.mark.slow
def test_a_resumed_training_has_the_same_rates_and_bits(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    def config(folder: str) -> RunConfig:
        (tmp_path / folder).mkdir(exist_ok=True)
        options = ("training.layer_decay=0.7", "training.decay_norms_and_biases=false", "training.decay_type=linear")
        return tiny_config(
            toy_cache,
            tiny_student,
            tmp_path / folder,
            WSD,
            *options,
            "training.decay_ratio=0.5",
            "training.save_steps=4",
        )

    whole, cut = parts(config("whole")), parts(config("cut"))
    whole.trainer().train()
    with pytest.raises(Stopped):
        cut.trainer(report=stop_at(7)).train()
    resumed = parts(config("cut"))
    resumed.trainer().train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-4"))
    expected = whole.student.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed.student.state_dict().items())
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["training.layer_decay=0"], "training.layer_decay is 0.0"),
        (["training.layer_decay=1.1"], "training.layer_decay is 1.1"),
        (["training.decay_ratio=0.2"], "training.decay_ratio is 0.2, which needs training.lr_scheduler_type"),
        (["training.decay_type=cosine"], "training.decay_type is cosine, which needs"),
        ([WSD, "training.decay_type=sqrt"], "expected linear, cosine or 1-sqrt"),
        ([WSD, "training.decay_ratio=0.8", "training.warmup_ratio=0.3"], "at most 1 together"),
    ],
)
def test_settings_that_do_not_fit_are_refused(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        RunConfig.load(None, overrides)
    assert expected in str(error.value)
