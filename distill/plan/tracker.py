"""A dispatch mode that records every allocation and every kernel of code that runs on fake tensors.

torch's `MemTracker` attributes memory to modules and to a single backward pass: it would count the gradients of
`torch.autograd.grad`, which sharpness-aware steps take, and the perturbation as "temporary", and it fails when a
trainer reads the value of a tensor. Here bytes belong to the phase that allocated them and can be relabeled later.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from distill.plan.allocator import CachingAllocator

# Integers determine the control flow (lengths, masks, duplicate texts): up to this many are computed for real.
REAL_ELEMENTS = 2**20

aten = torch.ops.aten
# Operations that launch no kernel.
_UNCOUNTED = frozenset({torch.ops.prim.device.default, aten.detach.default})
# Lookups read as many rows as they return, not the whole table.
_LOOKUPS = frozenset({aten.embedding.default, aten.index_select.default, aten.index.Tensor, aten.gather.default})


@dataclass(frozen=True)
class Operation:
    """One kernel.

    Attributes:
        flops: a multiplication and an addition count as two.
        bytes: read and written.
        dtype: that it computes in.
        phase: of the tracker when it ran.
    """

    flops: int
    bytes: int
    dtype: torch.dtype
    phase: str


class Tracker(TorchDispatchMode):
    """Enter it inside its own `fake` mode.

    Floating-point tensors are fake. Small operations without fake inputs are computed for real, so that lengths and
    masks are right. Reading the value of a fake tensor gives 1 or True: a loss is finite, a norm is above 0.

    Attributes:
        live: allocated bytes by kind.
        peak: highest sum of `live` since `reset_peak`.
        at_peak: `live` at that moment.
        operations: since `reset_peak`.
        phase: the kind of new allocations.
    """

    def __init__(self, block: int = 1, allocator: CachingAllocator | None = None) -> None:
        """Start with nothing allocated.

        Args:
            block: bytes that allocations are rounded up to.
            allocator: receives every allocation and release.
        """
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.phase = "activations"
        self.live: dict[str, int] = {}
        self.peak = 0
        self.at_peak: dict[str, int] = {}
        self.operations: list[Operation] = []
        self._block = block
        self._allocator = allocator
        self._total = 0
        # Storage address -> kind, bytes, and a weak reference whose callback counts the release.
        self._storages: dict[int, tuple[str, int, Any]] = {}

    def reset_peak(self) -> None:
        """Record the peak and the operations from now on; live allocations stay counted."""
        self.peak, self.at_peak = self._total, dict(self.live)
        self.operations = []

    @contextmanager
    def allocating(self, kind: str) -> Iterator[None]:
        """Set the phase to `kind` inside the block."""
        before, self.phase = self.phase, kind
        try:
            yield
        finally:
            self.phase = before

    def label(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Count these tensors as `kind` from now on, also if they were not tracked before."""
        for tensor in tensors:
            address = tensor.untyped_storage()._cdata
            if address not in self._storages:
                self._track(tensor, kind)
                continue
            before, size, reference = self._storages[address]
            self._storages[address] = kind, size, reference
            self.live[before] -= size
            self.live[kind] = self.live.get(kind, 0) + size

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _UNCOUNTED:
            return function(*args, **kwargs)
        inputs = _tensors((args, kwargs))
        fake = any(isinstance(tensor, FakeTensor) for tensor in inputs)
        if fake and function is aten._local_scalar_dense.default:
            return True if inputs[0].dtype is torch.bool else 1.0 if inputs[0].is_floating_point() else 1
        if not fake and self._runs_for_real(function, args, kwargs, inputs):
            with unset_fake_temporarily():
                result = function(*args, **kwargs)
        else:
            result = function(*args, **kwargs)
        outputs = _tensors(result)
        allocated = [tensor for tensor in outputs if tensor.untyped_storage()._cdata not in self._storages]
        for tensor in allocated:
            self._track(tensor, self.phase)
        if fake and (allocated or function._schema.is_mutable):
            self._record(function, args, kwargs, inputs, outputs, result)
        return result

    def _runs_for_real(self, function: Any, args: Any, kwargs: Any, inputs: list[Tensor]) -> bool:
        """Whether to compute an operation without fake inputs."""
        if sum(tensor.numel() for tensor in inputs) > REAL_ELEMENTS:
            return False
        if function._schema.is_mutable or function is aten._local_scalar_dense.default:
            return True
        try:
            outputs = _tensors(function(*args, **kwargs))
        except DynamicOutputShapeException:  # the output's size depends on the values
            return True
        if sum(tensor.numel() for tensor in outputs) > REAL_ELEMENTS:
            return False
        return bool(inputs) or not any(tensor.is_floating_point() for tensor in outputs)

    def _track(self, tensor: Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        address, blocks = storage._cdata, -(-storage.nbytes() // self._block)
        size = blocks * self._block
        block = None if self._allocator is None else self._allocator.allocate(size)

        def released(_: Any) -> None:
            if self._allocator is not None:
                self._allocator.release(block, size)
            self.live[self._storages.pop(address)[0]] -= size
            self._total -= size

        self._storages[address] = kind, size, weakref.ref(storage, released)
        self.live[kind] = self.live.get(kind, 0) + size
        self._total += size
        if self._total > self.peak:
            self.peak, self.at_peak = self._total, dict(self.live)

    def _record(
        self, function: Any, args: Any, kwargs: Any, inputs: list[Tensor], outputs: list[Tensor], result: Any
    ) -> None:
        count = flop_registry.get(function._overloadpacket)
        flops = int(count(*args, **kwargs, out_val=result)) if count is not None else 0
        written = sum(map(_bytes, outputs))
        read = written if function in _LOOKUPS else sum(map(_bytes, inputs))
        if not outputs:  # an in-place operation on lists
            written = read
        floats = [tensor.dtype for tensor in (*inputs, *outputs) if tensor.is_floating_point()]
        dtype = min(floats, key=lambda found: found.itemsize) if floats else torch.int64
        self.operations.append(Operation(flops, read + written, dtype, self.phase))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    """Bytes that a kernel touches: fewer than the elements of an expanded tensor."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
