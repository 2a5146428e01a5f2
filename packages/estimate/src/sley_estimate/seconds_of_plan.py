"""Finds how long a step of a plan takes on a machine, before it runs: `train-cli estimate --machine`.

plan ── draft ──> layers, priced one by one ─────────────────────────────┐
     ── a rank of each kind of stage takes steps without values: ────────┼──> simulated step
        what it computes, exchanges, updates (`recorded`)                │
     ── schedule ──> lists of all stages, lowered ───────────────────────┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sley_estimate.bytes.each_rank import first_draft
from sley_estimate.bytes.stages import stage_bytes
from sley_estimate.layers.of_plan import PricedLayer, priced_layers, priced_slices
from sley_estimate.machine.notes import notes_on
from sley_estimate.recorded.of_plan import bytes_and_records_of, records_of, seconds_of_records
from sley_estimate.seconds.update import waits_before_updates
from train_cli.on_meta import meta_micro_batch

if TYPE_CHECKING:
    from sley_core.assemble import Draft
    from sley_core.plan.plan import Plan
    from sley_estimate.bytes.rank import RankBytes
    from sley_estimate.machine.tables import MachineFile
    from sley_estimate.recorded.of_plan import Measured, Records
    from sley_estimate.seconds.result import StepSeconds

TOTALS_BYTES = 64
"""Of the sum that ends a step: loss, norm, votes."""


@dataclass(frozen=True)
class PlanSeconds:
    """The estimate of a plan's step. layers: priced, in the order of the model. notes: for the user."""

    step: StepSeconds
    layers: Sequence[PricedLayer]
    num_micros: int
    notes: Sequence[str]


def estimate_both(plan: Plan, size: int, machine: MachineFile, cores: int = 1) -> tuple[Sequence[RankBytes], PlanSeconds]:
    """Returns what `stage_bytes` and `estimate_seconds` do, and raises as they do. On CUDA one rank per stage takes steps once
    for both.
    """
    draft = first_draft(plan, size)
    if plan.run.device == machine.device.kind == "cuda":
        held, records = bytes_and_records_of(plan, size, cores, draft)
    else:  # bytes first: after a backward in this process, those forked from it could have none
        held = list(stage_bytes(plan, size, cores, draft))
        records = _recorded(plan, size, machine, draft, cores)
    return held, seconds_from(records, plan, size, machine, draft)


def estimate_seconds(plan: Plan, size: int, machine: MachineFile, cores: int = 1) -> PlanSeconds:
    """Returns the seconds of a step of `plan` on `size` ranks of `machine`, once optimizer states and orders are there, with
    the seconds of each layer and notes for the user. Needs neither devices nor peers.

    One rank of each kind of stage takes steps without values, as many at a time as there are `cores`. Raises PlanError for all
    that the plan's checks find, and "machine-host" for copies to the host of which the machine file says nothing.
    """
    draft = first_draft(plan, size)
    return seconds_from(_recorded(plan, size, machine, draft, cores), plan, size, machine, draft)


def _recorded(plan: Plan, size: int, machine: MachineFile, draft: Draft, cores: int) -> Records:
    return records_of(plan, size, draft, runs_ahead=machine.device.kind == "cuda", cores=cores)


def seconds_from(records: Records, plan: Plan, size: int, machine: MachineFile, draft: Draft) -> PlanSeconds:
    """Returns the seconds of a step of `plan` from recorded steps. Chunks whose layers were all measured, or counted in
    proportion to measured ones, take those seconds.

    draft: of a rank of that world, which is not used up. Raises as `seconds_of_records`.
    """
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
    return PlanSeconds(step, layers, num_micros, notes_on(machine, size))
