"""What an analysis is, and how one is asked for and kept."""

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from distill.analyses import ANALYSES
from distill.analyses.trained_run import TrainedRun
from distill.errors import ConfigError, EvaluationError, NeedsNotMet, RunFolderError, StudentError
from distill.evaluation.encoders import CachedEncoder
from distill.registry import construct, load_class
from distill.run_folder import ANALYSES as FOLDER
from teacher_cache.errors import CacheError
from teacher_cache.storage.files import atomic_write
from teacher_cache.table.joint import JointSpace
from teacher_cache.teachers.base import TeacherOptions

# What says that the run, or the files beside it, lack what is asked about; a wrong option or a broken answer does not.
NOT_APPLICABLE = (NeedsNotMet, EvaluationError, RunFolderError, StudentError, CacheError)
# Of NumPy's and scikit-learn's generators.
LARGEST_SEED = 2**32 - 1


class Analysis(ABC):
    """A question about a trained run, answered with numbers that a plot shows.

    An analysis is one file in this package: a subclass, and one line in `distill.analyses.ANALYSES`. Options of its
    own are keyword arguments of its constructor.

    Attributes:
        name: as in the table.
        needs_tasks: whether it scores on tasks, so that `data` or `retrieval` must be given.
        data: folder of the tasks' files.
        retrieval: folder of a collection in BEIR layout.
        teacher: folder or hub id of the run's teacher, which is asked for texts that the cache lacks.
        announce: is told what is being done.
    """

    name: ClassVar[str]
    needs_tasks: ClassVar[bool] = False

    def __init__(
        self,
        *,
        data: Path | None = None,
        retrieval: Path | None = None,
        teacher: str | None = None,
        announce: Callable[[str], None] = lambda line: None,
    ) -> None:
        if self.needs_tasks and data is None and retrieval is None:
            raise ConfigError(
                f"analysis {self.name} scores on tasks; say with --data or --retrieval where their files are"
            )
        for flag, path in {"--data": data, "--retrieval": retrieval}.items():
            if path is not None and not path.exists():
                raise ConfigError(f"{flag} {path} is not there; name where the tasks' files are")
        self.data = data
        self.retrieval = retrieval
        self.teacher = teacher
        self.announce = announce

    @abstractmethod
    def __call__(self, run: TrainedRun) -> dict[str, Any]:
        """Plain JSON values, all finite.

        Raises:
            KnownError: the run lacks what is asked about; one of `NOT_APPLICABLE`.
        """

    def teacher_encoder(self, run: TrainedRun) -> CachedEncoder:
        """The run's teacher, asked for every text as it was for training: queries and documents in its space's prompt.

        Raises:
            NeedsNotMet: the run has several teachers.
        """
        if isinstance(run.space, JointSpace):
            raise NeedsNotMet(
                f"{run.folder} has several teachers, {run.space.slug}; {self.name} compares a student with one"
            )
        model = None if self.teacher is None else TeacherOptions(model=self.teacher)
        return CachedEncoder(run.cache.path, run.space.space.slug, model, self.announce)

    @staticmethod
    @abstractmethod
    def conclusion(result: Mapping[str, Any]) -> str:
        """What the result says, in one sentence with its figures."""


def analyze(
    folder: Path,
    names: Sequence[str] | None = None,
    *,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    data: Path | None = None,
    retrieval: Path | None = None,
    teacher: str | None = None,
    cache: Path | None = None,
    trust_remote_code: bool = False,
    announce: Callable[[str], None] = lambda line: None,
    made: Callable[[str, dict[str, Any]], None] = lambda name, record: None,
) -> dict[str, dict[str, Any]]:
    """Analyse a run and keep each answer as `analyses/NAME.json` in its folder, in place of an older one.

    Args:
        names: of `ANALYSES`, or "package.module:Class"; None is all that can be done with the run and what is given:
            the others are announced with the reason, and an error only if none is left.
        options: by name of the analysis.
        cache, trust_remote_code: see `TrainedRun.open`.
        made: is given the name and the record of each as soon as it is kept, whatever comes of the next.

    Returns:
        The records by name: `analysis`, `conclusion`, `options`, `step`, `seconds`, `result`.

    Raises:
        KnownError: an unknown name or option, or a run that lacks what is asked about by name.
    """
    chosen = {name: load_class(name, ANALYSES, "analysis", Analysis) for name in names or ANALYSES}  # type: ignore[type-abstract]
    if names is None and data is None and retrieval is None:
        left_out = [name for name, kind in chosen.items() if kind.needs_tasks]
        announce(f"without --data or --retrieval these are left out: {', '.join(left_out)}")
        chosen = {name: kind for name, kind in chosen.items() if name not in left_out}
    options = options or {}
    strange = [name for name in options if name not in chosen]
    if strange:
        raise ConfigError(
            f"an option for {strange[0]!r}, which is not among the analyses that are made: {', '.join(chosen)}"
        )
    bare = [name for name, values in options.items() if not isinstance(values, Mapping)]
    if bare:
        raise ConfigError(f"an option for {bare[0]!r} names no option of it; write {bare[0]}.OPTION=VALUE")
    given = {"data": data, "retrieval": retrieval, "teacher": teacher, "announce": announce}
    analyses = {
        name: construct(kind, f"analysis {name}", options=options.get(name, {}), **given)
        for name, kind in chosen.items()
    }
    records: dict[str, dict[str, Any]] = {}
    refused: list[Exception] = []
    with TrainedRun.open(folder, cache=cache, trust_remote_code=trust_remote_code) as run:
        step = (run.record.get("exported") or {}).get("step", run.record.get("steps"))
        for name, analysis in analyses.items():
            announce(f"{name} of {folder}")
            started = time.perf_counter()
            try:
                result = analysis(run)
            except NOT_APPLICABLE as error:
                if names is not None:
                    raise
                announce(f"{name} of {folder} is left out: {error}")
                refused.append(error)
                continue
            record = {
                "analysis": name,
                "conclusion": analysis.conclusion(result),
                "options": dict(options.get(name, {})),
                "step": step,
                "seconds": round(time.perf_counter() - started, 3),
                "result": result,
            }
            try:
                text = json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False)
            except ValueError as error:
                raise EvaluationError(f"analysis {name} of {folder} gave a figure that is NaN or infinite") from error
            kept = folder / FOLDER / f"{analysis.name}.json"
            kept.parent.mkdir(exist_ok=True)
            with atomic_write(kept) as file:
                file.write(text.encode())
            records[name] = record
            made(name, record)
    if refused and not records:
        raise refused[0]
    return records


def int_option(option: str, value: Any, least: int, most: int | None = None) -> int:
    """The value of an option, such as "map.texts", that counts something.

    Raises:
        ConfigError: it is no whole number, or out of its range.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        raise ConfigError(
            f"{option} is {value!r}; expected a whole number from {least} {'on' if most is None else f'to {most}'}"
        )
    return value


def float_option(option: str, value: Any, *, above: float | None = None, least: float | None = None) -> float:
    """The finite value of an option that measures something; YAML reads 1e-4 as a text.

    Raises:
        ConfigError: it is no number, or out of its range.
    """
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not math.isfinite(found) or (above is not None and found <= above) or (least is not None and found < least):
        bound = f" above {above:g}" if above is not None else "" if least is None else f" from {least:g} on"
        raise ConfigError(f"{option} is {value!r}; expected a number{bound}")
    return found


def choice_option(option: str, value: Any, known: Sequence[Any]) -> Any:
    """The value of an option that names one of a few; flags are one of (True, False).

    Raises:
        ConfigError: it is none of them.
    """
    # 1 == True, and a list is no member of a set.
    if not any(type(value) is type(one) and value == one for one in known):
        words = [str(one).lower() if isinstance(one, bool) else str(one) for one in known]
        raise ConfigError(f"{option} is {value!r}; expected one of {', '.join(words)}")
    return value


def names_option(option: str, value: Any) -> list[str] | None:
    """The value of an option that lists names; a text is a comma list, None stays None.

    Raises:
        ConfigError: it is no list of texts, or an empty one.
    """
    if value is None:
        return None
    found = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if not isinstance(found, list | tuple) or not found or not all(isinstance(one, str) and one for one in found):
        raise ConfigError(f"{option} is {value!r}; expected a list of names")
    return list(found)
