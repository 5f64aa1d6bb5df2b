"""The checkpoints of a run folder: which are complete, and which is the newest."""

import json
import os
import shutil
from pathlib import Path

# Files of a checkpoint.
WEIGHTS = "model.safetensors"
STATE = "trainer_state.json"


def complete_checkpoints(folder: Path, processes: int | None = None) -> list[Path]:
    """Complete checkpoints, by step.

    Args:
        processes: number that trained the run; None is that of the current run.
    """
    return sorted((path for path in checkpoints(folder) if is_complete(path, processes)), key=checkpoint_step)


def last_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint; incomplete ones are removed."""
    complete = complete_checkpoints(folder)
    for path in checkpoints(folder):
        if path not in complete:
            # Files left in it could make a later checkpoint seem complete. Another process may remove it too.
            shutil.rmtree(path, ignore_errors=True)
    return complete[-1] if complete else None


def checkpoint_step(checkpoint: Path | None) -> int:
    """The optimizer step of a checkpoint; 0 for None."""
    return int(checkpoint.name.removeprefix("checkpoint-")) if checkpoint else 0


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoints, complete or not, unordered."""
    return [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()]


def is_complete(checkpoint: Path, processes: int | None = None) -> bool:
    """Whether a checkpoint has everything for an exact resume.

    Trainer writes its state last, but other ranks do not wait to write theirs, and a run may be killed while it
    deletes an old checkpoint.
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
