"""Finds how long a step of a plan takes on a machine, before it runs: `train-cli estimate --machine`.

plan ── draft ──> layers, priced one by one ──┐
     ── schedule ──> lists, lowered ──────────┼──> programs of all stages ──> simulated step
     ── a rank of each kind of stage, in a ───┘
        fake world: what it exchanges, updates
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from sley_core.engine.on_meta import meta_micro_batch
from sley_core.records import copies_to_host
from sley_estimate.layers.of_plan import PricedLayer, priced_layers, priced_slices
from sley_estimate.machine.notes import notes_on
from sley_estimate.seconds.groups import slowest_message
from sley_estimate.seconds.links import NOTHING, Cost, collective
from sley_estimate.seconds.result import StepSeconds, simulate_step
from sley_estimate.seconds.step import StepWork
from sley_estimate.stage_facts import UntoldError, stage_facts, waits_before_updates

if TYPE_CHECKING:
    from sley_core.draft import Draft
    from sley_core.engine.stage import Stage
    from sley_core.plan.plan import Plan
    from sley_core.topology import Topology
    from sley_estimate.bytes.rank import RankBytes
    from sley_estimate.machine.tables import MachineFile
    from sley_estimate.recorded.of_plan import Records
    from sley_estimate.stage_facts import StageFacts

TOTALS_BYTES = 64
"""Of the sum that ends a step: loss, norm, votes."""


@dataclass(frozen=True)
class PlanSeconds:
    """The estimate of a plan's step. layers: priced, in the order of the model. notes: for the user."""

    step: StepSeconds
    layers: Sequence[PricedLayer]
    num_micros: int
    notes: Sequence[str]


def estimate_both(
    plan: Plan, size: int, machine: MachineFile, cores: int = 1
) -> tuple[Sequence[RankBytes], PlanSeconds]:
    """Returns what `stage_bytes` and `estimate_seconds` do, and raises as they do. On CUDA, a plan of which one rank per stage
    must take steps for either takes them once.
    """
    from sley_estimate.bytes.each_rank import first_draft
    from sley_estimate.bytes.stages import bytes_and_facts, stage_bytes
    from sley_estimate.recorded.of_plan import bytes_and_records_of

    draft = first_draft(plan, size)
    # bytes first: after a backward in this process, those forked from it could have none
    if _is_in_the_lists(plan):
        held, facts = bytes_and_facts(plan, size, cores, draft)
        if facts is not None:
            return held, _with_notes(_told_by_lists(plan, size, machine, draft, facts), machine, size)
        records = None
    elif plan.run.device == machine.device.kind == "cuda":
        held, records = bytes_and_records_of(plan, size, cores, draft)
    else:
        held, records = list(stage_bytes(plan, size, cores, draft)), None
    return held, _with_notes(_recorded(plan, size, machine, draft, cores, records), machine, size)


def estimate_seconds(plan: Plan, size: int, machine: MachineFile, cores: int = 1) -> PlanSeconds:
    """Returns the seconds of a step of `plan` on `size` ranks of `machine`, once optimizer states and orders are there, with
    the seconds of each layer and notes for the user. Needs neither devices nor peers.

    Where handlers tell what they exchange, and nothing else is exchanged but messages between stages, they are simulated from
    the schedule's lists. Else one rank of each stage takes steps without values, which takes longer; as many at a time as there
    are `cores`. Raises PlanError for all that the plan's checks find, and "machine-host" for copies to the host of which the
    machine file says nothing.
    """
    from sley_estimate.bytes.each_rank import first_draft

    draft = first_draft(plan, size)
    if _is_in_the_lists(plan):
        with suppress(UntoldError):
            return _with_notes(_told_by_lists(plan, size, machine, draft), machine, size)
    return _with_notes(_recorded(plan, size, machine, draft, cores), machine, size)


def _with_notes(found: PlanSeconds, machine: MachineFile, size: int) -> PlanSeconds:
    """Returns `found` with what there is to note on a world of `size` on the machine."""
    return replace(found, notes=(*found.notes, *notes_on(machine, size)))


def _told_by_lists(
    plan: Plan, size: int, machine: MachineFile, draft: Draft, facts: Sequence[StageFacts] | None = None
) -> PlanSeconds:
    """Returns the seconds of a plan from its lists and what its handlers tell. Raises UntoldError if one does not.

    draft: of a rank of that world, which is not used up. facts: of each stage; None if they are still to be found.
    """
    topology = plan.topology(size)
    stage, notes = draft.stage, draft.notes
    layers = priced_layers(plan, draft.model, meta_micro_batch(plan, draft.dataset), machine)
    num_micros = plan.num_micros(topology)
    facts = stage_facts(plan, topology, stage, layers) if facts is None else facts
    waited_s = _engine_s(machine, stage, 0) if machine.engine and waits_before_updates(plan) else {}
    work = StepWork(
        parts=[[one.seconds for one in part] for part in _by_position(layers, stage)],
        messages=_messages(_by_position(layers, stage), stage, topology, machine),
        gradients={
            number: [told.on(number, topology, machine.links) for told in one.exchanges]
            for number, one in enumerate(facts)
        },
        update_s={
            number: one.update_bytes / machine.device.memory_bandwidth + waited_s.get(number, 0.0)
            for number, one in enumerate(facts)
        },
        together=collective("sum", TOTALS_BYTES, range(size), machine.links),
        after_s=machine.device.step_s,
        host_s=_engine_s(machine, stage, num_micros),
    )
    lists = stage.lists.of_all_stages(num_micros)
    return PlanSeconds(simulate_step(lists, stage.lists.placement, work), layers, num_micros, notes)


def _engine_s(machine: MachineFile, stage: Stage, num_micros: int) -> dict[int, float]:
    """Returns the seconds of the host of each stage for a step beside layers; none where the machine file does not say."""
    if machine.engine is None:
        return {}
    held: dict[int, set[int]] = defaultdict(set)
    for number, part in stage.stages:
        trained = (one for layer in part for one in layer.module.parameters() if one.requires_grad)
        held[number].update(map(id, trained))
    return {number: machine.engine.seconds(len(some), num_micros) for number, some in held.items()}


def _is_in_the_lists(plan: Plan) -> bool:
    """Returns whether all exchanges of a step are those between stages, and those that gradient handlers tell, and nothing is
    copied to the host.
    """
    sizes = plan.parallel
    return (
        sizes.wp == sizes.sp == 1
        and sizes.reduction == "fast"
        and not plan.offload
        and not copies_to_host(plan.activations.record)
    )


def _recorded(
    plan: Plan, size: int, machine: MachineFile, draft: Draft, cores: int = 1, records: Records | None = None
) -> PlanSeconds:
    """Returns the seconds of a plan from steps that one rank of each stage takes on tensors without values. Chunks whose layers
    were all measured, or counted in proportion to measured ones, take those seconds.

    draft: of a rank of that world, which is not used up. records: of such steps; None if they are still to be taken.
    """
    from sley_estimate.recorded.of_plan import Measured, records_of, seconds_of_records

    records = records or records_of(plan, size, draft, runs_ahead=machine.device.kind == "cuda", cores=cores)
    fields = meta_micro_batch(plan, draft.dataset)
    priced = priced_layers if plan.parallel.sp == 1 else priced_slices
    layers = priced(plan, draft.model, fields, machine) or []
    by_name = {one.name: one for one in layers if one.source != "counted"}
    measured: Measured = {
        (stage, chunk): [by_name[name].seconds for name in names]
        for stage, one in enumerate(records.ranks)
        for chunk, names in enumerate(one.layers)
        if by_name.keys() >= set(names)
    }
    num_micros = plan.num_micros(plan.topology(size))
    waits = machine.engine is not None and waits_before_updates(plan)
    step = seconds_of_records(records, num_micros, machine, measured, waits=waits)
    return PlanSeconds(step, layers, num_micros, ())


def _by_position(layers: Sequence[PricedLayer], stage: Stage) -> list[Sequence[PricedLayer]]:
    """Returns, for each position of the model, its layers in order."""
    bounds = accumulate((len(part) for _, part in stage.stages), initial=0)
    return [layers[first:last] for first, last in pairwise(bounds)]


def _messages(
    parts: Sequence[Sequence[PricedLayer]], stage: Stage, topology: Topology, machine: MachineFile
) -> list[Cost]:
    """Returns, for each position but the last, the cost of what it hands to the next one; nothing where one stage has both.
    parts: the layers of each position.
    """
    found = []
    for (sender, _), (receiver, _), part in zip(stage.stages, stage.stages[1:], parts, strict=False):
        alone, ends = sender == receiver, (sender, receiver)
        cost = slowest_message(part[-1].output_bytes, ends, topology, machine.links) if not alone else NOTHING
        found.append(cost)
    return found
