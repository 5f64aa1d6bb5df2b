"""A run's real trainer for a few steps, each timed in parts.

A step is an optimizer step with all of its micro-batches. Sharpness with an ascent at every k-th step alternates
expensive and cheap steps; `cycle_means` averages over k of them.
"""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from distill.config import RunConfig
from distill.data.dataset import CachedDataset
from distill.data.online import OnlineTeacher
from distill.training.assembly import Assembly
from distill.training.callbacks import OPTIMIZER, StepClock
from distill.training.measurement import DATA, StepTime, StepTimer, memory_in_use, peak_memory, reset_peak_memory
from distill.training.trainer import DistillTrainer
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.joint import JointSpace
from teacher_cache.tokens.token_columns import ATTENTION

# Parts of a step: the wait for its batch; the online teacher; the first pass of sharpness; the forward and backward
# pass of the gradient; clipping, optimizer and schedule.
TEACHER, FIRST_PASS, FORWARD, BACKWARD = "teacher", "first_pass", "forward", "backward"
PARTS = (DATA, TEACHER, FIRST_PASS, FORWARD, BACKWARD, OPTIMIZER)


@dataclass(frozen=True)
class Measurement:
    """Step times and memory of one timed run.

    Attributes:
        steps: the timed steps.
        peak: bytes, highest memory while training ran.
        loaded: bytes in use before the first step. On a CPU the pages of a weights file may become resident later.
        weights: bytes of the student's and the objective's parameters.
        teacher: bytes of the online teacher's parameters in its precision; None without one, or if it is not a
            transformers model.
        stored: bytes in the cache per text, averaged over the columns that the steps read; None with an online
            teacher.
    """

    steps: tuple[StepTime, ...]
    peak: int
    loaded: int
    weights: int = 0
    teacher: int | None = None
    stored: float | None = None


class TimedTrainer(DistillTrainer):
    """A run's trainer with a timer for the parts of its steps."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.remove_callback(self.clock)
        self.clock = TimedRunClock(self.args.device)
        self.add_callback(self.clock)
        self.timer = self.clock.timer
        collator: Any = self.data_collator
        if collator.online is not None:
            collator.online = _TimedTeacher(collator.online, self.timer)
        self._before_second_pass = False

    def training_step(self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> Tensor:
        mask = inputs["attention_mask"][: len(inputs["vectors"])]
        self.timer.count(int(mask.sum()), mask.numel())
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        self.timer.mark(BACKWARD)
        return loss

    def ascent_loss(
        self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        self._before_second_pass = True
        return super().ascent_loss(model, inputs, num_items_in_batch)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        # The first pass of a sharpness-aware step may call this too.
        if self._before_second_pass and not self.in_second_pass:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self._before_second_pass:
            self.timer.mark(FIRST_PASS)
            self._before_second_pass = False
        found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self.timer.mark(FORWARD)
        return found


class _TimedTeacher:
    """An online teacher whose time is a part of the step."""

    def __init__(self, teacher: OnlineTeacher, timer: StepTimer) -> None:
        self.teacher, self.timer = teacher, timer

    def encode(self, *arguments: Any, **options: Any) -> Any:
        return self._timed(self.teacher.encode, *arguments, **options)

    def encode_with_internals(self, *arguments: Any, **options: Any) -> Any:
        return self._timed(self.teacher.encode_with_internals, *arguments, **options)

    def _timed(self, encode: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.timer.mark(DATA)
        outputs = encode(*arguments, **options)
        self.timer.mark(TEACHER)
        return outputs


class TimedRunClock(StepClock):
    """Times steps and measures memory from the start of training.

    Attributes:
        loaded: bytes in use before the first step.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(StepTimer(device))
        self.device = device
        self.loaded = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        reset_peak_memory(self.device)
        self.loaded = memory_in_use(self.device)
        super().on_train_begin(args, state, control, **kwargs)


def measure_run(config: RunConfig, warm_up: int) -> Measurement:
    """Train the run of `config` for `training.max_steps` steps.

    Args:
        warm_up: steps at the start that are not timed.

    Raises:
        KnownError: as `distill.runs.run.run`.
        torch.OutOfMemoryError: the GPU's memory, or its cap, is too small.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gc.collect()  # a Trainer and its model refer to each other
    if device.type == "cuda":
        torch.cuda.empty_cache()
    before = memory_in_use(device)
    with TemporaryDirectory() as scratch, TeacherCache.open(config.cache) as cache:
        made = Assembly.load(replace(config, output_dir=scratch), cache)
        dataset, collator = made.dataset(), made.collator()
        online = collator.online
        network, stored = (None, _stored_bytes(dataset)) if online is None else (online.network, None)
        trainer = made.trainer(TimedTrainer, dataset, collator)
        trainer.train()
        highest = peak_memory(device)
    return Measurement(
        steps=tuple(trainer.timer.steps[warm_up:]),
        peak=max(0, highest - before),
        loaded=max(0, trainer.clock.loaded - before),
        weights=_bytes(trainer.model),
        teacher=None if network is None else _bytes(network),
        stored=stored,
    )


def _bytes(network: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in network.parameters())


def _stored_bytes(dataset: CachedDataset) -> float:
    """Bytes per text on disk, of the columns that records are read from."""
    cache, space, _ = dataset.handles()
    names = [one.array_name for one in (space.spaces if isinstance(space, JointSpace) else [space])]
    if dataset.tokens is not None and space.tokens is not None:
        columns = space.tokens.columns.items()
        names += [column.name for array, column in columns if array != ATTENTION or dataset.tokens == "attention"]
    return sum(_bytes_per_row(cache, name) for name in names)


def _bytes_per_row(cache: TeacherCache, array: str) -> float:
    records = [record for _, record in cache.index.iter_shards(array)]
    return sum(record.size for record in records) / max(1, sum(int(record.present.sum()) for record in records))
