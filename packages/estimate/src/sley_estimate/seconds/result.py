"""Reads a simulated step: how long it takes, and what it waits for.

    host     | F0.0 | F0.1 | B0.0 | B0.1 | update | F0.0 of the next step ...
    device      |  F0.0  |  F0.1  |   B0.0   |   B0.1   | update |

A host that runs ahead starts a step when it has started the one before, and reads the totals of that after it. So it may be a
whole step ahead, and what it takes longer for one layer than the device is caught up in others: a step takes the longer of what
its devices take for it and what a host takes to start it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sley_core.actions.action import Action
from sley_core.actions.simulate import TimedAction, Timeline
from sley_estimate.seconds.lanes import Exposed, Lanes, LaneSpan
from sley_estimate.seconds.program import Compute, Program


@dataclass(frozen=True)
class StepSeconds:
    """A simulated step. timeline: the actions of all stages. exchanges: what ran beside them. exposed: where a stage waited for
    an exchange, or did its own part of one that does not overlap. computing_s: seconds that each stage computes, and of these
    updating_s in no action: norm and update. devices_s: until all of them are done, the update included. host_s: that the host
    of each stage takes to start all of its work; 0 where it does not run ahead.
    """

    timeline: Timeline
    exchanges: tuple[LaneSpan, ...]
    exposed: tuple[Exposed, ...]
    computing_s: tuple[float, ...]
    updating_s: tuple[float, ...]
    devices_s: float
    host_s: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Returns the seconds of the step, its update included: of the devices, or of the slowest host if that takes longer."""
        return max((self.devices_s, *self.host_s))

    def idle(self, stage: int) -> float:
        """Returns the share of the step in which a stage computes nothing, update and all, from 0 to 1."""
        return self.timeline.idle(stage)

    def exposed_s(self, stage: int) -> dict[str, float]:
        """Returns the seconds for which a stage waits for exchanges, or does its own part of them, by the first word of the
        exchange's lane: `up`, `down`, `reduce`, `gather`, `all` for what all ranks sum at the end, ...
        """
        found: dict[str, float] = defaultdict(float)
        for span in self.exposed:
            if span.rank == stage:
                found[span.lane.split(" ")[0]] += span.end_s - span.start_s
        return dict(found)


def simulate_programs(programs: Sequence[Program]) -> StepSeconds:
    """Returns the step that the programs of all representatives make, one per stage. Pure.

    Raises PlanError "schedule-deadlock" for programs that come to a stop.
    """
    lanes = Lanes(programs)
    lanes.run()
    computing, updating = [0.0] * len(programs), [0.0] * len(programs)
    spans: dict[tuple[int, Action], TimedAction] = {}
    for span in lanes.computed:
        computing[span.rank] += span.end_s - span.start_s
        word = programs[span.rank][span.at]
        assert isinstance(word, Compute), word
        if word.action is None:
            updating[span.rank] += span.end_s - span.start_s
        else:
            before = spans.get((span.rank, word.action))
            start_s = before.start_s if before else span.start_s
            spans[span.rank, word.action] = TimedAction(span.rank, word.action, start_s, span.end_s)
    devices_s = max(lanes.ends_s, default=0.0)
    host_s = tuple(sum(word.host_s for word in program if isinstance(word, Compute)) for program in programs)
    timeline = replace(
        Timeline.of(len(programs), spans.values()), end_s=max((devices_s, *host_s)), computing_s=tuple(computing)
    )
    return StepSeconds(
        timeline, tuple(lanes.exchanged), tuple(lanes.exposed), tuple(computing), tuple(updating), devices_s, host_s
    )
