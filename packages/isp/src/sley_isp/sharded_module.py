"""A linear or an embedding whose weights are sharded: its forward and its backward.

    forward    unshard W               y = x W^T + b        only x is saved
    backward   unshard W again, dW = g^T x -> reduce-scatter in the background -> store,    dx = g W meanwhile
    I, W       I: dx, and (g, x) is deferred;    W: dW and its reduce-scatter

Autograd sees the shard as an input, so that it runs the backward, and gets None as its gradient: none is allocated.

A backward unshards the weights even if the input needs no gradient. Whether it does may depend on the data, which differ
between ranks of `wp`: a linear called once, with nothing trained before it, needs no weight in its backward; called again, on
its own output, it does. Ranks gather the same groups in one order only if none of this matters.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from sley_core.api.parts import add_at
from sley_core.api.weights import Asked, StandIn, no_view
from sley_core.errors import RunError

if TYPE_CHECKING:
    from sley_core.api.parts import Handover, Param
    from sley_isp.communicator import Communicator
    from sley_isp.param_group import ParamGroup, Unsharded


def is_plain(module: nn.Module, attribute: str) -> bool:
    """Returns whether parameter `attribute` of `module` can be sharded: `module` is an unmodified linear or embedding.

    Modules that compute the weight anew for each forward (`torch.nn.utils.weight_norm`), or whose forward was replaced,
    need full parameters.
    """
    if not isinstance(module._parameters.get("weight"), nn.Parameter) or "forward" in vars(module):
        return False
    if type(module) is nn.Embedding:
        return module.max_norm is None and not module.sparse and not module.scale_grad_by_freq
    return type(module) is nn.Linear and attribute in ("weight", "bias")


def shard_in(module: nn.Module, attribute: str) -> nn.Parameter | None:
    """Returns the shard for which `module` holds a stand-in as `attribute`, or the parameter that it holds."""
    parameter = module._parameters[attribute]
    return parameter.shard if type(parameter) is StandIn else parameter


class ShardedModule:
    """Replaces the forward of `module` while the run is open. weight, bias: its parameters, None if not sharded or absent.

    sink: takes the output's gradient and the input, and reduces the weights' gradients. fuses: whether a product may be added
    to a gradient in one operation, which rounds differently from two.
    """

    sink: Handover

    def __init__(
        self, communicator: Communicator, group: ParamGroup, module: nn.Module, params: dict[str, Param], *, fuses: bool
    ) -> None:
        self.communicator = communicator
        self.group = group
        self.module = module
        self.weight, self.bias = params.get("weight"), params.get("bias")
        self.params = list(params.values())
        self.fuses = fuses
        self.prefetches = True
        """Whether its forward may start the prefetch of later groups."""
        group.has_linear = group.has_linear or isinstance(module, nn.Linear)

    @property
    def name(self) -> str:
        return self.params[0].name.rpartition(".")[0]

    @property
    def trained(self) -> list[Param]:
        """The sharded parameters that are trained."""
        return [param for param in self.params if param.trainable]

    def forward(self, input: Tensor) -> Tensor:
        """Computes the linear or embedding, gathering its weights; all ranks of `wp` must call it alike."""
        is_embedding = isinstance(self.module, nn.Embedding)
        if self.is_replaced:
            return (nn.Embedding if is_embedding else nn.Linear).forward(cast(Any, self.module), input)
        if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
            raise RunError(
                "sharded-weight-mapped",
                f"{self.name!r} is called within a function of torch.func, or with forward-mode derivatives, which cannot "
                "follow its weight: other ranks send it",
                hint="call it outside of them; a subclass of nn.Linear or nn.Embedding stays whole",
            )
        x = input if is_embedding else as_autocast(input)
        if not torch.is_grad_enabled():
            return self.compute(x)
        if is_embedding:
            out: Tensor = _Embedding.apply(x, self.shard("weight"), self)  # type: ignore[no-untyped-call]  # torch's
        else:
            out = _Linear.apply(x, self.shard("weight"), self.shard("bias"), self)  # type: ignore[no-untyped-call]  # torch's
        return out

    def compute(self, x: Tensor, *, keep: int = 0) -> Tensor:
        """Computes the linear or embedding of full weights. Only autocast casts them; without it, torch raises if dtypes
        differ. keep: as in `Communicator.unshard`.
        """
        with self.communicator.unshard(self.group, self.params, keep=keep, prefetches=self.prefetches) as unsharded:
            unsharded.wait()
            weight = self.full(unsharded, "weight")
            if isinstance(self.module, nn.Embedding):
                return F.embedding(x, weight)
            return F.linear(x, weight, self.full(unsharded, "bias"))

    @property
    def is_replaced(self) -> bool:
        """Whether other tensors are in the module for now, as `torch.func.functional_call` puts them there."""
        parameters = self.module._parameters
        return any(
            param is not None and type(parameters[attribute]) is not StandIn
            for attribute, param in (("weight", self.weight), ("bias", self.bias))
        )

    def shard(self, attribute: str) -> nn.Parameter | None:
        """Returns the shard of the module's parameter `attribute`, or the parameter itself if it is not sharded."""
        return shard_in(self.module, attribute)

    def full(self, unsharded: Unsharded, attribute: str) -> Any:
        """Returns the full parameter `attribute`, gathered or the module's own; None for a bias that it does not have."""
        param = self.weight if attribute == "weight" else self.bias
        return unsharded.full(param) if param is not None else self.module._parameters[attribute]

    def keep(self, ctx: Any) -> int:
        """Returns 1 if the running forward is a recomputation whose backward will use the weights again, else 0."""
        return int(any(ctx.needs_input_grad) and self.communicator.is_recomputing and self.group.has_linear)

    def unshard_for_backward(self) -> AbstractContextManager[Unsharded]:
        """Unshards the group for a backward, which ends what a recomputation kept for it."""
        return self.communicator.unshard(self.group, self.params, keep=-1, prefetches=True)

    def write_gradient(self, param: Param, rows: Tensor, inputs: Tensor, full: Tensor, adds: bool) -> None:
        """Writes the full gradient of `param` into `full`, or adds it if `adds`.

        rows: the output's gradient [n, out]. inputs: [n, in], or an embedding's tokens [n]; no other tensor as large as the
        table is made for these.
        """
        if isinstance(self.module, nn.Embedding):
            if self.module.padding_idx is not None:
                rows = rows.masked_fill((inputs == self.module.padding_idx).unsqueeze(1), 0.0)
            if not adds:
                full.zero_()
            add_at(full, inputs, rows.to(full.dtype))
        elif param is self.bias:
            if adds:
                full += rows.sum(0, dtype=full.dtype)
            else:
                torch.sum(rows, 0, dtype=full.dtype, out=full)
        elif rows.dtype == full.dtype and not adds:
            torch.mm(rows.t(), inputs, out=full)
        elif rows.dtype == full.dtype and self.fuses:
            full.addmm_(rows.t(), inputs)
        elif adds:
            full += rows.t() @ inputs
        else:
            full.copy_(rows.t() @ inputs)


def as_autocast(x: Tensor) -> Tensor:
    """Returns `x` in the dtype in which autocast gives it to a linear: narrow, except for fp64, which it leaves alone."""
    kind = x.device.type
    is_cast = torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(kind)) if is_cast else x


def is_summed(ctx: Any) -> bool:
    """Returns whether the running backward accumulates gradients of the shards, the function's inputs after the first.

    False if a forward asks `torch.autograd.grad` for something else: then no weight gradient is computed or sent.
    """
    return any(Asked.of(ctx, place) is Asked.SUM for place in range(1, len(ctx.next_functions)))


class _Linear(torch.autograd.Function):
    """Sends gradients of sharded parameters to the module's sink; returns those of parameters that are not sharded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _weight: Tensor, _bias: Tensor | None, module: ShardedModule) -> Tensor:
        """Saves `x` only if a weight needs its gradient."""
        _, weight_needs, bias_needs, _ = ctx.needs_input_grad
        ctx.module = module
        ctx.own_weight_needs = weight_needs and module.weight is None
        ctx.own_bias_needs = bias_needs and module.bias is None
        ctx.save_for_backward(x if module.trained or ctx.own_weight_needs else None)
        return no_view(module.compute(x, keep=module.keep(ctx)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """The all-gather overlaps with the weight's gradient. Over `wp`, in the order of backwards."""
        module: ShardedModule = ctx.module
        (x,) = ctx.saved_tensors
        with module.unshard_for_backward() as unsharded:
            is_shared = module.sink.shares(gradient)
            rows = gradient.reshape(-1, gradient.shape[-1])
            weight_gradient = rows.t() @ x.reshape(-1, x.shape[-1]) if ctx.own_weight_needs else None
            bias_gradient = rows.sum(0) if ctx.own_bias_needs else None
            if module.trained and is_summed(ctx):
                assert x is not None, f"{module.name} was unfrozen between a forward and its backward"
                module.sink(rows, x.reshape(-1, x.shape[-1]), is_shared=is_shared)
            input_gradient = None
            if ctx.needs_input_grad[0]:
                unsharded.wait()
                input_gradient = gradient @ module.full(unsharded, "weight").to(gradient.dtype)
        return input_gradient, weight_gradient, bias_gradient, None


class _Embedding(torch.autograd.Function):
    """Makes the lookup differentiable; the table's gradient goes to the module's sink."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, _weight: Tensor, module: ShardedModule) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(tokens)
        return no_view(module.compute(tokens, keep=module.keep(ctx)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        """Gives the rows to the module's sink; gathers the group, as all ranks must, if a linear uses it too."""
        module: ShardedModule = ctx.module
        (tokens,) = ctx.saved_tensors
        if module.group.has_linear:  # another rank's data may use the linear here, and all ranks must gather alike
            with module.unshard_for_backward():
                pass
        if module.trained and is_summed(ctx):
            is_shared = module.sink.shares(gradient)
            module.sink(gradient.reshape(-1, gradient.shape[-1]), tokens.reshape(-1), is_shared=is_shared)
        return None, None, None
