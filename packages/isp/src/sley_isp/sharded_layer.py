"""Sharded parameters of any module, which are gathered for a whole call of their layer.

    forward    unshard ──> modules get full parameters ──> the layer runs ──> stand-ins again
               autograd saves a full parameter as its position in the group's buffer, not as a tensor
    backward   first gradient of an output ──> unshard ──> modules get full parameters
               gradient of a full parameter ──> `sink` ──> reduce-scatter in the background
               another such layer is used, or the action ends ──> stand-ins again

FSDP2 treats all parameters in this way. For plain linears and embeddings, `sharded_module.py` needs less memory and fewer
copies.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.parametrize import ParametrizationList

from sley_core.api.model import ForwardPatch, Layer, tensors_in
from sley_core.api.parts import Param, Parts, WeightGradientSink
from sley_core.errors import RunError
from sley_isp.param_group import ParamGroup, UnshardedGroup
from sley_isp.sharded_module import copy_or_add

if TYPE_CHECKING:
    from sley_isp.communicator import Communicator

MIN_BYTES = 4096
"""The size in bytes below which these parameters are not sharded, since sharding less than a page saves no memory."""


def can_gather_for_layer(locations: Sequence[tuple[nn.Module, str]]) -> bool:
    """Returns whether the parameter at these locations can be sharded, and gathered for each call of its layer. It cannot if it
    is smaller than MIN_BYTES, or if code may read it outside such calls: if the module also keeps it in another attribute, as
    an LSTM does in a list of its weights, or if a parametrization computes a weight from it.
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
    """The position of a saved tensor in the buffer of a group. group: the group's index. offset: in elements of `dtype`."""

    group: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class ShardedLayer:
    """Gathers `params` for each call of `layer`, and again for its backward.

    params: the parameters by group. A group may also contain parameters of `ShardedModule`s. sinks: for each parameter, the
    function that reduces its full gradient.
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
        """Calls the layer with full parameters. All ranks of `wp` must call layers in the same order. Raises RunError
        "sharded-weight-written" if the layer writes to a parameter, and "sharded-weight-returned" if it returns a view of one.
        """
        with self.communicator.unshard_layer(self) as unsharded_groups:
            tensors = self.make_full_leaves(unsharded_groups)
            versions = {param: tensor._version for param, tensor in tensors.items()}
            with self.install(tensors), self._save_positions(unsharded_groups):
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
        """Returns the full parameters in `unsharded_groups`, one for each group of `params`, as leaves that feed the sinks."""
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
        gradient, tensor.grad = tensor.grad, None
        assert gradient is not None, param
        self.sinks[param](gradient, gradient, is_shared=self.sinks[param].shares_memory(gradient))

    @contextmanager
    def install(self, tensors: Mapping[Param, Tensor]) -> Iterator[None]:
        """Replaces the parameters in the layer's modules by `tensors` during the block."""
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

    @contextmanager
    def _save_positions(self, unsharded_groups: Sequence[UnshardedGroup]) -> Iterator[None]:
        """Makes autograd save positions in place of tensors that lie in the buffers of groups. The backward gathers the weights
        again, maybe into another buffer. Other tensors go to the surrounding hooks, such as those of an activation policy.
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
