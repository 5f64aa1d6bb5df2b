"""Training: transformers' Trainer with a cached teacher and, if wanted, sharpness-aware steps."""

import difflib
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainerState, TrainingArguments

from distill.callbacks import EpochOrder, MetricsFile, ProgressReport, Stages, StepClock, TrainingProgress
from distill.checkpoints import STATE, WEIGHTS
from distill.config import RunConfig
from distill.data.collator import Collator
from distill.data.dataset import CachedDataset, ShuffledDataset
from distill.data.sampler import StreamingSampler
from distill.errors import ConfigError, NonFiniteLoss
from distill.objectives.base import Internals, Objective, StudentOutput, TeacherTargets, TokenStates
from distill.sharpness import AscentLoss, SharpnessAware
from distill.sharpness.mixin import SharpnessMixin
from distill.student import Student
from teacher_cache.errors import DiskFull
from teacher_cache.shuffle import WindowedShuffle

# The learning rate's shape that transformers does not have.
LINEAR_CYCLES = "linear_cycles"


class Distillation(nn.Module):
    """Student and objective in one forward pass, as Trainer wants its model."""

    def __init__(self, student: Student, objective: Objective) -> None:
        super().__init__()
        student.prepare(objective.needs)
        self.student = student
        self.objective = objective

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Trainer's `activation_checkpointing`; the non-reentrant kind, through which sharpness can differentiate."""
        encoder: Any = self.student.encoder
        kwargs = {**(activation_checkpointing_kwargs or {}), "use_reentrant": False}
        encoder.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs, **options)

    # No **kwargs and nothing called `labels`: Trainer would take either as a sign to scale the loss itself.
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
        climbs: AscentLoss | None = None,
    ) -> dict[str, Any]:
        """`loss`, the sum of the objective's terms, and `terms` by name; arguments as `Collator` makes them.

        Args:
            climbs: adds `climbed`, what a sharpness-aware step climbs in place of the loss.
        """
        views = input_ids.shape[0] // vectors.shape[0]
        if special is None or teacher_tokens is None:
            output = StudentOutput(self.student(input_ids, attention_mask), views)
            targets = TeacherTargets(vectors, text_ids, domains)
        else:
            needs = self.objective.needs
            layers, tokens = self.student.forward_tokens(input_ids, attention_mask, special, needs)
            output = StudentOutput(layers, views, tokens)
            targets = TeacherTargets(vectors, text_ids, domains, _token_states(teacher_tokens), alignment)
        terms = self.objective(output, targets)
        climbed = None if climbs is None else climbs(self.objective, output, targets, terms)
        found = {"loss": torch.stack(list(terms.values())).sum(), "terms": terms}
        return found if climbed is None else found | {"climbed": climbed}


def _token_states(tensors: Mapping[str, Any]) -> TokenStates:
    """A batch's tensors by name, as Trainer can move them to a device."""
    internals = tensors.get("internals")
    return TokenStates(**{**tensors, "internals": None if internals is None else Internals(**internals)})


class DistillTrainer(SharpnessMixin, Trainer):
    """Trains a `Distillation` on a `CachedDataset` in the order of a `StreamingSampler`.

    Raises:
        ConfigError: sharpness or a batch-coupled loss in a set-up that would silently change it.
    """

    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self,
        model: Distillation,
        config: RunConfig,
        dataset: CachedDataset,
        collator: Collator,
        sharpness: SharpnessAware | None,
        report: Callable[[TrainingProgress], None] = lambda progress: None,
    ) -> None:
        self.config = config
        # Since the last log: each term summed over steps, and how many steps that is.
        self._sums: dict[str, Tensor] = {}
        self._summed_steps = 0.0
        self._logged_ascent = -1
        batches = len(
            self._sampler(
                config, len(dataset), 0, int(os.environ.get("WORLD_SIZE", 1)), tokens=model.objective.needs.tokens
            )
        )
        arguments = training_arguments(config, batches, objective=model.objective)
        try:
            super().__init__(model=model, args=arguments, train_dataset=dataset, data_collator=collator)
        except (ValueError, RuntimeError, ImportError) as error:  # a logger that is absent, an unfit argument
            raise ConfigError(f"training arguments were refused: {' '.join(str(error).split())}") from error
        self.sharpness = sharpness
        self._refuse_unsupported()
        self.remove_callback(PrinterCallback)
        self.add_callback(EpochOrder())
        self.clock = StepClock()
        self.add_callback(self.clock)
        self.add_callback(Stages(model.objective))
        self.add_callback(MetricsFile(Path(config.output_dir) / "metrics.jsonl"))
        self.add_callback(ProgressReport(report))

    def _refuse_unsupported(self) -> None:
        if self.args.n_gpu > 1:
            raise ConfigError(
                f"{self.args.n_gpu} GPUs are visible to one process, which would split every batch over them "
                "and change the losses that compare its texts; start with torchrun, or set CUDA_VISIBLE_DEVICES"
            )
        if self.sharpness is not None and (self.is_deepspeed_enabled or self.is_fsdp_enabled):
            raise ConfigError("sharpness does not work with DeepSpeed or FSDP, which shard the weights; use DDP")

    @staticmethod
    def _sampler(config: RunConfig, records: int, rank: int, ranks: int, *, tokens: bool) -> StreamingSampler:
        if records < ranks:
            raise ConfigError(f"{records} records for {ranks} processes: there has to be one for each; start fewer")
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
        """Batches in the sampler's order; not `accelerator.prepare`d, because the sampler knows its rank."""
        dataset: Any = self.train_dataset
        workers = self.args.dataloader_num_workers
        sampler = self._sampler(
            self.config,
            len(dataset),
            self.args.process_index,
            self.args.world_size,
            # Of the objective, not of the data set: an online teacher's run has the order of one on the cache.
            tokens=self.model.objective.needs.tokens,
        )
        return DataLoader(
            ShuffledDataset(dataset, sampler.order, by_length=self.config.data.group_by_length),
            batch_sampler=sampler,
            collate_fn=self.data_collator,
            num_workers=workers,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
            persistent_workers=self.args.dataloader_persistent_workers and workers > 0,
            prefetch_factor=self.args.dataloader_prefetch_factor,
        )

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Student and projections, each at its own learning rate; weight decay on all of both."""
        if self.optimizer is None:
            training, distillation = self.config.training, self.model
            groups = [
                {"params": list(distillation.student.parameters()), "lr": training.learning_rate},
                {"params": list(distillation.objective.parameters()), "lr": training.head_learning_rate},
            ]
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, distillation)
            options |= {"weight_decay": training.weight_decay}
            self.optimizer = kind([group for group in groups if group["params"]], **options)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Trainer's own, or the cycles that it does not have."""
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
        if self.logged:
            self._count(outputs["terms"])
        return (loss, outputs) if return_outputs else loss

    def ascent_loss(
        self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        climbs = None if self.sharpness is None else self.sharpness.climbs
        if climbs is None:
            return super().ascent_loss(model, inputs, num_items_in_batch)
        outputs = model(**climbs.inputs(self.model.objective, inputs), climbs=climbs)
        loss = self._finite_loss(outputs)
        if climbs.terms is not None:
            return outputs["climbed"], None
        self._count(outputs["terms"])
        return outputs["climbed"], loss

    def _finite_loss(self, outputs: Mapping[str, Any]) -> Tensor:
        loss: Tensor = outputs["loss"]
        if not bool(torch.isfinite(loss)):
            terms = ", ".join(f"{name} {term.item():.4g}" for name, term in outputs["terms"].items())
            raise NonFiniteLoss(
                f"the loss is {loss.item()} at step {self.state.global_step + 1} ({terms}); training stopped, "
                "the last checkpoint is intact: lower training.learning_rate, or use training.precision=fp32"
            )
        return loss

    def _count(self, terms: Mapping[str, Tensor]) -> None:
        # A step's term is the mean over its micro-batches, as Trainer's loss is: the last step of an epoch may
        # have fewer of them.
        share = 1 / self.current_gradient_accumulation_steps
        self._summed_steps += share
        for name, term in terms.items():
            self._sums[name] = self._sums.get(name, torch.zeros_like(term)) + term.detach() * share

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Trainer's own figures plus the mean of each term since the last log, and the last ascent since then."""
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

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Trainer's own, refused before its first byte where it cannot fit.

        Raises:
            DiskFull: the libraries that write a checkpoint each report a full disk as something else.
        """
        # Weights in float32 and Adam's two moments of each, and what sharpness keeps; the rest is small.
        needed = 3 * 4 * sum(parameter.numel() for parameter in self.model.parameters())
        kept = {} if self.sharpness is None else self.sharpness.state_dict()
        needed += sum(tensor.nbytes for tensor in kept.values())
        require_room(Path(self.args.output_dir), needed, f"checkpoint {self.state.global_step}")
        super()._save_checkpoint(model, trial)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Weights alone, as safetensors: no pickled arguments in a folder that people pass around."""
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        save_model(self.model, str(folder / WEIGHTS), metadata={"format": "pt"})

    def restore(self, checkpoint: Path) -> bool:
        """Take weights and state of a checkpoint of the last step; False when there are steps left to do.

        `train` would do one step more from a last step inside an epoch.
        """
        state = TrainerState.load_from_json(str(checkpoint / STATE))
        if state.global_step < state.max_steps:
            return False
        load_model(self.model, str(checkpoint / WEIGHTS))
        self.state = state
        return True


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


def require_room(folder: Path, needed: int, what: str) -> None:
    """Refuse to begin writing `needed` bytes that the disk has no room for.

    Raises:
        DiskFull: what was written before is intact.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DiskFull(
            f"no space left on the disk of {folder}: {what} takes {needed / 1e6:.0f} MB, {free / 1e6:.0f} MB are "
            "free; what was written before is intact: free some space and run the same command again"
        )


def training_arguments(config: RunConfig, batches: int, *, objective: Objective | None = None) -> TrainingArguments:
    """Trainer's arguments for a run whose epochs have `batches` batches on each rank.

    Args:
        objective: says when, and how much of, the student has a gradient; None is always, all of it.

    Raises:
        ConfigError: an argument that Trainer does not know or accept, or a run too short to train the student.
    """
    training = config.training
    steps_an_epoch = math.ceil(batches / training.gradient_accumulation_steps)
    if steps_an_epoch < 1:
        raise ConfigError(
            f"an epoch has no whole batch of {training.per_device_train_batch_size}; lower "
            "training.per_device_train_batch_size, or set data.drop_last=false"
        )
    total = training.max_steps if training.max_steps > 0 else math.ceil(steps_an_epoch * training.num_train_epochs)
    student_from = 0.0 if objective is None else objective.student_from
    if total <= student_from * steps_an_epoch:
        raise ConfigError(
            f"the objective trains the student itself only after {student_from:g} epochs, and this run has "
            f"{total / steps_an_epoch:g}: train longer, or shorten its first stage "
            "(jasper: objective.options.stage_one_epochs)"
        )
    own_schedule = training.lr_scheduler_type == LINEAR_CYCLES
    cosine_floor = {"min_lr_rate": training.min_lr_rate} if training.lr_scheduler_type.endswith("min_lr") else {}
    precision = settled_precision(training.precision)
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
        "bf16": precision == "bf16",
        # Unless this is said, Trainer refuses bf16 on a processor, and several processes without a GPU
        # would each train alone.
        "use_cpu": not torch.accelerator.is_available(),
        "fp16": precision == "fp16",
        "seed": training.seed,
        "save_strategy": "steps",
        "save_steps": training.save_steps,
        "save_total_limit": training.save_total_limit,
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
        "ddp_find_unused_parameters": objective is not None and (student_from > 0 or objective.reaches_part),
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


def settled_precision(precision: str) -> str:
    """`auto` as bf16 where the processor or GPU multiplies in it, else fp16 on a GPU, fp32 on a processor.

    A rule, not a measurement: the same machine always answers the same, so a run can be resumed exactly.
    """
    if precision == "fp16" and not torch.cuda.is_available():
        raise ConfigError("training.precision is fp16, which needs a CUDA GPU; use bf16, fp32 or auto")
    if precision != "auto":
        return precision
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.get_device_capability() >= (8, 0) else "fp16"
    # torch has no public question for this; emulated bf16 would be slower than fp32.
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16" if native else "fp32"
