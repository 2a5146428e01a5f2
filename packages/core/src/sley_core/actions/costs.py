"""Costs of actions and transfers, in seconds and in bytes: the simulator's model of the machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from sley_core.actions.action import Kind, Placement

if TYPE_CHECKING:
    from sley_core.actions.timeline import Timeline


@dataclass(frozen=True)
class Costs:
    """Holds costs by position: entry i of every tuple belongs to position i of the model (see `Placement`).

    seconds: of each kind of action. link_s: of a transfer between position i and i + 1, in either direction. graph_bytes:
    memory that a forward keeps for the backward of its micro-batch. queued_bytes: memory, of saved inputs and output gradients,
    that an input-gradient action keeps for the weight-gradient action. boundary_bytes: size of the value that crosses between i
    and i + 1.
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
        """Returns equal costs for every position, without bytes; a full backward takes the sum of its two halves."""
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
        """Returns the median time of each kind of action at each position, over `timelines` of one schedule; links take
        no time.

        A kind that never ran has no entry; one that did not run at a position takes no time there.
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
