"""Low memory: the same weights with fewer stored tensors; frozen word embeddings; 8-bit states."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from distill.config import RunConfig, TrainingConfig
from distill.errors import ConfigError
from distill.runs.run import run
from distill.student.student import Student
from distill.training.memory import ALLOCATOR_VARIABLES, save_memory, uses_expandable_segments
from teacher_cache.errors import MissingDependency
from tests.distill.tiny_runs import Parts, Stopped, parts, stop_at, tiny_config
from tests.teacher_cache import tiny_teachers

EIGHT_BIT = "training.optim=adamw_bnb_8bit"


@pytest.fixture
def settings(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> Any:
    def made(name: str, *overrides: str) -> RunConfig:
        return tiny_config(toy_cache, tiny_student, tmp_path / name, "training.max_steps=3", *overrides)

    return made


@pytest.fixture(scope="module")
def wide_student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT with matrices large enough for 8-bit states, at least 4,096 elements."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_teachers, "WIDTH", 64)
        return tiny_teachers.write_bert(tmp_path_factory.mktemp("models") / "wide-bert")


def trained(config: RunConfig) -> dict[str, Tensor]:
    made = parts(config)
    made.trainer().train()
    return dict(made.student.state_dict())


@pytest.mark.parametrize("sharpness", ["none", "asam", "norm-one-view"])
def test_recomputed_blocks_use_the_same_dropout(settings: Any, sharpness: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distill.student.student.MICRO_BATCH_TOKENS", 64)
    name = f"sharpness.name={sharpness}"
    found = trained(settings("low", name, "training.memory=low"))
    monkeypatch.setattr("distill.student.student.checkpoint", lambda compute, *inputs, use_reentrant: compute(*inputs))
    kept = ("training.memory=low", "training.arguments.activation_checkpointing=false")
    expected = trained(settings("kept", name, *kept))
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-5, atol=1e-7, msg=key)


def test_without_dropout_low_memory_trains_to_the_default_weights(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distill.student.student.MICRO_BATCH_TOKENS", 64)

    def still(name: str, *overrides: str) -> dict[str, Tensor]:
        # Not Adam, which would amplify rounding errors: the gradient of a key bias is only rounding.
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


def test_recomputed_blocks_use_the_same_precision(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distill.student.student.MICRO_BATCH_TOKENS", 64)
    low = ("training.memory=low", "training.precision=bf16", "training.gradient_accumulation_steps=2")
    found = trained(settings("low", *low))
    monkeypatch.setattr("distill.student.student.checkpoint", lambda compute, *inputs, use_reentrant: compute(*inputs))
    expected = trained(settings("kept", *low, "training.arguments.activation_checkpointing=false"))
    for key, tensor in expected.items():  # a float32 pass would differ by bf16's rounding, 2^-8 of a step of 1e-3
        torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=1e-6, msg=key)


@pytest.mark.parametrize(
    "overrides",
    [
        ("training.memory=low",),
        ("training.memory=low", EIGHT_BIT, "training.freeze_embeddings=true"),
    ],
    ids=["low", "all of them"],
)
def test_a_resumed_training_ends_with_the_same_bits(
    settings: Any, wide_student: Path, overrides: tuple[str, ...]
) -> None:
    if EIGHT_BIT in overrides:
        pytest.importorskip("bitsandbytes")
    steps = (f"student.model={wide_student}", "training.max_steps=8", "training.save_steps=3", "sharpness.name=asam")
    expected = trained(settings("whole", *steps, *overrides))
    config = settings("cut", *steps, *overrides)
    with pytest.raises(Stopped):
        parts(config).trainer(report=stop_at(5)).train()
    made = parts(config)
    made.trainer().train(resume_from_checkpoint=str(Path(config.output_dir) / "checkpoint-3"))
    found = made.student.state_dict()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def kept_bytes(made: Parts) -> int:
    """Bytes of the tensors that the first forward pass stores for its backward pass."""
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


def test_low_memory_stores_less(settings: Any) -> None:
    default, low = (parts(settings(memory, f"training.memory={memory}")) for memory in ("default", "low"))
    assert kept_bytes(low) < kept_bytes(default) / 2


def test_micro_batches_store_less_than_blocks_unless_the_batch_is_small(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = kept_bytes(parts(settings("blocks", "training.arguments.activation_checkpointing=true")))
    assert kept_bytes(parts(settings("small", "training.memory=low"))) == blocks
    monkeypatch.setattr("distill.student.student.MICRO_BATCH_TOKENS", 64)
    assert kept_bytes(parts(settings("low", "training.memory=low"))) < blocks


CACHED_GRADIENTS = ("training.memory=low", "training.arguments.activation_checkpointing=false")


def test_a_contrastive_loss_of_a_large_batch_has_the_same_gradients_in_micro_batches(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distill.student.student.MICRO_BATCH_TOKENS", 64)
    counts: list[int] = []
    compute = Student._states
    monkeypatch.setattr(Student, "_states", lambda self, *inputs: counts.append(1) or compute(self, *inputs))

    def gradients(name: str, *overrides: str) -> dict[str, Tensor]:
        batch = "training.per_device_train_batch_size=60"
        made = parts(settings(name, "objective.name=simcse", batch, *overrides))
        for module in made.student.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        trainer = made.trainer()
        trainer.model.train()
        trainer.model(**next(iter(trainer.get_train_dataloader())))["loss"].backward()
        return {name: p.grad for name, p in made.student.named_parameters() if p.grad is not None}

    expected = gradients("whole")
    assert len(counts) == 1
    found = gradients("cached", *CACHED_GRADIENTS)
    assert len(counts) > 1 + 2 * 10  # each encoded twice
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_in_micro_batches_memory_hardly_grows_with_the_batch(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distill.student.student.MICRO_BATCH_TOKENS", 64)

    def grown(name: str, *overrides: str) -> int:
        small, large = (
            kept_bytes(parts(settings(f"{name}-{size}", f"training.per_device_train_batch_size={size}", *overrides)))
            for size in (15, 60)
        )
        return large - small

    assert grown("cached", *CACHED_GRADIENTS) < grown("whole") / 8


def test_frozen_word_embeddings_do_not_change(settings: Any) -> None:
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


def test_frozen_word_embeddings_are_exported_as_they_were_loaded(settings: Any, tiny_student: Path) -> None:
    result = run(settings("frozen", "training.freeze_embeddings=true"))
    before, after = load_file(tiny_student / "model.safetensors"), load_file(Path(result.final) / "model.safetensors")
    table, matrix = "embeddings.word_embeddings.weight", "encoder.layer.0.output.dense.weight"
    assert torch.equal(after[table], before[table])
    assert not torch.equal(after[matrix], before[matrix])


def test_an_unknown_memory_is_refused(settings: Any) -> None:
    with pytest.raises(ConfigError, match=r"training\.memory is 'tiny'; expected default or low"):
        settings("tiny", "training.memory=tiny")


def test_8_bit_states_are_for_matrices_but_not_for_embeddings(settings: Any, wide_student: Path) -> None:
    pytest.importorskip("bitsandbytes")
    made = parts(settings("small", f"student.model={wide_student}", EIGHT_BIT, "training.max_steps=1"))
    trainer = made.trainer()
    trainer.train()
    kinds = {
        name: {trainer.optimizer.state[parameter][f"state{moment}"].dtype for moment in (1, 2)}
        for name, parameter in made.student.encoder.named_parameters()
        if parameter.numel() >= 4096 and not name.startswith("pooler")
    }
    assert kinds.pop("embeddings.position_embeddings.weight") == {torch.float32}
    assert len(kinds) >= 8
    assert all(kind == {torch.uint8} for kind in kinds.values())


def test_msam_is_refused_with_8_bit_states(settings: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"msam needs the optimizer's momentum.*use training\.optim=adamw_torch_fused"
    ):
        settings("msam", EIGHT_BIT, "sharpness.name=msam")


@pytest.mark.parametrize(
    ("optim", "message"),
    [("adamw_torch_fast", "training arguments are invalid: "), ("galore_adamw", "training.optim=galore_adamw cannot")],
)
def test_an_unavailable_optimizer_is_refused_in_one_line(settings: Any, optim: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        parts(settings("other", f"training.optim={optim}")).trainer().train()
    assert "\n" not in str(refusal.value)


def test_a_student_without_activation_checkpointing_is_refused(settings: Any) -> None:
    made = parts(settings("old", "training.memory=low"))
    encoder: Any = made.student.encoder
    encoder.supports_gradient_checkpointing = False
    with pytest.raises(
        ConfigError, match=r"does not support activation checkpointing .*activation_checkpointing=false"
    ):
        made.trainer().train()


def test_8_bit_states_without_their_library_name_the_extra(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distill.training.arguments.find_spec", lambda name: None)
    made = parts(settings("small", "training.optim=adamw_bnb_8bit"))
    with pytest.raises(MissingDependency, match=r"teacher-cache\[low-memory\]"):
        made.trainer()


@pytest.mark.parametrize(
    ("memory", "environment", "expandable"),
    [
        ("low", "", True),
        ("default", "", False),
        ("low", "expandable_segments:False", False),
        ("default", "max_split_size_mb:64,expandable_segments:True", True),
        ("low", "max_split_size_mb:64", True),
        ("low", "backend:cudaMallocAsync", False),
    ],
)
@pytest.mark.parametrize("variable", ALLOCATOR_VARIABLES)
def test_segments_are_expandable_with_low_memory_unless_the_environment_sets_it(
    memory: str, environment: str, expandable: bool, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, environment)
    assert uses_expandable_segments(TrainingConfig(memory=memory)) == expandable


def test_expandable_segments_are_set_in_addition_to_earlier_settings(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = parts(settings("low"))
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch._C._accelerator_getAllocatorSettings", lambda: "max_split_size_mb:64")
    settings_made: list[str] = []
    monkeypatch.setattr("torch._C._accelerator_setAllocatorSettings", settings_made.append)
    save_memory(made.student, TrainingConfig())
    assert settings_made == []
    save_memory(made.student, TrainingConfig(memory="low"))
    assert settings_made == ["max_split_size_mb:64,expandable_segments:True"]
