"""The two exchanges of an attention over slices, as autograd functions: the backward of each is the other.

    heads_of_all ──> [b, s/n, h, d] -> [b, s, h/n, d]      a slice of every head  ->  the whole sequence of some heads
    slice_of_all ──> [b, s, h/n, d] -> [b, s/n, h, d]      and back

Ulysses (Jacobs et al. 2023, arXiv 2309.14509, section 3.1). Each is one all-to-all of one tensor, whatever is exchanged. All
ranks of a group run the same layers of the same micro-batch, forward and backward, so they come here in one order; each says
what it exchanges for which attention, and one that says something else is an error on all of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sley_core.api.comm import Group
from sley_isp.sequence.pack import pack_heads, pack_positions, repeat_heads, sum_copies, unpack_heads, unpack_positions


def heads_of_all(group: Group, *tensors: Tensor, contents: int = 0) -> tuple[Tensor, ...]:
    """Exchanges tensors [b, s/n, ..., h, d] of one dtype for this rank's heads over the full sequence: [b, s, ..., h', d].

    h' = lcm(h, n) / n: if h is not a multiple of n, several ranks get the same head, and its gradient is the sum of
    theirs. For b = 1 the results are views of one buffer. contents: a checksum that says for which attention, compared
    between ranks. Blocks.
    """
    if group.size == 1:
        return tensors
    found: tuple[Tensor, ...] = _HeadsOfAll.apply(group, contents, *tensors)  # type: ignore[no-untyped-call]  # torch's
    return found


def slice_of_all(group: Group, tensor: Tensor, contents: int = 0) -> Tensor:
    """Exchanges a tensor [b, s, ..., h/n, d] for this rank's slice with the heads of all ranks: [b, s/n, ..., h, d].

    contents: as in `heads_of_all`. Blocks.
    """
    if group.size == 1:
        return tensor
    found: Tensor = _SliceOfAll.apply(group, contents, tensor)  # type: ignore[no-untyped-call]  # torch's
    return found


class _HeadsOfAll(torch.autograd.Function):
    """Makes `heads_of_all` differentiable."""

    @staticmethod
    def forward(ctx: Any, group: Group, contents: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Repeats heads until each rank gets equally many, and exchanges slices of all heads for whole sequences of some."""
        ctx.group, ctx.contents = group, contents
        ctx.heads = [tensor.shape[-2] for tensor in tensors]
        ready = [repeat_heads(tensor, group.size) for tensor in tensors]
        return tuple(_scatter_heads(group, ready, "queries, keys and values", contents))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = _gather_heads(ctx.group, gradients, "gradients of queries, keys and values", ctx.contents)
        return None, None, *(sum_copies(gradient, heads) for gradient, heads in zip(found, ctx.heads, strict=True))


class _SliceOfAll(torch.autograd.Function):
    """Makes `slice_of_all` differentiable."""

    @staticmethod
    def forward(ctx: Any, group: Group, contents: int, tensor: Tensor) -> Tensor:
        ctx.group, ctx.contents = group, contents
        (found,) = _gather_heads(group, (tensor,), "the context", contents)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        (found,) = _scatter_heads(ctx.group, (gradient,), "the gradient of the context", ctx.contents)
        return None, None, found


def _scatter_heads(group: Group, tensors: Any, what: str, contents: int) -> list[Tensor]:
    shapes = [(*tensor.shape[2:-2], tensor.shape[-2] // group.size, tensor.shape[-1]) for tensor in tensors]
    return unpack_positions(_exchanged(pack_heads(tensors, group.size), group, what, contents), shapes)


def _gather_heads(group: Group, tensors: Any, what: str, contents: int) -> list[Tensor]:
    shapes = [tensor.shape[2:] for tensor in tensors]
    return unpack_heads(_exchanged(pack_positions(tensors, group.size), group, what, contents), shapes)


def _exchanged(buffer: Tensor, group: Group, what: str, contents: int) -> Tensor:
    """Returns the all-to-all of `buffer`: row i is this rank's row of rank i's buffer. Blocks."""
    received = torch.empty_like(buffer)
    # Over the ranks that hold the slices of the same samples; the module's docstring says why their order agrees.
    group.transport().all_to_all(received, buffer, what=what, contents=contents).wait_sent()
    return received
