"""Imitates the transports of a group whose other members do not exist: every exchange is over when it begins.

Nothing comes, and results keep what they held. The memory that an exchange takes beside its tensors is taken as the real
transport takes it, by that one's own functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from sley_core.comm.backends import Direct, Done
from sley_core.comm.progress import Members, Standing
from sley_core.comm.transport import Transport, Work
from sley_core.protocols import Collective
from sley_core.records import TransportRecord


def no_rows(num_rows: int) -> int:
    """Returns the rows of scratch memory of a transport that sums in place."""
    return 0


def no_scratch(own: Tensor) -> None:
    """Takes no memory of its own while `own` is summed."""


class Tell(Protocol):
    """Records what a rank exchanges."""

    def __call__(self, kind: Collective, axis: str, lane: str, num_bytes: int) -> Callable[[], None]:
        """Records that an exchange of `num_bytes` begins; returns a function whose first call records that the rank waits for
        it.
        """


class ImitatedWork(Done):
    """An exchange that is over; `waits` is called where the rank would wait for it.

    Until then a look at it finds it under way: one that found it done would make the rank wait at once for what a run goes on
    beside. sums: takes the memory that it takes to read and add what peers offer. A rank does that when it waits, or when it
    looks and they have come: as a rule by the next entry of its list.
    """

    def __init__(self, waits: Callable[[], None], sums: Callable[[], None], standing: Standing) -> None:
        self._waits = waits
        self._sums = sums
        self._standing = standing
        self._began_in = standing.pending
        self._is_summed = self._is_awaited = False

    def test(self) -> bool:
        if self._standing.pending is not self._began_in:
            self._sum()
        return self._is_awaited

    def wait(self) -> None:
        self._sum()
        self._is_awaited = True
        self._waits()

    def wait_sent(self) -> None:
        self.wait()

    def _sum(self) -> None:
        if not self._is_summed:
            self._is_summed = True
            self._sums()


class ImitatedTransport(Transport):
    """Stands for the transport of `lane` that needs `scratch_rows(n)` rows of its callers for a shard of n, and that takes
    memory by `scratch(own)` while it sums `own`: takes as much, exchanges nothing. tell: records what it would exchange.
    """

    def __init__(
        self,
        members: Members,
        lane: str,
        tell: Tell,
        scratch_rows: Callable[[int], int] = no_rows,
        scratch: Callable[[Tensor], object] = no_scratch,
    ) -> None:
        self._members = members
        self._size = members.size
        self._lane = lane
        self._tell = tell
        self._scratch_rows = scratch_rows
        self._scratch = scratch

    def num_scratch_rows(self, num_rows: int) -> int:
        return self._scratch_rows(num_rows)

    def all_gather(self, wholes: Sequence[Tensor], shards: Sequence[Tensor], *, what: str) -> Work:
        return self._begin("gather", wholes)

    def reduce_scatter(self, wholes: Sequence[Tensor], scratches: Sequence[Tensor], *, what: str, contents: int = 0) -> Work:
        return self._begin("reduce", wholes, [whole[: whole.shape[0] // self._size] for whole in wholes])

    def all_to_all(self, received: Tensor, sent: Tensor, *, what: str, contents: int = 0) -> Work:
        return self._begin("swap", [sent])

    def all_reduce(self, tensor: Tensor, *, what: str, contents: int = 0) -> Work:
        flat = tensor.view(-1)
        return self._begin("sum", [tensor], [flat[: -(-flat.numel() // self._size)]])

    def _begin(self, kind: Collective, tensors: Sequence[Tensor], own: Sequence[Tensor] = ()) -> Work:
        """Records that an exchange of these tensors begins, and returns its handle. own: what this rank sums."""
        waits = self._tell(kind, self._members.axis, self._lane, sum(tensor.nbytes for tensor in tensors))
        return ImitatedWork(waits, partial(self._sum, own), self._members.progress.standing)

    def _sum(self, own: Sequence[Tensor]) -> None:
        """Takes the memory that a sum takes, for one tensor after the other."""
        for one in own:
            self._scratch(one)


def imitated_transports(
    members: Members, lanes: Mapping[str, dist.ProcessGroup], kind: str, tell: Tell, records: Sequence[TransportRecord] = ()
) -> dict[str, Transport]:
    """Returns transports that exchange nothing for `lanes` of a fake world; they take memory as those of a real one on a device
    of this kind do.

    records: the transports that CPU ranks would use, as they do where all of them are on one host; the first counts.
    """
    scratch, is_direct = no_scratch, kind == "cpu" and not records
    if kind == "cpu" and records and records[0].scratch:
        scratch = records[0].load(records[0].scratch)
    return {
        name: ImitatedTransport(
            members, name, tell, Direct(members, name, lane).num_scratch_rows if is_direct else no_rows, scratch
        )
        for name, lane in lanes.items()
    }
