"""One run: from a cache and a configuration to a trained, checked and exported student.

The run folder holds `config.yaml` (resolved), `run.json` (what exactly was trained on what), `metrics.jsonl`,
`checkpoint-N/` and, at the end, `final/`. The same command again goes on from the last whole checkpoint, and
ends with the weights that an uninterrupted run would have had.
"""

import difflib
import inspect
import json
import os
import platform
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from distill.callbacks import TrainingProgress
from distill.config import RunConfig
from distill.errors import ConfigError, NeedsNotMet, RunFolderError
from distill.evaluation.agreement import agreement
from distill.export import load_export
from distill.export.card import model_card
from distill.objectives import load_objective
from distill.objectives.base import Objective, StudentShape
from distill.run_folder import CONFIG, FINAL, RECORD, read_record
from distill.sharpness import SharpnessAware, build_sharpness
from distill.student import Student, student_shape
from distill.targets import Targets, several_spaces
from distill.trainer import (
    STATE,
    WEIGHTS,
    Distillation,
    DistillTrainer,
    require_room,
    settled_precision,
    training_arguments,
)
from teacher_cache.cache import TeacherCache
from teacher_cache.joint import JointSpace
from teacher_cache.storage.files import replacing
from teacher_cache.storage.manifest import Manifest
from teacher_cache.view import SpaceView

CHECKED_TEXTS = 50
# Below this many distinct texts nothing is held out; above, never more than this share.
SMALLEST_HELD_OUT_FROM = 256
HELD_OUT_SHARE = 8
# Settings that say where something is.
NAMES = ("cache", "output_dir", "space", "corpus")
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
    """

    output_dir: str
    final: str
    steps: int
    resumed_from: int
    finished_before: bool
    seconds: float
    loss: float | None
    agreement: dict[str, Any] | None

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
    from transformers import set_seed

    started = time.monotonic()
    config.check()
    if not config.cache or not config.output_dir:
        raise ConfigError(f"{'cache' if not config.cache else 'output_dir'} is not set; name it in the YAML or flags")
    folder = Path(config.output_dir)
    _check_settings(folder, config)
    config = _settled(folder, config)
    if resume and not any(map(_is_whole, _checkpoints(folder))):
        raise RunFolderError(f"nothing to resume: {folder} has no whole checkpoint; leave --resume out to begin")
    with TeacherCache.open(config.cache) as cache:
        targets, manifest = Targets(config, cache), cache.corpus(config.corpus)
        space = targets.space
        student = Student.load(config.student)
        set_seed(config.training.seed)  # before the first random weight
        objective = _objective(config, student.shape, targets)
        targets.check(objective, manifest)
        # Refused before training rather than after.
        _projection(config, objective)
        export = load_export(config.export.format)
        quarantined = targets.refused_rows(objective) if config.data.skip_quarantined else np.zeros(0, dtype=np.int64)
        held_out = held_out_rows(config, manifest, cache.rows, without=quarantined)
        record = _describe(config, targets, manifest, student, objective, len(held_out))
        done = _same_run(folder, record)
        if done is not None:
            return _result(folder, done, finished_before=True)
        dataset = targets.dataset(manifest, objective, np.union1d(held_out, quarantined))
        model = Distillation(student, objective)
        sharpness = _sharpness(config, model)
        collator = targets.collator(manifest, objective, student)
        checkpoint = last_checkpoint(folder)
        trainer = DistillTrainer(model, config, dataset, collator, sharpness, report)
        leads = trainer.is_world_process_zero()  # of several processes, one writes
        if leads:
            _write(folder / CONFIG, config.to_yaml())
            _write(folder / RECORD, json.dumps(record, indent=2, ensure_ascii=False))
        _announce(announce, record, len(dataset), _step(checkpoint))
        before = _agreement(student, cache, space, held_out)
        if checkpoint is None or not trainer.restore(checkpoint):
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        student.cpu()
        projection = _projection(config, objective)
        record |= {
            "status": "finished",
            "steps": trainer.state.global_step,
            "seconds": round(time.monotonic() - started, 3),
            "loss": next((line["loss"] for line in reversed(trainer.state.log_history) if "loss" in line), None),
            "resumed_from": _step(checkpoint),
            "cost": trainer.clock.cost(),
            "agreement": before
            and {
                "before": before,
                "after": _agreement(student, cache, space, held_out),
                "projected": None if projection is None else _agreement(student, cache, space, held_out, projection),
            },
        }
        if leads:
            needed = 2 * 4 * record["student"]["parameters"]
            require_room(folder, needed, "the exported student, written and then renamed,")
            rows = np.linspace(0, cache.rows - 1, min(CHECKED_TEXTS, cache.rows)).astype(np.int64)
            cosine = export(student, projection, config.export.normalize, folder / FINAL, cache.texts(rows))
            record["exported"] = {"texts": len(rows), "smallest_cosine": cosine}
            _write(folder / FINAL / "README.md", model_card(record))
            _write(folder / RECORD, json.dumps(record, indent=2, ensure_ascii=False))
    return _result(folder, record, finished_before=False)


def held_out_rows(
    config: RunConfig, manifest: Manifest, table_rows: int, without: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.int64]:
    """Rows kept out of training, ascending; the same for every run with the same seed and corpus.

    Second texts of pairs are drawn too; a record that holds a held-out text anywhere is not trained on.

    Args:
        without: rows that are not to be drawn, because they have no vector.
    """
    rows = manifest.distinct_rows(table_rows)
    if without is not None and len(without):
        rows = np.setdiff1d(rows, without, assume_unique=True)
    if len(rows) < SMALLEST_HELD_OUT_FROM or config.data.held_out == 0:
        return np.zeros(0, dtype=np.int64)
    count = min(config.data.held_out, len(rows) // HELD_OUT_SHARE)
    chosen = np.random.default_rng(config.training.seed).choice(len(rows), size=count, replace=False)
    return np.sort(rows[chosen])


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end; half-written and half-deleted ones are removed."""
    whole = []
    for path in _checkpoints(folder):
        if _is_whole(path):
            whole.append(path)
        else:
            # Written into again, it could look whole too early. Another process may be removing it as well.
            shutil.rmtree(path, ignore_errors=True)
    return max(whole, key=_step, default=None)


def _checkpoints(folder: Path) -> list[Path]:
    return [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()]


def _is_whole(checkpoint: Path) -> bool:
    """Whether all that an exact resume needs is there.

    Trainer writes its state last, but other ranks write theirs without waiting, and a kill may also come
    while an old checkpoint is being deleted.
    """
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    states = [f"rng_state_{rank}.pth" for rank in range(ranks)] if ranks > 1 else ["rng_state.pth"]
    if not all((checkpoint / name).is_file() for name in (WEIGHTS, "optimizer.pt", "scheduler.pt", *states)):
        return False
    try:
        state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        return bool(state["global_step"] == _step(checkpoint))
    except (ValueError, KeyError, TypeError, OSError):
        return False


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


def check_run(config: RunConfig) -> None:
    """Refuse what `run` would refuse of these settings and this cache; no weights are loaded, nothing is written.

    Raises:
        KnownError: as `run`.
    """
    config.check()
    config = _settled(Path(config.output_dir), config)
    shape = student_shape(config.student)
    with TeacherCache.open(config.cache) as cache:
        targets, manifest = Targets(config, cache), cache.corpus(config.corpus)
        objective = _objective(config, shape, targets)
        targets.check(objective, manifest)
        _projection(config, objective)
        load_export(config.export.format)
        _sharpness(config, torch.nn.LayerNorm(1))
        batches = -(-len(manifest) // config.training.per_device_train_batch_size)
        training_arguments(config, batches, objective=objective)


def _objective(config: RunConfig, student: StudentShape, targets: Targets) -> Objective:
    chosen = config.objective
    kind = load_objective(chosen.name)
    options: dict[str, Any] = {}
    if chosen.preset is not None:
        if chosen.preset not in kind.presets:
            raise ConfigError(
                f"objective {chosen.name} has no preset {chosen.preset!r}; it has: {', '.join(kind.presets) or 'none'}"
            )
        options |= kind.presets[chosen.preset]
    options |= chosen.options
    try:
        return kind(student, targets.shape, **options)
    except TypeError as error:
        known = [
            name
            for name, option in inspect.signature(kind).parameters.items()
            if option.kind is inspect.Parameter.KEYWORD_ONLY
        ]
        unknown = [name for name in options if name not in known]
        if not unknown:
            raise ConfigError(f"objective {chosen.name} cannot use its options: {error}") from error
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"its options: {', '.join(known)}"
        raise ConfigError(f"objective {chosen.name} has no option {unknown[0]!r}; {hint}") from error
    except ConfigError as error:  # it was told of sentence vectors alone, and advises to build what is there
        if isinstance(targets.space, JointSpace) and kind.needs.tokens:
            raise NeedsNotMet(several_spaces(f"objective {chosen.name}")) from error
        raise


def _sharpness(config: RunConfig, model: torch.nn.Module) -> SharpnessAware | None:
    options = asdict(config.sharpness)
    return build_sharpness(options.pop("name"), model, **options)


def _projection(config: RunConfig, objective: Objective) -> Tensor | None:
    if not config.export.projection:
        return None
    projection = objective.projection()
    if projection is None:
        raise ConfigError(
            f"export.projection is on, but objective {config.objective.name} learned no projection into the "
            "teacher's space"
        )
    return projection


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


def _describe(
    config: RunConfig,
    targets: Targets,
    manifest: Manifest,
    student: Student,
    objective: Objective,
    held_out: int,
) -> dict[str, Any]:
    """What the run depends on, as `run.json` keeps it."""
    corpus = manifest.record
    sections = asdict(config)
    return {
        "status": "running",
        "cache": str(Path(config.cache).resolve()),
        "space": targets.to_json(),
        "teacher": sections["teacher"],
        "corpus": {
            "name": corpus.name,
            "fingerprint": corpus.fingerprint,
            "records": corpus.records,
            "distinct": corpus.distinct,
            "held_out": held_out,
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
        "in_teacher_space": config.export.projection or objective.in_teacher_space,
        "objective": sections["objective"],
        "sharpness": sections["sharpness"],
        "training": sections["training"],
        "data": sections["data"],
        "export": sections["export"],
        "precision": settled_precision(config.training.precision),
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
    different = {key: pair for key, pair in different.items() if key.partition(".")[0] not in NAMES}
    if different:
        listed = "; ".join(f"{key}: {theirs!r} there, {mine!r} now" for key, (mine, theirs) in different.items())
        raise RunFolderError(f"{folder} holds a run with other settings ({listed}); choose another --output-dir")


def _settled(folder: Path, config: RunConfig) -> RunConfig:
    """Space and corpus that nobody named are those that the folder's run has: a cache may have others by now."""
    record = read_record(folder) or {}
    space, corpus = record.get("space", {}), record.get("corpus", {})
    if config.space is None and space:
        parts = tuple(part["slug"] for part in space.get("spaces", ()))
        config = replace(config, space=parts or space["slug"])
    if config.corpus is None and corpus:
        config = replace(config, corpus=corpus["name"])
    return config


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
    if before.get("status") == "finished" and (folder / FINAL).is_dir():
        return before
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
    )


def _step(checkpoint: Path | None) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-")) if checkpoint else 0


def _write(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text.encode())
