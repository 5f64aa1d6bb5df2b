"""`transformers.TrainingArguments` of a configuration, and a learning rate schedule that transformers lacks."""

import difflib
import math
from collections.abc import Callable
from dataclasses import fields
from importlib.util import find_spec
from typing import Any

import torch
from transformers import TrainingArguments

from distill.config import WSD, RunConfig, TrainingConfig, resolve_precision
from distill.errors import ConfigError
from distill.objectives.base import Objective
from distill.training.averaging import soup_steps
from teacher_cache.errors import MissingDependency

LINEAR_CYCLES = "linear_cycles"


def training_arguments(config: RunConfig, batches: int, *, objective: Objective | None = None) -> TrainingArguments:
    """Arguments of Trainer for a run with `batches` batches per epoch on each rank.

    Args:
        objective: None trains all of the student in every epoch.
    """
    training = config.training
    if "bnb" in training.optim and find_spec("bitsandbytes") is None:
        advice = ", or leave training.optim out"
        raise MissingDependency.of(f"training.optim={training.optim}", "bitsandbytes", advice)
    steps_per_epoch = math.ceil(batches / training.gradient_accumulation_steps)
    total = total_steps(training, batches)
    if steps_per_epoch < 1:
        raise ConfigError(
            f"an epoch has no complete batch of {training.per_device_train_batch_size}; lower "
            "training.per_device_train_batch_size, or set data.drop_last=false"
        )
    if training.soup > 1:
        soup_steps(training, total)
    head_only_epochs = 0.0 if objective is None else objective.head_only_epochs
    if total <= head_only_epochs * steps_per_epoch:
        raise ConfigError(
            f"the objective trains the student only after {head_only_epochs:g} epochs, and this run has "
            f"{total / steps_per_epoch:g}; train longer, or shorten its first stage "
            "(objective.options.stage_one_epochs of jasper)"
        )
    stage_one_epochs = 0.0 if objective is None else objective.stage_one_epochs
    if stage_one_epochs and total <= stage_one_epochs * steps_per_epoch:
        raise ConfigError(
            f"the second stage of objective {config.objective.name} begins after {stage_one_epochs:g} epochs, and this "
            f"run has {total / steps_per_epoch:g}; train longer, or lower objective.options.stage_one_epochs"
        )
    is_cyclic = training.lr_scheduler_type == LINEAR_CYCLES
    shape: dict[str, Any] = {}
    if training.lr_scheduler_type.endswith("min_lr"):
        shape = {"min_lr_rate": training.min_lr_rate}
    elif training.lr_scheduler_type == WSD:
        shape = {
            "num_decay_steps": int(training.decay_ratio * total),
            "decay_type": training.decay_type,
            "min_lr_ratio": training.min_lr_rate,
        }
    precision = resolve_precision(training.precision)
    evaluation, keeps_best = config.evaluation, config.keeps_best
    arguments: dict[str, Any] = {
        "output_dir": config.output_dir,
        "num_train_epochs": training.num_train_epochs,
        "max_steps": training.max_steps,
        "per_device_train_batch_size": training.per_device_train_batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "learning_rate": training.learning_rate,
        "weight_decay": training.weight_decay,
        "lr_scheduler_type": "constant" if is_cyclic else training.lr_scheduler_type,
        "lr_scheduler_kwargs": shape,
        "warmup_steps": int(training.warmup_ratio * total),
        "max_grad_norm": training.max_grad_norm,
        "optim": training.optim,
        "activation_checkpointing": training.memory == "low",
        "bf16": precision == "bf16",
        # Otherwise Trainer refuses bf16 on a CPU, and several processes without a GPU would each train alone.
        "use_cpu": not torch.accelerator.is_available(),
        "fp16": precision == "fp16",
        "seed": training.seed,
        "save_strategy": "steps",
        "save_steps": training.save_steps,
        # With a limit of 1 Trainer would delete all but the best at the end, and a killed run could not be resumed.
        "save_total_limit": max(2, training.save_total_limit) if keeps_best else training.save_total_limit,
        # Never "epoch": Trainer evaluates after an epoch, when the checkpoint of its last step is already written.
        "eval_strategy": "steps" if evaluation.data else "no",
        "eval_steps": (evaluation.steps or steps_per_epoch) if evaluation.data else None,
        "metric_for_best_model": "average" if keeps_best else None,
        "greater_is_better": True if keeps_best else None,
        "logging_steps": training.logging_steps,
        # A NaN must stop the run instead of being filtered from the log.
        "logging_nan_inf_filter": False,
        "report_to": training.report_to.split(",") if training.report_to != "none" else "none",
        "dataloader_num_workers": training.dataloader_num_workers,
        "remove_unused_columns": False,
        "disable_tqdm": True,
        # Trainer warns of checkpoints less than a second apart; errors are raised anyway.
        "log_level": "error",
        "log_level_replica": "error",
        "ddp_find_unused_parameters": objective is not None
        and (head_only_epochs > 0 or objective.has_unused_parameters),
    }
    known = {f.name for f in fields(TrainingArguments)}
    for name, value in training.arguments.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"training.arguments.{name} is not one of transformers' TrainingArguments{hint}")
        arguments[name] = value
    try:
        return TrainingArguments(**arguments)
    except (ValueError, TypeError, ImportError) as error:
        raise ConfigError(f"training arguments are invalid: {' '.join(str(error).split())}") from error


def total_steps(training: TrainingConfig, batches: int) -> int:
    """Optimizer steps of a training with `batches` batches per epoch on each rank."""
    if training.max_steps > 0:
        return training.max_steps
    return math.ceil(math.ceil(batches / training.gradient_accumulation_steps) * training.num_train_epochs)


def linear_cycles(steps: int, cycles: int, floor: float, warmup: int = 0) -> Callable[[int], float]:
    """Learning rate factor by step: linear decay from 1 to `floor`, `cycles` times, as in LEAF.

    Args:
        warmup: steps of linear warm-up before the first cycle.
    """
    length = max(1.0, (steps - warmup) / cycles)

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        done = min((step - warmup) / length, cycles * (1 - 1e-9)) % 1  # the last step ends the last cycle
        return 1 - (1 - floor) * done

    return factor
