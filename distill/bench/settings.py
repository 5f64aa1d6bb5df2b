"""Settings of `distill bench`: the methods, the texts and the numbers of steps and rounds."""

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from distill.config import ObjectiveConfig, RunConfig, SharpnessConfig
from distill.errors import ConfigError
from distill.objectives import load_objective
from distill.objectives.base import Objective
from distill.sharpness import PRESETS

CORPUS = "corpus"
CACHED, ONLINE = "cached", "online"
# Ratios are to this method.
BASELINE = "talas"
DEFAULT_METHODS = (
    "cosine",
    "talas",
    "talas+asam",
    "talas+norm-one-view",
    "leaf",
    "jasper",
    "distillcse",
    "simcse",
    "rkd",
    "emo",
    "dskd",
    "cdm",
    "emo@online",
    "dskd@online",
    "cdm@online",
)
# Options with which a short run has the steps of most of a training.
TYPICAL_STEP: dict[str, dict[str, Any]] = {"jasper": {"stage_one_epochs": 0}}
# Settings of a run that the bench sets, and from what.
SET_BY_BENCH = {
    "cache": "`cache`",
    "space": "`space`",
    "corpus": "`corpus`",
    "output_dir": "a temporary folder",
    "teacher.mode": "@online after a method",
    "teacher.model": "`teacher`",
    "teacher.device": "`teacher_device`",
    "student.model": "`student`",
    "data.held_out": "0: no text is held out",
    "data.skip_quarantined": "true: they are skipped",
    "training.max_steps": "`steps`",
    "training.num_train_epochs": "`steps`",
    "training.per_device_train_batch_size": "`batch_size`",
    "training.precision": "`precision`",
}


@dataclass(frozen=True)
class Method:
    """A row of the table.

    Attributes:
        name: as given: `OBJECTIVE[/PRESET][+SHARPNESS][@online]`.
        preset: of the objective.
        sharpness: a name of `distill list sharpness`.
        teacher: "cached", or "online": encodes at every step.
    """

    name: str
    objective: str
    preset: str | None = None
    sharpness: str = "none"
    teacher: str = CACHED

    @classmethod
    def parse(cls, name: str) -> "Method":
        """The method of a name.

        Raises:
            ConfigError: a name of another form, or an unknown objective, preset or sharpness.
        """
        rest, _, teacher = name.strip().partition("@")
        rest, _, sharpness = rest.partition("+")
        objective, _, preset = rest.partition("/")
        if teacher not in ("", CACHED, ONLINE):
            raise ConfigError(f"method {name!r}: the teacher is {teacher!r}; expected @cached or @online")
        known = ("", "none", *PRESETS)
        if sharpness not in known:
            raise ConfigError(
                f"method {name!r}: unknown sharpness {sharpness!r}; expected one of {', '.join(known[1:])}"
            )
        kind = load_objective(objective)
        if preset and preset not in kind.presets:
            raise ConfigError(
                f"method {name!r}: objective {objective} has no preset {preset!r}; its presets: "
                f"{', '.join(kind.presets) or 'none'}"
            )
        return cls(name.strip(), objective, preset or None, sharpness or "none", teacher or CACHED)

    @property
    def kind(self) -> type[Objective]:
        return load_objective(self.objective)

    def configure(self, config: RunConfig) -> RunConfig:
        """`config` with this method; its objective's and sharpness's options apply if the names are the same."""
        base = config.objective if config.objective.name == self.objective else ObjectiveConfig(self.objective)
        options = dict(base.options)
        for name, value in TYPICAL_STEP.get(self.objective, {}).items():
            options.setdefault(name, value)
        objective = ObjectiveConfig(self.objective, self.preset or base.preset, options)
        same = config.sharpness.name == self.sharpness
        return replace(
            config, objective=objective, sharpness=config.sharpness if same else SharpnessConfig(self.sharpness)
        )

    def every(self, config: RunConfig) -> int:
        """Every how many steps there is an ascent; 1 if all steps are alike."""
        if self.sharpness == "none":
            return 1
        preset = PRESETS[self.sharpness].options.get("every", 1)
        return self.configure(config).sharpness.every or int(preset)


@dataclass(frozen=True)
class BenchSettings:
    """Settings of a bench.

    Attributes:
        cache: folder of a teacher cache with the corpus and space to train on.
        student: a model folder, or `shape:NAME`: random weights of these sizes.
        teacher: the cache's teacher, for the online rows.
        teacher_device: its device; None is the student's.
        random_weights: a teacher with random weights in place of the cache's: `shape:NAME`, the name of a model of
            known sizes, or a model folder, of which only the configuration is read.
        methods: names for `Method.parse`.
        lengths: tokens of every text, special tokens included; or "corpus", the texts of the cache.
        memory_cap: bytes that torch may allocate on the GPU.
        steps, warm_up, rounds: in each round every method takes `warm_up` steps and then `steps` timed ones, rounded up
            to whole cycles.
        minutes: time limit, checked before each measurement; the first round is always completed. None is no limit.
        own_process: measure memory in a new process; never on a GPU.
        sets: `key=value` overrides of the run configuration, for all rows.
    """

    cache: str = ""
    space: str | None = None
    corpus: str | None = None
    student: str = "shape:bert-base"
    teacher: str = ""
    teacher_device: str | None = None
    random_weights: str = ""
    methods: tuple[str, ...] = DEFAULT_METHODS
    lengths: tuple[int | str, ...] = (CORPUS,)
    batch_size: int = 32
    precision: str = "auto"
    memory: str = "default"
    memory_cap: int | None = None
    steps: int = 5
    warm_up: int = 3
    rounds: int = 3
    minutes: float | None = None
    own_process: bool = True
    sets: tuple[str, ...] = field(default=())

    def check(self) -> None:
        """Validate the settings.

        Raises:
            ConfigError: an invalid setting.
        """
        for name in ("steps", "rounds", "warm_up", "batch_size"):
            least = {"warm_up": 0, "batch_size": 2}.get(name, 1)
            if getattr(self, name) < least:
                raise ConfigError(f"`{name}` is {getattr(self, name)}; expected at least {least}")
        if self.minutes is not None and not self.minutes > 0:
            raise ConfigError(f"`minutes` is {self.minutes}; expected more than 0")
        if not self.methods or not self.lengths:
            raise ConfigError("nothing to measure: `methods` and `lengths` each need at least one")
        if not self.cache and not self.random_weights:
            raise ConfigError("there are no teacher vectors: give `cache`, or `random_weights`")
        if CORPUS in self.lengths and not self.cache:
            raise ConfigError("`lengths` corpus needs `cache`; without one give lengths such as 32,64")
        if self.random_weights and self.teacher:
            raise ConfigError("`teacher` and `random_weights` are two teachers; keep one")
        self.run_config().check()
        for length in self.lengths:
            if length != CORPUS and not (isinstance(length, int) and length >= 4):
                raise ConfigError(f"`lengths` {length!r}: expected numbers of tokens from 4 on, or {CORPUS}")
        named: dict[str, list[Any]] = {
            "methods": [method.name for method in self.rows()],
            "lengths": list(self.lengths),
        }
        for argument, values in named.items():
            duplicate = next((value for value in values if values.count(value) > 1), None)
            if duplicate is not None:
                raise ConfigError(f"`{argument}` names {duplicate} twice")

    def rows(self) -> list[Method]:
        """The methods, parsed.

        Raises:
            ConfigError: an invalid name.
        """
        return [Method.parse(name) for name in self.methods]

    def cycle(self) -> int:
        """Least common multiple of the methods' `every`: the number of steps that every figure is averaged over.

        Raises:
            ConfigError: as `run_config`.
        """
        config = self.run_config()
        return math.lcm(*(method.every(config) for method in self.rows()))

    def run_config(self) -> RunConfig:
        """The configuration that all rows share, without method and workload.

        Raises:
            ConfigError: an invalid override, or one of a setting in `SET_BY_BENCH`.
        """
        for one in self.sets:
            key = one.partition("=")[0].strip().replace("-", "_")
            if key in SET_BY_BENCH:
                raise ConfigError(f"{key} cannot be overridden; a bench sets it from {SET_BY_BENCH[key]}")
        memory = [] if self.memory == "default" else [f"training.memory={self.memory}"]
        config = RunConfig.load(None, [*memory, *self.sets])
        training = replace(
            config.training,
            per_device_train_batch_size=self.batch_size,
            precision=self.precision,
            max_steps=self.warm_up + self.steps,
            arguments={**config.training.arguments, "save_strategy": "no"},
        )
        data = replace(config.data, held_out=0, skip_quarantined=True)
        return replace(config, training=training, data=data)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
