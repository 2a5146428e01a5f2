"""Stands for a CPU device whose copies happen as late, and in any order between streams, as a program's waits permit.

    device = DrawnDevice(order=7)
    with device.watching(), World.alone(device) as world, assemble(plan, world) as run:
        run.step()

A real stream of copies does its work some time between `copy` and a wait, and a run sees one such order. Here a number is
drawn at each call and at each operation of torch, by which some copies happen, or none. Two things tell a wrong program:

* **bits**: until a copy has happened its target holds NaN, and so does memory that comes back. Whoever reads too early
  computes with that; a source that was overwritten or freed too early is copied as it then is.
* **rules** (`happens_before.py`): any order that the waits do not enforce raises AssertionError with what was done, to
  which tensor, and the wait that is missing. Some races cannot change a bit where the device is the host.

The device's own work is done when a call returns, as on every CPU: `hold_device` does all copies that it names, since
the work after it may need them, but only `wait` lets the host touch memory of the host (`host_memory`).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from sley_core.comm.copies import CopyEvent, HostMemory
from sley_core.comm.device import Device
from sley_testing.happens_before import (
    DEVICE,
    Access,
    Clock,
    Ledger,
    MemoryWatch,
    described,
    extent,
    merge,
    replaced,
    storage_of,
)

RATES = (0.0, 0.02, 0.2, 0.7, 1.0)
"""How probable a further copy is at each call, drawn once per device: with 0 a copy happens when it must, with 1 at once."""


@dataclass(frozen=True)
class DrawnDevice(Device):
    """The device `cpu` with drawn copies, for `World.alone` and `World.join`; in `ranks`, each rank makes its own. order: the
    number by which copies are drawn. is_strict: whether rules raise; else only bits tell.
    """

    torch_device: torch.device = field(default_factory=partial(torch.device, "cpu"))
    order: int = 0
    is_strict: bool = True
    copies: DrawnCopies = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "copies", DrawnCopies(self.order, is_strict=self.is_strict))

    def copy_stream(self) -> DrawnStream:
        """Returns a new stream whose copies this device draws."""
        return DrawnStream(self.copies)

    def host_memory(self, num_bytes: int) -> HostMemory:
        """Returns memory that counts as the host's: only `wait` orders what the host does with it."""
        memory = HostMemory(num_bytes, lock=False)
        self.copies.ledger.owns(memory.data)
        return memory

    def keeps_on_host(self, tensor: Tensor) -> None:
        """Takes the memory of `tensor`, which a CPU shares with its host, for the host's: as that of `host_memory`."""
        self.copies.ledger.owns(tensor.detach())

    def watching(self) -> AbstractContextManager[None]:
        """Returns a context manager in which this thread's operations are the device's; on leaving, all copies are done."""
        return self.copies.watching()


@dataclass
class _Copy:
    target: Span
    source: Span
    needs: Clock


class DrawnCopies:
    """The copies of all streams of a device that have not happened yet, and the draw that decides when they do."""

    def __init__(self, seed: int, *, is_strict: bool) -> None:
        self.ledger = Ledger()
        self.is_strict = is_strict
        self.is_broken = False
        self._random = random.Random(seed)
        self.rate = self._random.choice(RATES)
        self._pending: dict[int, list[_Copy]] = {}
        self._num_done: Clock = {}

    def new_stream(self) -> int:
        number = len(self._pending) + 1
        self._pending[number] = []
        return number

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Returns a context manager in which operations are seen; on leaving, copies are done, and memory checked."""
        with _Watch(self).watching():
            yield
        while self._step():
            pass
        self.check(self.ledger.forgotten)

    def check(self, rule: Callable[..., Any], *args: Any) -> None:
        """Applies a rule of the ledger. It raises once: what a program then does to end is not in order any more."""
        try:
            rule(*args)
        except AssertionError:
            if self.is_strict and not self.is_broken:
                self.is_broken = True
                raise

    def give(self, stream: int, target: Tensor, source: Tensor) -> None:
        """Adds a copy to the end of a stream."""
        assert target.shape == source.shape, (target.shape, source.shape)
        assert target.dtype == source.dtype, (target.dtype, source.dtype)
        self.called()
        torch.autograd.graph.increment_version(target)  # now, as a real stream's `copy_` does, and not when it happens
        try:
            self.check(self.ledger.copies, stream, target, source)
        finally:
            at, own = Span(target), Span(source)
            clock = self.ledger.streams[stream]
            needs = {worker: number for worker, number in clock.items() if worker not in (DEVICE, stream)}
            if not any(other.source.overlaps(at) for queue in self._pending.values() for other in queue):
                poison(at)  # else a copy that comes before this one would read it
            self._pending[stream].append(_Copy(at, own, needs))

    def tick(self) -> None:
        """Lets copies happen, or none, as drawn."""
        while self._random.random() < self.rate and self._step():
            pass

    def called(self) -> None:
        """Does as `tick` where a program calls a stream or an event; first looks for memory that was forgotten too early, since
        the call may order what was not in order when it was forgotten.
        """
        self.check(self.ledger.forgotten)
        self.tick()

    def ask(self, clock: Clock) -> bool:
        """Returns whether the host sees that the copies that `clock` names are done; whoever asks often enough sees it. What
        the device was held for has happened, but the host may hear of it later.
        """
        needed = {stream: number for stream, number in clock.items() if stream != DEVICE}
        if all(self.ledger.host.get(stream, 0) >= number for stream, number in needed.items()):
            return True
        self.called()
        if self._random.random() >= max(self.rate, 0.1):
            return False
        self._step()
        return all(self._num_done.get(stream, 0) >= number for stream, number in needed.items())

    def force(self, clock: Clock) -> None:
        """Does the copies that `clock` names, with what they need, and as many others as are drawn."""
        self.called()
        needed = {stream: number for stream, number in clock.items() if stream != DEVICE}
        while any(self._num_done.get(stream, 0) < number for stream, number in needed.items()):
            late = {stream for stream, number in needed.items() if self._num_done.get(stream, 0) < number}
            assert self._step(late), f"copies that wait for one another: {self._pending}"

    def _step(self, streams: set[int] | None = None) -> bool:
        """Does the next copy of one stream, drawn from those that need not wait for another; False if there is none."""
        ready = [
            stream
            for stream, queue in self._pending.items()
            if queue
            and (streams is None or stream in streams)
            and all(self._num_done.get(other, 0) >= number for other, number in queue[0].needs.items())
        ]
        if not ready:
            return False
        stream = self._random.choice(ready)
        copy = self._pending[stream].pop(0)
        target, source = copy.target.tensor(), copy.source.tensor()
        if target is not None and source is not None:
            with torch.no_grad(), _disable_current_modes():
                target.copy_(source)
        self._num_done[stream] = self._num_done.get(stream, 0) + 1
        return True


class DrawnStream:
    """A stream of `copies`."""

    def __init__(self, copies: DrawnCopies) -> None:
        self._copies = copies
        self._number = copies.new_stream()

    @property
    def _clock(self) -> Clock:
        return self._copies.ledger.streams[self._number]

    def follow(self) -> None:
        self._copies.called()
        merge(self._clock, self._copies.ledger.device)

    def after(self, event: CopyEvent) -> None:
        self._copies.called()
        if isinstance(event, DrawnEvent):
            merge(self._clock, event.clock)
        else:
            event.wait()

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._copies.give(self._number, target, source)

    def record(self) -> DrawnEvent:
        self._copies.called()
        return DrawnEvent(self._copies, dict(self._clock))


class DrawnEvent:
    """What a stream had been given, and what that waits for: `clock`."""

    def __init__(self, copies: DrawnCopies, clock: Clock) -> None:
        self.clock = clock
        self._copies = copies

    def is_done(self) -> bool:
        is_done = self._copies.ask(self.clock)
        if is_done:
            self._known()
        return is_done

    def wait(self) -> None:
        self._copies.force(self.clock)
        self._known()

    def _known(self) -> None:
        merge(self._copies.ledger.host, self.clock)
        merge(self._copies.ledger.device, self.clock)

    def hold_device(self) -> None:
        self._copies.force(self.clock)
        merge(self._copies.ledger.device, self.clock)


class _Watch(MemoryWatch):  # type: ignore[no-untyped-call]  # torch's
    def __init__(self, copies: DrawnCopies) -> None:
        super().__init__()
        self._copies = copies

    def saw(self, name: str, accesses: Sequence[Access]) -> None:
        self._copies.tick()
        check_present(name, accesses)
        self._copies.check(self._copies.ledger.works, name, accesses)

    def made(self, name: str, tensors: Sequence[Tensor]) -> None:
        self._copies.check(self._copies.ledger.works, name, [Access(tensor, writes=True) for tensor in tensors])

    def resizes(self, storage: torch.UntypedStorage, num_bytes: int) -> Callable[[], None]:
        self._copies.called()
        self._copies.check(self._copies.ledger.resized, storage)
        old = storage.nbytes()

        def poison_new() -> None:
            if num_bytes > old:  # NaN, whatever they are read as
                with _disable_current_modes():
                    as_tensor(storage, torch.uint8, old, (num_bytes - old,), (1,)).fill_(0xFF)

        return poison_new


class Span:
    """A tensor whose memory its owners may give back: then there is nothing to copy from or into."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage: Any = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch's
        self._dtype = tensor.dtype
        self._place = int(tensor.storage_offset()), tensor.shape, tensor.stride()
        self._extent = extent(tensor)

    def tensor(self) -> Tensor | None:
        """Returns the tensor, unseen by autograd; None if its memory is gone."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None or storage.nbytes() < self._extent[1]:
            return None
        with _disable_current_modes():
            return as_tensor(storage, self._dtype, *self._place)

    def overlaps(self, other: Span) -> bool:
        (first, last), (start, end) = self._extent, other._extent
        return self._storage.cdata == other._storage.cdata and first < end and start < last


def poison(span: Span) -> None:
    """Fills memory with what nobody can take for a number: NaN; of integers, large ones."""
    tensor = span.tensor()
    if tensor is None:
        return
    with torch.no_grad(), _disable_current_modes():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype != torch.bool:
            tensor.fill_(0xFF if tensor.dtype == torch.uint8 else torch.iinfo(tensor.dtype).max)


def as_tensor(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int]
) -> Tensor:
    """Returns a tensor in `storage`, which keeps it."""
    empty: Any = torch.empty(0, dtype=dtype, device=storage.device)
    found: Tensor = empty.set_(storage, offset, shape, stride)
    return found


def storage_guard() -> AbstractContextManager[None]:
    """Returns a context manager in which this thread's operations, those of a backward too, raise AssertionError where
    a tensor's storage has fewer bytes than its sizes, strides and offset need. It costs some 0.1 ms per operation.
    """
    return _Guard().watching()


def check_present(name: str, accesses: Sequence[Access]) -> None:
    """Raises AssertionError if a tensor of the operation `name` lies, in part, in memory that is not there."""
    for access in accesses:
        needed, present = _bytes(access.tensor)
        verb = "writes" if access.writes else "reads"
        assert present >= needed, (
            f"{name} {verb} {described(access.tensor)}, which needs {needed} bytes of a storage of {present}: "
            "its memory was freed"
        )


def safe_to_print() -> AbstractContextManager[None]:
    """Returns a context manager in which tensors without memory can be printed, as in the traceback of a test."""

    def wrap(_name: str, method: Callable[..., str]) -> Callable[..., str]:
        def of(tensor: Tensor, *args: object, **kwargs: object) -> str:
            needed, present = _bytes(tensor)
            return method(tensor, *args, **kwargs) if present >= needed else f"<{described(tensor)}, freed>"

        return of

    return replaced(torch.Tensor, "__repr__", wrap)


def _bytes(tensor: Tensor) -> tuple[int, int]:
    """Returns how many bytes of its storage `tensor` needs, and how many there are."""
    storage = storage_of(tensor)
    return (0, 0) if storage is None else (extent(tensor)[1], storage.nbytes())


class _Guard(MemoryWatch):  # type: ignore[no-untyped-call]  # torch's
    def saw(self, name: str, accesses: Sequence[Access]) -> None:
        check_present(name, accesses)


WAITS = ((DrawnStream, "follow"), (DrawnStream, "after"), (DrawnEvent, "hold_device"), (DrawnEvent, "wait"))


class Site(NamedTuple):
    """A line that calls `wait`, within `function`."""

    file: str
    line: int
    function: str
    wait: str

    def __str__(self) -> str:
        return f"{Path(self.file).stem}.{self.function}:{self.line} {self.wait}"


def wait_sites(program: Callable[[], object]) -> list[Site]:
    """Calls `program`; returns the sites of the waits that it called, in the order of their first calls."""
    found: dict[Site, None] = {}

    def seen(site: Site) -> bool:
        found[site] = None
        return True

    with _asked(seen):
        program()
    return list(found)


@contextmanager
def without(site: Site) -> Iterator[None]:
    """Returns a context manager in which the waits of `site` do nothing."""
    with _asked(lambda one: one != site):
        yield


@contextmanager
def _asked(wants: Callable[[Site], bool]) -> Iterator[None]:
    """Makes every wait ask, with its site, whether to happen."""

    def wrap(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*args: Any) -> Any:
            caller = sys._getframe(1)
            site = Site(caller.f_code.co_filename, caller.f_lineno, caller.f_code.co_name, name)
            return method(*args) if wants(site) else None

        return asked

    with ExitStack() as stack:
        for owner, name in WAITS:
            stack.enter_context(replaced(owner, name, wrap))
        yield
