"""One training step on fake tensors: this package's own forward, losses, sharpness and optimiser, no numbers."""

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
# What torch's allocators round up to, in bytes: blocks of the CUDA caching allocator, cache lines of a processor.
BLOCK = {"cuda": 512, "cpu": 64}
# cuBLAS takes it at its first product and keeps it: torch's default for all but Hopper, which has 32 MiB.
WORKSPACE = {"cuda": 8_519_680, "cpu": 0}
KINDS = ("weights", "heads", "gradients", "optimiser", "perturbation", "activations", "batch", "teacher", "workspace")
# Its names in Trainer.
EIGHT_BIT_ADAM = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")
# Where bitsandbytes' 8-bit states begin, and how many numbers have a scale in common.
EIGHT_BIT_FROM, EIGHT_BIT_BLOCK = 4096, 256
# Two micro-batches hold what any number of them holds.
MICRO_BATCHES = 2


@dataclass(frozen=True)
class Trace:
    """What a step took.

    Attributes:
        allocated: bytes at the peak, as torch counts them.
        breakdown: of these, by kind (`KINDS`); kinds that have none are left out. With "fragmentation", what the
            allocator keeps beyond them.
        steps: how often a step is of that kind (shares, they sum to 1), and its kernels.
        parameters: of the student.
    """

    allocated: int
    breakdown: dict[str, int]
    steps: tuple[tuple[float, tuple[Operation, ...]], ...]
    parameters: int

    @property
    def peak(self) -> int:
        """Bytes that the device must have for torch."""
        return sum(self.breakdown.values())

    @property
    def flops(self) -> float:
        """Of a step, on average."""
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
    """Follow a step of `config` without a number computed.

    Args:
        lengths: tokens of the texts of one micro-batch.
        device: "cuda" or "cpu": whose kernels.
        precision: one of `DTYPES`, in place of the configuration's.
        online: the teacher, where it is asked at every step, on the same device and in `precision`.

    Raises:
        KnownError: an objective or a sharpness that cannot be built of these settings.
    """
    allocator = CachingAllocator(uses_expandable_segments(config.training)) if device == "cuda" else None
    tracker = Tracker(BLOCK[device], allocator)
    # fp16 would be refused on a machine without a GPU; here the precision is autocast's business alone.
    training = replace(config.training, precision="fp32", optim=_torch_optimiser(config.training.optim))
    settled = replace(config, training=training, output_dir=config.output_dir or ".")
    with _no_collection(), tracker.fake, tracker, kernels(device):
        model = _distillation(settled, student, teacher)
        sharpness = build_sharpness(settled, model)
        tracker.declare([*model.student.parameters(), *model.student.buffers()], "weights")
        tracker.declare([*model.objective.parameters(), *model.objective.buffers()], "heads")
        asked = None if online is None else online.build(DTYPES[precision]).eval()
        if asked is not None:
            tracker.declare([*asked.parameters(), *asked.buffers()], "teacher")
        save_memory(model.student, settled.training)
        trainer = StepTrainer(model, settled, sharpness, tracker, precision)
        if settled.training.optim != config.training.optim:
            trainer.optimizer = EightBitAdam(trainer.optimizer.param_groups, student=model.student)
        every = 1 if sharpness is None else sharpness.every
        micro = min(MICRO_BATCHES, settled.training.gradient_accumulation_steps)

        def step(number: int) -> None:
            for _ in range(micro):
                with tracker.allocating("batch"):
                    batch = _batch(model.objective, student, teacher, lengths)
                if asked is not None and online is not None:
                    with tracker.allocating("teacher"), torch.no_grad():
                        _ask(asked, online, lengths)
                trainer.step(batch, number)
                del batch
            trainer.update()

        step(0)  # the optimiser's states are made at its end
        gc.collect()
        tracker.forget()
        step(every)
        steps = [(1 / every, _whole(tracker.operations, micro, settled))]
        if every > 1:
            tracker.operations = []
            step(every + 1)
            steps.append((1 - 1 / every, _whole(tracker.operations, micro, settled)))
        breakdown = {kind: tracker.at_peak.get(kind, 0) for kind in KINDS} | {"workspace": WORKSPACE[device]}
        if allocator is not None:
            breakdown["fragmentation"] = allocator.reserved - tracker.peak
        parameters = sum(parameter.numel() for parameter in model.student.parameters())
        return Trace(
            tracker.peak + WORKSPACE[device],
            {kind: size for kind, size in breakdown.items() if size},
            tuple(steps),
            parameters,
        )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Nothing that holds itself is freed inside: when Python does so depends on all that it did before."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _distillation(config: RunConfig, student: Model, teacher: TeacherShape) -> Distillation:
    built = student.student()
    targets: Any = SimpleNamespace(shape=teacher, space=None)
    return Distillation(built, build_objective(config, built.shape, targets))


def _torch_optimiser(name: str) -> str:
    """bitsandbytes' kernels know no fake tensors; `EightBitAdam` stands in for its 8-bit ones."""
    return "adamw_torch_fused" if name in EIGHT_BIT_ADAM else name


def _whole(operations: Sequence[Operation], micro: int, config: RunConfig) -> tuple[Operation, ...]:
    """A step's kernels with all of its micro-batches."""
    repeated = config.training.gradient_accumulation_steps / micro
    return tuple(
        operation
        if operation.phase == "optimiser"
        else replace(operation, flops=int(operation.flops * repeated), bytes=int(operation.bytes * repeated))
        for operation in operations
    )


class StepTrainer(DistillTrainer):
    """`DistillTrainer` without data, devices and files: its step, its losses and its optimiser."""

    def __init__(
        self,
        model: Distillation,
        config: RunConfig,
        sharpness: SharpnessAware | None,
        tracker: Tracker,
        precision: str,
    ) -> None:
        from transformers import TrainerState

        # Not Trainer's own: it would move the model, and refuse fp16 where there is no GPU.
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
            parameter.register_post_accumulate_grad_hook(self._gradient)
        if sharpness is not None:
            _follow(sharpness, tracker)
        self.create_optimizer()

    def _gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._tracker.declare([parameter.grad], "gradients")

    def _prepare_context_parallel_inputs(self, model: nn.Module, inputs: Any) -> Any:
        return nullcontext, inputs

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs

    def step(self, batch: Mapping[str, Any], number: int) -> None:
        """Forward and backward, as often as sharpness has it."""
        self.state.global_step = number
        self.training_step(self.model, dict(batch))

    def update(self) -> None:
        """The optimiser's step."""
        with self._tracker.allocating("optimiser"):
            self.optimizer.step()
        self.model.zero_grad()
        self._sums.clear()


class EightBitAdam(torch.optim.Optimizer):
    """The states of bitsandbytes' 8-bit Adam: two bytes a number and two float32 a block of 256.

    Tensors of fewer than 4,096 numbers and tables of embeddings have float32 states, as there.
    """

    def __init__(self, groups: Any, *, student: nn.Module) -> None:
        super().__init__([{"params": group["params"]} for group in groups], {})
        self._exact = {module.weight for module in student.modules() if isinstance(module, nn.Embedding)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make the states where there are none, and touch them."""
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
    """The factor of a `GradScaler`, which multiplies a loss and divides gradients in place."""

    def scale(self, loss: Tensor) -> Tensor:
        return loss * 65536.0


def _follow(sharpness: Any, tracker: Tracker) -> None:
    """What the ascent allocates behind its gradients, which are of the backward pass, is the perturbation's."""
    gradients: Callable[[Tensor], tuple[list[Tensor], list[Tensor]]] = sharpness._gradients
    ascended: Callable[..., Any] = sharpness.ascended

    def followed(loss: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        parameters, found = gradients(loss)
        tracker.declare(found, "perturbation")
        tracker.phase = "perturbation"
        return parameters, found

    @contextmanager
    def around(loss: Tensor | None = None) -> Iterator[Any]:
        with ascended(loss) as ascent:
            tracker.phase = "activations"
            yield ascent

    sharpness._gradients, sharpness.ascended = followed, around


def _mask(lengths: Sequence[int], side: str) -> Tensor:
    """`(B, t)` int64."""
    tokens, longest = torch.tensor(list(lengths)), max(lengths)
    places = torch.arange(longest)
    return ((places >= longest - tokens[:, None]) if side == "left" else (places < tokens[:, None])).long()


def _batch(objective: Objective, student: Model, teacher: TeacherShape, lengths: Sequence[int]) -> dict[str, Any]:
    """What `distill.data.collator.Collator` makes of texts of these lengths; the teacher's tokens are as many."""
    needs, size = objective.needs, len(lengths)
    mask = _mask(lengths, student.padding_side)
    batch: dict[str, Any] = {
        "input_ids": (mask * 3).repeat(needs.views, 1),  # any tokens but padding
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


def _ask(encoder: nn.Module, teacher: Model, lengths: Sequence[int]) -> None:
    mask = _mask(lengths, teacher.padding_side)
    encoder(input_ids=mask * 3, attention_mask=mask)
