"""One run: from a cache and a configuration to a trained, checked and exported student.

The run folder holds `config.yaml` (resolved), `run.json` (what exactly was trained on what), `metrics.jsonl`,
`checkpoint-N/` and, at the end, `final/`. The same command again goes on from the last whole checkpoint, and
ends with the weights that an uninterrupted run would have had.
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
# Settings that say where something is.
NAMES = ("cache", "output_dir", "space", "corpus", "evaluation.data")
NEIGHBOURS = 10
LIBRARIES = ("teacher-cache", "torch", "transformers", "sentence-transformers", "numpy")


@dataclass(frozen=True)
class RunResult:
    """What a run left.

    Attributes:
        final: the exported student.
        resumed_from: step of the checkpoint it went on from, 0 when it began anew.
        finished_before: the folder already held this very run, nothing was done.
        seconds: that the last call took, not those that were stopped before it.
        loss: mean of the last steps that were logged together; None when none was.
        agreement: of the student's own vectors `before` and `after`, and where a projection is exported of the
            `projected` ones; None when nothing was held out.
        data_wait_share: of the time of the steps, what was waited for data; None when none was counted.
        validation: the `files` by digest, `keep`, `best_step`, `points` (each `step`, `epoch`, `validation`, `seconds`)
            and the `seconds` of all; None when the settings name no validation files.
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
    """Train, or go on training, the student that `config` describes.

    Args:
        resume: refuse to begin anew when there is no checkpoint to go on from.
        announce: is told, line by line, what is going to be trained on what, before it is.
        report: called with the progress after every step.

    Raises:
        KnownError: anything in the configuration, cache, student or folder that does not fit, before a step.
    """
    started = time.monotonic()
    config.check()
    if not config.cache or not config.output_dir:
        raise ConfigError(f"{'cache' if not config.cache else 'output_dir'} is not set; name it in the YAML or flags")
    folder = Path(config.output_dir)
    _check_settings(folder, config)
    config = with_recorded_names(folder, config)
    validation = Validation.from_config(config.evaluation)
    files = None if validation is None else {"files": validation.read()}
    if resume and not complete_checkpoints(folder):
        raise RunFolderError(f"nothing to resume: {folder} has no whole checkpoint; leave --resume out to begin")
    with TeacherCache.open(config.cache) as cache:
        made = Assembly.load(config, cache)
        student, objective, space, manifest = made.student, made.objective, made.targets.space, made.manifest
        # Refused before training rather than after.
        learned_projection(config, objective)
        export = load_export(config.export.format)
        held_out = held_out_rows(config, manifest, cache.rows, without=made.skipped)
        record = _describe(made) | {"validation": files}
        record["corpus"] |= {"held_out": len(held_out), "held_out_digest": held_out_digest(cache, held_out)}
        done = _same_run(folder, record)
        if done is not None:
            return _result(folder, done, finished_before=True)
        dataset, checkpoint = made.dataset(held_out), last_checkpoint(folder)
        trainer = made.trainer(DistillTrainer, dataset, made.collator(), report=report, validation=validation)
        trainer.add_callback(ValidationReport(announce))
        leads = trainer.is_world_process_zero()  # of several processes, one writes
        if leads:
            _write(folder / CONFIG, config.to_yaml())
            _write(folder / RECORD, json.dumps(record, indent=2, ensure_ascii=False))
        _announce(announce, record, len(dataset), checkpoint_step(checkpoint))
        before = _agreement(student, cache, space, held_out)
        if checkpoint is None or not trainer.restore(checkpoint):
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        scored = points(trainer.state.log_history)
        taken = best(scored)["step"] if config.keeps_best else trainer.state.global_step
        trainer.load_step(taken)
        student.cpu()
        projection = learned_projection(config, objective)
        record |= {
            "status": "finished",
            "steps": trainer.state.global_step,
            "seconds": round(time.monotonic() - started, 3),
            "loss": next((line["loss"] for line in reversed(trainer.state.log_history) if "loss" in line), None),
            "resumed_from": checkpoint_step(checkpoint),
            "cost": trainer.clock.cost(),
            "validation": files and files | _validated(config, scored),
            "agreement": before
            and {
                "before": before,
                "after": _agreement(student, cache, space, held_out),
                "projected": None if projection is None else _agreement(student, cache, space, held_out, projection),
            },
        }
        if leads:
            needed = 2 * 4 * record["student"]["parameters"]
            check_disk_space(folder, needed, "the exported student, written and then renamed,")
            rows = np.linspace(0, cache.rows - 1, min(CHECKED_TEXTS, cache.rows)).astype(np.int64)
            cosine = export(student, projection, config.export.normalize, folder / FINAL, cache.texts(rows))
            record["exported"] = {"step": taken, "texts": len(rows), "smallest_cosine": cosine}
            _write(folder / FINAL / "README.md", model_card(record))
            _write(folder / RECORD, json.dumps(record, indent=2, ensure_ascii=False))
    _announce_choice(announce, record, taken)
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
    going_on = f", going on from step {step:,}" if step else ""
    method, sharpness = record["objective"]["name"], record["sharpness"]["name"]
    announce(f"method: {method}, sharpness {sharpness}, {record['precision']}{going_on}")


def _validated(config: RunConfig, scored: list[dict[str, Any]]) -> dict[str, Any]:
    """What the evaluations said, and what they cost."""
    return {
        "keep": config.evaluation.keep,
        "best_step": best(scored)["step"],
        "points": scored,
        "seconds": round(sum(one["seconds"] for one in scored), 3),
    }


def _announce_choice(announce: Callable[[str], None], record: dict[str, Any], taken: int) -> None:
    validation = record["validation"]
    if validation:
        top = best(validation["points"])
        announce(
            f"validation: step {top['step']:,} of {record['steps']:,} is the best, average "
            f"{top['validation']['average']:.2f}; exported is step {taken:,}; {len(validation['points'])} evaluations "
            f"took {validation['seconds']:.0f} s"
        )


def check_run(config: RunConfig) -> None:
    """Refuse what `run` would refuse of these settings and this cache; no weights are loaded, nothing is written.

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
    """Of the student's own vectors, or of those that it projects into the teacher's space."""
    if len(rows) <= NEIGHBOURS + 1:
        return None
    vectors = student.encode(cache.texts(rows), projection=projection)
    return asdict(agreement(vectors, space.gather(rows), NEIGHBOURS))


def _describe(made: Assembly) -> dict[str, Any]:
    """What the run depends on, as `run.json` keeps it."""
    config, student = made.config, made.student
    corpus = made.manifest.record
    sections = asdict(config)
    return {
        "status": "running",
        "cache": str(Path(config.cache).resolve()),
        "space": made.targets.to_json(),
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
        "in_teacher_space": config.export.projection or made.objective.in_teacher_space,
        "objective": sections["objective"],
        "sharpness": sections["sharpness"],
        "training": sections["training"],
        "data": sections["data"],
        "evaluation": sections["evaluation"],
        "export": sections["export"],
        "precision": resolve_precision(config.training.precision),
        "processes": int(os.environ.get("WORLD_SIZE", 1)),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in LIBRARIES},
    }


def _check_settings(folder: Path, config: RunConfig) -> None:
    """The folder is new, or holds a run with these very settings.

    Raises:
        RunFolderError: it holds another run, or no run at all.
    """
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not (folder / CONFIG).exists():
        if all(path.name == RECORD or path.name.endswith(".writing") for path in folder.iterdir()):
            return
        raise RunFolderError(f"{folder} is not empty and not a run folder (no {CONFIG}); choose another --output-dir")
    different = config.difference(RunConfig.load(folder / CONFIG))
    # What a folder, a space or a corpus is called may change between two starts; what it is, is checked by digests.
    different = {key: pair for key, pair in different.items() if not {key, key.partition(".")[0]} & {*NAMES}}
    if different:
        listed = "; ".join(f"{key}: {theirs!r} there, {mine!r} now" for key, (mine, theirs) in different.items())
        raise RunFolderError(f"{folder} holds a run with other settings ({listed}); choose another --output-dir")


def _same_run(folder: Path, record: dict[str, Any]) -> dict[str, Any] | None:
    """The record of this very run when it is finished; None when there is something to do.

    A checkpoint is only ever continued, and a finished student only ever handed out, for the very teacher's
    vectors, texts and weights that it was trained from.

    Raises:
        RunFolderError: one of them is another by now.
    """
    before = read_record(folder)
    if before is None:
        return None
    for what, part in (
        ("space", "fingerprint"),
        ("corpus", "fingerprint"),
        ("student", "weights"),
        ("student", "tokenizer"),
    ):
        mine, theirs = record[what][part], before.get(what, {}).get(part)
        if mine != theirs:
            raise RunFolderError(
                f"{folder} was trained with the {what} of {part} {theirs}, this command means {what} {part} {mine}; "
                "choose another --output-dir"
            )
    mine, theirs = ((found.get("validation") or {}).get("files") for found in (record, before))
    if mine != theirs:
        raise RunFolderError(
            f"{folder} was trained with {_named(theirs)}, this command means {_named(mine)}; choose another "
            "--output-dir"
        )
    if before.get("status") == "finished" and (folder / FINAL).is_dir():
        return before
    check_held_out(folder, before, record["corpus"]["held_out_digest"])
    if record["precision"] != before.get("precision"):
        raise RunFolderError(
            f"{folder} was trained in {before.get('precision')}, this machine would go on in "
            f"{record['precision']}; set training.precision, or choose another --output-dir"
        )
    if record["processes"] != before.get("processes", 1):
        raise RunFolderError(
            f"{folder} was trained by {before.get('processes', 1)} processes, these are {record['processes']}: "
            "each would see other records; start as many, or choose another --output-dir"
        )
    return None


def _named(files: dict[str, str] | None) -> str:
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
