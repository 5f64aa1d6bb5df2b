"""The process of one run of a sweep: trains and scores it. `distill.runs.launch` starts it.

The job is one line of JSON on standard input. The process stops when its standard input is closed, so that a killed
sweep leaves no process behind.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.config import RunConfig
from distill.config.reading import build_config
from teacher_cache.errors import KnownError

if TYPE_CHECKING:
    from distill.training.callbacks import TrainingProgress

SECONDS_BETWEEN_LINES = 30.0
SECONDS_TO_STOP = 10.0


def main() -> None:
    # Background processes of a shell ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_stop_with_stdin, daemon=True).start()
    try:
        work(job)
    except KnownError as error:
        _print(f"error: {' '.join(str(error).split())}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        _print("stopped")
        sys.exit(130)


def work(job: dict[str, Any]) -> None:
    """Train the run of `config` and, if there is `data`, score it."""
    from distill.evaluation.scores import evaluate_run
    from distill.runs.run import run

    config: RunConfig = build_config(RunConfig, job["config"], "")
    result = run(config, announce=_print, report=_ProgressLines())
    _print(f"{result.steps:,} steps, {'finished before' if result.finished_before else f'{result.seconds:.0f} s'}")
    if job["data"] is not None:
        scores = evaluate_run(Path(result.output_dir), Path(job["data"]), job["tasks"], job["dtype"])
        _print(f"scored: average {scores['average']['all']:.2f}")


class _ProgressLines:
    """Prints the training progress every half minute."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def __call__(self, progress: "TrainingProgress") -> None:
        now = time.monotonic()
        if now - self.last >= SECONDS_BETWEEN_LINES:
            self.last = now
            loss = "" if progress.loss is None else f", loss {progress.loss:.4f}"
            _print(f"step {progress.step:,} of {progress.steps:,}{loss}")


def _stop_with_stdin() -> None:
    # Not sys.stdin: a thread waiting for its lock would break the interpreter's shutdown.
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(SECONDS_TO_STOP)
    os._exit(130)


def _print(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
