"""Delays the exchanges of transports until the program waits for them, like a device whose communication stream is far behind.

    with late_exchanges():
        run.step()

A result contains NaN until `wait`, so a program that reads it too early computes NaN. Inputs are sent at the time of `wait`, so
a program that writes to them, frees them or returns them to a pool too early sends wrong values. Exchanges then happen in the
order of their waits, which must be the same on all ranks. Messages between two ranks are not delayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from sley_core.comm.group import Group
from sley_core.comm.transport import Transport, Work
from sley_core.topology import DEFAULT_CHANNEL


@contextmanager
def late_exchanges() -> Iterator[None]:
    """Delays the exchanges of all transports within the block, on this rank. Use it on all ranks."""
    choose = Group.transport

    def choose_late(group: Group, channel: str = DEFAULT_CHANNEL) -> Transport:
        transport = choose(group, channel)
        return transport if group.size == 1 else _LateTransport(transport, group)

    with mock.patch.object(Group, "transport", choose_late):
        yield


class _LateWork(Work):
    """Starts an exchange at `wait`."""

    def __init__(self, start: Callable[[], Work]) -> None:
        self._start = start
        self._work: Work | None = None

    def is_completed(self) -> bool:
        """Returns whether the exchange is complete, which is never the case before `wait`."""
        return self._work is not None and self._work.is_completed()

    def wait(self) -> None:
        self._work = self._work or self._start()
        self._work.wait()

    def release(self) -> None:
        self.wait()
        assert self._work is not None
        self._work.release()

    def wait_sent(self) -> None:
        self.wait()
        assert self._work is not None
        self._work.wait_sent()


class _LateTransport(Transport):
    """Delays the exchanges of `transport`, which belongs to `group`."""

    def __init__(self, transport: Transport, group: Group) -> None:
        self._transport = transport
        self._group = group

    def num_scratch_rows(self, num_rows: int) -> int:
        return self._transport.num_scratch_rows(num_rows)

    def all_gather(self, tensors: Sequence[Tensor], shards: Sequence[Tensor], *, label: str) -> Work:
        for whole, shard in zip(tensors, shards, strict=True):
            rows = whole.view(self._group.size, *shard.shape)
            for coord, row in enumerate(rows):
                if coord != self._group.coord or row.data_ptr() != shard.data_ptr():
                    _poison(row)
        return _LateWork(lambda: self._transport.all_gather(tensors, shards, label=label))

    def reduce_scatter(self, tensors: Sequence[Tensor], scratches: Sequence[Tensor], *, label: str, contents: int = 0) -> Work:
        return _LateWork(lambda: self._transport.reduce_scatter(tensors, scratches, label=label, contents=contents))

    def all_to_all(self, received: Tensor, sent: Tensor, *, label: str, contents: int = 0) -> Work:
        _poison(received)
        return _LateWork(lambda: self._transport.all_to_all(received, sent, label=label, contents=contents))

    def all_reduce(self, tensor: Tensor, *, label: str, contents: int = 0) -> Work:
        return _LateWork(lambda: self._transport.all_reduce(tensor, label=label, contents=contents))


def _poison(tensor: Tensor) -> None:
    """Fills `tensor` with NaN, or with the largest integer."""
    with torch.no_grad():
        tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)
