"""Exchanges of a group of which only this rank exists: its own part takes the place of each peer's.

    rank 0 gives a0 a1    gather of a0  a0 a0    reduction, sum  a0 + a0    swap  a0 a1    message  the last one sent like it

So shapes are those of a run, no uninitialised memory is read, and values are as large as a run's. Every exchange is complete
when it begins. The copies that it makes are those of an exchange, not of its caller, so they are timed separately.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from sley_core.comm.backends import Done
from sley_core.comm.groups import Group
from sley_core.comm.transport import Transport, Work, put
from sley_core.topology import DEFAULT_LANE, LANES

if TYPE_CHECKING:
    from sley_core.comm.device import Device, Span
    from sley_core.comm.groups import Exchange


class NotImaginedError(Exception):
    """Raised for what an imagined group cannot do, since its other members do not exist."""


class Echo(Transport):
    """Imitates the exchanges of a group of `size` ranks, of which this one is the first, on `device`."""

    def __init__(self, size: int, device: Device) -> None:
        self._size = size
        self._device = device
        self._sent: dict[tuple[object, ...], Tensor] = {}
        self._spans: list[Span] = []

    def spans(self) -> list[Span]:
        """Returns when each exchange since the last call began and ended, as moments of the device."""
        spans, self._spans = self._spans, []
        return spans

    def all_gather(self, wholes: Sequence[Tensor], shards: Sequence[Tensor], *, what: str) -> Work:
        """Copies each shard to every rank's place in its whole."""

        def repeat() -> None:
            for whole, shard in zip(wholes, shards, strict=True):
                for row in whole.detach().view(self._size, *shard.shape):
                    put(shard.detach(), row)

        return self._timed(repeat)

    def reduce_scatter(self, wholes: Sequence[Tensor], scratches: Sequence[Tensor], *, what: str, contents: int = 0) -> Work:
        own = [whole.detach()[: whole.shape[0] // self._size] for whole in wholes]
        return self._timed(lambda: [rows.mul_(self._size) for rows in own])

    def all_to_all(self, received: Tensor, sent: Tensor, *, what: str, contents: int = 0) -> Work:
        return self._timed(lambda: put(sent.detach(), received.detach()))

    def all_reduce(self, tensor: Tensor, *, what: str, contents: int = 0) -> Work:
        return self._timed(lambda: tensor.detach().mul_(self._size))

    def imitate(self, kind: Exchange, result: Tensor, given: Tensor, lane: str, what: str) -> Callable[[], None]:
        """Imitates an exchange without a transport (`Imitate`). This rank is the first, so a broadcast has its value."""
        match kind:
            case "sum":
                self.all_reduce(result, what=what)
            case "swap":
                self.all_to_all(result, given, what=what)
            case "gather":
                self.all_gather([result.view(-1)], [given.view(-1)], what=what)
            case "send":
                self._sent[_kind(given, lane)] = given.detach()
            case "receive":  # looked up at the wait: the message may be sent after this call
                return lambda: self._receive(result, lane, what)
        return _waits_for_nothing

    def _receive(self, tensor: Tensor, lane: str, what: str) -> None:
        """Fills `tensor` with the last message of its kind (lane, size, dtype) that was sent. Raises NotImaginedError if there
        was none.
        """
        sent = self._sent.get(_kind(tensor, lane))
        if sent is None:
            raise NotImaginedError(f"waits for a message ({what}) like which it has sent none itself")
        self._timed(lambda: put(sent.view(tensor.shape), tensor.detach()))

    def _timed(self, copy: Callable[[], object]) -> Work:
        """Runs `copy` and records its span; returns a completed handle."""
        began = self._device.moment()
        copy()
        self._spans.append((began, self._device.moment()))
        return Done()


class NoCommunicators(dict[str, dist.ProcessGroup]):
    """Takes the place of the communicators of an imagined group; raises NotImaginedError for each."""

    def __missing__(self, lane: str) -> dist.ProcessGroup:
        raise NotImaginedError(f"asks for the communicator of the lane `{lane}` itself")


class EchoTransports(dict[str, Transport]):
    """Holds the transports of an imagined group; raises NotImaginedError for a lane that it does not have."""

    def __missing__(self, lane: str) -> Transport:
        raise NotImaginedError(f"asks for a transport of the lane `{lane}`, which its group does not have")


def imagined(axis: str, echo: Echo, size: int) -> Group:
    """Returns a group of `size` ranks of which this one is the first and the others do not exist: each exchange is imitated by
    `echo` and complete at once, for timing what lies between exchanges.

    Raises NotImaginedError for what an echo does not imitate, such as the communicator itself.
    """
    transports: dict[str, Transport] = EchoTransports(dict.fromkeys(LANES.get(axis, (DEFAULT_LANE,)), echo))
    return Group(axis, tuple(range(size)), 0, NoCommunicators(), transports, imitate=echo.imitate)


def _waits_for_nothing() -> None:
    """Is called where a rank waits for an exchange that is complete."""


def _kind(tensor: Tensor, lane: str) -> tuple[object, ...]:
    return lane, tensor.numel(), tensor.dtype
