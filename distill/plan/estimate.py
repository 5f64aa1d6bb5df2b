"""The estimate of `distill plan`: memory, time per device, whether it fits, and suggestions if it does not."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

from distill.config import RunConfig, TeacherConfig, resolve_precision
from distill.errors import ConfigError, NeedsNotMet
from distill.objectives import load_objective
from distill.objectives.base import TeacherShape
from distill.plan.devices import CPU, GPUS, Device, this_processor
from distill.plan.lengths import Lengths, corpus_lengths
from distill.plan.models import Model, student_model, teacher_model
from distill.plan.step import Trace, trace
from distill.training.memory import uses_expandable_segments
from distill.training.targets import Targets
from teacher_cache.table.cache import TeacherCache

ATTENTION = ("fused", "eager")
# Suggestions lower the peak by at least this share.
LEAST_SAVING = 0.03


@dataclass(frozen=True)
class DeviceEstimate:
    """The estimate for one device.

    Attributes:
        step_ms: milliseconds per optimizer step; None if the device lacks the precision.
        fits: whether its memory holds the peak.
        peak_bytes: on this device.
        precision: that it would train in.
        hours: of the whole training; None if the number of records is unknown.
        note: a remark, or "".
    """

    step_ms: float | None
    fits: bool
    peak_bytes: int
    precision: str
    hours: float | None
    note: str = ""


@dataclass(frozen=True)
class Suggestion:
    """A change of settings that lowers the peak.

    Attributes:
        change: a description with its cost.
        settings: `key=value` overrides of a run.
        peak_bytes: with the change.
        fits: whether `device_memory` holds it.
    """

    change: str
    settings: tuple[str, ...]
    peak_bytes: int
    fits: bool


@dataclass(frozen=True)
class Plan:
    """The estimate for a training.

    Attributes:
        peak_bytes: GPU memory that torch needs: bytes allocated at the peak plus what the allocator reserves beyond.
        allocated_bytes: the allocated part, `torch.cuda.max_memory_allocated`.
        breakdown: `peak_bytes` by kind.
        flops_per_step: of an optimizer step with all micro-batches, an online teacher included.
        parameters: of the student.
        lengths: tokens of a typical and of the largest batch, and the corpus's quantiles.
        devices: estimates by device name.
        device_memory: bytes that the step should fit into.
        fits: whether `peak_bytes` fit.
        suggestions: those that make it fit first; empty if it fits or no change helps.
        steps: of the whole training; None if the number of records is unknown.
        assumptions: what the estimate leaves out or assumes.
    """

    student: str
    objective: str
    sharpness: str
    batch: int
    precision: str
    attention: str
    peak_bytes: int
    allocated_bytes: int
    breakdown: dict[str, int]
    flops_per_step: float
    parameters: int
    lengths: dict[str, Any]
    devices: dict[str, DeviceEstimate]
    device_memory: int
    fits: bool
    suggestions: tuple[Suggestion, ...]
    steps: int | None
    assumptions: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Workload:
    """What is traced: settings, models and lengths."""

    config: RunConfig
    student: Model
    shape: TeacherShape
    lengths: Lengths
    online: Model | None
    attention: str

    def trace(self, device: str, precision: str, lengths: Sequence[int]) -> Trace:
        student = self.student.with_attention("eager" if device == "cuda" and self.attention == "eager" else None)
        return trace(self.config, student, self.shape, lengths, device=device, precision=precision, online=self.online)

    def traces(self, device: str, precision: str) -> tuple[Trace, Trace]:
        """Traces of the largest and of the typical batch."""
        largest = self.trace(device, precision, self.lengths.largest)
        if self.lengths.largest == self.lengths.typical:
            return largest, largest
        return largest, self.trace(device, precision, self.lengths.typical)


def plan(
    config: RunConfig,
    *,
    length: int | None = None,
    teacher_dim: int | None = None,
    teacher: str | None = None,
    attention: str = "fused",
    device_memory: int | None = None,
    records: int | None = None,
    suggest: bool = True,
    announce: Callable[[str], None] = lambda line: None,
) -> Plan:
    """Estimate memory and time of a step of `config`; no weights are loaded, nothing is written.

    Args:
        length: tokens of every text, special tokens included; None takes the corpus's lengths.
        teacher_dim: width of the teacher's vectors; None takes the space's or the online teacher's.
        teacher: model folder or shape of an online teacher on the same device; None is a cached teacher.
        attention: on GPUs: "fused" kernels of torch, or "eager", which keeps every attention map.
        device_memory: bytes that a step should fit into; None is the smallest GPU of `GPUS`.
        records: records of an epoch; None takes the corpus's.
        suggest: search for changes that make it fit if it does not.
        announce: called with a line before each part.

    Raises:
        KnownError: settings that no run can have, or a missing model, cache or length.
    """
    config.check()
    if attention not in ATTENTION:
        raise ConfigError(f"attention: expected {' or '.join(ATTENTION)}, found {attention!r}")
    workload, corpus_records = _workload(config, length, teacher_dim, teacher, attention)
    steps = _steps(config, records if records is not None else corpus_records)
    wanted = config.training.precision
    gpu_precision = "fp16" if wanted == "auto" else wanted
    memory = device_memory or GPUS[0].memory
    announce(f"tracing a step of {workload.student.name}, {config.objective.name}, {gpu_precision}")
    largest, typical = workload.traces("cuda", gpu_precision)
    devices = {gpu.name: _device_estimate(gpu, wanted, largest.peak, typical, steps) for gpu in GPUS}
    announce("tracing it for this CPU")
    devices[CPU] = _cpu_estimate(workload, wanted, steps)
    fits = largest.peak <= memory
    suggestions: list[Suggestion] = []
    if suggest and not fits:
        announce("searching for changes that make it fit")
        suggestions = sorted(
            _suggestions(workload, gpu_precision, largest.peak, memory), key=lambda one: (not one.fits, one.peak_bytes)
        )
    return Plan(
        student=workload.student.name,
        objective=config.objective.name,
        sharpness=config.sharpness.name,
        batch=config.training.per_device_train_batch_size,
        precision=gpu_precision,
        attention=attention,
        peak_bytes=largest.peak,
        allocated_bytes=largest.allocated,
        breakdown=largest.breakdown,
        flops_per_step=typical.flops,
        parameters=largest.parameters,
        lengths={
            "typical": _summary(workload.lengths.typical),
            "largest": _summary(workload.lengths.largest),
            "quantiles": workload.lengths.quantiles,
            "texts": workload.lengths.texts,
        },
        devices=devices,
        device_memory=memory,
        fits=fits,
        suggestions=tuple(suggestions),
        steps=steps,
        assumptions=tuple(_assumptions(workload)),
    )


def _workload(
    config: RunConfig, length: int | None, teacher_dim: int | None, teacher: str | None, attention: str
) -> tuple[_Workload, int | None]:
    """What to trace, and the number of records of an epoch."""
    if not config.cache and (config.space is not None or config.corpus is not None):
        raise ConfigError("`space` and `corpus` are parts of a cache: give `cache` too, or leave them out")
    student = student_model(config.student)
    batch = config.training.per_device_train_batch_size
    if length is not None:
        _check_length(student, length)
    online = None
    if teacher or config.teacher.model:
        online = teacher_model(teacher or config.teacher.model, trust_remote_code=config.teacher.trust_remote_code)
    records = None
    shape = None if online is None else online.teacher_shape
    lengths = None if length is None else Lengths.uniform(batch, length)
    with ExitStack() as stack:
        if config.cache:
            cache = stack.enter_context(TeacherCache.open(config.cache))
            # An online teacher may be a shape here, which is the teacher of no space.
            cached = Targets(replace(config, teacher=TeacherConfig()), cache)
            shape = shape or cached.shape
        if teacher_dim is not None:
            shape = replace(shape, dim=teacher_dim) if shape else TeacherShape(teacher_dim, normalized=True)
        if shape is None:
            raise ConfigError(
                "the width of the teacher's vectors is unknown: give `teacher_dim`, `cache`, or the online `teacher`"
            )
        if config.cache and (lengths is None or config.corpus is not None or cache.corpora()):
            manifest = cache.corpus(config.corpus)
            records = len(manifest)
            lengths = lengths or corpus_lengths(
                cache,
                manifest,
                student,
                config.student.prompt,
                batch,
                by_length=config.data.group_by_length,
                seed=config.training.seed,
            )
    if lengths is None:
        raise ConfigError("the length of the texts is unknown: give `length` in tokens, or a `cache` with a corpus")
    if load_objective(config.objective.name).needs.tokens and shape.token_dim is None:
        raise NeedsNotMet(
            f"objective {config.objective.name} compares tokens, and only the width of the teacher's vectors is known: "
            "give `teacher` (a model folder or shape:NAME), or a `cache` with token states"
        )
    return _Workload(config, student, shape, lengths, online, attention), records


def _check_length(student: Model, length: int) -> None:
    if student.positions is not None and length > student.positions:
        raise ConfigError(
            f"`length` is {length} tokens, but {student.name} has positions for {student.positions}; give at most that"
        )
    if length < 2:
        raise ConfigError(f"`length` is {length}; expected at least 2 tokens, special tokens included")


def _device_estimate(
    device: Device, wanted: str, peak: int, typical: Trace, steps: int | None, note: str = ""
) -> DeviceEstimate:
    precision, fits = device.precision(wanted), peak <= device.memory
    if precision not in device.flops:
        return DeviceEstimate(None, fits, peak, precision, None, f"has no {precision}")
    seconds = sum(share * device.seconds(operations) for share, operations in typical.steps)
    hours = None if steps is None else round(steps * seconds / 3600, 2)
    return DeviceEstimate(round(seconds * 1000, 1), fits, peak, precision, hours, note)


def _cpu_estimate(workload: _Workload, wanted: str, steps: int | None) -> DeviceEstimate:
    note, precision = "", wanted
    if wanted == "fp16":
        precision, note = "auto", "CPUs have no fp16 training"
    precision = resolve_precision(precision)
    largest, typical = workload.traces("cpu", precision)
    return _device_estimate(this_processor(), precision, largest.peak, typical, steps, note)


def _steps(config: RunConfig, records: int | None) -> int | None:
    training = config.training
    if training.max_steps > 0:
        return training.max_steps
    if records is None:
        return None
    batches = math.ceil(records / training.per_device_train_batch_size)
    return math.ceil(math.ceil(batches / training.gradient_accumulation_steps) * training.num_train_epochs)


def _suggestions(workload: _Workload, precision: str, peak: int, memory: int) -> Iterator[Suggestion]:
    """The changes that lower the peak, each traced like the settings themselves."""
    for change, changed, settings in _changes(workload):
        try:
            changed.config.check()
        except ConfigError:  # the change does not go with the other settings
            continue
        lowered = changed.trace("cuda", precision, changed.lengths.largest).peak
        if lowered < peak * (1 - LEAST_SAVING):
            yield Suggestion(change, settings, lowered, lowered <= memory)


def _changes(workload: _Workload) -> Iterator[tuple[str, _Workload, tuple[str, ...]]]:
    """Single changes, and the two cheapest together: description, changed workload, `key=value` settings."""
    training, lengths = workload.config.training, workload.lengths
    batch = training.per_device_train_batch_size

    def changed(change: str, **values: Any) -> tuple[str, _Workload, tuple[str, ...]]:
        config = replace(workload.config, training=replace(training, **values))
        settings = (f"training.{key}={str(value).lower()}" for key, value in values.items())
        return change, replace(workload, config=config), tuple(settings)

    low, eight_bit = {"memory": "low"}, {"optim": "adamw_bnb_8bit"}
    if training.memory != "low":
        yield changed("activation checkpointing: a slower step", **low)
    if not training.is_8bit:
        yield changed("optimizer states in 8 bits: other rounding of the updates", **eight_bit)
    if not training.freeze_embeddings:
        yield changed("frozen word embeddings: fewer weights are trained", freeze_embeddings=True)
    if batch >= 4:
        change, half, settings = changed(
            "half the batch, twice the accumulation: losses that compare the texts of a batch see half of them",
            per_device_train_batch_size=batch // 2,
            gradient_accumulation_steps=training.gradient_accumulation_steps * 2,
        )
        largest = tuple(sorted(lengths.largest)[batch - batch // 2 :])
        yield change, replace(half, lengths=replace(lengths, typical=lengths.typical[::2], largest=largest)), settings
    longest = max(lengths.largest)
    if longest >= 32:
        cut = longest // 2
        shorter = replace(
            lengths,
            typical=tuple(min(length, cut) for length in lengths.typical),
            largest=tuple(min(length, cut) for length in lengths.largest),
        )
        yield f"texts cut to {cut} tokens", replace(workload, lengths=shorter), (f"student.max_length={cut}",)
    if training.memory != "low" and not training.is_8bit:
        yield changed("both: activation checkpointing, and optimizer states in 8 bits", **low, **eight_bit)


def _summary(lengths: Sequence[int]) -> dict[str, float]:
    return {"texts": len(lengths), "mean": round(sum(lengths) / len(lengths), 1), "longest": max(lengths)}


def _assumptions(workload: _Workload) -> Iterator[str]:
    if workload.attention == "fused":
        yield "GPUs compute attention with torch's memory-efficient kernel, which keeps no attention maps"
    else:
        yield "GPUs compute eager attention, which keeps its maps"
    if uses_expandable_segments(workload.config.training):
        yield "GPU memory is allocated in expandable segments (expandable_segments:True)"
    yield "an epoch has every record; held-out records and a dropped last batch are not subtracted"
    yield "memory of the driver on a GPU, and of Python on a CPU, is not included"
    if workload.online is not None:
        yield "the teacher has as many tokens as the student, and runs in the precision of training"
    if not workload.lengths.quantiles:
        yield "all texts have the same length"
    if workload.lengths.sampled:
        yield f"lengths are those of {workload.lengths.texts:,} sampled texts; the others may be longer"
