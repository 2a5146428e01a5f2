"""When each stage ran which action, simulated or measured, and costs of actions and transfers in seconds and bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from sley_core.actions.action import Action, Kind, Placement


class TimedAction(NamedTuple):
    """`action` of `stage` ran from `start_s` to `end_s`, in seconds after the step began."""

    stage: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """The spans of one step on `stages` stages, by stage and then by start. The spans of a stage do not overlap.

    end_s: when the step is over, if sums and an update follow the last action. computing_s: seconds for which each stage
    computes, if not all of its spans and nothing else.
    """

    stages: int
    spans: tuple[TimedAction, ...]
    end_s: float = 0.0
    computing_s: tuple[float, ...] = ()

    @classmethod
    def of(cls, stages: int, spans: Iterable[TimedAction]) -> Timeline:
        """Returns a timeline of spans given in any order."""
        return cls(stages, tuple(sorted(spans, key=lambda span: (span.stage, span.start_s, span.end_s))))

    def of_stage(self, stage: int) -> tuple[TimedAction, ...]:
        """Returns the spans of one stage, by start."""
        return tuple(span for span in self.spans if span.stage == stage)

    @property
    def makespan_s(self) -> float:
        """Seconds from the start of the step to its end, or to that of its last action, on whichever stage."""
        return max((self.end_s, *(span.end_s for span in self.spans)))

    def idle(self, stage: int) -> float:
        """Returns the bubble of a stage: the share of the step in which it computes nothing, from 0 to 1."""
        makespan = self.makespan_s
        spent = (span.end_s - span.start_s for span in self.of_stage(stage))
        busy = self.computing_s[stage] if self.computing_s else sum(spent)
        return 1.0 - busy / makespan if makespan > 0 else 0.0


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
            kind: tuple(median(at[position]) if position in at else 0.0 for position in positions) for kind, at in found.items()
        }
        none = (0,) * placement.num_positions
        return cls(seconds, (0.0,) * (placement.num_positions - 1), none, none, none[1:])
