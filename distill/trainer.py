"""Training: transformers' Trainer with a cached teacher and, if wanted, sharpness-aware steps.

`SharpnessMixin` is a mixin so that a plain `Trainer` or a `SentenceTransformerTrainer` can use it too.
"""

import difflib
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerState, TrainingArguments

from distill.config import RunConfig
from distill.data.dataset import CachedDataset, Collator, ShuffledDataset
from distill.data.sampler import StreamingSampler
from distill.errors import ConfigError, NonFiniteLoss
from distill.objectives.base import Objective, StudentOutput, TeacherTargets
from distill.sharpness import Ascent, SharpnessAware
from distill.student import Student
from teacher_cache.errors import DiskFull
from teacher_cache.shuffle import WindowedShuffle
from teacher_cache.storage.files import replacing

# Files of a checkpoint.
WEIGHTS = "model.safetensors"
STATE = "trainer_state.json"


class Distillation(nn.Module):
    """Student and objective in one forward pass, as Trainer wants its model."""

    def __init__(self, student: Student, objective: Objective) -> None:
        super().__init__()
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
    def forward(self, input_ids: Tensor, attention_mask: Tensor, vectors: Tensor, text_ids: Tensor) -> dict[str, Any]:
        """`loss`, the sum of the objective's terms, and `terms` by name."""
        layers = self.student(input_ids, attention_mask)
        output = StudentOutput(layers, views=input_ids.shape[0] // vectors.shape[0])
        terms = self.objective(output, TeacherTargets(vectors, text_ids))
        return {"loss": torch.stack(list(terms.values())).sum(), "terms": terms}


class SharpnessMixin:
    """Two passes a step when `sharpness` is set; put it before a Trainer class.

    Pass 1 gives the ascent direction without touching `.grad`; pass 2 is Trainer's own step, taken at the
    perturbed weights, so that accumulation, mixed precision, clipping and DDP stay Trainer's business.
    Under gradient accumulation every micro-batch has its own ascent. The loss that is logged is pass 1's, the
    loss at the weights themselves. Loss components that a SentenceTransformerTrainer logs are means over both
    passes.

    Attributes:
        ascending: the step is in its second pass.
        last_ascent: of the latest step, with the loss at w + eps minus the loss at w.
    """

    sharpness: SharpnessAware | None = None
    ascending: bool = False
    last_ascent: tuple[Ascent, Tensor] | None = None

    def training_step(self: Any, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> Tensor:
        one_pass = super().training_step  # type: ignore[misc]
        if self.sharpness is None:
            return one_pass(model, inputs, num_items_in_batch)
        model.train()
        # Each rank climbs its own loss: this forward must not make DDP expect a synchronised backward.
        with self.accelerator.no_sync(model), self.compute_loss_context_manager():
            loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
        scaler = getattr(self.accelerator, "scaler", None)
        self.ascending = True
        try:
            with self.sharpness.ascended(loss if scaler is None else scaler.scale(loss)) as ascent:
                perturbed = one_pass(model, inputs, num_items_in_batch)
        finally:
            self.ascending = False
        # Trainer divides the loss by the micro-batches of a step, unless the model has done so itself.
        divided = self.compute_loss_func is not None or (
            self.model_accepts_loss_kwargs and num_items_in_batch is not None
        )
        share = 1 if divided else self.current_gradient_accumulation_steps
        at_weights = loss.detach() / share
        self.last_ascent = (ascent, (perturbed - at_weights) * share)
        return at_weights


@dataclass(frozen=True)
class TrainingProgress:
    """How far training is; handed to the caller's callback after every step."""

    step: int
    steps: int
    epoch: float
    loss: float | None  # the latest that was logged


class DistillTrainer(SharpnessMixin, Trainer):
    """Trains a `Distillation` on a `CachedDataset` in the order of a `StreamingSampler`.

    Raises:
        ConfigError: sharpness or a batch-coupled loss in a set-up that would silently change it.
    """

    optimizer: Any

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
        batches = len(self._sampler(config, len(dataset), 0, int(os.environ.get("WORLD_SIZE", 1))))
        arguments = training_arguments(config, batches)
        try:
            super().__init__(model=model, args=arguments, train_dataset=dataset, data_collator=collator)
        except (ValueError, RuntimeError, ImportError) as error:  # a logger that is absent, an unfit argument
            raise ConfigError(f"training arguments were refused: {' '.join(str(error).split())}") from error
        self.sharpness = sharpness
        self._refuse_unsupported()
        self.remove_callback(PrinterCallback)
        self.add_callback(EpochOrder())
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
    def _sampler(config: RunConfig, records: int, rank: int, ranks: int) -> StreamingSampler:
        if records < ranks:
            raise ConfigError(f"{records} records for {ranks} processes: there has to be one for each; start fewer")
        order = WindowedShuffle(
            records,
            config.training.per_device_train_batch_size,
            window=config.data.window,
            seed=config.training.seed,
            rank=rank,
            ranks=ranks,
        )
        return StreamingSampler(order, drop_last=config.data.drop_last)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Batches in the sampler's order; not `accelerator.prepare`d, because the sampler knows its rank."""
        dataset: Any = self.train_dataset
        workers = self.args.dataloader_num_workers
        sampler = self._sampler(self.config, len(dataset), self.args.process_index, self.args.world_size)
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

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        loss = outputs["loss"]
        if not bool(torch.isfinite(loss)):
            terms = ", ".join(f"{name} {term.item():.4g}" for name, term in outputs["terms"].items())
            raise NonFiniteLoss(
                f"the loss is {loss.item()} at step {self.state.global_step + 1} ({terms}); training stopped, "
                "the last checkpoint is intact: lower training.learning_rate, or use training.precision=fp32"
            )
        if not self.ascending:
            # A step's term is the mean over its micro-batches, as Trainer's loss is: the last step of an
            # epoch may have fewer of them.
            share = 1 / self.current_gradient_accumulation_steps
            self._summed_steps += share
            for name, term in outputs["terms"].items():
                self._sums[name] = self._sums.get(name, torch.zeros_like(term)) + term.detach() * share
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Trainer's own figures plus the mean of each term since the last log, and the latest ascent."""
        if "loss" in logs and self._sums:
            means = torch.stack(list(self._sums.values())) / self._summed_steps
            means = self.accelerator.reduce(means, reduction="mean")  # over ranks, as the loss is
            logs |= dict(zip(self._sums, means.tolist(), strict=True))
            self._sums.clear()
            self._summed_steps = 0.0
            if self.last_ascent is not None:
                ascent, rise = self.last_ascent
                logs |= {"perturbation_norm": float(ascent.norm), "perturbation_rise": float(rise)}
        super().log(logs, start_time)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Trainer's own, refused before its first byte where it cannot fit.

        Raises:
            DiskFull: the libraries that write a checkpoint each report a full disk as something else.
        """
        # Weights in float32 and Adam's two moments of each; the rest is small.
        needed = 3 * 4 * sum(parameter.numel() for parameter in self.model.parameters())
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


def training_arguments(config: RunConfig, batches: int) -> TrainingArguments:
    """Trainer's arguments for a run whose epochs have `batches` batches on each rank.

    Raises:
        ConfigError: an argument that Trainer does not know or accept.
    """
    training = config.training
    steps_an_epoch = math.ceil(batches / training.gradient_accumulation_steps)
    if steps_an_epoch < 1:
        raise ConfigError(
            f"an epoch has no whole batch of {training.per_device_train_batch_size}; lower "
            "training.per_device_train_batch_size, or set data.drop_last=false"
        )
    total = training.max_steps if training.max_steps > 0 else math.ceil(steps_an_epoch * training.num_train_epochs)
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
        "lr_scheduler_type": training.lr_scheduler_type,
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
        "ddp_find_unused_parameters": False,
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


class EpochOrder(TrainerCallback):
    """Tells the sampler which epoch begins, counted in steps, so that a resumed run agrees; ends reading ahead."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        loader = kwargs["train_dataloader"]
        steps_an_epoch = math.ceil(len(loader) / args.gradient_accumulation_steps)
        loader.batch_sampler.set_epoch(state.global_step // steps_an_epoch)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["train_dataloader"].dataset.close()


class MetricsFile(TrainerCallback):
    """One JSON object a line: step, epoch, loss, each term, learning rate; means since the line before.

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
        control.should_log |= control.should_save

    on_epoch_end = on_step_end

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and "loss" in (logs or {}):
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")


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
