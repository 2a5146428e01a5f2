"""Builds a run from a plan, in the same order on every rank.

draft: dataset, layers on meta, stages ──> groups, over which ranks compare plan, versions and model ──> shards ──> initial
values ──> parameter registry ──> `Parts` ──> plugins, optimizer, executor ──> feed ──> run
"""

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import torch

from sley_core.comm.world import Groups, World
from sley_core.data.batches import POSITIONS, add_positions, count_samples_per_epoch, open_dataset
from sley_core.data.dataset import AnyDataset, DataContext, DataInfo
from sley_core.engine.agreement import check_agreement
from sley_core.engine.boundary import Description
from sley_core.engine.buffers import WeightStore, group_by_reduce_group, plan_without_buffers
from sley_core.engine.direct import WeightQueue
from sley_core.engine.gradients import GradientStore
from sley_core.engine.parts import Parts, StepNumbers, StepState, Waits
from sley_core.engine.reduction import reduction_class
from sley_core.engine.registry import ParameterRegistry
from sley_core.engine.shards import SHARD_AXIS, Shards, check_hooks, plan_shards, refuse_unregistered, shard_on_meta
from sley_core.errors import KeyPath, PlanError, PluginError
from sley_core.losses.chunked_head import HeadChunks, LogitsHead
from sley_core.memory import DevicePool, OffloadManager
from sley_core.model.attention import KERNELS, find_attention_kernel
from sley_core.model.build import HostModel, build_on_meta, evaluation_notes, set_train_mode
from sley_core.model.layers import Layer, Model
from sley_core.model.tensors import matches_any
from sley_core.optim.learning_rate import factor_digest, learning_rate_factor
from sley_core.optim.optimizers import avoid_compiler_import, frozen_names
from sley_core.plan.check import require_valid
from sley_core.plan.loader import Plugin
from sley_core.plan.plan import Plan, format_values
from sley_core.plugin import CrossEntropyConfig
from sley_core.protocols import SequenceCommunicator, WeightCommunicator
from sley_core.records import OffloadManagerRecord, ProcessGroupRecord, steps_on_host
from sley_core.topology import AXES, GroupEntry, Topology
from sley_trainer.attach import StepProfiler, build_run_memory, build_samples, build_stepper, list_built_components
from sley_trainer.row_metrics import DOCUMENTS
from sley_trainer.run import Run
from sley_trainer.run_memory import OffloadMetrics
from sley_trainer.run_state import RunState
from sley_trainer.state_dict import check_extra_states, collect_names, load_weights
from sley_trainer.stepper import Stage, build_stage, count_layer_parameters, list_tie_groups, needs_timed_costs, time_layers


def assemble(plan: Plan, world: World, *, folder: Path | None = None, draft: "Draft | None" = None) -> Run:
    """Returns the run of `plan` on this rank of `world`. All ranks must call it.

    folder: the folder for metrics and profiles, or None on all ranks to write no files. draft: an unused draft of this plan for
    a world of this size; None builds a new draft. If `world` is simulated, no weights are allocated and no data is read; on the
    meta device, the run can be inspected but not stepped.

    Raises PlanError with all problems of the plan, and RunError if ranks disagree. An error undoes all patches of the model.
    """
    undo = ExitStack()  # detaches all parts from the model when the run closes
    with ExitStack() as on_error:
        on_error.callback(undo.close)
        require_valid(plan, world.size)
        if not plan.model.config.compile:
            avoid_compiler_import()
        topology = plan.topology(world.size)
        draft = draft or build_draft(plan, world)
        dataset, model, notes = draft.dataset, draft.model, draft.notes
        names, sizes = collect_names(model.layers), model.num_parameters()
        stage = draft.stage.for_stage(topology.coordinates(world.rank).stage)
        groups = build_groups(plan, world, topology, model, stage, dataset)
        simulation = world.simulation
        communicator: WeightCommunicator | None = plan.weights.build() if plan.weights else None
        if communicator is not None:
            communicator.prepare(model.layers)
        shards = plan_shards(model.layers, communicator.shard_dim, groups[SHARD_AXIS]) if communicator else {}
        check_hooks(stage.layers_by_position, shards, topology.sp)
        notes += describe_dtypes(plan, model)
        if simulation is None:
            notes += describe_attention(plan, model, world.device.torch_device)
        reduction_class(plan.parallel.reduction).check_model(stage.layers_by_position, model.per_rank_buffers)
        has_values, describe_output = simulation is None, None
        if simulation is None:
            shards = _initialize_weights(plan, world, model, stage, shards)
        else:
            describe_output = simulation.make_output_describer(plan, stage, dataset, weight_dtypes(plan)[0])
        sequence: SequenceCommunicator | None = None
        if plan.sequence is not None and topology.sp > 1:
            sequence = plan.sequence.build(groups["sp"])
            sequence.prepare(add_positions(dataset.info, topology.sp))
            sequence.attach(model.layers)
            undo.callback(sequence.detach)
        registry = ParameterRegistry(stage.chunks, stage.layers_by_position, shards)
        registry.base_checksums = model.base_digests
        if simulation is not None:
            shard_on_meta(stage.layers, shards)
            simulation.fill_layers(stage.layers, weight_dtypes(plan)[1])
        with world.device.as_default():
            head = find_head(plan, model.layers)
            if head is None and communicator is not None and shards:
                head = communicator.head
            parts = build_parts(plan, world, topology, groups, stage.layers, registry, describe_output, head)
            managers: list[OffloadManager] = [component.build() for component in plan.offload]
            if managers:  # before all ranks agree on the names of metrics
                tables = ((cast("OffloadManagerRecord", table.record), table.config) for table in plan.offload)
                offloaded = [part for record, config in tables for part in record.parts(config)]
                OffloadMetrics(parts.numbers, groups["all"].size, managers, offloaded)
            stepper = build_stepper(
                plan, parts, model, stage, dataset.info, communicator, undo, sequence, has_values=has_values
            )
            samples = build_samples(plan, parts, model, dataset, stepper, has_feed=has_values)
            memory = build_run_memory(parts, stepper, managers, undo)
        if has_values:
            check_extra_states(stage.layers)
            refuse_unregistered(model, stage.layers)  # comes last, since the code above still uses other ranks' layers
        writers = [component.build(folder) for component in plan.metrics] if folder and world.rank == 0 else []
        profiler = StepProfiler(plan.profile.steps, folder, world.rank, world.device) if folder and plan.profile else None
        state = RunState(
            plan,
            parts,
            stepper.update,
            samples.feed,
            memory,
            model.per_rank_buffers,
            list_built_components(plan, stepper),
            folder,
            draft.plan_values,
            notes,
        )
        load = partial(load_weights, names, parts, stepper.update.masters)
        run = Run(plan, parts, stepper, samples, writers, profiler, memory, load, state, sizes)
        on_error.pop_all()
        return run


def _initialize_weights(plan: Plan, world: World, model: Model, stage: Stage, shards: Shards) -> Shards:
    """Initialises this rank's layers; returns `shards` keyed by the ids of the new parameters. All ranks must call it."""
    with world.all_or_none(plan.limits.collective_timeout_s), world.device.as_default():
        host, layer_names = HostModel(model), {layer.name for layer in stage.layers}
        cuts, dtype = {key: shard.cut for key, shard in shards.items()}, weight_dtypes(plan)[1]
        parameters = host.load_values(layer_names, dtype=dtype, device=world.device.torch_device, shard=cuts)
        host.drop_other_layers(parameters, layer_names)
    if plan.run.keep_freed_memory and world.device.type == "cpu":
        keep_freed_memory()  # not earlier, so that the values of other ranks' layers are returned to the system
    return {id(parameters[key]): shard for key, shard in shards.items() if key in parameters}


def build_parts(
    plan: Plan,
    world: World,
    topology: Topology,
    groups: Groups,
    layers: Sequence[Layer],
    registry: ParameterRegistry,
    describe_output: Callable[[int, int], Description] | None = None,
    head: HeadChunks | None = None,
) -> Parts:
    """Returns this rank's `Parts`, to which plugins are attached next. describe_output: describes the output of a chunk of
    another stage in a fake world; else None. head: the last linear if the loss computes its logits in chunks; else None.
    """
    planner = plan_without_buffers if groups["stage"].size == 1 else group_by_reduce_group
    reduction = reduction_class(plan.parallel.reduction)(groups, StepState())
    gradients = DTYPES[plan.precision.gradients]
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
        GradientStore(registry, gradients, world.device.torch_device, reduction, planner),
        WeightStore(weight_dtypes(plan)[0], plan.precision.keep),
        Waits(),
        WeightQueue(),
        StepNumbers(groups),
        DevicePool(),
        is_compiled=bool(plan.model.config.compile),
        describe_output=describe_output,
        head=head,
    )


def build_groups(plan: Plan, world: World, topology: Topology, model: Model, stage: Stage, dataset: AnyDataset) -> Groups:
    """Creates and returns this rank's groups. All ranks must call it. Raises PluginError "plugin-failed" if a plugin lists
    invalid groups, and RunError "ranks-disagree" on every rank if ranks have different plans, versions, samples or models.
    """
    extra = [*list_tie_groups(stage, topology), *list_plugin_groups(plan, topology)]
    cross_memory = plan.parallel.cross_memory_attach
    groups = world.make_groups(topology, plan.limits.collective_timeout_s, extra, cross_memory=cross_memory)
    if world.simulation is not None:
        return groups
    with plan.document.locate_errors():
        num_samples = count_samples_per_epoch(dataset, plan.data.config)
    tensors = sha256()  # a factory may build different models on different ranks
    for layer in model.layers:
        for named_tensors in (layer.module.named_parameters, layer.module.named_buffers):
            for name, value in named_tensors(layer.name, remove_duplicate=False):
                tensors.update(f"{name} {list(value.shape)} {value.dtype}\n".encode())
    properties = {
        "the plan": plan.digest,
        "torch": torch.__version__,
        "the group table": sha256("\n".join(entry.label for entry in [*topology.groups(), *extra]).encode()).hexdigest(),
        "samples per epoch:": str(num_samples),
        "the model": tensors.hexdigest(),
    }
    control = groups["control"]
    if control.size > 1 and hasattr(dataset, "data_digest"):
        properties["data with the digest"] = str(dataset.data_digest)
    if plan.learning_rate.record is None:
        properties["learning rates with the digest"] = factor_digest(learning_rate_factor(plan), plan.run.steps)
    properties |= {f"plugin {name}": str(plugin) for name, plugin in plan.plugins.items()}
    check_agreement(properties, control, {"the plan": partial(format_values, plan)})  # a blocking collective over all ranks
    return groups


def list_plugin_groups(plan: Plan, topology: Topology) -> Iterator[GroupEntry]:
    """Yields the plugins' process groups, in the plan's order. Raises PluginError "plugin-failed" for an invalid group."""
    owners: dict[str, Plugin] = {}
    for plugin, records in plan.call("sley_process_groups", plan=plan, topology=topology):
        for record in records:
            if fault := _group_fault(record, topology, owners):
                message = f"{plugin.label} failed in sley_process_groups: {fault}"
                raise PluginError("plugin-failed", message, hint="report this to the plugin's authors")
            owners[record.axis] = plugin
            for ranks in record.ranks:
                for channel in record.channels:
                    yield GroupEntry(record.axis, channel, tuple(ranks), cross_memory=record.cross_memory)


def _group_fault(record: object, topology: Topology, owners: dict[str, Plugin]) -> str:
    """Returns the fault of a plugin's group, or "". owners: the plugin of each earlier group, keyed by axis."""
    if not isinstance(record, ProcessGroupRecord):
        return f"{record!r} must be a ProcessGroupRecord"
    group = f"the group {record.axis!r}"
    if record.axis in AXES or record.axis.startswith("tie[") or not record.axis:
        return f"{group} has an empty name, or a name that core uses for its own groups"
    if record.axis in owners:
        return f"{group} already exists; `{owners[record.axis].name}` defines it"
    members = [rank for ranks in record.ranks for rank in ranks]
    if not record.channels or any(list(ranks) != sorted(set(ranks)) for ranks in record.ranks):
        return f"{group} has no channel, or its ranks are not in ascending order"
    if len(members) != len(set(members)) or not set(members) <= set(range(topology.world_size)):
        return f"{group} has a rank twice, or a rank that is not one of the {topology.world_size} ranks of the world"
    return ""


DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The torch dtypes by their names in plans."""


@dataclass(frozen=True)
class Draft:
    """The dataset, the model on meta and this rank's stage, which `assemble` turns into a run. model: has no allocated memory.
    notes: messages for the user. plan_values: the plan values that only a run can determine, by their path in the plan.
    """

    dataset: AnyDataset
    model: Model
    stage: Stage
    notes: list[str]
    plan_values: dict[KeyPath, Any]


def build_draft(plan: Plan, world: World) -> Draft:
    """Returns the draft of a run. All ranks must call it, and all raise PlanError or another error if it fails on any rank."""
    with world.all_or_none(plan.limits.collective_timeout_s):  # one host may lack a data file, or the module of a factory
        num_samples = plan.run.steps * plan.batch.global_size
        dataset = open_dataset(plan.data, DataContext(plan.run.seed, "train", num_samples))
        model = build_meta_model(plan, dataset.info)
    costs, values = count_layer_parameters(model), dict[KeyPath, Any]()
    notes = [*evaluation_notes(model.layers)]
    if needs_timed_costs(plan) and world.simulation is None:
        costs = time_layers(plan, world, partial(build_meta_model, plan), weight_dtypes(plan)[0])
        values["partition", "layer_costs"] = costs
    elif needs_timed_costs(plan):
        name = plan.partition.name if plan.partition else ""
        notes.insert(0, f"`{name}` times layers in a run; here their parameters are counted instead")
    return Draft(dataset, model, build_stage(plan, plan.topology(world.size), world.rank, model, costs), notes, values)


def build_meta_model(plan: Plan, info: DataInfo) -> Model:
    """Builds the model on meta, freezes the parameters that the plan freezes, and returns the model in training mode. info: the
    declaration of the training data. Raises PlanError for any fault of the model, such as "sequence-positions" if each slice of
    a sequence would count its positions from 0.
    """
    plan.model.load()  # imported first, so that parameters created by the import do not count as parts of the build
    if plan.adapters is not None:
        plan.adapters.load()
    model = build_on_meta(plan.model, add_positions(info, plan.parallel.sp), plan.run.seed, plan.adapters)
    counts_positions = plan.sequence is not None and plan.parallel.sp > 1 and plan.sequence.config.positions
    if counts_positions and not any(POSITIONS in layer.fields for layer in model.layers):
        message = (
            f"no layer reads the field `{POSITIONS}`, so with `sp = {plan.parallel.sp}` the positions of every slice "
            "would start at 0"
        )
        hint = f"add the parameter `{POSITIONS}` to a forward, or set `[sequence] positions = false` if none needs it"
        raise PlanError.from_diagnostics([plan.diagnostic("sequence-positions", message, ("parallel", "sp"), hint)])
    registry = ParameterRegistry([model.layers])
    optimizer: Any = plan.optimizer.config
    aliases = {alias: param.name for param in registry for alias in param.aliases}
    for name in frozen_names(registry.names, optimizer, aliases):
        registry[name].parameter.requires_grad_(False)
    find_head(plan, model.layers)  # may raise
    set_train_mode(model)
    return model


def find_head(plan: Plan, layers: Sequence[Layer]) -> HeadChunks | None:
    """Returns an object that computes the loss of the model's head in chunks of tokens, or None if the plan does not set
    `[loss] chunk_tokens`. layers: all layers of the model. Raises PlanError if the loss cannot be computed in chunks.
    """
    config = plan.loss.config
    if not isinstance(config, CrossEntropyConfig) or config.chunk_tokens is None:
        return None
    return HeadChunks.find(layers, None if config.chunk_tokens == "auto" else config.chunk_tokens, *LogitsHead.refusal)


def weight_dtypes(plan: Plan) -> tuple[torch.dtype, torch.dtype]:
    """Returns the dtype of the weights in the forward, and of the weights that the optimizer updates (at least fp32)."""
    working = DTYPES[plan.precision.compute]
    return working, torch.promote_types(working, torch.float32)


def describe_dtypes(plan: Plan, model: Model) -> list[str]:
    """Returns a note on the dtypes of parameters and buffers if the plan computes in a narrow dtype, else []. Raises PlanError
    "precision-keep" if a pattern of `[precision] keep` matches no parameter, or if it matches one and a part needs all weights
    in one dtype: a gradient handler that returns shards, or an offload manager that updates on the host.
    """
    working, master = weight_dtypes(plan)
    keep = plan.precision.keep
    parameters = {name: param for layer in model.layers for name, param in layer.module.named_parameters(layer.name)}
    wide = [name for name in parameters if matches_any(name, keep)]
    faults = [
        f"`{pattern}` matches no parameter" for pattern in keep if not any(matches_any(name, [pattern]) for name in parameters)
    ]
    if wide and working != master:
        flat = [table.name for table in plan.gradient_handlers if getattr(table.record, "result", "") == "shard"]
        flat += [component.name for component in plan.offload if steps_on_host(component.record)]
        faults += [f"`{name}` stores all weights in one buffer of one dtype" for name in flat]
    if faults:
        hint = "use names that `train-cli show` prints; or use a handler or manager that allows several dtypes"
        path = ("precision", "keep")
        raise PlanError.from_diagnostics([plan.diagnostic("precision-keep", fault, path, hint) for fault in faults])
    if working == master:
        return []
    working_name, master_name = (str(dtype).removeprefix("torch.") for dtype in (working, master))
    note = f"{len(parameters) - len(wide)} parameters compute in {working_name}, and are updated in {master_name}"
    note += f"; {len(wide)} stay in {master_name}" if wide else ""
    buffers = [buffer for layer in model.layers for buffer in layer.module.buffers()]
    if num_kept := sum(buffer.is_floating_point() and buffer.dtype != working for buffer in buffers):
        note += f"; {num_kept} buffers keep their dtypes"
    return [note]


def describe_attention(plan: Plan, model: Model, device: torch.device) -> list[str]:
    """Returns a note with the name of torch's kernel for the model's attention, if `[model] attention` names such a kernel, or
    if it is "auto", a module has a `head_dim`, and `device` is not a CPU. Otherwise returns []. Raises PlanError
    "attention-kernel" if the kernel in `[model] attention` cannot compute the attention.
    """
    name = plan.model.config.attention
    modules = [module for layer in model.layers for module in layer.module.modules()]
    head_dims = [dim for module in modules if isinstance(dim := getattr(module, "head_dim", None), int)]
    if name not in KERNELS and (name != "auto" or device.type == "cpu" or not head_dims):
        return []
    is_packed = any(DOCUMENTS in layer.fields for layer in model.layers)
    head_dim = head_dims[0] if head_dims else 64  # a width that all kernels support
    kernel = find_attention_kernel(name, head_dim, device, weight_dtypes(plan)[0], is_packed=is_packed)
    return [f"attention uses torch's kernel `{kernel}`"]


_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD = -1, -3, 32 << 20
"""`M_TRIM_THRESHOLD` and `M_MMAP_THRESHOLD` of glibc's malloc.h, and the largest value, in bytes, of `M_MMAP_THRESHOLD`."""

_TUNING_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
"""The environment variables that tune glibc's malloc."""


def keep_freed_memory() -> bool:
    """Makes glibc keep the freed memory of this process, and returns whether it does. Returns False if environment variables
    tune malloc, or if the C library has no `mallopt`. By default glibc maps large blocks again in each step, which causes
    thousands of page faults, up to 4 % of a step's time (docs/measurements.md).
    """
    if any(name in os.environ for name in _TUNING_VARIABLES) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD)) and bool(mallopt(_TRIM_THRESHOLD, -1))  # never trims
