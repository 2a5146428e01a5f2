"""`dp.bucketed`: sums gradients in flat buckets during the backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from sley_core.api.comm import SentBytes
from sley_core.api.parts import TreeSums
from sley_dp.reducer import BucketReducer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from sley_core.api.comm import Group, SentBytes, Work
    from sley_core.api.parts import GradientBuffer, Parts
    from sley_dp.config import BucketedConfig
    from sley_dp.narrow import Narrow


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
    return f"the bucket of {buffer.params[0].name}"


class Bucketed(BucketReducer):
    """Sums gradients in buckets, exactly as `core.each` does, or with `reduction = "bf16"` within 2^-7 of that."""

    def __init__(self, config: BucketedConfig) -> None:
        sent = SentBytes()
        self._narrow: Narrow | None = None
        if config.reduction == "bf16":
            from sley_dp.narrow import Narrow  # most plans do without

            self._narrow = Narrow(sent)
        super().__init__(config, self._narrow or Exact(sent), sent)

    def attach(self, parts: Parts) -> None:
        """Lays the store out as `BucketReducer.attach` does; with canonical sums in the run, uses those."""
        if parts.store.canonical is not None:
            self.sums = TreeSums(parts.store, self._sent)
        super().attach(parts)

    def messages(self) -> Iterator[tuple[str, Tensor]]:
        """Yields name and tensor of what `trim` would free."""
        return self._narrow.messages() if self._narrow is not None else iter(())
