"""Computes linears and embeddings with sharded weights. Other sharded parameters are gathered for a whole call of their layer.

A linear or an embedding:

    forward    unshard W               y = x W^T + b        only x is saved
    backward   unshard W again, dW = g^T x -> reduce-scatter in the background -> store,    dx = g W meanwhile
    split      first half: dx, and (g, x) is kept;    second half: dW and its reduce-scatter

Here g is the gradient of the output y, and the last line is a backward that the schedule splits. The shard is an input of the
autograd function, so that autograd runs its backward. The backward returns None as the shard's gradient, so that no memory is
allocated for it.

A backward unshards the weights even if the input needs no gradient. All ranks of `wp` must gather the same groups in the same
order, but their data differ, and may decide whether the input needs a gradient. For example, a linear after frozen layers needs
no weight in its backward, unless the data make it run again on its own output.

Other parameters (FSDP2 treats all of them in this way, which needs more memory and copies):

    forward    unshard ──> modules get full parameters ──> the layer runs ──> stand-ins again
               autograd saves a full parameter as its position in the group's buffer, not as a tensor
    backward   first gradient of an output ──> unshard ──> modules get full parameters
               gradient of a full parameter ──> `sink` ──> reduce-scatter in the background
               another such layer is used, or the action ends ──> stand-ins again
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.parametrize import ParametrizationList

from sley_core.api.model import ForwardPatch, Layer, tensors_in
from sley_core.api.parts import Param, Parts, WeightGradientSink, add_at
from sley_core.api.weights import GradientUse, StandIn, autocast_input, no_view
from sley_core.errors import RunError
from sley_isp.param_group import ParamGroup, UnshardedGroup

if TYPE_CHECKING:
    from sley_isp.communicator import Communicator


def is_shardable(module: nn.Module, attribute: str) -> bool:
    """Returns whether the parameter `attribute` of `module` can be sharded: whether the module is a plain linear or embedding.
    A module is not plain if it computes its weight in each forward (`torch.nn.utils.weight_norm`), if its forward was replaced,
    or if it is an embedding with `max_norm`, `sparse` or `scale_grad_by_freq`.
    """
    if not isinstance(module._parameters.get("weight"), nn.Parameter) or "forward" in vars(module):
        return False
    if type(module) is nn.Embedding:
        return module.max_norm is None and not module.sparse and not module.scale_grad_by_freq
    return type(module) is nn.Linear and attribute in ("weight", "bias")


def find_parameter_users(layers: Sequence[Layer], is_user: Callable[[nn.Module, str], bool]) -> dict[nn.Parameter, str]:
    """Returns the parameters for which `is_user(module, attribute)` is true, each with the name of the last such module."""
    return {
        parameter: name
        for layer in layers
        for name, module in layer.module.named_modules(prefix=layer.name)
        for attribute, parameter in module._parameters.items()
        if parameter is not None and is_user(module, attribute)
    }


class ShardedModule:
    """Replaces the forward of the linear or embedding `module` while the run is open. weight, bias: the module's parameters;
    `bias` is None if there is none. sink: a function of the output's gradient and the input, which computes and reduces the
    weights' gradients.
    """

    def __init__(
        self,
        communicator: "Communicator",
        group: ParamGroup,
        module: nn.Linear | nn.Embedding,
        params: dict[str, Param],
        parts: Parts,
    ) -> None:
        self.communicator = communicator
        self.group = group
        self.module = module
        self.weight, self.bias = params["weight"], params.get("bias")
        self.params = list(params.values())
        self.parts = parts
        self.can_fuse = not parts.store.reduction.has_fixed_order  # a fused product and sum rounds differently
        self.sink = WeightGradientSink(self._reduce, parts.queue)
        self.name = self.weight.name.rpartition(".")[0]
        self.is_embedding = isinstance(module, nn.Embedding)
        group.has_linear = group.has_linear or not self.is_embedding

    @property
    def trainable_params(self) -> list[Param]:
        """The parameters of the module that are trainable now."""
        return [param for param in self.params if param.trainable]

    def forward(self, input: Tensor) -> Tensor:
        """Returns the module's output, with gathered weights. All ranks of `wp` must call modules in the same order."""
        if self.has_replaced_weights:
            return type(self.module).forward(cast(Any, self.module), input)
        x = input if self.is_embedding else autocast_input(input)
        if not torch.is_grad_enabled():
            return self.compute(x)[0]
        out: Tensor = _Call.apply(x, self, *(param.parameter for param in self.params))  # type: ignore[no-untyped-call]
        return out

    def compute(self, x: Tensor, *, num_holds: int = 0) -> tuple[Tensor, Tensor]:
        """Returns the output for `x` and the tensor that the backward needs. num_holds: +1 in a recomputation, -1 in its
        backward.
        """
        with self.communicator.unshard(self.group, num_holds=num_holds) as unsharded:
            unsharded.wait()
            weight = unsharded.full_tensors[self.weight]
            if self.is_embedding:
                return F.embedding(x, weight), x
            return F.linear(x, weight, unsharded.full_tensors[self.bias] if self.bias is not None else None), x

    @property
    def has_replaced_weights(self) -> bool:
        """Whether other tensors currently replace the module's weights, for example in `torch.func.functional_call`."""
        parameters = self.module._parameters
        return any(type(value) is not StandIn for value in parameters.values() if value is not None)

    def _reduce(self, output_gradient: Tensor, inputs: Tensor) -> None:
        writes = {param: partial(self.write_gradient, param, output_gradient, inputs) for param in self.trainable_params}
        self.communicator.reduce(self.group, writes)

    def write_gradient(self, param: Param, output_gradient: Tensor, inputs: Tensor, target: Tensor, accumulate: bool) -> None:
        """Writes the full gradient of `param` into `target`, or adds it if `accumulate`. output_gradient: [n, out]. inputs: [n,
        in], or an embedding's tokens [n]. target: a tensor of the shape of `param`. An embedding's gradient is added row by
        row, without a temporary tensor as large as the table.
        """
        if isinstance(self.module, nn.Embedding):
            if self.module.padding_idx is not None:
                output_gradient = output_gradient.masked_fill((inputs == self.module.padding_idx).unsqueeze(1), 0.0)
            if not accumulate:
                target.zero_()
            add_at(target, inputs, output_gradient.to(target.dtype))
        elif param is self.weight and output_gradient.dtype == target.dtype and not accumulate:
            torch.mm(output_gradient.t(), inputs, out=target)
        elif param is self.weight and output_gradient.dtype == target.dtype and self.can_fuse:
            target.addmm_(output_gradient.t(), inputs)
        else:
            is_bias = param is self.bias
            copy_or_add(
                output_gradient.sum(0, dtype=target.dtype) if is_bias else output_gradient.t() @ inputs, target, accumulate
            )


def copy_or_add(gradient: Tensor, target: Tensor, accumulate: bool) -> None:
    """Copies `gradient` to `target`, or adds it if `accumulate`."""
    target.add_(gradient) if accumulate else target.copy_(gradient)


class _Call(torch.autograd.Function):
    """Computes a linear or an embedding, and passes the gradients of its weights to the module's sink."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: ShardedModule, *_shards: Tensor) -> Tensor:
        """Returns the output. Saves the input if a weight is trainable. A recomputation keeps the weights for the backward."""
        ctx.module = module
        is_held = any(ctx.needs_input_grad) and module.communicator.is_recomputing and module.group.has_linear
        output, inputs = module.compute(x, num_holds=int(is_held))
        ctx.save_for_backward(inputs if module.trainable_params else None)
        return no_view(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the input's gradient, and calls the sink for the weights' gradients while the weights are gathered. All
        ranks gather in the order of backwards. An embedding's backward needs no weight. But if its group also has a linear, the
        embedding gathers the group, since other ranks may run the linear at this point.
        """
        module: ShardedModule = ctx.module
        (x,) = ctx.saved_tensors
        unshard = module.communicator.unshard
        with unshard(module.group, num_holds=-1) if module.group.has_linear else nullcontext() as unsharded:
            is_shared = module.sink.shares_memory(gradient)
            # The result is False if a forward calls `torch.autograd.grad` for tensors other than the shards, which are the
            # inputs after `x`.
            is_summed = any(GradientUse.find(ctx, index) is GradientUse.SUM for index in range(1, len(ctx.next_functions)))
            if module.trainable_params and is_summed:
                assert x is not None, f"{module.name} was unfrozen between a forward and its backward"
                inputs = x.reshape(-1) if module.is_embedding else x.reshape(-1, x.shape[-1])
                module.sink(gradient.reshape(-1, gradient.shape[-1]), inputs, is_shared=is_shared)
            input_gradient = None
            if unsharded is not None and ctx.needs_input_grad[0]:
                unsharded.wait()
                input_gradient = gradient @ unsharded.full_tensors[module.weight].to(gradient.dtype)
        return input_gradient, None, *(None for _ in module.params)


MIN_BYTES = 4096
"""The size in bytes below which `can_gather_for_layer` is false, since sharding less than a page saves no memory."""


def can_gather_for_layer(locations: Sequence[tuple[nn.Module, str]]) -> bool:
    """Returns whether the parameter at `locations`, pairs (module, attribute), can be sharded, and gathered for each call of
    its layer. Returns False if the parameter is smaller than MIN_BYTES, or if code may read it outside such calls: if the
    module also keeps it in another attribute, as an LSTM does in a list of its weights, or if a parametrization computes a
    weight from it.
    """
    module, attribute = locations[0]
    parameter = module._parameters[attribute]
    if parameter is None or parameter.numel() * parameter.element_size() < MIN_BYTES:
        return False
    for holder, _ in locations:
        values = [value if isinstance(value, list | tuple) else (value,) for value in vars(holder).values()]
        if isinstance(holder, ParametrizationList) or any(item is parameter for items in values for item in items):
            return False
    return True


class _Position(NamedTuple):
    """The position of a saved tensor in the buffer of the group with the index `group`. offset: in elements of `dtype`."""

    group: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class ShardedLayer:
    """Gathers `params` for each call of `layer`, and again for its backward. params: the parameters by group. A group may also
    contain parameters of `ShardedModule`s. sinks: for each parameter, the function that reduces its full gradient.
    """

    def __init__(
        self, communicator: "Communicator", layer: Layer, params: Mapping[ParamGroup, Collection[Param]], parts: Parts
    ) -> None:
        self.communicator = communicator
        self.name = layer.name
        self.params = params
        self.sinks = {
            param: WeightGradientSink(partial(self._reduce, group, param), parts.queue)
            for group, params_of_group in self.params.items()
            for param in params_of_group
        }
        for group in params:
            group.has_linear = True  # the backward needs the weights
        self.patch = ForwardPatch(layer.module, self.forward)
        self._modules = set(layer.module.modules())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the layer's output. All ranks of `wp` must call layers in the same order. Raises RunError
        "sharded-weight-written" if the layer writes to a parameter, and "sharded-weight-returned" if it returns a view of a
        parameter.
        """
        with self.communicator.unshard_layer(self) as unsharded_groups:
            tensors = self.make_full_leaves(unsharded_groups)
            versions = {param: tensor._version for param, tensor in tensors.items()}
            with self.install(tensors):
                with self._save_positions(unsharded_groups):
                    output = self.patch.__wrapped__(*args, **kwargs)
                for param, tensor in tensors.items():
                    if tensor._version != versions[param]:
                        raise self._error("sharded-weight-written", "writes to", f"the parameter {param.name!r}")
                outputs = list(tensors_in((output,)))
                if any(unsharded.offset_of(tensor) is not None for unsharded in unsharded_groups for tensor in outputs):
                    raise self._error("sharded-weight-returned", "returns", "a view of a parameter")
        for tensor in outputs:
            if tensor.requires_grad:
                tensor.register_hook(self._begin_backward)  # type: ignore[no-untyped-call]
        return output

    def make_full_leaves(self, unsharded_groups: Sequence[UnshardedGroup]) -> dict[Param, Tensor]:
        """Returns the full parameters of `unsharded_groups`, in the order of `params`, as leaves with gradients for `sinks`."""
        tensors = {}
        for unsharded, params in zip(unsharded_groups, self.params.values(), strict=True):
            for param in params:
                tensor = unsharded.full_tensors[param].detach().requires_grad_(param.trainable)
                if param.trainable:
                    tensor.register_post_accumulate_grad_hook(partial(self._pass_gradient, param))  # type: ignore[no-untyped-call]
                tensor.shard = param.parameter  # type: ignore[attr-defined]  # for `Param.parameter`
                tensors[param] = tensor
        return tensors

    def _pass_gradient(self, param: Param, tensor: Tensor) -> None:
        """Passes the gradient of the full parameter `tensor` to the sink of `param`."""
        with torch._C.DisableTorchFunctionSubclass():  # after the call, `tensor` is a stand-in
            gradient, tensor.grad = tensor.grad, None
        assert gradient is not None, param
        self.sinks[param](gradient, gradient, is_shared=self.sinks[param].shares_memory(gradient))

    @contextmanager
    def install(self, tensors: Mapping[Param, Tensor]) -> Iterator[None]:
        """Replaces the parameters in the layer's modules with `tensors` during the block. Afterwards, `tensors` are stand-ins,
        since the memory may hold other weights: code that has kept one, for example on the `ctx` of an autograd function, gets
        an error when it reads values.
        """
        previous = []
        for param, tensor in tensors.items():
            for holder in param.holders:
                if holder.module in self._modules:
                    attributes: dict[str, Any] = holder.module._parameters
                    previous.append((attributes, holder.attribute, attributes[holder.attribute]))
                    attributes[holder.attribute] = tensor
        try:
            yield
        finally:
            for attributes, name, value in reversed(previous):
                attributes[name] = value
            for param, tensor in tensors.items():
                tensor.param = param  # type: ignore[attr-defined]
                tensor.__class__ = StandIn

    @contextmanager
    def _save_positions(self, unsharded_groups: Sequence[UnshardedGroup]) -> Iterator[None]:
        """Makes autograd save positions in place of tensors that lie in the buffers of groups. The backward gathers the weights
        again, possibly into another buffer. Other tensors go to the surrounding hooks, such as hooks of an activation policy.
        """
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        outer_pack, outer_unpack = outer or (lambda tensor: tensor, lambda value: value)

        def pack(tensor: Tensor) -> Any:
            for index, unsharded in enumerate(unsharded_groups):
                if (offset := unsharded.offset_of(tensor)) is not None:
                    return _Position(index, tensor.dtype, tensor.shape, tensor.stride(), offset)
            return outer_pack(tensor)

        def unpack(value: Any) -> Any:
            return self._read_saved(value) if isinstance(value, _Position) else outer_unpack(value)

        with saved_tensors_hooks(pack, unpack):
            yield

    def _read_saved(self, saved: _Position) -> Tensor:
        """Returns the tensor at the position `saved`. Gathers the layer's groups if the backward has not done so yet."""
        buffer = self.communicator.open_layer(self)[saved.group].buffer.view(saved.dtype)
        return buffer.as_strided(saved.shape, saved.stride, buffer.storage_offset() + saved.offset)

    def _begin_backward(self, _: Tensor) -> None:
        self.communicator.open_layer(self)

    def _error(self, code: str, action: str, target: str) -> RunError:
        message = f"the forward of the layer {self.name!r} {action} {target}, but each rank has only a part of it"
        return RunError(code, message, hint="compute a new tensor from the parameter, or write to parameters between steps")

    def _reduce(self, group: ParamGroup, param: Param, gradient: Tensor, _: Tensor) -> None:
        self.communicator.reduce(group, {param: partial(copy_or_add, gradient)})
