"""Trainer callbacks: epochs, stages, averages, step times, the log, progress and validation scores."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from distill.objectives.base import Objective
from distill.training.averaging import WeightAverage
from distill.training.measurement import DATA, StepTimer, cycle_means, peak_memory
from distill.training.validation import format_point, point
from teacher_cache.storage.files import atomic_write

# Steps at the start that `StepClock.cost` excludes.
WARM_UP_STEPS = 10
# The last part of a step: clipping, optimizer, schedule.
OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class TrainingProgress:
    """Progress of a training, reported after every step."""

    step: int
    steps: int
    epoch: float
    loss: float | None  # latest logged


class EpochOrder(TrainerCallback):
    """Sets the sampler's epoch, computed from the step, so that a resumed run agrees."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        loader = kwargs["train_dataloader"]
        loader.batch_sampler.set_epoch(state.global_step // _steps_per_epoch(loader, args))


class Stages(TrainerCallback):
    """Sets the objective's number of finished epochs, computed from the step, so that a resumed run agrees."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.objective.advance(state.global_step / _steps_per_epoch(kwargs["train_dataloader"], args))


def _steps_per_epoch(loader: Any, args: Any) -> int:
    return math.ceil(len(loader) / args.gradient_accumulation_steps)


class Averaging(TrainerCallback):
    """Updates the average of the weights after every step."""

    def __init__(self, average: WeightAverage) -> None:
        self.average = average

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.average.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.average.update(state.global_step)


class StepClock(TrainerCallback):
    """Step times and peak memory of a training run.

    Logs, evaluations and checkpoints are not timed. With a timer that does not synchronize, GPU work still running at
    the end of a step is counted in the next one, whose loss is checked for NaN.
    """

    def __init__(self, timer: StepTimer | None = None, *, cycle: int = 1) -> None:
        """Create a clock without steps.

        Args:
            timer: None creates one that does not synchronize.
            cycle: the number of steps after which expensive and cheap steps repeat.
        """
        self.timer = timer or StepTimer()
        self.cycle = cycle

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.timer.start()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.timer.mark(DATA)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.timer.mark(OPTIMIZER)
        self.timer.stop()

    on_evaluate = on_save = on_log = on_train_begin

    def cost(self) -> dict[str, Any] | None:
        """Medians and 90th percentiles in seconds, the share of time spent waiting for data, and peak memory.

        The first steps, which allocate, compile and fill caches, are excluded. A step's time is the mean over a cycle.
        None before the first step. On a GPU the peak is that of torch's allocations, otherwise the resident memory of
        the process.
        """
        if not self.timer.steps:
            return None
        timed = self.timer.steps[min(WARM_UP_STEPS, len(self.timer.steps) // 2) :]
        waits = np.array([step.parts[DATA] for step in timed])
        steps = np.array([step.seconds for step in timed]) - waits
        cycle = min(self.cycle, len(steps))
        means = cycle_means(steps[len(steps) % cycle :], cycle)
        cuda = torch.cuda.is_available()
        return {
            "step_seconds_p50": float(np.median(means)),
            "step_seconds_p90": float(np.quantile(means, 0.9)),
            "data_seconds_p50": float(np.median(waits)),
            "data_wait_share": float(waits.sum() / (waits.sum() + steps.sum())),
            "peak_memory_bytes": peak_memory(torch.device("cuda" if cuda else "cpu")),
            "steps": len(steps),
            "device": torch.cuda.get_device_name() if cuda else f"cpu, {torch.get_num_threads()} threads",
        }


class MetricsFile(TrainerCallback):
    """Writes `metrics.jsonl`: step, epoch, loss, each term and learning rate, as means since the previous line.

    An evaluation is a line after that of its step, with the key "validation". Resuming drops the lines after the
    checkpoint, because those steps are repeated. Every checkpoint has a line, so that a resumed run has the lines of
    an uninterrupted one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        kept = []
        if self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    if json.loads(line)["step"] <= state.global_step:
                        kept.append(line)
                except (ValueError, KeyError):  # the line that a killed run was writing
                    continue
        with atomic_write(self.path) as file:
            file.write("".join(f"{line}\n" for line in kept).encode())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # An evaluation may lead to a checkpoint, after Trainer has logged.
        control.should_log |= control.should_save or control.should_evaluate

    on_epoch_end = on_step_end

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and "loss" in (logs or {}):
            self._append({"step": state.global_step, **logs})

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._append(point(state.global_step, metrics))

    def _append(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class ValidationReport(TrainerCallback):
    """Announces the scores after every evaluation, on the first rank."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        self.announce = announce

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.announce(format_point(point(state.global_step, metrics)))


class ProgressReport(TrainerCallback):
    """Reports progress after every step, on the first rank."""

    def __init__(self, report: Callable[[TrainingProgress], None]) -> None:
        self.report = report
        self.loss: float | None = None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.loss = (logs or {}).get("loss", self.loss)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.report(TrainingProgress(state.global_step, state.max_steps, state.epoch, self.loss))
