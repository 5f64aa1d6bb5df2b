"""Step time and peak memory: the one timer and the one peak that training, `distill bench` and the benchmarks use."""

import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

# The part of a step that waits for its batch.
DATA = "data"

# Linux only; elsewhere the peak is that since the process began.
STATUS = Path("/proc/self/status")
CLEAR_PEAK = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step.

    Attributes:
        seconds: from the end of the previous step to the end of this one, including the wait for its batch.
        processor_seconds: processor time of this process, summed over its threads.
        parts: seconds by part; 0 for a part that the step did not have.
        tokens: of the batch's texts, without padding; 0 where they are not counted.
        positions: the same with padding.
    """

    seconds: float
    processor_seconds: float
    parts: Mapping[str, float]
    tokens: int = 0
    positions: int = 0


class StepTimer:
    """Times successive steps and their parts."""

    def __init__(self, device: "torch.device | None" = None) -> None:
        """Create a timer without steps.

        Args:
            device: synchronized at both ends of a step; parts on a GPU are timed with CUDA events. None never
                synchronizes, so that a step costs nothing more.
        """
        self.device = device
        self.steps: list[StepTime] = []
        self._began = self._processor_began = 0.0
        self._tokens = self._positions = 0
        self._marks: list[tuple[str, Any]] = []

    def start(self) -> None:
        """Start a step here; whatever was timed since the end of the previous one is discarded."""
        self._synchronize()
        self._began, self._processor_began = time.perf_counter(), time.process_time()
        self._tokens = self._positions = 0
        self._marks = []
        self.mark("")

    def mark(self, part: str) -> None:
        """Add the time since the last mark to a part of the step."""
        if self.device is not None and self.device.type == "cuda":
            import torch

            now: Any = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = time.perf_counter()
        self._marks.append((part, now))

    def count(self, tokens: int, positions: int) -> None:
        """Add tokens, without and with padding, to the step."""
        self._tokens += tokens
        self._positions += positions

    def stop(self) -> None:
        """End the step and start the next one."""
        self._synchronize()
        seconds = time.perf_counter() - self._began
        processor_seconds = time.process_time() - self._processor_began
        parts: dict[str, float] = defaultdict(float)
        for (_, before), (part, now) in zip(self._marks, self._marks[1:], strict=False):
            parts[part] += now - before if isinstance(now, float) else before.elapsed_time(now) / 1e3
        self.steps.append(StepTime(seconds, processor_seconds, parts, self._tokens, self._positions))
        self.start()

    def _synchronize(self) -> None:
        if self.device is not None and self.device.type in ("cuda", "mps"):
            import torch

            torch.accelerator.synchronize(self.device)


def cycle_means(values: Iterable[float], cycle: int) -> list[float]:
    """Means over successive groups of `cycle` steps.

    Sharpness-aware steps with an ascent at every k-th step cost more at those steps; the mean over k steps does not
    depend on where the first group begins.
    """
    means: list[float] = np.array(list(values), dtype=np.float64).reshape(-1, cycle).mean(axis=1).tolist()
    return means


def memory_in_use(device: "torch.device | None" = None) -> int:
    """Bytes in use: torch's allocations on a GPU, otherwise the resident memory of this process."""
    if device is not None and device.type == "cuda":
        import torch

        return int(torch.cuda.memory_allocated(device))
    return process_memory("VmRSS") or _max_resident()


def peak_memory(device: "torch.device | None" = None) -> int:
    """Highest `memory_in_use` since the process began, or since `reset_peak_memory`, in bytes."""
    if device is not None and device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    return process_memory("VmHWM") or _max_resident()


def reset_peak_memory(device: "torch.device | None" = None) -> None:
    """Measure `peak_memory` from here on."""
    if device is not None and device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
    elif CLEAR_PEAK.exists():
        try:
            CLEAR_PEAK.write_text("5")
        except OSError:  # a container that forbids it: the peak is that of the whole process
            return


def process_memory(name: str) -> int:
    """Bytes in a field of `/proc/self/status`, such as "VmRSS"; 0 where there is none."""
    if not STATUS.exists():
        return 0
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def _max_resident() -> int:
    # In kilobytes, except on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
