"""Predicts how long a step takes and what it holds, before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sley_core.actions.action import Placement, Step
from sley_core.actions.costs import Costs, Timeline
from sley_core.actions.machine import Machine
from sley_core.actions.peaks import Peaks, peaks_of


@dataclass(frozen=True)
class Simulation:
    """The predicted `timeline` of every action, and each stage's `peaks`."""

    timeline: Timeline
    peaks: tuple[Peaks, ...]


def simulate(lists: Sequence[Sequence[Step]], placement: Placement, costs: Costs) -> Simulation:
    """Runs lowered lists in simulated time. Pure: the same arguments give the same result.

    Actions take their time and wait for their inputs. A transfer starts when it is sent and its receive is posted, and
    takes the time of its link, beside the actions of both stages. From one stage to another, transfers come one after
    another.

    Raises PlanError "schedule-deadlock" for lists that come to a stop.
    """
    machine = Machine(lists, placement, costs, posted=True)
    machine.run()
    timeline = Timeline.of(placement.stages, machine.spans)
    return Simulation(timeline, tuple(peaks_of(steps, stage, placement, costs) for stage, steps in enumerate(lists)))
