"""What a configuration makes of its names: the objective, its projection, the sharpness, the held-out texts."""

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
from distill.objectives.base import Objective, StudentShape
from distill.registry import construct
from distill.run_folder import read_record
from distill.sharpness import SharpnessAware
from distill.sharpness import build_sharpness as sharpness_of
from distill.training.targets import Targets, joint_space_message
from teacher_cache.storage.manifest import Manifest
from teacher_cache.table.cache import TeacherCache
from teacher_cache.table.joint import JointSpace

# Below this many distinct texts nothing is held out; above, never more than this share.
SMALLEST_HELD_OUT_FROM = 256
HELD_OUT_SHARE = 8


def build_objective(config: RunConfig, student: StudentShape, targets: Targets) -> Objective:
    """The objective of a configuration, with fresh projections.

    Raises:
        ConfigError: it has no such preset or option, or refuses a value.
        NeedsNotMet: it compares tokens, and several spaces are named.
    """
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
        return construct(kind, f"objective {chosen.name}", student, targets.shape, options=options)
    except ConfigError as error:  # it was told of sentence vectors alone, and advises to build what is there
        if isinstance(targets.space, JointSpace) and kind.needs.tokens:
            raise NeedsNotMet(joint_space_message(f"objective {chosen.name}")) from error
        raise


def build_sharpness(config: RunConfig, model: torch.nn.Module) -> SharpnessAware | None:
    """The sharpness of a configuration over the parameters of `model`; None for plain steps."""
    options = asdict(config.sharpness)
    return sharpness_of(options.pop("name"), model, **options)


def learned_projection(config: RunConfig, objective: Objective) -> Tensor | None:
    """`(d_T, d_s)` that is exported with the student, where the configuration asks for it.

    Raises:
        ConfigError: it does, and the objective learns none.
    """
    if not config.export.projection:
        return None
    projection = objective.projection()
    if projection is None and objective.in_teacher_space:
        raise ConfigError(
            f"export.projection is on, but with these options objective {config.objective.name} trains the student's "
            "own vectors in the teacher's space; leave export.projection off"
        )
    if projection is None:
        raise ConfigError(
            f"export.projection is on, but objective {config.objective.name} learned no projection into the "
            "teacher's space"
        )
    return projection


def held_out_rows(
    config: RunConfig, manifest: Manifest, table_rows: int, without: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.int64]:
    """Rows kept out of training, ascending; the same for every run on this cache with the same seed and corpus.

    They are drawn by their place in the table: a cache that was made anew may number the same texts in another order,
    which is why a run keeps `held_out_digest`.

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


def with_recorded_names(folder: Path, config: RunConfig) -> RunConfig:
    """Space and corpus that nobody named are those that the folder's run has: a cache may have others by now."""
    record = read_record(folder) or {}
    space, corpus = record.get("space", {}), record.get("corpus", {})
    if config.space is None and space:
        parts = tuple(part["slug"] for part in space.get("spaces", ()))
        config = replace(config, space=parts or space["slug"])
    if config.corpus is None and corpus:
        config = replace(config, corpus=corpus["name"])
    return config


def held_out_digest(cache: TeacherCache, rows: npt.NDArray[np.int64]) -> str:
    """Of the held-out texts themselves, whatever their rows are."""
    keys = sorted(key.tobytes() for key in cache.texts_table.read_keys(rows))
    return blake2b(b"".join(keys), digest_size=16).hexdigest()


def check_held_out(folder: Path, record: Mapping[str, Any], digest: str) -> None:
    """Refuse to go on with, or to look into, a run whose held-out texts would be others by now.

    Args:
        record: of the run; one that keeps no digest is believed.

    Raises:
        RunFolderError: they are, as the cache was made anew, or other rows of it are quarantined.
    """
    known = record.get("corpus", {}).get("held_out_digest")
    if known not in (None, digest):
        raise RunFolderError(
            f"{folder} held other texts out ({known}) than its settings draw from this cache by now ({digest}): the "
            "cache was built anew, or has other rows quarantined, and what was held out would be mixed with what was "
            "trained on; use the cache it was trained on"
        )
