"""Around the steps of a training: orders, stages, the clock, the log, the caller's progress, validation's line."""

import json
import math
import resource
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from distill.objectives.base import Objective
from distill.training.validation import point, told
from teacher_cache.storage.files import replacing

# Steps that `StepClock` does not count.
WARM_UP_STEPS = 10


@dataclass(frozen=True)
class TrainingProgress:
    """How far training is; handed to the caller's callback after every step."""

    step: int
    steps: int
    epoch: float
    loss: float | None  # the latest that was logged


class EpochOrder(TrainerCallback):
    """Tells the sampler which epoch begins, counted in steps, so that a resumed run agrees."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        loader = kwargs["train_dataloader"]
        steps_an_epoch = math.ceil(len(loader) / args.gradient_accumulation_steps)
        loader.batch_sampler.set_epoch(state.global_step // steps_an_epoch)


class Stages(TrainerCallback):
    """Tells the objective how many epochs are done, by the step, so that a resumed run agrees."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        steps_an_epoch = math.ceil(len(kwargs["train_dataloader"]) / args.gradient_accumulation_steps)
        self.objective.advance(state.global_step / steps_an_epoch)


def cycle_means(values: Iterable[float], cycle: int) -> list[float]:
    """Of each `cycle` successive steps; any such stretch holds one of every kind, wherever it begins.

    Raises:
        ValueError: the values are no whole number of cycles.
    """
    means: list[float] = np.array(list(values), dtype=np.float64).reshape(-1, cycle).mean(axis=1).tolist()
    return means


class StepClock(TrainerCallback):
    """Seconds of every optimiser step, and of the wait for its data before it.

    The first steps are left out: they allocate, compile and fill caches. Nothing waits for a GPU on the clock's
    account: what is still in flight at the end of a step is waited for by the check of the next step's loss.
    """

    def __init__(self, cycle: int = 1) -> None:
        """Nothing seen yet.

        Args:
            cycle: after so many steps, dear and cheap ones come again.
        """
        self.cycle = cycle
        self.steps: list[float] = []
        self.waits: list[float] = []
        self._begun = self._ended = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._ended = time.perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begun = time.perf_counter()
        self.waits.append(self._begun - self._ended)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._ended = time.perf_counter()
        self.steps.append(self._ended - self._begun)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._ended = time.perf_counter()  # the next step's data did not wait for it

    on_save = on_log = on_evaluate

    def cost(self) -> dict[str, Any] | None:
        """Medians and ninth deciles in seconds, the share of all time that was waited for data, and the peak of memory.

        A step's time is the mean over a cycle of steps. None before a step was done.

        On a GPU the peak is that of torch's allocations, on a processor that of the whole process's resident memory.
        """
        if not self.steps:
            return None
        first = min(WARM_UP_STEPS, len(self.steps) // 2)
        steps, waits = np.array(self.steps[first:]), np.array(self.waits[first:])
        cycle = min(self.cycle, len(steps))
        whole = cycle_means(steps[len(steps) % cycle :], cycle)
        cuda = torch.cuda.is_available()
        peak = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "step_seconds_p50": float(np.median(whole)),
            "step_seconds_p90": float(np.quantile(whole, 0.9)),
            "data_seconds_p50": float(np.median(waits)),
            "data_wait_share": float(waits.sum() / (waits.sum() + steps.sum())),
            "peak_memory_bytes": int(peak),
            "steps": len(steps),
            "device": torch.cuda.get_device_name() if cuda else f"cpu, {torch.get_num_threads()} threads",
        }


class MetricsFile(TrainerCallback):
    """One JSON object a line: step, epoch, loss, each term, learning rate; means since the line before.

    An evaluation has a line of its own behind that of its step, with the key "validation".

    Lines behind the checkpoint that a run resumes from are dropped: those steps are done again. Every
    checkpoint has a line, so that the lines of a resumed run are those of an uninterrupted one.
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
                except (ValueError, KeyError):  # the line that was being written when the run was killed
                    continue
        with replacing(self.path) as file:
            file.write("".join(f"{line}\n" for line in kept).encode())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # An evaluation may lead to a checkpoint, behind the place where Trainer logs.
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
    """Says a line behind every evaluation, on the first rank."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        self.announce = announce

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.announce(told(point(state.global_step, metrics)))


class ProgressReport(TrainerCallback):
    """Calls back after every step, on the first rank."""

    def __init__(self, report: Callable[[TrainingProgress], None]) -> None:
        self.report = report
        self.loss: float | None = None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.loss = (logs or {}).get("loss", self.loss)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.report(TrainingProgress(state.global_step, state.max_steps, state.epoch, self.loss))
