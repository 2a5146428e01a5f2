"""Checks that a program's waits order all conflicting memory accesses, with vector clocks.

The device and each copy stream work in order. The clock of a worker records how much work of the other workers is done before
its next operation. A wait merges clocks:

    stream.follow()      stream <- device       what the device has been given so far
    stream.after(e)      stream <- e            what the event's stream was given before it, and what that followed
    e.hold_device()      device <- e
    e.wait()             host, device <- e      the host gives all work, so whatever it gives later comes later

Two accesses to the same bytes must be ordered by clocks if one is a write. A missing order is found in every run, even if
it did no harm. Freed memory, and memory whose last reference is gone, counts as written by the device.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from sley_core.comm.copies import storage_id

Clock = dict[int, int]
"""The number of completed operations by worker. The device is worker 0, streams count from 1."""

DEVICE = 0
_SWEEP_EVERY = 4096


def merge(clock: Clock, other: Clock) -> None:
    """Raises `clock` to the maximum of `clock` and `other`."""
    for worker, number in other.items():
        clock[worker] = max(clock.get(worker, 0), number)


@dataclass(frozen=True)
class Copied:
    """Holds one end of copy `number` of `stream`: bytes `first` to `last` of a storage, which the copy reads or writes."""

    stream: int
    number: int
    first: int
    last: int
    writes: bool
    text: str

    def is_known(self, clock: Clock) -> bool:
        return self.number <= clock.get(self.stream, 0)

    def covers(self, other: Copied) -> bool:
        """Returns whether an access that is ordered after this copy cannot conflict with `other`."""
        return (
            self.stream == other.stream
            and self.first <= other.first
            and self.last >= other.last
            and self.writes >= other.writes
        )

    def __str__(self) -> str:
        return f"copy {self.number} of stream {self.stream}, {self.text},"


@dataclass
class _Memory:
    """Holds the accesses to one storage. reference: a weak reference that prevents reuse of the storage's address. device: the
    numbers of the device's last read and last write, by byte range.
    """

    reference: Any
    is_host: bool = False
    copies: list[Copied] = field(default_factory=list)
    device: dict[tuple[int, int], list[int]] = field(default_factory=dict)


class Ledger:
    """Records the work of the device and of streams, and its order. Raises AssertionError for unordered accesses."""

    def __init__(self) -> None:
        self.host: Clock = {}
        self.device: Clock = {DEVICE: 0}
        self.streams: defaultdict[int, Clock] = defaultdict(dict)
        self._memory: dict[int, _Memory] = {}  # by the address of the storage's object, which the weak reference keeps
        self._copied: dict[int, _Memory] = {}  # those with copies

    def owns(self, data: Tensor) -> None:
        """Marks the memory of `data` as host memory, whose use by the host must follow a `wait`."""
        self._of(data).is_host = True

    def works(self, name: str, accesses: Sequence[Access]) -> None:
        """Records an operation: of the host if all its tensors are in host memory, else of the device."""
        if self.device[DEVICE] % _SWEEP_EVERY == 0:
            self.forgotten()
            for key in [key for key, memory in self._memory.items() if memory.reference.expired()]:
                del self._memory[key]
        touched = [
            (self._memory.get(storage._cdata) or self._remember(storage), access)
            for access in accesses
            if (storage := storage_of(access.tensor)) is not None
        ]
        is_host = bool(touched) and all(memory.is_host for memory, _ in touched)
        if not is_host:
            self.device[DEVICE] += 1
        for memory, access in touched:
            span = extent(access.tensor)
            if memory.copies:
                text = f"{name} {'writes' if access.writes else 'reads'} {described(access.tensor)}"
                clock, wait = (self.host, "`wait`") if is_host else (self.device, "`hold_device`")
                self._check_copies(memory, clock, (*span, access.writes), text, wait)
            if not memory.is_host:
                memory.device.setdefault(span, [0, 0])[access.writes] = self.device[DEVICE]

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Records that the device frees or replaces the memory of `storage`."""
        memory = self._memory.get(storage._cdata) or self._remember(storage)
        self.device[DEVICE] += 1
        whole = (0, max([storage.nbytes(), *(copy.last for copy in memory.copies)]))
        text = f"the storage of {storage.nbytes()} bytes is resized"
        self._check_copies(memory, self.device, (*whole, True), text, "`hold_device`")
        memory.device = {(0, 1 << 62): [0, self.device[DEVICE]]}
        memory.copies.clear()

    def copies(self, stream: int, target: Tensor, source: Tensor) -> int:
        """Records a copy, even if it raises, and returns its number on the stream, from 1."""
        clock = self.streams[stream]
        merge(clock, self.host)
        number = clock.get(stream, 0) + 1
        ends = [(target, True, f"into {described(target)}"), (source, False, f"from {described(source)}")]
        try:
            for tensor, writes, text in ends:
                self._check_end(stream, clock, tensor, writes, text)
        finally:
            clock[stream] = number
            for tensor, writes, text in ends:
                new, memory = Copied(stream, number, *extent(tensor), writes, text), self._of(tensor)
                memory.copies = [old for old in memory.copies if not (new.covers(old) or old.is_known(self.host))] + [new]
                self._copied[storage_id(tensor)] = memory
        return number

    def forgotten(self) -> None:
        """Asserts that no memory lost its last reference before its copies were known to be complete."""
        for key, memory in [*self._copied.items()]:
            memory.copies = [copy for copy in memory.copies if not copy.is_known(self.host)]
            if not memory.copies:
                del self._copied[key]  # all later work is ordered after them
        for key in [key for key, memory in self._copied.items() if memory.reference.expired()]:
            memory = self._copied.pop(key)
            clock = self.host if memory.is_host else self.device
            for copy in memory.copies:
                wait = "`wait`" if memory.is_host else "`hold_device`"
                assert copy.is_known(clock), f"memory was forgotten while {copy} may be under way: {wait} is missing"

    def _check_end(self, stream: int, clock: Clock, tensor: Tensor, writes: bool, text: str) -> None:
        """Asserts that one end of a copy is ordered after the device's accesses and after other streams' copies."""
        memory = self._of(tensor)
        first, last = extent(tensor)
        for (start, end), (read, written) in memory.device.items():
            number = max(read, written) if writes else written
            assert not (start < last and first < end) or number <= clock.get(DEVICE, 0), (
                f"stream {stream} copies {text}, which the device {'wrote' if number == written else 'read'} after "
                "the stream last followed it: `follow` is missing"
            )
        others = {worker: number for worker, number in clock.items() if worker != stream} | {stream: 1 << 62}
        self._check_copies(memory, others, (first, last, writes), f"stream {stream} copies {text}", "`after`")

    def _check_copies(self, memory: _Memory, clock: Clock, access: tuple[int, int, bool], text: str, wait: str) -> None:
        """Asserts that no copy in flight conflicts with an access. access: first byte, end, and whether it writes."""
        first, last, writes = access
        for copy in memory.copies:
            is_disjoint = copy.last <= first or last <= copy.first
            assert is_disjoint or not (writes or copy.writes) or copy.is_known(clock), (
                f"{text} while {copy} may be under way: {wait} is missing"
            )

    def _of(self, tensor: Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        return self._memory.get(storage._cdata) or self._remember(storage)

    def _remember(self, storage: torch.UntypedStorage) -> _Memory:
        memory = _Memory(StorageWeakRef(storage))  # type: ignore[no-untyped-call]  # torch's
        self._memory[storage._cdata] = memory
        return memory


_SHAPE_ONLY = {"resize_", "resize_as_", "set_", "is_same_size", "is_pinned", "record_stream", "_unsafe_view"}
"""Operations that only change or read shapes. Views are recognized by their schema."""

_READ_BY_HOST = ("numpy", "tolist", "__dlpack__")
"""Tensor methods that read or export values without a torch operation."""


@dataclass(frozen=True)
class Access:
    """Holds a tensor of an operation, and whether the operation writes to it."""

    tensor: Tensor
    writes: bool


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Returns the storage of `tensor`, or None for meta and sparse tensors and wrapper subclasses."""
    if type(tensor).__torch_dispatch__ != Tensor.__torch_dispatch__ or tensor.is_meta or tensor.layout != torch.strided:
        return None
    return tensor.untyped_storage()


def extent(tensor: Tensor) -> tuple[int, int]:
    """Returns the first byte of `tensor` in its storage and the byte after the last; (0, 0) if it is empty."""
    if tensor.numel() == 0:
        return 0, 0
    if tensor.is_contiguous():
        start = int(tensor.storage_offset()) * tensor.itemsize
        return start, start + tensor.numel() * tensor.itemsize
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset())
    return first * tensor.itemsize, (first + last + 1) * tensor.itemsize


def described(tensor: Tensor) -> str:
    """Returns the dtype and shape as text, such as "float32 [2, 3]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


class MemoryWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Calls `saw` before each operation that reads or writes memory, `made` with its new tensors, and `resizes` before a
    storage is resized. Subclasses override these methods. Their errors propagate to the caller of the operation.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._thread = threading.get_ident()

    def saw(self, name: str, accesses: Sequence[Access]) -> None:
        """Handles the accesses of the operation `name` before it runs; views have no accesses."""

    def made(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Handles the new tensors of the operation `name`."""

    def resizes(self, storage: torch.UntypedStorage, num_bytes: int) -> Callable[[], None] | None:
        """Handles a resize of `storage` to `num_bytes`. Returns a function to call after the resize, or None."""
        return None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Returns a context manager that watches this thread's operations."""
        with ExitStack() as stack:
            self._thread = threading.get_ident()
            stack.enter_context(self)
            for name in _READ_BY_HOST:
                stack.enter_context(replaced(torch.Tensor, name, self._before_host_reads))
            stack.enter_context(replaced(torch.UntypedStorage, "resize_", self._around_resize))
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):  # an operation of higher order calls others, which come here too
            return func(*args, **kwargs)
        if func.is_view and func._can_decompose():  # in inference mode: a reshape, say, which may be a view or a copy
            with self:
                return func.decompose(*args, **kwargs)
        names, written = _arguments(func)
        given = () if written is None else (*zip(names, args, strict=False), *kwargs.items())
        self.saw(str(func), [Access(tensor, name in (written or ())) for name, value in given for tensor in tensors_of(value)])
        try:
            result = func(*args, **kwargs)
        except RuntimeError:
            if func.is_view:  # some kinds torch refuses by itself where the memory is not there, without saying which tensor
                self.saw(str(func), [Access(tensor, writes=False) for tensor in tensors_of([*args, *kwargs.values()])])
            raise
        returned = func._schema.returns
        parts = [result] if len(returned) == 1 else result or ()
        fresh = [
            tensor for one, part in zip(returned, parts, strict=False) if one.alias_info is None for tensor in tensors_of(part)
        ]
        if fresh:
            self.made(str(func), fresh)
        return result

    def _before_host_reads(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a tensor method to call `saw` first, in the watched thread."""

        def told(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == self._thread:
                self.saw(f"Tensor.{name}", [Access(tensor, writes=False)])
            return method(tensor, *args, **kwargs)

        return told

    def _around_resize(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a storage method to call `resizes` first, and the returned function afterwards."""

        def told(storage: torch.UntypedStorage, num_bytes: int) -> Any:
            ours = threading.get_ident() == self._thread
            then = self.resizes(storage, num_bytes) if ours else None
            result = method(storage, num_bytes)
            if then is not None:
                then()
            return result

        return told


@contextmanager
def replaced(owner: Any, name: str, wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replaces a method of `owner` for the duration of the context, for methods that torch does not dispatch."""
    is_own = name in vars(owner)
    method = getattr(owner, name)
    setattr(owner, name, wrap(name, method))
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, method)
        else:
            delattr(owner, name)


@cache
def _arguments(func: Any) -> tuple[list[str], set[str] | None]:
    """Returns the names of an operation's arguments and of its written arguments, or None if it accesses no memory."""
    names = [argument.name for argument in func._schema.arguments]
    operation = func._schema.name.partition("::")[2]
    written = {one.name for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write}
    if func.namespace == "c10d":  # their schemas do not say
        written = {name for name in names if name.startswith("output") or (name == "tensors" and operation != "send")}
    if func.is_view or operation in _SHAPE_ONLY or operation.endswith("_like") or operation.startswith("new_"):
        return names, None
    return names, written


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_of(part)
