"""Sends a stage's messages while the next action runs, and returns them to their pool when they have been sent."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from sley_pp.message import Message, layout_of, mismatch

if TYPE_CHECKING:
    from torch import Tensor

    from sley_core.api.boundary import Description
    from sley_core.api.comm import Pending
    from sley_pp.lending import Lending
    from sley_pp.lines import Lines

SENDS_UNDER_WAY = 8
"""Where messages go by gloo, the number that a stage may have in flight before it waits for the oldest."""


class Outbox:
    """Holds messages whose send is in flight, oldest first."""

    def __init__(self, lines: Lines, memory: Lending) -> None:
        self._lines = lines
        self._memory = memory
        self._sending: deque[tuple[list[Pending], Message]] = deque()

    def send(
        self,
        peer: int,
        what: str,
        head: tuple[int, int],
        expected: Description,
        came: Description,
        tensors: list[Tensor],
    ) -> None:
        """Leases, fills and sends to stage `peer` a message of layout `expected`; sends nothing if that has no tensors.

        what: describes it, for errors. head: the numbers of the walk and of the micro-batch. If `came`, the description of
        `tensors`, does not fit, sends the mismatch in the head, waits for that and raises RunError `boundary-mismatch`.
        """
        if not expected.leaves:
            if came != expected:  # there is no message in which to tell the receiver
                raise mismatch(f"{what}: expected {expected}, came {came}")
            return
        message = self._memory.lease(layout_of(expected.leaves))
        fault = "" if came.fits(expected) else f"{what}: expected {expected}, came {came}"
        message.write_head(*head, expected.flags if fault else came.flags, fault)
        if not fault:
            for place, tensor in zip(message.tensors, tensors, strict=True):
                place.copy_(tensor)
        message.seal()
        self._sending.append((self._lines.send(message.pieces, peer, f"what {what}"), message))
        if fault:
            for pending in self._sending[-1][0]:
                pending.wait()
            raise mismatch(fault)
        self._end_sends()

    def drain(self) -> None:
        """Blocks until all sends are complete."""
        while self._sending:
            self._end_send()

    def forget(self) -> None:
        """Drops all messages in flight, without waiting for them."""
        self._sending.clear()

    def _end_sends(self) -> None:
        """Returns messages whose send is complete to the pool; on gloo, waits for the oldest beyond SENDS_UNDER_WAY.

        Gloo reports the end of a send only to a wait. The wait delays only a stage that would be delayed anyway: the peer
        reaches its receive without anything that this stage issues later (`sley_core.actions.posts`), and much earlier, unless
        it is slower.
        """
        if self._lines.says_when_sent:
            while self._sending and self._sending[0][0][-1].is_done():
                self._end_send()
        while not self._lines.says_when_sent and len(self._sending) > SENDS_UNDER_WAY:
            self._end_send()

    def _end_send(self) -> None:
        """Waits for the oldest send, and returns its message to the pool. NCCL releases its tensors only in a wait, even if the
        send is done.
        """
        under_way, message = self._sending.popleft()
        for pending in under_way:
            pending.wait()
        self._memory.give_back(message)
