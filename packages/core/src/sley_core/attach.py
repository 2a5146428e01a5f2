"""Attaches the objects of all plugins to a run's parts, in one order on every rank, and builds the stepper from them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from sley_core.data.batches import sliced_info
from sley_core.engine.call import LayerCaller, compile_layers
from sley_core.engine.direct import accumulate_directly, accumulates_directly, add_rows_directly
from sley_core.engine.execute import Executor
from sley_core.engine.in_flight import Crossing
from sley_core.engine.positions import OverPositions, PositionProbe, WholeSequences, is_of_whole_sequences
from sley_core.engine.replicas import CopyComparison, WriteWatch
from sley_core.engine.shards import close_stand_ins
from sley_core.engine.stepper import Stepper
from sley_core.records import GradientHandlerRecord, LossRecord
from sley_core.updates import make_update

if TYPE_CHECKING:
    from sley_core.data.dataset import DataInfo
    from sley_core.engine.parts import Parts
    from sley_core.engine.stage import Stage
    from sley_core.model.layers import Model
    from sley_core.plan.plan import Plan
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
    parts.weights.is_eager = bool(hooks) or not all(_takes_shards(one.record) for one in plan.gradient_handlers)
    crossing = Crossing(stage.lists.placement, stage.lists.stage, _link(plan, parts))
    loss = plan.loss.build()
    if not type(loss).__module__.startswith("sley_core."):
        from sley_core.losses.parameters import check_no_parameters

        check_no_parameters(loss)
    if hasattr(loss, "attach"):
        loss.attach(parts)
    update = make_update(plan, parts, model, checks=checks)
    if communicator is not None:
        communicator.attach(parts)
        undo.callback(close_stand_ins, parts.book)
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
    is_additive = (
        isinstance(plan.loss.record, LossRecord) and plan.loss.record.split_logits
    )  # core's own: a sum over positions
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
    stepper = Stepper(
        executor, stage.lists, parts.store, handlers, update, parts.groups, device, undo, compare, parts.events
    )
    splits = stage.lists.splits_backward(plan.num_micros(topology))
    if splits or is_canonical or accumulates_directly(plan.precision.accumulation, device):
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
