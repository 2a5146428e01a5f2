"""Checks with vector clocks that a program's waits order all conflicting memory accesses.

The workers are the host, the device and the copy streams. Each executes its operations in order. The clock of a worker contains
for each other worker the number of operations that are complete before the worker's next operation. A wait merges the clock on
the right of an arrow into the clocks on its left:

    stream.wait_for_device()   stream <- device       the work that was issued to the device so far
    stream.wait_for(e)         stream <- e            the work of the event's stream before the event, and its dependencies
    e.make_device_wait()       device <- e
    e.wait()                   host, device <- e      the host issues all work, so later work is ordered after the event

Two accesses to the same bytes conflict if at least one is a write, and clocks must order them. A missing wait is found in every
run, even if its results are correct. Freeing memory, or dropping its last reference, counts as a write by the device.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from sley_core.comm.device import storage_id

Clock = dict[int, int]
"""Maps a worker to the number of its operations before some point. The device is worker 0; streams are numbered from 1."""

DEVICE = 0  # the number of the worker that stands for the device
_SWEEP_EVERY = 4096  # after this number of device operations, the records of freed storages are removed
_MAX = 1 << 62  # more than any number of bytes or operations


def merge_clocks(clock: Clock, event_clock: Clock) -> None:
    """Updates `clock` in place: sets each entry to the maximum of itself and the same entry of `event_clock`."""
    for worker, number in event_clock.items():
        clock[worker] = max(clock.get(worker, 0), number)


@dataclass(frozen=True)
class CopyEnd:
    """Describes the source or the target of copy `number` of `stream`: the bytes [start, end) of a storage. writes: True for
    the target. description: describes this end in messages.
    """

    stream: int
    number: int
    start: int
    end: int
    writes: bool
    description: str

    def is_complete(self, clock: Clock) -> bool:
        """Returns whether the copy is complete according to `clock`."""
        return self.number <= clock.get(self.stream, 0)

    def supersedes(self, other: "CopyEnd") -> bool:
        """Returns whether any access that conflicts with the earlier end `other` also conflicts with this end."""
        includes_bytes = self.start <= other.start and self.end >= other.end
        return self.stream == other.stream and includes_bytes and self.writes >= other.writes

    def __str__(self) -> str:
        return f"copy {self.number} of stream {self.stream}, {self.description},"


@dataclass
class _Accesses:
    """Holds the accesses to one storage. reference: a weak reference that prevents reuse of the storage's address. copies: the
    ends of copies that may be in flight. device_accesses: for each byte range, the numbers of the device's last read and write.
    """

    reference: Any
    is_host: bool = False
    copies: list[CopyEnd] = field(default_factory=list)
    device_accesses: dict[tuple[int, int], list[int]] = field(default_factory=dict)


class RaceDetector:
    """Records the memory accesses of operations and copies. Raises AssertionError if no wait orders conflicting accesses."""

    def __init__(self) -> None:
        self.host: Clock = {}
        self.device: Clock = {DEVICE: 0}
        self.streams: defaultdict[int, Clock] = defaultdict(dict)
        self._memory: dict[int, _Accesses] = {}  # by the address of the storage object, which the weak reference reserves
        self._memory_with_copies: dict[int, _Accesses] = {}

    def mark_host_memory(self, data: Tensor) -> None:
        """Marks the memory of `data` as host memory, which the host may use only after a `wait`."""
        self._memory_of(data.untyped_storage()).is_host = True

    def record_operation(self, name: str, accesses: "Sequence[Access]") -> None:
        """Records the operation `name`. The host executes it if all its tensors are in host memory, otherwise the device."""
        if self.device[DEVICE] % _SWEEP_EVERY == 0:
            self.check_freed_memory()
            self._memory = {key: memory for key, memory in self._memory.items() if not memory.reference.expired()}
        storages = ((get_storage(access.tensor), access) for access in accesses)
        pairs = [(self._memory_of(storage), access) for storage, access in storages if storage is not None]
        is_host = bool(pairs) and all(memory.is_host for memory, _ in pairs)
        if not is_host:
            self.device[DEVICE] += 1
        for memory, access in pairs:
            byte_span = byte_range(access.tensor)
            if memory.copies:
                clock, wait = (self.host, "`wait`") if is_host else (self.device, "`make_device_wait`")
                self._check_copies(memory, clock, (*byte_span, access.writes), access.describe(name), wait)
            if not memory.is_host:
                memory.device_accesses.setdefault(byte_span, [0, 0])[access.writes] = self.device[DEVICE]

    def record_resize(self, storage: torch.UntypedStorage) -> None:
        """Records that the device frees or replaces the memory of `storage`."""
        memory = self._memory_of(storage)
        self.device[DEVICE] += 1
        text = f"the storage of {storage.nbytes()} bytes is resized"
        self._check_copies(memory, self.device, (0, _MAX, True), text, "`make_device_wait`")
        memory.device_accesses = {(0, _MAX): [0, self.device[DEVICE]]}
        memory.copies.clear()

    def record_copy(self, stream: int, target: Tensor, source: Tensor) -> int:
        """Records a copy, even if it conflicts. Returns the number of the copy on its stream, counted from 1."""
        clock = self.streams[stream]
        merge_clocks(clock, self.host)
        number = clock.get(stream, 0) + 1
        ends = [(target, True, f"into {describe_tensor(target)}"), (source, False, f"from {describe_tensor(source)}")]
        try:
            for end in ends:
                self._check_copy_end(stream, clock, *end)
        finally:
            clock[stream] = number
            for tensor, writes, text in ends:
                memory = self._memory_of(tensor.untyped_storage())
                new = CopyEnd(stream, number, *byte_range(tensor), writes, text)
                remaining = [old for old in memory.copies if not (new.supersedes(old) or old.is_complete(self.host))]
                memory.copies = [*remaining, new]
                self._memory_with_copies[storage_id(tensor)] = memory
        return number

    def check_freed_memory(self) -> None:
        """Asserts that no memory has lost its last reference while copies from or to this memory may be in flight."""
        for key, memory in [*self._memory_with_copies.items()]:
            memory.copies = [copy for copy in memory.copies if not copy.is_complete(self.host)]
            if not memory.copies:
                del self._memory_with_copies[key]
        for key in [key for key, memory in self._memory_with_copies.items() if memory.reference.expired()]:
            memory = self._memory_with_copies.pop(key)
            clock, wait = (self.host, "`wait`") if memory.is_host else (self.device, "`make_device_wait`")
            for copy in memory.copies:
                assert copy.is_complete(clock), f"memory was freed while {copy} may be in flight: {wait} is missing"

    def _check_copy_end(self, stream: int, clock: Clock, tensor: Tensor, writes: bool, text: str) -> None:
        """Asserts that one end of a copy is ordered after conflicting accesses of the device and of other streams."""
        memory = self._memory_of(tensor.untyped_storage())
        start, end = byte_range(tensor)
        for (other_start, other_end), (last_read, last_write) in memory.device_accesses.items():
            number = max(last_read, last_write) if writes else last_write
            assert not (other_start < end and start < other_end) or number <= clock.get(DEVICE, 0), (
                f"stream {stream} copies {text}, which the device {'wrote' if number == last_write else 'read'} after "
                "the stream last followed it: `wait_for_device` is missing"
            )
        ordered = {worker: number for worker, number in clock.items() if worker != stream} | {stream: _MAX}
        self._check_copies(memory, ordered, (start, end, writes), f"stream {stream} copies {text}", "`wait_for`")

    def _check_copies(self, memory: _Accesses, clock: Clock, access: tuple[int, int, bool], text: str, wait: str) -> None:
        """Asserts that no copy in flight conflicts with `access`: its byte range, and whether it writes. text, wait: describe
        the access and the missing wait in the message.
        """
        start, end, writes = access
        for copy in memory.copies:
            is_disjoint = copy.end <= start or end <= copy.start
            assert is_disjoint or not (writes or copy.writes) or copy.is_complete(clock), (
                f"{text} while {copy} may be in flight: {wait} is missing"
            )

    def _memory_of(self, storage: torch.UntypedStorage) -> _Accesses:
        """Returns the accesses to `storage`, which are new and empty at the first call."""
        memory = self._memory.get(storage._cdata)
        if memory is None:
            memory = self._memory[storage._cdata] = _Accesses(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
        return memory


_SHAPE_ONLY = {"resize_", "resize_as_", "set_", "is_same_size", "is_pinned", "record_stream", "_unsafe_view"}
"""Operations that change or read only metadata, such as shapes. Views are recognized by their schemas instead."""

_HOST_READS = ("numpy", "tolist", "__dlpack__")
"""Tensor methods that read or export values without a torch operation."""


@dataclass(frozen=True)
class Access:
    """Holds a tensor of an operation, and whether the operation writes to it."""

    tensor: Tensor
    writes: bool

    def describe(self, operation: str) -> str:
        """Returns the access by `operation` as text."""
        return f"{operation} {'writes' if self.writes else 'reads'} {describe_tensor(self.tensor)}"


def get_storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """Returns the storage of `tensor`, or None for meta tensors, sparse tensors and subclasses with `__torch_dispatch__`."""
    if type(tensor).__torch_dispatch__ != Tensor.__torch_dispatch__ or tensor.is_meta or tensor.layout != torch.strided:
        return None
    return tensor.untyped_storage()


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """Returns the offsets in bytes of the start and end of `tensor` in its storage; (0, 0) if `tensor` is empty."""
    if tensor.numel() == 0:
        return 0, 0
    if tensor.is_contiguous():
        start = int(tensor.storage_offset()) * tensor.itemsize
        return start, start + tensor.numel() * tensor.itemsize
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset())
    return first * tensor.itemsize, (first + last + 1) * tensor.itemsize


def needed_and_allocated_bytes(tensor: Tensor) -> tuple[int, int]:
    """Returns the storage size in bytes that `tensor` needs, and the actual size; (0, 0) if it has no storage."""
    storage = get_storage(tensor)
    return (0, 0) if storage is None else (byte_range(tensor)[1], storage.nbytes())


def describe_tensor(tensor: Tensor) -> str:
    """Returns the dtype and shape as text, such as "float32 [2, 3]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


class MemoryWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches torch operations within `watching()`, and raises AssertionError before an operation that uses freed memory.
    Subclasses may override the methods `before_operation`, `after_allocation` and `before_resize`, whose errors propagate to
    the caller of the operation.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._thread = threading.get_ident()

    def before_operation(self, name: str, accesses: Sequence[Access]) -> None:
        """Raises AssertionError if one of the accesses of the operation `name` uses freed memory. A view has no accesses."""
        for access in accesses:
            needed, allocated = needed_and_allocated_bytes(access.tensor)
            assert allocated >= needed, (
                f"{access.describe(name)}, which needs {needed} bytes of a storage of {allocated}: its memory was freed"
            )

    def after_allocation(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Does nothing. A subclass can override it to receive the new tensors of the operation `name`."""

    def before_resize(self, storage: torch.UntypedStorage, num_bytes: int) -> Callable[[], None] | None:
        """Called before `storage` is resized to `num_bytes`. May return a function, which is called after the resize."""
        return None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches the operations of the calling thread within the block."""
        with ExitStack() as stack:
            self._thread = threading.get_ident()
            stack.enter_context(self)
            for name in _HOST_READS:
                stack.enter_context(mock.patch.object(Tensor, name, self._wrap_read(name)))
            stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", self._wrap_resize()))
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):  # a higher-order operation calls others, which are dispatched here too
            return func(*args, **kwargs)
        if func.is_view and func._can_decompose():  # such as `reshape` in inference mode, which may be a view or a copy
            with self:
                return func.decompose(*args, **kwargs)
        names, written = _describe_arguments(func)
        arguments = () if written is None else (*zip(names, args, strict=False), *kwargs.items())
        accesses = [Access(tensor, name in (written or ())) for name, value in arguments for tensor in iterate_tensors(value)]
        self.before_operation(str(func), accesses)
        try:
            result = func(*args, **kwargs)
        except RuntimeError:
            if func.is_view:  # torch refuses some views of freed memory without naming the tensor
                self.before_operation(
                    str(func), [Access(tensor, writes=False) for tensor in iterate_tensors([*args, *kwargs.values()])]
                )
            raise
        returns = func._schema.returns
        values = [result] if len(returns) == 1 else result or ()
        new_tensors = [
            tensor
            for returned, value in zip(returns, values, strict=False)
            if returned.alias_info is None
            for tensor in iterate_tensors(value)
        ]
        if new_tensors:
            self.after_allocation(str(func), new_tensors)
        return result

    def _wrap_read(self, name: str) -> Callable[..., Any]:
        """Returns a replacement for the method `name` of Tensor that calls `before_operation` first."""
        method = getattr(Tensor, name)

        def check_and_call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == self._thread:
                self.before_operation(f"Tensor.{name}", [Access(tensor, writes=False)])
            return method(tensor, *args, **kwargs)

        return check_and_call

    def _wrap_resize(self) -> Callable[..., Any]:
        """Returns a replacement for `UntypedStorage.resize_` that calls `before_resize` first, and its result, if any, last."""
        method = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, num_bytes: int) -> Any:
            is_watched = threading.get_ident() == self._thread
            after_resize = self.before_resize(storage, num_bytes) if is_watched else None
            result = method(storage, num_bytes)
            if after_resize is not None:
                after_resize()
            return result

        return resize


@cache
def _describe_arguments(func: Any) -> tuple[list[str], set[str] | None]:
    """Returns the names of all arguments of an operation, and the names of the arguments that it writes. The second result is
    None if the operation accesses no memory.
    """
    names = [argument.name for argument in func._schema.arguments]
    operation = func._schema.name.partition("::")[2]
    written = {arg.name for arg in func._schema.arguments if arg.alias_info is not None and arg.alias_info.is_write}
    if func.namespace == "c10d":  # the schemas of collectives declare no writes
        written = {name for name in names if name.startswith("output") or (name == "tensors" and operation != "send")}
    if func.is_view or operation in _SHAPE_ONLY or operation.endswith("_like") or operation.startswith("new_"):
        return names, None
    return names, written


def iterate_tensors(value: Any) -> Iterator[Tensor]:
    """Yields `value` if it is a tensor, or the tensors in it if it is a list or tuple, which may be nested."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from iterate_tensors(item)
