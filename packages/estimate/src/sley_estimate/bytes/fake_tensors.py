"""Counts the memory of torch's fake tensors, and caches the results of operations, which the layers of a model repeat.

Each storage counts once, from its first use until it is freed. The positions of both events in the step are kept.

torch has its own cache of fake results, but computing a key for it takes longer than the operation. Here the key of a call
consists of its operator, its plain arguments, and the sizes, strides, offsets, dtypes and devices of its tensors. A cached
result is new memory, a view of an argument, or an argument itself. A call is not cached if its result depends on values, if an
argument is neither a fake tensor without values nor plain, or if it changes a shape in place.
"""

import math
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, UnsupportedOperatorException, in_kernel_invocation_manager

from sley_core.comm.device import storage_id
from sley_core.model.tensors import PLAIN_TYPES, run_uncompiled
from sley_estimate.layers.operators import scratch_bytes

ADDRESS_FACTOR = 1 << 44  # the address of a storage is its identifier times this number, which is larger than any storage


class StepPosition(NamedTuple):
    """A position in a run: the step, from 1 (0 before the first), the entry of the action list, and the layer called last."""

    step: int
    entry: Any
    layer: str


START = StepPosition(0, "the start of the run", "")  # the position before the first step


@dataclass(eq=False)
class Allocation:
    """The memory of one storage while it has one size, from event number `allocated_at` to `freed_at` (None while it is live).
    position, free_position: the positions at these events. owner: the part of the run that holds it between steps, or "".
    """

    num_bytes: int
    allocated_at: int
    position: StepPosition
    freed_at: int | None = None
    free_position: StepPosition | None = None
    owner: str = ""


class StageTooLargeError(Exception):
    """Raised for a stage that needs more bytes than allowed. Its argument is the memory that it needs at least, in bytes."""


class Ledger:
    """Records the memory of storages. locate: a function that returns the current position. allocations: all allocations so
    far, in order. current_bytes: the size of all live allocations. num_events: the number of allocations and frees so far.
    max_bytes: the limit of `current_bytes`, beyond which an allocation raises StageTooLargeError.
    """

    def __init__(self, locate: Callable[[], StepPosition] = lambda: START) -> None:
        self.locate = locate
        self.max_bytes = math.inf
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
        """Makes each `track` check whether `storage` was freed. Python's weak references miss this if torch also has a weak
        reference.
        """
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
            self._end_allocation(key)
        if num_bytes:
            self.num_events += 1
            self._live_allocations[key] = allocation = Allocation(num_bytes, self.num_events, self.locate())
            self.allocations.append(allocation)
            self.current_bytes += num_bytes
            if self.current_bytes > self.max_bytes:
                raise StageTooLargeError(self.current_bytes)

    def record_scratch(self, num_bytes: int) -> None:
        """Records that an operator allocates `num_bytes` bytes and frees them before it ends."""
        if num_bytes:
            self.num_events += 2
            position = self.locate()
            self.allocations.append(Allocation(num_bytes, self.num_events - 1, position, self.num_events, position))

    def address(self, storage: torch.UntypedStorage) -> int:
        """Returns an address for `storage`, or 0 if it is empty. Two live storages overlap only after `share_address`."""
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
        """Treats the memory of `tensor` as another device's: sets its allocation to 0 bytes, and ignores its storage."""
        key = storage_id(tensor)
        self._references.pop(key, None)
        if (allocation := self._live_allocations.pop(key, None)) is not None:
            self.current_bytes -= allocation.num_bytes
            allocation.num_bytes = 0
        self.ignore(tensor)

    def backdate(self, owners: Collection[str], event: int, position: StepPosition) -> None:
        """Sets the start of live allocations of `owners` to event number `event` and to `position`, if they start later."""
        for allocation in self._live_allocations.values():
            if allocation.owner in owners and allocation.allocated_at > event:
                allocation.allocated_at, allocation.position = event, position

    def peak(self) -> tuple[int, StepPosition, list[Allocation]]:
        """Returns the peak bytes, the last position at which they were reached, and the allocations that were live there."""
        num_bytes, event = max(((total, time) for time, total, _ in self._byte_totals()), default=(0, 0))
        position = next((allocation.position for allocation in self.allocations if allocation.allocated_at == event), START)
        alive = [
            allocation
            for allocation in self.allocations
            if allocation.allocated_at <= event and (allocation.freed_at is None or allocation.freed_at > event)
        ]
        return num_bytes, position, alive

    def curve(self, step: int) -> list[tuple[str, int]]:
        """Returns (entry, peak bytes) for each entry of step number `step` that allocated or freed memory, in order."""
        positions = ((total, position.entry) for _, total, position in self._byte_totals() if position.step == step)
        return [(str(entry), max(total for total, _ in group)) for entry, group in groupby(positions, key=itemgetter(1))]

    def _byte_totals(self) -> Iterator[tuple[int, int, StepPosition]]:
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
            self._end_allocation(key)

    def _end_allocation(self, key: int) -> None:
        """Ends the live allocation of the storage with the identifier `key`, at the current position."""
        allocation = self._live_allocations.pop(key)
        self.num_events += 1
        allocation.freed_at, allocation.free_position = self.num_events, self.locate()
        self.current_bytes -= allocation.num_bytes


MAX_CONSTANT_NUMEL = 1 << 20  # the maximum number of elements of a fake tensor that keeps values, which follow from the batch

_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default  # the operator that returns a tensor's device
_SET_STORAGE_OPS = {_aten.set_.source_Storage, _aten.set_.source_Storage_storage_offset}
"""The operators that give a tensor another storage."""

_PLAIN_TYPES = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""The types of arguments whose values are part of the key of a call."""
_UNCACHED_OPS = {_aten._local_scalar_dense.default, _aten.resize_.default}
"""Operators whose calls are not cached: the first one reads a value, and the second one changes a shape in place."""


class FakeTensors(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Makes new tensors fake within the mode. Counts their memory in `ledger`, even outside the mode. listener: called after
    each operation with the key of the call or None, the operator, its arguments, its keyword arguments and its result; None by
    default. has_scratch: whether to count the memory that CPU operators allocate internally. An operation whose result depends
    on values raises torch's DataDependentOutputException or a similar exception.
    """

    _results: ClassVar[dict[Hashable, "_CachedResult"]] = {}

    def __init__(self, ledger: Ledger, *, has_scratch: bool = True) -> None:
        super().__init__(allow_fallback_kernels=False, allow_non_fake_inputs=True)
        self.ledger = ledger
        self.listener: Callable[[Hashable | None, Any, Any, Any, Any], None] | None = None
        self.has_scratch = has_scratch
        self._depth = 0
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False, since no compiled function runs in this mode (`run_uncompiled`)."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # called more often than all other operators
            return args[0].fake_device
        with torch._C.DisableTorchFunction():  # keeps torch-function modes out of queries of sizes
            return self.dispatch(func, types, args, kwargs)

    def make_fake(self, elem: Tensor, device: torch.device) -> FakeTensor:
        """Creates the same tensor as `FakeTensor(self, elem, device)`, but faster, and without counting its memory. elem: a
        tensor on meta.
        """
        if device not in self._attributes:
            self._attributes[device] = dict(vars(FakeTensor(self, elem, device)))
        fake: FakeTensor = Tensor._make_subclass(FakeTensor, elem, False, dispatch_device=True, device_for_backend_keys=device)
        torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(self._attributes[device])
        return fake

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation without values, or replays its cached result. Counts new memory, and calls the listener."""
        kwargs = kwargs or {}
        if func in _SET_STORAGE_OPS:  # torch's own cache would keep the storage alive in its key
            with in_kernel_invocation_manager(self):
                func(*args, **kwargs)
            self._track_results(args[0])
            return args[0]
        key = _call_key(func, args, kwargs) if not self._depth else None
        cached = self._results.get(key) if key is not None else None
        if cached is not None:
            inputs, scratch = _fake_tensors(args, kwargs), cached.scratch
            results = [self._replay_result(recipe, inputs) for recipe in cached.recipes]
            result = cached.container(results) if cached.container is not None else results[0]
        else:
            result = self._run_in_torch(func, types, args, kwargs)
            if self._depth:
                return result
            self._track_results(result)
            scratch = scratch_bytes(func, args, kwargs, result)
            if key is not None:
                self._store_result(key, args, kwargs, result, scratch)
        if self.has_scratch:
            self.ledger.record_scratch(scratch)
        if self.listener is not None:
            self.listener(key, func, args, kwargs, result)
        return result

    def _run_in_torch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Lets torch run an operation. Returns None for an operation without results that torch cannot run this way."""
        self._depth += 1
        try:
            return super().dispatch(func, types, args, kwargs)
        except UnsupportedOperatorException:
            if func._schema.returns:
                raise
        finally:
            self._depth -= 1

    def _store_result(self, key: Hashable, args: Sequence[Any], kwargs: dict[str, Any], result: Any, scratch: int) -> None:
        """Caches the result of a call under `key`, unless the result cannot be made again from the call's arguments."""
        inputs = _fake_tensors(args, kwargs)
        container = type(result) if isinstance(result, tuple | list) else None
        items = result if container else [result]
        try:
            recipes = [_make_recipe(item, inputs) for item in items]
        except _UncacheableError:
            return
        pairs = zip(items, recipes, strict=True)
        new_storages = [storage_id(item) for item, recipe in pairs if recipe is not None and recipe[0] == "new"]
        if container in (None, tuple, list) and len(set(new_storages)) == len(new_storages):
            self._results[key] = _CachedResult(container, recipes, scratch)

    def _replay_result(self, recipe: Any, inputs: Sequence[FakeTensor]) -> Any:
        """Makes a result from its recipe (`_make_recipe`). inputs: the fake tensors among the arguments of the call."""
        if recipe is None:
            return None
        recipe_type, source, size, stride, dtype, device = recipe
        if recipe_type == "same":
            return inputs[source]
        is_new = recipe_type == "new"
        elem = torch.empty_strided(size if is_new else (0,), stride if is_new else (1,), dtype=dtype, device="meta")
        if not is_new:
            index, offset = source
            elem.set_(inputs[index].untyped_storage(), offset, size, stride)
        fake = self.make_fake(elem, device)
        if is_new:
            self.ledger.track(fake)
        return fake

    def _track_results(self, result: Any) -> None:
        if isinstance(result, FakeTensor):
            self.ledger.track(result)
        elif isinstance(result, tuple | list):
            for item in result:
                self._track_results(item)

    def allocate_uncounted(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns a new fake tensor of shape [numel], whose memory the ledger never counts."""
        with self:
            fake: Any = super().dispatch(_aten.empty.memory_format, (), ([numel],), {"dtype": dtype})
        self.ledger.ignore(fake)
        result: Tensor = fake
        return result

    @contextmanager
    def patch_torch(self) -> Iterator[None]:
        """Patches torch within the block, so that the ledger notices resized storages and weak references to storages, and
        `data_ptr` returns an address for fake tensors.
        """
        storage_type, ledger = torch.UntypedStorage, self.ledger
        resize, address, weak_ref = storage_type.resize_, storage_type.data_ptr, storage_type._weak_ref

        def resize_storage(storage: torch.UntypedStorage, num_bytes: int) -> Any:
            result = resize(storage, num_bytes)
            ledger.update_size(storage)
            return result

        def weak_reference(storage: torch.UntypedStorage) -> Any:
            if storage.device.type == "meta":
                ledger.poll(storage)
            return weak_ref(storage)

        def storage_address(storage: torch.UntypedStorage) -> int:
            return ledger.address(storage) if storage.device.type == "meta" else address(storage)

        def tensor_address(tensor: FakeTensor) -> int:
            start = ledger.address(tensor.untyped_storage())
            return start + int(tensor.storage_offset()) * tensor.element_size() if start else 0

        changes = {
            (torch.UntypedStorage, "resize_"): resize_storage,
            (torch.UntypedStorage, "data_ptr"): storage_address,
            (torch.UntypedStorage, "_weak_ref"): weak_reference,
            (FakeTensor, "data_ptr"): tensor_address,
        }
        with ExitStack() as stack:
            stack.enter_context(run_uncompiled())
            stack.callback(PLAIN_TYPES.discard, FakeTensor)
            PLAIN_TYPES.add(FakeTensor)
            for (owner, name), replacement in changes.items():
                stack.enter_context(patch.object(owner, name, replacement))
            yield

    def keep_values(self, value: Tensor, *, counts: bool = False) -> Tensor:
        """Returns a fake tensor that keeps the values of `value`. Results that are computed on the CPU from such tensors alone
        keep their values too, up to `MAX_CONSTANT_NUMEL` elements. counts: whether the ledger counts the memory of `value`.
        """
        fake = self.fake_tensor_converter.from_real_tensor(self, value, make_constant=True)
        if counts:
            self.ledger.track(fake)
        else:
            self.ledger.ignore(fake)
        return fake

    def may_turn_const(self, t: Tensor) -> bool:
        """Returns whether a result `t` keeps its values. torch itself keeps only the values of single elements."""
        return t.numel() <= MAX_CONSTANT_NUMEL and not self.is_our_fake(t) and t.device.type == "cpu" and not t.is_sparse


class _UncacheableError(Exception):
    """Raised for a call that cannot be cached."""


class _CachedResult(NamedTuple):
    """The cached result of a call. container: the type of a list or tuple of results; None for a single result. recipes: how to
    make each result again. scratch: the number of bytes that the operator allocates internally.
    """

    container: type | None
    recipes: Sequence[Any]
    scratch: int


def _call_key(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Hashable | None:
    """Returns the key of a call, or None for a call that is never cached."""
    name = _operator_name(func)
    if name is None:
        return None
    try:
        named = tuple((key, _argument_key(value)) for key, value in kwargs.items()) if kwargs else ()
        return name, tuple(map(_argument_key, args)), named
    except _UncacheableError:
        return None


@cache
def _operator_name(func: Any) -> str | None:
    """Returns the name of torch's operator `func`, or None if its calls are never cached."""
    is_uncached = func in _UNCACHED_OPS or torch.Tag.inplace_view in func.tags or torch.Tag.data_dependent_output in func.tags
    return None if is_uncached else func.name()


def _argument_key(value: Any) -> Hashable:
    """Returns the key of one argument. Raises _UncacheableError for an object that is not plain, or a tensor with values."""
    value_type = type(value)
    if value_type is FakeTensor:
        if value.constant is not None or value.layout is not torch.strided:
            raise _UncacheableError
        is_lazy = value.is_conj() or value.is_neg()
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device, is_lazy
    if value_type is list or value_type is tuple:
        return value_type, tuple(map(_argument_key, value))
    if value_type in _PLAIN_TYPES:
        return value_type, value
    raise _UncacheableError


def _fake_tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> list[FakeTensor]:
    """Returns the fake tensors among the arguments of a call in order, including those in lists and tuples."""
    tensors: list[FakeTensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, FakeTensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += [item for item in value if isinstance(item, FakeTensor)]
    return tensors


def _make_recipe(result: Any, inputs: Sequence[FakeTensor]) -> Any:
    """Returns a recipe to make `result` again; None if `result` is None. The recipe starts with "same" if `result` is an
    argument, with "view" if it is a view of an argument, or with "new". Raises _UncacheableError if there is no recipe.
    """
    if result is None:
        return None
    if type(result) is not FakeTensor or result.constant is not None or result.layout is not torch.strided:
        raise _UncacheableError
    if result.is_conj() or result.is_neg() or result.requires_grad:
        raise _UncacheableError
    for index, tensor in enumerate(inputs):
        if result is tensor:
            return "same", index, None, None, None, None
    storage = storage_id(result)
    size, stride, dtype, device = tuple(result.shape), result.stride(), result.dtype, result.fake_device
    for index, tensor in enumerate(inputs):
        if storage_id(tensor) == storage:
            return "view", (index, result.storage_offset()), size, stride, dtype, device
    minimal_bytes = torch.empty_strided(size, stride, dtype=dtype, device="meta").untyped_storage().nbytes()
    if result.storage_offset() or result.untyped_storage().nbytes() != minimal_bytes:
        raise _UncacheableError
    return "new", None, size, stride, dtype, device
