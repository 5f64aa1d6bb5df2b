"""One training step on fake tensors: the real forward pass, losses, sharpness and optimizer, without numbers."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from distill.config import RunConfig
from distill.objectives.base import Objective, TeacherShape
from distill.plan.allocator import CachingAllocator
from distill.plan.kernels import kernels
from distill.plan.models import Model
from distill.plan.tracker import Operation, Tracker
from distill.sharpness import SharpnessAware
from distill.training.arguments import training_arguments
from distill.training.memory import save_memory, uses_expandable_segments
from distill.training.method import build_objective, build_sharpness
from distill.training.trainer import Distillation, DistillTrainer

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# Bytes that torch's allocators round up to: blocks of the CUDA caching allocator, cache lines of a CPU.
BLOCK = {"cuda": 512, "cpu": 64}
# cuBLAS allocates it at its first product and keeps it: torch's default for all GPUs but Hopper, which has 32 MiB.
WORKSPACE = {"cuda": 8_519_680, "cpu": 0}
KINDS = (
    "weights",
    "heads",
    "gradients",
    "optimizer",
    "average",
    "perturbation",
    "activations",
    "batch",
    "teacher",
    "workspace",
)
# Names of transformers' Trainer.
EIGHT_BIT_ADAM = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")
# bitsandbytes keeps states in 8 bits from this many numbers on, with one scale per block.
EIGHT_BIT_FROM, EIGHT_BIT_BLOCK = 4096, 256
# Any larger number of micro-batches has the same peak.
MICRO_BATCHES = 2


@dataclass(frozen=True)
class Trace:
    """Memory and kernels of a step.

    Attributes:
        allocated: bytes at the peak, as torch counts them.
        breakdown: the peak's bytes by kind (`KINDS`), without kinds that have none, and with "fragmentation", what the
            allocator reserves beyond them.
        steps: each kind of step as its share of all steps (they sum to 1) and its kernels.
        parameters: of the student.
    """

    allocated: int
    breakdown: dict[str, int]
    steps: tuple[tuple[float, tuple[Operation, ...]], ...]
    parameters: int

    @property
    def peak(self) -> int:
        """Bytes that torch needs on the device."""
        return sum(self.breakdown.values())

    @property
    def flops(self) -> float:
        """FLOPs of an average step."""
        return sum(share * sum(operation.flops for operation in operations) for share, operations in self.steps)


def trace(
    config: RunConfig,
    student: Model,
    teacher: TeacherShape,
    lengths: Sequence[int],
    *,
    device: str,
    precision: str,
    online: Model | None = None,
) -> Trace:
    """Trace a step of `config` on fake tensors.

    Args:
        lengths: tokens of the texts of one micro-batch.
        device: "cuda" or "cpu", whose kernels are modeled.
        precision: one of `DTYPES`; replaces the configuration's.
        online: a teacher that runs at every step, on the same device and in `precision`.

    Raises:
        KnownError: an objective or a sharpness that cannot be built from these settings.
    """
    allocator = CachingAllocator(uses_expandable_segments(config.training)) if device == "cuda" else None
    tracker = Tracker(BLOCK[device], allocator)
    # Training arguments refuse fp16 on a machine without a GPU; here only autocast needs the precision. bitsandbytes'
    # kernels do not work with fake tensors: `EightBitAdam` replaces its optimizers below.
    eight_bit = config.training.optim in EIGHT_BIT_ADAM
    optim = "adamw_torch_fused" if eight_bit else config.training.optim
    training = replace(config.training, precision="fp32", optim=optim)
    config = replace(config, training=training, output_dir=config.output_dir or ".")
    with _gc_disabled(), tracker.fake, tracker, kernels(device):
        built = student.student()
        targets: Any = SimpleNamespace(shape=teacher, space=None)
        model = Distillation(built, build_objective(config, built.shape, targets))
        sharpness = build_sharpness(config, model)
        tracker.label([*model.student.parameters(), *model.student.buffers()], "weights")
        tracker.label([*model.objective.parameters(), *model.objective.buffers()], "heads")
        network = None if online is None else online.build(DTYPES[precision]).eval()
        if network is not None:
            tracker.label([*network.parameters(), *network.buffers()], "teacher")
        save_memory(model.student, training)
        averages = training.ema_decay > 0 or training.soup > 1
        average = [torch.empty_like(p) for p in model.parameters() if averages and p.requires_grad]
        tracker.label(average, "average")
        trainer = StepTrainer(model, config, sharpness, tracker, precision)
        if eight_bit:
            trainer.optimizer = EightBitAdam(trainer.optimizer.param_groups, student=model.student)
        every = 1 if sharpness is None else sharpness.every
        micro_batches = min(MICRO_BATCHES, training.gradient_accumulation_steps)

        def step(number: int) -> None:
            for _ in range(micro_batches):
                with tracker.allocating("batch"):
                    batch = _batch(model.objective, student, teacher, lengths)
                if network is not None and online is not None:
                    with tracker.allocating("teacher"), torch.no_grad():
                        mask = _mask(lengths, online.padding_side)
                        network(input_ids=_input_ids(mask), attention_mask=mask)
                trainer.step(batch, number)
                del batch
            trainer.update()

        step(0)  # allocates the optimizer's states at its end
        gc.collect(0)  # with collection disabled, all that the step made is still in the youngest generation
        tracker.reset_peak()
        repeats = training.gradient_accumulation_steps / micro_batches
        step(every)
        steps = [(1 / every, _repeat_micro_batches(tracker.operations, repeats))]
        if every > 1:
            tracker.operations = []
            step(every + 1)
            steps.append((1 - 1 / every, _repeat_micro_batches(tracker.operations, repeats)))
        breakdown = {kind: tracker.at_peak.get(kind, 0) for kind in KINDS} | {"workspace": WORKSPACE[device]}
        if allocator is not None:
            breakdown["fragmentation"] = allocator.reserved - tracker.peak
        return Trace(
            tracker.peak + WORKSPACE[device],
            {kind: size for kind, size in breakdown.items() if size},
            tuple(steps),
            sum(parameter.numel() for parameter in model.student.parameters()),
        )


@contextmanager
def _gc_disabled() -> Iterator[None]:
    """Free no reference cycles inside the block: when Python does so depends on everything that ran before."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _repeat_micro_batches(operations: Sequence[Operation], repeats: float) -> tuple[Operation, ...]:
    """A step's kernels, scaled from the traced micro-batches to all of them."""
    return tuple(
        operation
        if operation.phase == "optimizer"
        else replace(operation, flops=int(operation.flops * repeats), bytes=int(operation.bytes * repeats))
        for operation in operations
    )


class StepTrainer(DistillTrainer):
    """The step, losses and optimizer of `DistillTrainer`, without data, devices and files."""

    def __init__(
        self,
        model: Distillation,
        config: RunConfig,
        sharpness: SharpnessAware | None,
        tracker: Tracker,
        precision: str,
    ) -> None:
        from transformers import TrainerState

        # No super().__init__(): it would move the model, and refuse fp16 without a GPU.
        self.model = model
        self.config = config
        self.args = training_arguments(config, 10**6, objective=model.objective)
        self.state = TrainerState()
        self.sharpness = sharpness
        self.optimizer = None
        self.label_smoother = self.compute_loss_func = self.loss_is_scaled_for_ga = None
        self.model_accepts_loss_kwargs = False
        self.current_gradient_accumulation_steps = config.training.gradient_accumulation_steps
        self._sums: dict[str, Tensor] = {}
        self._summed_steps = 0.0
        self._tracker = tracker
        scaler = _Scaler() if precision == "fp16" else None
        self.accelerator: Any = SimpleNamespace(
            no_sync=lambda model: nullcontext(),
            scaler=scaler,
            backward=lambda loss, **options: (loss if scaler is None else scaler.scale(loss)).backward(),
            distributed_type="NO",
        )
        if self.args.activation_checkpointing:
            model.activation_checkpointing_enable()
        if precision != "fp32":
            forward: Any = torch.autocast("cpu", dtype=DTYPES[precision])(model.forward)
            model.forward = forward  # type: ignore[method-assign]
        for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
            parameter.register_post_accumulate_grad_hook(self._label_gradient)
        if sharpness is not None:
            _track_perturbation(sharpness, tracker)
        self.create_optimizer()

    def _label_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._tracker.label([parameter.grad], "gradients")

    def _prepare_context_parallel_inputs(self, model: nn.Module, inputs: Any) -> Any:
        return nullcontext, inputs

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs

    def step(self, batch: Mapping[str, Any], number: int) -> None:
        """Forward and backward passes of one micro-batch."""
        self.state.global_step = number
        self.training_step(self.model, dict(batch))

    def update(self) -> None:
        """The optimizer's step."""
        with self._tracker.allocating("optimizer"):
            self.optimizer.step()
        self.model.zero_grad()
        self._sums.clear()


class EightBitAdam(torch.optim.Optimizer):
    """The states of bitsandbytes' 8-bit Adam: two bytes per number and two float32 per block of 256.

    Tensors of fewer than 4,096 numbers and embedding tables have float32 states, as in bitsandbytes.
    """

    def __init__(self, groups: Any, *, student: nn.Module) -> None:
        super().__init__([{"params": group["params"]} for group in groups], {})
        self._exact = {module.weight for module in student.modules() if isinstance(module, nn.Embedding)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Allocate missing states and touch all of them."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter)

    def _update(self, parameter: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            eight = parameter.numel() >= EIGHT_BIT_FROM and parameter not in self._exact
            dtype = torch.uint8 if eight else torch.float32
            state["moments"] = [torch.empty(parameter.shape, dtype=dtype) for _ in range(2)]
            blocks = -(-parameter.numel() // EIGHT_BIT_BLOCK) if eight else 0
            state["scales"] = [torch.empty(blocks) for _ in range(2)]
        for moment in state["moments"]:
            moment.mul_(1)
        parameter.mul_(1)


class _Scaler:
    """The loss factor of a `GradScaler`."""

    def scale(self, loss: Tensor) -> Tensor:
        return loss * 65536.0


def _track_perturbation(sharpness: Any, tracker: Tracker) -> None:
    """Label the gradients of the ascent, and all that it allocates after them, as the perturbation."""
    gradients: Callable[[Tensor], tuple[list[Tensor], list[Tensor]]] = sharpness._gradients
    ascended: Callable[..., Any] = sharpness.ascended

    def labeled_gradients(loss: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        parameters, found = gradients(loss)
        tracker.label(found, "perturbation")
        tracker.phase = "perturbation"
        return parameters, found

    @contextmanager
    def tracked_ascent(loss: Tensor | None = None) -> Iterator[Any]:
        with ascended(loss) as ascent:
            tracker.phase = "activations"
            yield ascent

    sharpness._gradients, sharpness.ascended = labeled_gradients, tracked_ascent


def _mask(lengths: Sequence[int], side: str) -> Tensor:
    """`(B, t)` int64 attention mask."""
    tokens, longest = torch.tensor(list(lengths)), max(lengths)
    positions = torch.arange(longest)
    return ((positions >= longest - tokens[:, None]) if side == "left" else (positions < tokens[:, None])).long()


def _input_ids(mask: Tensor) -> Tensor:
    return mask * 3  # any token but padding


def _batch(objective: Objective, student: Model, teacher: TeacherShape, lengths: Sequence[int]) -> dict[str, Any]:
    """A batch as `distill.data.collator.Collator` makes it; the teacher has as many tokens as the student."""
    needs, size = objective.needs, len(lengths)
    mask = _mask(lengths, student.padding_side)
    batch: dict[str, Any] = {
        "input_ids": _input_ids(mask).repeat(needs.views, 1),
        "attention_mask": mask.repeat(needs.views, 1),
        "vectors": torch.empty(size, teacher.dim),
        "text_ids": torch.arange(size),
        "domains": torch.arange(size) % 2,
    }
    if not needs.tokens:
        return batch
    seen, longest = mask.bool(), mask.shape[1]
    tokens: dict[str, Any] = {
        "states": torch.empty(size, longest, teacher.token_dim or teacher.dim),
        "mask": seen,
        "special": torch.zeros_like(seen),
    }
    if needs.attention:
        tokens["attention"] = torch.empty(len(needs.attention), size, longest, longest)
    if needs.importance:
        tokens["importance"] = torch.empty(size, longest)
    if needs.internals:
        tokens["internals"] = _internals(teacher, size, longest)
    batch |= {"special": torch.zeros_like(seen), "teacher_tokens": tokens}
    if needs.alignment is not None:
        batch["alignment"] = torch.empty(size, longest, longest)
    return batch


def _internals(teacher: TeacherShape, size: int, longest: int) -> dict[str, Tensor]:
    width, layers, heads = teacher.token_dim or teacher.dim, teacher.layers or 1, teacher.heads or 1
    return {
        "hidden": torch.empty(layers + 1, size, longest, width),
        "attention": torch.empty(layers, size, heads, longest, longest),
        "values": torch.empty(size, heads, longest, width // heads),
    }
