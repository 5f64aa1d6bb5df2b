"""Follows every storage and every operation of code that runs on fake tensors.

torch's own `MemTracker` attributes memory to modules and to one backward pass; gradients of `torch.autograd.grad`,
which sharpness-aware steps take, and their perturbation would be "temporary" to it, and what a trainer asks of a
value ends it. Here bytes belong to the phase that allocated them, and can be told later to be something else.
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

# Integers decide (lengths, masks, which texts are the same): they are computed, unless they are many.
REAL_ELEMENTS = 2**20

aten = torch.ops.aten
# Operations on the way that are no kernels.
_UNCOUNTED = frozenset({torch.ops.prim.device.default, aten.detach.default})
# They read as many rows as they give, not the whole table.
_LOOK_UPS = frozenset({aten.embedding.default, aten.index_select.default, aten.index.Tensor, aten.gather.default})


@dataclass(frozen=True)
class Operation:
    """One kernel.

    Attributes:
        flops: a multiplication and an addition are two.
        bytes: read and written.
        dtype: that it computes in.
        phase: in which it was.
    """

    flops: int
    bytes: int
    dtype: torch.dtype
    phase: str


class Tracker(TorchDispatchMode):
    """Enter it inside its own fake mode.

    Floating-point tensors are fake. Operations on few numbers of which none is fake are carried out, so that code
    that asks for lengths or masks gets true answers. A question about a fake value is answered with 1 or True: a
    loss is finite, a norm above 0.

    Attributes:
        live: bytes of each kind by now.
        peak: their highest sum since `forget`.
        at_peak: bytes of each kind at that moment.
        operations: since `forget`.
        phase: the kind of what is allocated from here on.
    """

    def __init__(self, block: int = 1, allocator: CachingAllocator | None = None) -> None:
        """Follow nothing yet.

        Args:
            block: bytes that the device's allocator rounds up to.
            allocator: is told of everything.
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
        # By the address of a storage: its kind and bytes, and a reference that tells when it is gone.
        self._known: dict[int, tuple[str, int, Any]] = {}

    def forget(self) -> None:
        """Look for the peak, and list operations, from now on; what is live stays so."""
        self.peak, self.at_peak = self._total, dict(self.live)
        self.operations = []

    @contextmanager
    def allocating(self, kind: str) -> Iterator[None]:
        """What the block allocates is of this kind."""
        before, self.phase = self.phase, kind
        try:
            yield
        finally:
            self.phase = before

    def declare(self, tensors: Iterable[Tensor], kind: str) -> None:
        """These are of this kind, whoever allocated them; one that was not known is counted from now on."""
        for tensor in tensors:
            address = tensor.untyped_storage()._cdata
            if address not in self._known:
                self._follow(tensor, kind)
                continue
            before, size, reference = self._known[address]
            self._known[address] = kind, size, reference
            self.live[before] -= size
            self.live[kind] = self.live.get(kind, 0) + size

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _UNCOUNTED:
            return function(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        fake = any(isinstance(tensor, FakeTensor) for tensor in inputs)
        if fake and function is aten._local_scalar_dense.default:
            return True if inputs[0].dtype is torch.bool else 1.0 if inputs[0].is_floating_point() else 1
        if not fake and self._decides(function, args, kwargs, inputs):
            with unset_fake_temporarily():
                result = function(*args, **kwargs)
        else:
            result = function(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        allocated = [tensor for tensor in outputs if tensor.untyped_storage()._cdata not in self._known]
        for tensor in allocated:
            self._follow(tensor, self.phase)
        if fake and (allocated or function._schema.is_mutable):
            self._record(function, args, kwargs, inputs, outputs, result)
        return result

    def _decides(self, function: Any, args: Any, kwargs: Any, inputs: list[Tensor]) -> bool:
        """Whether an operation none of whose inputs is fake is carried out."""
        if sum(tensor.numel() for tensor in inputs) > REAL_ELEMENTS:
            return False
        if function._schema.is_mutable or function is aten._local_scalar_dense.default:
            return True
        try:
            outputs = [leaf for leaf in tree_leaves(function(*args, **kwargs)) if isinstance(leaf, Tensor)]
        except DynamicOutputShapeException:  # as many as the inputs' numbers say
            return True
        if sum(tensor.numel() for tensor in outputs) > REAL_ELEMENTS:
            return False
        return bool(inputs) or not any(tensor.is_floating_point() for tensor in outputs)

    def _follow(self, tensor: Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        address, blocks = storage._cdata, -(-storage.nbytes() // self._block)
        size = blocks * self._block

        piece = None if self._allocator is None else self._allocator.allocate(size)

        def gone(_: Any) -> None:
            if self._allocator is not None:
                self._allocator.release(piece, size)
            its = self._known.pop(address)[0]
            self.live[its] -= size
            self._total -= size

        self._known[address] = kind, size, weakref.ref(storage, gone)
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
        read = written if function in _LOOK_UPS else sum(map(_bytes, inputs))
        if not outputs:  # of lists, in place
            written = read
        floats = [tensor.dtype for tensor in (*inputs, *outputs) if tensor.is_floating_point()]
        dtype = min(floats, key=lambda found: found.itemsize) if floats else torch.int64
        self.operations.append(Operation(flops, read + written, dtype, self.phase))


def _bytes(tensor: Tensor) -> int:
    """That a kernel touches: an expanded tensor's are fewer than its elements'."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
