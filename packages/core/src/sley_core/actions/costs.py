"""What actions and hand-overs take, in seconds and in bytes: what a simulation is told about the machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from sley_core.actions.action import Kind
from sley_core.actions.placement import Placement
from sley_core.actions.timeline import Timeline


@dataclass(frozen=True)
class Costs:
    """Entry i of every tuple belongs to position i of the model (see `Placement`).

    seconds: of each kind of action. link_s: of what passes between position i and i + 1, in either direction.
    graph_bytes: what a forward leaves for the backward of its micro-batch. queued_bytes: what of it, and of the gradients,
    an input-gradient action leaves for the weight-gradient action. boundary_bytes: what passes between i and i + 1.
    """

    seconds: Mapping[Kind, tuple[float, ...]]
    link_s: tuple[float, ...]
    graph_bytes: tuple[int, ...]
    queued_bytes: tuple[int, ...]
    boundary_bytes: tuple[int, ...]

    @classmethod
    def even(
        cls,
        positions: int,
        *,
        forward: float = 1.0,
        input_gradient: float = 1.0,
        weight_gradient: float = 1.0,
        link: float = 0.0,
    ) -> Costs:
        """The same at every position; a whole backward takes what its two halves take, and nothing has bytes."""
        seconds = {
            Kind.FORWARD: forward,
            Kind.BACKWARD: input_gradient + weight_gradient,
            Kind.INPUT_GRADIENT: input_gradient,
            Kind.WEIGHT_GRADIENT: weight_gradient,
        }
        none = (0,) * positions
        each = {kind: (cost,) * positions for kind, cost in seconds.items()}
        return cls(each, (link,) * (positions - 1), none, none, none[1:])

    @classmethod
    def measured(cls, timelines: Iterable[Timeline], placement: Placement) -> Costs:
        """The median time of each kind of action at each position, over `timelines` of one schedule; links are free.

        A kind that never ran has no costs; one that ran elsewhere only takes no time.
        """
        found: dict[Kind, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for timeline in timelines:
            for span in timeline.spans:
                position = placement.position(span.stage, span.action.chunk)
                found[span.action.kind][position].append(span.end_s - span.start_s)
        positions = range(placement.num_positions)
        seconds = {
            kind: tuple(median(at[position]) if position in at else 0.0 for position in positions)
            for kind, at in found.items()
        }
        none = (0,) * placement.num_positions
        return cls(seconds, (0.0,) * (placement.num_positions - 1), none, none, none[1:])
