"""What a configuration makes of transformers' TrainingArguments, and the learning rate's shape that they lack."""

import difflib
import math
from collections.abc import Callable
from dataclasses import fields
from importlib.util import find_spec
from typing import Any

import torch
from transformers import TrainingArguments

from distill.config import RunConfig, resolve_precision
from distill.errors import ConfigError
from distill.objectives.base import Objective
from teacher_cache.errors import MissingDependency

LINEAR_CYCLES = "linear_cycles"


def training_arguments(config: RunConfig, batches: int, *, objective: Objective | None = None) -> TrainingArguments:
    """Trainer's arguments for a run whose epochs have `batches` batches on each rank.

    Args:
        objective: says when, and how much of, the student has a gradient; None is always, all of it.

    Raises:
        ConfigError: an argument that Trainer does not know or accept, or a run too short to train the student.
        MissingDependency: 8-bit optimiser states without the library that keeps them.
    """
    training = config.training
    if "bnb" in training.optim and find_spec("bitsandbytes") is None:
        advice = ", or leave training.optim out"
        raise MissingDependency.of(f"training.optim={training.optim}", "bitsandbytes", advice)
    steps_an_epoch = math.ceil(batches / training.gradient_accumulation_steps)
    if steps_an_epoch < 1:
        raise ConfigError(
            f"an epoch has no whole batch of {training.per_device_train_batch_size}; lower "
            "training.per_device_train_batch_size, or set data.drop_last=false"
        )
    total = training.max_steps if training.max_steps > 0 else math.ceil(steps_an_epoch * training.num_train_epochs)
    head_only_epochs = 0.0 if objective is None else objective.head_only_epochs
    if total <= head_only_epochs * steps_an_epoch:
        raise ConfigError(
            f"the objective trains the student itself only after {head_only_epochs:g} epochs, and this run has "
            f"{total / steps_an_epoch:g}: train longer, or shorten its first stage "
            "(jasper: objective.options.stage_one_epochs)"
        )
    own_schedule = training.lr_scheduler_type == LINEAR_CYCLES
    cosine_floor = {"min_lr_rate": training.min_lr_rate} if training.lr_scheduler_type.endswith("min_lr") else {}
    precision = resolve_precision(training.precision)
    evaluation, choosing = config.evaluation, config.keeps_best
    arguments: dict[str, Any] = {
        "output_dir": config.output_dir,
        "num_train_epochs": training.num_train_epochs,
        "max_steps": training.max_steps,
        "per_device_train_batch_size": training.per_device_train_batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "learning_rate": training.learning_rate,
        "weight_decay": training.weight_decay,
        "lr_scheduler_type": "constant" if own_schedule else training.lr_scheduler_type,
        "lr_scheduler_kwargs": cosine_floor,
        "warmup_steps": int(training.warmup_ratio * total),
        "max_grad_norm": training.max_grad_norm,
        "optim": training.optim,
        "activation_checkpointing": training.memory == "low",
        "bf16": precision == "bf16",
        # Unless this is said, Trainer refuses bf16 on a processor, and several processes without a GPU
        # would each train alone.
        "use_cpu": not torch.accelerator.is_available(),
        "fp16": precision == "fp16",
        "seed": training.seed,
        "save_strategy": "steps",
        "save_steps": training.save_steps,
        # With a limit of 1 Trainer would delete all but the best at the end, and a killed run could not be continued.
        "save_total_limit": max(2, training.save_total_limit) if choosing else training.save_total_limit,
        # Never by epochs: Trainer evaluates behind an epoch, when the checkpoint of its last step is written already.
        "eval_strategy": "steps" if evaluation.data else "no",
        "eval_steps": (evaluation.steps or steps_an_epoch) if evaluation.data else None,
        "metric_for_best_model": "average" if choosing else None,
        "greater_is_better": True if choosing else None,
        "logging_steps": training.logging_steps,
        # A NaN must stop the run, not vanish from the curve.
        "logging_nan_inf_filter": False,
        "report_to": training.report_to.split(",") if training.report_to != "none" else "none",
        "dataloader_num_workers": training.dataloader_num_workers,
        "remove_unused_columns": False,
        "disable_tqdm": True,
        # Trainer warns of checkpoints that lie less than a second apart; what matters here is raised.
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
        raise ConfigError(f"training arguments were refused: {' '.join(str(error).split())}") from error


def linear_cycles(steps: int, cycles: int, floor: float, warmup: int = 0) -> Callable[[int], float]:
    """Factor of the learning rate by step: `cycles` straight lines from 1 down to `floor`, as LEAF trains.

    Args:
        warmup: steps that rise to 1 before the first cycle.
    """
    length = max(1.0, (steps - warmup) / cycles)

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        done = min((step - warmup) / length, cycles * (1 - 1e-9)) % 1  # the last step is the end of the last cycle
        return 1 - (1 - floor) * done

    return factor
