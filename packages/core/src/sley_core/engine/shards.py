"""Shards weights over the ranks of `wp`, and refuses reads of tensors that this rank does not have.

    5 rows over 2 ranks     | 0 1 2 | 3 4 . |      . a row of zeros, whose gradient is always zero

A shard is an equal range of rows (dim 0) or columns (dim 1), as the communicator decides. The last shards get zeros as padding,
so that all ranks have the same shapes. Initial values are drawn for the full weight and then cut, in every layout.

    module.weight ──> StandIn   shape, size, numel, len: of the full weight;  dtype, device: of the shard
                         │      values: refused with the parameter's name, whenever code reads them
                         └────> shard   used by the registry, the optimizer and the communicator

A stand-in costs no time until code uses it. Weights of other ranks' layers, and tensors that the model's factory computed,
refuse reads likewise (`refuse_unregistered`).

Autograd calls hooks on parameters (`parameter.register_hook`) once per microbatch, with the full gradient. If each rank has
only a part of it, a hook that clips or masks would compute other numbers, so it is refused (`check_hooks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from sley_core.errors import Diagnostic, PlanError, RunError
from sley_core.model.layers import MODEL, Layer, Model, parameter_like, parameter_locations

if TYPE_CHECKING:
    from sley_core.comm.world import Group, Groups
    from sley_core.engine.registry import Param, Stages

SHARD_AXIS = "wp"
"""The axis over which weights are sharded."""

REDUCE_GROUP = "wdp"
"""The axis over which the gradient of a shard must still be summed after a communicator has reduced it over `wp`."""

ParameterPlace = tuple[nn.Module, str]
"""A module, and the name of its attribute that holds a parameter."""


@dataclass(frozen=True)
class Shard:
    """One rank's shard of a tensor with the full `shape`: part `index` of `count` equal parts along `dim`."""

    shape: tuple[int, ...]
    count: int
    index: int
    dim: int = 0

    @property
    def size(self) -> int:
        """Returns the size of a shard along `dim`, including padding. It is equal on all ranks."""
        return -(-self.shape[self.dim] // self.count)

    @property
    def unpadded_size(self) -> int:
        """Returns the size of this rank's shard along `dim`, without padding. It may be 0."""
        return max(0, min(self.size, self.shape[self.dim] - self.index * self.size))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Returns the shape of a shard, including padding. It is equal on all ranks."""
        return (*self.shape[: self.dim], self.size, *self.shape[self.dim + 1 :])

    @property
    def padding(self) -> int:
        """Returns the number of padding elements in this rank's shard."""
        return (self.size - self.unpadded_size) * prod((*self.shape[: self.dim], *self.shape[self.dim + 1 :]))

    def cut(self, full_tensor: Tensor) -> Tensor:
        """Returns this rank's shard of `full_tensor`: a copy of shape `local_shape`, padded with zeros."""
        assert tuple(full_tensor.shape) == self.shape, f"a full tensor of shape {list(full_tensor.shape)} for {self}"
        shard = full_tensor.new_zeros(self.local_shape)
        first = min(self.index * self.size, self.shape[self.dim])
        shard.narrow(self.dim, 0, self.unpadded_size).copy_(full_tensor.narrow(self.dim, first, self.unpadded_size))
        return shard

    def join(self, parts: Tensor) -> Tensor:
        """Returns the full tensor, without padding, as a contiguous copy. parts: all ranks' shards, [count, *local_shape]."""
        padded = parts.movedim(0, self.dim).flatten(self.dim, self.dim + 1)
        return padded.narrow(self.dim, 0, self.shape[self.dim]).clone(memory_format=torch.contiguous_format)


Shards = dict[int, Shard]
"""Shards by the id of their full parameter on meta, which the model's layers keep alive."""


def plan_shards(layers: Iterable[Layer], shard_dim: Callable[[Sequence[ParameterPlace]], int | None], group: Group) -> Shards:
    """Returns this rank's shards by parameter; {} if `group` has one rank. Shards of different ranks differ only in `index`.
    shard_dim: takes the places of a parameter, and returns the dim along which to shard it, or None for no shards.
    """
    places: dict[nn.Parameter, list[ParameterPlace]] = {}
    for layer in layers if group.size > 1 else ():
        for _, module, attribute, parameter in parameter_locations(layer.name, layer.module):
            places.setdefault(parameter, []).append((module, attribute))
    shards = {}
    for parameter, holders in places.items():
        if parameter.ndim and (dim := shard_dim(holders)) is not None:
            shards[id(parameter)] = Shard(tuple(parameter.shape), group.size, group.coord, dim)
    return shards


def shard_on_meta(layers: Iterable[Layer], shards: Shards) -> None:
    """Replaces the parameters of `layers` that are in `shards` with meta parameters of the shards' shapes, for an estimate."""
    small_parameters: dict[int, nn.Parameter] = {}
    for layer in layers:
        for _, module, attribute, parameter in parameter_locations(layer.name, layer.module):
            if (shard := shards.get(id(parameter))) is not None:
                meta_shard = torch.empty(shard.local_shape, device="meta", dtype=parameter.dtype)
                setattr(module, attribute, small_parameters.setdefault(id(parameter), parameter_like(parameter, meta_shard)))


def gather_full_tensors(parts: Mapping[Param, Tensor], groups: Groups) -> dict[Param, Tensor]:
    """Returns full copies of sharded tensors, and clones of unsharded tensors. Runs one blocking all-gather over `wp` per dtype
    of shards. parts: this rank's shard of each tensor, or the full tensor, in the same order on all ranks.
    """
    full_tensors = {param: shard.detach().clone() for param, shard in parts.items() if param.shard is None}
    sharded = {param: shard.detach() for param, shard in parts.items() if param.shard is not None}
    for dtype in dict.fromkeys(shard.dtype for shard in sharded.values()):
        same_dtype = {param: shard for param, shard in sharded.items() if shard.dtype == dtype}
        sent = torch.cat([shard.reshape(-1) for shard in same_dtype.values()])
        received = sent.new_empty((groups[SHARD_AXIS].size, sent.numel()))
        groups[SHARD_AXIS].all_gather(received, sent[None], label="parts of parameters", channel="gather").wait()
        slices = torch.split(received, [shard.numel() for shard in same_dtype.values()], dim=1)
        for (param, shard), parts_of_ranks in zip(same_dtype.items(), slices, strict=True):
            assert param.shard is not None, param
            full_tensors[param] = param.shard.join(parts_of_ranks.reshape(groups[SHARD_AXIS].size, *shard.shape))
    return {param: full_tensors[param] for param in parts}


AnyTensor = TypeVar("AnyTensor")
T: Any = Tensor  # untyped, so that mypy accepts the accessors below

SHAPE_FUNCTIONS = {
    *(T.shape.__get__, T.ndim.__get__, T.layout.__get__, T.nbytes.__get__, T.itemsize.__get__, T.is_sparse.__get__),
    *(T.size, T.numel, T.nelement, T.dim, T.ndimension, T.__len__, T.stride, T.is_contiguous, T.element_size),
    torch.numel,
}
"""Functions that read only a tensor's metadata. A `StandIn` returns their results for the full weight."""

SHARD_FUNCTIONS = {
    *(T.dtype.__get__, T.device.__get__, T.requires_grad.__get__, T.requires_grad.__set__, T.requires_grad_),
    *(T.is_leaf.__get__, T.grad_fn.__get__, T.is_cuda.__get__, T.is_cpu.__get__, T.is_meta.__get__, T.get_device),
    *(T.is_floating_point, T.is_complex, T.is_signed, torch.is_floating_point, torch.is_complex, torch.is_signed),
    *(torch.get_device, T.is_inference, torch.is_inference, T.is_quantized.__get__, T._version.__get__),
}
"""Functions that a `StandIn` calls on the shard: shard and full weight have the same result, or they set `requires_grad`."""

LIKE_FUNCTIONS = {
    **dict.fromkeys((torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like), 0),
    **dict.fromkeys((torch.rand_like, torch.randn_like, torch.randint_like), 0),
    **dict.fromkeys((T.new_empty, T.new_zeros, T.new_ones, T.new_full), 0),
    **dict.fromkeys((T.to, T.type_as, T.expand_as, T.view_as, T.reshape_as), 1),
}
"""Maps each function to the index of an argument of which it uses only shape, dtype or device. A `StandIn` may be passed."""

GRADIENT_FUNCTIONS = {T.grad.__get__, T.grad.__set__}
"""The accessors of `grad`. A shard has no gradient of its own: gradients are in the store."""


class StandIn(nn.Parameter):
    """Replaces the sharded parameter `param` in its modules. It has the full shape, but no memory: this rank holds only
    `shard`. Operations that need values raise RunError `sharded-weight-read` with the parameter's name, even after the run.
    """

    param: Param
    shard: nn.Parameter

    @staticmethod
    def __new__(cls, param: Param) -> StandIn:
        shard = param.parameter
        placeholder: StandIn = Tensor._make_wrapper_subclass(
            cls, param.shape, dtype=shard.dtype, device=shard.device, requires_grad=shard.requires_grad
        )
        placeholder.param = param
        placeholder.shard = shard
        return placeholder

    @classmethod
    def replace(cls, params: Iterable[Param]) -> None:
        """Replaces the sharded `params` with stand-ins in their modules. `Param.parameter` still returns the shard."""
        for param in params:
            if param.shard is not None:
                placeholder = cls(param)
                for holder in param.holders:
                    holder.module._parameters[holder.attribute] = placeholder

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's is untyped
        return f"StandIn({self.param.name}, {list(self.param.shape)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> StandIn:
        raise self._read_error("deepcopy")

    def __reduce_ex__(self, protocol: object) -> Any:
        raise self._read_error("pickle")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls `function` for the full weight if it reads the shape, or on the shard if it reads dtype or device. Raises
        RunError `sharded-weight-read` if it needs values.
        """
        kwargs = kwargs or {}
        if function in SHARD_FUNCTIONS:
            return function(*(arg.shard if isinstance(arg, StandIn) else arg for arg in args), **kwargs)
        if function in SHAPE_FUNCTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        first = next(_tensors_of_class(StandIn, (args, kwargs)))
        if function in GRADIENT_FUNCTIONS and first.shard.grad is None and args[1:] in ((), (None,)):
            return None
        index = LIKE_FUNCTIONS.get(function, len(args))
        if index < len(args) and args[index] is first and len(list(_tensors_of_class(StandIn, (args, kwargs)))) == 1:
            like = first.shard.new_empty(()).expand(first.param.shape)  # backed by one element
            return function(*args[:index], like, *args[index + 1 :], **kwargs)
        name = getattr(function, "__name__", str(function))  # for the getter of an attribute, the attribute's name
        raise first._read_error(getattr(function.__self__, "__name__", name) if name in ("__get__", "__set__") else name)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Raises RunError `sharded-weight-read` for operations that `__torch_function__` does not handle."""
        raise next(_tensors_of_class(StandIn, (args, kwargs or {})))._read_error(str(function))

    def _read_error(self, label: str) -> RunError:
        return sharded_read_error(self.param, f"`{label}` reads")


def _tensors_of_class(cls: type[AnyTensor], value: Any) -> Iterator[AnyTensor]:
    """Yields the instances of `cls` in `value` and in its nested lists, tuples and dicts."""
    if isinstance(value, cls):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_of_class(cls, item)


def sharded_read_error(param: Param, label: str) -> RunError:
    """Returns the `sharded-weight-read` error. label: names the reader, such as "`norm` reads"."""
    assert param.shard is not None, f"{param.name} is not sharded"
    part = f"{param.shard.unpadded_size} of {param.shape[param.shard.dim]} {'columns' if param.shard.dim else 'rows'}"
    message = (
        f"{label} the parameter {param.name!r} outside its module or after the run was closed, but this rank has only {part}"
    )
    hint = (
        "call the layer that owns the parameter while the run is open, or read it in the forward of a subclass. Between steps, "
        "`sley_core.engine.shards.gather_full_tensors` returns full copies, and `run.registry[name].parameter` is the shard"
    )
    return RunError("sharded-weight-read", message, hint=hint)


_READABLE_FUNCTIONS = SHAPE_FUNCTIONS | SHARD_FUNCTIONS | GRADIENT_FUNCTIONS | {Tensor.__repr__}  # they read no values


class _UnreadableTensor:
    """A tensor that raises RunError "weight-unregistered" if code reads its values. refusal: the error's message and hint."""

    refusal: tuple[str, str]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in _READABLE_FUNCTIONS:
            for tensor in _tensors_of_class(_UnreadableTensor, (args, kwargs)):
                message, hint = tensor.refusal
                raise RunError("weight-unregistered", message, hint=hint)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)


class UnregisteredParameter(_UnreadableTensor, nn.Parameter):
    """A parameter that is registered in no layer of this rank. Reads of its values raise RunError."""


class ComputedTensor(_UnreadableTensor, Tensor):
    """A tensor that the model's factory computed from parameters. Reads of its values raise RunError."""


def refuse_unregistered(model: Model, local_layers: Iterable[Layer]) -> None:
    """Makes the parameters of other ranks' layers, and the `unreadable` tensors of `local_layers`, raise RunError
    "weight-unregistered" when code reads them. Whether a forward reads such a tensor is known only when it runs.
    """
    hint = "register it in the layer that uses it, as a tie: `self.weight = other.weight` or `self.part = part`"
    reason = "which is neither a parameter nor a submodule of its own layer"

    def refuse(tensor: Tensor, tensor_class: type[_UnreadableTensor], label: str, hint: str) -> None:
        tensor.__class__ = tensor_class  # type: ignore[assignment]
        tensor.refusal = f"a forward reads {label}", hint  # type: ignore[attr-defined]

    for layer in model.layers:
        for name, parameter in layer.module.named_parameters(layer.name):
            if parameter.is_meta:
                label = f"the parameter {name!r} of a layer on another rank, {reason}"
                refuse(parameter, UnregisteredParameter, label, hint)
    for layer in local_layers:
        for attribute, tensor in layer.unreadable.items():
            if isinstance(tensor, nn.Parameter):
                refuse(tensor, UnregisteredParameter, f"a parameter through `{attribute}`, {reason}", hint)
            else:
                label = f"`{attribute}`, which the factory computed from parameters, with its autograd graph"
                refuse(tensor, ComputedTensor, label, "compute it in the forward, or `.detach()` it if it should stay constant")


def check_hooks(stages: Stages, shards: Shards, num_slices: int) -> None:
    """Raises PlanError "model-hook", on all ranks, if a parameter has a gradient hook, but no rank has its full gradient.
    stages: the full model. num_slices: the number of ranks that split each sequence.
    """
    names: dict[int, str] = {}
    parts: dict[int, set[int]] = {}
    for index, (_, layers) in enumerate(stages):
        for layer in layers:
            for name, parameter in layer.module.named_parameters(layer.name):
                if parameter._backward_hooks and parameter.requires_grad:
                    names.setdefault(id(parameter), name)
                    parts.setdefault(id(parameter), set()).add(index)
    diagnostics = []
    for key, name in names.items():
        if len(parts[key]) > 1:
            users, hint = "several pipeline stages, each with its own gradient", "use the parameter in one stage only"
        elif key in shards:
            users, hint = "several ranks, each with a shard", "remove `[weights]`, or hook the output of its module"
        elif num_slices > 1:
            users, hint = "several ranks, each with a slice of the sequence", "set `sp = 1`, or hook the output of its module"
        else:
            continue
        message = f"the parameter {name!r} has a gradient hook, but is used by {users}, so no rank has its full gradient"
        diagnostics.append(Diagnostic("model-hook", message, path=MODEL, hint=hint))
    if diagnostics:
        raise PlanError.from_diagnostics(diagnostics)
