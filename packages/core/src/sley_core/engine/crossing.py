"""How values get into a chunk and out of it: over the stage link, from hand to hand within a stage, or not at all.

    previous chunk ──give──> [ link | this rank's hands ] ──bring──> this chunk

Outputs travel in the flow `forward`, gradients on `backward`. What is brought over the link may lie in the link's memory, which
the link uses again when nobody has it any more.
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
"""Lane, chunk of this stage, micro-batch."""


class Crossing:
    """The boundaries of one stage's chunks. link: None where there is no other stage."""

    def __init__(self, placement: Placement, stage: int, link: StageLink | None) -> None:
        self.placement = placement
        self.stage = stage
        self.link = link
        self._neighbours = _neighbours(placement, stage)
        self._keys: Sequence[Hashable] = ()
        self._outgoing: dict[Spot, Payload] = {}
        self._handed: dict[Spot, Payload] = {}

    def begin(self, keys: Sequence[Hashable]) -> None:
        """A new walk through a list. keys: per micro-batch, what its boundaries' shapes depend on."""
        if self._outgoing or self._handed:
            self.abort("the step before did not end")
        self._keys = keys
        if self.link is not None:
            self.link.begin(keys, self._neighbours)

    def transfer(self, step: Transfer) -> None:
        """Posts or sends."""
        assert self.link is not None, f"{step} without a link"
        if step.op == "post":
            self.link.post(step, self._keys[step.micro])
        else:
            description, tensors = self._outgoing.pop((step.flow, step.chunk, step.micro))
            self.link.send(step, description, tensors, self._keys[step.micro])

    def bring(self, flow: Flow, chunk: int, micro: int) -> Payload:
        """What comes into `chunk`: the previous chunk's output, or the gradients of its own."""
        spot = (flow, chunk, micro)
        if spot in self._handed:
            return self._handed.pop(spot)
        assert self.link is not None, f"nothing for {spot}"
        return self.link.take(self._post(flow, chunk, micro))

    def give(self, flow: Flow, chunk: int, micro: int, payload: Payload) -> None:
        """What leaves `chunk`; if the neighbour is on another stage, the list's next word sends it."""
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
        self._outgoing.clear()
        self._handed.clear()
        if self.link is not None:
            self.link.abort(why)

    def _post(self, flow: Flow, chunk: int, micro: int) -> Transfer:
        peer = self._peer(flow, chunk)
        return Transfer("post", flow, chunk, micro, peer.stage, peer.chunk)

    def _peer(self, flow: Flow, chunk: int) -> StageChunk:
        """Where what comes in on `flow` comes from."""
        source = self.placement.previous if flow == "forward" else self.placement.next
        peer = source(self.stage, chunk)
        assert peer is not None, f"chunk {chunk} of stage {self.stage} is at the model's end"
        return peer


def _neighbours(placement: Placement, stage: int) -> tuple[int, ...]:
    """The other stages that `stage` exchanges anything with."""
    peers = [side(stage, chunk) for chunk in range(placement.chunks) for side in (placement.previous, placement.next)]
    return tuple(sorted({peer.stage for peer in peers if peer is not None} - {stage}))
