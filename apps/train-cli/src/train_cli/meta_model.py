"""Builds the model and calls its layers on the meta device before any rank starts, to find wrong shapes and dtypes.

Otherwise a run would find these mistakes only in its first step. A note names the first layer that cannot run on meta.
"""

import os
import re
from collections.abc import Container, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from sley_core.comm.world import World
from sley_core.data.batches import SequenceSlicer, collate_function
from sley_core.data.dataset import BOUNDARY_FIELDS, SOURCE, AnyDataset, DataInfo, is_stream
from sley_core.errors import KeyPath, PlanError, RunError, SleyError, format_cause
from sley_core.model.build import check_written_buffers
from sley_core.model.layers import MODEL, Layer, Model
from sley_core.model.tensors import dtype_hint, matches_any, run_uncompiled, select_buffer_dtype, select_parameter_dtype
from sley_core.plan.plan import Plan
from sley_core.plugin import CrossEntropyConfig
from sley_core.records import ModelRecord
from sley_trainer.assemble import DTYPES, assemble, build_meta_model
from sley_trainer.execute import describe_output, require_scalar
from sley_trainer.run import Run
from sley_trainer.stepper import build_stage, count_layer_parameters
from train_cli.console import format_bytes, format_parameters


def check_model(plan: Plan, world: int, *, calls_layers: bool = False) -> list[str]:
    """Assembles rank 0 of `world` simulated ranks, with the code of a run but without tensor memory or peers. Returns notes:
    the number of parameters and, with `calls_layers`, the host memory of the initial values and the unchecked parts.

    calls_layers: whether to also call all layers and the loss on meta. Raises the errors of `assemble` and `check_layers`, and
    RunError "no-device" if the plan asks for CUDA and torch finds no CUDA device.
    """
    if plan.run.device == "cuda" and not torch.cuda.is_available():
        hint = 'use `device = "auto"` for the available device'
        message = "the plan asks for CUDA, but torch finds no CUDA device"
        raise plan.add_locations(RunError("no-device", message, path=("run", "device"), hint=hint))
    with World.fake(0, world) as fake, plan.document.locate_errors():
        with assemble(plan, fake) as run:
            dataset = run.dataset
            notes = [format_parameters(run.num_parameters, run.num_trained), *run.notes, *_describe_sharding(plan, run)]
        if calls_layers:
            model = build_meta_model(plan, dataset.info)
            on_gpus = plan.run.device != "cpu" and torch.cuda.is_available()
            notes += _describe_host_memory(model, min(world, torch.cuda.device_count()) if on_gpus else world)
            record = plan.model.record
            if isinstance(record, ModelRecord) and record.compare is not None:
                notes.append(record.load(record.compare)(plan.model.config))
            positions = build_stage(plan, run.topology, 0, model, count_layer_parameters(model)).layers_by_position
            note = check_layers(plan, model, dataset, {layers[-1].name for _, layers in positions[:-1]})
            notes += [note] if note else []
        # Ranks open the dataset again in their own processes, so its workers must end here.
        if world > 1 and callable(close := getattr(dataset, "close", None)):
            close()
    return notes


def _describe_host_memory(model: Model, ranks_per_host: int) -> list[str]:
    """Returns notes on the host memory of the initial values of `model`, and on a factory that does not run on meta. Layers
    that have a builder do not count; a rank creates all other layers at once. ranks_per_host: the number of ranks on a host.
    """
    tensors = {
        id(tensor): tensor.nbytes
        for layer in model.layers
        if layer.builder is None
        for tensor in (*layer.module.parameters(), *layer.module.buffers())
    }
    notes, num_bytes = [], sum(tensors.values())
    if num_bytes:
        total, available = num_bytes * ranks_per_host, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        note = f"to create the model's initial values, each rank temporarily needs {format_bytes(num_bytes)} of host memory"
        note += f", and the {ranks_per_host} ranks of a host need {format_bytes(total)}" if ranks_per_host > 1 else ""
        if total > available:
            note += f"; this host has only {format_bytes(available)}, so return builders (docs/save-resume-load.md)"
        notes.append(note)
    if model.recipe is not None and model.recipe.meta_error:
        notes.append(f"the factory does not run on meta, so this check also used this memory: {model.recipe.meta_error}")
    return notes


def _describe_sharding(plan: Plan, run: Run) -> list[str]:
    """Returns a note on the share of the first stage's parameters that are sharded; [] if the plan does not shard weights."""
    if plan.parallel.wp == 1 or plan.weights is None:
        return []
    numels = {param.name: prod(param.shape) for param in run.registry}
    unsharded = {param.name: numels[param.name] for param in run.registry if param.shard is None}
    note = f"`{plan.weights.name}` shards {1 - sum(unsharded.values()) / sum(numels.values()):.2%} of the parameters"
    if unsharded:
        name = max(unsharded, key=lambda name: unsharded[name])
        note += f"; the largest unsharded parameter is `{name}` with {unsharded[name]:,} elements"
    return [note]


def meta_micro_batch(plan: Plan, dataset: AnyDataset) -> dict[str, Tensor]:
    """Returns a microbatch of the plan's data on meta, {field: [micro_size, ...]}, with the slices of the sequences that
    coordinate 0 of the `sp` axis receives.

    If a plugin's dataset declares a sequence length, no sample is read: `cu_seqlens` has one document, and other fields without
    a sequence dim are omitted. Otherwise the first sample is read. Raises ValueError for a stream, and the dataset's errors.
    """
    batch = micro_batch(plan, dataset)
    declared = {name: field for name, field in dataset.info.fields.items() if name in batch}
    return {name: value.to("meta") for name, value in SequenceSlicer(declared, plan.parallel.sp, 0)(batch).items()}


def meta_state(layer: Layer, dtype: torch.dtype, fp32_patterns: Sequence[str] = ()) -> dict[str, Tensor]:
    """Returns the layer's parameters and buffers on meta by name. dtype: the dtype of parameters; parameters with names that
    match `fp32_patterns` have at least fp32. Buffers keep their dtype, but fp32 becomes fp64 if `dtype` is fp64.
    """
    state = {
        name: torch.empty_like(buffer, device="meta", dtype=select_buffer_dtype(buffer, dtype))
        for name, buffer in layer.module.named_buffers()
    }
    return state | {
        name: parameter.to(select_parameter_dtype(f"{layer.name}.{name}", dtype, fp32_patterns))
        for name, parameter in layer.module.named_parameters()
    }


def meta_output(layer: Layer, args: tuple[Any, ...], fields: Mapping[str, Tensor], state: dict[str, Tensor]) -> Any:
    """Calls `layer` on meta with `args` and the fields that it reads, and returns its output. state: a result of `meta_state`,
    to which the forward may write. Raises the errors of the layer's forward.
    """
    layer_fields = {name: fields[name] for name in layer.fields}
    with run_uncompiled(), torch.device("meta"):  # tensors that the forward creates are on meta too
        return torch.func.functional_call(layer.module, state, args, layer_fields)


def micro_batch(plan: Plan, dataset: AnyDataset) -> dict[str, Tensor]:
    """Returns a microbatch of the plan's data on the host, with whole sequences, {field: [micro_size, ...]}."""
    info, size = dataset.info, plan.batch.micro_size
    if plan.data.record is not None and info.sequence is not None:
        lengths = {name: info.sequence for name, field in info.fields.items() if field.sequence_dim is not None}
        lengths |= {name: 2 for name in BOUNDARY_FIELDS if name in info.fields and name not in lengths}  # one document
        fields = {SOURCE: torch.zeros(size, dtype=torch.int64)} if SOURCE in info.fields else {}
        for name, length in lengths.items():
            fields[name] = torch.zeros(size, length, dtype=getattr(torch, info.fields[name].dtype))
            if name in BOUNDARY_FIELDS:  # positions count up; the boundaries of one document are 0 and its length
                fields[name] += torch.arange(length) if length != 2 else torch.tensor([0, info.sequence])
        return fields
    if is_stream(dataset):
        raise ValueError("streams are not opened for this check")
    return collate_function(dataset)([dataset[0]] * size)  # type: ignore[index]  # not a stream


_DEVICE_ERROR = re.compile(
    r"meta|device|cuda|\bgpu|\bcpu|triton|pointer|storage|numpy|data.dependent|not (been )?implemented"
    r"|mat_a|grouped|stateless api|jit",
    re.IGNORECASE,
)
"""Matches the message of an error on meta that the same call with real tensors might not raise."""

_LAYER_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError)
"""The exceptions that wrong shapes, types and arguments raise in a layer. They do not include AssertionError, since reading a
value on meta may raise it.
"""

_LOSS_ERRORS = (RuntimeError, ValueError, IndexError)
"""The exceptions that wrong shapes raise in a loss. They do not include AttributeError and TypeError, since the loss may lack
attributes that its methods `weight` and `attach` set, which are not called here.
"""


def check_layers(plan: Plan, model: Model, dataset: AnyDataset, sent_outputs: Container[str]) -> str | None:
    """Calls the layers and the loss on a microbatch on meta. Returns a note on the part that was not checked, or None.

    model: a model on meta, which must not be used again. sent_outputs: the names of the layers whose output the next stage
    receives. Raises PlanError: "layer-fails" with the layer's name and inputs, "boundary-type" for an output that cannot be
    sent, "model-buffer-written" if a layer updates running statistics, "loss-fails", or the loss's own errors.
    """
    try:
        fields = meta_micro_batch(plan, dataset)
    except Exception as error:  # the user's data may not be on this machine
        return f"no layer was called, because no sample could be read: {format_cause(error)}"
    args: tuple[Any, ...] = ()
    written: list[tuple[str, nn.Module]] = []
    for layer in model.layers:
        label = f"layer `{layer.name}` ({type(layer.module).__name__})"
        if missing := [name for name in layer.fields if name not in fields]:
            return f"layers were called only up to {label}, since the shape of `{missing[0]}` depends on the data"
        try:
            state = meta_state(layer, DTYPES[plan.precision.compute], plan.precision.keep)
            args = (meta_output(layer, args, fields, state),)
            if layer.name in sent_outputs:
                describe_output(args[0], layer.name)
            statistics = _find_written_statistics(layer, state)
            written += [pair for pair in statistics if not matches_any(pair[0], model.per_rank_buffers)]
        except SleyError as error:
            raise _to_plan_error(error, MODEL) from None
        except Exception as error:
            if not _is_certain(error, _LAYER_ERRORS):
                check_written_buffers(written)
                return f"layers were called only up to {label}, which cannot run on meta: {format_cause(error)}"
            field_texts = (f"{name} {_describe_value(fields[name])}" for name in layer.fields)
            inputs = ", ".join([*map(_describe_value, args), *field_texts])
            message = f"{label} fails when called with inputs ({inputs}): {format_cause(error)}"
            hint = "its first argument is the previous layer's output; use `train-cli run --traceback` to see the calls"
            raise PlanError("layer-fails", message, path=MODEL, hint=dtype_hint(error) or hint) from error
    check_written_buffers(written)
    return _check_loss(plan, args[0], fields, dataset.info)


def _check_loss(plan: Plan, output: Any, fields: Mapping[str, Tensor], info: DataInfo) -> str | None:
    """Calls the loss on meta; returns a note if it cannot run on meta, else None. Raises PlanError, such as "loss-fails"."""
    loss, config = plan.loss.build(), plan.loss.config
    try:
        labels = config.labels if isinstance(config, CrossEntropyConfig) else ""
        if info.vocab_size and labels in info.fields and info.fields[labels].ids == "label":
            loss.weight({labels: torch.tensor([info.vocab_size - 1])})  # `loss` compares the highest label with the classes
        with torch.device("meta"):
            require_scalar(loss.loss(output, fields))
    except SleyError as error:
        raise _to_plan_error(error, ("loss",)) from None
    except Exception as error:
        if hasattr(loss, "attach") or not _is_certain(error, _LOSS_ERRORS):
            return f"the loss was not checked: {format_cause(error)}"
        message = f"the loss fails when called with a model output of {_describe_value(output)}: {format_cause(error)}"
        raise PlanError(
            "loss-fails", message, path=("loss",), hint="the first argument of the loss is the last layer's output"
        ) from error
    return None


def _to_plan_error(error: SleyError, path: KeyPath) -> PlanError:
    diagnostic = error.diagnostics[0]
    return PlanError(diagnostic.code, diagnostic.message, path=diagnostic.path or path, hint=diagnostic.hint)


def _is_certain(error: Exception, error_types: tuple[type[Exception], ...]) -> bool:
    """Returns whether a call with real tensors would certainly raise the same error."""
    is_expected = isinstance(error, error_types) and not isinstance(error, NotImplementedError)
    return is_expected and not _DEVICE_ERROR.search(str(error))


def _describe_value(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _find_written_statistics(layer: Layer, state: Mapping[str, Tensor]) -> list[tuple[str, nn.Module]]:
    """Returns the name and module of each running statistic that a call of `layer` has written. state: the buffers that were
    passed to the call; their versions were 0 before the call. On meta, torch increments only the version of
    `num_batches_tracked`, so this buffer stands for all statistics of its module.
    """
    return [
        (f"{layer.name}.{prefix}{attribute}", module)
        for name, module in layer.module.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase)
        for prefix in [f"{name}." if name else ""]
        if (count := state.get(f"{prefix}num_batches_tracked")) is not None and count._version > 0
        for attribute, _ in module.named_buffers(recurse=False)
    ]
