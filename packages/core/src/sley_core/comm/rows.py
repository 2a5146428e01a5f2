"""Gathers whole tensors from shards of rows, reduces whole tensors to shards, several at a time; and swaps rows of one.

    gather   rank 0: a0      a0 a1        reduce   rank 0: a0 a1     a0 + b0        swap   rank 0: a0 a1   a0 b0
             rank 1:    a1   a0 a1                 rank 1: b0 b1               a1 + b1     rank 1: b0 b1   a1 b1

On the CPU of one host, ranks read each other's memory where the system lets them. On gloo otherwise every rank sends to
every other directly: two to four times faster than gloo's own reduce-scatter, and what is received needs no copy
(docs/measurements.md). Either way each rank says what it exchanges and how long it is, and something else is an error on
both sides (`marks`). Elsewhere the backend's own collectives are the best there are; what they exchange is noted, and
compared before a step ends (`exchange_log`). A shard is summed on its own rank, own
part first, then by ascending coordinate, so the result depends neither on who is late nor on the way that it took.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from sley_core.comm.collectives import all_to_all, guarded
from sley_core.comm.groups import SHARED, Group
from sley_core.comm.host_rows import HostGather, HostReduce, HostShare, HostSwap
from sley_core.comm.marks import mark_of
from sley_core.comm.messages import Messages, is_direct, others, pass_around
from sley_core.comm.together import gather_together, reduce_together

GATHER = "gather"
REDUCE = "reduce"
"""The lanes of `wp`: a gather must not wait for a reduction."""


watchers: list[Callable[[str, Group, Sequence[Tensor]], None]] = []
"""Told of every exchange that torch does not see: `gather`, `reduce` or `swap`, its group, and what this rank gives."""


class Exchange(Protocol):
    """Rows under way. `wait` until what comes is here (on CUDA: until this stream will see it), `end` it when done."""

    def wait(self) -> None:
        """Raises RunError `collective-failed`, naming operation, group and tensors; a second call does nothing."""

    def free(self) -> None:
        """Nothing comes any more, whether it was awaited or not: the memory it would go to may be used otherwise."""

    def end(self) -> None:
        """Waits for what was sent too: the memory of both may be written afterwards. Raises as `wait` does."""


class Reduction(Exchange, Protocol):
    """A sum under way."""

    def is_here(self) -> bool:
        """Whether `wait` would wait for nobody, as far as that is known; asks without waiting."""


def share_rows(shards: Sequence[Tensor], group: Group, *, what: str) -> HostShare | None:
    """Lets the ranks of `group` read `shards`, contiguous, until `end`, where they can read each other's memory; else None.

    All ranks of the group call it, and its `end`, in one order with `gather_rows`, with as many tensors of the same shapes.
    """
    memory = group.memories.get(SHARED) if group.size > 1 else None
    return None if memory is None else HostShare(memory, shards, mark_of("share", what, shards))


def gather_rows(
    wholes: Sequence[Tensor], shards: Sequence[Tensor], group: Group, *, what: str, share: HostShare | None = None
) -> Exchange:
    """Starts to fill each of `wholes` [size x n, ...] with the ranks' `shards` [n, ...], in the order of `group`.

    All are contiguous; `shards` stay as they are until `end` has returned. Runs on the lane `gather`; all ranks of the group
    call it in one order with as many tensors of the same shapes. share: holds `shards`, if they were shared before.
    """
    own = group.coord
    if group.size == 1:
        for whole, shard in zip(wholes, shards, strict=True):
            whole.copy_(shard)
        return Messages([], [], "gather", group, what)
    memory = group.memories.get(GATHER)
    if memory is not None:
        _tell("gather", group, shards)
        if share is not None:
            return share.gather(wholes, shards)
        return HostGather(memory, wholes, shards, mark_of("gather", what, shards))
    lane = group.lane(GATHER)
    mark = mark_of("gather", what, shards)
    if not is_direct(lane, shards[0].device):
        group.log.add(GATHER, mark)
        works = guarded(lambda: gather_together(wholes, shards, lane), "gather", group, what)
        return Messages(works, [], "gather", group, what)
    peers = others(group)
    rows = [whole.view(group.size, *shard.shape) for whole, shard in zip(wholes, shards, strict=True)]
    places = [[whole[peer] for peer in peers] for whole in rows]
    started = pass_around(places, [[shard] * len(peers) for shard in shards], group, lane, mark, "gather")
    for whole, shard in zip(rows, shards, strict=True):
        whole[own].copy_(shard)
    return started


def num_received(rows: int, group: Group, device: torch.device) -> int:
    """The rows of scratch memory that `reduce_rows` needs for a shard of `rows` on `device`: only what is sent directly
    arrives beside the whole."""
    if group.size == 1 or REDUCE in group.memories or not is_direct(group.lane(REDUCE), device):
        return 0
    return rows * (group.size - 1)


def reduce_rows(
    wholes: Sequence[Tensor], scratches: Sequence[Tensor], group: Group, *, what: str, contents: int = 0
) -> Reduction:
    """Starts to sum each of `wholes` [size x n, ...] over `group`; after `wait` this rank's n rows hold the sum.

    scratches: [`num_received(n)`, ...] of the same type. All are contiguous and the exchange's until `end` has returned;
    the other ranks' rows of `wholes` are undefined then. Runs on the lane `reduce`; all ranks of the group call it in
    one order with as many tensors of the same shapes. contents: a checksum of what they are, where `what` leaves it open.
    """
    if group.size == 1:
        return Messages([], [], "reduce", group, what)
    memory = group.memories.get(REDUCE)
    if memory is not None:
        _tell("reduce", group, wholes)
        return HostReduce(memory, wholes, mark_of("reduce", what, wholes, contents))
    lane = group.lane(REDUCE)
    parts = [whole.view(group.size, whole.shape[0] // group.size, *whole.shape[1:]) for whole in wholes]
    own = [rows[group.coord] for rows in parts]
    mark = mark_of("reduce", what, wholes, contents)
    if not is_direct(lane, wholes[0].device):
        group.log.add(REDUCE, mark)
        works = guarded(lambda: reduce_together(own, wholes, lane), "reduce", group, what)
        return Messages(works, [], "reduce", group, what)
    arriving = [one.view(group.size - 1, *rows.shape[1:]) for one, rows in zip(scratches, parts, strict=True)]

    def finish() -> None:
        for total, received in zip(own, arriving, strict=True):
            for part in received:
                total.add_(part)

    out = [[rows[peer] for peer in others(group)] for rows in parts]
    return pass_around([list(one) for one in arriving], out, group, lane, mark, "reduce", finish)


def swap_rows(received: Tensor, sent: Tensor, group: Group, *, lane: str, what: str, contents: int = 0) -> Exchange:
    """Starts an exchange: row i of `sent` [size, ...] goes to the i-th rank of `group`, row i of `received` comes from it.

    Both are contiguous, of one shape and dtype, and the exchange's until `end` has returned. Runs on `lane`; all ranks of the
    group call it in one order with what else runs there, with tensors of one shape. contents: as for `reduce_rows`.
    """
    if group.size == 1:
        received.copy_(sent)
        return Messages([], [], "swap", group, what)
    memory = group.memories.get(lane)
    if memory is not None:
        _tell("swap", group, [sent])
        return HostSwap(memory, received, sent, mark_of("swap", what, [sent], contents))
    joined = group.lane(lane)
    mark = mark_of("swap", what, [sent], contents)
    if not is_direct(joined, sent.device):
        group.log.add(lane, mark)
        return Messages([all_to_all(received, sent, group, what=what, lane=lane)], [], "swap", group, what)
    peers = others(group)
    places, parts = ([[whole[peer] for peer in peers]] for whole in (received, sent))
    started = pass_around(places, parts, group, joined, mark, "swap")
    received[group.coord].copy_(sent[group.coord])
    return started


def _tell(operation: str, group: Group, tensors: Sequence[Tensor]) -> None:
    for watcher in watchers:
        watcher(operation, group, tensors)
