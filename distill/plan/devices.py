"""How long a step takes on a device: the roofline of its kernels, from published peaks or, here, from a probe.

A kernel takes the longer of its arithmetic and its memory traffic, at a share of the peaks that real kernels reach;
a step takes at least what launching its kernels one by one from Python takes. Where a step is bound by neither the
estimate is good to a factor of about 1.5; ratios between settings on one device are better than that.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from distill.errors import ConfigError

if TYPE_CHECKING:
    from distill.plan.tracker import Operation

# What kernels of an encoder's sizes reach of a GPU's published peaks. With these a T4 takes 0.9 of the step that the
# TALAS paper measured on one.
COMPUTE_SHARE, BANDWIDTH_SHARE = 0.4, 0.65
# One kernel from Python, autograd's bookkeeping included.
LAUNCH_SECONDS = 10e-6
CPU = "this CPU"
PROBE_SECONDS = 0.15


@dataclass(frozen=True)
class Device:
    """One device.

    Attributes:
        memory: bytes.
        flops: a second, by precision: dense, without sparsity; a precision that it does not have is left out.
        bandwidth: bytes a second.
        launch: seconds that a kernel takes at least.
    """

    name: str
    memory: int
    flops: Mapping[str, float]
    bandwidth: float
    compute_share: float = COMPUTE_SHARE
    bandwidth_share: float = BANDWIDTH_SHARE
    launch: float = LAUNCH_SECONDS

    def precision(self, wanted: str) -> str:
        """The precision that `auto` is on this device; any other is itself."""
        if wanted != "auto":
            return wanted
        return next(name for name in ("bf16", "fp16", "fp32") if name in self.flops)

    def seconds(self, operations: Sequence["Operation"]) -> float:
        """Of these kernels, one after another.

        Raises:
            KeyError: one computes in a precision that the device does not have.
        """
        bandwidth = self.bandwidth * self.bandwidth_share
        busy = 0.0
        for operation in operations:
            arithmetic = 0.0
            if operation.flops:
                arithmetic = operation.flops / (self.flops[_precision(operation.dtype)] * self.compute_share)
            busy += max(arithmetic, operation.bytes / bandwidth)
        return max(busy, len(operations) * self.launch)


def _gpu(name: str, memory: float, half: float, single: float, bandwidth: float, *, bf16: bool = True) -> Device:
    flops = {"fp16": half, "fp32": single} | ({"bf16": half} if bf16 else {})
    return Device(name, int(memory), flops, bandwidth)


# From the vendor's data sheets: tensor cores without sparsity, fp32 without them; memory that a process can have.
GPUS: tuple[Device, ...] = (
    _gpu("T4", 15e9, 65e12, 8.1e12, 320e9, bf16=False),
    _gpu("L4", 23e9, 121e12, 30.3e12, 300e9),
    _gpu("A100", 40e9, 312e12, 19.5e12, 1555e9),
    _gpu("H100", 80e9, 989e12, 67e12, 3350e9),
    _gpu("H200", 141e9, 989e12, 67e12, 4800e9),
)


def this_processor() -> Device:
    """This machine's processor with the threads that torch has: products and copies, timed for a second."""
    import torch

    size = 768
    flops: dict[str, float] = {}
    with torch.no_grad():
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            left, right = torch.randn(2048, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
            flops[name] = 2 * 2048 * size * size / _best(partial(torch.matmul, left, right))
        source = torch.randn(2**24)
        target = torch.empty_like(source)
        bandwidth = 2 * source.nbytes / _best(partial(target.copy_, source))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # What was timed are such kernels themselves; drawing dropout masks and transcendental functions cost more.
    return Device(CPU, memory, flops, bandwidth, compute_share=0.8, bandwidth_share=0.4, launch=LAUNCH_SECONDS)


def _best(call: Any) -> float:
    """Seconds of the fastest call: others share the machine."""
    call()
    best, until = float("inf"), time.perf_counter() + PROBE_SECONDS
    while time.perf_counter() < until:
        begun = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begun)
    return best


def _precision(dtype: Any) -> str:
    return {"torch.float16": "fp16", "torch.bfloat16": "bf16"}.get(str(dtype), "fp32")


def parse_bytes(text: str) -> int:
    """ "15GB", "15 GiB", "800MB" or a number of bytes.

    Raises:
        ConfigError: it is none of these.
    """
    units = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30}
    number = text.strip().rstrip("BbIiKkMmGgTt ")
    unit = text.strip()[len(number) :].strip().lower()
    try:
        size = float(number) * units[unit]
    except (ValueError, KeyError):
        size = 0
    if not 1 <= size < float("inf"):
        raise ConfigError(f"device memory: expected a size such as 15GB or 14.5GiB, found {text!r}")
    return int(size)
