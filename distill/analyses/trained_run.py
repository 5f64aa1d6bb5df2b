"""A trained run opened for analysis: student and objective at any checkpoint, and the teacher's vectors."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from distill.config import RunConfig, StudentConfig
from distill.data.dataset import CachedDataset
from distill.errors import RunFolderError
from distill.objectives.base import Objective
from distill.run_folder import CONFIG, FINAL, RECORD, is_finished, read_record
from distill.student.cut_spec import trained_student
from distill.student.student import Student, student_shape
from distill.training.averaging import load_student
from distill.training.checkpoints import checkpoint_step, complete_checkpoints
from distill.training.head_init import fit_heads
from distill.training.method import build_objective, check_held_out, held_out_digest, held_out_rows, with_recorded_names
from distill.training.targets import Targets
from distill.training.trainer import Distillation
from teacher_cache.errors import CacheNotFound
from teacher_cache.table.cache import TeacherCache


class TrainedRun:
    """A run with checkpoints, its cache open for reading; close it, or use it as a context manager.

    Nothing is written, and the state of torch's random generator is preserved. A teacher is loaded only by `batches`,
    if the run had one online.
    """

    def __init__(self, folder: Path, config: RunConfig, record: dict[str, Any], cache: TeacherCache) -> None:
        self.folder = folder
        self.config = config
        self.record = record
        self.cache = cache
        self.targets = Targets(config, cache)
        self.space = self.targets.space
        self.manifest = cache.corpus(config.corpus)
        fingerprints = {"space": self.targets.to_json()["fingerprint"], "corpus": self.manifest.record.fingerprint}
        for what, found in fingerprints.items():
            if record[what]["fingerprint"] != found:
                raise RunFolderError(
                    f"{folder} was trained with the {what} {record[what]['fingerprint']}, but {cache.path} now has "
                    f"{found} under its name; the run cannot be analyzed with another one"
                )

    @classmethod
    def open(cls, folder: Path, *, cache: Path | None = None, trust_remote_code: bool = False) -> Self:
        """The run of a folder and its cache.

        Args:
            cache: its folder; None is the one in the run's record.
            trust_remote_code: run code that comes with the run's models. The run's own setting is not enough: a run
                folder may come from somebody else.

        Raises:
            RunFolderError: the folder is not a run, its cache is missing, or its space or corpus has changed.
        """
        folder = Path(folder)
        record = read_record(folder)
        if record is None:
            raise RunFolderError(f"{folder} is not a run folder ({RECORD} is missing); name one of `distill run`")
        config = with_recorded_names(folder, RunConfig.load(folder / CONFIG))
        # The path in the settings may be relative to where the run was started; the record has the absolute one.
        place = str(cache or record["cache"])
        try:
            table = TeacherCache.open(place)
        except CacheNotFound as error:
            raise RunFolderError(
                f"{folder} was trained on the cache {place}, which is missing; if it was moved, name it (`cache`)"
            ) from error
        try:
            trusted = config.student.trust_remote_code and trust_remote_code
            student = trained_student(replace(config.student, trust_remote_code=trusted), folder)
            teacher = replace(config.teacher, trust_remote_code=config.teacher.trust_remote_code and trust_remote_code)
            return cls(folder, replace(config, cache=place, student=student, teacher=teacher), record, table)
        except BaseException:
            table.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.cache.close()

    def checkpoints(self) -> list[Path]:
        """The complete ones, by step."""
        found = complete_checkpoints(self.folder, self.record.get("processes", 1))
        if not found:
            raise RunFolderError(f"{self.folder} has no complete checkpoint; train with training.save_total_limit >= 1")
        return found

    def load(self, checkpoint: Path | None = None) -> Distillation:
        """Student and objective at a checkpoint, by default the exported one: float32, CPU, evaluation mode.

        Of a run that averages weights, the averaged ones.
        """
        chosen = checkpoint or self._exported()
        source = self._any_student()
        student = Student.load(source)
        if source is self.config.student:
            self._require("tokenizer", student)
        model = self._distillation(student)
        try:
            load_student(model, chosen)
        except (RuntimeError, OSError) as error:
            reason = " ".join(str(error).split())[:200]
            raise RunFolderError(f"{chosen} does not hold the weights of this run: {reason}") from error
        return model.eval()

    def initial(self) -> Distillation:
        """Student and objective before the first step, with the same initial projections."""
        student = Student.load(self.config.student)
        self._require("weights", student)
        self._require("tokenizer", student)
        model = self._distillation(student)
        fits_heads = self.config.training.head_init == "least_squares"
        if fits_heads or model.transform is not None:
            dataset = self._training_records(model.objective)
            if model.transform is not None:
                model.transform.fit(dataset)
            if fits_heads:
                fit_heads(model, dataset, self.config.training.seed)
        return model.eval()

    def held_out_rows(self) -> npt.NDArray[np.int64]:
        """Ascending rows of the held-out texts."""
        objective = build_objective(self.config, student_shape(self._any_student()), self.targets)
        return self._held_out(self.targets.skipped_rows(objective))

    def sample_rows(self, count: int) -> tuple[npt.NDArray[np.int64], bool]:
        """At most `count` evenly spread rows of held-out texts, else of the corpus, and whether they are held out."""
        rows = self.without_quarantined(self.held_out_rows())
        held_out = bool(len(rows))
        return evenly_spread(rows if held_out else self.corpus_rows(), count), held_out

    def corpus_rows(self) -> npt.NDArray[np.int64]:
        """Ascending rows of the corpus that have a vector."""
        return self.without_quarantined(self.manifest.distinct_rows(self.cache.rows))

    def without_quarantined(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.setdiff1d(rows, np.array(sorted(self.space.quarantined()), dtype=np.int64))

    def batches(self, model: Distillation, texts: int, size: int = 32, seed: int = 0) -> Iterator[dict[str, Any]]:
        """Batches of a random sample of training records, as the run's trainer makes them; arguments of `model`.

        Args:
            texts: records in the sample, at most all.
            size: records per batch; a last batch of a single record is dropped, as losses compare texts.
        """
        objective = model.objective
        dataset = self._training_records(objective)
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
                f"{self.folder} exported the student of step {step}, whose checkpoint is missing; it has those of"
                f" {', '.join(str(checkpoint_step(path)) for path in found)}"
            )
        return exported[0]

    def _require(self, what: str, student: Student) -> None:
        """Check that a student has the digest of the one that training started from."""
        known = self.record["student"][what]
        if student.digests[what] != known:
            raise RunFolderError(
                f"{self.folder} was trained from the student of {what} {known}, but {student.name} now has "
                f"{student.digests[what]}"
            )

    def _any_student(self) -> StudentConfig:
        """A student of the run's shape and tokenizer; the model that training started from may have been moved.

        It is the exported one, unless a projection was exported with it, which students do not have.
        """
        if is_finished(self.folder) and not self.config.export.projection:
            return replace(self.config.student, model=str(self.folder / FINAL))
        return self.config.student

    def _distillation(self, student: Student) -> Distillation:
        with torch.random.fork_rng():
            torch.manual_seed(self.config.training.seed)  # as `run` seeds it before the first random weight
            objective = build_objective(self.config, student.shape, self.targets)
            return Distillation(student, objective, self.targets.transform())

    def _training_records(self, objective: Objective) -> CachedDataset:
        skipped = self.targets.skipped_rows(objective)
        return self.targets.dataset(self.manifest, objective, np.union1d(self._held_out(skipped), skipped))

    def _held_out(self, skipped: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        rows = held_out_rows(self.config, self.manifest, self.cache.rows, without=skipped)
        check_held_out(self.folder, self.record, held_out_digest(self.cache, rows))
        return rows


def evenly_spread(items: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """At most `count` of the items, evenly spread and with the first and the last one."""
    return items[np.unique(np.linspace(0, len(items) - 1, min(count, len(items))).astype(np.int64))]
