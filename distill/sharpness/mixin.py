"""Sharpness-aware steps in the Trainer of transformers or sentence-transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from distill.errors import ConfigError
from distill.sharpness.ascent import Ascent, SharpnessAware

# File of a method's state in a checkpoint.
STATE = "sharpness.safetensors"


class SharpnessMixin:
    """Two passes per step if `sharpness` is set; put it before a Trainer class.

    Pass 1 gives the ascent direction without using `.grad`; pass 2 is the step of Trainer at the perturbed weights,
    which handles accumulation, mixed precision, clipping and DDP. Under gradient accumulation every micro-batch has
    its own ascent; steps are counted by `state.global_step`, so that all micro-batches of a step are treated alike and
    a resumed training equals an uninterrupted one.

    The logged loss is that of pass 1, at the weights; or that of pass 2, at w + eps, if the first pass computes only
    part of the loss or does not exist. Loss components that a SentenceTransformerTrainer logs are means over both.

    Attributes:
        in_second_pass: the step is in its second pass.
        logs_loss: the loss of the current pass is logged.
        last_ascent: the latest ascent, and the loss at w + eps minus the loss at w, None if the latter was not
            computed.
        ascent_step: `state.global_step` of the latest ascent; -1 before the first.
    """

    sharpness: SharpnessAware | None = None
    in_second_pass: bool = False
    logs_loss: bool = True
    last_ascent: tuple[Ascent, Tensor | None] | None = None
    ascent_step: int = -1

    def ascent_loss(
        self: Any, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        """The loss that pass 1 ascends, and the whole loss at the weights, None if it was not computed."""
        if self.sharpness.ascent_loss is not None:
            raise ConfigError(
                "sharpness: ascent_terms and disam need the terms of the loss and domains, which DistillTrainer "
                f"provides; override `ascent_loss` of {type(self).__name__}"
            )
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        return loss, loss

    def training_step(self: Any, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> Tensor:
        one_pass = super().training_step  # type: ignore[misc]
        sharpness = self.sharpness
        if sharpness is None:
            return one_pass(model, inputs, num_items_in_batch)
        sharpness.attach(getattr(self.optimizer, "optimizer", self.optimizer))  # accelerate wraps torch's
        if not sharpness.begin_step(self.state.global_step):
            return one_pass(model, inputs, num_items_in_batch)
        if sharpness.passes == 1:
            with sharpness.ascended() as ascent:
                loss: Tensor = one_pass(model, inputs, num_items_in_batch)
            self.last_ascent, self.ascent_step = (ascent, None), self.state.global_step
            return loss
        model.train()
        # Each rank ascends its own loss: this forward must not make DDP expect a synchronized backward.
        with self.accelerator.no_sync(model), self.compute_loss_context_manager():
            first, at_weights = self.ascent_loss(model, self._prepare_inputs(inputs), num_items_in_batch)
        scaler = getattr(self.accelerator, "scaler", None)
        self.in_second_pass, self.logs_loss = True, at_weights is None
        try:
            with sharpness.ascended(first if scaler is None else scaler.scale(first)) as ascent:
                perturbed: Tensor = one_pass(model, inputs, num_items_in_batch)
        finally:
            self.in_second_pass, self.logs_loss = False, True
        self.last_ascent, self.ascent_step = (ascent, None), self.state.global_step
        if at_weights is None:
            return perturbed
        # Trainer divides the loss by the micro-batches of a step, unless the model does.
        divided = self.compute_loss_func is not None or (
            self.model_accepts_loss_kwargs and num_items_in_batch is not None
        )
        share = 1 if divided else self.current_gradient_accumulation_steps
        at_weights = at_weights.detach() / share
        self.last_ascent = (ascent, (perturbed - at_weights) * share)
        return at_weights

    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        state = {} if self.sharpness is None else self.sharpness.state_dict()
        if state and self.args.should_save:
            from safetensors.torch import save_file

            save_file({name: tensor.contiguous() for name, tensor in state.items()}, str(Path(output_dir) / STATE))

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is None or self.sharpness is None:
            return
        kept = Path(checkpoint) / STATE
        if kept.exists():
            from safetensors.torch import load_file

            self.sharpness.load_state_dict(load_file(str(kept)))
