"""Provides a CPU device that delays and reorders copies at random, as far as a program's waits allow.

    device = DrawnDevice(copy_seed=7)
    with device.watching(), World.alone(device) as world, assemble(plan, world) as run:
        run.step()

At each call and each torch operation, random numbers decide which pending copies are executed. Two checks find missing waits:

* **bits**: the target of a pending copy contains NaN, and so do the new bytes of a resized storage. A read that is too early
  returns NaN. If a source is overwritten or freed too early, its later state is copied.
* **rules** (`happens_before.py`): two conflicting accesses that no wait orders raise AssertionError with the operation, the
  tensor, and the missing wait. This check also finds races that do not change any bit here.

The device's own operations are complete when their calls return, as on every CPU. `make_device_wait` executes all copies before
its event, since later operations may need them. The host may use host memory (`host_memory`) only after `wait`.
"""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from sley_core.comm.device import CopyEvent, CopyStream, Device, HostMemory
from sley_testing import happens_before

COPY_RATES = (0.0, 0.02, 0.2, 0.7, 1.0)
"""Probabilities with which another copy is executed at a call. The seed selects one of them. 0 delays copies until a wait."""


@dataclass(frozen=True)
class DrawnDevice(Device):
    """Provides the device `cpu` with random copies, for `World.alone` and `World.join`. copy_seed: the seed of the copies.
    is_strict: whether a broken rule raises AssertionError.
    """

    torch_device: torch.device = field(default_factory=partial(torch.device, "cpu"))
    copy_seed: int = 0
    is_strict: bool = True

    @cached_property
    def copies(self) -> "DrawnCopies":
        """The copies of all streams of this device."""
        return DrawnCopies(self.copy_seed, is_strict=self.is_strict)

    def copy_stream(self) -> "DrawnStream":
        """Returns a new stream of this device."""
        return DrawnStream(self.copies)

    def host_memory(self, num_bytes: int) -> HostMemory:
        """Returns host memory of `num_bytes` bytes. The host may use it only after a `wait` for its copies."""
        memory = HostMemory(num_bytes, lock=False)
        self.copies.detector.mark_host_memory(memory.data)
        return memory

    def mark_host_memory(self, tensor: torch.Tensor) -> None:
        """Marks the memory of `tensor` as host memory, which the host may use only after a `wait` for its copies."""
        self.copies.detector.mark_host_memory(tensor.detach())

    def watching(self) -> AbstractContextManager[None]:
        """Returns a context manager in which operations of this thread run on the device. At its end, all copies complete."""
        return self.copies.watching()


@dataclass
class _Copy:
    """Holds a pending copy. dependencies: the work of the device and of other streams that must be complete before the copy."""

    target: "Span"
    source: "Span"
    dependencies: happens_before.Clock


class DrawnCopies:
    """Holds the pending copies of all streams of a device, and decides at random when they happen."""

    def __init__(self, seed: int, *, is_strict: bool) -> None:
        self.detector = happens_before.RaceDetector()
        self.is_strict = is_strict
        self.has_broken_rule = False
        self._random = random.Random(seed)
        self.rate = self._random.choice(COPY_RATES)
        self._queues: dict[int, list[_Copy]] = {}
        self._num_done: happens_before.Clock = {}

    def new_stream(self) -> int:
        """Adds a stream, and returns its number."""
        number = len(self._queues) + 1
        self._queues[number] = []
        return number

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches the operations in the block. Then completes all copies, and checks for memory that was freed too early."""
        with _CopyWatch(self).watching():
            yield
        while self._execute_next():
            pass
        self.apply_rule(self.detector.check_freed_memory)

    def apply_rule(self, rule: Callable[..., Any], *args: Any) -> None:
        """Calls a rule of the detector. If `is_strict`, the first broken rule raises AssertionError. Later broken rules do not,
        since the cleanup of a failed run is not ordered.
        """
        try:
            rule(*args)
        except AssertionError:
            if self.is_strict and not self.has_broken_rule:
                self.has_broken_rule = True
                raise

    def add_copy(self, stream: int, target: torch.Tensor, source: torch.Tensor) -> None:
        """Adds a copy to the end of a stream. Fills `target` with NaN unless a pending copy reads it."""
        assert target.shape == source.shape, (target.shape, source.shape)
        assert target.dtype == source.dtype, (target.dtype, source.dtype)
        self.handle_call()
        torch.autograd.graph.increment_version(target)  # at once, as `copy_` on a real stream does
        try:
            self.apply_rule(self.detector.record_copy, stream, target, source)
        finally:
            target_span, source_span = Span(target), Span(source)
            clock = self.detector.streams[stream]
            dependencies = {worker: number for worker, number in clock.items() if worker != stream}
            target_is_read = any(copy.source.overlaps(target_span) for queue in self._queues.values() for copy in queue)
            if not target_is_read and (target_memory := target_span.tensor()) is not None:
                fill_with_nan(target_memory)
            self._queues[stream].append(_Copy(target_span, source_span, dependencies))

    def execute_some(self) -> None:
        """Executes a random number of pending copies."""
        while self._random.random() < self.rate and self._execute_next():
            pass

    def handle_call(self) -> None:
        """Checks for memory that was freed too early, and executes some copies. Streams and events call it in each method."""
        self.apply_rule(self.detector.check_freed_memory)
        self.execute_some()

    def poll(self, clock: happens_before.Clock) -> bool:
        """Executes some copies, and returns whether the host sees that all copies in `clock` are complete. May return False
        although the copies are complete, but repeated calls eventually return True.
        """
        if not _streams_behind(clock, self.detector.host):
            return True
        self.handle_call()
        if self._random.random() >= max(self.rate, 0.1):
            return False
        self._execute_next()
        return not _streams_behind(clock, self._num_done)

    def wait_for(self, clock: happens_before.Clock) -> None:
        """Executes the copies in `clock`, the copies that they depend on, and a random number of other copies."""
        self.handle_call()
        while streams := _streams_behind(clock, self._num_done):
            assert self._execute_next(streams), f"copies wait for each other: {self._queues}"

    def _execute_next(self, streams: set[int] | None = None) -> bool:
        """Executes the next copy of a random ready stream; returns False if there is none."""
        ready = [
            stream
            for stream, queue in self._queues.items()
            if queue and (streams is None or stream in streams) and not _streams_behind(queue[0].dependencies, self._num_done)
        ]
        if not ready:
            return False
        stream = self._random.choice(ready)
        copy = self._queues[stream].pop(0)
        target, source = copy.target.tensor(), copy.source.tensor()
        if target is not None and source is not None:
            with torch.no_grad(), _disable_current_modes():
                target.copy_(source)
        self._num_done[stream] = self._num_done.get(stream, 0) + 1
        return True


def _streams_behind(clock: happens_before.Clock, num_done: happens_before.Clock) -> set[int]:
    """Returns the streams that have completed fewer copies than `clock` requires."""
    return {stream for stream, number in clock.items() if stream != happens_before.DEVICE and num_done.get(stream, 0) < number}


class DrawnStream(CopyStream):
    """Implements a copy stream of a `DrawnDevice`."""

    def __init__(self, copies: DrawnCopies) -> None:
        self._copies = copies
        self._number = copies.new_stream()

    @property
    def _clock(self) -> happens_before.Clock:
        return self._copies.detector.streams[self._number]

    def wait_for_device(self) -> None:
        self._copies.handle_call()
        happens_before.merge_clocks(self._clock, self._copies.detector.device)

    def wait_for(self, event: CopyEvent) -> None:
        self._copies.handle_call()
        if isinstance(event, DrawnEvent):
            happens_before.merge_clocks(self._clock, event.clock)
        else:
            event.wait()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._copies.add_copy(self._number, target, source)

    def record(self) -> "DrawnEvent":
        self._copies.handle_call()
        return DrawnEvent(self._copies, dict(self._clock))


class DrawnEvent(CopyEvent):
    """Marks a point in a stream. clock: the work of the device and the streams that precedes the point."""

    def __init__(self, copies: DrawnCopies, clock: happens_before.Clock) -> None:
        self.clock = clock
        self._copies = copies

    def is_done(self) -> bool:
        is_done = self._copies.poll(self.clock)
        if is_done:
            self._merge_clock()
        return is_done

    def wait(self) -> None:
        self._copies.wait_for(self.clock)
        self._merge_clock()

    def _merge_clock(self) -> None:
        """Records that later work of the host and the device is ordered after this event."""
        happens_before.merge_clocks(self._copies.detector.host, self.clock)
        happens_before.merge_clocks(self._copies.detector.device, self.clock)

    def make_device_wait(self) -> None:
        self._copies.wait_for(self.clock)
        happens_before.merge_clocks(self._copies.detector.device, self.clock)


class _CopyWatch(happens_before.MemoryWatch):  # type: ignore[no-untyped-call]
    """Executes copies at random before each operation, and applies the rules of the detector to the operation."""

    def __init__(self, copies: DrawnCopies) -> None:
        super().__init__()
        self._copies = copies

    def before_operation(self, name: str, accesses: Sequence[happens_before.Access]) -> None:
        self._copies.execute_some()
        super().before_operation(name, accesses)
        self._copies.apply_rule(self._copies.detector.record_operation, name, accesses)

    def after_allocation(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        self._copies.apply_rule(
            self._copies.detector.record_operation, name, [happens_before.Access(tensor, writes=True) for tensor in tensors]
        )

    def before_resize(self, storage: torch.UntypedStorage, num_bytes: int) -> Callable[[], None]:
        self._copies.handle_call()
        self._copies.apply_rule(self._copies.detector.record_resize, storage)
        old_num_bytes = storage.nbytes()

        def poison_new() -> None:
            if num_bytes > old_num_bytes:  # these bytes are NaN in every floating-point dtype
                with _disable_current_modes():
                    tensor_from_storage(storage, torch.uint8, old_num_bytes, (num_bytes - old_num_bytes,), (1,)).fill_(0xFF)

        return poison_new


class Span:
    """Refers to the memory of a tensor without keeping it alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage: Any = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._dtype = tensor.dtype
        self._geometry = int(tensor.storage_offset()), tensor.shape, tensor.stride()
        self._byte_range = happens_before.byte_range(tensor)

    def tensor(self) -> torch.Tensor | None:
        """Returns a tensor over the same memory without autograd, or None if the memory was freed."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None or storage.nbytes() < self._byte_range[1]:
            return None
        with _disable_current_modes():
            return tensor_from_storage(storage, self._dtype, *self._geometry)

    def overlaps(self, span: "Span") -> bool:
        """Returns whether this span and `span` have bytes of the same storage in common."""
        (first, last), (start, end) = self._byte_range, span._byte_range
        return self._storage.cdata == span._storage.cdata and first < end and start < last


def fill_with_nan(tensor: torch.Tensor) -> None:
    """Fills `tensor` in place with NaN, or with the maximum of its dtype if that is an integer. Leaves bools unchanged."""
    with torch.no_grad(), _disable_current_modes():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype != torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).max)


def tensor_from_storage(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """Returns a tensor over `storage`, which it keeps alive. offset, stride: in elements."""
    empty: Any = torch.empty(0, dtype=dtype, device=storage.device)
    tensor: torch.Tensor = empty.set_(storage, offset, shape, stride)
    return tensor


def storage_guard() -> AbstractContextManager[None]:
    """Returns a context manager in which an operation of this thread, or its backward, raises AssertionError if it uses freed
    memory: a tensor that needs more bytes than its storage has. The check takes about 0.1 ms per operation.
    """
    return happens_before.MemoryWatch().watching()


def patch_tensor_repr() -> AbstractContextManager[object]:
    """Returns a context manager in which tensors with freed memory can be printed, for example in tracebacks."""

    original_repr: Callable[..., str] = torch.Tensor.__repr__

    def safe_repr(tensor: torch.Tensor, *args: object, **kwargs: object) -> str:
        needed, allocated = happens_before.needed_and_allocated_bytes(tensor)
        if allocated < needed:
            return f"<{happens_before.describe_tensor(tensor)}, freed>"
        return original_repr(tensor, *args, **kwargs)

    return mock.patch.object(torch.Tensor, "__repr__", safe_repr)


WAITS = ((DrawnStream, "wait_for_device"), (DrawnStream, "wait_for"), (DrawnEvent, "make_device_wait"), (DrawnEvent, "wait"))
"""The class and name of each method that orders copies."""


class Site(NamedTuple):
    """Identifies a line of code that calls a method of WAITS. wait: the name of the method."""

    file: str
    line: int
    function: str
    wait: str

    def __str__(self) -> str:
        return f"{Path(self.file).stem}.{self.function}:{self.line} {self.wait}"


def wait_sites(program: Callable[[], object]) -> list[Site]:
    """Calls `program`, and returns each line that called a wait, in the order of the first calls."""
    sites: dict[Site, None] = {}

    def record_site(site: Site) -> bool:
        sites[site] = None
        return True

    with _filter_waits(record_site):
        program()
    return list(sites)


@contextmanager
def skip_wait(site: Site) -> Iterator[None]:
    """Disables the waits at `site` in the block."""
    with _filter_waits(lambda called_site: called_site != site):
        yield


@contextmanager
def _filter_waits(is_enabled: Callable[[Site], bool]) -> Iterator[None]:
    """Makes each wait in the block conditional on `is_enabled(site)`."""

    def filter_calls(name: str, wait: Callable[..., None]) -> Callable[..., None]:
        def call_if_enabled(*args: Any) -> None:
            caller = sys._getframe(1)
            if is_enabled(Site(caller.f_code.co_filename, caller.f_lineno, caller.f_code.co_name, name)):
                wait(*args)

        return call_if_enabled

    with ExitStack() as stack:
        for owner, name in WAITS:
            stack.enter_context(mock.patch.object(owner, name, filter_calls(name, getattr(owner, name))))
        yield
