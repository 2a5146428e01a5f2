"""Finds how long a step of a plan takes on a machine, before it runs: from steps that one rank of each stage takes without
values.

plan ──> a fake run of one rank per stage, once for alike stages ──> recorded steps ──┐
     ──> schedule ──> lists of all stages, lowered ───────────────────────────────────┼──> programs ──> simulated step
machine file ──> seconds of operators, exchanges, messages ───────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from sley_core.actions.action import Action
from sley_estimate.bytes.each_rank import each_rank
from sley_estimate.bytes.rank import RankBytes, rank_bytes
from sley_estimate.bytes.stage_kinds import representatives
from sley_estimate.bytes.stages import each_stage
from sley_estimate.layers.once import once
from sley_estimate.layers.operators import Operator
from sley_estimate.recorded.programs import NOT_MEASURED, Prices, Share, recorded_programs
from sley_estimate.recorded.record import RankRecord, Recording, record
from sley_estimate.recorded.words import HOST, Began, Words, Worked
from sley_estimate.seconds.groups import Ranks, groups_at_once, slowest, slowest_message
from sley_estimate.seconds.host_copies import copy_cost, on_host_s
from sley_estimate.seconds.layer_seconds import LayerSeconds, device_seconds_of, seconds_of
from sley_estimate.seconds.result import StepSeconds, simulate_programs

if TYPE_CHECKING:
    from sley_core.assemble import Draft
    from sley_core.engine.stage import Lists
    from sley_core.errors import SleyError
    from sley_core.plan.plan import Plan
    from sley_estimate.bytes.recipes import Recipes
    from sley_estimate.machine.tables import MachineFile
    from sley_estimate.seconds.links import Cost

Measured = Mapping[tuple[int, int], Sequence[LayerSeconds]]
"""Measured seconds of each layer, by stage and chunk."""


class Records(NamedTuple):
    """Holds a recorded step of the first rank of each stage, in order. lists: of all stages, for any number of
    micro-batches.
    """

    ranks: Sequence[RankRecord]
    lists: Lists


def records_of(plan: Plan, size: int, draft: Draft, *, runs_ahead: bool = False, cores: int = 1) -> Records:
    """Returns a recorded step of each stage of a world of `size`: of one stage of all that are alike. Needs neither devices nor
    peers.

    draft: of a rank of that world, which is not used up. runs_ahead: whether copies to the host run beside the device's work,
    as on CUDA. cores: how many processes may work at a time. Raises RunError `estimate-layer` for a layer that needs values.
    """

    def look(rank: int, recipes: Recipes, own: Draft | None) -> RankRecord:
        return record(plan, rank, size, runs_ahead=runs_ahead, recipes=recipes, draft=own)

    topology = plan.topology(size)
    standing = representatives(plan, topology, draft)
    stages = sorted({one for some in standing for one in some})
    found = each_rank(plan, [stage * topology.ranks_per_stage for stage in stages], cores, look, draft)
    return records_from(dict(zip(stages, found, strict=True)), standing, draft)


def bytes_and_records_of(plan: Plan, size: int, cores: int, draft: Draft) -> tuple[list[RankBytes], Records]:
    """Returns what the first rank of each stage of a world of `size` holds, and recorded steps, from the same steps, on CUDA: a
    CPU's plain kernels keep more than the fused ones whose seconds count.

    Raises as `stage_bytes` and `records_of`, whose results it has in about half of their time. `plan.run.device` must be
    "cuda".
    """

    def look(rank: int, recipes: Recipes, own: Draft | None) -> tuple[RankBytes, RankRecord]:
        return bytes_and_record(plan, rank, size, recipes, own)

    found = list(each_stage(plan, size, cores, look, draft))
    standing = representatives(plan, plan.topology(size), draft)
    return [held for held, _ in found], records_from({one: record for one, (_, record) in enumerate(found)}, standing, draft)


def bytes_and_record(
    plan: Plan, rank: int, size: int, recipes: Recipes, draft: Draft | None = None
) -> tuple[RankBytes, RankRecord]:
    """Returns what a rank holds and its recorded step, from the same steps, on CUDA. Raises as `rank_bytes`."""
    assert plan.run.device == "cuda", plan.run.device
    recording = Recording()
    return rank_bytes(plan, rank, size, recipes, draft, recording), recording.found


def records_from(known: Mapping[int, RankRecord], standing: Sequence[Sequence[int]], draft: Draft) -> Records:
    """Returns the records of all stages. known: of those that stand for others, by number. standing: which ones stand for each
    stage. draft: of any rank.
    """
    lists = draft.stage.lists
    names = [[layer.name for layer in layers] for _, layers in draft.stage.stages]
    chunks = range(lists.placement.chunks)
    return Records(
        [
            known[some[0]].on_stage(
                number,
                [names[lists.placement.position(number, chunk)] for chunk in chunks],
                [known[one].step for one in some[1:]],
            )
            for number, some in enumerate(standing)
        ],
        lists,
    )


def seconds_of_records(
    records: Records, num_micros: int, machine: MachineFile, measured: Measured | None = None, *, waits: bool = False
) -> StepSeconds:
    """Returns the simulated step of `num_micros` micro-batches that recorded steps make on `machine`.

    measured: seconds of layers that operators are scaled to. waits: whether the host waits for its device before each update.
    Raises PlanError "machine-matmul", "machine-links" and "machine-host" for what the machine file does not say,
    "estimate-seconds" for an action that was not recorded.
    """
    prices = _Prices(records, machine, measured or {}, waits=waits)
    programs = recorded_programs(
        {number: (one.step, *one.more) for number, one in enumerate(records.ranks)},
        records.lists.of_all_stages(num_micros),
        records.lists.placement,
        Prices(
            prices.share,
            prices.worked,
            prices.exchange,
            prices.members,
            prices.message,
            prices.after_s,
            lambda stage: prices.engine_s(stage, num_micros),
        ),
    )
    return simulate_programs(programs)


class _Prices:
    """Prices what a recorded step does on `machine`. Where a chunk's layers were all measured, the operators of an action share
    what these took, in proportion to what they would take by themselves. waits: whether the host waits for its device before
    each update.
    """

    def __init__(self, records: Records, machine: MachineFile, measured: Measured, *, waits: bool) -> None:
        self.waits = waits
        self.records = records.ranks
        self.placement = records.lists.placement
        self.machine = machine
        self._members: dict[tuple[str, int], tuple[int, ...] | SleyError] = {}
        self._groups: dict[tuple[str, int], list[Ranks] | SleyError] = {}
        self._measured = measured
        self._led = {place for place, layers in measured.items() if any(layer.host_forward for layer in layers)}
        self._known: dict[int, _Alone] = {}  # by `id` of operators, which the records hold

    def share(self, words: Words, stage: int, action: Action) -> Share:
        """Returns the share of the measured seconds of an action that its operators have."""
        layers = self._measured.get((stage, action.chunk))
        if layers is None:
            return NOT_MEASURED
        each = [self._alone(word.operators) for word in words if isinstance(word, Worked)]
        is_led = (stage, action.chunk) in self._led
        computed_s = sum(self._device_s(one, is_led=is_led) for one in each)
        number = sum(one.number for one in each)
        measured_s = sum(layer.of(action.kind) for layer in layers)
        host_s = sum(layer.host_of(action.kind) for layer in layers)
        if not computed_s:
            return Share(1.0, measured_s, 0.0)
        return Share(measured_s / computed_s, 0.0, host_s / number)

    def worked(self, operators: tuple[Operator, ...], stage: int, action: Action | None, share: Share) -> tuple[float, float]:
        """Returns the seconds of operators that follow each other on a stage, in `action` or (None) outside of any, and those
        of the host to start them where it runs ahead, 0 on a CPU. Operators on the host's memory take its bandwidth.
        """
        alone, machine = self._alone(operators), self.machine
        is_led = action is not None and (stage, action.chunk) in self._led
        if action is None:  # what the host takes for these is the engine's, where the machine file has that
            return alone.on_host_s + self._device_s(alone, is_led=machine.engine is not None), alone.started_s
        seconds = alone.on_host_s + self._device_s(alone, is_led=is_led) * share.factor
        if machine.device.kind == "cpu":
            return seconds, 0.0
        start_s = share.start_s if is_led else machine.device.launch_s if machine.engine else 0.0
        return seconds, alone.started_s + start_s * alone.number

    def _alone(self, operators: tuple[Operator, ...]) -> _Alone:
        """Returns what operators take by themselves."""
        if id(operators) not in self._known:
            on_host = [one for one in operators if one.is_on_host]
            rest = [one for one in operators if not one.is_on_host]
            host_s = on_host_s(on_host, self.machine) if on_host else 0.0
            started_s = 0.0 if self.machine.device.kind == "cpu" else host_s
            self._known[id(operators)] = _Alone(
                host_s,
                started_s,
                device_seconds_of(rest, self.machine.device),
                seconds_of(rest, self.machine.device),
                len(rest),
            )
        return self._known[id(operators)]

    def _device_s(self, alone: _Alone, *, is_led: bool) -> float:
        """Returns the seconds of operators on the device: without their starts where it is known what the host takes for
        them.
        """
        return alone.device_s if is_led else alone.with_starts_s

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


class _Alone(NamedTuple):
    """Seconds of operators by themselves: on the host's memory, and of these what the host of a GPU takes; on the device, and
    there with their starts. number: of the latter.
    """

    on_host_s: float
    started_s: float
    device_s: float
    with_starts_s: float
    number: int
