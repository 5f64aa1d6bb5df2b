"""One run: from a cache and a configuration to a trained, checked and exported student.

The run folder has `config.yaml` (resolved), `run.json` (digests of everything the run depends on, and its results),
`metrics.jsonl`, `checkpoint-N/` and, at the end, `final/`. Running again resumes from the last complete checkpoint and
ends with the same weights as an uninterrupted run.
"""

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from distill.config import RunConfig, resolve_precision
from distill.errors import ConfigError, RunFolderError
from distill.evaluation.agreement import agreement
from distill.export import load_export
from distill.export.card import model_card
from distill.run_folder import CONFIG, FINAL, RECORD, read_record
from distill.runs.cut_run import cut_for_run
from distill.student.cut_spec import FOLDER as STUDENT
from distill.student.student import Student, student_shape
from distill.training.arguments import training_arguments
from distill.training.assembly import Assembly
from distill.training.callbacks import TrainingProgress, ValidationReport
from distill.training.checkpoints import checkpoint_step, complete_checkpoints, last_checkpoint
from distill.training.method import (
    build_objective,
    build_sharpness,
    check_held_out,
    held_out_digest,
    held_out_rows,
    learned_projection,
    with_recorded_names,
)
from distill.training.targets import Targets
from distill.training.trainer import DistillTrainer, check_disk_space
from distill.training.validation import Validation, best, points
from teacher_cache.storage.files import atomic_write
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.joint import JointSpace
from teacher_cache.table.view import SpaceView

CHECKED_TEXTS = 50
# Settings that are paths and names; digests identify what they refer to.
NAMES = ("cache", "output_dir", "space", "corpus", "evaluation.data")
NEIGHBORS = 10
OTHER_FOLDER = "choose another `output_dir`"
LIBRARIES = ("teacher-cache", "torch", "transformers", "sentence-transformers", "numpy")


@dataclass(frozen=True)
class RunResult:
    """The result of a run.

    Attributes:
        final: folder of the exported student.
        resumed_from: step of the checkpoint that training resumed from, 0 for none.
        finished_before: whether the folder already had this run, finished, so that nothing was done.
        seconds: of the last call, without interrupted ones.
        loss: mean over the last logged steps; None if no step was logged.
        agreement: of the student's vectors `before` and `after` training, and `projected` ones if a projection is
            exported; None if no texts were held out.
        validation: the `files` by digest, `keep`, `best_step`, `points` (each `step`, `epoch`, `validation`, `seconds`)
            and the `seconds` of all; None without validation files.
        data_wait_share: share of the step time spent waiting for data; None if no step was timed.
    """

    output_dir: str
    final: str
    steps: int
    resumed_from: int
    finished_before: bool
    seconds: float
    loss: float | None
    agreement: dict[str, Any] | None
    validation: dict[str, Any] | None = None
    data_wait_share: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run(
    config: RunConfig,
    *,
    resume: bool = False,
    announce: Callable[[str], None] = lambda line: None,
    report: Callable[[TrainingProgress], None] = lambda progress: None,
) -> RunResult:
    """Train the student of `config`, or resume its training.

    Args:
        resume: raise an error if there is no checkpoint to resume from.
        announce: called with each line about teacher, corpus, student and method before training.
        report: called with the progress after every step.

    Raises:
        KnownError: configuration, cache, student or run folder do not fit together; raised before the first step.
    """
    start = time.monotonic()
    config.check()
    if not config.cache or not config.output_dir:
        raise ConfigError("cache is not set (--cache)" if not config.cache else "output_dir is not set (--output-dir)")
    folder = Path(config.output_dir)
    _check_settings(folder, config)
    config = with_recorded_names(folder, config)
    validation = Validation.from_config(config.evaluation)
    files = None if validation is None else {"files": validation.read()}
    if resume and not complete_checkpoints(folder):
        raise RunFolderError(f"nothing to resume: {folder} has no complete checkpoint; leave `resume` out to start")
    with TeacherCache.open(config.cache) as cache:
        assembly = Assembly.load(cut_for_run(config, cache, announce), cache)
        student, objective, space = assembly.student, assembly.objective, assembly.targets.space
        # Raise errors before training.
        learned_projection(config, objective)
        export = load_export(config.export.format)
        held_out = held_out_rows(config, assembly.manifest, cache.rows, without=assembly.skipped)
        record = _describe(assembly) | {"validation": files}
        record["corpus"] |= {"held_out": len(held_out), "held_out_digest": held_out_digest(cache, held_out)}
        finished = _finished_record(folder, record)
        if finished is not None:
            return _result(folder, finished, finished_before=True)
        dataset, checkpoint = assembly.dataset(held_out), last_checkpoint(folder)
        trainer = assembly.trainer(DistillTrainer, dataset, assembly.collator(), report=report, validation=validation)
        trainer.add_callback(ValidationReport(announce))
        writes = trainer.is_world_process_zero()
        if writes:
            _write(folder / CONFIG, config.to_yaml())
            _write(folder / RECORD, json.dumps(record, indent=2, ensure_ascii=False))
        _announce(announce, record, len(dataset), checkpoint_step(checkpoint))
        if trainer.model.transform is not None:
            record["targets"] = trainer.model.transform.to_json()
        if checkpoint is None and (fitted := assembly.fit_heads(trainer.model, dataset)):
            announce(f"heads: least squares on {fitted:,} texts")
        before = _agreement(student, cache, space, held_out)
        if checkpoint is None or not trainer.restore(checkpoint):
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        validated = points(trainer.state.log_history)
        exported = best(validated)["step"] if config.keeps_best else trainer.state.global_step
        trainer.load_step(exported)
        student.cpu()
        projection = learned_projection(config, objective)
        record |= {
            "status": "finished",
            "steps": trainer.state.global_step,
            "seconds": round(time.monotonic() - start, 3),
            "loss": next((line["loss"] for line in reversed(trainer.state.log_history) if "loss" in line), None),
            "resumed_from": checkpoint_step(checkpoint),
            "cost": trainer.clock.cost(),
            "validation": files and files | _validation_record(config, validated),
            "agreement": before
            and {
                "before": before,
                "after": _agreement(student, cache, space, held_out),
                "projected": None if projection is None else _agreement(student, cache, space, held_out, projection),
            },
        }
        if writes:
            needed = 2 * 4 * record["student"]["parameters"]
            check_disk_space(folder, needed, "the exported student, written and then renamed,")
            rows = np.linspace(0, cache.rows - 1, min(CHECKED_TEXTS, cache.rows)).astype(np.int64)
            cosine = export(student, projection, config.export.normalize, folder / FINAL, cache.texts(rows))
            record["exported"] = {"step": exported, "texts": len(rows), "smallest_cosine": cosine}
            _write(folder / FINAL / "README.md", model_card(record))
            _write(folder / RECORD, json.dumps(record, indent=2, ensure_ascii=False))
    _announce_validation(announce, record, exported)
    return _result(folder, record, finished_before=False)


def _announce(announce: Callable[[str], None], record: dict[str, Any], records: int, step: int) -> None:
    corpus, student = record["corpus"], record["student"]
    announce(f"teacher: {record['space']['description']}")
    announce(
        f"corpus: {corpus['name']}, {records:,} of {corpus['records']:,} records to train on, {corpus['held_out']} "
        "texts held out"
    )
    prompt = f"prompt {student['prompt']!r}" if student["prompt"] else "no prompt"
    announce(
        f"student: {student['name']} · {student['layers']} layers of {student['dim']} · {student['pooling']} pooling · "
        f"{prompt} · at most {student['max_length']} tokens"
    )
    resumed = f", resuming from step {step:,}" if step else ""
    method, sharpness = record["objective"]["name"], record["sharpness"]["name"]
    announce(f"method: {method}, sharpness {sharpness}, {record['precision']}{resumed}")


def _validation_record(config: RunConfig, validated: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "keep": config.evaluation.keep,
        "best_step": best(validated)["step"],
        "points": validated,
        "seconds": round(sum(one["seconds"] for one in validated), 3),
    }


def _announce_validation(announce: Callable[[str], None], record: dict[str, Any], exported: int) -> None:
    validation = record["validation"]
    if validation:
        top = best(validation["points"])
        announce(
            f"validation: step {top['step']:,} of {record['steps']:,} is the best, average "
            f"{top['validation']['average']:.2f}; step {exported:,} is exported; {len(validation['points'])} "
            f"evaluations took {validation['seconds']:.0f} s"
        )


def check_run(config: RunConfig) -> None:
    """Check settings and cache as `run` does, without loading weights or writing anything.

    Raises:
        KnownError: as `run`.
    """
    config.check()
    config = with_recorded_names(Path(config.output_dir), config)
    Validation.from_config(config.evaluation)
    shape = student_shape(config.student)
    with TeacherCache.open(config.cache) as cache:
        targets, manifest = Targets(config, cache), cache.corpus(config.corpus)
        objective = build_objective(config, shape, targets)
        targets.check(objective, manifest)
        learned_projection(config, objective)
        load_export(config.export.format)
        build_sharpness(config, torch.nn.LayerNorm(1))
        batches = -(-len(manifest) // config.training.per_device_train_batch_size)
        training_arguments(config, batches, objective=objective)


def _agreement(
    student: Student,
    cache: TeacherCache,
    space: SpaceView | JointSpace,
    rows: npt.NDArray[np.int64],
    projection: Tensor | None = None,
) -> dict[str, Any] | None:
    """Agreement of the student's vectors, or their projections, with the teacher's; None for too few rows."""
    if len(rows) <= NEIGHBORS + 1:
        return None
    vectors = student.encode(cache.texts(rows), projection=projection)
    return asdict(agreement(vectors, space.gather(rows), NEIGHBORS))


def _describe(assembly: Assembly) -> dict[str, Any]:
    """The part of `run.json` that is known before training."""
    config, student = assembly.config, assembly.student
    corpus = assembly.manifest.record
    sections = asdict(config)
    return {
        "status": "running",
        "cache": str(Path(config.cache).resolve()),
        "space": assembly.targets.to_json(),
        "teacher": sections["teacher"],
        "corpus": {
            "name": corpus.name,
            "fingerprint": corpus.fingerprint,
            "records": corpus.records,
            "distinct": corpus.distinct,
        },
        "student": {
            "name": student.name,
            "dim": student.shape.dim,
            "layers": student.shape.layers,
            "pooling": student.pooling,
            "max_length": student.max_length,
            "prompt": student.prompt,
            "parameters": sum(parameter.numel() for parameter in student.parameters()),
            **student.digests,
        },
        "in_teacher_space": config.export.projection or assembly.objective.in_teacher_space,
        **{name: sections[name] for name in ("objective", "sharpness", "training", "data", "evaluation", "export")},
        "precision": resolve_precision(config.training.precision),
        "processes": int(os.environ.get("WORLD_SIZE", 1)),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in LIBRARIES},
    }


def _check_settings(folder: Path, config: RunConfig) -> None:
    """Check that the folder is new, or has a run with the same settings."""
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not (folder / CONFIG).exists():
        if all(path.name in (RECORD, STUDENT) or path.name.endswith(".writing") for path in folder.iterdir()):
            return
        raise RunFolderError(f"{folder} is not empty and not a run folder (no {CONFIG}); {OTHER_FOLDER}")
    different = config.difference(RunConfig.load(folder / CONFIG))
    # Paths and names may change between two starts; `_finished_record` compares digests.
    different = {key: pair for key, pair in different.items() if not {key, key.partition(".")[0]} & {*NAMES}}
    if different:
        listed = "; ".join(f"{key}: {old!r} there, {new!r} now" for key, (new, old) in different.items())
        raise RunFolderError(f"{folder} has a run with other settings ({listed}); {OTHER_FOLDER}")


def _finished_record(folder: Path, record: dict[str, Any]) -> dict[str, Any] | None:
    """The record of this run if it is finished; None if it has to be trained."""
    before = read_record(folder)
    if before is None:
        return None
    for section, digest in (
        ("space", "fingerprint"),
        ("corpus", "fingerprint"),
        ("student", "weights"),
        ("student", "tokenizer"),
    ):
        new, old = record[section][digest], before.get(section, {}).get(digest)
        if new != old:
            raise RunFolderError(
                f"{folder} was trained with the {section} of {digest} {old}, now it is {new}; {OTHER_FOLDER}"
            )
    new, old = ((one.get("validation") or {}).get("files") for one in (record, before))
    if new != old:
        raise RunFolderError(
            f"{folder} was trained with {_format_files(old)}, now there are {_format_files(new)}; {OTHER_FOLDER}"
        )
    if before.get("status") == "finished" and (folder / FINAL).is_dir():
        return before
    check_held_out(folder, before, record["corpus"]["held_out_digest"])
    if record["precision"] != before.get("precision"):
        raise RunFolderError(
            f"{folder} was trained in {before.get('precision')}, this machine would resume in {record['precision']}; "
            f"set training.precision, or {OTHER_FOLDER}"
        )
    if record["processes"] != before.get("processes", 1):
        raise RunFolderError(
            f"{folder} was trained by {before.get('processes', 1)} processes, now there are {record['processes']}, "
            f"which would see other records; start as many, or {OTHER_FOLDER}"
        )
    return None


def _format_files(files: dict[str, str] | None) -> str:
    if not files:
        return "no validation files"
    return f"the validation files {', '.join(f'{name} ({digest[:8]})' for name, digest in files.items())}"


def _result(folder: Path, record: dict[str, Any], *, finished_before: bool) -> RunResult:
    return RunResult(
        output_dir=str(folder),
        final=str(folder / FINAL),
        steps=record["steps"],
        resumed_from=record["resumed_from"],
        finished_before=finished_before,
        seconds=record["seconds"],
        loss=record["loss"],
        agreement=record["agreement"],
        validation=record.get("validation"),
        data_wait_share=(record.get("cost") or {}).get("data_wait_share"),
    )


def _write(path: Path, text: str) -> None:
    with atomic_write(path) as file:
        file.write(text.encode())
