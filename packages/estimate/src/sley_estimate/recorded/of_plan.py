"""Finds how long a step of a plan takes on a machine, before it runs: from steps that one rank of each stage takes without
values.

plan ──> a fake run of one rank per stage ──> recorded steps ──┐
     ──> schedule ──> lists of all stages, lowered ────────────┼──> programs ──> simulated step
machine file ──> seconds of operators, exchanges, messages ────┘
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from sley_core.actions.action import Action, Kind
from sley_core.engine.stage import lists_of
from sley_estimate.bytes.each_rank import Look, each_rank
from sley_estimate.bytes.rank import RankBytes, rank_bytes
from sley_estimate.layers.once import once
from sley_estimate.layers.operators import Operator
from sley_estimate.recorded.programs import Prices, recorded_programs
from sley_estimate.recorded.record import RankRecord, Recording, record
from sley_estimate.recorded.words import HOST, Began, Worked
from sley_estimate.seconds.groups import Ranks, groups_at_once, slowest, slowest_message
from sley_estimate.seconds.host_copies import copy_cost, on_host_s
from sley_estimate.seconds.layer_seconds import LayerSeconds, device_seconds_of, seconds_of
from sley_estimate.seconds.result import StepSeconds, simulate_programs

if TYPE_CHECKING:
    from sley_core.draft import Draft
    from sley_core.engine.lists import Lists
    from sley_core.errors import SleyError
    from sley_core.plan.plan import Plan
    from sley_estimate.bytes.recipes import Recipes
    from sley_estimate.machine.tables import DeviceTable, MachineFile
    from sley_estimate.seconds.links import Cost

Found = TypeVar("Found")

Measured = Mapping[tuple[int, int], Sequence[LayerSeconds]]
"""Measured seconds of each layer, by stage and chunk."""


class Records(NamedTuple):
    """Holds a recorded step of the first rank of each stage, in order. lists: of all stages, for any number of
    micro-batches.
    """

    ranks: Sequence[RankRecord]
    lists: Lists


def records_of(plan: Plan, size: int, draft: Draft, *, runs_ahead: bool = False, cores: int = 1) -> Records:
    """Returns a recorded step of each stage of a world of `size`. Needs neither devices nor peers.

    draft: of a rank of that world, which is not used up. runs_ahead: whether copies to the host run beside the device's work,
    as on CUDA. cores: how many processes may work at a time. Raises RunError `estimate-layer` for a layer that needs values.
    """

    def look(rank: int, recipes: Recipes, own: Draft | None) -> RankRecord:
        return record(plan, rank, size, runs_ahead=runs_ahead, recipes=recipes, draft=own)

    return Records(*_of_each_stage(plan, size, cores, look, draft))


def bytes_and_records_of(plan: Plan, size: int, cores: int, draft: Draft) -> tuple[list[RankBytes], Records]:
    """Returns what the first rank of each stage of a world of `size` holds, and its recorded step, from the same steps, on
    CUDA: a CPU's plain kernels keep more than the fused ones whose seconds count.

    Raises as `stage_bytes` and `records_of`, whose results it has in about half of their time. `plan.run.device` must be
    "cuda".
    """
    assert plan.run.device == "cuda", plan.run.device

    def look(rank: int, recipes: Recipes, own: Draft | None) -> tuple[RankBytes, RankRecord]:
        recording = Recording()
        return rank_bytes(plan, rank, size, recipes, own, recording), recording.found

    found, lists = _of_each_stage(plan, size, cores, look, draft)
    return [held for held, _ in found], Records([recorded for _, recorded in found], lists)


def _of_each_stage(plan: Plan, size: int, cores: int, look: Look[Found], draft: Draft) -> tuple[list[Found], Lists]:
    """Returns what `look` finds of the first rank of each stage, in order, and the lists of the stages."""
    topology = plan.topology(size)
    firsts = [stage * topology.ranks_per_stage for stage in range(topology.pp)]
    found = each_rank(plan, firsts, cores, look, draft)
    return found, lists_of(plan, topology, 0)


def seconds_of_records(
    records: Records,
    num_micros: int,
    machine: MachineFile,
    measured: Measured | None = None,
    *,
    waits: bool = False,
) -> StepSeconds:
    """Returns the simulated step of `num_micros` micro-batches that recorded steps make on `machine`.

    measured: seconds of layers that operators are scaled to. waits: whether the host waits for its device before each update.
    Raises PlanError "machine-matmul", "machine-links" and "machine-host" for what the machine file does not say,
    "estimate-seconds" for an action that was not recorded.
    """
    prices = _Prices(records, machine, measured or {}, waits=waits)
    programs = recorded_programs(
        {number: one.step for number, one in enumerate(records.ranks)},
        records.lists.of_all_stages(num_micros),
        records.lists.placement,
        Prices(
            prices.operators,
            prices.starts,
            prices.exchange,
            prices.members,
            prices.message,
            prices.after_s,
            lambda stage: prices.engine_s(stage, num_micros),
        ),
    )
    return simulate_programs(programs)


class _Prices:
    """Prices what a recorded step does on `machine`. Where a chunk's layers were all measured, its operators share what these
    took, in proportion to what they would take by themselves. waits: whether the host waits for its device before each update.
    """

    def __init__(self, records: Records, machine: MachineFile, measured: Measured, *, waits: bool) -> None:
        self.waits = waits
        self.records = records.ranks
        self.placement = records.lists.placement
        self.machine = machine
        self._members: dict[tuple[str, int], tuple[int, ...] | SleyError] = {}
        self._groups: dict[tuple[str, int], list[Ranks] | SleyError] = {}
        self._led = {place for place, layers in measured.items() if any(layer.host_forward for layer in layers)}
        self.factors: dict[tuple[int, int, Kind], float] = {}
        self.starts_s: dict[tuple[int, int, Kind], float] = {}  # of one operator
        for (stage, chunk), layers in measured.items():
            for kind, (computed_s, number) in self._computed(stage, chunk).items():
                if computed_s:
                    self.factors[stage, chunk, kind] = sum(layer.of(kind) for layer in layers) / computed_s
                if number:
                    self.starts_s[stage, chunk, kind] = sum(layer.host_of(kind) for layer in layers) / number

    def operators(self, operators: Sequence[Operator], stage: int, action: Action | None) -> float:
        """Returns the seconds of operators that follow each other on a stage, in `action` or (None) outside of any: those on
        the host's memory by its bandwidth, the others scaled to the measured seconds of the action's chunk, if there are any.
        """
        on_host, rest = _apart(operators)
        if on_host:
            return on_host_s(on_host, self.machine) + (self.operators(rest, stage, action) if rest else 0.0)
        if action is None:  # what the host takes for these is the engine's, where the machine file has that
            return (device_seconds_of if self.machine.engine else seconds_of)(operators, self.machine.device)
        seconds = self._price(stage, action.chunk)(operators, self.machine.device)
        return seconds * self.factors.get((stage, action.chunk, action.kind), 1.0)

    def _price(self, stage: int, chunk: int) -> Callable[[Sequence[Operator], DeviceTable], float]:
        """Returns what prices operators of a chunk: on the device alone where it is known what the host takes for them."""
        return device_seconds_of if (stage, chunk) in self._led else seconds_of

    def starts(self, operators: Sequence[Operator], stage: int, action: Action | None) -> float:
        """Returns the seconds of the host to start operators, as `operators` takes them, and to run those on its own memory; 0
        on a CPU. Those of a chunk share what the host was timed to take for its layers; where it was not, each is a launch.
        """
        device, engine = self.machine.device, self.machine.engine
        if device.kind == "cpu":
            return 0.0
        on_host, rest = _apart(operators)
        own_s = on_host_s(on_host, self.machine) if on_host else 0.0
        if action is None:  # the engine's, where that is known
            return own_s
        if (stage, action.chunk) in self._led:
            return own_s + len(rest) * self.starts_s.get((stage, action.chunk, action.kind), 0.0)
        return own_s + (device.launch_s * len(rest) if engine else 0.0)

    def after_s(self, stage: int) -> float:
        """Returns the seconds of a step that belong to nothing else: of the engine for an update, too, if the device waits for
        that.
        """
        return self.machine.device.step_s + (self.engine_s(stage, 0) if self.waits else 0.0)

    def engine_s(self, stage: int, num_micros: int) -> float:
        """Returns the seconds of the host of a stage for a step beside its operators; 0 where the machine file does not say."""
        engine = self.machine.engine
        return engine.seconds(self.records[stage].num_trained, num_micros) if engine else 0.0

    def exchange(self, began: Began, stage: int) -> Cost:
        """Returns the cost of an exchange, or of a copy to or from the host, that a stage's rank began."""
        if began.kind == "to_host" or began.kind == "to_device":
            return copy_cost(began.kind, began.num_bytes, self.machine)
        groups = once(self._groups, (began.axis, stage), lambda: self._at_once(began.axis, stage))
        return slowest(began.kind, began.num_bytes, groups, self.machine.links)

    def _at_once(self, axis: str, stage: int) -> list[Ranks]:
        """Returns groups of a stage's ranks that exchange over `axis` at once, one for each way in which they lie on hosts."""
        own = self.records[stage]
        return groups_at_once(own.topology, axis, own.groups[axis], self.machine.links)

    def members(self, axis: str, stage: int) -> tuple[int, ...]:
        """Returns the numbers of the stages whose ranks are in the group of `axis` that this stage's rank is in; of copies to
        the host, this stage alone.
        """
        if axis == HOST:
            return (stage,)
        own = self.records[stage]
        return once(
            self._members,
            (axis, stage),
            lambda: tuple(sorted({own.topology.coordinates(rank).stage for rank in own.groups[axis]})),
        )

    def message(self, position: int) -> Cost:
        """Returns the cost of the value that position `position` of the model hands to the next one."""
        ends = self.placement.holder(position).stage, self.placement.holder(position + 1).stage
        first = self.records[0]
        return slowest_message(first.messages[position], ends, first.topology, self.machine.links)

    def _computed(self, stage: int, chunk: int) -> dict[Kind, tuple[float, float]]:
        """Returns, by kind of action on a chunk, the seconds of its operators on the device, and their number, on average over
        the recorded actions.
        """
        found: dict[Kind, list[tuple[float, float]]] = defaultdict(list)
        device, price = self.machine.device, self._price(stage, chunk)
        for action, words in self.records[stage].step.actions:
            if action.chunk == chunk:
                worked = [word.operators for word in words if isinstance(word, Worked)]
                of_device = [_apart(some)[1] for some in worked]
                found[action.kind].append((sum(price(some, device) for some in of_device), sum(map(len, of_device))))
        return {
            kind: (fmean(one for one, _ in some), fmean(other for _, other in some)) for kind, some in found.items()
        }


def _apart(operators: Sequence[Operator]) -> tuple[list[Operator], list[Operator]]:
    """Returns the operators on the host's memory, and the others."""
    found: tuple[list[Operator], list[Operator]] = [], []
    for one in operators:
        found[not one.is_on_host].append(one)
    return found
