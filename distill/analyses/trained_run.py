"""A run folder opened to look into: its student and objective at any checkpoint, beside what its teacher said."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_model

from distill.config import RunConfig, StudentConfig
from distill.errors import RunFolderError
from distill.run_folder import CONFIG, FINAL, RECORD, is_finished, read_record
from distill.student.student import Student, student_shape
from distill.training.checkpoints import WEIGHTS, checkpoint_step, complete_checkpoints
from distill.training.method import build_objective, check_held_out, held_out_digest, held_out_rows, with_recorded_names
from distill.training.targets import Targets
from distill.training.trainer import Distillation
from teacher_cache.errors import CacheNotFound
from teacher_cache.table.cache import TeacherCache


class TrainedRun:
    """A run that has checkpoints, its cache open for reading; close it, or use it in a `with`.

    Nothing is written, and torch's own random numbers stay where they are. No teacher is loaded, but by `batches` where
    the run had one online.

    Attributes:
        folder: of the run.
        config: with space and corpus as the run had them.
        record: what `run.json` says.
        targets: the teacher's side.
        manifest: the corpus it was trained on.
    """

    def __init__(self, folder: Path, config: RunConfig, record: dict[str, Any], cache: TeacherCache) -> None:
        self.folder = folder
        self.config = config
        self.record = record
        self.cache = cache
        self.targets = Targets(config, cache)
        self.space = self.targets.space
        self.manifest = cache.corpus(config.corpus)
        for what, found in (
            ("space", self.targets.to_json()["fingerprint"]),
            ("corpus", self.manifest.record.fingerprint),
        ):
            if record[what]["fingerprint"] != found:
                raise RunFolderError(
                    f"{folder} was trained with the {what} {record[what]['fingerprint']}, but {cache.path} has {found} "
                    "under its name by now; the run cannot be looked into without the one it had"
                )

    @classmethod
    def open(cls, folder: Path, *, cache: Path | None = None, trust_remote_code: bool = False) -> Self:
        """The run of a folder and its cache.

        Args:
            cache: where it lies by now; None is where the run's record says.
            trust_remote_code: run code that comes with the run's models. What its settings say does not count: a run
                folder may be somebody else's.

        Raises:
            RunFolderError: no run is there, its cache is not, or its space or corpus is another by now.
        """
        folder = Path(folder)
        record = read_record(folder)
        if record is None:
            raise RunFolderError(f"{folder} holds no run ({RECORD} is missing); name what `distill run` wrote")
        config = with_recorded_names(folder, RunConfig.load(folder / CONFIG))
        # Settings name the cache as seen from where the run was started, the record by its whole path.
        place = str(cache or record["cache"])
        try:
            table = TeacherCache.open(place)
        except CacheNotFound as error:
            raise RunFolderError(
                f"{folder} was trained on the cache {place}, which is not there; if it was moved, name it with --cache"
            ) from error
        try:
            trusted = config.student.trust_remote_code and trust_remote_code
            student = replace(config.student, trust_remote_code=trusted)
            teacher = replace(config.teacher, trust_remote_code=config.teacher.trust_remote_code and trust_remote_code)
            return cls(folder, replace(config, cache=place, student=student, teacher=teacher), record, table)
        except BaseException:
            table.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the cache."""
        self.cache.close()

    def checkpoints(self) -> list[Path]:
        """The whole ones, by step.

        Raises:
            RunFolderError: there is none.
        """
        found = complete_checkpoints(self.folder, self.record.get("processes", 1))
        if not found:
            raise RunFolderError(f"{self.folder} has no whole checkpoint; train with training.save_total_limit >= 1")
        return found

    def load(self, checkpoint: Path | None = None) -> Distillation:
        """Student and objective at a checkpoint; float32, on the CPU, in evaluation mode.

        By default at that of the exported student, which validation may have chosen, else at the newest.

        Raises:
            RunFolderError: there is no checkpoint, or it does not fit the run.
        """
        chosen = checkpoint or self._exported()
        source = self._any_student()
        student = Student.load(source)
        if source is self.config.student:
            self._require("tokenizer", student)
        model = self._distillation(student)
        try:
            load_model(model, str(chosen / WEIGHTS))
        except (RuntimeError, OSError) as error:
            reason = " ".join(str(error).split())[:200]
            raise RunFolderError(f"{chosen} does not hold the weights of this run: {reason}") from error
        return model.eval()

    def initial(self) -> Distillation:
        """What training began with: the student before the first step, and projections as random as they were.

        Raises:
            RunFolderError: the model it began with is another by now.
            StudentError: it is not there any more.
        """
        student = Student.load(self.config.student)
        self._require("weights", student)
        self._require("tokenizer", student)
        return self._distillation(student).eval()

    def held_out_rows(self) -> npt.NDArray[np.int64]:
        """Ascending rows of the texts that the run did not train on."""
        objective = build_objective(self.config, student_shape(self._any_student()), self.targets)
        return self._held_out(self.targets.skipped_rows(objective))

    def batches(self, model: Distillation, texts: int, size: int = 32, seed: int = 0) -> Iterator[dict[str, Any]]:
        """Batches of training records as the run's trainer makes them, a fixed random draw; arguments of `model`.

        Args:
            texts: records that are drawn, at most as many as there are.
            size: records a batch; a last one of a single record is left out, for losses that compare texts.
        """
        objective = model.objective
        skipped = self.targets.skipped_rows(objective)
        dataset = self.targets.dataset(self.manifest, objective, np.union1d(self._held_out(skipped), skipped))
        collator = self.targets.collator(self.manifest, objective, model.student)
        chosen = np.random.default_rng(seed).permutation(len(dataset))[:texts]
        for start in range(0, len(chosen), size):
            records = chosen[start : start + size].tolist()
            if len(records) > 1:
                yield collator(dataset.__getitems__(records))

    def _exported(self) -> Path:
        found = self.checkpoints()
        step = (self.record.get("exported") or {}).get("step", checkpoint_step(found[-1]))
        exported = [path for path in found if checkpoint_step(path) == step]
        if not exported:
            raise RunFolderError(
                f"{self.folder} exported the student of step {step}, whose checkpoint is not there any more; it has "
                f"those of {', '.join(str(checkpoint_step(path)) for path in found)}"
            )
        return exported[0]

    def _require(self, what: str, student: Student) -> None:
        """Refuse a student with another digest than the run began with."""
        known = self.record["student"][what]
        if student.digests[what] != known:
            raise RunFolderError(
                f"{self.folder} began with the student of {what} {known}, but {student.name} has "
                f"{student.digests[what]} by now"
            )

    def _any_student(self) -> StudentConfig:
        """A student of the run's shape and tokenizer: the model that it began with may lie elsewhere by now.

        The exported one serves, unless a projection was exported with it, which no student has.
        """
        if is_finished(self.folder) and not self.config.export.projection:
            return replace(self.config.student, model=str(self.folder / FINAL))
        return self.config.student

    def _distillation(self, student: Student) -> Distillation:
        with torch.random.fork_rng():
            torch.manual_seed(self.config.training.seed)  # as `run` seeds before the first random weight
            return Distillation(student, build_objective(self.config, student.shape, self.targets))

    def _held_out(self, skipped: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        rows = held_out_rows(self.config, self.manifest, self.cache.rows, without=skipped)
        check_held_out(self.folder, self.record, held_out_digest(self.cache, rows))
        return rows
