"""Simulates a step. Each stage has a program, which computes in order while exchanges run in parallel on channels.

    compute   F0 F1 F2 ......B0===B1===B2===|wait|update
    up          >> >> >>
    down               << <<
    reduce                          [=========]            hidden under B2, then exposed

Exchanges on one link share its bandwidth: each of n exchanges runs at 1/n of its speed, so the end of an exchange moves
whenever another exchange starts or ends on one of its links. Time advances from event to event. The order of the programs does
not affect the result.

The host may run up to one step ahead of its device, so time that it gains in wide layers makes up for time that it loses in
narrow ones. A step therefore takes as long as its devices or its slowest host, whichever is longer.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from sley_core.actions.action import Action
from sley_core.actions.simulate import TimedAction, Timeline
from sley_core.errors import PlanError


class Compute(NamedTuple):
    """An instruction to compute for `seconds`. action: None outside the action list. host_s: the time to launch it."""

    seconds: float
    action: Action | None = None
    host_s: float = 0.0


class Exchange(NamedTuple):
    """An exchange between the programs `members`, and the instruction to become ready for it and to continue without waiting.
    It starts when all members are ready and the earlier exchanges on its channel have ended. latency_s: the latency, which
    other exchanges do not affect. transfer_s: the time to transfer its bytes over otherwise idle links. member_work_s: the time
    that each waiting member works on it at the end. links: the links that it uses, and may share. after: the key of an exchange
    that must end before this one starts, or None.
    """

    key: Hashable
    channel: str
    members: tuple[int, ...]
    latency_s: float
    transfer_s: float
    member_work_s: float = 0.0
    links: tuple[Hashable, ...] = ()
    after: Hashable | None = None


class Await(NamedTuple):
    """An instruction to wait for the exchange `key`, which the rank has begun before."""

    key: Hashable


Instruction = Compute | Exchange | Await
Program = Sequence[Instruction]


class ExposedWait(NamedTuple):
    """A time span in which a rank waited for the exchange `key`, or worked on this exchange, instead of computing."""

    rank: int
    channel: str
    key: Hashable
    start_s: float
    end_s: float


@dataclass
class _RunningExchange:
    """An exchange that has not ended. ready_members: the members that have begun it. start_s: negative before the start.
    remaining_s: the time that the transfer would still need on idle links at `updated_s`. share: the share of the full speed at
    which it runs. version: the number of times that its end was computed.
    """

    exchange: Exchange
    ready_members: set[int] = field(default_factory=set)
    start_s: float = -1.0
    remaining_s: float = 0.0
    updated_s: float = 0.0
    share: float = 1.0
    version: int = 0


class ProgramSimulator:
    """Simulates `programs` once. `run` fills `computations` with (rank, instruction, start, end), `exposed_waits` with the
    waits, and `ends_s` with the end of each program. All times are in seconds.
    """

    def __init__(self, programs: Sequence[Program]) -> None:
        self.programs = programs
        self.computations: list[tuple[int, Compute, float, float]] = []
        self.exposed_waits: list[ExposedWait] = []
        self.ends_s = [0.0] * len(programs)
        self._next = [0] * len(programs)
        self._waits: dict[Hashable, list[tuple[int, float]]] = defaultdict(list)
        self._followers: dict[Hashable, list[Hashable]] = defaultdict(list)
        self._running: dict[Hashable, _RunningExchange] = {}
        self._completed: dict[Hashable, Exchange] = {}
        self._queues: dict[tuple[str, int], deque[Hashable]] = defaultdict(deque)
        # The dicts serve as ordered sets, since the order of a set differs between processes.
        self._active_on_link: dict[Hashable, dict[Hashable, None]] = defaultdict(dict)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = 0

    def run(self) -> None:
        """Runs all programs to their ends. Raises PlanError "schedule-deadlock" if a program would wait forever."""
        for rank in range(len(self.programs)):
            self._run_rank(rank, 0.0)
        while self._events:
            now_s, _, event = heapq.heappop(self._events)
            event(now_s)
        stuck = [rank for rank, program in enumerate(self.programs) if self._next[rank] < len(program)]
        if stuck:
            waits = [self.programs[rank][self._next[rank]] for rank in stuck]
            names = (wait.key if isinstance(wait, Await) else wait for wait in waits)
            reasons = "; ".join(f"program {rank} waits for {name}" for rank, name in zip(stuck, names, strict=True))
            raise PlanError("schedule-deadlock", f"the step cannot continue: {reasons}", path=("pipeline", "use"))

    def _run_rank(self, rank: int, now_s: float) -> None:
        """Runs the instructions of a rank until one takes time or must wait, or until its program ends."""
        program = self.programs[rank]
        while self._next[rank] < len(program):
            instruction = program[self._next[rank]]
            if isinstance(instruction, Compute):
                end_s = now_s + instruction.seconds
                self.computations.append((rank, instruction, now_s, end_s))
                self._next[rank] += 1
                if instruction.seconds:
                    self._schedule_event(end_s, partial(self._run_rank, rank))
                    return
                continue
            if isinstance(instruction, Exchange):
                self._begin_exchange(instruction, rank, now_s)
            elif (exchange := self._completed.get(instruction.key)) is None:
                self._waits[instruction.key].append((rank, now_s))
                return
            elif exchange.member_work_s:
                self._finish_wait(exchange, rank, now_s, now_s)
                return
            self._next[rank] += 1
        self.ends_s[rank] = now_s

    def _finish_wait(self, exchange: Exchange, rank: int, wait_start_s: float, now_s: float) -> None:
        """Ends a wait since `wait_start_s`, and starts the rank's work on the exchange, if any. Both count as exposed."""
        end_s = now_s + exchange.member_work_s
        if end_s > wait_start_s:
            self.exposed_waits.append(ExposedWait(rank, exchange.channel, exchange.key, wait_start_s, end_s))
        self._next[rank] += 1
        if exchange.member_work_s:
            self._schedule_event(end_s, partial(self._run_rank, rank))
        else:
            self._run_rank(rank, now_s)

    def _begin_exchange(self, exchange: Exchange, rank: int, now_s: float) -> None:
        """Marks `rank` as ready for `exchange`, and starts the exchange if it can start."""
        assert rank in exchange.members, f"program {rank} begins {exchange}"
        running = self._running.setdefault(exchange.key, _RunningExchange(exchange))
        # A stage does not know which numbers other stages add to the totals of a step, so the sizes differ by a few bytes.
        expected = running.exchange._replace(transfer_s=exchange.transfer_s, member_work_s=exchange.member_work_s)
        assert expected == exchange, f"{exchange} at {rank}, {running.exchange} at other members"
        running.ready_members.add(rank)
        self._queues[exchange.channel, rank].append(exchange.key)
        self._start_if_ready(exchange.key, now_s)

    def _start_if_ready(self, key: Hashable, now_s: float) -> None:
        """Starts an exchange if all members have begun it, it is the first on its channel, and `after` has ended."""
        running = self._running[key]
        exchange = running.exchange
        if len(running.ready_members) < len(exchange.members) or running.start_s >= 0:
            return
        if any(self._queues[exchange.channel, member][0] != key for member in exchange.members):
            return
        if exchange.after is not None and exchange.after not in self._completed:
            self._followers[exchange.after].append(key)
            return
        running.start_s, running.remaining_s = now_s, exchange.transfer_s
        self._schedule_event(now_s + exchange.latency_s, partial(self._start_bytes, running))

    def _start_bytes(self, running: _RunningExchange, now_s: float) -> None:
        """Starts the transfer of an exchange over its links, when its latency has passed."""
        running.updated_s = now_s
        for link in running.exchange.links:
            self._active_on_link[link][running.exchange.key] = None
        self._update_shares(running, now_s)

    def _update_shares(self, running_exchange: _RunningExchange, now_s: float) -> None:
        """Computes the new end of this exchange, if it has not ended, and of all exchanges that share a link with it. An
        exchange runs at 1/n of its speed, where n is the largest number of exchanges on one of its links.
        """
        neighbours = {key: None for link in running_exchange.exchange.links for key in self._active_on_link[link]}
        if running_exchange.exchange.key in self._running:
            neighbours[running_exchange.exchange.key] = None
        for key in neighbours:
            running = self._running[key]
            running.remaining_s -= (now_s - running.updated_s) * running.share
            running.updated_s = now_s
            fullest = max((len(self._active_on_link[link]) for link in running.exchange.links), default=1)
            running.share = 1.0 / fullest
            running.version += 1
            self._schedule_event(
                now_s + max(0.0, running.remaining_s) * fullest, partial(self._end_exchange, running, running.version)
            )

    def _end_exchange(self, running: _RunningExchange, version: int, now_s: float) -> None:
        """Ends an exchange, unless its end was computed again after `version`."""
        exchange = running.exchange
        if running.version != version:
            return
        del self._running[exchange.key]
        self._completed[exchange.key] = exchange
        for link in exchange.links:
            self._active_on_link[link].pop(exchange.key, None)
        if exchange.links:
            self._update_shares(running, now_s)
        for member in exchange.members:
            queue = self._queues[exchange.channel, member]
            assert queue.popleft() == exchange.key
            if queue:
                self._start_if_ready(queue[0], now_s)
        for follower in self._followers.pop(exchange.key, ()):
            self._start_if_ready(follower, now_s)
        for rank, wait_start_s in self._waits.pop(exchange.key, ()):
            self._finish_wait(exchange, rank, wait_start_s, now_s)

    def _schedule_event(self, time_s: float, event: Callable[[float], None]) -> None:
        """Makes `run` call `event` at `time_s`, after the events that were scheduled for the same time before this call."""
        self._count += 1
        heapq.heappush(self._events, (time_s, self._count, event))


@dataclass(frozen=True)
class StepTime:
    """A simulated step. exposed_waits: the time spans in which stages wait for exchanges or work on them. updating_s: the part
    of `timeline.computing_s` outside the action list, such as the norm and the update. devices_s: the time at which all devices
    are done. host_s: the time that the host of each stage needs to launch the step, or 0 if hosts do not run ahead. Times are
    in seconds.
    """

    timeline: Timeline
    exposed_waits: tuple[ExposedWait, ...]
    updating_s: tuple[float, ...]
    devices_s: float
    host_s: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Returns the time of the step in seconds: that of the devices or of the slowest host, whichever is longer."""
        return max((self.devices_s, *self.host_s))

    def exposed_s(self, stage: int) -> dict[str, float]:
        """Returns the exposed time of a stage by the first word of the channel, such as `up`, `down`, `reduce` or `all`."""
        seconds: dict[str, float] = defaultdict(float)
        for span in self.exposed_waits:
            if span.rank == stage:
                seconds[span.channel.split(" ")[0]] += span.end_s - span.start_s
        return dict(seconds)


def simulate_programs(programs: Sequence[Program]) -> StepTime:
    """Simulates a step with one program per stage. Raises PlanError "schedule-deadlock" if a program would wait forever."""
    simulator = ProgramSimulator(programs)
    simulator.run()
    computing, updating = [0.0] * len(programs), [0.0] * len(programs)
    spans: dict[tuple[int, Action], TimedAction] = {}
    for rank, compute, start_s, end_s in simulator.computations:
        computing[rank] += end_s - start_s
        if compute.action is None:
            updating[rank] += end_s - start_s
        else:
            earlier = spans.get((rank, compute.action))
            spans[rank, compute.action] = TimedAction(rank, compute.action, earlier.start_s if earlier else start_s, end_s)
    devices_s = max(simulator.ends_s, default=0.0)
    host_s = tuple(sum(item.host_s for item in program if isinstance(item, Compute)) for program in programs)
    timeline = replace(
        Timeline.from_spans(len(programs), spans.values()), end_s=max((devices_s, *host_s)), computing_s=tuple(computing)
    )
    return StepTime(timeline, tuple(simulator.exposed_waits), tuple(updating), devices_s, host_s)
