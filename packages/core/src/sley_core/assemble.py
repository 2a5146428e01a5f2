"""Assembles a run from a plan, in one order on every rank; up to the parameter registry the same in a fake world of any size.

checks ──> layers on meta, ties ──> groups, agree ──> shards ──> first values ──> registry ──> store, handlers, optimizer
──> data ──> executor
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from sley_core.attach import stepper_of
from sley_core.comm.groups import Groups
from sley_core.draft import DTYPES, Draft, draft_of, dtypes, formats_of, join
from sley_core.engine.buffers import by_reduce_group, loose
from sley_core.engine.canonical.sums import cost_note
from sley_core.engine.canonical.tree import CanonicalOrder
from sley_core.engine.direct import WeightQueue
from sley_core.engine.gradients import GradientStore
from sley_core.engine.load import WeightLoader, names_of
from sley_core.engine.parts import Parts, Pools, StepNumbers, Waits
from sley_core.engine.refusals import check_canonical, check_hooks, refuse_left_over
from sley_core.engine.registry import ParameterRegistry
from sley_core.engine.save import check_extra_states
from sley_core.engine.shards import AXIS, cut_on_meta, left_whole, shards_of
from sley_core.engine.stage import Stage
from sley_core.engine.step_state import StepState
from sley_core.engine.weights import WeightStore
from sley_core.equip import AssemblyFacts, outputs_of, samples_of, state_of
from sley_core.errors import PlanError
from sley_core.model.layers import Model
from sley_core.model.values import HostModel
from sley_core.offload import memory_of, move_numbers
from sley_core.optim.build import leave_compiler_out
from sley_core.plan.check import check_plan
from sley_core.process import keep_freed_memory
from sley_core.run import Run
from sley_core.run_state.checkpointer import checkpointer_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sley_core.comm.world import World
    from sley_core.engine.boundary import Description
    from sley_core.engine.shards import Shards
    from sley_core.model.layers import Layer
    from sley_core.plan.plan import Plan
    from sley_core.protocols import SequenceCommunicator, WeightCommunicator
    from sley_core.topology import Topology


def assemble(plan: Plan, world: World, *, folder: Path | None = None, draft: Draft | None = None) -> Run:
    """Returns the run of `plan` on this rank of `world`; every rank calls it, and it communicates.

    folder: where rank 0's metrics writers and every rank's profiler write; if it is None (on all ranks alike) nothing
    is written. draft: of this plan and a world of this size, of which no run was made; left out, it is made here. In a fake
    world nothing is allocated and no data is read; on meta the run can be inspected, not stepped.

    Raises PlanError for all that the plan's checks find, RunError if ranks disagree; then the model has no patches.
    """
    undo = ExitStack()
    try:
        return _assemble(plan, world, folder, draft, undo)
    except BaseException:
        undo.close()
        raise


def _assemble(plan: Plan, world: World, folder: Path | None, draft: Draft | None, undo: ExitStack) -> Run:
    """Assembles the run as `assemble` describes. undo: collects what detaches each part from the model; the run closes it."""
    if problems := check_plan(plan, world.size):
        raise PlanError.many(problems)
    if not plan.model.config.compile:
        leave_compiler_out()
    topology = plan.topology(world.size)
    draft = draft or draft_of(plan, world)
    dataset, model, notes = draft.dataset, draft.model, [*draft.notes]
    names, sizes = names_of(model.layers), model.num_parameters()
    stage = draft.stage.at(topology.coordinates(world.rank).stage)
    groups = join(plan, world, topology, model, stage, dataset)
    simulation = world.simulation
    communicator: WeightCommunicator | None = plan.weights.build() if plan.weights else None
    if communicator is not None:
        communicator.prepare(model.layers)
    shards = shards_of(model.layers, communicator.cuts, groups[AXIS]) if communicator else {}
    check_hooks(stage.stages, shards, topology.sp)
    notes += left_whole(model.layers, shards)
    notes += formats_of(plan, model, shards)
    if plan.parallel.reduction == "canonical":
        check_canonical(stage.stages, model.per_rank_buffers)
    announced, has_values = None, True
    if simulation is None:
        shards = _place(plan, world, model, stage, shards)
    else:
        announced, has_values = simulation.announced(plan, stage, dataset, dtypes(plan)[0]), False
    apart = _attach_attention(plan, groups, model, undo)
    registry = ParameterRegistry(stage.chunks, stage.stages, shards)
    if simulation is not None:
        cut_on_meta(stage.layers, shards)
        simulation.fill(stage.layers, dtypes(plan)[1])
    with world.device.in_use():
        parts = make_parts(plan, world, topology, groups, stage.layers, registry, announced)
        numbers = move_numbers(plan, parts)
        stepper = stepper_of(plan, parts, model, stage, dataset.info, communicator, undo, apart, checks=has_values)
        samples = samples_of(plan, parts, model, dataset, stepper, has_feed=has_values)
        memory = memory_of(plan, parts, stepper, numbers, undo)
    if parts.store.canonical is not None:
        notes.append(cost_note(parts, plan.num_micros(topology)))
    if has_values:
        check_extra_states(stage.layers)
        refuse_left_over(model, stage.layers)  # last, since the code above still uses other ranks' layers
    facts = AssemblyFacts(*sizes, notes, draft.found)
    state = state_of(plan, parts, stepper, samples, memory, model, folder, facts)
    return Run(
        plan,
        parts,
        stepper,
        samples,
        outputs_of(plan, world, stepper, topology, folder),
        memory,
        WeightLoader(names, parts, stepper.update.masters),
        checkpointer_of(state),
        state,
        facts,
    )


def _attach_attention(plan: Plan, groups: Groups, model: Model, undo: ExitStack) -> Sequence[str] | None:
    """Attaches the plan's sequence attention to the model, if sequences are split, and returns its `apart`; `undo` detaches
    it.
    """
    if plan.sequence is None or groups["sp"].size == 1:
        return None
    attention: SequenceCommunicator = plan.sequence.build(groups["sp"])
    attention.attach(model.layers)
    undo.callback(attention.detach)
    return attention.apart


def _place(plan: Plan, world: World, model: Model, stage: Stage, shards: Shards) -> Shards:
    """Replaces the modules of this rank's layers, on meta, by modules with first values, of which parameters are cut. Returns
    `shards` by the new parameters. Raises what `HostModel` raises.
    """
    with world.all_or_none(plan.limits.collective_timeout_s), world.device.in_use():
        host, owned = HostModel(model), {layer.name for layer in stage.layers}
        cut = {key: shard.cut for key, shard in shards.items()}
        final = host.place(owned, dtype=dtypes(plan)[1], device=world.device.torch_device, cut=cut)
        host.drop_others(final, owned)
    if plan.run.keep_freed_memory and world.device.type == "cpu":
        keep_freed_memory()  # from now on: values of other ranks' layers have been freed
    return {id(final[key]): shard for key, shard in shards.items() if key in final}


def make_parts(
    plan: Plan,
    world: World,
    topology: Topology,
    groups: Groups,
    layers: Sequence[Layer],
    registry: ParameterRegistry,
    announced: Callable[[int, int], Description] | None = None,
) -> Parts:
    """Makes the parts to which plugins are attached; the gradient store has no buffers if no other rank holds this one's
    weights.
    """
    planner = loose if groups["stage"].size == 1 else by_reduce_group
    device = world.device.torch_device
    state = StepState()
    canonical = CanonicalOrder(state, groups) if plan.parallel.reduction == "canonical" else None
    return Parts(
        plan.run,
        plan.batch,
        plan.precision,
        plan.limits,
        world,
        topology,
        groups,
        layers,
        registry,
        GradientStore(registry, DTYPES[plan.precision.gradients], device, state, planner, canonical),
        WeightStore(dtypes(plan)[0], plan.precision.keep),
        Waits(),
        WeightQueue(),
        StepNumbers(groups),
        pool=Pools(plan.pools, lambda name: plan.build_named("memory_pools", name)),
        foretold=announced,
    )
