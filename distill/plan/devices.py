"""The time of a step on a device: a roofline over its kernels, from published peaks or, for this CPU, a measurement.

A kernel takes the longer of its arithmetic and its memory traffic, at the share of the peaks that real kernels reach.
A step takes at least the time to launch its kernels one by one from Python. Estimates are good to a factor of about
1.5; ratios between settings on one device are better than that.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from distill.errors import ConfigError

if TYPE_CHECKING:
    from distill.plan.tracker import Operation

# What kernels of an encoder's sizes reach of a GPU's published peaks. With these the estimate for a T4 is 0.9 of the
# step time that the TALAS paper reports for one.
COMPUTE_SHARE, BANDWIDTH_SHARE = 0.4, 0.65
# One kernel launched from Python, with autograd's bookkeeping.
LAUNCH_SECONDS = 10e-6
CPU = "this CPU"
PROBE_SECONDS = 0.15


@dataclass(frozen=True)
class Device:
    """One device.

    Attributes:
        memory: bytes.
        flops: FLOP/s by precision, dense; precisions that the device lacks are absent.
        bandwidth: bytes per second.
        compute_share: share of `flops` that kernels reach.
        bandwidth_share: share of `bandwidth` that kernels reach.
        launch: least seconds per kernel.
    """

    name: str
    memory: int
    flops: Mapping[str, float]
    bandwidth: float
    compute_share: float = COMPUTE_SHARE
    bandwidth_share: float = BANDWIDTH_SHARE
    launch: float = LAUNCH_SECONDS

    def precision(self, wanted: str) -> str:
        """`wanted`, with "auto" resolved for this device."""
        if wanted != "auto":
            return wanted
        return next(name for name in ("bf16", "fp16", "fp32") if name in self.flops)

    def seconds(self, operations: Sequence["Operation"]) -> float:
        """Estimated seconds of these kernels, run one after another.

        Raises:
            KeyError: a kernel's precision is not in `flops`.
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


# From the vendor's data sheets: tensor cores without sparsity, fp32 without tensor cores; memory usable by a process.
GPUS: tuple[Device, ...] = (
    _gpu("T4", 15e9, 65e12, 8.1e12, 320e9, bf16=False),
    _gpu("L4", 23e9, 121e12, 30.3e12, 300e9),
    _gpu("A100", 40e9, 312e12, 19.5e12, 1555e9),
    _gpu("H100", 80e9, 989e12, 67e12, 3350e9),
    _gpu("H200", 141e9, 989e12, 67e12, 4800e9),
)


def this_processor() -> Device:
    """This machine's CPU with torch's threads; matrix products and copies are timed for about a second."""
    import torch

    size = 768
    flops: dict[str, float] = {}
    with torch.no_grad():
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            left, right = torch.randn(2048, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
            flops[name] = 2 * 2048 * size * size / _fastest(partial(torch.matmul, left, right))
        source = torch.randn(2**24)
        target = torch.empty_like(source)
        bandwidth = 2 * source.nbytes / _fastest(partial(target.copy_, source))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Real kernels are timed, so compute gets a higher share; dropout masks and transcendental functions cost more
    # than a copy.
    return Device(CPU, memory, flops, bandwidth, compute_share=0.8, bandwidth_share=0.4)


def _fastest(call: Callable[[], Any]) -> float:
    """Seconds of the fastest of many calls, because other processes share the machine."""
    import torch
    from torch.utils.benchmark import Timer

    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=PROBE_SECONDS).times)


def _precision(dtype: Any) -> str:
    return {"torch.float16": "fp16", "torch.bfloat16": "bf16"}.get(str(dtype), "fp32")


def parse_bytes(text: str) -> int:
    """Bytes of a size such as "15GB", "15 GiB", "800MB" or "123".

    Raises:
        ConfigError: the text is no such size.
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
