"""Sums buckets of which every rank keeps one part.

    reduce-scatter over the ranks that share a copy ──> all-reduce of the part over the ranks that hold the same one

The second is only needed if a copy is shared by fewer ranks than reduce together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sley_dp.bucketed import Sums, described
from sley_dp.config import SUMS, copies_axis

if TYPE_CHECKING:
    from sley_core.api.comm import Group, Groups, Transport, Work
    from sley_core.api.parts import GradientBuffer

NUM_SLOTS = 2
"""Sums in flight at a time if data from peers needs scratch memory; this bounds that memory."""


class ShardSums(Sums):
    """Sums cut buffers over their ranks, each into this rank's part of it.

         start* ──> finish ──> start* ──> finish ...
            └─────> forget ────────┘             (a step that failed)

    All ranks of a group call `start` for the same buffers in the same order. Each start also advances the earlier sums, as
    far as that takes no waiting, in their order. is_async: whether the device runs ahead of the host; then second halves start
    in `finish`, at one place on all ranks.
    """

    def __init__(self, groups: Groups, *, is_async: bool) -> None:
        self._groups = groups
        self._is_async = is_async
        self._sums: list[_Sum] = []
        self._slots: list[tuple[Tensor, _Sum]] = []

    def start(self, buffer: GradientBuffer, group: Group) -> None:
        """Starts to sum `buffer`, whose gradients are complete; from now on only this rank's part of it will be defined.

        group: the ranks that share a copy.
        """
        transport = group.transport(SUMS)
        copies = self._groups.get(copies_axis(buffer.reduce_group))
        scratch = self._scratch(buffer, transport.num_scratch_rows(buffer.own.numel()))
        # Over the ranks that share a copy, on a separate lane; they start their buckets in one order.
        work = transport.reduce_scatter([buffer.data], [scratch], what=described(buffer), contents=buffer.contents)
        self._sums.append(_Sum(buffer, work, copies.transport if copies else None))
        if scratch.numel():
            self._slots.append((scratch, self._sums[-1]))
        if not self._is_async:
            self._advance()

    def finish(self) -> None:
        """Blocks until this rank's part of every started buffer holds the sum, and its padding zeros."""
        for one in self._sums:
            one.halve()
        for one in self._sums:
            one.wait()
        # After all sums: a peer that is slow to read one must not delay the others.
        for one in self._sums:
            one.wait_sent()
        self._sums.clear()
        self._slots.clear()

    def forget(self) -> None:
        """Waits until nothing writes into a buffer any more: the sums of a step that failed are finished, and not used."""
        self.finish()

    def _advance(self) -> None:
        """Advances the sums without waiting, the oldest first, up to one whose second half may not start yet, so that these
        start in one order on all ranks.
        """
        for one in self._sums:
            if not one.advance():
                return

    def _scratch(self, like: GradientBuffer, numel: int) -> Tensor:
        """Returns `numel` elements of memory for what comes from peers, of the dtype of `like`. If NUM_SLOTS sums in flight
        have some, waits for the oldest of these and takes over its memory if that is large enough.
        """
        if numel and len(self._slots) == NUM_SLOTS:
            scratch, oldest = self._slots.pop(0)
            for one in self._sums[: self._sums.index(oldest) + 1]:
                one.halve()
            oldest.first.wait_sent()
            if scratch.numel() >= numel:
                return scratch[:numel]
        return torch.empty(numel, dtype=like.data.dtype, device=like.data.device)


class _Sum:
    """Holds the sum of one bucket in flight. copies: the transport of the ranks that hold the same part, if there are
    others.
    """

    def __init__(self, buffer: GradientBuffer, first: Work, copies: Callable[[], Transport] | None) -> None:
        self.buffer = buffer
        self.first = first
        self._copies = copies
        self._second: Work | None = None
        self._is_halved = False

    def advance(self) -> bool:
        """Advances as far as possible without waiting; returns whether the second half has begun, so that the next sum's
        may.
        """
        if not self._is_halved and self.first.test():
            self.halve()
        if self._second is not None:
            self._second.test()
        return self._is_halved

    def halve(self) -> None:
        """Waits for the reduce-scatter and starts the all-reduce of this rank's part, if one is needed."""
        if self._is_halved:
            return
        self._is_halved = True
        self.first.wait()
        if self._copies is not None:
            buffer = self.buffer
            # Over the ranks that hold the same part; they get here in the order in which the buckets were started.
            self._second = self._copies().all_reduce(buffer.own, what=described(buffer), contents=buffer.contents)

    def wait(self) -> None:
        """Blocks until this rank's part holds the sum."""
        if self._second is not None:
            self._second.wait()
        self.buffer.zero_padding()

    def wait_sent(self) -> None:
        """Blocks until peers have read what this rank gave."""
        self.first.wait_sent()
        if self._second is not None:
            self._second.wait_sent()
