"""The most that a stage holds at once: counted from its list alone, since a stage does one thing at a time.

What a micro-batch leaves behind in one chunk, and until when:

    F ───────── graph ─────────> B                    outputs and saved tensors, from the end of F to the end of B
    F ── graph ──> D ── queue ──> W                   a split backward: the graph goes at the end of D, what D has queued
                                                      for the weight gradients (inputs, output gradients) at the end of W
    post ── buffer ──> F, B or D                      what is received, from its post to the end of the action that takes it

A pair (chunk, micro-batch) that has a graph or a queue is *held*. What is received belongs to the graph from the end of F on.
Outputs on their way to another stage are not counted: they are gone when the transfer is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sley_core.actions.action import GRADIENT_KINDS, Action, Kind, Placement, Step, Transfer
from sley_core.actions.costs import Costs
from sley_core.actions.machine import taken


@dataclass(frozen=True)
class Peaks:
    """Holds the peaks of one stage; each may be reached at another time.

    pairs: (chunk, micro-batch) pairs held; 1F1B reaches min(P - s, M) on stage s. graphs: those of them with a graph. receives:
    buffers of receives. num_bytes: graphs, queues and buffers together.
    """

    pairs: int
    graphs: int
    receives: int
    num_bytes: int


def peaks_of(steps: Sequence[Step], stage: int, placement: Placement, costs: Costs) -> Peaks:
    """Returns the peaks of `stage` when it runs `steps`, its lowered list. A forward-only list keeps no graphs."""
    keeps = any(step.kind in GRADIENT_KINDS for step in steps if isinstance(step, Action))
    graphs = queues = receives = num_bytes = 0
    peak = Peaks(0, 0, 0, 0)
    for step in steps:
        position = placement.position(stage, step.chunk)
        if isinstance(step, Transfer):
            if step.op == "post":
                receives += 1
                num_bytes += _boundary(step.flow == "forward", position, costs)
        else:
            if _from_elsewhere(step, stage, position, placement):
                receives -= 1
                num_bytes -= _boundary(step.kind is Kind.FORWARD, position, costs)
            graph, queue = _change(step.kind) if keeps else (0, 0)
            graphs += graph
            queues += queue
            num_bytes += graph * costs.graph_bytes[position] + queue * costs.queued_bytes[position]
        peak = Peaks(
            max(peak.pairs, graphs + queues),
            max(peak.graphs, graphs),
            max(peak.receives, receives),
            max(peak.num_bytes, num_bytes),
        )
    assert graphs >= 0 <= queues, f"stage {stage} ends with {graphs} graphs and {queues} queues"
    return peak


def _change(kind: Kind) -> tuple[int, int]:
    """Returns by how much an action of this kind changes the number of (graphs, queues)."""
    match kind:
        case Kind.FORWARD:
            return 1, 0
        case Kind.BACKWARD:
            return -1, 0
        case Kind.INPUT_GRADIENT:
            return -1, 1
        case Kind.WEIGHT_GRADIENT:
            return 0, -1
        case Kind.CHUNK_DONE:
            return 0, 0


def _from_elsewhere(action: Action, stage: int, position: int, placement: Placement) -> bool:
    """Returns whether `action` takes a value from another stage."""
    delivery = taken(action, position, placement)
    return delivery is not None and placement.holder(delivery.origin).stage != stage


def _boundary(forward: bool, position: int, costs: Costs) -> int:
    """Returns the bytes of a value from the neighbour: from the position before if `forward`, else from the one after."""
    return costs.boundary_bytes[position - 1 if forward else position]
