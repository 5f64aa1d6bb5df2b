"""The base class of analyses, and how they are run and saved."""

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
from distill.evaluation.base import Announce, Progress, no_progress, silent
from distill.evaluation.encoders import CachedEncoder
from distill.registry import construct, load_class
from distill.run_folder import ANALYSES as FOLDER
from teacher_cache.errors import CacheError
from teacher_cache.storage.files import atomic_write
from teacher_cache.table.joint import JointSpace
from teacher_cache.teachers.base import TeacherOptions

# Errors that mean that the run or the given files lack what the analysis needs; other errors are never skipped.
NOT_APPLICABLE = (NeedsNotMet, EvaluationError, RunFolderError, StudentError, CacheError)
# Of the generators of NumPy and scikit-learn.
LARGEST_SEED = 2**32 - 1


class Analysis(ABC):
    """Computes figures of a trained run that a plot shows.

    An analysis is one file in this package: a subclass, and one line in `distill.analyses.ANALYSES`. Its options are
    keyword arguments of its constructor.

    Attributes:
        name: as in the table.
        needs_tasks: whether it scores on tasks, so that `data` or `retrieval` must be given.
        data: folder of the tasks' files.
        retrieval: folder of a collection in BEIR layout.
        teacher: folder or hub id of the run's teacher, to encode texts that the cache lacks.
        announce: called with a line about each intermediate result.
        progress: called with every phase, its done and total counts, and details.
    """

    name: ClassVar[str]
    needs_tasks: ClassVar[bool] = False

    def __init__(
        self,
        *,
        data: Path | None = None,
        retrieval: Path | None = None,
        teacher: str | None = None,
        announce: Announce = silent,
        progress: Progress = no_progress,
    ) -> None:
        if self.needs_tasks and data is None and retrieval is None:
            raise ConfigError(f"analysis {self.name} scores on tasks; name their folder (`data` or `retrieval`)")
        for argument, path in {"data": data, "retrieval": retrieval}.items():
            if path is not None and not path.exists():
                raise ConfigError(f"`{argument}` is {path}, which does not exist; name where the tasks' files are")
        self.data = data
        self.retrieval = retrieval
        self.teacher = teacher
        self.announce = announce
        self.progress = progress

    @abstractmethod
    def __call__(self, run: TrainedRun) -> dict[str, Any]:
        """The result: plain JSON values, all finite.

        Raises:
            KnownError: the run lacks what the analysis needs; one of `NOT_APPLICABLE`.
        """

    def teacher_encoder(self, run: TrainedRun) -> CachedEncoder:
        """The run's teacher as in training: queries and documents too have the prompt of its space.

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
        """One sentence with the main figures of the result."""


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
    announce: Announce = silent,
    progress: Progress = no_progress,
    saved: Callable[[str, dict[str, Any]], None] = lambda name, record: None,
) -> dict[str, dict[str, Any]]:
    """Analyze a run and save each result as `analyses/NAME.json` in its folder, replacing an older one.

    Args:
        names: of `ANALYSES`, or "package.module:Class"; None is all that the run and the given files allow: the others
            are announced with the reason, and an error is raised only if none is left.
        cache, trust_remote_code: see `TrainedRun.open`.
        announce: called with a line about each intermediate result, and about analyses that are skipped.
        saved: called with the name and the record of each analysis as soon as it is saved.

    Returns:
        The records by name: `analysis`, `conclusion`, `options`, `step`, `seconds`, `result`.

    Raises:
        KnownError: an unknown name or option, or the run lacks what a named analysis needs.
    """
    chosen = {name: load_class(name, ANALYSES, "analysis", Analysis) for name in names or ANALYSES}  # type: ignore[type-abstract]
    if names is None and data is None and retrieval is None:
        skipped = [name for name, kind in chosen.items() if kind.needs_tasks]
        announce(f"skipped, as no tasks are given (`data` or `retrieval`): {', '.join(skipped)}")
        chosen = {name: kind for name, kind in chosen.items() if name not in skipped}
    options = options or {}
    for name, values in options.items():
        if name not in chosen:
            raise ConfigError(f"an option for {name!r}, which is not one of the analyses to run: {', '.join(chosen)}")
        if not isinstance(values, Mapping):
            raise ConfigError(f"{name}={values!r} names no option of the analysis; write {name}.OPTION=VALUE")
    given = {"data": data, "retrieval": retrieval, "teacher": teacher, "announce": announce, "progress": progress}
    analyses = {
        name: construct(kind, f"analysis {name}", options=options.get(name, {}), **given)
        for name, kind in chosen.items()
    }
    records: dict[str, dict[str, Any]] = {}
    errors: list[Exception] = []
    with TrainedRun.open(folder, cache=cache, trust_remote_code=trust_remote_code) as run:
        step = (run.record.get("exported") or {}).get("step", run.record.get("steps"))
        for number, (name, analysis) in enumerate(analyses.items()):
            progress(f"analyzing {folder.name}", number, len(analyses), name)
            started = time.perf_counter()
            try:
                result = analysis(run)
            except NOT_APPLICABLE as error:
                if names is not None:
                    raise
                announce(f"{name} of {folder} is skipped: {error}")
                errors.append(error)
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
                raise EvaluationError(f"analysis {name} of {folder}: a figure is NaN or infinite") from error
            path = folder / FOLDER / f"{analysis.name}.json"
            path.parent.mkdir(exist_ok=True)
            with atomic_write(path) as file:
                file.write(text.encode())
            records[name] = record
            saved(name, record)
    if errors and not records:
        raise errors[0]
    return records


def int_option(option: str, value: Any, least: int, most: int | None = None) -> int:
    """The value of an option that is a whole number, such as "map.texts"."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        raise ConfigError(
            f"{option} is {value!r}; expected a whole number "
            + (f"of at least {least}" if most is None else f"from {least} to {most}")
        )
    return value


def float_option(option: str, value: Any, *, above: float | None = None, least: float | None = None) -> float:
    """The value of an option that is a finite number; YAML reads 1e-4 as a text."""
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not math.isfinite(found) or (above is not None and found <= above) or (least is not None and found < least):
        bound = f" above {above:g}" if above is not None else "" if least is None else f" of at least {least:g}"
        raise ConfigError(f"{option} is {value!r}; expected a number{bound}")
    return found


def choice_option(option: str, value: Any, known: Sequence[Any]) -> Any:
    """The value of an option that is one of `known`, such as (True, False)."""
    # By type and value: 1 == True. Not `in`: a value may be unhashable.
    if not any(type(value) is type(one) and value == one for one in known):
        words = [str(one).lower() if isinstance(one, bool) else str(one) for one in known]
        raise ConfigError(f"{option} is {value!r}; expected one of {', '.join(words)}")
    return value


def names_option(option: str, value: Any) -> list[str] | None:
    """The value of an option that lists names; a text is split at commas, None stays None."""
    if value is None:
        return None
    found = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if not isinstance(found, list | tuple) or not found or not all(isinstance(one, str) and one for one in found):
        raise ConfigError(f"{option} is {value!r}; expected a list of names")
    return list(found)
