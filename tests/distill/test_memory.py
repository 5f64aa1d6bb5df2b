"""Low memory: the same weights from fewer kept tensors; word embeddings that stay as they are; 8-bit states."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from distill.config import RunConfig
from distill.errors import ConfigError
from teacher_cache.errors import MissingDependency
from tests.distill.tiny_runs import Parts, parts, tiny_config


@pytest.fixture
def settings(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> Any:
    def made(name: str, *overrides: str) -> RunConfig:
        return tiny_config(toy_cache, tiny_student, tmp_path / name, "training.max_steps=3", *overrides)

    return made


def trained(config: RunConfig) -> dict[str, Tensor]:
    made = parts(config)
    made.trainer().train()
    return dict(made.student.state_dict())


@pytest.mark.parametrize("sharpness", ["none", "asam", "norm-one-view"])
def test_what_is_computed_again_sees_the_dropout_of_the_first_time(
    settings: Any, sharpness: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distill.student.PORTION", 64)
    name = f"sharpness.name={sharpness}"
    found = trained(settings("low", name, "training.memory=low"))
    monkeypatch.setattr("distill.student.checkpoint", lambda compute, *inputs, use_reentrant: compute(*inputs))
    kept = ("training.memory=low", "training.arguments.activation_checkpointing=false")
    expected = trained(settings("kept", name, *kept))
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-5, atol=1e-7, msg=key)


def test_without_dropout_low_memory_trains_to_the_default_weights(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distill.student.PORTION", 64)

    def still(name: str, *overrides: str) -> dict[str, Tensor]:
        # Not Adam, which makes whole steps of a rounding error: a key's bias has no gradient but that.
        plain = ("sharpness.name=asam", "training.optim=sgd", "training.learning_rate=0.1")
        made = parts(settings(name, *plain, *overrides))
        for module in made.student.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        made.trainer().train()
        return dict(made.student.state_dict())

    found = still("low", "training.memory=low")
    for key, tensor in still("default").items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=1e-6, msg=key)


def kept_bytes(made: Parts) -> int:
    """Of the tensors that the forward pass of the first batch keeps for its backward pass."""
    trainer = made.trainer()
    trainer.model.train()
    if trainer.args.activation_checkpointing:
        trainer.model.activation_checkpointing_enable()
    batch = next(iter(trainer.get_train_dataloader()))
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        trainer.model(**batch)
    weights = {parameter.untyped_storage().data_ptr() for parameter in trainer.model.parameters()}
    return sum(size for address, size in kept.items() if address not in weights)


def test_low_memory_keeps_less(settings: Any) -> None:
    default, low = (parts(settings(memory, f"training.memory={memory}")) for memory in ("default", "low"))
    assert kept_bytes(low) < kept_bytes(default) / 2


def test_frozen_word_embeddings_stay_as_they_are(settings: Any) -> None:
    made = parts(settings("frozen", "training.freeze_embeddings=true", "sharpness.name=asam"))
    table: Any = made.student.word_embeddings
    before = {name: tensor.clone() for name, tensor in made.student.state_dict().items()}
    trainer = made.trainer()
    trainer.train()
    after = made.student.state_dict()
    (frozen,) = [name for name, parameter in made.student.named_parameters() if parameter is table.weight]
    assert torch.equal(before[frozen], after[frozen])
    assert not any(torch.equal(before[name], after[name]) for name in before if name.endswith("dense.weight"))
    assert table.weight not in trainer.optimizer.state


def test_an_unknown_memory_is_refused(settings: Any) -> None:
    with pytest.raises(ConfigError, match=r"training\.memory is 'tiny'; expected default or low"):
        settings("tiny", "training.memory=tiny")


def test_8_bit_states_without_their_library_name_the_extra(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distill.arguments.find_spec", lambda name: None)
    made = parts(settings("small", "training.optim=adamw_bnb_8bit"))
    with pytest.raises(MissingDependency, match=r"teacher-cache\[low-memory\]"):
        made.trainer()
