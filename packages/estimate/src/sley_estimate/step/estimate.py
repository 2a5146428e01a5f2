"""How long a step of a plan takes on a machine, before it runs: `train-cli estimate --machine`.

plan ── draft ──> layers, priced one by one ──────────────────────────────────┐
     ── a rank of each kind of stage takes steps without values: bytes, and ──┼──> programs ──> simulated step
        what it computed, exchanged, updated                                  │
     ── schedule ──> lists of all stages, lowered ────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sley_core.assemble import DTYPES, dtypes
from sley_core.errors import PlanError
from sley_core.optim.shared import in_training, skips_on_device
from sley_core.plan.load import with_values
from sley_core.records import steps_on_host
from sley_estimate.bytes.stages import each_stage, first_draft, representatives, take_steps
from sley_estimate.layers.prices import PricedLayer, priced_layers
from sley_estimate.step.programs import Records, seconds_of_records
from train_cli.on_meta import meta_micro_batch

if TYPE_CHECKING:
    from sley_core.assemble import Draft
    from sley_core.plan.plan import Plan
    from sley_estimate.bytes.rank import RankBytes
    from sley_estimate.machine import MachineFile
    from sley_estimate.step.lanes import StepSeconds
    from sley_estimate.step.programs import Measured
    from sley_estimate.step.record import RankRecord


@dataclass(frozen=True)
class PlanSeconds:
    """The estimate of a plan's step. layers: priced, in the order of the model; empty if they were priced by recorded steps."""

    step: StepSeconds
    layers: Sequence[PricedLayer]
    num_micros: int


def on_machine(plan: Plan, machine: MachineFile) -> Plan:
    """Returns `plan` with the machine's kind of device as `run.device`."""
    kind = machine.device.kind
    return plan if plan.run.device == kind else with_values(plan, {("run", "device"): kind})


def estimate_both(plan: Plan, size: int, machine: MachineFile, cores: int = 1) -> tuple[list[RankBytes], PlanSeconds]:
    """Returns the bytes of each stage, and the seconds of a step, of `plan` on `size` ranks of `machine`, from the same steps.

    Raises PlanError for all that the plan's checks find and for what the machine file lacks, and as `rank_bytes`.
    """
    plan = on_machine(plan, machine)
    draft = first_draft(plan, size)
    stages = each_stage(plan, size, cores, draft, records=True)
    samples = representatives(plan, plan.topology(size), draft)
    records = records_from({number: record for number, (_, record) in enumerate(stages) if record}, samples, draft)
    return [held for held, _ in stages], seconds_from(records, plan, size, machine, draft)


def estimate_seconds(plan: Plan, size: int, machine: MachineFile, cores: int = 1) -> PlanSeconds:
    """Returns the seconds of a step, from steps of the stages that stand for others. Raises as `estimate_both`."""
    plan = on_machine(plan, machine)
    draft = first_draft(plan, size)
    return seconds_from(records_of(plan, size, draft, cores), plan, size, machine, draft)


def records_of(plan: Plan, size: int, draft: Draft, cores: int = 1) -> Records:
    """Returns a recorded step of each stage of a world of `size`. draft: is not used up. Raises as `rank_bytes`."""
    samples = representatives(plan, plan.topology(size), draft)
    stages = sorted({stage for each in samples for stage in each})
    taken = take_steps(plan, size, stages, cores, draft, records=True)
    return records_from({stage: record for stage, (_, record) in zip(stages, taken, strict=True) if record}, samples, draft)


def records_from(known: Mapping[int, RankRecord], samples: Sequence[Sequence[int]], draft: Draft) -> Records:
    """Returns the records of all stages. known: by stage. samples: the stages that stand for each stage."""
    lists = draft.stage.lists
    names = [[layer.name for layer in layers] for _, layers in draft.stage.stages]
    chunks = range(lists.placement.chunks)
    return Records(
        [
            known[first].on_stage(
                number,
                [names[lists.placement.position(number, chunk)] for chunk in chunks],
                [known[each].step for each in more],
            )
            for number, (first, *more) in enumerate(samples)
        ],
        lists,
    )


def seconds_from(records: Records, plan: Plan, size: int, machine: MachineFile, draft: Draft) -> PlanSeconds:
    """Returns the seconds of a step from recorded steps. Chunks whose layers are all measured, or in proportion to measured
    ones, take those seconds. Raises as `seconds_of_records`.
    """
    fields = meta_micro_batch(plan, draft.dataset)
    layers = priced_layers(plan, draft.model, fields, machine) or []
    by_name = {layer.name: layer for layer in layers if layer.source != "counted"}
    measured: Measured = {
        (stage, chunk): [by_name[name].seconds for name in names]
        for stage, record in enumerate(records.ranks)
        for chunk, names in enumerate(record.layers)
        if by_name.keys() >= set(names)
    }
    num_micros = plan.num_micros(plan.topology(size))
    waits = machine.engine is not None and waits_before_updates(plan)
    step = seconds_of_records(records, num_micros, machine, measured, waits=waits)
    return PlanSeconds(step, layers, num_micros)


def waits_before_updates(plan: Plan) -> bool:
    """Returns whether host and device wait for each other before each update: the host steps the weights, the loss is scaled,
    or the optimizer cannot skip a step on the device.
    """
    if plan.precision.loss_scale is not None or any(steps_on_host(manager.record) for manager in plan.offload):
        return True
    groups = [{"params": [nn.Parameter(torch.zeros(4, 4))]}]
    return not skips_on_device(plan.optimizer.build(groups, torch.device("cpu")))


def moved_by_update(plan: Plan, num_states: int) -> int:
    """Returns the bytes that norm, clipping and update move per element: gradients twice, and once more both ways if clipped;
    weight and states both ways; a working copy, if there is one.
    """
    config: Any = plan.optimizer.config
    times = 2 if config.clip_norm is None else 4
    working, stepped = dtypes(plan)
    copy = working.itemsize if stepped != working else 0
    gradients = DTYPES[plan.precision.gradients]
    widened = 2 * stepped.itemsize if gradients != stepped else 0
    return times * gradients.itemsize + widened + stepped.itemsize * (2 + 2 * num_states) + copy


def count_states(plan: Plan) -> int:
    """Returns how many tensors of the weight's shape the plan's optimizer keeps per weight, from a step on the CPU.

    Raises PlanError "estimate-seconds" for an optimizer that fails on one 4 x 4 weight.
    """
    weight = nn.Parameter(torch.zeros(4, 4))
    try:
        optimizer: Any = in_training(plan.optimizer.build([{"params": [weight]}], torch.device("cpu")))
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    except Exception as error:
        message = f"`{plan.optimizer.name}` cannot be tried on one small weight: {type(error).__name__}: {error}"
        raise PlanError("estimate-seconds", message, path=("optimizer",)) from error
    states = (value for value in optimizer.state[weight].values() if torch.is_tensor(value))
    return sum(1 for value in states if value.shape == weight.shape)
