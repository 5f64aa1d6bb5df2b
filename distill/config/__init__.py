"""The configuration of a run: frozen dataclasses, read from one YAML file and `key=value` overrides.

Names inside `training` are those of `transformers.TrainingArguments`; its other arguments go under
`training.arguments`.
"""

import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml

from distill.config.reading import alternatives, build_config, read_overrides, read_yaml, yaml_value
from distill.config.recipes import with_recipe
from distill.errors import ConfigError
from teacher_cache.reading.shuffle import WINDOW
from teacher_cache.space import EmbeddingSpace

# Records shuffled together when a record includes its token states, which take kilobytes.
TOKEN_WINDOW = 1024

# Arguments of transformers' that this trainer replaces: they would have no effect, or break resuming.
_EVALUATION_ARGUMENTS = (
    "eval_strategy eval_steps eval_delay eval_on_start do_eval metric_for_best_model greater_is_better "
    "load_best_model_at_end"
)
UNSUPPORTED_ARGUMENTS = {
    "save_only_model": "a run could not be resumed from such checkpoints",
    "dataloader_drop_last": "set data.drop_last instead",
    "data_seed": "the order follows training.seed",
    "group_by_length": "set data.group_by_length",
    "train_sampling_strategy": "the sampler sets the order",
} | dict.fromkeys(_EVALUATION_ARGUMENTS.split(), "set evaluation.data, evaluation.steps and evaluation.keep")

# transformers' schedule of a constant learning rate between warm-up and decay.
WSD = "warmup_stable_decay"

# Least and greatest values; None is no bound.
BOUNDS: dict[str, tuple[float, float | None]] = {
    "training.per_device_train_batch_size": (2, None),
    "training.gradient_accumulation_steps": (1, None),
    "training.learning_rate": (0, None),
    "training.head_learning_rate": (0, None),
    "training.warmup_ratio": (0, 1),
    "training.decay_ratio": (0, 1),
    "training.layer_decay": (0, 1),
    "training.min_lr_rate": (0, 1),
    "training.weight_decay": (0, None),
    "training.max_grad_norm": (0, None),
    "training.ema_decay": (0, 1),
    "training.soup": (1, None),
    "training.seed": (0, None),
    "training.dataloader_num_workers": (0, None),
    "training.save_steps": (1, None),
    "training.save_total_limit": (1, None),
    "training.logging_steps": (1, None),
    "training.cycles": (1, None),
    "data.held_out": (0, None),
}
CHOICES = {
    "teacher.mode": ("cached", "online"),
    "teacher.targets": ("none", "centered", "whitened"),
    "training.precision": ("auto", "bf16", "fp16", "fp32"),
    "training.head_init": ("random", "least_squares"),
    "training.decay_type": ("linear", "cosine", "1-sqrt"),
    "training.memory": ("default", "low"),
    "evaluation.keep": ("best", "last"),
}


@dataclass(frozen=True)
class StudentConfig:
    """The model to train.

    Attributes:
        model: local folder (transformers or sentence-transformers) or hub id.
        pooling: "mean", "cls" or "last_token"; None is that of the model's files, or mean.
        max_length: tokens; None is that of the model's files, at most 256.
        prompt: prepended to every text, in training and in the exported model.
    """

    model: str = ""
    pooling: str | None = None
    max_length: int | None = None
    prompt: str = ""
    trust_remote_code: bool = False


@dataclass(frozen=True)
class TeacherConfig:
    """Where teacher outputs come from.

    Attributes:
        mode: "cached" reads them from the cache; "online" runs the teacher at every step, a baseline for the cache.
            The texts come from the cache either way, and an online teacher must be the teacher of the space.
        model: local folder or hub id of the online teacher.
        device: torch device of the online teacher; None picks CUDA, then MPS, then CPU.
        trust_remote_code: run code from the online teacher's repository.
        targets: what the objective sees: the teacher's vectors ("none"), or their "centered" or "whitened" form, fitted
            to the training texts.
    """

    mode: str = "cached"
    model: str = ""
    device: str | None = None
    trust_remote_code: bool = False
    targets: str = "none"


@dataclass(frozen=True)
class ObjectiveConfig:
    """The loss: a name of `distill list objectives`, one of its presets, and options that override the preset."""

    name: str = "cosine"
    preset: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SharpnessConfig:
    """Sharpness-aware steps: a name of `distill list sharpness`; None keeps the value of that preset.

    Attributes:
        rho: radius of the perturbation.
        eta: added to |w| by scalings that support it.
        every: every k-th step is sharpness-aware, the others are plain.
        parameters: which are perturbed: "all", "student" (without the objective's projections) or "norms" (weights
            and biases of normalization layers).
        ascent_terms: names of the objective's terms whose sum the first pass ascends; without terms that compare
            views it encodes one view. None is the whole loss.
        alpha: `looksam`: scale of the stored direction in the steps between.
        variance_weight: `disam`: lambda in loss - lambda * variance over domains.
    """

    name: str = "none"
    rho: float | None = None
    eta: float | None = None
    every: int | None = None
    parameters: str | None = None
    ascent_terms: tuple[str, ...] | None = None
    alpha: float | None = None
    variance_weight: float | None = None


@dataclass(frozen=True)
class DataConfig:
    """Order and selection of the training records.

    Attributes:
        window: records shuffled together; two windows of teacher outputs are in memory. None is 16,384, or 1,024 if
            the objective compares tokens.
        group_by_length: batch texts of similar length within a window.
        held_out: distinct texts kept out of training, to measure agreement with the teacher. At most an eighth of the
            corpus, and none of a corpus under 256 distinct texts.
        drop_last: skip a last batch that is smaller than the others.
        skip_quarantined: train without quarantined rows instead of raising an error.
    """

    window: int | None = None
    group_by_length: bool = False
    held_out: int = 256
    drop_last: bool = False
    skip_quarantined: bool = False


@dataclass(frozen=True)
class TrainingConfig:
    """Optimization; the defaults are those of the recipe "recommended".

    Attributes:
        head_learning_rate: learning rate of the objective's projections.
        head_init: initial values of the heads that map pooled states to the teacher's vectors: "random", as the
            objective defines them, or a "least_squares" fit of the untrained student to the teacher.
        lr_scheduler_type: a name of transformers', or "linear_cycles": linear decay, repeated `cycles` times.
        decay_norms_and_biases: whether weight decay applies to normalization layers and biases.
        layer_decay: factor of the learning rate from each student layer to the one below it; 1 is one rate for all.
        min_lr_rate: final share of the learning rate of a cosine "with_min_lr", of "warmup_stable_decay" and of each
            cycle.
        decay_ratio: share of all steps that the decay of "warmup_stable_decay" takes.
        decay_type: form of that decay: "linear", "cosine" or "1-sqrt".
        ema_decay: decay of an exponential moving average of the weights, which is scored and exported; 0 is none.
        soup: score and export the mean of the weights at the last checkpoints, this many; 1 is the last alone.
        precision: "auto" is bf16 if the hardware supports it, else fp16 on a GPU and fp32 on a CPU.
        memory: "low" recomputes activations block by block in the backward pass: same gradients, slower steps.
        optim: a name of transformers'; "adamw_bnb_8bit" keeps Adam's states in 8 bits.
        freeze_embeddings: do not train the student's word embeddings; they need no optimizer state then.
        max_steps: optimizer steps; -1 trains `num_train_epochs`.
        save_steps: optimizer steps between checkpoints.
        arguments: further `transformers.TrainingArguments`.
    """

    num_train_epochs: float = 5
    max_steps: int = -1
    per_device_train_batch_size: int = 32
    gradient_accumulation_steps: int = 1
    learning_rate: float = 4e-4
    head_learning_rate: float = 2e-3
    head_init: str = "random"
    layer_decay: float = 1.0
    weight_decay: float = 0.01
    decay_norms_and_biases: bool = True
    warmup_ratio: float = 0.06
    lr_scheduler_type: str = "cosine_with_min_lr"
    min_lr_rate: float = 0.1
    decay_ratio: float = 0.1
    decay_type: str = "1-sqrt"
    cycles: int = 1
    max_grad_norm: float = 0.0
    ema_decay: float = 0.0
    soup: int = 1
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
        data: folder with the tasks' `NAME_validation.csv`; empty is no validation.
        tasks: names of tasks; None is those of the nine whose validation file is usable.
        steps: optimizer steps between evaluations; None is an epoch. The last step is always scored.
        keep: the student to export: "best" by average score, or "last".
    """

    data: str = ""
    tasks: tuple[str, ...] | None = None
    steps: int | None = None
    keep: str = "best"


@dataclass(frozen=True)
class ExportConfig:
    """The exported model, `final/`.

    Attributes:
        format: a name of `distill list exports`.
        projection: append the learned projection, so that vectors lie in the teacher's space; nothing is appended if
            they do without one.
        normalize: append a normalization to unit length.
    """

    format: str = "sentence_transformer"
    projection: bool = False
    normalize: bool = True


@dataclass(frozen=True)
class RunConfig:
    """Everything a run depends on.

    Attributes:
        cache: folder of the teacher cache.
        space: slug, fingerprint or teacher of an embedding space, or the fields it must have. Several names
            concatenate the unit vectors of several teachers of the same texts. None if the cache has one space.
        corpus: name of a corpus; None if the cache has one.
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
        """Load a YAML file (or the defaults) with `a.b=value` overrides, whose values are read as YAML.

        A key `recipe` names a recipe (`distill.config.recipes`), which all other settings override. The value of an
        override of a string is taken literally unless it is quoted or "null", because prompts end in a colon and a
        space.

        Raises:
            ConfigError: the file cannot be read, a key is unknown or a value has the wrong type.
        """
        values = read_yaml(Path(path)) if path is not None else {}
        config = cls.from_values(read_overrides(overrides, values, _override_value))
        config.check()
        return config

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "RunConfig":
        """Nested keys and values as a configuration, on top of the recipe that they name, if any.

        Raises:
            ConfigError: a key is unknown or a value has the wrong type.
        """
        config: RunConfig = build_config(cls, with_recipe(values), "")
        return config

    def check(self) -> None:
        """Check that a run can use the values.

        Raises:
            ConfigError: a value is out of range, or two do not go together; the message names the key.
        """
        training, teacher = self.training, self.teacher
        bounds = BOUNDS | {"data.window": (training.per_device_train_batch_size, None)}
        for key, (low, high) in bounds.items():
            value = self.window(tokens=False) if key == "data.window" else attrgetter(key)(self)
            if not low <= value < math.inf or (high is not None and value > high):  # also refuses NaN
                upper = "" if high is None else f" and at most {high}"
                raise ConfigError(f"{key} is {value}; expected at least {low}{upper}")
        for key, choices in CHOICES.items():
            if attrgetter(key)(self) not in choices:
                expected = f"{', '.join(choices[:-1])} or {choices[-1]}"
                raise ConfigError(f"{key} is {attrgetter(key)(self)!r}; expected {expected}")
        self._check_schedule()
        if training.cycles > 1 and training.lr_scheduler_type != "linear_cycles":
            raise ConfigError(
                f"training.cycles is {training.cycles}, which needs training.lr_scheduler_type=linear_cycles; found "
                f"{training.lr_scheduler_type}"
            )
        self._check_averages()
        if training.max_steps < 1 and training.max_steps != -1:
            raise ConfigError(f"training.max_steps is {training.max_steps}; expected at least 1, or -1 for epochs")
        if training.max_steps == -1 and not 0 < training.num_train_epochs < math.inf:
            raise ConfigError(f"training.num_train_epochs is {training.num_train_epochs}; expected more than 0")
        if (teacher.mode == "online") != bool(teacher.model):
            raise ConfigError(
                f"teacher.mode is {teacher.mode!r} and teacher.model is {teacher.model!r}; set both for an online "
                "teacher, neither to train from the cache"
            )
        if teacher.mode == "cached" and teacher != TeacherConfig(targets=teacher.targets):
            raise ConfigError("teacher.device and .trust_remote_code need teacher.mode=online; remove them")
        if teacher.mode == "online" and training.dataloader_num_workers:
            raise ConfigError(
                "training.dataloader_num_workers must be 0 with an online teacher, which runs in the training process"
            )
        if self.sharpness.name == "msam" and training.is_8bit:
            raise ConfigError(
                f"sharpness.name=msam needs the optimizer's momentum, which training.optim={training.optim} keeps in 8 "
                "bits; use training.optim=adamw_torch_fused"
            )
        self._check_evaluation()
        keys = {f.name: f"training.{f.name}" for f in fields(TrainingConfig)}
        keys |= {"output_dir": "output_dir", "bf16": "training.precision", "fp16": "training.precision"}
        for name in training.arguments:
            if name in keys:
                raise ConfigError(f"training.arguments.{name} has its own key; set {keys[name]} instead")
            if name in UNSUPPORTED_ARGUMENTS:
                raise ConfigError(f"training.arguments.{name} cannot be used: {UNSUPPORTED_ARGUMENTS[name]}")

    def _check_schedule(self) -> None:
        training, default = self.training, TrainingConfig()
        if training.layer_decay == 0:
            raise ConfigError("training.layer_decay is 0.0; expected more than 0, and 1 for one learning rate")
        if training.lr_scheduler_type == WSD:
            if training.warmup_ratio + training.decay_ratio > 1:
                raise ConfigError(
                    f"training.warmup_ratio={training.warmup_ratio} and training.decay_ratio={training.decay_ratio} "
                    "are shares of the same steps; expected at most 1 together"
                )
            return
        for key in ("decay_ratio", "decay_type"):
            if getattr(training, key) != getattr(default, key):
                raise ConfigError(
                    f"training.{key} is {getattr(training, key)}, which needs training.lr_scheduler_type={WSD}; found "
                    f"{training.lr_scheduler_type}"
                )

    def _check_averages(self) -> None:
        training = self.training
        if training.ema_decay == 1:
            raise ConfigError("training.ema_decay is 1.0, which never moves; expected less than 1, such as 0.999")
        if training.ema_decay and training.soup > 1:
            raise ConfigError(
                f"training.ema_decay={training.ema_decay} and training.soup={training.soup} are two averages of the "
                "weights; set one of them"
            )
        if training.soup > 1 and training.arguments.get("save_strategy", "steps") != "steps":
            raise ConfigError("training.soup averages the checkpoints of training.save_steps; remove save_strategy")

    def _check_evaluation(self) -> None:
        evaluation = self.evaluation
        if evaluation.steps is not None and evaluation.steps < 1:
            raise ConfigError(f"evaluation.steps is {evaluation.steps}; expected at least 1, or null for each epoch")
        if not evaluation.data and evaluation != EvaluationConfig():
            raise ConfigError(
                "evaluation.tasks, .steps and .keep need evaluation.data, the folder of the validation files"
            )
        if evaluation.data and self.training.arguments.get("save_strategy", "steps") != "steps":
            raise ConfigError(
                "training.arguments.save_strategy cannot be used with evaluation.data, which saves every new best in "
                "addition to every training.save_steps"
            )

    @property
    def keeps_best(self) -> bool:
        """Whether the exported student is the best on the validation files."""
        return bool(self.evaluation.data) and self.evaluation.keep == "best"

    def window(self, *, tokens: bool) -> int:
        """Records shuffled together; `tokens` says whether records include token states."""
        if self.data.window is not None:
            return self.data.window
        return max(TOKEN_WINDOW if tokens else WINDOW, self.training.per_device_train_batch_size)

    def to_yaml(self) -> str:
        """The whole configuration, defaults included, as `load` reads it."""
        return yaml.safe_dump(_without_tuples(asdict(self)), sort_keys=False, allow_unicode=True)

    def difference(self, other: "RunConfig") -> dict[str, tuple[Any, Any]]:
        """Dotted keys whose values differ: `{key: (self's, other's)}`."""
        mine, theirs = _flat(asdict(self)), _flat(asdict(other))
        return {key: (mine.get(key), theirs.get(key)) for key in mine | theirs if mine.get(key) != theirs.get(key)}


def _override_value(key: str, text: str) -> Any:
    word = text.strip()
    is_mapping = key == "space" and word[:1] in ("{", "[")
    if _is_string(key) and word not in ("null", "~") and word[:1] not in ("'", '"') and not is_mapping:
        return text
    return yaml_value(key, text)


def _is_string(key: str) -> bool:
    hint: Any = RunConfig
    if key.startswith("space."):
        hint, key = EmbeddingSpace, key.removeprefix("space.")
    for name in key.split("."):
        hint = typing.get_type_hints(hint).get(name) if is_dataclass(hint) else None
    return str in alternatives(hint)


def _without_tuples(value: Any) -> Any:
    """Tuples as lists, for YAML."""
    if isinstance(value, dict):
        return {key: _without_tuples(inner) for key, inner in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def resolve_precision(precision: str) -> str:
    """Resolve "auto": bf16 if the hardware supports it, else fp16 on a GPU and fp32 on a CPU.

    The rule does not measure anything: a machine always gives the same result, so a run can be resumed exactly.

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
    # Private, because torch has no public function for it; emulated bf16 would be slower than fp32.
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16" if native else "fp32"
