"""How a bucket is summed over its group. Each way is started inside a backward and is over when `finish` returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from sley_core.api.comm import Group, Work
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


class Exact(Sums):
    """The sum itself, in place, in the format of the gradients; by whatever transport the group has.

    Some transports move nothing by themselves. So whenever a sum starts, those before it go on as far as they can without
    waiting, while the other ranks compute.
    """

    def __init__(self) -> None:
        self._works: list[Work] = []
        self._moving: list[Work] = []

    def start(self, buffer: GradientBuffer, group: Group) -> None:
        # The bucket's reduce group; its ranks start their buckets in one order.
        work = group.transport().all_reduce(buffer.data, what=described(buffer), contents=buffer.contents)
        self._works.append(work)
        self._moving = [one for one in (*self._moving, work) if not one.test()]

    def finish(self) -> None:
        for work in self._works:
            work.wait()
        # All sums first: a peer that is slow to read one holds up none of the others.
        for work in self._works:
            work.wait_sent()
        self._works.clear()
        self._moving.clear()

    def forget(self) -> None:
        self.finish()


def described(buffer: GradientBuffer) -> str:
    """What the error of a failed collective calls this bucket."""
    return f"the bucket of {buffer.entries[0].name}"
