"""A linear or an embedding whose weights are sharded: what its forward and its backward do.

    forward    gather W                y = x W^T + b        only x is saved
    backward   gather W again, dW = g^T x -> reduced in the background -> store,    dx = g W meanwhile
    I, W       I: dx, and (g, x) is deferred;    W: dW and its reduction

Autograd sees the shard as an input, so that it runs the backward, and gets None as its gradient: none is allocated.

A backward gathers the weights even if the input needs no gradient. Whether it does may depend on the data, which differ between
ranks of `wp`: a linear called once, with nothing trained before it, needs no weight in its backward; called again, on its own
output, it does. Ranks gather the same units in one order only if none of this matters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from sley_core.api.parts import add_at
from sley_core.api.weights import Asked, StandIn, asked_of, no_view
from sley_core.errors import RunError

if TYPE_CHECKING:
    from sley_core.api.parts import Handover, Param
    from sley_isp.units import Gathered, Unit


class SiteHost(Protocol):
    """The interface that a site needs of its communicator."""

    # `Communicator` documents these.
    def use(self, unit: Unit, own: Sequence[Param], *, pins: int, launches: bool) -> Gathered: ...
    def done(self, gathered: Gathered) -> None: ...
    def is_recomputing(self) -> bool: ...


class Site:
    """Replaces the forward of one sharded module. weight, bias: its parameters, None if not sharded or absent. unit: gathers
    them.
    """

    def __init__(self, host: SiteHost, unit: Unit, module: nn.Module, weight: Param | None, bias: Param | None) -> None:
        self.host = host
        self.unit = unit
        self.module = module
        self.weight = weight
        self.bias = bias
        self.params = [param for param in (weight, bias) if param is not None]
        """The sharded parameters of the module."""
        self.launches = False
        self.fuses = True
        """Whether a product may be added to a gradient in one operation, which rounds differently from two."""
        self.sink: Handover
        unit.has_linear = unit.has_linear or isinstance(module, nn.Linear)

    @property
    def name(self) -> str:
        """The module's name."""
        return self.params[0].name.rpartition(".")[0]

    @property
    def trained(self) -> list[Param]:
        """The sharded parameters that are trained."""
        return [param for param in self.params if param.trainable]

    def use(self, *, pins: int = 0, launches: bool | None = None) -> Gathered:
        """Returns the unit's weights, which may still be in flight; call `Gathered.wait` before reading them.

        pins: +1 keeps them for the backward after a recomputation, -1 ends that. launches: whether prefetches may start.
        """
        return self.host.use(self.unit, self.params, pins=pins, launches=self.launches if launches is None else launches)

    @property
    def forward(self) -> Callable[[Tensor], Tensor]:
        """The forward that replaces the module's while the run is open."""
        return partial(embedding_forward if isinstance(self.module, nn.Embedding) else linear_forward, self)

    @property
    def is_replaced(self) -> bool:
        """Whether other tensors are in the module for now, as `torch.func.functional_call` puts them there."""
        held = self.module._parameters
        is_weight = self.weight is not None and type(held["weight"]) is not StandIn
        return is_weight or (self.bias is not None and type(held["bias"]) is not StandIn)

    def own(self, attribute: str) -> nn.Parameter | None:
        """Returns the shard of the module's parameter `attribute`, or the parameter itself if it is not sharded."""
        return own_of(self.module, attribute)

    def held(self, gathered: Gathered, attribute: str) -> Tensor | None:
        """Returns the full parameter `attribute`: gathered, or the module's own if it is not sharded."""
        param = self.weight if attribute == "weight" else self.bias
        return gathered.whole(param) if param is not None else self.module._parameters[attribute]


def own_of(module: nn.Module, attribute: str) -> nn.Parameter | None:
    """Returns the shard for which `module` holds a stand-in as `attribute`, or the parameter that it holds."""
    held = module._parameters[attribute]
    return held.shard if type(held) is StandIn else held


def linear_forward(site: Site, input: Tensor) -> Tensor:
    """Computes a sharded `nn.Linear`, gathering its weights; the gradients go to the site's sink."""
    if site.is_replaced:
        return nn.Linear.forward(cast(nn.Linear, site.module), input)
    check_not_mapped(site.name)
    x = as_autocast(input)
    if not torch.is_grad_enabled():
        with _used(site, site.use()) as gathered:
            return _linear(site, gathered, x)
    out: Tensor = _Linear.apply(x, site.own("weight"), site.own("bias"), site)  # type: ignore[no-untyped-call]  # torch's
    return out


def check_not_mapped(name: str) -> None:
    """Raises RunError `sharded-weight-mapped` within `torch.func.vmap`, `grad` and the like, and forward-mode derivatives."""
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        raise RunError(
            "sharded-weight-mapped",
            f"{name!r} is called within a function of torch.func, or with forward-mode derivatives, and its weight is "
            "gathered from other ranks, which these cannot follow",
            hint="call it outside of them; a subclass of nn.Linear or nn.Embedding stays whole",
        )


@contextmanager
def _used(site: Site, gathered: Gathered) -> Iterator[Gathered]:
    """Waits for the weights before the block, and ends their use after it, also if it raises."""
    try:
        gathered.wait()
        yield gathered
    finally:
        site.host.done(gathered)


def as_autocast(x: Tensor) -> Tensor:
    """Returns `x` in the dtype in which autocast gives it to a linear: narrow, except for fp64, which it leaves alone."""
    kind = x.device.type
    is_cast = torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(kind)) if is_cast else x


def _linear(site: Site, gathered: Gathered, x: Tensor) -> Tensor:
    """Computes the linear of full weights. Only autocast casts them; without it, torch raises if dtypes differ."""
    weight, bias = site.held(gathered, "weight"), site.held(gathered, "bias")
    assert weight is not None, site.unit
    return F.linear(x, weight, bias)


class _Linear(torch.autograd.Function):
    """Sends gradients of sharded parameters to the site's sink; returns those of parameters that are not sharded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _weight: Tensor, _bias: Tensor | None, site: Site) -> Tensor:
        """Gathers the weights and computes the linear; saves `x` only if a weight needs its gradient."""
        _, of_weight, of_bias, _ = ctx.needs_input_grad
        ctx.site = site
        ctx.of_whole_weight = of_weight and site.weight is None
        ctx.of_whole_bias = of_bias and site.bias is None
        ctx.save_for_backward(x if site.trained or ctx.of_whole_weight else None)
        with _used(site, site.use(pins=_pins(ctx, site))) as gathered:
            return no_view(_linear(site, gathered, x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """Gathers the weights again for the input's gradient; sends the weight's to the site's sink meanwhile."""
        site: Site = ctx.site
        (x,) = ctx.saved_tensors
        # Started first, so that it overlaps with the weight's gradient. Over `wp`, in the order of backwards.
        gathered = site.use(pins=-1, launches=True)
        with ExitStack() as over:
            over.callback(site.host.done, gathered)
            is_shared = site.sink.shares(gradient)
            rows = gradient.reshape(-1, gradient.shape[-1])
            of_weight = rows.t() @ x.reshape(-1, x.shape[-1]) if ctx.of_whole_weight else None
            of_bias = rows.sum(0) if ctx.of_whole_bias else None
            if site.trained and is_summed(ctx):
                assert x is not None, f"{site.unit} was unfrozen between a forward and its backward"
                site.sink(rows, x.reshape(-1, x.shape[-1]), is_shared=is_shared)
            if not ctx.needs_input_grad[0]:
                return None, of_weight, of_bias, None
            gathered.wait()
            weight = site.held(gathered, "weight")
            assert weight is not None, site.unit
            return gradient @ weight.to(gradient.dtype), of_weight, of_bias, None


def _pins(ctx: Any, site: Site) -> int:
    """Returns 1 if the running forward recomputes what its backward will use again, else 0."""
    return int(any(ctx.needs_input_grad) and site.host.is_recomputing())


def is_summed(ctx: Any) -> bool:
    """Returns whether the running backward accumulates gradients of the shards, the function's inputs after the first.

    False if a forward asks `torch.autograd.grad` for something else: then no weight gradient is computed or sent.
    """
    return any(asked_of(ctx, place) is Asked.SUM for place in range(1, len(ctx.next_functions)))


def linear_gradient(site: Site, param: Param, rows: Tensor, inputs: Tensor, whole: Tensor, adds: bool) -> None:
    """Writes the full gradient of `param` into `whole`, or adds it if `adds`: rows^T inputs, for a bias the sum of rows."""
    if param is site.bias:
        if adds:
            whole += rows.sum(0, dtype=whole.dtype)
        else:
            torch.sum(rows, 0, dtype=whole.dtype, out=whole)
    elif rows.dtype != whole.dtype or (adds and not site.fuses):
        _put(rows.t() @ inputs, whole, adds)
    elif adds:
        whole.addmm_(rows.t(), inputs)
    else:
        torch.mm(rows.t(), inputs, out=whole)


def embedding_forward(site: Site, input: Tensor) -> Tensor:
    """Computes a sharded `nn.Embedding`, gathering its table. Its backward gathers only units that a linear uses too."""
    if site.is_replaced:
        return nn.Embedding.forward(cast(nn.Embedding, site.module), input)
    check_not_mapped(site.name)
    if not torch.is_grad_enabled():
        return _embedding(site, input)
    out: Tensor = _Embedding.apply(input, site.own("weight"), site)  # type: ignore[no-untyped-call]  # torch's
    return out


def _embedding(site: Site, tokens: Tensor, pins: int = 0) -> Tensor:
    """Gathers the table and returns the vectors of `tokens`."""
    with _used(site, site.use(pins=pins)) as gathered:
        weight = site.held(gathered, "weight")
        assert weight is not None, site.unit
        return F.embedding(tokens, weight)


class _Embedding(torch.autograd.Function):
    """Makes the lookup differentiable; the table's gradient goes to the site's sink."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, _weight: Tensor, site: Site) -> Tensor:
        ctx.site = site
        ctx.save_for_backward(tokens)
        return no_view(_embedding(site, tokens, _pins(ctx, site) if site.unit.has_linear else 0))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        """Gives the rows to the site's sink; gathers the unit, as all ranks must, if a linear uses it too."""
        (tokens,) = ctx.saved_tensors
        if ctx.site.unit.has_linear:  # another rank's data may use the linear here, and all ranks must gather alike
            ctx.site.host.done(ctx.site.use(pins=-1, launches=True))
        if ctx.site.trained and is_summed(ctx):
            is_shared = ctx.site.sink.shares(gradient)
            rows = gradient.reshape(-1, gradient.shape[-1])
            ctx.site.sink(rows, tokens.reshape(-1), is_shared=is_shared)
        return None, None, None


def embedding_gradient(site: Site, param: Param, rows: Tensor, tokens: Tensor, whole: Tensor, adds: bool) -> None:
    """Writes the full gradient of a table into `whole`, or adds it if `adds`: each of `rows` is added at its token.

    No other tensor as large as `whole` is made.
    """
    module = site.module
    assert isinstance(module, nn.Embedding), module
    if module.padding_idx is not None:
        rows = rows.masked_fill((tokens == module.padding_idx).unsqueeze(1), 0.0)
    if not adds:
        whole.zero_()
    add_at(whole, tokens, rows.to(whole.dtype))


def _put(gradient: Tensor, whole: Tensor, adds: bool) -> None:
    if adds:
        whole.add_(gradient)
    else:
        whole.copy_(gradient)


def is_plain(module: nn.Module, attribute: str) -> bool:
    """Returns whether a site can replace parameter `attribute` of `module`: an unmodified linear or embedding.

    Modules that compute the weight anew for each forward (`torch.nn.utils.weight_norm`), or whose forward was replaced,
    need full parameters.
    """
    if not isinstance(module._parameters.get("weight"), nn.Parameter) or "forward" in vars(module):
        return False
    if type(module) is nn.Embedding:
        return module.max_norm is None and not module.sparse and not module.scale_grad_by_freq
    return type(module) is nn.Linear and attribute in ("weight", "bias")
