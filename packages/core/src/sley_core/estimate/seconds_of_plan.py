"""How long a step of a plan takes on a machine, before it runs: `train-cli estimate --machine`.

plan ── draft ──> layers, priced one by one ──┐
     ── schedule ──> lists, lowered ──────────┼──> programs of all stages ──> simulated step
     ── a rank of each kind of stage, in a ───┘
        fake world: what it exchanges, updates
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from sley_core.comm.world import World
from sley_core.data.dataset import DataContext
from sley_core.data.factory import open_dataset
from sley_core.draft import draft_model, layer_costs_of
from sley_core.engine.on_meta import meta_micro_batch
from sley_core.engine.stage import Stage, stage_of
from sley_core.errors import PlanError
from sley_core.estimate.layers.of_plan import PricedLayer, priced_layers
from sley_core.estimate.seconds.links import NOTHING, Cost, collective, message
from sley_core.estimate.seconds.result import StepSeconds, simulate_step
from sley_core.estimate.seconds.step import StepWork
from sley_core.estimate.stage_facts import stage_facts

if TYPE_CHECKING:
    from sley_core.estimate.machine.tables import MachineFile
    from sley_core.plan.plan import Plan
    from sley_core.topology import Topology

TOTALS_BYTES = 64
"""Of the sum that ends a step: loss, norm, votes."""


@dataclass(frozen=True)
class PlanSeconds:
    """The estimate of a plan's step. layers: priced, in the order of the model. notes: for the user."""

    step: StepSeconds
    layers: Sequence[PricedLayer]
    num_micros: int
    notes: Sequence[str]


def estimate_seconds(plan: Plan, size: int, machine: MachineFile) -> PlanSeconds:
    """Returns the seconds of a step of `plan` on `size` ranks of `machine`, once optimizer states and orders are there.

    Needs neither devices nor peers. Raises PlanError for all that the plan's checks find, and "estimate-seconds" for what
    this estimate does not know: shards of weights, slices of sequences, offload, and handlers that do not tell what they
    exchange.
    """
    _refuse_unknown(plan)
    topology = plan.topology(size)
    dataset = open_dataset(plan.data, DataContext(plan.run.seed, "train"))
    model = draft_model(plan, dataset.info)
    layers = priced_layers(plan, model, meta_micro_batch(plan, dataset), machine)
    with World.fake(0, size) as world:
        costs, notes = layer_costs_of(plan, world, model)
    stage = stage_of(plan, topology, 0, model, costs)
    num_micros = plan.num_micros(topology)
    facts = stage_facts(plan, topology, stage, layers)
    firsts = range(0, size, topology.ranks_per_stage)
    work = StepWork(
        parts=[[one.seconds for one in part] for part in _by_position(layers, stage)],
        messages=_messages(_by_position(layers, stage), stage, topology, machine),
        gradients={
            number: [told.on(first, machine.links) for told in one.exchanges]
            for number, (one, first) in enumerate(zip(facts, firsts, strict=True))
        },
        update_s={number: one.update_bytes / machine.device.memory_bandwidth for number, one in enumerate(facts)},
        together=collective("sum", TOTALS_BYTES, range(size), machine.links),
        after_s=machine.device.step_s,
    )
    lists = stage.lists.of_all_stages(num_micros)
    return PlanSeconds(simulate_step(lists, stage.lists.placement, work), layers, num_micros, notes)


def _refuse_unknown(plan: Plan) -> None:
    """Raises PlanError "estimate-seconds" for what runs beside the lists in a way that is not simulated."""
    hint = "its bytes can be estimated: leave `--machine` out"
    for key, size in (("wp", plan.parallel.wp), ("sp", plan.parallel.sp)):
        if size > 1:
            message = (
                f"the seconds of `{key} = {size}` cannot be estimated yet: its exchanges are not known before a run"
            )
            raise PlanError.many([plan.diagnostic("estimate-seconds", message, ("parallel", key), hint)])
    if plan.offload:
        message = "the seconds of offload cannot be estimated yet: its copies are not known before a run"
        raise PlanError.many([plan.diagnostic("estimate-seconds", message, ("offload",), hint)])
    if plan.parallel.reduction == "canonical":
        message = "the seconds of canonical sums cannot be estimated yet"
        raise PlanError.many([plan.diagnostic("estimate-seconds", message, ("parallel", "reduction"), hint)])


def _by_position(layers: Sequence[PricedLayer], stage: Stage) -> list[Sequence[PricedLayer]]:
    """Returns the layers of each position of the model."""
    bounds = accumulate((len(part) for _, part in stage.stages), initial=0)
    return [layers[first:last] for first, last in pairwise(bounds)]


def _messages(
    parts: Sequence[Sequence[PricedLayer]], stage: Stage, topology: Topology, machine: MachineFile
) -> list[Cost]:
    """Returns the cost of what crosses between each two positions; nothing where one stage has both."""
    found = []
    size = topology.ranks_per_stage
    for (sender, _), (receiver, _), part in zip(stage.stages, stage.stages[1:], parts, strict=False):
        alone = sender == receiver
        cost = message(part[-1].output_bytes, sender * size, receiver * size, machine.links) if not alone else NOTHING
        found.append(cost)
    return found
