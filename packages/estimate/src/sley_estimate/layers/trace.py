"""Runs a layer once on meta, as the executor does, and returns what it did: forward, recomputation, and both kinds of backward.

    layer ── forward under the activation policy ──> output ── backward, whole ──> operators
                                                            └─ backward, split ──> input half | weight half

Tensors on meta take the way through the trainer that a device takes: nothing is read back to the host, the loss works in
large pieces. A layer that reads a number from a tensor cannot be counted so, and is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from sley_core.engine.boundary import Description
from sley_core.engine.direct import WeightQueue, is_plain_linear
from sley_core.engine.execute import InFlight, describe, edges_of
from sley_core.engine.step_state import MicroStep, Phase
from sley_core.errors import PlanError, SleyError
from sley_core.model.attention import computed_from
from sley_estimate.bench.layer_gradients import queued_products
from sley_estimate.layers.fused import FusedKernels
from sley_estimate.layers.operators import LayerWork, Operator
from sley_estimate.layers.recorder import OperatorRecorder, moved_bytes

if TYPE_CHECKING:
    from sley_core.model.layers import Layer
    from sley_core.protocols import ActivationPolicy, Loss

MICRO = MicroStep(0, 0, Phase.TRAIN, 0, 0)
PLACE = (0, 0)


Value = tuple[Description, list[Tensor]]
"""What a layer hands to the next one, as it crosses between stages."""


def trace(
    layer: Layer,
    value: Value | None,
    fields: Mapping[str, Tensor],
    policy: ActivationPolicy,
    loss: Loss | None,
    working: torch.dtype,
    gradients: torch.dtype,
    *,
    by_steps: bool = False,
) -> tuple[LayerWork, Value]:
    """Runs the layer on meta, with a whole backward and with one in two halves; returns its work on one micro-batch, and its
    output for the layer after it. What is computed once for all layers (`once_per_field`) is no layer's work, nor kept by one.

    value: the output of the layer before; None for the first. fields: the micro-batch. loss: behind the last layer. working,
    gradients: dtypes of the weights and of their accumulated gradients. by_steps: whether RMSNorm saves for its backward what
    its steps save, as on a CPU. Raises PlanError "estimate-layer" for a layer that cannot run on meta.
    """
    with _on_meta(layer.module, working):  # computes what layers share of a micro-batch, such as a mask of documents
        split, _ = _run(layer, value, fields, policy, loss, gradients, split=True)
    with _on_meta(layer.module, working):  # afresh: the first gradient of a parameter is not added to another
        whole, output = _run(layer, value, fields, policy, loss, gradients, split=False, by_steps=by_steps)
    description, tensors = describe(output, layer.name)
    trained = [parameter for parameter in layer.module.parameters() if parameter.requires_grad]
    work = LayerWork(
        forward=whole.of("forward"),
        recompute=whole.of("recompute"),
        backward=whole.of("backward"),
        input_gradient=split.of("input_gradient"),
        weight_gradient=split.of("weight_gradient"),
        num_parameters=sum(parameter.numel() for parameter in trained),
        output_bytes=sum(map(moved_bytes, tensors)),
        kept_bytes=whole.kept_bytes,
        passing_bytes=whole.live.more,
    )
    if loss is not None:  # it needs what it was given, or as much, and the gradient of that is there
        work = replace(work, kept_bytes=work.kept_bytes + work.output_bytes, passing_bytes=work.output_bytes)
    elif gradients == working:  # which may be added where they are kept, by the product that makes them
        largest = max((parameter.numel() * gradients.itemsize for parameter in trained), default=0)
        work = replace(work, passing_bytes=max(0, work.passing_bytes - largest))
    return work, (description, [tensor.detach() for tensor in tensors])


def _run(
    layer: Layer,
    value: Value | None,
    fields: Mapping[str, Tensor],
    policy: ActivationPolicy,
    loss: Loss | None,
    gradients: torch.dtype,
    *,
    split: bool,
    by_steps: bool = False,
) -> tuple[OperatorRecorder, Any]:
    """Runs a forward and a backward of the layer; returns the recorder of its operators and kept memory, and its output.

    split: whether the backward is taken in two halves, for inputs and for weights. by_steps: whether RMSNorm saves what its
    steps save, as on a CPU. Raises PlanError "estimate-layer" for a layer that cannot run on meta.
    """
    held, recorder, queue = InFlight(), OperatorRecorder(), WeightQueue()
    args: tuple[Any, ...] = ()
    if value is not None:
        args = (held.enter(*value),)
    named = {name: fields[name] for name in layer.fields}
    for tensor in (*layer.module.parameters(), *layer.module.buffers(), *(value[1] if value else ()), *fields.values()):
        recorder.live.ignore(tensor)
    for shared in tree_leaves([computed_from(field) for field in named.values()]):
        recorder.share(shared)
    for parameter in layer.module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_freed)  # type: ignore[no-untyped-call]  # torch's
    try:
        halves = queued_products(layer.module, queue, gradients) if split else nullcontext()
        with halves, FusedKernels(recorder, by_steps=by_steps), recorder:
            with saved_tensors_hooks(recorder.keep, _as_it_is):
                output = policy.call(layer.name, partial(_called, layer, recorder), args, named, MICRO)
            made = loss.loss(output, fields) if loss is not None else None
            recorder.live.begin()
            _backward(held, output, made, recorder, queue, split=split)
    except (SleyError, AssertionError):
        raise
    except Exception as error:
        raise _cannot(layer, recorder, error) from error
    if recorder.of("recompute"):
        for tensor in value[1] if value else ():
            recorder.keep(tensor)  # to run again from
    recorder.phase = "input_gradient" if split else "backward"
    queued = _queued(layer.module) if split else set()
    for name, parameter in layer.module.named_parameters():
        if parameter.requires_grad and name not in queued:
            recorder.note(_accumulation(parameter, gradients))
    return recorder, output


def _freed(parameter: Tensor) -> None:
    """Drops a gradient that autograd has made: the engine adds it elsewhere."""
    parameter.grad = None


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _called(layer: Layer, recorder: OperatorRecorder, *args: Any, **named: Any) -> Any:
    """Calls the layer and returns its output; notes its operators as the forward, and in a backward as recomputation, which may
    stop early, by an exception of torch's.
    """
    before = recorder.phase
    recorder.phase = "forward" if before == "forward" else "recompute"
    try:
        return layer.module(*args, **named)
    finally:
        recorder.phase = before


def _backward(
    held: InFlight, output: Any, made: Tensor | None, recorder: OperatorRecorder, queue: WeightQueue, *, split: bool
) -> None:
    """Runs the backward from the loss `made`, or if that is None from gradients of the output; where `split`, first the half
    for inputs, then the weights' products that wait in `queue`. Sets the recorder's phase.
    """
    description, tensors = describe(output)
    if made is not None:
        held.loss, seeds = made, [torch.ones_like(made)]
    else:
        held.edges = edges_of(description, tensors)
        pairs = zip(description.leaves, tensors, strict=True)
        seeds = [torch.empty_like(tensor) for leaf, tensor in pairs if leaf.has_gradient]
    recorder.phase = "input_gradient" if split else "backward"
    if held.loss is not None and not held.loss.requires_grad:
        return
    if not split:
        held.backward(seeds)
        return
    with queue.collecting(PLACE):
        held.backward(seeds)
    recorder.phase = "weight_gradient"
    queue.run(PLACE)


def _queued(module: nn.Module) -> set[str]:
    """Returns the names of the weights whose gradients are multiplied in the second half of a split backward:
    of plain linears.
    """
    return {f"{name}.weight".lstrip(".") for name, one in module.named_modules() if is_plain_linear(one)}


def _accumulation(parameter: Tensor, gradients: torch.dtype) -> Operator:
    """Returns the operator that adds a parameter's gradient to what the gradient store has, in dtype `gradients`."""
    return Operator("accumulate", parameter.numel() * (parameter.element_size() + 2 * gradients.itemsize))


@contextmanager
def _on_meta(module: nn.Module, working: torch.dtype) -> Iterator[None]:
    """Replaces parameters and buffers of the module by tensors on meta within the block, floating-point parameters in dtype
    `working`; tied ones stay tied.
    """
    made: dict[int, Tensor] = {}
    places: list[tuple[dict[str, Any], str, Any]] = []
    for one in module.modules():
        for held in (one._parameters, one._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = _meta_of(tensor, working)
                places.append((held, name, tensor))
                held[name] = made[id(tensor)]  # type: ignore[assignment]  # the module's own dict
    try:
        yield
    finally:
        for held, name, tensor in places:
            held[name] = tensor


def _meta_of(tensor: Tensor, working: torch.dtype) -> Tensor:
    """Returns a tensor on meta like `tensor`: a floating-point parameter in dtype `working`, a floating-point buffer in that or
    its own, whichever is wider.
    """
    is_parameter = isinstance(tensor, nn.Parameter)
    dtype = tensor.dtype
    if dtype.is_floating_point:
        dtype = working if is_parameter else torch.promote_types(dtype, working)
    empty = torch.empty_like(tensor, dtype=dtype, device="meta")
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty


def _cannot(layer: Layer, recorder: OperatorRecorder, error: Exception) -> PlanError:
    """Returns the PlanError "estimate-layer" of a layer whose run on meta raised `error`, with the last operator that ran."""
    message = f"layer `{layer.name}` ({type(layer.module).__name__}) cannot be counted without memory: "
    message += f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    if recorder.last:
        message += f" (the last operator was {recorder.last})"
    hint = "time it: `train-cli calibrate --plan plan.toml --out machine.toml`"
    return PlanError("estimate-layer", message, path=("model",), hint=hint)
