"""Attaches the objects of all plugins to a run's parts, in one order on every rank, and builds the stepper from them, with its
masters and optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from sley_core.data.batches import sliced_info
from sley_core.draft import dtypes
from sley_core.engine.call import LayerCaller, compile_layers
from sley_core.engine.direct import accumulate_directly, accumulates_directly, add_rows_directly
from sley_core.engine.execute import Executor
from sley_core.engine.in_flight import Crossing
from sley_core.engine.positions import OverPositions, PositionProbe, WholeSequences, is_of_whole_sequences
from sley_core.engine.replicas import CopyComparison, WriteWatch
from sley_core.engine.shards import close_stand_ins
from sley_core.engine.stepper import Stepper
from sley_core.engine.totals import LossScale, Skips
from sley_core.engine.update import Update
from sley_core.engine.weights import Masters
from sley_core.errors import PlanError
from sley_core.optim.build import EVERYWHERE_ALIKE, parameter_groups
from sley_core.optim.config import scope_of
from sley_core.optim.shared import PLAIN, Traits
from sley_core.optimizer_probe import ToyParameters, Unfit, examine
from sley_core.records import GradientHandlerRecord, LossRecord, OffloadManagerRecord, steps_on_host

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import torch

    from sley_core.data.dataset import DataInfo
    from sley_core.engine.parts import Parts
    from sley_core.engine.stage import Stage
    from sley_core.model.layers import Model
    from sley_core.plan.plan import Component, Plan
    from sley_core.protocols import ActivationPolicy, GradientHandler, SchedulerHook, StageLink, WeightCommunicator


def stepper_of(
    plan: Plan,
    parts: Parts,
    model: Model,
    stage: Stage,
    info: DataInfo,
    communicator: WeightCommunicator | None,
    undo: ExitStack,
    apart: Sequence[str] | None = None,
    *,
    checks: bool,
) -> Stepper:
    """Attaches all plugins' objects to `parts`, and returns the stepper of this rank; `undo` detaches them.

    apart: patterns of names of layers that are not asked whether they mix positions; None if none is. checks: whether what the
    model's code does is checked by the values of tensors.
    """
    topology, device = parts.topology, parts.world.device
    hooks: list[SchedulerHook] = [component.build(parts) for component in plan.scheduler_hooks]
    if plan.model.config.compile:
        compile_layers(stage.layers, undo)
    undo.callback(parts.store.close)
    handlers: list[GradientHandler] = [component.build() for component in plan.gradient_handlers]
    for handler in handlers:
        handler.attach(parts)
        undo.callback(handler.detach)
    # A hook, or a handler that does not support shards, may read weights at any time.
    records = [handler.record for handler in plan.gradient_handlers if isinstance(handler.record, GradientHandlerRecord)]
    parts.weights.is_eager = bool(hooks) or not all(one.takes_shards or one.result == "shard" for one in records)
    crossing = Crossing(stage.lists.placement, stage.lists.stage, _link(plan, parts))
    loss = plan.loss.build()
    if not type(loss).__module__.startswith("sley_core."):
        from sley_core.engine.refusals import check_no_parameters

        check_no_parameters(loss)
    if hasattr(loss, "attach"):
        loss.attach(parts)
    update = make_update(plan, parts, model, checks=checks)
    if communicator is not None:
        communicator.attach(parts)
        undo.callback(close_stand_ins, parts.registry)
        undo.callback(communicator.detach)
    policy: ActivationPolicy = plan.activations.build([layer.name for layer in model.layers])
    policy.attach(parts)
    undo.callback(policy.detach)
    parts.numbers.agree()
    standing = parts.groups.progress.standing = parts.store.state.standing
    fields = sliced_info(info, topology.sp).fields
    is_asked = checks and apart is not None and topology.sp > 1
    caller = LayerCaller(
        device,
        plan.run.seed,
        policy,
        hooks,
        parts.groups["sp"].coord,
        parts.waits,
        standing,
        plan.limits.data_timeout_s,
        WriteWatch(parts, model.per_rank_buffers) if checks else None,
        PositionProbe(fields, (info.sequence or 0) // topology.sp, apart or ()) if is_asked else None,
    )
    is_additive = isinstance(plan.loss.record, LossRecord) and plan.loss.record.split_logits  # core's own: a sum over positions
    is_whole = topology.sp > 1 and is_of_whole_sequences(plan)
    asks = checks and topology.sp > 1 and not is_additive and not is_whole
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
        WholeSequences(fields, parts.groups["sp"]) if is_whole else None,
        keeps_apart=is_canonical,
    )
    compare = CopyComparison(parts, model.per_rank_buffers) if checks else None
    stepper = Stepper(executor, stage.lists, parts.store, handlers, update, parts.groups, device, undo, compare, parts.events)
    splits = stage.lists.splits_backward(plan.num_micros(topology))
    if splits or is_canonical or accumulates_directly(plan.precision.accumulation, device):
        all_types = splits or is_canonical  # the same products in every layout
        undo.callback(accumulate_directly(parts.layers, parts.registry, parts.store, parts.queue, all_types=all_types))
    if is_canonical:
        undo.callback(add_rows_directly(parts.layers, parts.registry, parts.store, parts.queue))
    parts.store.watch()
    return stepper


def _link(plan: Plan, parts: Parts) -> StageLink | None:
    """Returns the plan's stage link, prepared; None if there is only one stage."""
    if plan.link is None or parts.topology.pp == 1:
        return None
    link: StageLink = plan.link.build()
    link.prepare(parts)
    return link


def make_update(plan: Plan, parts: Parts, model: Model, *, checks: bool) -> Update:
    """Builds masters and optimizer for the trainable parameters, and rounds the frozen ones to the working dtype; returns the
    update. model: the whole one, whose parameters say on what kinds an optimizer of the user's own is tried. checks: whether it
    is tried.

    Raises PlanError `optimizer-unfit`, the same on every rank, if it cannot be stepped right.
    """
    config: Any = plan.optimizer.config
    device = parts.world.device
    home = device.host if any(steps_on_host(manager.record) for manager in plan.offload) else None
    masters = Masters(parts.weights, parts.store, dtypes(plan)[1], home)
    masters.add(parts.registry.trainable)
    for param in parts.registry:
        if not param.trainable:
            parts.weights.adopt(param)
    place = home or device.torch_device
    # Canonical sums on a CPU: a shard ends elsewhere than its tensor, so kernels must round all elements alike.
    is_alike = parts.store.canonical is not None and plan.optimizer.record is not None and place.type == "cpu"
    groups_of = partial(parameter_groups, config=config, more=EVERYWHERE_ALIKE if is_alike else None)
    factor = plan.learning_rate.build(plan.run.steps)
    is_tried = checks and not plan.optimizer.name.startswith("core.")
    traits = _traits(plan, model, factor, masters.wide, place) if is_tried else PLAIN
    return Update(
        parts.store,
        masters,
        plan.optimizer.build(groups_of(masters.stepped), place),
        groups_of,
        factor,
        parts.groups,
        parts.world.device,
        parts.numbers,
        clip_norm=config.clip_norm,
        norm_kind=math.inf if config.clip_kind == "inf" else config.clip_kind,
        scale=None if plan.precision.loss_scale is None else LossScale(plan.precision.loss_scale),
        events=parts.events,
        skips=None if plan.run.max_skips is None else Skips(plan.run.max_skips),
        traits=traits,
        seed=plan.run.seed,
    )


def _traits(plan: Plan, model: Model, factor: Callable[[int], float], dtype: torch.dtype, place: torch.device) -> Traits:
    """Returns the traits of the plan's optimizer. Raises PlanError `optimizer-unfit` if a run cannot step it right."""
    every = {one.ndim for layer in model.layers for one in layer.module.parameters() if one.requires_grad}
    changes = any(factor(step) != 1.0 for step in range(0, plan.run.steps, 1 + plan.run.steps // 100))
    traits, faults = try_optimizer(plan, every, dtype, place, lr_changes=changes)
    if traits.draws and plan.parallel.reduction == "canonical" and _is_cut(plan):
        message = "draws random numbers for the parameters that a rank steps, so layouts that cut the model differ"
        faults.append(Unfit(message, 'leave `reduction = "canonical"` out, or `pp`, `wp` and shards'))
    if traits.has_modes and any(_steps_apart(component) for component in plan.offload):
        message = "switches weights between training and evaluation, which needs all of its states on the device at once"
        faults.append(Unfit(message, 'use `when = "idle"`, or `memory.host_optimizer`'))
    if faults:
        raise PlanError.many(
            plan.diagnostic(
                "optimizer-unfit", f"`{plan.optimizer.name}` {one.message}", ("optimizer", one.key), one.hint or None
            )
            for one in faults
        )
    return traits


def try_optimizer(
    plan: Plan, ndims: Collection[int], dtype: torch.dtype, place: torch.device, *, lr_changes: bool = True
) -> tuple[Traits, list[Unfit]]:
    """Tries the plan's optimizer on two small parameters of `dtype`, of the most and of the fewest dims of a model's; returns
    its traits, and what a run cannot do right with it. lr_changes: whether it must follow a learning rate that changes.
    """
    config: Any = plan.optimizer.config
    rates = {"lr": config.lr, "initial_lr": config.lr}
    options = [{**rates, "weight_decay": config.weight_decay}, {**rates, "weight_decay": 0.0}]
    given = ToyParameters(options, (max(ndims, default=1), min(ndims, default=1)), dtype, place)
    build = partial(_built, plan.optimizer, place)
    return examine(build, given, scope_of(plan.optimizer.record, plan.optimizer.config), lr_changes=lr_changes)


def _built(optimizer: Component, place: torch.device, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    built: torch.optim.Optimizer = optimizer.build(groups, place)
    return built


def _is_cut(plan: Plan) -> bool:
    """Returns whether ranks step other elements than one process does."""
    shards = any(getattr(one.record, "result", "full") == "shard" for one in plan.gradient_handlers)
    return plan.parallel.pp > 1 or plan.parallel.wp > 1 or shards


def _steps_apart(component: Component) -> bool:
    """Returns whether a manager brings only the states of what is stepped at a time to the device."""
    record = component.record
    assert isinstance(record, OffloadManagerRecord), component.name
    return record.scope(component.config) != "global" and not steps_on_host(record)
