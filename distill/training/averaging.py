"""An average of the weights over training steps, which is scored and exported instead of the trained weights.

`training.ema_decay` is the decay of an exponential moving average with a warm-up (as in TensorFlow's), over all steps:

    a_0 = w_0,    a_t = d a_{t-1} + (1 - d) w_t,    d = min(ema_decay, (1 + t) / (10 + t))

`training.soup` = N is the plain mean of the weights at the last N checkpoints (Izmailov et al., Averaging Weights Leads
to Wider Optima, arXiv 1803.05407; Wortsman et al., Model Soups, arXiv 2203.05482). Training continues from the weights
themselves, not from their average.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from distill.config import TrainingConfig
from distill.errors import ConfigError, RunFolderError
from distill.training.checkpoints import WEIGHTS

# File of the average in a checkpoint, and the name of the number of averaged weights in it.
AVERAGE = "average.safetensors"
COUNT = "n_averaged"

Weights = tuple[Tensor, ...] | list[Tensor]


class WeightAverage:
    """The average of a model's trainable parameters; buffers and frozen parameters are those of the model.

    Args:
        ema_decay: of an exponential moving average, updated after every step; 0 is the plain mean.
        steps: that the plain mean is over.
    """

    def __init__(self, model: nn.Module, *, ema_decay: float = 0.0, steps: Collection[int] = ()) -> None:
        self.ema_decay = ema_decay
        self.steps = steps
        # A parameter with two names is averaged once.
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        # The list holds the model's own parameters; `AveragedModel` copies them.
        self._trained = nn.ParameterList(self._parameters.values())
        self._average = AveragedModel(self._trained, multi_avg_fn=self._blend if ema_decay else None)

    @property
    def count(self) -> int:
        """Weights averaged so far; 0 before the first."""
        return int(self._average.n_averaged)

    def begin(self) -> None:
        """Start a moving average from the present weights, unless it was loaded."""
        if self.ema_decay and not self.count:
            self._average.update_parameters(self._trained)

    def update(self, step: int) -> None:
        """Add the weights after a step, counted from 1."""
        if self.ema_decay or step in self.steps:
            self._average.update_parameters(self._trained)

    @torch.no_grad()
    def apply(self) -> None:
        """Replace the model's weights by the average; before the first averaged weights nothing happens."""
        if self.count:
            torch._foreach_copy_(list(self._trained), list(self._average.parameters()))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block the model has the averaged weights, afterwards its own, bit for bit."""
        kept = [parameter.detach().clone() for parameter in self._trained] if self.count else []
        self.apply()
        try:
            yield
        finally:
            if kept:
                with torch.no_grad():
                    torch._foreach_copy_(list(self._trained), kept)

    def nbytes(self) -> int:
        """Bytes of the average."""
        return sum(parameter.nbytes for parameter in self._average.parameters())

    def save(self, folder: Path) -> None:
        """Save the average in the folder of a checkpoint."""
        tensors: dict[str, Tensor] = {COUNT: self._average.n_averaged}
        if self.count:
            averaged = self._average.parameters()
            tensors |= {name: p.detach().contiguous() for name, p in zip(self._parameters, averaged, strict=True)}
        save_file(tensors, str(folder / AVERAGE))

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Restore the average of a checkpoint.

        Raises:
            RunFolderError: the checkpoint has none.
        """
        if not (folder / AVERAGE).is_file():
            raise RunFolderError(f"{folder} has no {AVERAGE}, and cannot be resumed; train with another output_dir")
        tensors = load_file(str(folder / AVERAGE))
        self._average.n_averaged.copy_(tensors.pop(COUNT))
        if tensors:
            for name, parameter in zip(self._parameters, self._average.parameters(), strict=True):
                parameter.copy_(tensors[name])

    def _blend(self, averaged: Weights, trained: Weights, count: Tensor | int) -> None:
        update = get_ema_multi_avg_fn(min(self.ema_decay, (1 + int(count)) / (10 + int(count))))
        update(averaged, trained, count)


def weight_average(model: nn.Module, training: TrainingConfig, steps: int) -> WeightAverage | None:
    """The average that the settings name, over a training of `steps` steps; None for none."""
    if training.ema_decay:
        return WeightAverage(model, ema_decay=training.ema_decay)
    if training.soup > 1:
        return WeightAverage(model, steps=soup_steps(training, steps))
    return None


def soup_steps(training: TrainingConfig, steps: int) -> Sequence[int]:
    """The last `training.soup` steps that are saved by `training.save_steps`; the last one of the training always is.

    Raises:
        ConfigError: there are fewer.
    """
    saved = [*range(training.save_steps, steps, training.save_steps), steps]
    if len(saved) < training.soup:
        raise ConfigError(
            f"training.soup={training.soup} averages as many checkpoints, but this run of {steps} steps has "
            f"{len(saved)}; set training.save_steps to at most {max(1, (steps - 1) // (training.soup - 1))}"
        )
    return saved[-training.soup :]


def load_student(model: nn.Module, checkpoint: Path) -> None:
    """Load what was scored and would be exported at a checkpoint: the weights, or their average if it has one.

    Raises:
        RuntimeError, OSError: the checkpoint does not hold the weights of the model.
    """
    load_model(model, str(checkpoint / WEIGHTS))
    if (checkpoint / AVERAGE).is_file():
        tensors = load_file(str(checkpoint / AVERAGE))
        tensors.pop(COUNT)
        model.load_state_dict(tensors, strict=False)
