"""Times the actions of a step and draws it; records torch's profile of some steps.

    before_step ──> the step ──> write
     all ranks meet,              gathers all ranks' spans to rank 0, which simulates the same lists with measured costs,
     clocks start                 and writes `timeline.json` into the run's folder

On CUDA a clock records events on the stream and reads them when the step is over. The prediction uses for each action the
median of its kind at its place in the measured step, and links that take no time. Ranks of one machine read one clock; on other
machines clocks start when the rank leaves a gathering over `control`, a fraction of a millisecond apart on an idle network.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

from sley_core.actions.action import Action, Kind
from sley_core.actions.draw import chrome_trace
from sley_core.actions.simulate import Costs, TimedAction, Timeline, simulate
from sley_core.comm.collectives import gather_objects
from sley_core.comm.device import Device, Moment
from sley_core.whole_files import write_whole

if TYPE_CHECKING:
    from sley_core.comm.groups import Groups
    from sley_core.engine.stepper import Stepper
    from sley_core.topology import Topology


class ActionClock:
    """Times of the actions of one step: call `begin`, then `start` and `stop(action)` around each."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._noted: list[tuple[Action, Moment, Moment]] = []
        self.begin()

    def begin(self) -> None:
        """Sets time zero; the device must be idle."""
        self.zero_s = time.perf_counter()
        self._zero = self._started = self._device.moment()

    def start(self) -> None:
        self._started = self._device.moment()

    def stop(self, action: Action) -> None:
        """Records that `action` is over; on CUDA it does not wait."""
        self._noted.append((action, self._started, self._device.moment()))

    def spans(self, stage: int) -> list[TimedAction]:
        """Returns the recorded actions in order, in seconds since `begin`; waits until the device has finished them."""
        seconds = self._device.seconds_between
        return [
            TimedAction(stage, action, seconds(self._zero, start), seconds(self._zero, stop))
            for action, start, stop in self._noted
        ]


TRACE = "timeline.json"

NUM_DRAWN = 4
"""Replicas of the model in `StepTimeline.drawn`; the trace has all."""


@dataclass(eq=False)
class StepTimeline:
    """Records step `number` (counted from 1) in `folder`. Every rank makes one and calls it alike.

    drawn: the measured step of some replicas and its prediction, by title, for a picture; on rank 0 once it is recorded.
    """

    number: int
    folder: Path
    stepper: Stepper
    topology: Topology
    groups: Groups
    _clock: ActionClock | None = field(default=None, init=False)
    _num_micros: int = field(default=0, init=False)
    drawn: dict[str, Timeline] = field(default_factory=dict, init=False)

    def go_on(self, num_done: int, num_steps: int) -> None:
        """Chooses the second step from here if the run resumes after the step to draw. All ranks call it alike."""
        if num_done >= self.number:
            self.number = min(num_done + 2, num_steps)

    def before_step(self, number: int, num_micros: int) -> ActionClock | None:
        """Waits for all ranks and returns a running clock if step `number` is to be drawn; else returns None at once."""
        if number != self.number:
            return None
        device = self.stepper.device
        clock = ActionClock(device)
        device.wait_until(device.moment())
        # Over `control`, i.e. all ranks, which all take the same steps.
        gather_objects(None, self.groups["control"], what="the start of the step that is drawn")
        clock.begin()
        self._clock = clock
        self._num_micros = num_micros
        return clock

    def write(self, number: int) -> None:
        """Gathers all ranks' spans of step `number`, if it is to be drawn; rank 0 writes the file. All ranks call it."""
        if number != self.number or self._clock is None:
            return
        clock, self._clock = self._clock, None
        spans = [
            (span.stage, span.action.kind.name, span.action.chunk, span.action.micro, span.start_s, span.end_s)
            for span in clock.spans(self.stepper.lists.stage)
        ]
        # As above: all ranks write the same step, in the same order.
        noted = platform.node(), clock.zero_s, spans
        everyone = gather_objects(noted, self.groups["control"], what="the spans of the step that is drawn")
        if self.groups["control"].coord == 0:
            measured = self._replicas(_on_one_clock(everyone))
            lists = self.stepper.lists
            costs = Costs.measured(measured.values(), lists.placement)
            simulated = simulate(lists.of_all_stages(self._num_micros), lists.placement, costs).timeline
            predicted = {"predicted: the median of each action, links take no time": simulated}
            self.drawn = {**dict(list(measured.items())[:NUM_DRAWN]), **predicted}
            write_whole(self.folder / TRACE, chrome_trace({**measured, **predicted}))

    def _replicas(self, everyone: list[list[TimedAction]]) -> dict[str, Timeline]:
        """Returns one timeline per copy of the model, with one rank of each stage, by title. everyone: spans by rank."""
        size = self.topology.ranks_per_stage
        replicas = {}
        for place in range(size):
            ranks = range(place, self.topology.world, size)
            title = f"measured, step {self.number}"
            if size > 1:
                title += f", ranks {' '.join(map(str, ranks))}"
            replicas[title] = Timeline.of(self.topology.pp, (span for rank in ranks for span in everyone[rank]))
        return replicas


def _on_one_clock(everyone: Sequence[tuple[str, float, Sequence[Sequence[Any]]]]) -> list[list[TimedAction]]:
    """Returns every rank's spans in seconds since the first rank's clock began, for ranks on its machine; others keep their own
    zero. everyone: of every rank its machine, the begin of its clock, and its spans as (stage, kind, chunk, micro, start, end).
    """
    machine, zero_s, _ = everyone[0]
    late_s = [began_s - zero_s if name == machine else 0.0 for name, began_s, _ in everyone]
    return [
        [
            TimedAction(stage, Action(Kind[kind], chunk, micro), start_s + late, end_s + late)
            for stage, kind, chunk, micro, start_s, end_s in spans
        ]
        for late, (_, _, spans) in zip(late_s, everyone, strict=True)
    ]


class StepProfiler:
    """Records steps `first` to `last` (counted from 1, both included) into `folder/trace-rank{rank}.json`."""

    def __init__(self, first: int, last: int, folder: Path, rank: int, device: Device) -> None:
        self.first = first
        self.last = last
        self.path = folder / f"trace-rank{rank}.json"
        self._cuda = device.type == "cuda"
        self._profile: torch.profiler.profile | None = None

    def before_step(self, number: int) -> None:
        """Starts the recording if `number` is the first step to record."""
        if number == self.first:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
            # There is only one cycle; without `acc_events` torch 2.11 warns that events of former cycles are dropped.
            self._profile = profile(activities=activities, acc_events=True)
            self._profile.start()

    def after_step(self, number: int) -> None:
        if number == self.last:
            self.close()

    def close(self) -> None:
        """Stops the recording and writes the file; a run that ends within the range writes its part."""
        if self._profile is not None:
            recorded, self._profile = self._profile, None
            recorded.stop()
            recorded.export_chrome_trace(str(self.path))
