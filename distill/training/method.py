"""The objective, projection, sharpness and held-out texts of a configuration."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from distill.config import RunConfig
from distill.errors import ConfigError, NeedsNotMet, RunFolderError
from distill.objectives import load_objective
from distill.objectives.base import Needs, Objective, StudentShape
from distill.registry import construct
from distill.run_folder import read_record
from distill.sharpness import SharpnessAware
from distill.sharpness import build_sharpness as sharpness_of
from distill.training.targets import Targets, joint_space_message
from teacher_cache.storage.manifest import Manifest
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.joint import JointSpace

# No text is held out of fewer distinct texts, and at most one in HELD_OUT_SHARE of more.
MIN_TEXTS_TO_HOLD_OUT = 256
HELD_OUT_SHARE = 8


def build_objective(config: RunConfig, student: StudentShape, targets: Targets) -> Objective:
    """The objective of a configuration, with newly initialized projections."""
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
    _check_static(chosen.name, kind.needs, student)
    try:
        objective = construct(kind, f"objective {chosen.name}", student, targets.shape, options=options)
    except ConfigError as error:  # its advice to build token columns does not help with several spaces
        if isinstance(targets.space, JointSpace) and kind.needs.tokens:
            raise NeedsNotMet(joint_space_message(f"objective {chosen.name}")) from error
        raise
    if config.training.head_init == "least_squares" and not objective.linear_heads():
        raise ConfigError(
            f"training.head_init=least_squares fits heads to the teacher's vectors, but objective {chosen.name} with "
            "these options has none; set training.head_init=random"
        )
    _check_targets(config, objective)
    _check_static(chosen.name, objective.needs, student)
    return objective


def _check_targets(config: RunConfig, objective: Objective) -> None:
    """Check that transformed targets fit the objective and the exported model."""
    setting = f"teacher.targets={config.teacher.targets}"
    if config.teacher.targets == "none":
        return
    if objective.needs.tokens:
        raise ConfigError(
            f"{setting} transforms sentence vectors, but objective {config.objective.name} with these options compares "
            "the teacher's tokens too; set teacher.targets=none"
        )
    if config.export.projection or objective.in_teacher_space:
        raise ConfigError(
            f"{setting} trains towards transformed vectors, so the exported ones would not be in the teacher's space; "
            "set teacher.targets=none, or export.projection=false and a learned head"
        )


def _check_static(name: str, needs: Needs, student: StudentShape) -> None:
    """Refuse an objective on tokens for a static student."""
    if needs.tokens and student.layers == 0:
        raise NeedsNotMet(
            f"objective {name} compares the states of tokens in their context, and a static student has none; use an "
            "objective on sentence vectors, such as cosine, rkd or leaf"
        )


def build_sharpness(config: RunConfig, model: torch.nn.Module) -> SharpnessAware | None:
    """The sharpness of a configuration over the parameters of `model`; None for plain steps."""
    options = asdict(config.sharpness)
    return sharpness_of(options.pop("name"), model, **options)


def learned_projection(config: RunConfig, objective: Objective) -> Tensor | None:
    """The `(d_T, d_s)` projection to export with the student; None without `export.projection`.

    None too if the student's own vectors are in the teacher's space, which need no projection.
    """
    if not config.export.projection or objective.in_teacher_space:
        return None
    projection = objective.projection()
    if projection is None:
        raise ConfigError(
            f"export.projection is set, but objective {config.objective.name} learned no projection into the "
            "teacher's space; set export.projection=false"
        )
    return projection


def held_out_rows(
    config: RunConfig, manifest: Manifest, table_rows: int, without: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.int64]:
    """Ascending rows held out of training; the same for every run on this cache with the same seed and corpus.

    Rows are drawn, not texts: a cache that is built again may give the same texts other rows, so a run records
    `held_out_digest`. Second texts of pairs are drawn too; a record with any held-out text is not trained on.
    """
    rows = manifest.distinct_rows(table_rows)
    if without is not None and len(without):
        rows = np.setdiff1d(rows, without, assume_unique=True)
    if len(rows) < MIN_TEXTS_TO_HOLD_OUT or config.data.held_out == 0:
        return np.zeros(0, dtype=np.int64)
    count = min(config.data.held_out, len(rows) // HELD_OUT_SHARE)
    chosen = np.random.default_rng(config.training.seed).choice(len(rows), size=count, replace=False)
    return np.sort(rows[chosen])


def with_recorded_names(folder: Path, config: RunConfig) -> RunConfig:
    """The configuration with space and corpus of the folder's run if it names none; the cache may have several now."""
    record = read_record(folder) or {}
    space, corpus = record.get("space", {}), record.get("corpus", {})
    if config.space is None and space:
        parts = tuple(part["slug"] for part in space.get("spaces", ()))
        config = replace(config, space=parts or space["slug"])
    if config.corpus is None and corpus:
        config = replace(config, corpus=corpus["name"])
    return config


def held_out_digest(cache: TeacherCache, rows: npt.NDArray[np.int64]) -> str:
    """Digest of the held-out texts, independent of their rows."""
    keys = sorted(key.tobytes() for key in cache.texts_table.read_keys(rows))
    return blake2b(b"".join(keys), digest_size=16).hexdigest()


def check_held_out(folder: Path, record: Mapping[str, Any], digest: str) -> None:
    """Check that a run's held-out texts are still the same."""
    known = record.get("corpus", {}).get("held_out_digest")
    if known not in (None, digest):
        raise RunFolderError(
            f"{folder} held other texts out ({known}) than its settings draw from this cache now ({digest}): the cache "
            "was built again, or has other quarantined rows, and held-out texts would be mixed with training texts; "
            "use the cache that it was trained on"
        )
