"""Moves values into a chunk and out of it: over the stage link, or directly between chunks of one stage.

    previous chunk ──give──> [ link | this rank's memory ] ──bring──> this chunk

Outputs travel in the flow `forward`, gradients in `backward`. Received tensors may lie in the link's memory, which the link
reuses once nothing refers to them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from sley_core.actions.action import Flow, Transfer
from sley_core.engine.boundary import Description

if TYPE_CHECKING:
    from sley_core.actions.placement import Placement, StageChunk
    from sley_core.protocols import StageLink

Payload = tuple[Description, list[Tensor]]
Spot = tuple[Flow, int, int]
"""Flow, chunk of this stage, micro-batch."""


class Crossing:
    """Moves values over the boundaries of one stage's chunks. link: None if there is only one stage."""

    def __init__(self, placement: Placement, stage: int, link: StageLink | None) -> None:
        self.placement = placement
        self.stage = stage
        self.link = link
        self._neighbours = _neighbours(placement, stage)
        self._keys: Sequence[Hashable] = ()
        self._outgoing: dict[Spot, Payload] = {}
        self._handed: dict[Spot, Payload] = {}

    def begin(self, keys: Sequence[Hashable]) -> None:
        """Starts a new list of actions; discards the values of one that failed.

        keys: per micro-batch, everything that determines the shapes at its boundaries.
        """
        if self._outgoing or self._handed:
            self.abort("the step before did not end")
        self._keys = keys
        if self.link is not None:
            self.link.begin(keys, self._neighbours)

    def transfer(self, step: Transfer) -> None:
        """Posts the receive, or starts the send, that the list's entry `step` names. Does not block."""
        assert self.link is not None, f"{step} without a link"
        if step.op == "post":
            self.link.post(step, self._keys[step.micro])
        else:
            description, tensors = self._outgoing.pop((step.flow, step.chunk, step.micro))
            self.link.send(step, description, tensors, self._keys[step.micro])

    def bring(self, flow: Flow, chunk: int, micro: int) -> Payload:
        """Returns what enters `chunk`: the previous chunk's output, or the gradients of its own output. Waits if it comes over
        the link.
        """
        spot = (flow, chunk, micro)
        if spot in self._handed:
            return self._handed.pop(spot)
        assert self.link is not None, f"nothing for {spot}"
        return self.link.take(self._post(flow, chunk, micro))

    def give(self, flow: Flow, chunk: int, micro: int, payload: Payload) -> None:
        """Keeps what leaves `chunk` for the neighbour. If that is on another stage, the list's next entry, a send, sends it."""
        peer = self._peer("backward" if flow == "forward" else "forward", chunk)
        if peer.stage == self.stage:
            self._handed[flow, peer.chunk, micro] = payload
        else:
            self._outgoing[flow, chunk, micro] = payload

    def end(self) -> None:
        """Waits until everything is sent."""
        assert not self._outgoing, f"made and never sent: {list(self._outgoing)}"
        if self.link is not None:
            self.link.drain()

    def abort(self, why: str) -> None:
        """Discards all values in flight after a failure, without waiting for peers. why: for the peers' error messages."""
        self._outgoing.clear()
        self._handed.clear()
        if self.link is not None:
            self.link.abort(why)

    def _post(self, flow: Flow, chunk: int, micro: int) -> Transfer:
        peer = self._peer(flow, chunk)
        return Transfer("post", flow, chunk, micro, peer.stage, peer.chunk)

    def _peer(self, flow: Flow, chunk: int) -> StageChunk:
        """Returns the chunk, and its stage, from which values of `flow` come into `chunk`."""
        source = self.placement.previous if flow == "forward" else self.placement.next
        peer = source(self.stage, chunk)
        assert peer is not None, f"chunk {chunk} of stage {self.stage} is at the model's end"
        return peer


def _neighbours(placement: Placement, stage: int) -> tuple[int, ...]:
    """Returns the other stages with which `stage` exchanges anything, ascending."""
    peers = [side(stage, chunk) for chunk in range(placement.chunks) for side in (placement.previous, placement.next)]
    return tuple(sorted({peer.stage for peer in peers if peer is not None} - {stage}))
