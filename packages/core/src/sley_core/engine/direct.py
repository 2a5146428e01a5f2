"""Weight gradients of linears, multiplied straight into the gradient store.

Autograd makes the product x^T g in fresh memory and the store then copies or adds it: one write and one more pass than
needed. Here the product's own write is the accumulation (`addmm` into the slot), as Megatron's fused weight gradients do.
The sums are the same; their order within the product is the kernel's, so fp32 results may differ in the last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sley_core.engine.weight_queue import Handover, WeightQueue

if TYPE_CHECKING:
    from sley_core.engine.book import ParameterBook
    from sley_core.engine.store import GradientStore
    from sley_core.model.layers import Layer

Sink = Callable[[Tensor, Tensor], None]
"""Takes (g [n, out], x [n, in]) and adds g^T x to a weight's gradient [out, in]."""


class DirectLinear(torch.autograd.Function):
    """`F.linear` whose backward hands the weight's gradient to `sink` instead of to autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sink: Sink) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sink = sink
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_input = gradient @ weight if ctx.needs_input_grad[0] else None
        if ctx.needs_input_grad[1]:
            ctx.sink(rows, x.reshape(-1, x.shape[-1]))
        of_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return of_input, None, of_bias, None


def accumulate_directly(
    layers: Iterable[Layer],
    book: ParameterBook,
    store: GradientStore,
    queue: WeightQueue,
    *,
    all_types: bool = False,
) -> list[nn.Linear]:
    """Makes every plain `nn.Linear` of `layers` hand its weight gradient to `store`; returns them, for `undo`.

    One of which any parameter is sharded is its communicator's.

    queue: takes the products instead while a D runs. Only where weight and store have one dtype, unless `all_types`: a
    product of bf16 does not go into fp32 in one call everywhere.
    """
    found: list[nn.Linear] = []
    for layer in layers:
        for name, module in layer.module.named_modules(prefix=layer.name):
            if type(module) is not nn.Linear or _has_shards(book, name, module):
                continue
            if all_types or module.weight.dtype == store.dtype:
                sink = Handover(partial(store.add_product, book[f"{name}.weight"]), queue)
                module.forward = partial(_forward, module, sink)  # type: ignore[method-assign]
                store.expect_products(book[f"{name}.weight"])
                found.append(module)
    return found


def _has_shards(book: ParameterBook, name: str, module: nn.Module) -> bool:
    return any(book[f"{name}.{one}"].shard is not None for one, held in module._parameters.items() if held is not None)


def undo(linears: Iterable[nn.Linear]) -> None:
    """The linears' own forward again."""
    for linear in linears:
        del linear.__dict__["forward"]


def _forward(linear: nn.Linear, sink: Sink, input: Tensor) -> Tensor:
    """Its parameter is called as that of `nn.Linear.forward`: a model may name it."""
    if not torch.is_grad_enabled() or torch.is_autocast_enabled(input.device.type):
        return F.linear(input, linear.weight, linear.bias)
    result: Tensor = DirectLinear.apply(input, linear.weight, linear.bias, sink)  # type: ignore[no-untyped-call]  # torch's
    return result
