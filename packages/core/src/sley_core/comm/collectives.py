"""The collectives that Sley uses. Each names its group, and a group of one is the identity.

torch.distributed renames functions between versions; what changed is hidden here.
"""

from __future__ import annotations

from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from sley_core.comm.groups import Group
from sley_core.comm.guard import guarded
from sley_core.comm.texts import gather_values
from sley_core.topology import DEFAULT_LANE

Op = Literal["sum", "max", "min"]
OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


all_gather_single = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
"""Renamed in torch 2.13."""


class Pending:
    """A collective in flight. `wait` returns when the result is there (on CUDA: ordered before later work on this stream)."""

    __slots__ = ("_group", "_operation", "_what", "_work")

    def __init__(self, work: Any, operation: str, group: Group, what: str) -> None:
        self._work = work
        self._operation = operation
        self._group = group
        self._what = what

    def wait(self) -> None:
        """Waits for the result; a second call does nothing.

        Raises RunError `collective-failed`, naming operation, group and tensor, after a timeout or if a peer died.
        """
        if self._work is None:
            return
        guarded(self._work.wait, self._operation, self._group, self._what)
        self._work = None

    def is_done(self) -> bool:
        """Returns whether `wait` would return at once; never blocks."""
        return self._work is None or bool(self._work.is_completed())


def all_reduce(tensor: Tensor, group: Group, op: Op = "sum", *, what: str) -> Pending:
    """Starts the reduction of `tensor` (contiguous, any floating or integer dtype) in place over `group`.

    what: what the tensor is, for the error of a wait that fails.
    """
    if group.size == 1:
        return Pending(None, "all-reduce", group, what)
    work = guarded(
        lambda: dist.all_reduce(tensor, OPS[op], group=group.lane(), async_op=True), "all-reduce", group, what
    )
    return Pending(work, "all-reduce", group, what)


def broadcast(tensor: Tensor, group: Group, *, what: str) -> Pending:
    """Starts a broadcast of `tensor` in place from the first rank of `group`."""
    if group.size == 1:
        return Pending(None, "broadcast", group, what)
    work = guarded(
        lambda: dist.broadcast(tensor, src=group.ranks[0], group=group.lane(), async_op=True), "broadcast", group, what
    )
    return Pending(work, "broadcast", group, what)


def all_to_all(output: Tensor, tensor: Tensor, group: Group, *, what: str, lane: str = DEFAULT_LANE) -> Pending:
    """Starts an exchange: slice i of `tensor` goes to the i-th rank of `group`, slice i of `output` comes from it.

    Both are contiguous, of one size and dtype, and cut along dim 0 into `group.size` even slices.
    """
    if group.size == 1:
        output.copy_(tensor)
        return Pending(None, "all-to-all", group, what)
    work = guarded(
        lambda: dist.all_to_all_single(output, tensor, group=group.lane(lane), async_op=True), "all-to-all", group, what
    )
    return Pending(work, "all-to-all", group, what)


def all_gather(output: Tensor, tensor: Tensor, group: Group, *, what: str, lane: str = DEFAULT_LANE) -> Pending:
    """Starts gathering the ranks' `tensor`, in the order of `group`, along dim 0 of `output`; both are contiguous."""
    if group.size == 1:
        output.copy_(tensor)
        return Pending(None, "all-gather", group, what)
    work = guarded(
        lambda: all_gather_single(output, tensor, group=group.lane(lane), async_op=True), "all-gather", group, what
    )
    return Pending(work, "all-gather", group, what)


def send_to(tensor: Tensor, group: Group, lane: str, peer: int, *, what: str) -> Pending:
    """Starts to send `tensor` (contiguous) to the member of `group` at coordinate `peer`, on `lane`.

    Asks the communicator itself, which numbers members as `group` does: what `dist.isend` does around that takes a fifth of it.
    """
    work = guarded(lambda: group.lane(lane).send([tensor], peer, 0), "send", group, what)
    return Pending(work, "send", group, what)


def receive_from(tensor: Tensor, group: Group, lane: str, peer: int, *, what: str) -> Pending:
    """Starts to receive into `tensor` (contiguous) from the member of `group` at coordinate `peer`, on `lane`."""
    work = guarded(lambda: group.lane(lane).recv([tensor], peer, 0), "receive", group, what)
    return Pending(work, "receive", group, what)


def gather_objects(value: Any, group: Group, *, what: str) -> list[Any]:
    """Returns every rank's `value` (small, JSON), in the order of the group's ranks. Blocks. For the group `control` only."""
    if group.size == 1:
        return [value]
    found: list[Any] = guarded(lambda: gather_values(value, group.lane()), "all-gather of objects", group, what)
    return found
