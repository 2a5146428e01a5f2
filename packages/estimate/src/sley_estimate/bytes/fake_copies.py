"""Stands for copies to and from the host in a fake world: nothing moves; a listener is told what would, and
who waits for it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from sley_core.comm.copies import CopyEvent, HostMemory, HostStream

if TYPE_CHECKING:
    from sley_estimate.bytes.fake_tensors import FakeTensors
    from sley_estimate.seconds.host_copies import CopyKind


class CopyListener(Protocol):
    """Is told of copies between a device and its host, and of waits for them."""

    def copied(self, kind: CopyKind, stream: int, num_bytes: int, after: int | None) -> int:
        """Notes a copy of `num_bytes` on stream number `stream`; returns a number for the copy, above those of all before it.

        after: the number of a copy of another stream that has to be done before; None if there is none.
        """
        ...

    def awaited(self, number: int) -> None:
        """Notes that the device's work, or the host, waits for the copy that has this number."""
        ...


class _Unheard:
    """Numbers copies, and tells nobody."""

    def __init__(self) -> None:
        self._numbers = count()

    def copied(self, kind: CopyKind, stream: int, num_bytes: int, after: int | None) -> int:
        return next(self._numbers)

    def awaited(self, number: int) -> None: ...


class FakeCopies:
    """The streams and the host memory of one fake device.

    runs_ahead: whether copies run beside other work, as on CUDA; else each is done when `copy` returns, as on a CPU.
    listener: hears of all copies from now on.
    """

    def __init__(self, tensors: FakeTensors, *, runs_ahead: bool) -> None:
        self.runs_ahead = runs_ahead
        self.listener: CopyListener = _Unheard()
        self._tensors = tensors
        self._places: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._num_streams = 0

    def stream(self) -> FakeStream:
        """Returns a new stream of copies; streams are numbered from 0 as they are asked for."""
        self._num_streams += 1
        return FakeStream(self, self._num_streams - 1)

    def memory(self, num_bytes: int) -> FakeHostMemory:
        """Returns `num_bytes` of memory of the host. It never counts as the device's, and copies into it count as "to_host"."""
        made = FakeHostMemory(self._tensors.uncounted(num_bytes, torch.uint8))
        storage = made.data.untyped_storage()
        place = storage._cdata
        self._places[place] = weakref.ref(storage, lambda _: self._places.pop(place, None))
        return made

    def is_on_host(self, tensor: Tensor) -> bool:
        """Returns whether `tensor` lies in memory that `memory` returned."""
        return tensor.untyped_storage()._cdata in self._places

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """Keeps the operations within the block from the listener of operators: a copy is no operator of the device."""
        listener, self._tensors.listener = self._tensors.listener, None
        try:
            yield
        finally:
            self._tensors.listener = listener


class FakeStream(HostStream):
    """A stream of copies without values. under_way: their numbers, of those that nobody has waited for."""

    def __init__(self, copies: FakeCopies, number: int) -> None:
        self.under_way: deque[int] = deque()
        self._copies = copies
        self._number = number
        self._after: int | None = None

    def after(self, event: CopyEvent) -> None:
        assert isinstance(event, FakeEvent), event
        self._after = event.last

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies nothing, but tells the listener of the copy, and which copy it comes after; waits for it at once unless copies
        run beside other work.
        """
        with self._copies.unheard():
            super().copy(target, source)
        kind: CopyKind = "to_host" if self._copies.is_on_host(target) else "to_device"
        after, self._after = self._after, None
        self.under_way.append(self._copies.listener.copied(kind, self._number, source.nbytes, after))
        if not self._copies.runs_ahead:
            self.wait_until(self.under_way[-1])

    def record(self) -> CopyEvent:
        return FakeEvent(self, self.under_way[-1] if self.under_way else None)

    def wait_until(self, number: int) -> None:
        """Tells the listener that somebody waits for the copy `number` and for all before it on this stream, each copy once."""
        while self.under_way and self.under_way[0] <= number:
            self._copies.listener.awaited(self.under_way.popleft())


class FakeEvent:
    """The end of a stream as it was. last: the number of the last copy before it; None if all had been waited for."""

    def __init__(self, stream: FakeStream, last: int | None) -> None:
        self.last = last
        self._stream = stream

    def is_done(self) -> bool:
        """Returns whether nothing need wait: a copy that runs ahead counts as under way until somebody has waited for it."""
        return self.last is None or not self._stream.under_way or self._stream.under_way[0] > self.last

    def wait(self) -> None:
        if self.last is not None:
            self._stream.wait_until(self.last)

    def hold_device(self) -> None:
        self.wait()


class FakeHostMemory(HostMemory):
    """Memory of the host outside of torch's."""

    def __init__(self, data: Tensor) -> None:
        self.num_bytes = data.numel()
        self.data = data
        self.is_locked = False
