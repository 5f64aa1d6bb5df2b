"""Memory that a process, or its GPU, holds: now, and at the most."""

import resource
import sys
from pathlib import Path

import torch

# Linux only; elsewhere the peak is that since the process began.
STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
# ru_maxrss is in kilobytes, except on macOS.
UNIT = 1 if sys.platform == "darwin" else 1024


def held(device: torch.device) -> int:
    """Bytes: of torch's allocations on a GPU, resident of this process on a processor."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return _status("VmRSS") or _ever()


def peak(device: torch.device) -> int:
    """The most that `held` was since `forget_peak`, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return _status("VmHWM") or _ever()


def forget_peak(device: torch.device) -> None:
    """Let `peak` count from here on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif CLEAR.exists():
        try:
            CLEAR.write_text("5")
        except OSError:  # a container that forbids it: the peak is that of the whole process
            return


def _status(name: str) -> int:
    if not STATUS.exists():
        return 0
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def _ever() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT
