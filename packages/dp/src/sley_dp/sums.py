"""How a bucket is summed over its group. Each way is started inside a backward and is over when `finish` returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from sley_core.api.comm import HostSum, Pending, SumMemory, all_reduce

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sley_core.api.comm import Group
    from sley_core.api.parts import GradientBuffer


class Sums(Protocol):
    """One way of summing.

         start* ──> finish ──> start* ──> finish ...
            └─────> forget ────────┘             (a step that failed)

    All ranks of a group call `start` for the same buckets in the same order, so collectives may be issued in it.
    """

    def start(self, buffer: GradientBuffer, group: Group) -> None:
        """This rank's share of `buffer` is complete; nobody touches it until `finish`."""

    def finish(self) -> None:
        """On return every buffer that was started holds its sum."""

    def forget(self) -> None:
        """On return nothing writes into a buffer any more, and nothing of the step remains."""


class Plain(Sums):
    """The sum itself: an all-reduce in place, in the format of the gradients."""

    def __init__(self) -> None:
        self._pending: list[Pending] = []

    def start(self, buffer: GradientBuffer, group: Group) -> None:
        # The bucket's reduce group; its ranks start their buckets in one order.
        self._pending.append(all_reduce(buffer.data, group, what=described(buffer)))

    def finish(self) -> None:
        for pending in self._pending:
            pending.wait()
        self._pending.clear()

    def forget(self) -> None:
        self.finish()


class Host(Plain):
    """The sum itself, by ranks of one host that read each other's memory; by all-reduces in groups that cannot.

    Nobody but the ranks themselves moves these sums. So whenever one starts, those before it go on as far as they can without
    waiting, while the other ranks compute.
    """

    def __init__(self, memories: Mapping[str, SumMemory]) -> None:
        super().__init__()
        self._memories = memories
        self._sums: list[HostSum] = []

    def start(self, buffer: GradientBuffer, group: Group) -> None:
        if group.axis not in self._memories:
            super().start(buffer, group)
            return
        # The bucket's reduce group; its ranks start their buckets in one order.
        self._sums.append(HostSum(self._memories[group.axis], buffer.data, described(buffer), buffer.contents))
        for one in self._sums:
            one.advance()

    def finish(self) -> None:
        for step in (HostSum.sum, HostSum.wait, HostSum.end):
            for one in self._sums:
                step(one)
        self._sums.clear()
        super().finish()


def described(buffer: GradientBuffer) -> str:
    """What the error of a failed collective calls this bucket."""
    return f"the bucket of {buffer.entries[0].name}"
