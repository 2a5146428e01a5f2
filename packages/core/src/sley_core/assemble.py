"""From a plan to a run, in one order on every rank; up to the parameter book the same in a fake world of any size.

checks ──> layers on meta, ties ──> groups, agree ──> book closed ──> layers materialised ──> store, handlers,
                                                                       optimizer ──> data ──> executor
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sley_core.comm.groups import Groups
from sley_core.comm.heap import keep_freed_memory
from sley_core.data.dataset import DataContext
from sley_core.data.factory import open_dataset
from sley_core.data.feed import Feed
from sley_core.data.slices import POSITIONS, Slices, sliced_info
from sley_core.data.vocabulary import check_tokens
from sley_core.engine import layer_costs
from sley_core.engine.book import ParameterBook
from sley_core.engine.call import LayerCaller
from sley_core.engine.crossing import Crossing
from sley_core.engine.direct import accumulate_directly
from sley_core.engine.evaluate import Evaluation
from sley_core.engine.execute import Executor
from sley_core.engine.first_values import check_first_values
from sley_core.engine.load import WeightLoader
from sley_core.engine.loss_scale import LossScale
from sley_core.engine.masters import Masters
from sley_core.engine.profile import StepProfiler
from sley_core.engine.shards import AXIS, cut_on_meta, left_whole, shards_of
from sley_core.engine.stage import Stage, stage_of
from sley_core.engine.step_state import StepState
from sley_core.engine.stepper import Stepper
from sley_core.engine.store import GradientStore, by_reduce_group, loose
from sley_core.engine.timeline import StepTimeline
from sley_core.engine.update import Update
from sley_core.errors import PlanError
from sley_core.join import join
from sley_core.losses.parameters import check_no_parameters
from sley_core.metrics.throughput import Meter
from sley_core.model.buffers import BufferWatch
from sley_core.model.build import build_on_meta
from sley_core.model.layers import Model
from sley_core.model.materialize import materialize
from sley_core.optim.groups import frozen, parameter_groups
from sley_core.plan.check import check_plan
from sley_core.records import ScheduleRecord
from sley_core.run import Run

if TYPE_CHECKING:
    from sley_core.comm.device import Device
    from sley_core.comm.world import World
    from sley_core.data.dataset import AnyDataset, DataInfo
    from sley_core.plan.plan import Plan
    from sley_core.protocols import GradientHandler, SchedulerHook, SequenceAttention, StageLink, WeightCommunicator
    from sley_core.topology import Topology

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}


def assemble(plan: Plan, world: World, *, folder: Path | None = None) -> Run:
    """The run of `plan` on this rank of `world`; every rank calls it, and it communicates.

    folder: the run's folder, in which rank 0's metrics writers and the profiler write; None, on all ranks, writes nothing.
    In a fake world nothing is allocated and no data is read: the run can be looked at, not stepped.
    Raises PlanError for whatever the plan's checks find, RunError where ranks disagree.
    """
    if problems := check_plan(plan, world.size):
        raise PlanError.many(problems)
    if plan.run.keep_freed_memory and world.device.torch_device.type == "cpu":
        keep_freed_memory()
    topology = plan.topology(world.size)
    dataset = open_dataset(plan.data, DataContext(plan.run.seed, "train"))
    model = draft_model(plan, dataset.info)
    sizes = model.num_parameters()
    costs, notes = _layer_costs(plan, world, model)
    stage = stage_of(plan, topology, world.rank, model, costs)
    groups = join(plan, world, topology, model, stage, dataset)
    attention: SequenceAttention | None = None
    if plan.sequence is not None and topology.sp > 1:
        attention = plan.sequence.build(groups["sp"])
        attention.attach(model.layers)
    communicator: WeightCommunicator | None = plan.weights.build() if plan.weights else None
    if communicator is not None:
        communicator.prepare(model.layers)
    shards = shards_of(model.layers, communicator.cuts, groups[AXIS]) if communicator else {}
    notes = notes + left_whole(model.layers, shards)
    book = ParameterBook(stage.chunks, stage.stages, shards)
    loader = WeightLoader(model.layers)
    if world.is_fake:
        cut_on_meta(stage.layers, shards)
    else:
        materialize(
            model.layers,
            seed=plan.run.seed,
            init_weights=model.init_weights,
            dtype=_dtypes(plan)[1],
            device=world.device.torch_device,
            owned={layer.name for layer in stage.layers},
            cut={key: shard.cut for key, shard in shards.items()},
        )
    run = _run(plan, world, topology, groups, model, stage, book, dataset, communicator, folder)
    run.dataset, run.attention, run.notes = dataset, attention, run.notes + notes
    run.num_parameters, run.num_trained = sizes
    run.weight_loader = loader
    if layer_costs.are_timed(plan) and not world.is_fake:
        run.found["partition", "layer_costs"] = costs
    return run


def draft_model(plan: Plan, info: DataInfo) -> Model:
    """The model on meta, with what the plan freezes frozen.

    Raises PlanError as `sliced_info`, `build_on_meta` and `frozen` do, and "sequence-positions" for a model that would
    count the positions of every slice from 0.
    """
    plan.model.load()  # what modules make when they are imported is no part of the build
    model = build_on_meta(plan.model, sliced_info(info, plan.parallel.sp), plan.run.seed)
    _check_positions(plan, model)
    book = ParameterBook([model.layers])
    optimizer: Any = plan.optimizer.config
    aliases = {alias: entry.name for entry in book for alias in entry.aliases}
    for name in frozen(book.names, optimizer, aliases):
        book[name].parameter.requires_grad_(False)
    return model


def _check_positions(plan: Plan, model: Model) -> None:
    if plan.sequence is None or plan.parallel.sp == 1 or not plan.sequence.config.positions:
        return
    if not any(POSITIONS in layer.fields for layer in model.layers):
        message = (
            f"no layer takes the field `{POSITIONS}`, so each of `sp = {plan.parallel.sp}` slices would count from 0"
        )
        hint = f"name `{POSITIONS}` in the forward that needs them; or `[sequence] positions = false` if none does"
        raise PlanError.many([plan.diagnostic("sequence-positions", message, ("parallel", "sp"), hint)])


def _layer_costs(plan: Plan, world: World, model: Model) -> tuple[list[float], list[str]]:
    """What the partition goes by, and what is to be said about it."""
    if not layer_costs.are_timed(plan):
        return layer_costs.by_parameters(model), []
    if world.is_fake:
        assert plan.partition is not None, "a partition is timed"
        name = plan.partition.name
        return layer_costs.by_parameters(model), [f"`{name}` times layers in a run; here they are cut by parameters"]
    return layer_costs.timed(plan, world, partial(draft_model, plan), _dtypes(plan)[0]), []


def _run(
    plan: Plan,
    world: World,
    topology: Topology,
    groups: Groups,
    model: Model,
    stage: Stage,
    book: ParameterBook,
    dataset: AnyDataset,
    communicator: WeightCommunicator | None,
    folder: Path | None,
) -> Run:
    state = StepState()
    planner = loose if groups["stage"].size == 1 else by_reduce_group
    store = GradientStore(book, DTYPES[plan.precision.gradients], world.device.torch_device, state, planner)
    policy = plan.activations.build([layer.name for layer in model.layers])
    hooks: list[SchedulerHook] = []
    caller = LayerCaller(world.device, plan.run.seed, policy, hooks, groups["sp"].coord)
    run = Run(plan, world, topology, groups, stage.layers, book, store, caller)
    hooks.extend(component.build(run) for component in plan.scheduler_hooks)
    if plan.model.config.compile:
        for layer in stage.layers:
            layer.module.compile()
    handlers: list[GradientHandler] = [component.build() for component in plan.gradient_handlers]
    for handler in handlers:
        handler.attach(run)
    link = _link(plan, run)
    crossing = Crossing(stage.lists.placement, stage.lists.stage, link)
    check_no_parameters(loss := plan.loss.build())
    fields = sliced_info(dataset.info, topology.sp).fields
    executor = Executor(stage.chunks, crossing, caller, loss, fields, world.device, hooks)
    run.slices = Slices(dataset.info.fields, topology.sp, groups["sp"].coord, loss if executor.has_loss else None)
    run.stepper = Stepper(executor, stage.lists, store, handlers, _update(plan, run), groups, world.device)
    if communicator is not None:
        communicator.attach(run)
        executor.weights = communicator
    splits = stage.lists.splits_backward(plan.num_micros(topology))
    if splits or _accumulates_directly(plan, world.device):
        run.stepper.on_close.append(accumulate_directly(run.layers, book, store, executor.queue, all_types=splits))
    store.watch()
    run.meter = Meter.of(run, model.layers, dataset.info)
    if not world.is_fake:
        _open_data(plan, run, model, dataset, executor)
    if folder is not None:
        _open_outputs(plan, run, folder)
    return run


def _link(plan: Plan, run: Run) -> StageLink | None:
    """The stage link that the schedule's record names, where there is another stage."""
    if plan.pipeline is None or run.topology.pp == 1:
        return None
    record, plugin = plan.pipeline.record, plan.pipeline.plugin
    assert isinstance(record, ScheduleRecord), plan.pipeline
    assert plugin is not None, plan.pipeline
    link: StageLink = plugin.build_of(replace(record, build=record.link))()
    link.prepare(run)
    return link


def _accumulates_directly(plan: Plan, device: Device) -> bool:
    wanted = plan.precision.accumulation
    return wanted == "direct" or (wanted == "auto" and device.gains_from_direct_gradients)


def _update(plan: Plan, run: Run) -> Update:
    config: Any = plan.optimizer.config
    working, wide = _dtypes(plan)
    masters = Masters(working, wide)
    masters.add(run.book.trainable)
    for entry in run.book:
        if not entry.trainable:
            entry.parameter.data = entry.parameter.data.to(working)
    optimizer = plan.optimizer.build(parameter_groups(masters.stepped, config), run.world.device.torch_device)
    return Update(
        run.store,
        masters,
        optimizer,
        partial(parameter_groups, config=config),
        plan.learning_rate.build(plan.run.steps),
        run.groups,
        run.world.device,
        clip_norm=config.clip_norm,
        norm_kind=math.inf if config.clip_kind == "inf" else config.clip_kind,
        scale=None if plan.precision.loss_scale is None else LossScale(plan.precision.loss_scale),
    )


def _dtypes(plan: Plan) -> tuple[torch.dtype, torch.dtype]:
    """The type of the working weights, and that of what the optimizer steps: fp32 at least."""
    working = DTYPES[plan.precision.compute]
    return working, torch.promote_types(working, torch.float32)


def _open_data(plan: Plan, run: Run, model: Model, dataset: AnyDataset, executor: Executor) -> None:
    rows = range(run.rows.start, run.rows.stop)
    data: Any = plan.data.config
    run.check_batch = partial(check_tokens, info=dataset.info)
    run.feed = Feed(
        dataset,
        seed=plan.run.seed,
        batch_size=plan.batch.global_size,
        rows=rows,
        shuffle=data.shuffle,
        timeout_s=plan.limits.data_timeout_s,
        check=lambda batch, samples: check_tokens(batch, dataset.info, samples),
    )
    run.stepper.agreement.first = partial(check_first_values, run, model.per_rank_buffers)
    run.check_first_step = BufferWatch(run.layers, model.per_rank_buffers).check
    if plan.evaluation is None:
        return
    held_out = open_dataset(plan.data, DataContext(plan.run.seed, "held_out"))
    run.evaluation = Evaluation(
        executor,
        run.stepper.lists,
        [layer.module for layer in run.layers],
        Feed(
            held_out,
            seed=plan.run.seed,
            batch_size=plan.batch.global_size,
            rows=rows,
            timeout_s=plan.limits.data_timeout_s,
            check=lambda batch, samples: check_tokens(batch, held_out.info, samples),
        ),
        run.slices,
        run.groups,
        run.world.device,
        run.stepper.agreement,
        num_batches=plan.evaluation.steps,
        num_micros=len(rows) // plan.batch.micro_size,
    )


def _open_outputs(plan: Plan, run: Run, folder: Path) -> None:
    if run.world.rank == 0:
        run.writers = [component.build(folder) for component in plan.metrics]
    if plan.timeline is not None:
        run.timeline = StepTimeline(plan.timeline.step, folder, run.stepper, run.topology, run.groups)
    if plan.profile is not None:
        first, last = plan.profile.steps
        run.profiler = StepProfiler(first, last, folder, run.world.rank, run.world.device)
