"""From traces of fake steps to what a person asks: how much memory, how long, does it fit, and what if it does not."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

from distill.config import RunConfig, resolve_precision
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
# A change that saves less than this is no help.
WORTHWHILE = 0.03


@dataclass(frozen=True)
class Outlook:
    """One device.

    Attributes:
        step_ms: milliseconds of an optimiser step; None where the device lacks the precision.
        fits: its memory holds the peak.
        peak_bytes: on this device.
        precision: that it would train in.
        hours: of the whole training; None where the number of records is not known.
        note: what there is to say, "" mostly.
    """

    step_ms: float | None
    fits: bool
    peak_bytes: int
    precision: str
    hours: float | None
    note: str = ""


@dataclass(frozen=True)
class Suggestion:
    """A change that lowers the peak.

    Attributes:
        change: for people, with what it costs.
        settings: `key=value` of a run.
    """

    change: str
    settings: tuple[str, ...]
    peak_bytes: int
    fits: bool


@dataclass(frozen=True)
class Plan:
    """What a training will take.

    Attributes:
        peak_bytes: that a GPU must have for torch: what is allocated at the peak and what the allocator keeps beyond.
        allocated_bytes: of these, allocated: `torch.cuda.max_memory_allocated`.
        breakdown: `peak_bytes` by kind.
        flops_per_step: of an optimiser step, all micro-batches, an online teacher among them.
        parameters: of the student.
        lengths: tokens of a typical and of the largest batch, and the corpus's quantiles.
        devices: by name.
        device_memory: bytes that suggestions are for.
        fits: `peak_bytes` do.
        suggestions: empty where it fits, or nothing helps; those that make it fit first.
        steps: of the whole training; None where the number of records is not known.
        assumptions: what was not looked at.
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
    devices: dict[str, Outlook]
    device_memory: int
    fits: bool
    suggestions: tuple[Suggestion, ...]
    steps: int | None
    assumptions: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Question:
    """What is followed: settings, models and lengths."""

    config: RunConfig
    student: Model
    shape: TeacherShape
    lengths: Lengths
    online: Model | None
    attention: str

    def follow(self, device: str, precision: str, lengths: Sequence[int]) -> Trace:
        student = self.student.attending("eager" if device == "cuda" and self.attention == "eager" else None)
        return trace(self.config, student, self.shape, lengths, device=device, precision=precision, online=self.online)


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
    """Foretell memory and time of a step of `config`; no weights are loaded, nothing is written.

    Args:
        length: tokens of every text, specials included; None takes the corpus's own lengths.
        teacher_dim: width of the teacher's vectors; None takes the space's, or the online teacher's.
        teacher: model folder or shape that is asked at every step on the same device; None is a cached teacher.
        attention: on GPUs: "fused", as torch's kernels compute it, or "eager", which keeps every attention map.
        device_memory: bytes that a step should fit into; None is the smallest GPU of the table.
        records: that an epoch has; None takes the corpus's.
        suggest: where it does not fit, look for what would make it.
        announce: is told what is being followed.

    Raises:
        KnownError: settings that no run can have, or a model, cache or length that is not there.
    """
    config.check()
    if attention not in ATTENTION:
        raise ConfigError(f"attention: expected {' or '.join(ATTENTION)}, found {attention!r}")
    question, corpus_records = _question(config, length, teacher_dim, teacher, attention)
    records = records if records is not None else corpus_records
    steps = _steps(config, records)
    wanted = config.training.precision
    on_gpu = "fp16" if wanted == "auto" else wanted
    memory = device_memory or GPUS[0].memory
    announce(f"following a step of {question.student.name}, {config.objective.name}, {on_gpu}")
    peak, typical = _traces(question, "cuda", on_gpu)
    devices = {gpu.name: _outlook(gpu, wanted, peak.peak, typical, steps) for gpu in GPUS}
    announce("following it on this processor")
    devices[CPU] = _on_processor(question, wanted, steps)
    fits = peak.peak <= memory
    found: list[Suggestion] = []
    if suggest and not fits:
        announce("looking for what would make it fit")
        found = sorted(
            _suggestions(question, on_gpu, peak.peak, memory), key=lambda one: (not one.fits, one.peak_bytes)
        )
    return Plan(
        student=question.student.name,
        objective=config.objective.name,
        sharpness=config.sharpness.name,
        batch=config.training.per_device_train_batch_size,
        precision=on_gpu,
        attention=attention,
        peak_bytes=peak.peak,
        allocated_bytes=peak.allocated,
        breakdown=peak.breakdown,
        flops_per_step=typical.flops,
        parameters=peak.parameters,
        lengths={
            "typical": _summary(question.lengths.typical),
            "largest": _summary(question.lengths.largest),
            "quantiles": question.lengths.quantiles,
            "texts": question.lengths.texts,
        },
        devices=devices,
        device_memory=memory,
        fits=fits,
        suggestions=tuple(found),
        steps=steps,
        assumptions=tuple(_assumptions(question)),
    )


def _question(
    config: RunConfig, length: int | None, teacher_dim: int | None, teacher: str | None, attention: str
) -> tuple[_Question, int | None]:
    """What is to be followed, and how many records an epoch has."""
    if not config.cache and (config.space is not None or config.corpus is not None):
        raise ConfigError("--space and --corpus are parts of a cache: give --cache DIR too, or leave them out")
    student = student_model(config.student)
    batch = config.training.per_device_train_batch_size
    if length is not None:
        _check_length(student, length)
    online = None
    if teacher or config.teacher.model:
        online = teacher_model(teacher or config.teacher.model, trust_remote_code=config.teacher.trust_remote_code)
    records = None
    shape = None if online is None else online.teacher_shape
    with ExitStack() as stack:
        if config.cache:
            cache = stack.enter_context(TeacherCache.open(config.cache))
            # An online teacher may be a shape here, which no space was made with.
            offline = replace(config, teacher=type(config.teacher)())
            targets = Targets(offline, cache)
            shape = shape or targets.shape
        if teacher_dim is not None:
            shape = replace(shape, dim=teacher_dim) if shape else TeacherShape(teacher_dim, normalized=True)
        if shape is None:
            raise ConfigError(
                "the width of the teacher's vectors is not known: give --teacher-dim N, --cache DIR, or --teacher "
                "MODEL that is asked at every step"
            )
        if config.cache and (length is None or config.corpus is not None or cache.corpora()):
            manifest = cache.corpus(config.corpus)
            records = len(manifest)
            lengths = (
                corpus_lengths(
                    cache,
                    manifest,
                    student,
                    config.student.prompt,
                    batch,
                    by_length=config.data.group_by_length,
                    seed=config.training.seed,
                )
                if length is None
                else Lengths.alike(batch, length)
            )
        elif length is None:
            raise ConfigError("how long texts are is not known: give --length N tokens, or --cache DIR with a corpus")
        else:
            lengths = Lengths.alike(batch, length)
    _check_tokens(config, shape)
    return _Question(config, student, shape, lengths, online, attention), records


def _check_length(student: Model, length: int) -> None:
    if student.positions is not None and length > student.positions:
        raise ConfigError(
            f"length is {length} tokens, but {student.name} has positions for {student.positions}; give at most that"
        )
    if length < 2:
        raise ConfigError(f"length is {length}; expected at least 2 tokens, the specials are among them")


def _check_tokens(config: RunConfig, shape: TeacherShape) -> None:
    if load_objective(config.objective.name).needs.tokens and shape.token_dim is None:
        raise NeedsNotMet(
            f"objective {config.objective.name} compares tokens, and of the teacher only the width of its vectors is "
            "known: give --teacher MODEL (a folder or shape:NAME), or a --cache that keeps its tokens"
        )


def _traces(question: _Question, device: str, precision: str) -> tuple[Trace, Trace]:
    """Of the largest and of the typical batch."""
    lengths = question.lengths
    largest = question.follow(device, precision, lengths.largest)
    if lengths.largest == lengths.typical:
        return largest, largest
    return largest, question.follow(device, precision, lengths.typical)


def _outlook(device: Device, wanted: str, peak: int, typical: Trace, steps: int | None, note: str = "") -> Outlook:
    precision, fits = device.precision(wanted), peak <= device.memory
    if precision not in device.flops:
        return Outlook(None, fits, peak, precision, None, f"has no {precision}")
    seconds = sum(share * device.seconds(operations) for share, operations in typical.steps)
    hours = None if steps is None else round(steps * seconds / 3600, 2)
    return Outlook(round(seconds * 1000, 1), fits, peak, precision, hours, note)


def _on_processor(question: _Question, wanted: str, steps: int | None) -> Outlook:
    note, precision = "", wanted
    if wanted == "fp16":
        precision, note = "auto", "processors have no fp16 training"
    precision = resolve_precision(precision)
    peak, typical = _traces(question, "cpu", precision)
    return _outlook(this_processor(), precision, peak.peak, typical, steps, note)


def _steps(config: RunConfig, records: int | None) -> int | None:
    training = config.training
    if training.max_steps > 0:
        return training.max_steps
    if records is None:
        return None
    batches = math.ceil(records / training.per_device_train_batch_size)
    return math.ceil(math.ceil(batches / training.gradient_accumulation_steps) * training.num_train_epochs)


def _suggestions(question: _Question, precision: str, peak: int, memory: int) -> Iterator[Suggestion]:
    """What helps, alone and the two that cost least together, each followed like the settings themselves."""
    for change, changed, settings in _changes(question):
        try:
            changed.config.check()
        except ConfigError:  # what is asked for does not go with it
            continue
        found = changed.follow("cuda", precision, changed.lengths.largest).peak
        if found < peak * (1 - WORTHWHILE):
            yield Suggestion(change, settings, found, found <= memory)


def _changes(question: _Question) -> Iterator[tuple[str, _Question, tuple[str, ...]]]:
    training, lengths = question.config.training, question.lengths
    batch = training.per_device_train_batch_size

    def changed(**values: Any) -> _Question:
        return replace(question, config=replace(question.config, training=replace(training, **values)))

    if training.memory != "low":
        yield (
            "blocks computed again in the backward pass: a slower step",
            changed(memory="low"),
            ("training.memory=low",),
        )
    eight = {"optim": "adamw_bnb_8bit"}
    if not training.is_8bit:
        text = "optimiser states in 8 bits: another rounding of the updates"
        yield text, changed(**eight), ("training.optim=adamw_bnb_8bit",)
    if not training.freeze_embeddings:
        text = "word embeddings left as they are: fewer weights are trained"
        yield text, changed(freeze_embeddings=True), ("training.freeze_embeddings=true",)
    if batch >= 4:
        accumulation = training.gradient_accumulation_steps * 2
        half = changed(per_device_train_batch_size=batch // 2, gradient_accumulation_steps=accumulation)
        fewer = replace(
            lengths, typical=lengths.typical[::2], largest=tuple(sorted(lengths.largest)[batch - batch // 2 :])
        )
        yield (
            "half the batch, twice the accumulation: terms that compare the texts of a batch see half of them",
            replace(half, lengths=fewer),
            (
                f"training.per_device_train_batch_size={batch // 2}",
                f"training.gradient_accumulation_steps={accumulation}",
            ),
        )
    longest = max(lengths.largest)
    if longest >= 32:
        cut = longest // 2
        shorter = replace(
            lengths,
            typical=tuple(min(length, cut) for length in lengths.typical),
            largest=tuple(min(length, cut) for length in lengths.largest),
        )
        yield f"texts cut to {cut} tokens", replace(question, lengths=shorter), (f"student.max_length={cut}",)
    if training.memory != "low" and not training.is_8bit:
        text = "both: blocks computed again, and optimiser states in 8 bits"
        yield text, changed(memory="low", **eight), ("training.memory=low", "training.optim=adamw_bnb_8bit")


def _summary(lengths: Sequence[int]) -> dict[str, float]:
    return {"texts": len(lengths), "mean": round(sum(lengths) / len(lengths), 1), "longest": max(lengths)}


def _assumptions(question: _Question) -> Iterator[str]:
    if question.attention == "fused":
        yield "GPUs compute attention with torch's memory-efficient kernel, which keeps no attention maps"
    else:
        yield "GPUs compute attention step by step, and keep its maps (eager)"
    if uses_expandable_segments(question.config.training):
        yield "a GPU's memory is taken in segments that grow (expandable_segments:True)"
    yield "an epoch has every record: held-out ones, and a last batch that is dropped, are not taken off"
    yield "the driver's own memory on a GPU, and Python's on a processor, come on top"
    if question.online is not None:
        yield "the teacher has as many tokens as the student, and runs in the precision of training"
    if not question.lengths.quantiles:
        yield "all texts are equally long"
    if question.lengths.sampled:
        yield f"lengths are those of {question.lengths.texts:,} texts of the corpus; the others may hold longer ones"
