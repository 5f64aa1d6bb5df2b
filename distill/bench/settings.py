"""What `distill bench` measures: the methods, on which texts, how often."""

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any

from distill.config import ObjectiveConfig, RunConfig, SharpnessConfig
from distill.errors import ConfigError
from distill.objectives import load_objective
from distill.objectives.base import Objective
from distill.sharpness import PRESETS

CORPUS = "corpus"
CACHED, ONLINE = "cached", "online"
# What the others are told as multiples of.
BASELINE = "talas"
DEFAULT_METHODS = (
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
# Options without which a short run would never reach the step that most of a training consists of.
WHOLE_STEP: dict[str, dict[str, Any]] = {"jasper": {"stage_one_epochs": 0}}
# Settings of a run that are the bench's to choose, and what chooses them.
CHOSEN = {
    "cache": "--cache",
    "space": "--space",
    "corpus": "--corpus",
    "output_dir": "-o",
    "teacher.mode": "@online behind a method",
    "teacher.model": "--teacher",
    "teacher.device": "--teacher-device",
    "student.model": "--student",
    "data.held_out": "nothing: no text is held out",
    "data.skip_quarantined": "nothing: they are skipped",
    "training.max_steps": "--steps",
    "training.num_train_epochs": "--steps",
    "training.per_device_train_batch_size": "--batch-size",
    "training.precision": "--precision",
}


@dataclass(frozen=True)
class Method:
    """A row of the table.

    Attributes:
        name: as it was written: `OBJECTIVE[/PRESET][+SHARPNESS][@online]`.
        preset: of the objective.
        sharpness: a name of `distill list sharpness`, or "none".
        teacher: "cached", or "online": asked at every step.
    """

    name: str
    objective: str
    preset: str | None = None
    sharpness: str = "none"
    teacher: str = CACHED

    @classmethod
    def parse(cls, name: str) -> "Method":
        """Raises ConfigError for a name that is not of that form, or that nothing is called by."""
        rest, _, teacher = name.strip().partition("@")
        rest, _, sharpness = rest.partition("+")
        objective, _, preset = rest.partition("/")
        if teacher not in ("", CACHED, ONLINE):
            raise ConfigError(f"method {name!r}: the teacher is {teacher!r}; expected @cached or @online")
        known = ("", "none", *PRESETS)
        if sharpness not in known:
            raise ConfigError(f"method {name!r}: no sharpness is called {sharpness!r}; known: {', '.join(known[1:])}")
        kind = load_objective(objective)
        if preset and preset not in kind.presets:
            raise ConfigError(
                f"method {name!r}: objective {objective} has no preset {preset!r}; it has: "
                f"{', '.join(kind.presets) or 'none'}"
            )
        return cls(name.strip(), objective, preset or None, sharpness or "none", teacher or CACHED)

    @property
    def kind(self) -> type[Objective]:
        return load_objective(self.objective)

    def configured(self, config: RunConfig) -> RunConfig:
        """A run of this method that is otherwise `config`.

        Options of the objective and of the sharpness that `config` names hold where the method's are the same.
        """
        base = config.objective if config.objective.name == self.objective else ObjectiveConfig(self.objective)
        options = dict(base.options)
        for name, value in WHOLE_STEP.get(self.objective, {}).items():
            options.setdefault(name, value)
        objective = ObjectiveConfig(self.objective, self.preset or base.preset, options)
        same = config.sharpness.name == self.sharpness
        return replace(
            config, objective=objective, sharpness=config.sharpness if same else SharpnessConfig(self.sharpness)
        )

    def every(self, config: RunConfig) -> int:
        """Of so many of its steps one has an ascent; 1 where all are alike."""
        if self.sharpness == "none":
            return 1
        preset = PRESETS[self.sharpness].options.get("every", 1)
        return self.configured(config).sharpness.every or int(preset)


@dataclass(frozen=True)
class BenchSettings:
    """What is measured.

    Attributes:
        cache: folder of a teacher cache; its corpus and space are those of the training.
        student: a model folder, or `shape:NAME`: random weights of those sizes.
        teacher: the cache's teacher, for the rows that ask it at every step.
        teacher_device: where it runs; None is where the student does.
        random_weights: in place of the cache's teacher one of these sizes with random weights: `shape:NAME`, the name
            of a model of known sizes, or a model folder, of which only the sizes are read.
        methods: as `Method.parse` reads them.
        lengths: tokens of every text, specials included; or "corpus", the texts of the cache.
        memory_cap: bytes that torch may allocate on the GPU; beyond is an out-of-memory.
        steps, warm_up, rounds: in each round every method takes `warm_up` steps and then `steps` timed ones, rounded up
            to whole cycles.
        minutes: no further round begins later than this; None sets no limit. The first round is always whole.
        alone: measure memory in a process of its own; on a GPU it never is.
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
    alone: bool = True
    sets: tuple[str, ...] = field(default=())

    def check(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            ConfigError: naming the flag.
        """
        for name in ("steps", "rounds", "warm_up", "batch_size"):
            least = {"warm_up": 0, "batch_size": 2}.get(name, 1)
            if getattr(self, name) < least:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name)}; expected at least {least}")
        if self.minutes is not None and not self.minutes > 0:
            raise ConfigError(f"--minutes is {self.minutes}; expected more than 0")
        if not self.methods or not self.lengths:
            raise ConfigError("nothing to measure: --methods and --lengths each need at least one")
        if not self.cache and not self.random_weights:
            raise ConfigError("the teacher's vectors come from a cache (--cache), or are random (--random-weights)")
        if CORPUS in self.lengths and not self.cache:
            raise ConfigError("--lengths corpus needs --cache, whose texts they are; without one name lengths: 32,64")
        if self.random_weights and self.teacher:
            raise ConfigError("--teacher and --random-weights are two teachers; keep one")
        self.run_config().check()
        for length in self.lengths:
            if length != CORPUS and not (isinstance(length, int) and length >= 4):
                raise ConfigError(f"--lengths {length!r}: expected numbers of tokens from 4 on, or {CORPUS}")
        named: dict[str, list[Any]] = {
            "--methods": [method.name for method in self.rows()],
            "--lengths": list(self.lengths),
        }
        for flag, seen in named.items():
            twice = next((name for name in seen if seen.count(name) > 1), None)
            if twice is not None:
                raise ConfigError(f"{flag} names {twice} twice")

    def rows(self) -> list[Method]:
        """The methods, parsed.

        Raises:
            ConfigError: nothing is called so.
        """
        return [Method.parse(name) for name in self.methods]

    def cycle(self) -> int:
        """Steps after which every method has had as many with an ascent as without: a figure is the mean of so many.

        Raises:
            ConfigError: as `run_config`.
        """
        config = self.run_config()
        return math.lcm(*(method.every(config) for method in self.rows()))

    def run_config(self) -> RunConfig:
        """What all rows have in common, before a method and texts are chosen.

        Raises:
            ConfigError: an override that no run takes, or that would not hold.
        """
        for one in self.sets:
            key = one.partition("=")[0].strip().replace("-", "_")
            if key in CHOSEN:
                raise ConfigError(f"--set {key} would change nothing; what chooses it is {CHOSEN[key]}")
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
        return {one.name: _plain(getattr(self, one.name)) for one in fields(self)}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
