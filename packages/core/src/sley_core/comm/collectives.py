"""The collectives that Sley uses. Each names its group; over a group of one rank it does nothing.

torch.distributed renames functions between versions; this module hides the differences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sley_core.comm.groups import Group
from sley_core.comm.guard import Turn, guarded, message_turn, turn_of
from sley_core.comm.texts import gather_values
from sley_core.comm.verbs import Op
from sley_core.topology import DEFAULT_LANE

OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


all_gather_single = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
"""Renamed in torch 2.13."""


class Pending:
    """Is the handle of a collective in flight. After `wait` the result is there (on CUDA: ordered before later work on this
    stream).

    Without `work` it is complete.
    """

    __slots__ = ("_turn", "_work")

    def __init__(self, work: Any = None, turn: Turn | None = None) -> None:
        self._work = work
        self._turn = turn

    def wait(self) -> None:
        """Waits for the result; a second call does nothing.

        Raises RunError `collective-failed`, naming operation, group and tensor, after a timeout or if a peer died, and
        `ranks-differ` if ranks wait for each other.
        """
        if self._work is None or self._turn is None:
            return
        guarded(self._work.wait, self._turn)
        self._work = None

    def is_done(self) -> bool:
        """Returns whether `wait` would return at once; never blocks."""
        return self._work is None or bool(self._work.is_completed())


class Imitated(Pending):
    """Is the handle of an exchange with members that do not exist; `waits` is called where the rank would wait for it."""

    __slots__ = ("_waits",)

    def __init__(self, waits: Callable[[], None]) -> None:
        super().__init__()
        self._waits = waits

    def wait(self) -> None:
        self._waits()


class LandingPending(Pending):
    """A message that arrives on the host, in `came`; the first `wait` copies it to `place`, on the device."""

    __slots__ = ("_came", "_place")

    def __init__(self, work: Any, turn: Turn, came: Tensor, place: Tensor) -> None:
        super().__init__(work, turn)
        self._came = came
        self._place = place

    def wait(self) -> None:
        has_landed = self._work is None
        super().wait()
        if not has_landed:
            self._place.copy_(self._came)


def goes_by_host(tensor: Tensor, group: Group, lane: str) -> bool:
    """Returns whether a message of `tensor` must be one of the host's memory: gloo, which ranks that share a device talk by,
    takes the address of whatever it is given to send for one of the host.
    """
    return tensor.device.type != "cpu" and dist.get_backend(group.lane(lane)) == "gloo"


def all_reduce(tensor: Tensor, group: Group, op: Op = "sum", *, what: str) -> Pending:
    """Starts an all-reduce of `tensor` (contiguous, any floating or integer dtype) in place over `group`; returns its handle.

    what: describes the tensor, for the error of a wait that fails.
    """
    if group.size == 1:
        return Pending()
    if group.imitate is not None:
        return Imitated(group.imitate(op, tensor, tensor, DEFAULT_LANE, what))
    turn = turn_of("all-reduce", group, what, num_bytes=tensor.nbytes)
    return Pending(guarded(lambda: dist.all_reduce(tensor, OPS[op], group=group.lane(), async_op=True), turn), turn)


def broadcast(tensor: Tensor, group: Group, *, what: str) -> Pending:
    """Starts a broadcast of `tensor` in place from the first rank of `group`; returns its handle."""
    if group.size == 1:
        return Pending()
    if group.imitate is not None:
        return Imitated(group.imitate("broadcast", tensor, tensor, DEFAULT_LANE, what))
    turn = turn_of("broadcast", group, what, num_bytes=tensor.nbytes)
    first = group.ranks[0]
    return Pending(guarded(lambda: dist.broadcast(tensor, src=first, group=group.lane(), async_op=True), turn), turn)


def all_to_all(output: Tensor, tensor: Tensor, group: Group, *, what: str, lane: str = DEFAULT_LANE) -> Pending:
    """Starts an all-to-all: slice i of `tensor` goes to the i-th rank of `group`, slice i of `output` comes from it.

    Both are contiguous, of one size and dtype, and divide along dim 0 into `group.size` equal slices. Returns the handle.
    """
    if group.size == 1:
        output.copy_(tensor)
        return Pending()
    if group.imitate is not None:
        return Imitated(group.imitate("swap", output, tensor, lane, what))
    turn = turn_of("all-to-all", group, what, lane, tensor.nbytes)
    work = guarded(lambda: dist.all_to_all_single(output, tensor, group=group.lane(lane), async_op=True), turn)
    return Pending(work, turn)


def all_gather(output: Tensor, tensor: Tensor, group: Group, *, what: str, lane: str = DEFAULT_LANE) -> Pending:
    """Starts an all-gather of the ranks' `tensor` along dim 0 of `output`, in the order of `group`; both are contiguous."""
    if group.size == 1:
        output.copy_(tensor)
        return Pending()
    if group.imitate is not None:
        return Imitated(group.imitate("gather", output, tensor, lane, what))
    turn = turn_of("all-gather", group, what, lane, tensor.nbytes)
    work = guarded(lambda: all_gather_single(output, tensor, group=group.lane(lane), async_op=True), turn)
    return Pending(work, turn)


def send_to(tensor: Tensor, group: Group, lane: str, peer: int, *, what: str) -> Pending:
    """Starts to send `tensor` (contiguous) to the member of `group` at coordinate `peer`, on `lane`; returns its handle.

    Calls the communicator itself, which numbers members as `group` does: the overhead of `dist.isend` is a fifth of the call.
    """
    if group.imitate is not None:
        return Imitated(group.imitate("send", tensor, tensor, lane, what))
    turn = message_turn("send", group, what, lane, group.coord, peer, tensor.nbytes)
    sent = tensor.to("cpu", copy=True) if goes_by_host(tensor, group, lane) else tensor
    return Pending(guarded(lambda: group.lane(lane).send([sent], peer, 0), turn), turn)


def receive_from(tensor: Tensor, group: Group, lane: str, peer: int, *, what: str) -> Pending:
    """Starts to receive into `tensor` (contiguous) from the member of `group` at coordinate `peer`, on `lane`; returns its
    handle.
    """
    if group.imitate is not None:
        return Imitated(group.imitate("receive", tensor, tensor, lane, what))
    turn = message_turn("receive", group, what, lane, peer, group.coord, tensor.nbytes)
    if goes_by_host(tensor, group, lane):
        came = torch.empty_like(tensor, device="cpu")
        return LandingPending(guarded(lambda: group.lane(lane).recv([came], peer, 0), turn), turn, came, tensor)
    return Pending(guarded(lambda: group.lane(lane).recv([tensor], peer, 0), turn), turn)


def gather_objects(value: Any, group: Group, *, what: str) -> list[Any]:
    """Gathers every rank's `value` (small, serialisable as JSON); returns them in the order of the group's ranks. Blocks. For
    the group `control` only.

    Where the other members do not exist, the values of all ranks are this one's.
    """
    if not group.has_peers:
        return [value] * group.size
    found: list[Any] = guarded(lambda: gather_values(value, group.lane()), turn_of("all-gather of objects", group, what))
    return found
