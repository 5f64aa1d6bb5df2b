"""One run: from a cache and a configuration to a trained, checked and exported student.

The run folder holds `config.yaml` (resolved), `run.json` (what exactly was trained on what), `metrics.jsonl`,
`checkpoint-N/` and, at the end, `final/`. The same command again goes on from the last whole checkpoint, and
ends with the weights that an uninterrupted run would have had.
"""

import json
import os
import platform
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from distill.config import RunConfig
from distill.data.dataset import CachedDataset, Collator
from distill.errors import ConfigError, NeedsNotMet, RunFolderError
from distill.evaluation.agreement import agreement
from distill.export import load_export
from distill.export.card import model_card
from distill.objectives import load_objective
from distill.objectives.base import Objective, TeacherShape
from distill.sharpness import build_sharpness
from distill.student import Student
from distill.trainer import (
    STATE,
    WEIGHTS,
    Distillation,
    DistillTrainer,
    TrainingProgress,
    require_room,
    settled_precision,
)
from teacher_cache.cache import TeacherCache
from teacher_cache.storage.files import replacing
from teacher_cache.storage.manifest import Manifest
from teacher_cache.view import SpaceView

CONFIG = "config.yaml"
RECORD = "run.json"
FINAL = "final"
CHECKED_TEXTS = 50
# Below this many distinct texts nothing is held out; above, never more than this share.
SMALLEST_HELD_OUT_FROM = 256
HELD_OUT_SHARE = 8
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
    if resume and not any(map(_is_whole, _checkpoints(folder))):
        raise RunFolderError(f"nothing to resume: {folder} has no whole checkpoint; leave --resume out to begin")
    with TeacherCache.open(config.cache) as cache:
        space, manifest = cache.space(config.space), cache.corpus(config.corpus)
        student = Student.load(config.student)
        set_seed(config.training.seed)  # before the first random weight
        objective = _objective(config, student, space)
        # Refused before training rather than after.
        _projection(config, objective)
        export = load_export(config.export.format)
        quarantined = _quarantined_rows(config, space)
        held_out = held_out_rows(config, manifest, cache.rows, without=quarantined)
        record = _describe(config, space, manifest, student, objective, len(held_out))
        done = _same_run(folder, record)
        if done is not None:
            return _result(folder, done, finished_before=True)
        pairs = objective.views == "pair" and objective.needs.views == 2
        left_out = np.union1d(held_out, quarantined)
        dataset = CachedDataset(cache, space, manifest, left_out=left_out, pairs=pairs)
        model = Distillation(student, objective)
        sharpness = _sharpness(config, model)
        collator = Collator(
            student.tokenizer,
            student.max_length,
            prompt=student.prompt,
            repeat=1 if pairs else objective.needs.views,
        )
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


def _quarantined_rows(config: RunConfig, space: SpaceView) -> npt.NDArray[np.int64]:
    if not config.data.skip_quarantined:
        return np.zeros(0, dtype=np.int64)
    return np.fromiter(sorted(space.quarantined()), dtype=np.int64)


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


def _objective(config: RunConfig, student: Student, space: SpaceView) -> Objective:
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
        objective = kind(student.shape, TeacherShape(space.dims), **options)
    except TypeError as error:
        raise ConfigError(f"objective {chosen.name} was given options it does not take: {error}") from error
    if objective.needs.tokens:
        raise NeedsNotMet(
            f"objective {chosen.name} needs the teacher's token states, but {space.slug} holds sentence vectors alone"
        )
    return objective


def _sharpness(config: RunConfig, model: Distillation) -> Any:
    chosen = config.sharpness
    overrides = {name: value for name, value in (("rho", chosen.rho), ("eta", chosen.eta)) if value is not None}
    return build_sharpness(chosen.name, model.named_parameters(), **overrides)


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
    space: SpaceView,
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
    space: SpaceView,
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
        "space": {
            **space.space.to_json(),
            "slug": space.slug,
            "fingerprint": space.space.fingerprint,
            "description": space.space.describe(),
            "storage": space.record.storage,
        },
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
    # Where a folder lies may change between two starts; what is in it is checked by its digests.
    different = {key: pair for key, pair in different.items() if key not in ("cache", "output_dir")}
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
    if not (folder / RECORD).exists():
        return None
    before = _read_record(folder)
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


def _read_record(folder: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunFolderError(f"{folder / RECORD} is not JSON: {error}; choose another --output-dir") from error
    return record


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
