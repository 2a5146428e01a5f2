"""Exchanges by the backend's own collectives; where it can, several tensors in one call instead of one launch each.

On NCCL the tensors of a layer's weights go into one `ncclGroupStart` ... `ncclGroupEnd`: one kernel, one event to wait for, and
no copy into a flat buffer before or out of it after, which FSDP2's fused gathers need. gloo, which carries CUDA tensors where
ranks share a device, has one call for each.

A collective has no place for a mark, so what is exchanged is noted in the group's log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from sley_core.comm.exchange_log import ExchangeLog
from sley_core.comm.guard import guarded, turn_of
from sley_core.comm.marks import mark_of
from sley_core.comm.members import Members
from sley_core.comm.transport.protocol import Transport, Work
from sley_core.comm.transport.works import Works, all_reduced

_GATHER, _REDUCE = (
    ("all_gather_single_coalesced", "reduce_scatter_single_coalesced")
    if hasattr(dist.ProcessGroup, "all_gather_single_coalesced")
    else ("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced")
)
"""Renamed in torch 2.13."""


class Backend(Transport):
    """Asks `lane`, which is lane `name` of a group with the log `log`.

    is_coalesced: whether it is given several tensors in one call.
    """

    def __init__(
        self, members: Members, name: str, lane: dist.ProcessGroup, log: ExchangeLog, *, is_coalesced: bool
    ) -> None:
        self.members = members
        self._name = name
        self._lane = lane
        self._log = log
        self._gather = _gather_coalesced if is_coalesced else _gather_each
        self._reduce = _reduce_coalesced if is_coalesced else _reduce_each

    def all_gather(self, wholes: Sequence[Tensor], shards: Sequence[Tensor], *, what: str) -> Work:
        mark = mark_of("gather", what, shards)
        self._log.add(self._name, mark)
        turn = turn_of("gather", self.members, what, self._name, mark.num_bytes)
        return Works(guarded(lambda: self._gather(wholes, shards, self._lane), turn), [], turn)

    def reduce_scatter(
        self, wholes: Sequence[Tensor], scratches: Sequence[Tensor], *, what: str, contents: int = 0
    ) -> Work:
        size, coord = self.members.size, self.members.coord
        own = [whole.view(size, whole.shape[0] // size, *whole.shape[1:])[coord] for whole in wholes]
        mark = mark_of("reduce", what, wholes, contents)
        self._log.add(self._name, mark)
        turn = turn_of("reduce", self.members, what, self._name, mark.num_bytes)
        return Works(guarded(lambda: self._reduce(own, wholes, self._lane), turn), [], turn)

    def all_to_all(self, received: Tensor, sent: Tensor, *, what: str, contents: int = 0) -> Work:
        self._log.add(self._name, mark_of("swap", what, [sent], contents))
        turn = turn_of("swap", self.members, what, self._name, sent.nbytes)
        work = guarded(lambda: dist.all_to_all_single(received, sent, group=self._lane, async_op=True), turn)
        return Works([work], [], turn)

    def all_reduce(self, tensor: Tensor, *, what: str, contents: int = 0) -> Work:
        return all_reduced(tensor, self.members, self._name, self._lane, what)


def can_coalesce(lane: dist.ProcessGroup) -> bool:
    """Returns whether the backend takes several tensors in one call, on any device that it serves.

    gloo does not. In torch/csrc/distributed/c10d/ProcessGroupGloo.cpp `allgather` has a class for CUDA (AsyncAllgatherCUDAWork)
    and `allreduce` one in its registry (GlooAllreduceRegistry, ProcessGroupGlooCuda.cpp): they copy to the host and back.
    The coalesced gather is AsyncAllgatherCoalescedWork whatever the device, which would hand the device's addresses to
    the host; the coalesced reduce-scatter is one `allreduce` per tensor too, each of a copy.
    """
    return bool(dist.get_backend(lane) != "gloo")


# The following start to fill each of `wholes` [size x n, ...] with the ranks' `shards` [n, ...], or to sum `own` [n, ...], this
# rank's rows of each of `wholes`, in place. They return the works to wait for.


def _gather_coalesced(wholes: Sequence[Tensor], shards: Sequence[Tensor], lane: dist.ProcessGroup) -> list[Any]:
    """Starts to fill all of `wholes` in one call; returns its work."""
    return [getattr(lane, _GATHER)(list(wholes), list(shards))]


def _gather_each(wholes: Sequence[Tensor], shards: Sequence[Tensor], lane: dist.ProcessGroup) -> list[Any]:
    """Starts to fill each of `wholes` in a call of its own; returns their works."""
    parts = [list(whole.view(lane.size(), *shard.shape)) for whole, shard in zip(wholes, shards, strict=True)]
    return [dist.all_gather(rows, shard, group=lane, async_op=True) for rows, shard in zip(parts, shards, strict=True)]


def _reduce_coalesced(own: Sequence[Tensor], wholes: Sequence[Tensor], lane: dist.ProcessGroup) -> list[Any]:
    """Starts to sum all of `own` in one call, in place, and returns its work; the other rows of `wholes` are undefined
    afterwards.

    NCCL sums in place where an output is at its rank's offset in the input (user guide, "In-place Operations"). Megatron-LM
    reduces its buckets so, several in one call (megatron/core/distributed/param_and_grad_buffer.py).
    """
    return [getattr(lane, _REDUCE)(list(own), list(wholes))]


def _reduce_each(own: Sequence[Tensor], wholes: Sequence[Tensor], lane: dist.ProcessGroup) -> list[Any]:
    """Starts to sum each of `wholes` on all ranks, in place, in a call of its own; returns their works."""
    return [dist.all_reduce(whole, group=lane, async_op=True) for whole in wholes]
