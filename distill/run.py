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
from distill.evaluation.agreement import Agreement, agreement
from distill.export import load_export
from distill.export.card import model_card
from distill.objectives import load_objective
from distill.objectives.base import Objective
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
from teacher_cache.storage.manifest import Manifest
from teacher_cache.storage.shards import replacing
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
        loss: mean of the last steps that were logged together.
        agreement: `before` and `after`, or None when nothing was held out.
    """

    output_dir: str
    final: str
    steps: int
    resumed_from: int
    finished_before: bool
    seconds: float
    loss: float
    agreement: dict[str, Any] | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run(
    config: RunConfig,
    *,
    resume: bool = False,
    report: Callable[[TrainingProgress], None] = lambda progress: None,
) -> RunResult:
    """Train, or go on training, the student that `config` describes.

    Args:
        resume: refuse to begin anew when there is no checkpoint to go on from.

    Raises:
        KnownError: anything in the configuration, cache, student or folder that does not fit, before a step.
    """
    from transformers import set_seed

    started = time.monotonic()
    config.check()
    if not config.cache or not config.output_dir:
        raise ConfigError(f"{'cache' if not config.cache else 'output_dir'} is not set; name it in the YAML or flags")
    folder = Path(config.output_dir)
    finished = _finished(folder, config)
    if finished is not None:
        return finished
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
        held_out = held_out_rows(config, manifest, cache.rows)
        pairs = getattr(objective, "views", "dropout") == "pair" and objective.needs.views == 2
        dataset = CachedDataset(cache, space, manifest, held_out=held_out, pairs=pairs)
        model = Distillation(student, objective)
        sharpness = _sharpness(config, model)
        collator = Collator(
            student.tokenizer,
            student.max_length,
            prompt=student.prompt,
            repeat=1 if pairs else objective.needs.views,
        )
        record = _describe(config, space, manifest, student, len(held_out))
        _check_same_run(folder, record)
        checkpoint = last_checkpoint(folder)
        trainer = DistillTrainer(model, config, dataset, collator, sharpness, report)
        leads = trainer.is_world_process_zero()  # of several processes, one writes
        if leads:
            _write(folder / CONFIG, config.to_yaml())
            _write(folder / RECORD, json.dumps(record, indent=2, ensure_ascii=False))
        before = _agreement(student, cache, space, held_out)
        if checkpoint is None or not trainer.restore(checkpoint):
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        student.cpu()
        projection = _projection(config, objective)
        after = _agreement(student, cache, space, held_out, projection)
        figures = {"before": asdict(before), "after": asdict(after)} if before and after else None
        record |= {
            "status": "finished",
            "steps": trainer.state.global_step,
            "seconds": round(time.monotonic() - started, 3),
            "loss": next(line["loss"] for line in reversed(trainer.state.log_history) if "loss" in line),
            "resumed_from": _step(checkpoint),
            "agreement": figures,
        }
        if leads:
            parameters = sum(parameter.numel() for parameter in student.parameters())
            require_room(folder, 2 * 4 * parameters, "the exported student, written and then renamed,")
            rows = np.linspace(0, cache.rows - 1, min(CHECKED_TEXTS, cache.rows)).astype(np.int64)
            cosine = export(student, projection, config.export.normalize, folder / FINAL, cache.texts(rows))
            record["exported"] = {"texts": len(rows), "smallest_cosine": cosine}
            _write(folder / FINAL / "README.md", model_card(record))
            _write(folder / RECORD, json.dumps(record, indent=2, ensure_ascii=False))
    return _result(folder, record, finished_before=False)


def held_out_rows(config: RunConfig, manifest: Manifest, table_rows: int) -> npt.NDArray[np.int64]:
    """Rows kept out of training, ascending; the same for every run with the same seed and corpus.

    Second texts of pairs are drawn too; a record that holds a held-out text anywhere is not trained on.
    """
    rows = manifest.distinct_rows(table_rows)
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
        objective = kind(student.shape, space.dims, **options)
    except TypeError as error:
        raise ConfigError(f"objective {chosen.name} was given options it does not take: {error}") from error
    if objective.needs.token_states:
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
) -> Agreement | None:
    """Of the vectors that are exported: the student's own, or those it projects into the teacher's space."""
    if len(rows) <= NEIGHBOURS + 1:
        return None
    return agreement(student.encode(cache.texts(rows), projection=projection), space.gather(rows), NEIGHBOURS)


def _describe(
    config: RunConfig, space: SpaceView, manifest: Manifest, student: Student, held_out: int
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
        },
        "objective": sections["objective"],
        "sharpness": sections["sharpness"],
        "training": sections["training"],
        "data": sections["data"],
        "export": sections["export"],
        "precision": settled_precision(config.training.precision),
        "processes": int(os.environ.get("WORLD_SIZE", 1)),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in LIBRARIES},
    }


def _check_same_run(folder: Path, record: dict[str, Any]) -> None:
    """A checkpoint must be continued on the very data it was trained on."""
    if not (folder / RECORD).exists():
        return
    before = _read_record(folder)
    for what in ("space", "corpus"):
        mine, theirs = record[what]["fingerprint"], before.get(what, {}).get("fingerprint")
        if mine != theirs:
            raise RunFolderError(
                f"{folder} was trained on {what} {theirs}, this command means {what} {mine}; choose another "
                "--output-dir"
            )
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


def _finished(folder: Path, config: RunConfig) -> RunResult | None:
    """The result of this very run when it is done; None when there is something to do.

    Raises:
        RunFolderError: the folder holds another run, or no run at all.
    """
    if not folder.exists() or not any(folder.iterdir()):
        return None
    if not (folder / CONFIG).exists():
        if all(path.name == RECORD or path.name.endswith(".writing") for path in folder.iterdir()):
            return None
        raise RunFolderError(f"{folder} is not empty and not a run folder (no {CONFIG}); choose another --output-dir")
    different = config.difference(RunConfig.load(folder / CONFIG))
    # Where a folder lies may change between two starts; what is in it is checked by fingerprint.
    different = {key: pair for key, pair in different.items() if key not in ("cache", "output_dir")}
    if different:
        listed = "; ".join(f"{key}: {theirs!r} there, {mine!r} now" for key, (mine, theirs) in different.items())
        raise RunFolderError(f"{folder} holds a run with other settings ({listed}); choose another --output-dir")
    if not (folder / RECORD).exists():
        return None
    record = _read_record(folder)
    done = record.get("status") == "finished" and (folder / FINAL).is_dir()
    return _result(folder, record, finished_before=True) if done else None


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
