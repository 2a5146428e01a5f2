"""Assembles a run from a plan, in one order on every rank; up to the parameter book the same in a fake world of any
size.

checks ──> layers on meta, ties ──> groups, agree ──> book closed ──> layers materialised ──> store, handlers, optimizer
──> data ──> executor
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sley_core.comm.groups import Groups
from sley_core.comm.malloc import keep_freed_memory
from sley_core.data.dataset import DataContext
from sley_core.data.factory import open_dataset
from sley_core.data.slices import sliced_info
from sley_core.draft import DTYPES, draft_model, dtypes, layer_costs_of
from sley_core.engine import layer_costs
from sley_core.engine.book import ParameterBook
from sley_core.engine.call import LayerCaller
from sley_core.engine.canonical.cost import cost_note
from sley_core.engine.canonical.model_check import check_model
from sley_core.engine.canonical.order import CanonicalOrder
from sley_core.engine.compiled import compile_layers
from sley_core.engine.crossing import Crossing
from sley_core.engine.direct import accumulate_directly
from sley_core.engine.direct_embedding import add_rows_directly
from sley_core.engine.execute import Executor
from sley_core.engine.first_values import check_first_values
from sley_core.engine.foretold import Foretold, foretold
from sley_core.engine.gradient_hooks import check_hooks
from sley_core.engine.layout import by_reduce_group, loose
from sley_core.engine.left_over import refuse_left_over
from sley_core.engine.load import WeightLoader, names_of
from sley_core.engine.parts import Parts
from sley_core.engine.pools import Pools
from sley_core.engine.positions import OverPositions
from sley_core.engine.shards import AXIS, cut_on_meta, left_whole, shards_of
from sley_core.engine.stage import Stage, stage_of
from sley_core.engine.stand_in import close_stand_ins
from sley_core.engine.step_numbers import StepNumbers
from sley_core.engine.step_state import StepState
from sley_core.engine.stepper import Stepper
from sley_core.engine.store import GradientStore
from sley_core.engine.waits import Waits
from sley_core.engine.weight_queue import WeightQueue
from sley_core.engine.weights import WeightStore
from sley_core.equip import checkpoints_of, outputs_of, samples_of
from sley_core.equipment import AssemblyFacts
from sley_core.errors import KeyPath, PlanError
from sley_core.join import join
from sley_core.losses.parameters import check_no_parameters
from sley_core.memory.assemble import memory_of, move_numbers
from sley_core.model.imagine import imagine
from sley_core.model.layers import Model
from sley_core.model.materialize import materialize
from sley_core.plan.check import check_plan
from sley_core.records import GradientHandlerRecord, LossRecord
from sley_core.run import Run
from sley_core.updates import make_update

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sley_core.comm.device import Device
    from sley_core.comm.world import World
    from sley_core.data.dataset import DataInfo
    from sley_core.engine.shards import Shards
    from sley_core.model.layers import Layer
    from sley_core.plan.plan import Plan
    from sley_core.protocols import (
        ActivationPolicy,
        GradientHandler,
        SchedulerHook,
        SequenceCommunicator,
        StageLink,
        WeightCommunicator,
    )
    from sley_core.topology import Topology


def assemble(plan: Plan, world: World, *, folder: Path | None = None) -> Run:
    """Returns the run of `plan` on this rank of `world`; every rank calls it, and it communicates.

    folder: where rank 0's metrics writers and every rank's profiler write; if it is None (on all ranks alike) nothing
    is written. In a fake world nothing is allocated and no data is read; on meta the run can be inspected, not stepped.

    Raises PlanError for all that the plan's checks find, RunError if ranks disagree; then the model has no patches.
    """
    undo = ExitStack()
    try:
        return _assemble(plan, world, folder, undo)
    except BaseException:
        undo.close()
        raise


def _assemble(plan: Plan, world: World, folder: Path | None, undo: ExitStack) -> Run:
    """Does as `assemble`. undo: collects what detaches each part from the model; the run closes it."""
    if problems := check_plan(plan, world.size):
        raise PlanError.many(problems)
    if plan.run.keep_freed_memory and world.device.torch_device.type == "cpu" and not world.is_fake:
        keep_freed_memory()
    topology = plan.topology(world.size)
    with world.all_or_none(
        plan.limits.collective_timeout_s
    ):  # a file that one host lacks, or a factory that fails there
        dataset = open_dataset(plan.data, DataContext(plan.run.seed, "train"))
        model = draft_model(plan, dataset.info)
        names, sizes = names_of(model.layers), model.num_parameters()
    costs, notes = layer_costs_of(plan, world, model)
    stage = stage_of(plan, topology, world.rank, model, costs)
    groups = join(plan, world, topology, model, stage, dataset)
    announced = None
    if world.is_fake and world.device.is_real and topology.pp > 1:
        announced = foretold(plan, stage, dataset, dtypes(plan)[0])
    _attach_attention(plan, groups, model, undo)
    communicator: WeightCommunicator | None = plan.weights.build() if plan.weights else None
    if communicator is not None:
        communicator.prepare(model.layers)
    shards = shards_of(model.layers, communicator.cuts, groups[AXIS]) if communicator else {}
    check_hooks(stage.stages, shards, topology.sp)
    notes += left_whole(model.layers, shards)
    if plan.parallel.reduction == "canonical":
        check_model(stage.stages, model.per_rank_buffers)
    book = ParameterBook(stage.chunks, stage.stages, shards)
    if world.is_fake:
        cut_on_meta(stage.layers, shards)
    with world.device.in_use():
        _materialize(plan, world, model, stage, shards)
        parts = make_parts(plan, world, topology, groups, stage.layers, book, announced)
        numbers = move_numbers(plan, parts)
        stepper = _stepper(plan, parts, model, stage, dataset.info, communicator, undo)
        samples = samples_of(plan, parts, model, dataset, stepper)
        memory = memory_of(plan, parts, stepper, numbers, undo)
    if parts.store.canonical is not None:
        notes.append(cost_note(parts, plan.num_micros(topology)))
    if not world.is_fake:
        refuse_left_over(model, stage.layers)  # from here on nobody looks at layers of other ranks
    return Run(
        plan,
        parts,
        stepper,
        samples,
        outputs_of(plan, world, stepper, topology, folder),
        memory,
        WeightLoader(names, parts, stepper.update.masters),
        checkpoints_of(plan, parts, stepper, samples, memory, model, folder),
        AssemblyFacts(*sizes, notes, _found(plan, world, costs)),
    )


def _attach_attention(plan: Plan, groups: Groups, model: Model, undo: ExitStack) -> None:
    if plan.sequence is None or groups["sp"].size == 1:
        return
    attention: SequenceCommunicator = plan.sequence.build(groups["sp"])
    attention.attach(model.layers)
    undo.callback(attention.detach)


def _materialize(plan: Plan, world: World, model: Model, stage: Stage, shards: Shards) -> None:
    """Gives this rank's layers memory and first values; in a fake world none, where layers are cut already."""
    if not world.device.is_real:
        return
    if world.is_fake:
        imagine(stage.layers, dtype=dtypes(plan)[1], device=world.device.torch_device)
        return
    materialize(
        model.layers,
        seed=plan.run.seed,
        init_weights=model.init_weights,
        dtype=dtypes(plan)[1],
        device=world.device.torch_device,
        owned={layer.name for layer in stage.layers},
        cut={key: shard.cut for key, shard in shards.items()},
    )


def make_parts(
    plan: Plan,
    world: World,
    topology: Topology,
    groups: Groups,
    layers: Sequence[Layer],
    book: ParameterBook,
    announced: Foretold | None = None,
) -> Parts:
    """Returns what plugins are attached to; the gradient store has no buffers if no rank shares this one's weights."""
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
        book,
        GradientStore(book, DTYPES[plan.precision.gradients], device, state, planner, canonical),
        WeightStore(dtypes(plan)[0]),
        Waits(),
        WeightQueue(),
        StepNumbers(groups),
        pool=Pools(plan),
        foretold=announced,
    )


def _stepper(
    plan: Plan,
    parts: Parts,
    model: Model,
    stage: Stage,
    info: DataInfo,
    communicator: WeightCommunicator | None,
    undo: ExitStack,
) -> Stepper:
    """Returns what takes this rank's steps. Attaches all plugins' objects to `parts`; `undo` detaches them."""
    topology, device = parts.topology, parts.world.device
    hooks: list[SchedulerHook] = [component.build(parts) for component in plan.scheduler_hooks]
    if plan.model.config.compile:
        compile_layers(stage.layers, undo)
    undo.callback(parts.store.close)
    handlers: list[GradientHandler] = [component.build() for component in plan.gradient_handlers]
    for handler in handlers:
        handler.attach(parts)
        undo.callback(handler.detach)
    # A hook or handler that knows nothing of shards may read weights at any time.
    parts.weights.is_eager = bool(hooks) or not all(_takes_shards(one.record) for one in plan.gradient_handlers)
    crossing = Crossing(stage.lists.placement, stage.lists.stage, _link(plan, parts))
    check_no_parameters(loss := plan.loss.build())
    if hasattr(loss, "attach"):
        loss.attach(parts)
    update = make_update(plan, parts)
    if communicator is not None:
        communicator.attach(parts)
        undo.callback(close_stand_ins, parts.book)
        undo.callback(communicator.detach)
    policy: ActivationPolicy = plan.activations.build([layer.name for layer in model.layers])
    policy.attach(parts)
    undo.callback(policy.detach)
    parts.numbers.agree()
    standing = parts.groups.progress.standing = parts.store.state.standing
    caller = LayerCaller(device, plan.run.seed, policy, hooks, parts.groups["sp"].coord, parts.waits, standing)
    fields = sliced_info(info, topology.sp).fields
    is_additive = (
        isinstance(plan.loss.record, LossRecord) and plan.loss.record.split_logits
    )  # core's own: a sum over positions
    asks = topology.sp > 1 and not is_additive and not parts.world.is_fake
    over_positions = OverPositions(loss, fields) if asks else None
    is_canonical = parts.store.canonical is not None
    executor = Executor(
        stage.chunks,
        crossing,
        caller,
        loss,
        fields,
        device,
        hooks,
        parts.queue,
        communicator,
        over_positions,
        keeps_apart=is_canonical,
    )
    compare = None if parts.world.is_fake else partial(check_first_values, parts, model.per_rank_buffers)
    stepper = Stepper(
        executor, stage.lists, parts.store, handlers, update, parts.groups, device, undo, compare, parts.events
    )
    splits = stage.lists.splits_backward(plan.num_micros(topology))
    if splits or is_canonical or _accumulates_directly(plan, device):
        all_types = splits or is_canonical  # the same products in every layout
        undo.callback(accumulate_directly(parts.layers, parts.book, parts.store, parts.queue, all_types=all_types))
    if is_canonical:
        undo.callback(add_rows_directly(parts.layers, parts.book, parts.store, parts.queue))
    parts.store.watch()
    return stepper


def _takes_shards(record: object) -> bool:
    return isinstance(record, GradientHandlerRecord) and (record.takes_shards or record.result == "shard")


def _link(plan: Plan, parts: Parts) -> StageLink | None:
    """Returns the plan's stage link, prepared; None if there is only one stage."""
    if plan.link is None or parts.topology.pp == 1:
        return None
    link: StageLink = plan.link.build()
    link.prepare(parts)
    return link


def _accumulates_directly(plan: Plan, device: Device) -> bool:
    wanted = plan.precision.accumulation
    return wanted == "direct" or (wanted == "auto" and device.gains_from_direct_gradients)


def _found(plan: Plan, world: World, costs: list[float]) -> dict[KeyPath, Any]:
    """Returns values for the resolved plan that only the run could determine."""
    is_timed = layer_costs.are_timed(plan) and not world.is_fake
    return {("partition", "layer_costs"): costs} if is_timed else {}
