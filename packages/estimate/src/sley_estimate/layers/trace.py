"""Counts the operators of layers by running them on meta as in a run: forward, recomputation, backward.

    layer ── forward under the activation policy ──> output ── backward ──> operators

Each distinct layer is traced once, on the output of the previous layer. A layer that reads the value of a tensor is an error.

Layers with equal keys need equal time and memory, since they have the same class, settings and shapes. Settings are plain
attributes, such as numbers and texts. A layer with any other attribute has a unique key and is traced separately.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, is_dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from sley_core.comm.device import storage_id
from sley_core.comm.exchanges import first_line
from sley_core.engine.boundary import Description
from sley_core.engine.call import Keep
from sley_core.engine.direct import WeightGradientSink, WeightQueue, is_plain_linear, linear_forward
from sley_core.engine.parts import MicroStep, Phase
from sley_core.errors import PlanError, SleyError
from sley_core.model.attention import cached_values
from sley_core.model.layers import ForwardPatch, Layer, Model, parameter_like
from sley_core.model.tensors import run_uncompiled, select_buffer_dtype
from sley_core.plan.plan import Plan
from sley_core.protocols import ActivationPolicy, Loss, SplitLogits
from sley_estimate.layers.operators import PHASES, FusedKernels, LayerWork, Operator, OperatorRecorder, moved_bytes
from sley_trainer.assemble import DTYPES, weight_dtypes
from sley_trainer.execute import ChunkState, describe_output, find_gradient_edges

MICRO_STEP = MicroStep(0, 0, Phase.TRAIN, 0, 0)  # the microbatch for which layers are called: the first of a training step

Value = tuple[Description, list[Tensor]]  # the output of a layer, in the form in which stages send it

TracedLayers = dict[tuple[str, str], tuple[LayerWork, Value]]
"""The work and the output of each traced layer, by (layer key, description of the input)."""


def trace_layers(
    plan: Plan, model: Model, fields: Mapping[str, Tensor], keys: Sequence[str], traced: TracedLayers | None = None
) -> list[LayerWork]:
    """Returns the work of each layer under the plan's activation policy, in order. Traces layers with equal keys and inputs
    only once. fields: a microbatch on meta. keys: the results of `layer_keys`. traced: earlier results to reuse, to which this
    call adds its own. Raises PlanError "estimate-layer" for a layer that cannot run on meta.
    """
    policy, loss = plan.activations.build([layer.name for layer in model.layers]), plan.loss.build()
    weight_dtype, gradient_dtype = weight_dtypes(plan)[0], DTYPES[plan.precision.gradients]
    traced = {} if traced is None else traced
    works: list[LayerWork] = []
    value: Value | None = None
    for layer, key in zip(model.layers, keys, strict=True):
        cache_key = key, repr(value and value[0])  # a structure may be a dict, which has no hash
        if cache_key not in traced:
            layer_loss = loss if layer is model.layers[-1] else None
            traced[cache_key] = trace_layer(layer, value, fields, policy, layer_loss, weight_dtype, gradient_dtype)
        work, value = traced[cache_key]
        works.append(work)
    return works


def trace_layer(
    layer: Layer,
    value: Value | None,
    fields: Mapping[str, Tensor],
    policy: ActivationPolicy,
    loss: Loss | None,
    weight_dtype: torch.dtype,
    gradient_dtype: torch.dtype,
) -> tuple[LayerWork, Value]:
    """Returns the work of `layer` on one microbatch, and its output. The work excludes the computation of results that layers
    share (`once_per_field`). value: the output of the previous layer; None for the first. fields: the microbatch on meta. loss:
    the loss if this is the last layer, else None. weight_dtype: the dtype of parameters in the forward. gradient_dtype: the
    dtype in which gradients are accumulated. Raises PlanError "estimate-layer" for a layer that cannot run on meta.
    """
    originals = replace_tensors(layer.module.modules(), weight_dtype, torch.device("meta"))
    try:
        recorder, output = _record_layer(layer, value, fields, policy, loss)
        for parameter in layer.module.parameters():
            if parameter.requires_grad:
                num_bytes = parameter.numel() * (parameter.element_size() + 2 * gradient_dtype.itemsize)
                recorder.record(Operator("accumulate", num_bytes))
    finally:
        for registered, name, tensor in originals:
            registered[name] = tensor
    next_input = describe_next_input(output, layer)
    output_bytes = sum(map(moved_bytes, next_input[1]))
    loss_bytes = output_bytes if loss is not None else 0  # the loss saves its input, or a tensor of the same size
    phases = {phase: recorder.operators(phase) for phase in PHASES}
    return LayerWork(**phases, output_bytes=output_bytes, saved_bytes=recorder.saved_bytes + loss_bytes), next_input


def describe_next_input(output: Any, layer: Layer) -> Value:
    """Returns the input of the next layer: a description of `output`, and its detached tensors. `SplitLogits` become logits."""
    if not isinstance(output, Tensor) and isinstance(output, SplitLogits):
        output = output.logits()
    description, tensors = describe_output(output, layer.name)
    return description, [tensor.detach() for tensor in tensors]


def _record_layer(
    layer: Layer, value: Value | None, fields: Mapping[str, Tensor], policy: ActivationPolicy, loss: Loss | None
) -> tuple[OperatorRecorder, Any]:
    """Runs a forward and a backward of `layer`. Returns the recorder of its operators, whose current phase is then "backward",
    and the output. Raises PlanError "estimate-layer" for a layer that cannot run on meta.
    """
    recorder = OperatorRecorder()
    in_flight, args, named = prepare_call(layer, value, fields)
    for parameter in layer.module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))  # type: ignore[no-untyped-call]

    def call(*args: Any, **named: Any) -> Any:
        """Calls the layer. A call during the backward is recomputation, which torch may end early with an exception."""
        previous_phase = recorder.phase
        recorder.phase = "forward" if previous_phase == "forward" else "recompute"
        try:
            return layer.module(*args, **named)
        finally:
            recorder.phase = previous_phase

    try:
        with run_uncompiled(), FusedKernels(recorder.record), recorder:
            recorder.phase = None
            with torch.no_grad():
                layer.module(*args, **named)  # computes the results that layers share, such as a document mask
            shared = tree_leaves([cached_values(field) for field in named.values()])
            recorder.shared_storages.update(storage_id(leaf) for leaf in shared if isinstance(leaf, Tensor))
            recorder.phase = "forward"
            with saved_tensors_hooks(recorder.record_saved_tensor, lambda tensor: tensor):
                output = policy.call(layer.name, call, args, named, MICRO_STEP)
            in_flight.loss = loss.loss(output, fields) if loss is not None else None
            gradients = make_output_gradients(in_flight, output, torch.empty_like)
            recorder.phase = "backward"
            run_backward(in_flight, gradients)
    except (SleyError, AssertionError):
        raise
    except Exception as error:
        message = (
            f"layer `{layer.name}` ({type(layer.module).__name__}) cannot run on the meta device, so its "
            f"operators cannot be counted: {type(error).__name__}: {first_line(error)}"
        )
        message += f" (the last operator was {recorder.last_operator})" if recorder.last_operator else ""
        hint = "use `train-cli calibrate --plan plan.toml --out machine.toml` to measure the layer"
        raise PlanError("estimate-layer", message, path=("model",), hint=hint) from error
    if recorder.operators("recompute"):
        for tensor in value[1] if value else ():
            recorder.record_saved_tensor(tensor)  # the input of the recomputation is saved
    return recorder, output


def prepare_call(
    layer: Layer, value: Value | None, fields: Mapping[str, Tensor]
) -> tuple[ChunkState, tuple[Any, ...], Mapping[str, Tensor]]:
    """Returns the state, the positional arguments and the fields of a new call of `layer`. value: the input, if any."""
    in_flight = ChunkState()
    args: tuple[Any, ...] = () if value is None else (in_flight.build_input(*value),)
    return in_flight, args, {name: fields[name] for name in layer.fields}


def make_output_gradients(
    in_flight: ChunkState, output: Any, make_gradient: Callable[[Tensor], Tensor] = torch.ones_like
) -> list[Tensor]:
    """Returns the gradients with which a backward starts: a one for the loss or, if there is no loss, `make_gradient` of each
    output tensor that has a gradient. Without a loss, also sets the gradient edges in `in_flight`.
    """
    if in_flight.loss is not None:
        return [torch.ones_like(in_flight.loss)]
    description, tensors = describe_output(output)
    in_flight.edges = find_gradient_edges(description, tensors)
    return [make_gradient(tensor) for leaf, tensor in zip(description.leaves, tensors, strict=True) if leaf.has_gradient]


def run_backward(in_flight: ChunkState, gradients: list[Tensor]) -> None:
    """Runs the backward of the call `in_flight` from `gradients`. Does nothing if its loss does not require a gradient."""
    if in_flight.loss is None or in_flight.loss.requires_grad:
        in_flight.backward(gradients)


@contextmanager
def queue_weight_gradients(module: nn.Module, queue: WeightQueue, dtype: torch.dtype) -> Iterator[None]:
    """Makes backwards of plain linear layers in `module` put the products for their weight gradients into `queue`, within the
    block. When the queue runs, the products are added to tensors of `dtype`.
    """

    def add(accumulated: Tensor, rows: Tensor, inputs: Tensor) -> None:
        """Adds `rows`^T `inputs` to `accumulated`, in one kernel if the dtypes are equal, as in a run."""
        if rows.dtype == accumulated.dtype:
            accumulated.addmm_(rows.t(), inputs)
        else:
            accumulated.add_(rows.t() @ inputs)

    with ExitStack() as patches:
        for linear in module.modules():
            if is_plain_linear(linear) and linear.weight.requires_grad:
                sink = WeightGradientSink(partial(add, torch.zeros_like(linear.weight, dtype=dtype)), queue)
                forward = partial(linear_forward, linear, linear.weight, sink, linear.bias, None)
                patches.callback(ForwardPatch(linear, forward).undo)
        yield


def replace_tensors(
    modules: Iterable[nn.Module], dtype: torch.dtype, device: torch.device
) -> list[tuple[dict[str, Any], str, Tensor]]:
    """Replaces the parameters of `modules` by empty parameters of `dtype` on `device`, and their buffers by empty buffers with
    the dtypes of a run. Shared tensors stay shared. Returns for each tensor the dict of its module that contains it, its name
    in this dict, and the original tensor.
    """
    originals: list[tuple[dict[str, Any], str, Tensor]] = []
    replacements: dict[int, Tensor] = {}
    for module in modules:
        for registered in (module._parameters, module._buffers):
            for name, tensor in registered.items():
                if tensor is None:
                    continue
                if id(tensor) not in replacements and isinstance(tensor, nn.Parameter):
                    data = torch.empty(tensor.shape, dtype=dtype, device=device)
                    replacements[id(tensor)] = parameter_like(tensor, data)
                elif id(tensor) not in replacements:
                    data = torch.empty_like(tensor, dtype=select_buffer_dtype(tensor, dtype), device=device)
                    replacements[id(tensor)] = data
                originals.append((registered, name, tensor))
                registered[name] = replacements[id(tensor)]  # type: ignore[assignment]  # the module's own dict
    return originals


PLAIN = (str, int, float, bool, bytes, type(None), torch.dtype, torch.device, torch.Size, Enum)  # types with an exact `repr`
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))  # the attributes that every module has


def module_signature(module: nn.Module, location: str) -> Any:
    """Returns the signature of a module: nested plain values. If the signatures of two modules have the same `repr`, the
    modules need equal time and memory. location: the module's name in the model, which replaces attributes that are not plain.
    """
    attributes = [
        (name, plain_value(value, f"{location}.{name}"))
        for name, value in sorted(vars(module).items())
        if name not in MODULE_ATTRIBUTES or name == "training"
    ]
    tensors = [
        (name, None if value is None else (tuple(value.shape), str(value.dtype), value.requires_grad))
        for registered in (module._parameters, module._buffers)
        for name, value in registered.items()
    ]
    hooks = [(name, location) for name in MODULE_ATTRIBUTES if name.endswith("hooks") and vars(module)[name]]
    inner = [(name, child and module_signature(child, f"{location}.{name}")) for name, child in module._modules.items()]
    # A class that is defined in a function may depend on the function's arguments.
    local = location if "<" in type(module).__qualname__ else ""
    return type(module).__module__, type(module).__qualname__, local, attributes, tensors, hooks, inner


def plain_value(value: Any, location: str) -> Any:
    """Returns nested plain values whose `repr` determines `value`, or `location` if there are none."""
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, Tensor):
        return tuple(value.shape), str(value.dtype)
    if isinstance(value, list | tuple):
        return [plain_value(item, location) for item in value]
    if isinstance(value, Mapping):
        return [(repr(key), plain_value(item, location)) for key, item in value.items()]
    if isinstance(value, BaseModel):
        return type(value).__qualname__, value.model_dump_json()
    if is_dataclass(value) and not isinstance(value, type):
        return type(value).__qualname__, plain_value(asdict(value), location)
    name = getattr(value, "__qualname__", "<")
    is_top_level = callable(value) and "<" not in name and not hasattr(value, "__self__")  # a function or class of a module
    return (getattr(value, "__module__", ""), name) if is_top_level else location


def layer_keys(plan: Plan, model: Model, policy: ActivationPolicy, fields: Mapping[str, Tensor]) -> list[str]:
    """Returns a key of 16 hexadecimal digits for each layer of `model`, which is on meta. A key depends on the layer's modules,
    the shapes and dtypes of the microbatch `fields`, the policy, the precision and, for the last layer, the loss. Therefore,
    the keys in a machine file are valid for every layout with the same `micro_size` and whole sequences.
    """
    shapes = sorted((name, tuple(value.shape), str(value.dtype)) for name, value in fields.items())
    precision = plan.precision.compute, plan.precision.gradients
    keys = []
    for index, layer in enumerate(model.layers):
        is_last = index == len(model.layers) - 1
        ends = index == 0, (plan.loss.name, plain_value(plan.loss.config, "loss")) if is_last else None
        signature = module_signature(layer.module, layer.name)
        text = repr((signature, layer.fields, shapes, precision, ends, _policy_key(plan, policy, layer)))
        keys.append(hashlib.sha256(text.encode()).hexdigest()[:16])
    return keys


def _policy_key(plan: Plan, policy: ActivationPolicy, layer: Layer) -> Any:
    """Returns the part of the layer's key that depends on `policy`; None if the policy does not affect the layer."""
    names = getattr(policy, "names", None)
    if type(policy) is Keep or (isinstance(names, frozenset) and layer.name not in names):
        return None
    chosen = None if isinstance(names, frozenset) else layer.name
    return plan.activations.name, plain_value(plan.activations.config, "activations"), chosen
