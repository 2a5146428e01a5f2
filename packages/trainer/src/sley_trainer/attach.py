"""Attaches all plugins to a run's parts, in the same order on every rank, and builds the stepper and the optimizer."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from sley_core import protocols
from sley_core.comm.device import Device
from sley_core.data.batches import SequenceSlicer, add_positions, check_tokens
from sley_core.data.dataset import AnyDataset, DataInfo
from sley_core.data.feed import Feed
from sley_core.engine.agreement import CopyComparison, WriteWatch
from sley_core.engine.call import LayerCaller, compile_layers
from sley_core.engine.direct import patch_layers
from sley_core.engine.parts import Parts
from sley_core.engine.registry import check_no_parameters, parameter_roles
from sley_core.engine.step_batch import BatchSplitter, PositionAdditivity, WholeSequences, needs_whole_sequences
from sley_core.engine.weights import MasterWeights, MatrixOwners, OptimizerParam
from sley_core.errors import PlanError
from sley_core.losses.chunked_head import patch_head
from sley_core.memory import MemoryInventory, OffloadManager, Part
from sley_core.model.layers import Model
from sley_core.optim.config import scope_of
from sley_core.optim.learning_rate import learning_rate_factor
from sley_core.optim.optimizers import TORCH_TRAITS, UNIFORM_ROUNDING, parameter_groups
from sley_core.plan.plan import Component, Plan
from sley_core.plan.tables import CompileConfig
from sley_core.records import GradientHandlerRecord, LossRecord, steps_on_host
from sley_trainer.evaluation import EvaluationFeed, Metrics, build_evaluation_feeds, build_metrics, local_rows
from sley_trainer.execute import Executor, StageBoundaries
from sley_trainer.row_metrics import Meter, SourceSums
from sley_trainer.run_memory import RunMemory
from sley_trainer.stepper import Stage, Stepper
from sley_trainer.update import AVERAGE, Averages, Update, list_averages, named_tensors, optimizer_states

NamedTensors = Iterator[tuple[str, torch.Tensor]]


def build_stepper(
    plan: Plan,
    parts: Parts,
    model: Model,
    stage: Stage,
    info: DataInfo,
    weight_communicator: protocols.WeightCommunicator | None,
    undo: ExitStack,
    sequence_communicator: protocols.SequenceCommunicator | None = None,
    *,
    has_values: bool,
) -> Stepper:
    """Attaches the objects of all plugins to `parts`, and returns this rank's stepper. Closing `undo` detaches the objects.
    has_values: false in a simulated run; if true, the steps also check the model's code.
    """
    topology = parts.topology
    hooks: list[protocols.SchedulerHook] = [component.build(parts) for component in plan.scheduler_hooks]
    policy: protocols.ActivationPolicy = plan.activations.build([layer.name for layer in model.layers])
    if (config := plan.model.config.compile) and parts.world.simulation is None:
        head = parts.head and parts.head.layer  # a call of the head would return no tensor
        layers = [layer for layer in stage.layers if layer.name != head]
        compile_layers(layers, CompileConfig() if config is True else config, policy, undo)
    undo.callback(parts.store.close)
    handlers: list[protocols.GradientHandler] = [component.build() for component in plan.gradient_handlers]
    for handler in handlers:
        handler.attach(parts)
        undo.callback(handler.detach)
    # A hook, or a handler that does not support shards, may read weights at any time.
    records = [handler.record for handler in plan.gradient_handlers if isinstance(handler.record, GradientHandlerRecord)]
    parts.weights.is_eager = bool(hooks) or not all(record.accepts_shards or record.result == "shard" for record in records)
    link: protocols.StageLink | None = None
    if plan.link is not None and topology.pp > 1:
        link = plan.link.build()
        link.prepare(parts)
    loss = plan.loss.build()
    if not type(loss).__module__.startswith("sley_core."):
        check_no_parameters(loss)
    if hasattr(loss, "attach"):
        loss.attach(parts)
    for layer in parts.layers:
        if isinstance(layer.module, protocols.AttachedModule):
            layer.module.attach_to_run(parts)
    update = build_update(plan, parts, model, has_values=has_values)
    if weight_communicator is not None:
        weight_communicator.attach(parts)
        undo.callback(weight_communicator.detach)
    policy.attach(parts)
    undo.callback(policy.detach)
    parts.numbers.gather_names()
    step_progress = parts.groups.progress.step_progress = parts.store.state.step_progress
    fields = add_positions(info, topology.sp).fields
    additivity = whole_sequences = None
    if topology.sp > 1:
        if needs_whole_sequences(plan):
            whole_sequences = WholeSequences(fields, parts.groups["sp"])
        elif has_values and not (isinstance(plan.loss.record, LossRecord) and plan.loss.record.split_logits):
            additivity = PositionAdditivity(loss, fields)  # core's own loss is a sum over positions
    caller = LayerCaller(
        parts.world.device,
        plan.run.seed,
        policy,
        hooks,
        parts.groups["sp"].coord,
        parts.waits,
        step_progress,
        WriteWatch(parts, model.per_rank_buffers) if has_values else None,
        sequence_communicator if has_values else None,
    )
    boundaries = StageBoundaries(stage.action_lists.placement, stage.action_lists.stage, link)
    executor = Executor(parts, stage.chunks, boundaries, caller, loss, fields, weight_communicator, additivity, whole_sequences)
    compare = CopyComparison(parts, model.per_rank_buffers) if has_values else None
    stepper = Stepper(parts, executor, stage.action_lists, handlers, update, undo, compare, plan.model.config.attention)
    undo.callback(patch_layers(parts, splits_backwards=stage.action_lists.splits_backward(plan.num_microbatches(topology))))
    if parts.head is not None:
        undo.callback(patch_head(parts, parts.head))
    parts.store.install_hooks()
    return stepper


def build_update(plan: Plan, parts: Parts, model: Model, *, has_values: bool) -> Update:
    """Returns the update of the trainable parameters, with their master weights, optimizer and averages. Casts frozen
    parameters to the working dtype.

    has_values: false in a simulated run; if true, a user's optimizer is probed. Raises PlanError "optimizer-unfit" if the probe
    finds a fault, and "averaging-modes" if `[averaging]` is used with an optimizer that evaluates its own weights.
    """
    config: Any = plan.optimizer.config
    device = parts.world.device
    master_device = device.host_device if any(steps_on_host(manager.record) for manager in plan.offload) else None
    master_dtype = torch.promote_types(parts.weights.dtype, torch.float32)
    roles = parameter_roles(plan.optimizer, model.layers)
    owners = None
    if scope_of(plan.optimizer.record, config) != "elementwise":
        elementwise = {name for name, role in (roles or {}).items() if role.scope == "elementwise"}
        owners = MatrixOwners(parts.groups, parts.store, master_dtype, elementwise)
    masters = MasterWeights(parts.weights, parts.store, master_dtype, master_device, owners)
    masters.add(parts.registry.trainable)
    for param in parts.registry:
        if not param.trainable:
            parts.weights.adopt(param)
    optimizer_device = master_device or device.torch_device
    # With a fixed order of sums, CPU kernels must round every element alike: the tail of a shard is not the tail of its tensor.
    is_uniform = parts.store.reduction.has_fixed_order and plan.optimizer.record is not None and optimizer_device.type == "cpu"
    groups_of = partial(parameter_groups, config=config, extra_options=UNIFORM_ROUNDING if is_uniform else None, roles=roles)
    factor = learning_rate_factor(plan)
    traits = TORCH_TRAITS
    if has_values and not plan.optimizer.name.startswith("core."):
        from sley_trainer.optimizer_probe import probe_optimizer  # few plans need it

        traits = probe_optimizer(plan, parts, model, factor, masters.dtype, optimizer_device)
    averages = None if plan.averaging is None else Averages(plan.averaging.build(plan.run.steps), plan.averaging.name)
    if averages is not None and traits.has_modes:
        message = f"`{plan.optimizer.name}` evaluates and saves its own weights, so `{averages.name}` cannot average them"
        raise plan.add_locations(PlanError("averaging-modes", message, hint="remove [averaging]", path=("averaging",)))
    optimizer = plan.optimizer.build(groups_of(masters.optimizer_params), optimizer_device)
    return Update(parts, config, masters, optimizer, groups_of, factor, traits, averages)


def list_built_components(plan: Plan, stepper: Stepper) -> list[tuple[Component, object]]:
    """Returns the plan's components that have an object in the run, such as handlers and hooks, each with its object."""
    pairs = [
        (plan.weights, stepper.executor.communicator),
        (plan.link, stepper.executor.boundaries.link),
        *zip(plan.gradient_handlers, stepper.handlers, strict=True),
        *zip(plan.scheduler_hooks, stepper.executor.hooks, strict=False),
        (plan.activations, stepper.executor.caller.policy),
    ]
    return [(component, part) for component, part in pairs if component is not None]


@dataclass(frozen=True)
class Samples:
    """The data of a run on this rank. splitter: splits samples into microbatches. read_fields: the names of the fields that
    layers read. feed: yields the training samples; None in a simulated world. evaluation_feeds: the feeds of `[evaluation]` by
    set name; the held-out split has the name "". metrics: the metrics of evaluations.
    """

    dataset: AnyDataset
    splitter: BatchSplitter
    meter: Meter
    read_fields: frozenset[str]
    feed: Feed | None = None
    evaluation_feeds: Mapping[str, EvaluationFeed] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=Metrics)


class StepProfiler:
    """Records this rank's steps `steps[0]` to `steps[1]` (from 1, both included) in `folder/trace-rank{rank}.json`."""

    def __init__(self, steps: Sequence[int], folder: Path, rank: int, device: Device) -> None:
        self.first_step, self.last_step = steps
        self.path = folder / f"trace-rank{rank}.json"
        self._cuda = device.type == "cuda"
        self._profile: profile | None = None

    def before_step(self, step: int) -> None:
        """Starts the profiler if `step`, from 1, is the first step to record."""
        if step == self.first_step:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
            # There is only one cycle, but without `acc_events` torch 2.11 warns that it drops events of earlier cycles.
            self._profile = profile(activities=activities, acc_events=True)
            self._profile.start()

    def after_step(self, step: int) -> None:
        if step == self.last_step:
            self.close()

    def close(self) -> None:
        """Stops the profiler and writes the file, if the profiler runs; a run that ends early writes the steps so far."""
        if self._profile is not None:
            recorded, self._profile = self._profile, None
            recorded.stop()
            recorded.export_chrome_trace(str(self.path))


def build_samples(plan: Plan, parts: Parts, model: Model, dataset: AnyDataset, stepper: Stepper, *, has_feed: bool) -> Samples:
    """Returns the run's data. All ranks must call it. has_feed: whether the run reads samples; if not, there are no feeds."""
    executor, topology = stepper.executor, parts.topology
    whole_sequences = executor.whole_sequences
    loss = executor.loss if executor.has_loss and whole_sequences is None else None
    slicer = SequenceSlicer(dataset.info.fields, topology.sp, parts.groups["sp"].coord, loss)
    computes_weight = executor.has_loss and (whole_sequences is None or whole_sequences.is_counted)
    splitter = BatchSplitter(
        dataset.info,
        plan.batch.micro_size,
        slicer,
        executor.loss,
        computes_weight=computes_weight,
        weight_of_full_sequences=whole_sequences is not None,
        weight_per_microbatch=parts.store.reduction.has_fixed_order,
    )
    read_fields = frozenset(name for layer in model.layers for name in layer.fields)
    samples = Samples(dataset, splitter, Meter.for_run(plan, parts, model.layers, dataset.info), read_fields)
    if not has_feed:
        return samples
    if names := getattr(dataset, "sources", ()):
        sources = SourceSums(names, parts, executor.fields, executor.loss, splitter)
        executor.sources = stepper.update.sources = sources
    config: Any = plan.data.config
    info = dataset.info

    def feed(dataset: AnyDataset, batch_size: int, **options: bool) -> Feed:
        return Feed(
            dataset,
            seed=plan.run.seed,
            batch_size=batch_size,
            rows=local_rows(batch_size, parts),
            timeout_s=plan.limits.data_timeout_s,
            check=lambda batch, numbers: check_tokens(batch, info, numbers),
            **options,
        )

    return replace(
        samples,
        feed=feed(dataset, plan.batch.global_size, shuffle=config.shuffle, will_save=plan.checkpoint is not None),
        evaluation_feeds=build_evaluation_feeds(plan, parts, dataset.info, feed),
        metrics=build_metrics(plan, parts, dataset.info, has_tokens=samples.meter.unit == "tokens"),
    )


def build_run_memory(parts: Parts, stepper: Stepper, managers: Sequence[OffloadManager], undo: ExitStack) -> RunMemory:
    """Attaches the offload managers, after all other parts, and returns the run's memory. Closing `undo` detaches them."""
    update, boundaries = stepper.update, stepper.executor.boundaries

    def states() -> NamedTensors:
        """Yields the optimizer's states in the order of the parameters, then all other states, then averages of weights."""
        names = {id(entry.parameter) for entry in update.masters.optimizer_params}
        for entry in update.masters.optimizer_params:
            yield from states_of(entry)
        for key, state in update.optimizer.state.items():
            if id(key) not in names:
                yield from _prefix_names("optimizer", named_tensors(state))
        for entry, average in list_averages(update.averages, update.masters.local_params):
            yield f"{entry.name}.{AVERAGE}", average

    def states_of(optimizer_param: OptimizerParam) -> NamedTensors:
        return _prefix_names(optimizer_param.name, optimizer_states(update, optimizer_param))

    def trim() -> int:
        trim_link: Callable[[], int] = getattr(boundaries.link, "trim", lambda: 0)
        return trim_link() + parts.pool.trim()

    sources: dict[Part, Callable[[], Iterable[tuple[str, torch.Tensor]]]] = {
        "weights": lambda: ((param.name, param.parameter) for param in parts.registry),
        "buffers": lambda: (pair for layer in parts.layers for pair in layer.module.named_buffers(layer.name)),
        "masters": update.masters.named_tensors,
        "optimizer_states": states,
        "gradients": parts.store.named_tensors,
        "handlers": lambda: (pair for handler in stepper.handlers for pair in getattr(handler, "named_tensors", tuple)()),
        "pools": parts.pool.named_tensors,
    }
    device = parts.world.device
    inventory = MemoryInventory(device.torch_device, parts.store, sources, states_of, trim)
    for manager in managers if device.type != "meta" else ():  # tensors on meta have no memory to move
        manager.attach(parts, inventory)
        undo.callback(manager.detach)
    return RunMemory(device, inventory, managers, update.masters)


def _prefix_names(name: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> NamedTensors:
    return ((f"{name}.{inner}" if inner else name, tensor) for inner, tensor in tensors)
