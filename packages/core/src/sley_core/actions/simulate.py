"""Runs the lists of all stages in simulated time, until every list is done or no stage can go on.

A stage runs one action at a time, in the order of its list. An action waits for its inputs; a send or a post does not wait. A
sent value is transferred once its receive is posted, while both stages compute; transfers between the same sender and receiver
follow one another. The result does not depend on the order in which stages are visited.

The peak memory of a stage follows from its list, since a stage runs one entry at a time. A microbatch occupies memory in one
chunk during these times:

    F ───────── graph ─────────> B                    outputs and saved tensors, from the end of F to the end of B
    F ── graph ──> I ── queue ──> W                   a split backward: the graph until the end of I, the queued inputs and
                                                      output gradients for the weight gradients until the end of W
    post ── buffer ──> F, B or I                      the received value, from its post to the end of the action that uses it

From the end of F on, the received value belongs to the graph. Outputs that are being sent are not counted, since they are freed
after the transfer.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sley_core.actions.action import Action, Delivery, Kind, Placement, Step, Transfer, select_actions
from sley_core.errors import PlanError


class ScheduleSimulator:
    """Simulates one step, in which each stage runs its list in `lists`. is_lowered: whether the lists have sends and posts. If
    not, a value arrives when the action that computes it ends. spans: the actions that have run. sent_s: the time at which each
    value was sent. posted_s: the time at which its receive was posted. Times are in seconds since the start of the step.
    """

    def __init__(self, lists: Sequence[Sequence[Step]], placement: Placement, costs: "Costs", *, is_lowered: bool) -> None:
        self.lists = lists
        self.placement = placement
        self.costs = costs
        self.is_lowered = is_lowered
        self.spans: list[TimedAction] = []
        self.sent_s: dict[Delivery, float] = {}
        self._arrived_s: dict[Delivery, float] = {}
        self.posted_s: dict[Delivery, float] = {}
        self._free_s: dict[tuple[int, int], float] = {}
        self._now_s = [0.0] * len(lists)
        self._positions = [placement.positions(stage) for stage in range(placement.stages)]
        self._next_index = [0] * len(lists)
        self._waiting: dict[Delivery, int] = {}
        self._ready = deque(range(len(lists)))

    def run(self) -> None:
        """Runs all lists to their ends. Raises PlanError "schedule-deadlock", which names the action that blocks each stage."""
        while self._ready:
            self._advance(self._ready.popleft())
        if self._waiting:
            stuck = sorted((stage, delivery) for delivery, stage in self._waiting.items())
            places = "; ".join(self._describe_blocked_stage(stage, delivery) for stage, delivery in stuck)
            raise PlanError("schedule-deadlock", f"the schedule deadlocks: {places}", path=("pipeline", "use"))

    def _advance(self, stage: int) -> None:
        """Runs one stage's list until an action must wait for a value that has not arrived."""
        steps = self.lists[stage]
        for index in range(self._next_index[stage], len(steps)):
            step = steps[index]
            if isinstance(step, Transfer):
                self._record_transfer(stage, step)
            elif step.kind is not Kind.CHUNK_DONE and not self._run_action(stage, step):
                self._next_index[stage] = index
                return
        self._next_index[stage] = len(steps)

    def _run_action(self, stage: int, action: Action) -> bool:
        """Runs `action` if its input has arrived, and otherwise records that the stage waits for it. Returns whether it ran."""
        position = self._positions[stage][action.chunk]
        start_s = self._now_s[stage]
        delivery = self.placement.input_of(action, position)
        if delivery is not None:
            if delivery not in self._arrived_s:
                self._waiting[delivery] = stage
                return False
            start_s = max(start_s, self._arrived_s[delivery])
        end_s = self._now_s[stage] = start_s + self.costs.seconds[action.kind][position]
        self.spans.append(TimedAction(stage, action, start_s, end_s))
        output = self.placement.output_of(action, position)
        is_sent = output is not None and self.placement.holder(output.position).stage != stage
        if output is not None and is_sent and not self.is_lowered:
            self.sent_s[output] = end_s
        if output is not None and not (is_sent and self.is_lowered):
            self._record_arrival(output, end_s)
        return True

    def _record_transfer(self, stage: int, step: Transfer) -> None:
        """Records a send or post at the present time of `stage`, and the arrival of the value once both are recorded."""
        if step.op == "post":
            delivery = Delivery(step.flow, self._positions[stage][step.chunk], step.micro)
            channel = step.peer, stage
            self.posted_s[delivery] = self._now_s[stage]
        else:
            delivery = Delivery(step.flow, self._positions[step.peer][step.peer_chunk], step.micro)
            channel = stage, step.peer
            self.sent_s[delivery] = self._now_s[stage]
        sent_s, posted_s = self.sent_s.get(delivery), self.posted_s.get(delivery)
        if sent_s is not None and posted_s is not None:
            start_s = max(sent_s, posted_s, self._free_s.get(channel, 0.0))
            end_s = self._free_s[channel] = start_s + self.costs.link_s[min(delivery.position, delivery.source_position)]
            self._record_arrival(delivery, end_s)

    def _describe_blocked_stage(self, stage: int, delivery: Delivery) -> str:
        """Returns a clause that names the action at which `stage` is blocked, and the action for which it waits."""
        index = self._next_index[stage]
        number = len(select_actions(self.lists[stage][:index])) + 1
        source = self.placement.holder(delivery.source_position)
        needed = Action(Kind.FORWARD if delivery.flow == "forward" else Kind.BACKWARD, source.chunk, delivery.micro)
        location = f"stage {stage} at {self.lists[stage][index]} (number {number} in its list)"
        return f"{location} waits for {needed} of stage {source.stage}"

    def _record_arrival(self, delivery: Delivery, time_s: float) -> None:
        self._arrived_s[delivery] = time_s
        if delivery in self._waiting:
            self._ready.append(self._waiting.pop(delivery))


class Peaks(NamedTuple):
    """The peak counts and memory of one stage. The peaks may occur at different times. pairs: the number of (chunk, microbatch)
    pairs with a graph (which a forward saves for its backward) or a queue (which an input-gradient action saves for the weight
    gradients). 1F1B on P stages with M microbatches reaches min(P - s, M) pairs on stage s. graphs: the number of pairs with a
    graph. receives: the number of receive buffers. num_bytes: the memory in bytes of all graphs, queues and buffers.
    """

    pairs: int
    graphs: int
    receives: int
    num_bytes: int


_COUNT_CHANGES = {Kind.FORWARD: (1, 0), Kind.BACKWARD: (-1, 0), Kind.INPUT_GRADIENT: (-1, 1), Kind.WEIGHT_GRADIENT: (0, -1)}
"""The changes that each type of action makes to the number of graphs and to the number of queues."""


def compute_peaks(steps: Sequence[Step], stage: int, placement: Placement, costs: "Costs") -> Peaks:
    """Returns the peaks of `stage` when it runs its lowered list `steps`. A forward-only list has no graphs."""
    keeps_graphs = any(step.kind.makes_gradients for step in steps if isinstance(step, Action))
    graphs = queues = receives = num_bytes = 0
    peak = Peaks(0, 0, 0, 0)
    for step in steps:
        position = placement.position(stage, step.chunk)
        change, is_forward = 0, False
        if isinstance(step, Transfer):
            change, is_forward = int(step.op == "post"), step.flow == "forward"
        else:
            delivery = placement.input_of(step, position)
            if delivery is not None and placement.holder(delivery.source_position).stage != stage:
                change, is_forward = -1, delivery.flow == "forward"
            graph, queue = _COUNT_CHANGES.get(step.kind, (0, 0)) if keeps_graphs else (0, 0)
            graphs += graph
            queues += queue
            num_bytes += graph * costs.graph_bytes[position] + queue * costs.queued_bytes[position]
        if change:  # a buffer of a value from the position before or after
            receives += change
            num_bytes += change * costs.boundary_bytes[position - 1 if is_forward else position]
        peak = Peaks(*map(max, peak, (graphs + queues, graphs, receives, num_bytes)))
    assert graphs >= 0 <= queues, f"stage {stage} ends with {graphs} graphs and {queues} queues"
    return peak


@dataclass(frozen=True)
class SimulatedStep:
    """The prediction of `simulate`: the timeline of all actions, and the memory peaks of each stage."""

    timeline: "Timeline"
    peaks: tuple[Peaks, ...]


def simulate(lists: Sequence[Sequence[Step]], placement: Placement, costs: "Costs") -> SimulatedStep:
    """Returns the predicted timeline and memory peaks of a step in which each stage runs its lowered list. A transfer takes the
    time in `costs.link_s`, and overlaps with actions. Raises PlanError "schedule-deadlock" if stages wait for each other.
    """
    simulator = ScheduleSimulator(lists, placement, costs, is_lowered=True)
    simulator.run()
    timeline = Timeline.from_spans(placement.stages, simulator.spans)
    return SimulatedStep(timeline, tuple(compute_peaks(steps, stage, placement, costs) for stage, steps in enumerate(lists)))


class TimedAction(NamedTuple):
    """An action of a stage with its start and end, in seconds after the start of the step."""

    stage: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """The timed actions of one step, sorted by stage and then by start. The spans of a stage do not overlap. stages: the number
    of stages. end_s: the end of the step, in seconds, if sums and an update follow the last action, else 0. computing_s: how
    long each stage computes, in seconds; if it is empty, a stage computes during all of its spans.
    """

    stages: int
    spans: tuple[TimedAction, ...]
    end_s: float = 0.0
    computing_s: tuple[float, ...] = ()

    @classmethod
    def from_spans(cls, stages: int, spans: Iterable[TimedAction]) -> "Timeline":
        """Returns a timeline of `spans`, which may have any order."""
        return cls(stages, tuple(sorted(spans, key=lambda span: (span.stage, span.start_s, span.end_s))))

    def stage_spans(self, stage: int) -> tuple[TimedAction, ...]:
        return tuple(span for span in self.spans if span.stage == stage)

    @property
    def makespan_s(self) -> float:
        """The time in seconds from the start of the step to `end_s` or the end of the last action, whichever is later."""
        return max((self.end_s, *(span.end_s for span in self.spans)))

    def idle_share(self, stage: int) -> float:
        """Returns the bubble of a stage: the share of the step in which it computes nothing, from 0 to 1."""
        spans_s = sum(span.end_s - span.start_s for span in self.stage_spans(stage))
        busy_s = self.computing_s[stage] if self.computing_s else spans_s
        return 1.0 - busy_s / self.makespan_s if self.makespan_s > 0 else 0.0


@dataclass(frozen=True)
class Costs:
    """Holds costs by position: entry i of every tuple belongs to position i of the model (see `Placement`).

    seconds: the time of each type of action, in seconds. link_s: the time of a transfer between positions i and i + 1, in
    either direction. graph_bytes: the memory that a forward saves for its backward. queued_bytes: the memory of the inputs and
    output gradients that an input-gradient action saves for the weight-gradient action. boundary_bytes: the size of the value
    that crosses between positions i and i + 1. `link_s` and `boundary_bytes` are one entry shorter than the others.
    """

    seconds: Mapping[Kind, tuple[float, ...]]
    link_s: tuple[float, ...]
    graph_bytes: tuple[int, ...]
    queued_bytes: tuple[int, ...]
    boundary_bytes: tuple[int, ...]

    @classmethod
    def uniform(
        cls,
        positions: int,
        *,
        forward: float = 1.0,
        input_gradient: float = 1.0,
        weight_gradient: float = 1.0,
        link: float = 0.0,
    ) -> "Costs":
        """Returns costs with 0 bytes and equal times, in seconds, at all positions. A full backward takes both halves."""
        seconds = {
            Kind.FORWARD: forward,
            Kind.BACKWARD: input_gradient + weight_gradient,
            Kind.INPUT_GRADIENT: input_gradient,
            Kind.WEIGHT_GRADIENT: weight_gradient,
        }
        none = (0,) * positions
        costs = {kind: (cost,) * positions for kind, cost in seconds.items()}
        return cls(costs, (link,) * (positions - 1), none, none, none[1:])
