import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from distill.config import RunConfig, resolve_precision
from distill.data.dataset import ShuffledDataset
from distill.data.sampler import StreamingSampler
from distill.errors import ConfigError, NonFiniteLoss
from distill.objectives.base import Objective, StudentOutput, TeacherTargets
from distill.sharpness import SharpnessAware
from distill.training.arguments import linear_cycles, training_arguments
from distill.training.callbacks import StepClock
from distill.training.measurement import DATA, StepTime
from distill.training.trainer import DistillTrainer
from teacher_cache.reading.shuffle import WindowedShuffle
from tests.distill.tiny_runs import Parts, Stopped, metrics, parts, stop_at, tiny_config
from tests.reference_loop import train as reference


def weights(made: Parts) -> dict[str, Tensor]:
    return {**made.student.state_dict(prefix="student."), **made.objective.state_dict(prefix="objective.")}


def oracle(made: Parts) -> list[dict[str, float]]:
    training = made.config.training
    torch.manual_seed(training.seed)
    size = training.per_device_train_batch_size
    order = WindowedShuffle(len(made.dataset), size, window=made.config.data.window, seed=training.seed)
    return reference(
        made.student,
        made.objective,
        ShuffledDataset(made.dataset, order).__getitems__,
        made.collator,
        StreamingSampler(order),
        steps=training.max_steps,
        accumulate=training.gradient_accumulation_steps,
        warmup=int(training.warmup_ratio * training.max_steps),
        learning_rate=training.learning_rate,
        head_learning_rate=training.head_learning_rate,
        weight_decay=training.weight_decay,
        floor=training.min_lr_rate,
        rho=0.05 if made.config.sharpness.name == "asam" else None,
    )


# 7 batches an epoch, the last one smaller: with 2 micro-batches a step the last step of an epoch has one.
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("sharpness", ["none", "asam"])
def test_training_equals_the_plain_loop_including_dropout(
    toy_cache: Path, tiny_student: Path, tmp_path: Path, sharpness: str, accumulate: int
) -> None:
    config = tiny_config(
        toy_cache,
        tiny_student,
        tmp_path,
        f"sharpness.name={sharpness}",
        f"training.gradient_accumulation_steps={accumulate}",
        "training.warmup_ratio=0.25",
        "objective.options.simcse_weight=0.5",
    )
    made, expected = parts(config), parts(config)
    before = {name: tensor.clone() for name, tensor in weights(made).items()}
    made.trainer().train()
    log = oracle(expected)

    wanted = weights(expected)
    for name, tensor in weights(made).items():
        # Softmax does not depend on a key bias: its gradient is rounding noise, which Adam amplifies.
        if not name.endswith("key.bias"):
            assert torch.allclose(tensor, wanted[name], rtol=0, atol=1e-6), name
    moved = [name for name in wanted if not torch.equal(before[name], wanted[name])]
    assert "student.encoder.embeddings.word_embeddings.weight" in moved
    assert "objective.heads.0.weight" in moved

    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 13))
    for line, terms in zip(lines, log, strict=True):
        for name, value in terms.items():
            assert line[name] == pytest.approx(value, rel=1e-4, abs=1e-7)
        assert line["loss"] == pytest.approx(sum(line[name] for name in terms), rel=1e-5)


def test_the_logged_terms_sum_to_the_logged_loss_over_steps_of_unequal_micro_batches(
    toy_cache: Path, tiny_student: Path, tmp_path: Path
) -> None:
    overrides = ("training.logging_steps=4", "training.gradient_accumulation_steps=2")
    parts(tiny_config(toy_cache, tiny_student, tmp_path, *overrides)).trainer().train()
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == [4, 8, 12]
    for line in lines:
        assert line["loss"] == pytest.approx(line["tamd"] + line["lasd"] + line["simcse"], rel=1e-5)


def test_the_learning_rates_warm_up_and_fall_to_their_floor(
    toy_cache: Path, tiny_student: Path, tmp_path: Path
) -> None:
    config = tiny_config(toy_cache, tiny_student, tmp_path, "training.warmup_ratio=0.25")
    trainer = parts(config).trainer()
    trainer.train()
    # The learning rate of a step: warm-up over 3 of 12 steps from 0, then a cosine from 1 to 0.1.
    factors = [0, 1 / 3, 2 / 3] + [0.1 + 0.9 * (1 + math.cos(math.pi * k / 9)) / 2 for k in range(9)]
    rates = [line["learning_rate"] for line in metrics(tmp_path)]
    assert rates == pytest.approx([1e-3 * factor for factor in factors], rel=1e-6)
    student, heads = trainer.optimizer.param_groups
    assert (student["lr"], heads["lr"]) == pytest.approx((1e-4, 5e-4))
    assert student["weight_decay"] == heads["weight_decay"] == 0.01


def test_weights_are_restored_after_the_second_pass(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    made = parts(tiny_config(toy_cache, tiny_student, tmp_path, "sharpness.name=asam"))
    trainer = made.trainer()
    seen: list[tuple[bool, dict[str, Tensor]]] = []

    class Watched(DistillTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            seen.append((self.in_second_pass, {k: v.detach().clone() for k, v in weights(made).items()}))
            return super().compute_loss(*args, **kwargs)

        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            seen.append((self.in_second_pass, {k: v.detach().clone() for k, v in weights(made).items()}))
            return loss

    trainer.__class__ = Watched
    trainer.train()
    assert [ascending for ascending, _ in seen] == [False, True, False] * 12
    for at_weights, perturbed, after in zip(seen[::3], seen[1::3], seen[2::3], strict=True):
        assert all(torch.equal(tensor, after[1][name]) for name, tensor in at_weights[1].items())
        assert any(not torch.equal(tensor, perturbed[1][name]) for name, tensor in at_weights[1].items())
    assert trainer.last_ascent is not None
    ascent, rise = trainer.last_ascent
    assert not any(tensor.requires_grad for tensor in (ascent.norm, ascent.gradient_norm, rise))
    line = metrics(tmp_path)[-1]
    assert line["perturbation_norm"] == pytest.approx(float(ascent.norm))
    assert line["perturbation_rise"] == pytest.approx(float(rise))


class Poisoned(Objective):
    """Gives NaN instead of the term's value from the given call on."""

    def __init__(self, objective: Objective, call: int) -> None:
        super().__init__()
        self.objective, self.left, self.needs = objective, call, objective.needs

    def forward(self, student: StudentOutput, teacher: TeacherTargets) -> dict[str, Tensor]:
        self.left -= 1
        terms: dict[str, Tensor] = self.objective(student, teacher)
        return terms | {"lasd": terms["lasd"] * math.nan} if self.left < 0 else terms


def test_a_loss_that_is_nan_stops_training_and_leaves_the_last_checkpoint(
    toy_cache: Path, tiny_student: Path, tmp_path: Path
) -> None:
    made = parts(tiny_config(toy_cache, tiny_student, tmp_path, "training.save_steps=4"))
    made.objective = Poisoned(made.objective, 5)
    with pytest.raises(NonFiniteLoss) as error:
        made.trainer().train()
    message = str(error.value)
    assert "nan at step 6" in message
    assert "lasd nan" in message
    assert "tamd 0." in message
    assert "\n" not in message
    assert json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())["global_step"] == 4
    assert not (tmp_path / "checkpoint-6").exists()
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3, 4, 5]


def resumed(made: Parts, checkpoint: Path) -> DistillTrainer:
    trainer = made.trainer()
    trainer.train(resume_from_checkpoint=str(checkpoint))
    return trainer


@pytest.mark.parametrize(
    ("sharpness", "accumulate", "save", "stop"),
    [
        ("none", 1, 7, 8),  # at the end of the first epoch of 7 steps
        ("none", 1, 5, 11),  # from the middle of the second epoch
        ("asam", 1, 3, 5),
        ("none", 2, 3, 5),  # 4 steps an epoch, the last of them half as large
        ("asam", 2, 4, 6),
    ],
)
def test_a_resumed_training_ends_with_the_same_bits_and_lines(
    toy_cache: Path, tiny_student: Path, tmp_path: Path, sharpness: str, accumulate: int, save: int, stop: int
) -> None:
    def config(folder: str) -> RunConfig:
        return tiny_config(
            toy_cache,
            tiny_student,
            tmp_path / folder,
            f"sharpness.name={sharpness}",
            f"training.gradient_accumulation_steps={accumulate}",
            f"training.save_steps={save}",
            "training.logging_steps=2",
            "training.save_total_limit=5",
        )

    whole = parts(config("whole"))
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    whole.trainer().train()
    with pytest.raises(Stopped):
        parts(config("cut")).trainer(report=stop_at(stop)).train()
    last = tmp_path / "cut" / f"checkpoint-{stop // save * save}"
    made = parts(config("cut"))
    torch.manual_seed(999)  # an earlier random state must not matter
    trainer = resumed(made, last)
    assert trainer.state.global_step == 12
    expected = weights(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(made).items())
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")


def test_a_checkpoint_of_the_last_step_is_restored_without_a_further_step(
    toy_cache: Path, tiny_student: Path, tmp_path: Path
) -> None:
    config = tiny_config(toy_cache, tiny_student, tmp_path, "training.save_steps=5")
    whole = parts(config)
    whole.trainer().train()
    made = parts(config)
    trainer = made.trainer()
    assert not trainer.restore(tmp_path / "checkpoint-10")
    assert trainer.restore(tmp_path / "checkpoint-12")
    assert trainer.state.global_step == 12
    expected = weights(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(made).items())


def test_loader_processes_change_nothing_even_when_resumed(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    config = tiny_config(toy_cache, tiny_student, tmp_path / "alone", "training.save_steps=4")
    whole = parts(config)
    whole.trainer().train()
    config = tiny_config(
        toy_cache, tiny_student, tmp_path / "alone", "training.save_steps=4", "training.dataloader_num_workers=2"
    )
    made = parts(config)
    resumed(made, tmp_path / "alone" / "checkpoint-8")
    expected = weights(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(made).items())


def test_lines_after_the_checkpoint_and_a_partial_last_line_are_dropped(
    toy_cache: Path, tiny_student: Path, tmp_path: Path
) -> None:
    config = tiny_config(toy_cache, tiny_student, tmp_path, "training.save_steps=6")
    parts(config).trainer().train()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "lo')
    resumed(parts(config), tmp_path / "checkpoint-6")
    assert [line["step"] for line in metrics(tmp_path)] == list(range(1, 13))


class ScaledTrainer(DistillTrainer):
    """With a loss scale, as float16 on a GPU has one."""

    scale = 2.0**16

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=self.scale, growth_interval=10**6)


def test_a_loss_scale_that_is_a_power_of_two_changes_no_bit(
    toy_cache: Path, tiny_student: Path, tmp_path: Path
) -> None:
    config = tiny_config(toy_cache, tiny_student, tmp_path, "sharpness.name=asam")
    plain, scaled = parts(config), parts(config)
    plain.trainer().train()
    scaled.trainer(ScaledTrainer).train()
    expected = weights(plain)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(scaled).items())


class OverflowingTrainer(ScaledTrainer):
    """In the fourth step scaled gradients are infinite, as can happen in float16."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        self.accelerator.scaler.scale(torch.zeros(()))  # creates the scale
        self.accelerator.scaler.update(new_scale=2.0**127 if self.state.global_step == 3 else 2.0**10)
        loss = super().training_step(*args, **kwargs)
        assert self.last_ascent is not None
        assert self.last_ascent[0].finite == (self.state.global_step != 3)
        return loss


def test_an_overflow_of_the_scaled_gradients_skips_the_step_and_lowers_the_scale(
    toy_cache: Path, tiny_student: Path, tmp_path: Path
) -> None:
    config = tiny_config(toy_cache, tiny_student, tmp_path, "sharpness.name=asam", "training.max_steps=5")
    made = parts(config)
    seen: list[dict[str, Tensor]] = []
    scales: list[float] = []

    def report(progress: Any) -> None:
        seen.append({name: tensor.clone() for name, tensor in weights(made).items()})
        scales.append(trainer.accelerator.scaler.get_scale())

    trainer = made.trainer(OverflowingTrainer, report=report)
    trainer.train()
    assert all(torch.equal(tensor, seen[3][name]) for name, tensor in seen[2].items())
    assert scales == [2.0**10, 2.0**10, 2.0**10, 2.0**126, 2.0**10]
    assert any(not torch.equal(tensor, seen[4][name]) for name, tensor in seen[3].items())
    assert all(bool(tensor.isfinite().all()) for tensor in seen[4].values())


def test_an_unknown_argument_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    config = RunConfig.load(None, [f"output_dir={tmp_path}", "training.arguments.adam_beta=0.9"])
    with pytest.raises(ConfigError, match=r"training\.arguments\.adam_beta.*did you mean adam_beta"):
        training_arguments(config, 10)


def test_further_arguments_reach_trainer(tmp_path: Path) -> None:
    config = RunConfig.load(
        None, [f"output_dir={tmp_path}", "training.arguments.adam_beta2=0.95", "training.precision=fp32"]
    )
    arguments = training_arguments(config, 10)
    assert arguments.adam_beta2 == 0.95
    assert arguments.warmup_steps == 3  # int(0.06 * 5 epochs of 10)
    assert not arguments.logging_nan_inf_filter
    assert not arguments.remove_unused_columns


def test_an_argument_that_trainer_refuses_is_one_line(tmp_path: Path) -> None:
    config = RunConfig.load(
        None,
        [f"output_dir={tmp_path}", "training.arguments.save_strategy=sometimes", "training.precision=fp32"],
    )
    with pytest.raises(ConfigError, match=r"^training arguments are invalid: [^\n]*sometimes[^\n]*$"):
        training_arguments(config, 10)


def test_an_epoch_without_a_whole_batch_is_refused(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    config = tiny_config(
        toy_cache,
        tiny_student,
        tmp_path,
        "data.drop_last=true",
        "training.per_device_train_batch_size=61",
    )
    with pytest.raises(ConfigError, match="no complete batch of 61"):
        parts(config).trainer()


def test_sharpness_is_refused_with_sharded_weights(
    toy_cache: Path, tiny_student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = parts(tiny_config(toy_cache, tiny_student, tmp_path, "sharpness.name=asam")).trainer()
    assert isinstance(trainer.sharpness, SharpnessAware)
    trainer.is_fsdp_enabled = True
    with pytest.raises(ConfigError, match="FSDP"):
        trainer._check_supported()


def test_an_explicit_precision_is_used() -> None:
    assert [resolve_precision(name) for name in ("fp32", "bf16")] == ["fp32", "bf16"]
    assert resolve_precision("auto") in ("fp32", "bf16", "fp16")


def test_fp16_without_a_gpu_is_refused_rather_than_run_as_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="fp16, which needs a CUDA GPU"):
        resolve_precision("fp16")


@pytest.mark.parametrize("argument", ["training.report_to=parchment", "training.arguments.logging_strategy=often"])
def test_an_error_of_transformers_is_one_line(
    toy_cache: Path, tiny_student: Path, tmp_path: Path, argument: str
) -> None:
    with pytest.raises(ConfigError, match="training arguments are invalid: ") as refusal:
        parts(tiny_config(toy_cache, tiny_student, tmp_path, argument)).trainer()
    assert "\n" not in str(refusal.value)


def test_activation_checkpointing_gives_the_same_weights(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    weights = []
    for name, argument in (("plain", []), ("checkpointed", ["training.arguments.activation_checkpointing=true"])):
        config = tiny_config(
            toy_cache, tiny_student, tmp_path / name, "sharpness.name=asam", "training.max_steps=3", *argument
        )
        trainer = parts(config).trainer()
        trainer.train()
        weights.append({key: value.clone() for key, value in trainer.model.state_dict().items()})
    for key, value in weights[0].items():
        torch.testing.assert_close(weights[1][key], value, rtol=1e-4, atol=1e-5)


def test_linear_cycles_decay_linearly_and_restart() -> None:
    factor = linear_cycles(12, 3, 0.1, warmup=3)
    assert [factor(step) for step in range(3)] == pytest.approx([0, 1 / 3, 2 / 3])
    cycle = [1, 0.7, 0.4]
    assert [factor(step) for step in range(3, 12)] == pytest.approx(cycle * 3)
    assert factor(12) == pytest.approx(0.1)


def test_a_run_can_train_in_linear_cycles(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    overrides = ("training.lr_scheduler_type=linear_cycles", "training.cycles=2", "training.warmup_ratio=0")
    parts(tiny_config(toy_cache, tiny_student, tmp_path, *overrides)).trainer().train()
    rates = [line["learning_rate"] for line in metrics(tmp_path)]
    assert rates == pytest.approx([1e-3 * (1 - 0.9 * step / 6) for step in range(6)] * 2, rel=1e-6)


def test_the_clock_counts_steps_and_the_memory_of_the_process(
    toy_cache: Path, tiny_student: Path, tmp_path: Path
) -> None:
    trainer = parts(tiny_config(toy_cache, tiny_student, tmp_path)).trainer()
    assert trainer.clock.cost() is None
    trainer.train()
    cost = trainer.clock.cost()
    assert cost is not None
    assert cost["steps"] == 6  # of 12, the first half is warm-up
    assert 0 < cost["step_seconds_p50"] <= cost["step_seconds_p90"]
    assert cost["data_seconds_p50"] > 0
    assert cost["peak_memory_bytes"] > 2**26


def test_a_run_that_ends_before_the_student_is_trained_is_refused(
    toy_cache: Path, tiny_student: Path, tmp_path: Path
) -> None:
    config = tiny_config(toy_cache, tiny_student, tmp_path, "objective.name=jasper")
    with pytest.raises(ConfigError, match=r"only after 2 epochs, and this run has 1\.71"):
        parts(config).trainer()


def test_the_student_is_not_trained_before_its_stage(toy_cache: Path, tiny_student: Path, tmp_path: Path) -> None:
    made = parts(
        tiny_config(toy_cache, tiny_student, tmp_path, "objective.name=jasper", "objective.options.stage_one_epochs=1")
    )
    moved: list[tuple[bool, bool]] = []
    before: dict[str, Tensor] = {}

    def note(progress: Any) -> None:
        now = {name: tensor.detach().clone() for name, tensor in weights(made).items()}
        if before:
            different = {name.split(".")[0] for name, tensor in now.items() if not torch.equal(tensor, before[name])}
            moved.append(("student" in different, "objective" in different))
        before.update(now)

    made.trainer(report=note).train()
    # Steps 2 to 7 are stage one; the learning rate of the first step is 0.
    assert [student for student, _ in moved] == [False] * 6 + [True] * 5
    assert all(heads for _, heads in moved)


def test_the_step_time_of_alternating_steps_is_the_mean_of_two() -> None:
    clock = StepClock(cycle=2)
    clock.timer.steps = [StepTime(seconds, 0.0, {DATA: 0.0}) for seconds in [9.0] * 10 + [1.0, 3.0] * 5 + [1.0]]
    cost = clock.cost()
    assert cost is not None
    assert (cost["step_seconds_p50"], cost["step_seconds_p90"]) == (2.0, 2.0)
    alone = StepClock(cycle=2)
    alone.timer.steps = [StepTime(5.0, 0.0, {DATA: 0.0})]
    assert (alone.cost() or {})["step_seconds_p50"] == 5.0
