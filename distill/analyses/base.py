"""What an analysis is, and how one is asked for and kept."""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from distill.analyses import ANALYSES
from distill.errors import ConfigError, EvaluationError
from distill.registry import construct, find
from distill.run_folder import ANALYSES as FOLDER
from distill.run_folder import read_record
from distill.trained_run import TrainedRun
from teacher_cache.storage.files import replacing


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
        self.data = data
        self.retrieval = retrieval
        self.teacher = teacher
        self.announce = announce

    @abstractmethod
    def __call__(self, run: TrainedRun) -> dict[str, Any]:
        """Plain JSON values, all finite.

        Raises:
            KnownError: the run lacks what is asked about.
        """

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
    announce: Callable[[str], None] = lambda line: None,
) -> dict[str, dict[str, Any]]:
    """Analyse a run and keep each answer as `analyses/NAME.json` in its folder, in place of an older one.

    Args:
        names: of `ANALYSES`, or "package.module:Class"; None is all that can be done with what is given.
        options: by name of the analysis.

    Returns:
        The records by name: `analysis`, `conclusion`, `options`, `step`, `seconds`, `result`.

    Raises:
        KnownError: an unknown name or option, or a run that lacks what is asked about.
    """
    chosen = {name: find(name, ANALYSES, "analysis", Analysis) for name in names or ANALYSES}  # type: ignore[type-abstract]
    if names is None and data is None and retrieval is None:
        chosen = {name: kind for name, kind in chosen.items() if not kind.needs_tasks}
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
    records = {}
    with TrainedRun.open(folder) as run:
        step = (run.record.get("exported") or {}).get("step", run.record.get("steps"))
        for name, analysis in analyses.items():
            announce(f"{name} of {folder}")
            started = time.perf_counter()
            result = analysis(run)
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
            with replacing(kept) as file:
                file.write(text.encode())
            records[name] = record
    return records


def kept_analyses(folder: Path) -> dict[str, dict[str, Any]]:
    """The records that `analyze` left in a run folder, by name.

    Raises:
        RunFolderError: one is not JSON.
    """
    found = {path.stem: read_record(folder / FOLDER, path.name) for path in sorted((folder / FOLDER).glob("*.json"))}
    return {name: record for name, record in found.items() if record is not None}
