"""The checkpoints of a run folder: which are whole, and which is the newest."""

import json
import os
import shutil
from pathlib import Path

# Files of a checkpoint.
WEIGHTS = "model.safetensors"
STATE = "trainer_state.json"


def complete_checkpoints(folder: Path, processes: int | None = None) -> list[Path]:
    """Those that were written to their end, by step.

    Args:
        processes: that trained the run; None is as many as this one belongs to.
    """
    return sorted((path for path in checkpoints(folder) if is_complete(path, processes)), key=checkpoint_step)


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end; half-written and half-deleted ones are removed."""
    whole = complete_checkpoints(folder)
    for path in checkpoints(folder):
        if path not in whole:
            # Written into again, it could look whole too early. Another process may be removing it as well.
            shutil.rmtree(path, ignore_errors=True)
    return whole[-1] if whole else None


def checkpoint_step(checkpoint: Path | None) -> int:
    """The optimiser step that a checkpoint was taken behind; 0 for none."""
    return int(checkpoint.name.removeprefix("checkpoint-")) if checkpoint else 0


def checkpoints(folder: Path) -> list[Path]:
    """All of them, whole or not, in no order."""
    return [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()]


def is_complete(checkpoint: Path, processes: int | None = None) -> bool:
    """Whether all that an exact resume needs is there.

    Trainer writes its state last, but other ranks write theirs without waiting, and a kill may also come
    while an old checkpoint is being deleted.
    """
    ranks = processes or int(os.environ.get("WORLD_SIZE", 1))
    states = [f"rng_state_{rank}.pth" for rank in range(ranks)] if ranks > 1 else ["rng_state.pth"]
    if not all((checkpoint / name).is_file() for name in (WEIGHTS, "optimizer.pt", "scheduler.pt", *states)):
        return False
    try:
        state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        return bool(state["global_step"] == checkpoint_step(checkpoint))
    except (ValueError, KeyError, TypeError, OSError):
        return False
