"""The ways to sum a bucket over its group. Each starts within a backward and is complete when `finish` returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from sley_core.api.comm import Group, SentBytes, Work
    from sley_core.api.parts import GradientBuffer


class Sums(Protocol):
    """Sums buckets in one particular way.

         start* ──> finish ──> start* ──> finish ...
            └─────> forget ────────┘             (a step that failed)

    All ranks of a group call `start` for the same buckets in the same order, so it may issue collectives. Each counts in
    `sent`, made by the reducer, what this rank sends.
    """

    def start(self, buffer: GradientBuffer, group: Group) -> None:
        """Starts to sum `buffer`, this rank's complete share, over `group`; it must not be used until `finish`."""

    def finish(self) -> None:
        """Blocks until every started buffer holds its sum."""

    def forget(self) -> None:
        """Blocks until nothing writes into a buffer any more, and drops the state of a failed step."""

    def trim(self) -> int:
        """Frees, between two steps, what the next sums can allocate again; returns the number of bytes."""
        return 0


class Exact(Sums):
    """All-reduces in place, in the gradients' dtype, by the transport of the group.

    Some transports progress only when called. So each start also advances the earlier sums as far as possible without
    waiting, while the peers compute.
    """

    def __init__(self, sent: SentBytes) -> None:
        self.sent = sent
        self._works: list[Work] = []
        self._moving: list[Work] = []

    def start(self, buffer: GradientBuffer, group: Group) -> None:
        """Starts the all-reduce of `buffer`, in place, and advances the earlier ones without waiting."""
        # Over the bucket's reduce group, whose ranks start their buckets in one order.
        work = group.transport().all_reduce(buffer.data, what=described(buffer), contents=buffer.contents)
        self.sent.add(buffer.data, group, passes=2)
        self._works.append(work)
        self._moving = [one for one in (*self._moving, work) if not one.test()]

    def finish(self) -> None:
        """Blocks until all sums are complete and the peers have read this rank's data."""
        for work in self._works:
            work.wait()
        # After all sums: a peer that is slow to read one must not delay the others.
        for work in self._works:
            work.wait_sent()
        self._works.clear()
        self._moving.clear()

    def forget(self) -> None:
        """Blocks until all sums are complete."""
        self.finish()


def described(buffer: GradientBuffer) -> str:
    """Returns the name of a bucket for the error of a failed collective."""
    return f"the bucket of {buffer.entries[0].name}"
