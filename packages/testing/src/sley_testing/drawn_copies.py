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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from sley_core.comm.copies import CopyEvent, HostMemory
from sley_core.comm.device import Device
from sley_testing.accesses import Access, MemoryWatch
from sley_testing.happens_before import DEVICE, Clock, Ledger, merge
from sley_testing.poison import Span, poison, poison_bytes
from sley_testing.storage_guard import check_present

RATES = (0.0, 0.02, 0.2, 0.7, 1.0)
"""How probable a further copy is at each call, drawn once per device: with 0 a copy happens when it must, with 1 at once."""


@dataclass(frozen=True)
class DrawnDevice(Device):
    """The device `cpu` with drawn copies, for `World.alone` and `World.join`; in `ranks`, each rank makes its own.

    order: the number by which copies are drawn. is_strict: whether rules raise; else only bits tell.
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
            self._add(stream, Span(target), Span(source))

    def _add(self, stream: int, target: Span, source: Span) -> None:
        """Queues a copy on a stream, with what it needs first; poisons its target unless a queued copy still reads that."""
        clock = self.ledger.streams[stream]
        needs = {worker: number for worker, number in clock.items() if worker not in (DEVICE, stream)}
        if not any(other.source.overlaps(target) for queue in self._pending.values() for other in queue):
            poison(target)  # else a copy that comes before this one would read it
        self._pending[stream].append(_Copy(target, source, needs))

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
        """Returns whether the host sees that the copies that `clock` names are done; whoever asks often enough sees it.

        What the device was held for has happened, but the host may hear of it later.
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
            if queue and (streams is None or stream in streams) and self._is_ready(queue[0])
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

    def _is_ready(self, copy: _Copy) -> bool:
        return all(self._num_done.get(stream, 0) >= number for stream, number in copy.needs.items())


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

    def hold_device(self) -> None:
        self._copies.force(self.clock)
        merge(self._copies.ledger.device, self.clock)

    def _known(self) -> None:
        merge(self._copies.ledger.host, self.clock)
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

        return partial(poison_bytes, storage, old, num_bytes)
