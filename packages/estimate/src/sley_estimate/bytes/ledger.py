"""Counts memory. Each storage counts once, from its first use until it is freed. The position in the step is kept for both."""

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as PROMOTION
from torch._prims_common import elementwise_dtypes

from sley_core.comm.device import storage_id

ADDRESS_FACTOR = 1 << 44
"""The address of a storage is its identifier times this number, which is larger than any storage, so addresses never overlap.
"""


class StepPosition(NamedTuple):
    """A position in a run: the step, from 1 (0 before the first), the entry of the action list, and the layer called last."""

    step: int
    entry: Any
    layer: str


START = StepPosition(0, "the start of the run", "")


@dataclass(eq=False)
class Allocation:
    """The memory of one storage, from event number `allocated_at` to event number `freed_at` (None while it is live). A storage
    that is resized has one allocation per size.

    position, free_position: the positions at these two events. owner: the part of the run that holds the memory between steps,
    or "".
    """

    num_bytes: int
    allocated_at: int
    position: StepPosition
    freed_at: int | None = None
    free_position: StepPosition | None = None
    owner: str = ""


class Ledger:
    """Records the memory of storages. locate: a function that returns the current position. allocations: all allocations, in
    the order of their first events. current_bytes: the bytes of live allocations. num_events: the number of allocations and
    frees so far.
    """

    def __init__(self, locate: Callable[[], StepPosition] = lambda: START) -> None:
        self.locate = locate
        self.allocations: list[Allocation] = []
        self.current_bytes = 0
        self.num_events = 0
        self._live_allocations: dict[int, Allocation] = {}
        self._shared_addresses: dict[int, int] = {}
        self._keys_to_poll: set[int] = set()
        self._poll_references: dict[int, int] = {}
        self._ignored_references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def track(self, tensor: Tensor) -> None:
        """Counts the storage of `tensor` until it is freed, with its current size. Does nothing for an ignored storage."""
        for watched, reference in list(self._poll_references.items()):
            if torch.UntypedStorage._expired(reference):
                del self._poll_references[watched]
                torch.UntypedStorage._free_weak_ref(reference)  # type: ignore[no-untyped-call]
                self._record_free(watched, None)
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._ignored_references:
            return
        if key not in self._references:
            self._references[key] = weakref.ref(storage, partial(self._record_free, key))
            if key in self._keys_to_poll:
                self._keys_to_poll.discard(key)
                self.poll(storage)
        self.update_size(storage)

    def ignore(self, tensor: Tensor) -> None:
        """Makes `track` ignore the storage of `tensor` from now on."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._ignored_references[key] = weakref.ref(storage, partial(self._remove_ignored, key))

    def poll(self, storage: torch.UntypedStorage) -> None:
        """Makes each `track` check whether `storage` is free, which weak references do not notice while torch holds its own."""
        key = storage._cdata
        if key not in self._references:
            self._keys_to_poll.add(key)
        elif key not in self._poll_references:
            self._poll_references[key] = torch._C.StorageBase._weak_ref(storage)  # type: ignore[attr-defined]

    def update_size(self, storage: torch.UntypedStorage) -> None:
        """Records the current size of a counted storage. Does nothing for other storages."""
        key = storage._cdata
        if key not in self._references:
            return
        allocation, num_bytes = self._live_allocations.get(key), storage.nbytes()
        if (allocation.num_bytes if allocation else 0) == num_bytes:
            return
        if allocation is not None:
            self._free(key)
        if num_bytes:
            self.num_events += 1
            self._live_allocations[key] = allocation = Allocation(num_bytes, self.num_events, self.locate())
            self.allocations.append(allocation)
            self.current_bytes += num_bytes

    def record_scratch(self, num_bytes: int) -> None:
        """Records `num_bytes` bytes that an operator allocates and frees again."""
        if num_bytes:
            self.num_events += 2
            position = self.locate()
            self.allocations.append(Allocation(num_bytes, self.num_events - 1, position, self.num_events, position))

    def address(self, storage: torch.UntypedStorage) -> int:
        """Returns an address for `storage`, or 0 if it is empty. Live storages overlap only after `share_address`."""
        key = storage._cdata
        return self._shared_addresses.get(key, key * ADDRESS_FACTOR) if storage.nbytes() else 0

    def share_address(self, tensor: Tensor, memory: Tensor) -> None:
        """Gives `tensor`, whose storage must be ignored, the address of `memory`. Both stand for the same memory."""
        storage = tensor.untyped_storage()
        assert storage._cdata in self._ignored_references, "memory of two storages would count twice"
        start = self.address(memory.untyped_storage()) + int(memory.storage_offset()) * memory.element_size()
        self._shared_addresses[storage._cdata] = start

    def live_allocation(self, tensor: Tensor) -> Allocation | None:
        """Returns the live allocation that holds `tensor`, or None if it is empty or not counted."""
        return self._live_allocations.get(storage_id(tensor))

    def exclude(self, tensor: Tensor) -> None:
        """Treats the memory of `tensor` as that of another device: sets its allocation to 0 bytes, and ignores its storage."""
        key = storage_id(tensor)
        self._references.pop(key, None)
        if (allocation := self._live_allocations.pop(key, None)) is not None:
            self.current_bytes -= allocation.num_bytes
            allocation.num_bytes = 0
        self.ignore(tensor)

    def backdate(self, owners: Collection[str], event: int, position: StepPosition) -> None:
        """Moves the start of live allocations of `owners` back to event number `event` and `position`, if they start later."""
        for allocation in self._live_allocations.values():
            if allocation.owner in owners and allocation.allocated_at > event:
                allocation.allocated_at, allocation.position = event, position

    def peak(self) -> tuple[int, StepPosition, list[Allocation]]:
        """Returns the peak bytes, their last position, and the allocations then live; 0, `START` and [] without memory."""
        num_bytes, event = max(((total, time) for time, total, _ in self._totals()), default=(0, 0))
        position = next((allocation.position for allocation in self.allocations if allocation.allocated_at == event), START)
        alive = [
            allocation
            for allocation in self.allocations
            if allocation.allocated_at <= event and (allocation.freed_at is None or allocation.freed_at > event)
        ]
        return num_bytes, position, alive

    def curve(self, step: int) -> list[tuple[str, int]]:
        """Returns (entry, peak bytes) for each entry of step number `step` that allocated or freed memory, in order."""
        positions = ((total, position.entry) for _, total, position in self._totals() if position.step == step)
        return [(str(entry), max(total for total, _ in group)) for entry, group in groupby(positions, key=itemgetter(1))]

    def _totals(self) -> Iterator[tuple[int, int, StepPosition]]:
        """Yields (number of the event, bytes after it, position) for each event in order."""
        events = [(allocation.allocated_at, allocation.num_bytes, allocation.position) for allocation in self.allocations]
        events += [
            (allocation.freed_at, -allocation.num_bytes, allocation.free_position)
            for allocation in self.allocations
            if allocation.freed_at and allocation.free_position
        ]
        total = 0
        for event, change, position in sorted(events):
            total += change
            yield event, total, position

    def _remove_ignored(self, key: int, _: object) -> None:
        del self._ignored_references[key]
        self._shared_addresses.pop(key, None)

    def _record_free(self, key: int, _: object) -> None:
        self._references.pop(key, None)
        if key in self._live_allocations:
            self._free(key)

    def _free(self, key: int) -> None:
        allocation = self._live_allocations.pop(key)
        self.num_events += 1
        allocation.freed_at, allocation.free_position = self.num_events, self.locate()
        self.current_bytes -= allocation.num_bytes


_aten = torch.ops.aten
_SELECT_OPS = {_aten.where, _aten.masked_fill}  # operators whose bool condition is not converted

_REDUCTION_OPS = {_aten.sum, _aten.mean, _aten.prod, _aten.linalg_vector_norm}
"""Operators that convert their input to the dtype of their result; `mean` converts its input to at least fp32."""


def scratch_bytes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Returns the bytes of the copies that the CPU operator `func` makes internally to convert its tensors to a common dtype,
    as `fp32.add_(fp16)` does: a TensorIterator kernel works on one dtype. Returns 0 if `func` is neither an elementwise
    operator nor a reduction.
    """
    packet = func._overloadpacket
    if packet in _REDUCTION_OPS:
        is_mean = packet is _aten.mean and result.dtype.is_floating_point
        return _conversion_bytes([args[0]], torch.promote_types(result.dtype, torch.float32) if is_mean else result.dtype)
    if torch.Tag.pointwise not in func.tags or not isinstance(result, Tensor):
        return 0
    inputs = [*args, *(value for name, value in kwargs.items() if name != "out")]
    if packet in _SELECT_OPS:
        inputs = [value for value in inputs if not (isinstance(value, Tensor) and value.dtype == torch.bool)]
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    if all(tensor.dtype == result.dtype for tensor in tensors):
        return 0
    numbers = (value for value in inputs if isinstance(value, Tensor | bool | int | float))
    common = elementwise_dtypes(*numbers, type_promotion_kind=PROMOTION.DEFAULT)[1]
    if result.dtype.is_floating_point and not common.is_floating_point:
        common = result.dtype  # a floating-point result from integers, as in a division
    is_in_place = "out" in kwargs or any(result is tensor for tensor in tensors)
    outputs = [result] if is_in_place and result.dtype != torch.bool else []
    return _conversion_bytes([*tensors, *outputs], common)


def _conversion_bytes(tensors: Sequence[Tensor], dtype: torch.dtype) -> int:
    return sum(tensor.numel() * dtype.itemsize for tensor in tensors if tensor.dtype != dtype)
