"""Gathers whole tensors from shards of rows, and reduces whole tensors to shards, several tensors at a time.

    gather   rank 0: a0      a0 a1        reduce   rank 0: a0 a1     a0 + b0
             rank 1:    a1   a0 a1                 rank 1: b0 b1               a1 + b1

On gloo every rank sends to every other directly: two to four times faster than gloo's own reduce-scatter, and what is
received needs no copy (docs/measurements.md). Elsewhere the backend's own collectives are the best there are. A shard is
summed on its own rank, own part first, then by ascending coordinate, so the result does not depend on who is late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from sley_core.comm.collectives import all_gather_single, guarded
from sley_core.comm.groups import Group

GATHER = "gather"
REDUCE = "reduce"
"""The lanes of `wp`: a gather must not wait for a reduction."""


class Exchange:
    """Messages under way. `wait` returns when all have come and gone (on CUDA: when this stream will see it)."""

    __slots__ = ("_finish", "_group", "_operation", "_what", "_works")

    def __init__(
        self, works: list[Any], operation: str, group: Group, what: str, finish: Callable[[], None] | None = None
    ) -> None:
        self._works = works
        self._operation = operation
        self._group = group
        self._what = what
        self._finish = finish

    def wait(self) -> None:
        """Raises RunError `collective-failed`, naming operation, group and tensors; a second call does nothing."""
        works, self._works = self._works, []
        for work in works:
            guarded(work.wait, self._operation, self._group, self._what)
        if self._finish is not None:
            self._finish()
            self._finish = None


def gather_rows(wholes: Sequence[Tensor], shards: Sequence[Tensor], group: Group, *, what: str) -> Exchange:
    """Starts to fill each of `wholes` [size x n, ...] with the ranks' `shards` [n, ...], in the order of `group`.

    All are contiguous and stay as they are until `wait` has returned. Runs on the lane `gather`; all ranks of the group
    call it in one order with as many tensors of the same shapes.
    """
    own = group.coord
    if group.size == 1:
        for whole, shard in zip(wholes, shards, strict=True):
            whole.copy_(shard)
        return Exchange([], "gather", group, what)
    lane = group.lane(GATHER)
    works: list[Any] = []

    def start() -> None:
        for tag, (whole, shard) in enumerate(zip(wholes, shards, strict=True)):
            if not _is_direct(lane, shard):
                works.append(all_gather_single(whole, shard, group=lane, async_op=True))
                continue
            rows = whole.view(group.size, *shard.shape)
            for peer in _others(group):
                works.append(dist.irecv(rows[peer], group.ranks[peer], group=lane, tag=tag))
            for peer in _others(group):
                works.append(dist.isend(shard, group.ranks[peer], group=lane, tag=tag))
            rows[own].copy_(shard)

    guarded(start, "gather", group, what)
    return Exchange(works, "gather", group, what)


def num_received(rows: int, group: Group) -> int:
    """The rows of scratch memory that `reduce_rows` needs for a shard of `rows`."""
    return rows * max(group.size - 1, 0)


def reduce_rows(wholes: Sequence[Tensor], scratches: Sequence[Tensor], group: Group, *, what: str) -> Exchange:
    """Starts to sum each of `wholes` [size x n, ...] over `group`; after `wait` this rank's n rows hold the sum.

    scratches: [`num_received(n)`, ...] of the same type. All are contiguous and the exchange's until `wait` has returned;
    the other ranks' rows of `wholes` are undefined then. Runs on the lane `reduce`; all ranks of the group call it in
    one order with as many tensors of the same shapes.
    """
    if group.size == 1:
        return Exchange([], "reduce", group, what)
    lane = group.lane(REDUCE)
    works: list[Any] = []
    sums: list[tuple[Tensor, Tensor]] = []
    for whole, scratch in zip(wholes, scratches, strict=True):
        rows = whole.view(group.size, -1, *whole.shape[1:])
        sums.append((rows[group.coord], scratch.view(group.size - 1, *rows.shape[1:])))

    def start() -> None:
        for tag, (whole, (_, received)) in enumerate(zip(wholes, sums, strict=True)):
            if not _is_direct(lane, whole):
                works.append(_reduce_scatter_single(received[0], whole, group=lane, async_op=True))
                continue
            rows = whole.view(group.size, -1, *whole.shape[1:])
            for at, peer in enumerate(_others(group)):
                works.append(dist.irecv(received[at], group.ranks[peer], group=lane, tag=tag))
            for peer in _others(group):
                works.append(dist.isend(rows[peer], group.ranks[peer], group=lane, tag=tag))

    def finish() -> None:
        for own, received in sums:
            if not _is_direct(lane, own):
                own.copy_(received[0])
                continue
            for part in received:
                own.add_(part)

    guarded(start, "reduce", group, what)
    return Exchange(works, "reduce", group, what, finish)


_reduce_scatter_single = (
    dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
)
"""Renamed in torch 2.13."""


def _others(group: Group) -> list[int]:
    return [peer for peer in range(group.size) if peer != group.coord]


def _is_direct(lane: dist.ProcessGroup, tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and dist.get_backend(lane) == "gloo"
