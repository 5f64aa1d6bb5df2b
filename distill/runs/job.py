"""One run in a process of its own: trained, then scored. `distill sweep` starts it; see `distill.runs.launch`.

The order is one line of JSON on standard input. When that input ends, whoever gave the order is gone or wants no
more, and the process ends as well: a killed sweep leaves nothing running.
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
    # Whoever starts programs in the background makes them deaf to it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_the_input, daemon=True).start()
    try:
        work(order)
    except KnownError as error:
        _say(f"error: {' '.join(str(error).split())}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        _say("stopped")
        sys.exit(130)


def work(order: dict[str, Any]) -> None:
    """Train what `config` says and, where `data` is given, score it."""
    from distill.evaluation.scores import evaluate_run
    from distill.runs.run import run

    config: RunConfig = build_config(RunConfig, order["config"], "")
    result = run(config, announce=_say, report=_Lines())
    _say(f"{result.steps:,} steps, {'finished before' if result.finished_before else f'{result.seconds:.0f} s'}")
    if order["data"] is not None:
        scores = evaluate_run(Path(result.output_dir), Path(order["data"]), order["tasks"], order["dtype"])
        _say(f"scored: average {scores['average']['all']:.2f}")


class _Lines:
    """A line about the training every half minute."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def __call__(self, progress: "TrainingProgress") -> None:
        now = time.monotonic()
        if now - self.last >= SECONDS_BETWEEN_LINES:
            self.last = now
            loss = "" if progress.loss is None else f", loss {progress.loss:.4f}"
            _say(f"step {progress.step:,} of {progress.steps:,}{loss}")


def _end_with_the_input() -> None:
    # Not sys.stdin: a thread that waits in its lock would break the interpreter's shutdown.
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(SECONDS_TO_STOP)
    os._exit(130)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
