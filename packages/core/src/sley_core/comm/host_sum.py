"""An all-reduce by ranks that read each other's memory: every rank sums a slice of the tensor, then all read the sums.

    offer whole ──> sum own slice ──> offer own slice ──> read the others' slices ──> end
                      ^ all have offered                    ^ all have summed, and nobody needs what is overwritten

Nothing but its own calls moves it, so between two of them no core is taken. A slice is summed on one rank, own part first,
then by ascending coordinate: all ranks hold the same bits, whoever was late.
"""

from __future__ import annotations

from torch import Tensor

from sley_core.comm import rows
from sley_core.comm.groups import Group
from sley_core.comm.host_memory import HostMemory
from sley_core.comm.host_rows import add_from, span
from sley_core.comm.marks import mark_of
from sley_core.comm.system_memory import Span
from sley_core.topology import DEFAULT_LANE


class SumMemory:
    """What a group needs for sums, which all members start in one order: a row of offers for either half of a sum."""

    def __init__(self, group: Group, wholes: HostMemory, slices: HostMemory) -> None:
        self.group = group
        self.wholes = wholes
        self.slices = slices
        self.num_summed = 0

    @classmethod
    def open(cls, group: Group, timeout_s: float) -> SumMemory | None:
        """All members call this; None on all of them where one cannot read another's memory."""
        wholes = HostMemory.open(group, DEFAULT_LANE, timeout_s)
        slices = HostMemory.open(group, DEFAULT_LANE, timeout_s) if wholes else None
        return cls(group, wholes, slices) if wholes and slices else None


class HostSum:
    """The sum of `whole` (contiguous, on the host) over the group of `memory`, in place.

    A slice is summed when those of all sums before are, so that its offer has the same number on all ranks. `whole` is nobody
    else's until `end` has returned.

    contents: a checksum of what lies in `whole`. Where a rank sums something else, or of another length, `sum` and `wait` raise
    RunError `ranks-differ` on all, and nothing is read.
    """

    def __init__(self, memory: SumMemory, whole: Tensor, what: str, contents: int = 0) -> None:
        self._memory = memory
        self._mark = mark_of("all-reduce", f"{what} over {memory.group}", [whole], contents)
        self._what = self._mark.what
        size = memory.group.size
        flat = whole.view(-1)
        length = -(-flat.numel() // size)
        self._slices = [flat[at * length : (at + 1) * length] for at in range(size)]
        self._first = length * memory.group.coord * flat.element_size()
        self._is_summed = False
        self._is_whole = False
        for watcher in rows.watchers:
            watcher("all_reduce", memory.group, [whole])
        self._number = memory.wholes.offer([whole], self._mark, self.end)

    def advance(self) -> bool:
        """Does what the others have made possible, without waiting for them; whether `whole` holds the sum."""
        if not self._is_summed and self._is_next and self._memory.wholes.is_offered(self._number):
            self._sum()
        if self._is_summed and not self._is_whole and self._may_gather():
            self._gather()
        return self._is_whole

    def sum(self) -> None:
        """This rank's slice is summed, and the others may read it; waits for their offers. Called in the order of the sums."""
        if not self._is_summed:
            assert self._is_next, f"{self._what} is sum {self._number}, but only {self._memory.num_summed} are summed"
            self._sum()

    def wait(self) -> None:
        """`whole` holds the sum; waits for the others' slices."""
        self.sum()
        if not self._is_whole:
            self._memory.wholes.is_read(self._number, self._what)
            self._gather()

    def end(self) -> None:
        """The sum is there, and the others have read this rank's slice of it."""
        self.wait()
        for memory in (self._memory.wholes, self._memory.slices):
            memory.is_read(self._number, self._what)

    @property
    def _is_next(self) -> bool:
        return self._number == self._memory.num_summed + 1

    def _may_gather(self) -> bool:
        memory = self._memory
        return memory.wholes.was_read(self._number) and memory.slices.is_offered(self._number)

    def _sum(self) -> None:
        wholes = self._memory.wholes
        own = self._slices[wholes.coord]
        starts = [wholes.table(peer, self._number, self._what)[0] + self._first for peer in wholes.peers]
        add_from(wholes, own, starts, self._what)
        self._is_summed = True
        self._memory.num_summed += 1
        # There is room: the sum of RING before ended when this one's whole was offered.
        # The mark of the whole: slices are cut alike, but the last may be shorter.
        number = self._memory.slices.offer([own], self._mark)
        assert number == self._number, f"offer {number} of slices for sum {self._number}"
        for peer in wholes.peers:
            wholes.done(peer, self._number, self._what)

    def _gather(self) -> None:
        slices = self._memory.slices
        for peer in slices.peers:
            here = span(self._slices[peer])
            (address,) = slices.table(peer, self._number, self._what)
            slices.read(peer, [here], [Span(address, here.num_bytes)], self._what)
            slices.done(peer, self._number, self._what)
        self._is_whole = True
