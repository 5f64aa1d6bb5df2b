"""A run's configuration: frozen dataclasses, read from one YAML file and `key=value` overrides.

Names inside `training` are those of `transformers.TrainingArguments`; any other of its arguments can be given
under `training.arguments`.
"""

import difflib
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Union

import yaml

from distill.errors import ConfigError
from teacher_cache.reading.shuffle import WINDOW
from teacher_cache.space import EmbeddingSpace

# Records shuffled together where a record is kilobytes of token states.
TOKEN_WINDOW = 1024

# Arguments of transformers' that this trainer's own ways replace: accepting them would change nothing, or break
# what a run promises.
NOT_FOR_A_RUN = {
    "save_only_model": "a run could not be resumed from such checkpoints",
    "dataloader_drop_last": "set data.drop_last instead",
    "data_seed": "the order follows training.seed",
    "group_by_length": "set data.group_by_length",
    "train_sampling_strategy": "the order is the sampler's",
} | dict.fromkeys(
    (
        "eval_strategy",
        "eval_steps",
        "eval_delay",
        "eval_on_start",
        "do_eval",
        "metric_for_best_model",
        "greater_is_better",
        "load_best_model_at_end",
    ),
    "set evaluation.data, evaluation.steps and evaluation.keep",
)


@dataclass(frozen=True)
class StudentConfig:
    """Which model is trained.

    Attributes:
        model: local folder (transformers or sentence-transformers) or hub id.
        pooling: "mean", "cls" or "last_token"; None takes what the folder says, else mean.
        max_length: tokens; None takes the smaller of what the folder says and 256.
        prompt: put in front of every text, in training and in the exported model.
    """

    model: str = ""
    pooling: str | None = None
    max_length: int | None = None
    prompt: str = ""
    trust_remote_code: bool = False


@dataclass(frozen=True)
class TeacherConfig:
    """Where the teacher's answers come from.

    Attributes:
        mode: "cached" reads them from the cache. "online" asks the teacher itself at every step, which is what the
            cache spares: the baseline to measure it against. The texts still come from the cache, and the teacher
            must be the very one of the space.
        model: local folder or hub id of the online teacher.
        device: torch device of the online teacher; None picks CUDA, then MPS, then CPU.
        trust_remote_code: run code that comes with it.
    """

    mode: str = "cached"
    model: str = ""
    device: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is minimised: a name of `distill list objectives`, one of its presets, and single options."""

    name: str = "talas"
    preset: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SharpnessConfig:
    """Sharpness-aware steps: a name of `distill list sharpness`; None keeps that preset's value.

    Attributes:
        rho: radius of the perturbation.
        eta: added to |w| where the scaling has a place for it.
        every: sharpness-aware steps are every k-th one, the others are plain.
        parameters: which are perturbed: "all", "student" (not the objective's own projections) or "norms" (the
            gains and biases of normalisation layers).
        ascent_terms: names of the objective's terms that the first pass climbs; a first pass without terms that
            compare views encodes one view alone. None climbs the whole loss.
        alpha: of `looksam`, how strongly the kept direction counts in the steps between.
        variance_weight: of `disam`, lambda in loss - lambda * variance over domains.
    """

    name: str = "norm-one-view"
    rho: float | None = None
    eta: float | None = None
    every: int | None = None
    parameters: str | None = None
    ascent_terms: tuple[str, ...] | None = None
    alpha: float | None = None
    variance_weight: float | None = None


@dataclass(frozen=True)
class DataConfig:
    """How records are drawn.

    Attributes:
        window: records shuffled together; what the teacher said of them is in memory twice. None is 16,384, or
            1,024 where an objective compares tokens.
        group_by_length: make batches of texts of similar length inside a window.
        held_out: distinct texts that are never trained on; agreement with the teacher is measured on them.
            At most an eighth of the corpus is held out, and nothing from a corpus under 256 distinct texts.
        drop_last: leave out a last batch that is smaller than the others.
        skip_quarantined: train without the texts whose vector was refused, instead of refusing the corpus.
    """

    window: int | None = None
    group_by_length: bool = False
    held_out: int = 256
    drop_last: bool = False
    skip_quarantined: bool = False


@dataclass(frozen=True)
class TrainingConfig:
    """The optimisation; defaults are those of the TALAS paper.

    Attributes:
        head_learning_rate: for the objective's own projections.
        lr_scheduler_type: a name of transformers', or "linear_cycles": down in a straight line, `cycles` times.
        min_lr_rate: the share of the learning rate at which a cosine "with_min_lr" or a cycle ends.
        precision: "auto" is bf16 where the GPU or processor has it, else fp16 on a GPU, fp32 on a processor.
        memory: "low" keeps only the pooled states of the forward pass and computes the others again, block by block,
            for the backward pass: the gradients are the same, the step is slower.
        optim: a name of transformers'; "adamw_bnb_8bit" keeps Adam's states in 8 bits.
        freeze_embeddings: leave the student's word embeddings as they are; they have no optimiser state then.
        max_steps: optimiser steps; -1 trains `num_train_epochs`.
        save_steps: optimiser steps between checkpoints.
        arguments: further `transformers.TrainingArguments`.
    """

    num_train_epochs: float = 5
    max_steps: int = -1
    per_device_train_batch_size: int = 32
    gradient_accumulation_steps: int = 1
    learning_rate: float = 2e-5
    head_learning_rate: float = 1e-4
    weight_decay: float = 0.01
    warmup_ratio: float = 0.06
    lr_scheduler_type: str = "cosine_with_min_lr"
    min_lr_rate: float = 0.1
    cycles: int = 1
    max_grad_norm: float = 0.0
    precision: str = "auto"
    memory: str = "default"
    optim: str = "adamw_torch_fused"
    freeze_embeddings: bool = False
    seed: int = 42
    save_steps: int = 500
    save_total_limit: int = 2
    logging_steps: int = 20
    report_to: str = "none"
    dataloader_num_workers: int = 0
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_8bit(self) -> bool:
        """Whether the optimizer keeps its states in 8 bits."""
        return "8bit" in self.optim


@dataclass(frozen=True)
class EvaluationConfig:
    """Scores on validation files during training.

    Attributes:
        data: folder with the tasks' `NAME_validation.csv`; without one nothing is scored.
        tasks: names of tasks; None is those of the nine whose validation files tell something.
        steps: optimiser steps between evaluations; None is an epoch. The last step is always scored.
        keep: which student is exported, the "best" by its average score or the "last".
    """

    data: str = ""
    tasks: tuple[str, ...] | None = None
    steps: int | None = None
    keep: str = "best"


@dataclass(frozen=True)
class ExportConfig:
    """What `final/` holds.

    Attributes:
        format: a name of `distill list exports`.
        projection: add the learned projection, so that the student's vectors lie in the teacher's space.
        normalize: end with unit length.
    """

    format: str = "sentence_transformer"
    projection: bool = False
    normalize: bool = True


@dataclass(frozen=True)
class RunConfig:
    """Everything a run depends on.

    Attributes:
        cache: folder of the teacher cache.
        space: slug, fingerprint or teacher of an embedding space, or fields that it must have; several names for
            several teachers of the same texts, whose unit vectors are put side by side; None when the cache has
            one.
        corpus: name of a corpus; None when the cache has one.
        output_dir: the run folder.
    """

    cache: str = ""
    space: Mapping[str, Any] | str | tuple[str, ...] | None = None
    corpus: str | None = None
    output_dir: str = ""
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    student: StudentConfig = field(default_factory=StudentConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    sharpness: SharpnessConfig = field(default_factory=SharpnessConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    export: ExportConfig = field(default_factory=ExportConfig)

    @classmethod
    def load(cls, path: str | Path | None = None, overrides: Sequence[str] = ()) -> "RunConfig":
        """From a YAML file (or the defaults) with `a.b=value` overrides; values are read as YAML.

        Where a text is expected, an override's value is taken as it stands, unless it is quoted or "null":
        prompts end in a colon and a space.

        Raises:
            ConfigError: the file cannot be read, a key is unknown or a value has the wrong type.
        """
        values = read_yaml(Path(path)) if path is not None else {}
        read_overrides(overrides, values, _override_value)
        config: RunConfig = build_config(cls, values, "")
        config.check()
        return config

    def check(self) -> None:
        """Refuse values that no run can use.

        Raises:
            ConfigError: naming the key.
        """
        training = self.training
        bounds = (
            ("training.per_device_train_batch_size", training.per_device_train_batch_size, 2, None),
            ("training.gradient_accumulation_steps", training.gradient_accumulation_steps, 1, None),
            ("training.learning_rate", training.learning_rate, 0, None),
            ("training.head_learning_rate", training.head_learning_rate, 0, None),
            ("training.warmup_ratio", training.warmup_ratio, 0, 1),
            ("training.min_lr_rate", training.min_lr_rate, 0, 1),
            ("training.weight_decay", training.weight_decay, 0, None),
            ("training.max_grad_norm", training.max_grad_norm, 0, None),
            ("training.seed", training.seed, 0, None),
            ("training.dataloader_num_workers", training.dataloader_num_workers, 0, None),
            ("training.save_steps", training.save_steps, 1, None),
            ("training.save_total_limit", training.save_total_limit, 1, None),
            ("training.logging_steps", training.logging_steps, 1, None),
            ("training.cycles", training.cycles, 1, None),
            ("data.window", self.window(tokens=False), training.per_device_train_batch_size, None),
            ("data.held_out", self.data.held_out, 0, None),
        )
        for key, value, low, high in bounds:
            if not low <= value < math.inf or (high is not None and value > high):  # NaN is refused too
                upper = "" if high is None else f" and at most {high}"
                raise ConfigError(f"{key} is {value}; expected at least {low}{upper}")
        if training.cycles > 1 and training.lr_scheduler_type != "linear_cycles":
            raise ConfigError(
                f"training.cycles is {training.cycles}, which only training.lr_scheduler_type=linear_cycles has, not "
                f"{training.lr_scheduler_type}"
            )
        if training.max_steps < 1 and training.max_steps != -1:
            raise ConfigError(f"training.max_steps is {training.max_steps}; expected at least 1, or -1 for epochs")
        if training.max_steps == -1 and not 0 < training.num_train_epochs < math.inf:
            raise ConfigError(f"training.num_train_epochs is {training.num_train_epochs}; expected more than 0")
        if self.teacher.mode not in ("cached", "online"):
            raise ConfigError(f"teacher.mode is {self.teacher.mode!r}; expected cached or online")
        if (self.teacher.mode == "online") != bool(self.teacher.model):
            raise ConfigError(
                f"teacher.mode is {self.teacher.mode!r} and teacher.model {self.teacher.model!r}: an online teacher "
                "needs its model; to train from the cache leave teacher.model out"
            )
        if self.teacher.mode == "cached" and self.teacher != TeacherConfig():
            raise ConfigError("teacher.device and .trust_remote_code are for teacher.mode=online; leave them out")
        if self.teacher.mode == "online" and training.dataloader_num_workers:
            raise ConfigError(
                "training.dataloader_num_workers must be 0 with an online teacher, which answers where training runs"
            )
        self._check_evaluation()
        if training.precision not in ("auto", "bf16", "fp16", "fp32"):
            raise ConfigError(f"training.precision is {training.precision!r}; expected auto, bf16, fp16 or fp32")
        if training.memory not in ("default", "low"):
            raise ConfigError(f"training.memory is {training.memory!r}; expected default or low")
        if self.sharpness.name == "msam" and training.is_8bit:
            raise ConfigError(
                f"sharpness.name=msam reads the optimiser's momentum, which training.optim={training.optim} keeps in 8 "
                "bits; use training.optim=adamw_torch_fused"
            )
        own = {f.name: f"training.{f.name}" for f in fields(TrainingConfig)}
        own |= {"output_dir": "output_dir", "bf16": "training.precision", "fp16": "training.precision"}
        for name in training.arguments:
            if name in own:
                raise ConfigError(f"training.arguments.{name} has a key of its own; set {own[name]} instead")
            if name in NOT_FOR_A_RUN:
                raise ConfigError(f"training.arguments.{name} cannot be used: {NOT_FOR_A_RUN[name]}")

    def _check_evaluation(self) -> None:
        evaluation = self.evaluation
        if evaluation.keep not in ("best", "last"):
            raise ConfigError(f"evaluation.keep is {evaluation.keep!r}; expected best or last")
        if evaluation.steps is not None and evaluation.steps < 1:
            raise ConfigError(f"evaluation.steps is {evaluation.steps}; expected at least 1, or null for each epoch")
        if not evaluation.data:
            if evaluation != EvaluationConfig():
                raise ConfigError(
                    "evaluation.tasks, .steps and .keep need evaluation.data, the folder of the validation files"
                )
        elif self.training.arguments.get("save_strategy", "steps") != "steps":
            raise ConfigError(
                "training.arguments.save_strategy cannot be used with evaluation.data, which says itself what is saved "
                "beside every training.save_steps"
            )

    @property
    def keeps_best(self) -> bool:
        """Whether validation chooses the student that is exported."""
        return bool(self.evaluation.data) and self.evaluation.keep == "best"

    def window(self, *, tokens: bool) -> int:
        """Records shuffled together, where every token of them is in memory too or not."""
        if self.data.window is not None:
            return self.data.window
        return max(TOKEN_WINDOW if tokens else WINDOW, self.training.per_device_train_batch_size)

    def to_yaml(self) -> str:
        """The whole configuration, defaults included; `load` reads it back."""
        return yaml.safe_dump(_plain(asdict(self)), sort_keys=False, allow_unicode=True)

    def difference(self, other: "RunConfig") -> dict[str, tuple[Any, Any]]:
        """Dotted keys in which the two differ: `{key: (mine, theirs)}`."""
        mine, theirs = _flat(asdict(self)), _flat(asdict(other))
        return {key: (mine.get(key), theirs.get(key)) for key in mine | theirs if mine.get(key) != theirs.get(key)}


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys and values of a YAML file.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"configuration {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration {path} is not YAML: {' '.join(str(error).split())}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"configuration {path}: expected keys and values, found a {type(values).__name__}")
    return values


def read_overrides(
    overrides: Sequence[str], values: dict[str, Any], read: Callable[[str, str], Any] | None = None
) -> dict[str, Any]:
    """Put `a.b=value` texts into nested `values`, which are returned.

    Args:
        read: key and text to a value; None reads YAML.

    Raises:
        ConfigError: one is not of that form, or its value not YAML.
    """
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"override {override!r} is not of the form key=value")
        key = key.strip().replace("-", "_")
        put(values, key, (read or _yaml_value)(key, text))
    return values


def _override_value(key: str, text: str) -> Any:
    word = text.strip()
    structured = key == "space" and word[:1] in ("{", "[")
    if _is_text(key) and word not in ("null", "~") and word[:1] not in ("'", '"') and not structured:
        return text
    return _yaml_value(key, text)


def _yaml_value(key: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"override {key}: {text!r} is not a YAML value: {reason}") from error


def _is_text(key: str) -> bool:
    hint: Any = RunConfig
    if key.startswith("space."):
        hint, key = EmbeddingSpace, key.removeprefix("space.")
    for name in key.split("."):
        hint = typing.get_type_hints(hint).get(name) if is_dataclass(hint) else None
    return str in _alternatives(hint)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key.

    Raises:
        ConfigError: a part of it is a value, not a group of keys.
    """
    *parents, last = key.split(".")
    for parent in parents:
        inner = values.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"override {key}: {parent} is {inner!r}, not a group of keys")
        values = inner
    values[last] = value


def build_config(kind: type, values: Mapping[str, Any], prefix: str) -> Any:
    """A dataclass, and those in it, from keys and values; `prefix` is where they stand, for messages.

    Raises:
        ConfigError: an unknown key, or a value of another type.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{prefix.rstrip('.')}: expected keys and values, found {values!r}")
    known = {f.name: f for f in fields(kind)}
    hints = typing.get_type_hints(kind)
    given: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known here: {', '.join(known)}"
            raise ConfigError(f"unknown key {prefix}{key}; {hint}")
        hint_type = hints[key]
        if is_dataclass(hint_type):
            given[key] = build_config(typing.cast(type, hint_type), value, f"{prefix}{key}.")
        else:
            given[key] = _typed(value, hint_type, f"{prefix}{key}")
    return kind(**given)


def _typed(value: Any, hint: Any, key: str) -> Any:
    """`value` as the field's type: 1e-4, which YAML reads as a string, becomes a float."""
    options = _alternatives(hint)
    if value is None and type(None) in options:
        return None
    if value is None and str in options:
        return ""  # `prompt:` with nothing behind it
    for option in options:
        origin = typing.get_origin(option) or option
        if origin is Mapping and isinstance(value, Mapping):
            return dict(value)
        if origin is tuple and isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
            return tuple(value)
        if origin is bool and isinstance(value, bool):
            return value
        if origin is int and isinstance(value, int) and not isinstance(value, bool):
            return value
        if origin is float and isinstance(value, int | float | str) and not isinstance(value, bool):
            try:
                return float(value)
            except ValueError:
                continue
        if origin is str and isinstance(value, str):
            return value
        if origin is str and isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)  # a folder called 2024
    named = {type(None): "null", Mapping: "keys and values", tuple: "a list of names"}
    kinds = [typing.get_origin(option) or option for option in options]
    wanted = " or ".join(named.get(kind, kind.__name__) for kind in kinds)
    raise ConfigError(f"{key} is {value!r}; expected {wanted}")


def _plain(value: Any) -> Any:
    """Tuples as lists, which YAML has."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def resolve_precision(precision: str) -> str:
    """`auto` as bf16 where the hardware multiplies in it, else fp16 on a GPU and fp32 on a processor.

    A rule, not a measurement: a machine always gives the same result, so a run can be resumed exactly.

    Raises:
        ConfigError: fp16 without a CUDA GPU.
    """
    import torch

    if precision == "fp16" and not torch.cuda.is_available():
        raise ConfigError("training.precision is fp16, which needs a CUDA GPU; use bf16, fp32 or auto")
    if precision != "auto":
        return precision
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.get_device_capability() >= (8, 0) else "fp16"
    # torch has no public question for this; emulated bf16 would be slower than fp32.
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16" if native else "fp32"
