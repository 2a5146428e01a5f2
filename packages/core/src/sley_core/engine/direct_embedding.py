"""Gradients of embedding tables, added row by row to the gradient store: the dense table of autograd is never allocated.

Each row is added in the store's dtype, in the order of the tokens, as communicators of sharded tables do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sley_core.engine.direct import Asked, asked_of, has_shards, no_view
from sley_core.engine.weight_queue import Handover
from sley_core.model.patch import ForwardPatch

if TYPE_CHECKING:
    from sley_core.engine.book import Entry, ParameterBook
    from sley_core.engine.gradients import GradientStore
    from sley_core.engine.weight_queue import WeightQueue
    from sley_core.model.layers import Layer


class DirectEmbedding(torch.autograd.Function):
    """Computes `F.embedding` with a backward that gives the gradient's rows to `sink`, if the backward would accumulate
    them.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, padding_idx: int | None, sink: Handover) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.sink, ctx.padding_idx, ctx.num_rows = sink, padding_idx, weight.shape[0]
        return no_view(F.embedding(tokens, weight, padding_idx))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, None, None]:
        """Gives the rows to `sink` if they are to be accumulated; returns the dense gradient if `autograd.grad` or
        `create_graph` wants it.
        """
        (tokens,) = ctx.saved_tensors
        asked = asked_of(ctx)
        if asked is Asked.SUM and not torch.is_grad_enabled():
            is_shared = ctx.sink.shares(gradient)
            rows, flat = gradient.reshape(-1, gradient.shape[-1]), tokens.reshape(-1)
            ctx.sink(without_padding(rows, flat, ctx.padding_idx), flat, is_shared=is_shared)
            return None, None, None, None
        if asked is Asked.NOTHING:
            return None, None, None, None
        padding = -1 if ctx.padding_idx is None else ctx.padding_idx
        table = torch.ops.aten.embedding_dense_backward(gradient, tokens, ctx.num_rows, padding, False)
        return None, table, None, None


def without_padding(rows: Tensor, tokens: Tensor, padding_idx: int | None) -> Tensor:
    """Returns `rows` [n, width] with zeros where `tokens` [n] are padding, whose row is not trained."""
    return rows if padding_idx is None else rows.masked_fill((tokens == padding_idx).unsqueeze(1), 0.0)


def embedding_forward(embedding: nn.Embedding, weight: Tensor, sink: Handover, input: Tensor) -> Tensor:
    """Runs the forward of `embedding` while a run is open. The last parameter is named as that of `nn.Embedding.forward`.

    weight: the parameter that the store knows; if the module now has another, autograd handles that.
    """
    held = embedding.weight
    is_own = held is weight and held.requires_grad and not held._backward_hooks
    if not is_own or not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return F.embedding(input, held, embedding.padding_idx)
    found: Tensor = DirectEmbedding.apply(input, held, embedding.padding_idx, sink)  # type: ignore[no-untyped-call]  # torch's
    return found


def is_plain_embedding(module: nn.Module) -> TypeGuard[nn.Embedding]:
    """Returns whether `module` is exactly torch's embedding, without `max_norm`, `sparse` or `scale_grad_by_freq`."""
    if type(module) is not nn.Embedding or "forward" in module.__dict__ or module._parameters.get("weight") is None:
        return False
    return module.max_norm is None and not module.sparse and not module.scale_grad_by_freq


def add_rows_directly(
    layers: Iterable[Layer], book: ParameterBook, store: GradientStore, queue: WeightQueue
) -> Callable[[], None]:
    """Patches every plain, unsharded `nn.Embedding` of `layers` to add its gradient's rows to `store` directly. Returns a
    function that undoes it.

    queue: takes the rows instead while a D runs.
    """
    patches = ExitStack()
    for layer in layers:
        for name, module in layer.module.named_modules(prefix=layer.name):
            if is_plain_embedding(module) and not has_shards(book, name, module):
                entry = book[f"{name}.weight"]
                sink = Handover(partial(_put_rows, store, entry, layer.name), queue, entry)
                patches.callback(ForwardPatch(module, partial(embedding_forward, module, module.weight, sink)).undo)
                store.expect_products(entry)
    return patches.close


def _put_rows(store: GradientStore, entry: Entry, layer: str, rows: Tensor, tokens: Tensor) -> None:
    store.put_rows(entry, tokens, rows, layer)
