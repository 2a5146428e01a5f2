"""The forward and the backward of a linear or an embedding with sharded weights.

    forward    unshard W               y = x W^T + b        only x is saved
    backward   unshard W again, dW = g^T x -> reduce-scatter in the background -> store,    dx = g W meanwhile
    I, W       I: dx, and (g, x) is deferred;    W: dW and its reduce-scatter

The shard is an input of the autograd function, so that autograd runs the backward. Its gradient is None, so that none is
allocated.

A backward unshards the weights even if the input needs no gradient. All ranks of `wp` must gather the same groups in the same
order, but their data differ, and may decide whether the input needs a gradient. For example, a linear after frozen layers needs
no weight in its backward, unless the data make it run again on its own output.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from sley_core.api.parts import add_at
from sley_core.api.weights import GradientUse, StandIn, no_view
from sley_core.errors import RunError

if TYPE_CHECKING:
    from sley_core.api.parts import Handover, Param
    from sley_isp.communicator import Communicator
    from sley_isp.param_group import ParamGroup, UnshardedGroup


def is_shardable(module: nn.Module, attribute: str) -> bool:
    """Returns whether the parameter `attribute` of `module` can be sharded, as in a plain linear or embedding.

    A module needs full parameters if it computes its weight in each forward (`torch.nn.utils.weight_norm`), or if its forward
    was replaced.
    """
    if not isinstance(module._parameters.get("weight"), nn.Parameter) or "forward" in vars(module):
        return False
    if type(module) is nn.Embedding:
        return module.max_norm is None and not module.sparse and not module.scale_grad_by_freq
    return type(module) is nn.Linear and attribute in ("weight", "bias")


def refuse_transforms(name: str) -> None:
    """Raises RunError "sharded-weight-mapped" within a torch.func transform or forward-mode AD."""
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        raise RunError(
            "sharded-weight-mapped",
            f"{name!r} is called in a torch.func transform or with forward-mode AD, but its weight is sharded",
            hint="use the transform within the forward of a layer, on a subclass of nn.Linear or nn.Embedding",
        )


def get_shard(module: nn.Module, attribute: str) -> nn.Parameter | None:
    """Returns the shard of the parameter `attribute` of `module`, or the parameter itself if it is not sharded."""
    parameter = module._parameters[attribute]
    return parameter.shard if type(parameter) is StandIn else parameter


class ShardedModule:
    """Replaces the forward of `module` while the run is open.

    weight, bias: the module's parameters, or None if absent or not sharded. sink: a function of the output's gradient and the
    input, which reduces the weights' gradients. can_fuse: whether one operation may compute a product and add it to a gradient,
    which rounds differently from two operations. can_prefetch: whether the forward may start prefetches of later groups.
    """

    sink: Handover

    def __init__(
        self, communicator: Communicator, group: ParamGroup, module: nn.Module, params: dict[str, Param], *, can_fuse: bool
    ) -> None:
        self.communicator = communicator
        self.group = group
        self.module = module
        self.weight, self.bias = params.get("weight"), params.get("bias")
        self.params = list(params.values())
        self.can_fuse = can_fuse
        self.can_prefetch = True
        group.has_linear = group.has_linear or isinstance(module, nn.Linear)

    @property
    def name(self) -> str:
        return self.params[0].name.rpartition(".")[0]

    @property
    def trainable_params(self) -> list[Param]:
        """The sharded parameters that are trainable."""
        return [param for param in self.params if param.trainable]

    def forward(self, input: Tensor) -> Tensor:
        """Computes the linear or embedding with gathered weights. All ranks of `wp` must call it in the same order."""
        is_embedding = isinstance(self.module, nn.Embedding)
        if self.has_replaced_weights:
            return (nn.Embedding if is_embedding else nn.Linear).forward(cast(Any, self.module), input)
        refuse_transforms(self.name)
        x = input if is_embedding else autocast_input(input)
        if not torch.is_grad_enabled():
            return self.compute(x)
        if is_embedding:
            out: Tensor = _Embedding.apply(x, self.shard("weight"), self)  # type: ignore[no-untyped-call]
        else:
            out = _Linear.apply(x, self.shard("weight"), self.shard("bias"), self)  # type: ignore[no-untyped-call]
        return out

    def compute(self, x: Tensor, *, num_holds: int = 0) -> Tensor:
        """Gathers the weights and computes the linear or embedding. num_holds: as in `Communicator.unshard`."""
        unshard = partial(self.communicator.unshard, num_holds=num_holds, can_prefetch=self.can_prefetch)
        with unshard(self.group, self.params) as unsharded:
            unsharded.wait()
            weight = self.full_tensor(unsharded, "weight")
            if isinstance(self.module, nn.Embedding):
                return F.embedding(x, weight)
            return F.linear(x, weight, self.full_tensor(unsharded, "bias"))

    @property
    def has_replaced_weights(self) -> bool:
        """Whether other tensors currently replace the module's weights, such as those of `torch.func.functional_call`."""
        parameters = self.module._parameters
        return any(
            param is not None and type(parameters[attribute]) is not StandIn
            for attribute, param in (("weight", self.weight), ("bias", self.bias))
        )

    def shard(self, attribute: str) -> nn.Parameter | None:
        """Returns the shard of the module's parameter `attribute`, or the parameter itself if it is not sharded."""
        return get_shard(self.module, attribute)

    def full_tensor(self, unsharded: UnshardedGroup, attribute: str) -> Any:
        """Returns the full parameter `attribute`, gathered if it is sharded, or None for an absent bias."""
        param = self.weight if attribute == "weight" else self.bias
        return unsharded.full_tensor(param) if param is not None else self.module._parameters[attribute]

    def num_holds(self, ctx: Any) -> int:
        """Returns 1 if the current forward is a recomputation, whose backward will use the weights again, and 0 otherwise."""
        return int(any(ctx.needs_input_grad) and self.communicator.is_recomputing and self.group.has_linear)

    def unshard_for_backward(self) -> AbstractContextManager[UnshardedGroup]:
        """Unshards the group for a backward, and ends the hold of its recomputation."""
        return self.communicator.unshard(self.group, self.params, num_holds=-1, can_prefetch=True)

    def write_gradient(self, param: Param, output_gradient: Tensor, inputs: Tensor, full: Tensor, accumulate: bool) -> None:
        """Writes the full gradient of `param` into `full`, or adds it if `accumulate`.

        output_gradient: [n, out]. inputs: [n, in], or an embedding's tokens [n]. For an embedding, no tensor as large as the
        table is allocated.
        """
        if isinstance(self.module, nn.Embedding):
            if self.module.padding_idx is not None:
                output_gradient = output_gradient.masked_fill((inputs == self.module.padding_idx).unsqueeze(1), 0.0)
            if not accumulate:
                full.zero_()
            add_at(full, inputs, output_gradient.to(full.dtype))
        elif param is self.bias:
            if accumulate:
                full += output_gradient.sum(0, dtype=full.dtype)
            else:
                torch.sum(output_gradient, 0, dtype=full.dtype, out=full)
        elif output_gradient.dtype == full.dtype and not accumulate:
            torch.mm(output_gradient.t(), inputs, out=full)
        elif output_gradient.dtype == full.dtype and self.can_fuse:
            full.addmm_(output_gradient.t(), inputs)
        elif accumulate:
            full += output_gradient.t() @ inputs
        else:
            full.copy_(output_gradient.t() @ inputs)


def autocast_input(x: Tensor) -> Tensor:
    """Returns `x` in the dtype to which autocast casts the input of a linear. Like autocast, does not cast fp64."""
    device_type = x.device.type
    is_cast = torch.is_autocast_enabled(device_type) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(device_type)) if is_cast else x


def needs_shard_gradients(ctx: Any) -> bool:
    """Returns whether the current backward accumulate gradients of the shards, which are the inputs after the first one.

    The result is False if a forward calls `torch.autograd.grad` for other tensors. Then no weight gradient is computed or sent.
    """
    return any(GradientUse.find(ctx, index) is GradientUse.SUM for index in range(1, len(ctx.next_functions)))


class _Linear(torch.autograd.Function):
    """Passes the gradients of sharded parameters to the module's sink, and returns those of other parameters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _weight: Tensor, _bias: Tensor | None, module: ShardedModule) -> Tensor:
        """Saves `x` only if a weight needs its gradient."""
        _, weight_needs_grad, bias_needs_grad, _ = ctx.needs_input_grad
        ctx.module = module
        ctx.needs_weight_grad = weight_needs_grad and module.weight is None
        ctx.needs_bias_grad = bias_needs_grad and module.bias is None
        ctx.save_for_backward(x if module.trainable_params or ctx.needs_weight_grad else None)
        return no_view(module.compute(x, num_holds=module.num_holds(ctx)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """Computes the weight's gradient while the weight is gathered over `wp`. Ranks gather in the order of backwards."""
        module: ShardedModule = ctx.module
        (x,) = ctx.saved_tensors
        with module.unshard_for_backward() as unsharded:
            is_shared = module.sink.shares_memory(gradient)
            rows = gradient.reshape(-1, gradient.shape[-1])
            weight_gradient = rows.t() @ x.reshape(-1, x.shape[-1]) if ctx.needs_weight_grad else None
            bias_gradient = rows.sum(0) if ctx.needs_bias_grad else None
            if module.trainable_params and needs_shard_gradients(ctx):
                assert x is not None, f"{module.name} was unfrozen between a forward and its backward"
                module.sink(rows, x.reshape(-1, x.shape[-1]), is_shared=is_shared)
            input_gradient = None
            if ctx.needs_input_grad[0]:
                unsharded.wait()
                input_gradient = gradient @ module.full_tensor(unsharded, "weight").to(gradient.dtype)
        return input_gradient, weight_gradient, bias_gradient, None


class _Embedding(torch.autograd.Function):
    """Looks up tokens, and passes the table's gradient to the module's sink."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, _weight: Tensor, module: ShardedModule) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(tokens)
        return no_view(module.compute(tokens, num_holds=module.num_holds(ctx)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        """Passes the gradient to the module's sink. Also gathers the group if a linear uses the table."""
        module: ShardedModule = ctx.module
        (tokens,) = ctx.saved_tensors
        if module.group.has_linear:  # other ranks may run the linear here, and all ranks must make the same gathers
            with module.unshard_for_backward():
                pass
        if module.trainable_params and needs_shard_gradients(ctx):
            is_shared = module.sink.shares_memory(gradient)
            module.sink(gradient.reshape(-1, gradient.shape[-1]), tokens.reshape(-1), is_shared=is_shared)
        return None, None, None
