"""transformers' Trainer with a cached teacher and, optionally, sharpness-aware steps."""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from accelerate.utils import broadcast_object_list
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainerState

from distill.config import RunConfig
from distill.data.collator import Collator
from distill.data.dataset import CachedDataset, ShuffledDataset
from distill.data.prefetch import PrefetchedBatches, pass_through
from distill.data.sampler import StreamingSampler
from distill.errors import ConfigError, NonFiniteLoss, RunFolderError
from distill.objectives.base import Internals, Objective, StudentOutput, TeacherTargets, TokenStates
from distill.sharpness import AscentLoss, SharpnessAware
from distill.sharpness.mixin import SharpnessMixin
from distill.student.student import Student
from distill.training.arguments import LINEAR_CYCLES, linear_cycles, total_steps, training_arguments
from distill.training.averaging import load_student, weight_average
from distill.training.callbacks import (
    Averaging,
    EpochOrder,
    MetricsFile,
    ProgressReport,
    Stages,
    StepClock,
    TrainingProgress,
)
from distill.training.checkpoints import STATE, WEIGHTS, is_complete
from distill.training.memory import keep_embedding_states_32bit, save_memory
from distill.training.parameter_groups import layer_numbers, parameter_groups
from distill.training.target_transform import TargetTransform
from distill.training.validation import Validation
from teacher_cache.errors import DiskFull
from teacher_cache.reading.shuffle import WindowedShuffle


class Distillation(nn.Module):
    """Student and objective in one module, for Trainer.

    Args:
        transform: of the teacher's vectors into the objective's targets; None leaves them unchanged.
    """

    def __init__(self, student: Student, objective: Objective, transform: TargetTransform | None = None) -> None:
        super().__init__()
        student.prepare(objective.needs)
        self.student = student
        self.objective = objective
        self.transform = transform

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Enable non-reentrant activation checkpointing, which sharpness-aware steps need."""
        encoder: Any = self.student.encoder
        if self.student.is_static:
            return  # no activations to recompute
        kwargs = {**(activation_checkpointing_kwargs or {}), "use_reentrant": False}
        try:
            encoder.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs, **options)
        except ValueError as error:
            raise ConfigError(
                f"student {self.student.name!r} does not support activation checkpointing ({error}); set "
                "training.arguments.activation_checkpointing=false"
            ) from error

    # Without **kwargs and `labels`, either of which makes Trainer scale the loss.
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        vectors: Tensor,
        text_ids: Tensor,
        domains: Tensor | None = None,
        special: Tensor | None = None,
        teacher_tokens: Mapping[str, Any] | None = None,
        alignment: Tensor | None = None,
        ascent_loss: AscentLoss | None = None,
    ) -> dict[str, Any]:
        """`loss`, the sum of the objective's terms, and `terms` by name; the arguments are those of `Collator`."""
        vectors = vectors if self.transform is None else self.transform(vectors)
        views = min(input_ids.shape[0] // vectors.shape[0], self.objective.present_views)
        input_ids, attention_mask = (part[: views * len(vectors)] for part in (input_ids, attention_mask))
        copies = 1 if self.training else _identical_views(input_ids, attention_mask, views)
        input_ids, attention_mask = (part[: len(part) // copies] for part in (input_ids, attention_mask))
        if special is None or teacher_tokens is None:
            output = StudentOutput(self.student(input_ids, attention_mask).repeat(1, copies, 1), views)
            targets = TeacherTargets(vectors, text_ids, domains)
        else:
            needs = self.objective.needs
            layers, tokens = self.student.forward_tokens(input_ids, attention_mask, special, needs)
            output = StudentOutput(layers.repeat(1, copies, 1), views, tokens)
            targets = TeacherTargets(vectors, text_ids, domains, _token_states(teacher_tokens), alignment)
        terms = self.objective(output, targets)
        outputs = {"loss": torch.stack(list(terms.values())).sum(), "terms": terms}
        if ascent_loss is not None:
            outputs["ascent_loss"] = ascent_loss(self.objective, output, targets, terms)
        return outputs


@dataclass(frozen=True)
class ProjectedStudent:
    """An encoder for tasks: a student with an optional projection into another space."""

    student: Student
    projection: Tensor | None

    def encode(self, texts: Sequence[str], /) -> npt.NDArray[np.float32]:
        """`(n, d)` vectors, without dropout, not normalized."""
        return self.student.encode(texts, projection=self.projection)


def _identical_views(input_ids: Tensor, attention_mask: Tensor, views: int) -> int:
    """`views` if all views of a batch are the same texts, which need one encoding without dropout; otherwise 1."""
    identical = all(
        torch.equal(view, tensor[: len(view)]) for tensor in (input_ids, attention_mask) for view in tensor.chunk(views)
    )
    return views if identical else 1


def _token_states(tensors: Mapping[str, Any]) -> TokenStates:
    """`TokenStates` from the dictionary of a batch, which Trainer moves to a device."""
    internals = tensors.get("internals")
    return TokenStates(**{**tensors, "internals": None if internals is None else Internals(**internals)})


class DistillTrainer(SharpnessMixin, Trainer):
    """Trains a `Distillation` on a `CachedDataset` in the order of a `StreamingSampler`.

    With a `validation` the student that would be exported is scored every `evaluation.steps` and after the last step;
    a new best is saved, and kept until there is a better one. Validation does not change the weights. With an
    average of the weights that student is the averaged one.
    """

    optimizer: Any
    lr_scheduler: Any
    control: Any

    def __init__(
        self,
        model: Distillation,
        config: RunConfig,
        dataset: CachedDataset,
        collator: Collator,
        sharpness: SharpnessAware | None,
        report: Callable[[TrainingProgress], None] = lambda progress: None,
        validation: Validation | None = None,
    ) -> None:
        self.config = config
        self.validation = validation
        save_memory(model.student, config.training)
        # Since the last log: sums of each term over steps, and the number of steps.
        self._sums: dict[str, Tensor] = {}
        self._summed_steps = 0.0
        self._logged_ascent = -1
        batches = len(
            self._sampler(
                config, len(dataset), 0, int(os.environ.get("WORLD_SIZE", 1)), tokens=model.objective.needs.tokens
            )
        )
        arguments = training_arguments(config, batches, objective=model.objective)
        # Trainer checks only that there is an evaluation data set; `evaluate` is overridden.
        eval_dataset: Any = validation
        try:
            super().__init__(
                model=model, args=arguments, train_dataset=dataset, eval_dataset=eval_dataset, data_collator=collator
            )
        except (ValueError, RuntimeError, ImportError) as error:  # a missing logger, an invalid argument
            raise ConfigError(f"training arguments are invalid: {' '.join(str(error).split())}") from error
        self.sharpness = sharpness
        self.average = weight_average(model, config.training, total_steps(config.training, batches))
        if config.training.layer_decay < 1:
            layer_numbers(model.student)  # raise errors before training
        self._check_supported()
        self.remove_callback(PrinterCallback)
        self.add_callback(EpochOrder())
        if self.average is not None:
            self.add_callback(Averaging(self.average))
        self.clock = StepClock(cycle=1 if sharpness is None else sharpness.every)
        self.add_callback(self.clock)
        self.add_callback(Stages(model.objective))
        self.add_callback(MetricsFile(Path(config.output_dir) / "metrics.jsonl"))
        self.add_callback(ProgressReport(report))

    def _check_supported(self) -> None:
        if self.args.n_gpu > 1:
            raise ConfigError(
                f"{self.args.n_gpu} GPUs are visible to one process, which would split every batch and change losses "
                "that compare its texts; start with torchrun, or set CUDA_VISIBLE_DEVICES"
            )
        if self.sharpness is not None and (self.is_deepspeed_enabled or self.is_fsdp_enabled):
            raise ConfigError("sharpness does not work with DeepSpeed or FSDP, which shard the weights; use DDP")
        if self.average is not None and (self.is_deepspeed_enabled or self.is_fsdp_enabled):
            raise ConfigError("averages of weights do not work with DeepSpeed or FSDP, which shard them; use DDP")

    @staticmethod
    def _sampler(config: RunConfig, records: int, rank: int, ranks: int, *, tokens: bool) -> StreamingSampler:
        if records < ranks:
            raise ConfigError(f"{records} records for {ranks} processes; start at most {records} processes")
        order = WindowedShuffle(
            records,
            config.training.per_device_train_batch_size,
            window=config.window(tokens=tokens),
            seed=config.training.seed,
            rank=rank,
            ranks=ranks,
        )
        return StreamingSampler(order, drop_last=config.data.drop_last)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Batches in the sampler's order, not `accelerator.prepare`d, because the sampler is already per rank."""
        dataset: Any = self.train_dataset
        workers = self.args.dataloader_num_workers
        sampler = self._sampler(
            self.config,
            len(dataset),
            self.args.process_index,
            self.args.world_size,
            # Needs of the objective, not columns of the data set, so that an online teacher's run has the same order.
            tokens=self.model.objective.needs.tokens,
        )
        batches: Any = ShuffledDataset(dataset, sampler.order, by_length=self.config.data.group_by_length)
        collate: Any = self.data_collator
        # Worker processes read ahead themselves, and an online teacher runs in the training process.
        if workers == 0 and collate.online is None:
            # A step fetches all of its micro-batches at once.
            ahead = self.args.gradient_accumulation_steps + 1
            batches, collate = PrefetchedBatches(batches, collate, sampler.following, ahead), pass_through
        return DataLoader(
            batches,
            batch_sampler=sampler,
            collate_fn=collate,
            num_workers=workers,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
            persistent_workers=self.args.dataloader_persistent_workers and workers > 0,
            prefetch_factor=self.args.dataloader_prefetch_factor,
        )

    def train(self, *arguments: Any, **options: Any) -> Any:
        """Train; the threads that read ahead are stopped afterwards, also after an exception."""
        try:
            return super().train(*arguments, **options)
        finally:
            loader = self.callback_handler.train_dataloader
            if loader is not None:
                loader.dataset.close()

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """An optimizer over `parameter_groups`."""
        if self.optimizer is None:
            training, distillation = self.config.training, self.model
            decayed = set(self.get_decay_parameter_names(distillation))
            groups = parameter_groups(distillation.student, distillation.objective, training, decayed)
            try:
                kind, options = self.get_optimizer_cls_and_kwargs(self.args, distillation)
            except (ValueError, ImportError) as error:
                reason = " ".join(str(error).split())
                raise ConfigError(f"training.optim={training.optim} cannot be used: {reason}") from error
            options |= {"weight_decay": training.weight_decay}
            self.optimizer = kind(groups, **options)
            if options.get("optim_bits") == 8:
                keep_embedding_states_32bit(distillation.student)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """A schedule of Trainer, or linear cycles."""
        training = self.config.training
        if training.lr_scheduler_type == LINEAR_CYCLES and self.lr_scheduler is None:
            shape = linear_cycles(num_training_steps, training.cycles, training.min_lr_rate, self.args.warmup_steps)
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, shape)
        return super().create_scheduler(num_training_steps, optimizer)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        loss = self._finite_loss(outputs)
        if self.logs_loss:
            self._add_terms(outputs["terms"])
        return (loss, outputs) if return_outputs else loss

    def ascent_loss(
        self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        ascent_loss = None if self.sharpness is None else self.sharpness.ascent_loss
        if ascent_loss is None:
            return super().ascent_loss(model, inputs, num_items_in_batch)
        outputs = model(**ascent_loss.select_inputs(self.model.objective, inputs), ascent_loss=ascent_loss)
        loss = self._finite_loss(outputs)
        if not ascent_loss.includes_whole_loss(self.model.objective):
            return outputs["ascent_loss"], None
        self._add_terms(outputs["terms"])
        return outputs["ascent_loss"], loss

    def _finite_loss(self, outputs: Mapping[str, Any]) -> Tensor:
        loss: Tensor = outputs["loss"]
        if not bool(torch.isfinite(loss)):
            terms = ", ".join(f"{name} {term.item():.4g}" for name, term in outputs["terms"].items())
            raise NonFiniteLoss(
                f"the loss is {loss.item()} at step {self.state.global_step + 1} ({terms}); training stopped, "
                "the last checkpoint is intact: lower training.learning_rate, or use training.precision=fp32"
            )
        return loss

    def _add_terms(self, terms: Mapping[str, Tensor]) -> None:
        # Mean over the micro-batches of a step, like Trainer's loss; the last step of an epoch may have fewer.
        share = 1 / self.current_gradient_accumulation_steps
        self._summed_steps += share
        for name, term in terms.items():
            self._sums[name] = self._sums.get(name, torch.zeros_like(term)) + term.detach() * share

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log Trainer's metrics plus the mean of each term and the last ascent since the last log."""
        if "loss" in logs and self._sums:
            means = torch.stack(list(self._sums.values())) / self._summed_steps
            means = self.accelerator.reduce(means, reduction="mean")  # over ranks, as the loss is
            logs |= dict(zip(self._sums, means.tolist(), strict=True))
            self._sums.clear()
            self._summed_steps = 0.0
            if self.sharpness is not None and self.last_ascent is not None and self.ascent_step > self._logged_ascent:
                ascent, rise = self.last_ascent
                logs["perturbation_norm"] = float(ascent.norm)
                if rise is not None:
                    logs["perturbation_rise"] = float(rise)
                logs |= {f"share of {kind}": share for kind, share in self.sharpness.perturbation_shares().items()}
                self._logged_ascent = self.ascent_step
        super().log(logs, start_time)

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        """Scores on the validation files: "eval_average", "eval_NAME" of every task, "eval_seconds".

        The first process scores and broadcasts the result, so that all agree on the best step.
        """
        if self.validation is None:
            return super().evaluate(*arguments, **options)
        scores: list[Any] = [None]
        if self.is_world_process_zero():
            distillation = self.model
            projection = distillation.objective.projection() if self.config.export.projection else None
            averaged = nullcontext() if self.average is None else self.average.applied()
            with averaged, self.accelerator.autocast():
                scores = [self.validation(ProjectedStudent(distillation.student, projection))]
        broadcast_object_list(scores)
        metrics = {f"eval_{name}": value for name, value in scores[0].items()} | {"epoch": self.state.epoch}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Whether the metric is a new best, which is saved in addition to every `save_steps`."""
        is_best: bool = super()._determine_best_metric(metrics, trial)
        self.control.should_save |= bool(is_best)
        return is_best

    def load_step(self, step: int) -> None:
        """Load the student of a step, after training: its weights, or their average."""
        if step == self.state.global_step:
            if self.average is not None:
                self.average.apply()
            return
        checkpoint = Path(self.args.output_dir) / f"checkpoint-{step}"
        if not is_complete(checkpoint):
            raise RunFolderError(
                f"step {step} was the best by validation, but {checkpoint} is missing or incomplete; train with "
                "another output_dir, or with evaluation.keep=last"
            )
        load_student(self.model, checkpoint)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint, after a check of the free space."""
        # Float32 weights, their two moments of Adam, and the state of sharpness; the rest is small.
        needed = 3 * 4 * sum(parameter.numel() for parameter in self.model.parameters())
        kept = {} if self.sharpness is None else self.sharpness.state_dict()
        needed += sum(tensor.nbytes for tensor in kept.values())
        needed += 0 if self.average is None else self.average.nbytes()
        check_disk_space(Path(self.args.output_dir), needed, f"checkpoint {self.state.global_step}")
        super()._save_checkpoint(model, trial)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Save the weights as safetensors, without pickled arguments."""
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        save_model(self.model, str(folder / WEIGHTS), metadata={"format": "pt"})
        if self.average is not None:
            self.average.save(folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the weights; unlike Trainer's own this knows weights with two names, of which a checkpoint has one."""
        if model is not None:  # sharded
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            load_model(self.model, str(Path(resume_from_checkpoint) / WEIGHTS))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.average is not None:
            self.average.load(Path(checkpoint))

    def restore(self, checkpoint: Path) -> bool:
        """Restore a checkpoint of the last step; False if there are steps left.

        `train` would do one more step if the last step is within an epoch.
        """
        state = TrainerState.load_from_json(str(checkpoint / STATE))
        if state.global_step < state.max_steps:
            return False
        load_model(self.model, str(checkpoint / WEIGHTS))
        if self.average is not None:
            self.average.load(checkpoint)
        self.state = state
        return True


def check_disk_space(folder: Path, needed: int, what: str) -> None:
    """Check that the disk has room for `needed` bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DiskFull(
            f"no space left on the disk of {folder}: {what} takes {needed / 1e6:.0f} MB, {free / 1e6:.0f} MB are "
            "free; free some space and run the same command again to continue"
        )
