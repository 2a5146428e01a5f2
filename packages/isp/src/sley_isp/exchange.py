"""The two exchanges of an attention over slices, as autograd functions. Each is the backward of the other.

    scatter_heads   [b, s/n, h, d] -> [b, s, h/n, d]      a slice of every head  ->  the full sequence of some heads
    gather_heads    [b, s, h/n, d] -> [b, s/n, h, d]      and back

They follow Ulysses (Jacobs et al. 2023, arXiv 2309.14509, section 3.1). Each exchange is one all-to-all of one buffer, in which
the tensors are side by side. w is the number of elements of a position for one rank:

    by heads       [b, s/n, ..., h, d]  ──>  buffer [n, b, s/n, w]    row i: the heads of rank i
    by positions   [b, s, ..., h/n, d]  ──>  buffer [n, b, s/n, w]    row i: the positions of slice i

After the all-to-all, row i comes from rank i. So a buffer packed by heads is unpacked by positions, and one packed by positions
is unpacked by heads. All ranks of a group run the same layers of the same microbatch, so their exchanges have the same order.
A label and a checksum identify each exchange. If they differ between ranks, all ranks raise an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sley_core.api.comm import Group


def scatter_heads(group: Group, *tensors: Tensor, contents: int = 0) -> tuple[Tensor, ...]:
    """Exchanges slices of all heads, [b, s/n, ..., h, d], for full sequences of this rank's heads, [b, s, ..., h', d]. Blocks.

    tensors: tensors of one dtype. contents: a checksum of the attention, which must be equal on all ranks.
    h' is lcm(h, n) / n. If h is not a multiple of n, several ranks get the same head, and its gradient is the sum of theirs.
    For b = 1 the results are views of one buffer.
    """
    full: tuple[Tensor, ...] = _ScatterHeads.apply(group, contents, *tensors)  # type: ignore[no-untyped-call]
    return full


def gather_heads(group: Group, tensor: Tensor, contents: int = 0) -> Tensor:
    """Exchanges full sequences of this rank's heads, [b, s, ..., h/n, d], for a slice of all heads, [b, s/n, ..., h, d].

    contents: as in `scatter_heads`. Blocks.
    """
    sliced: Tensor = _GatherHeads.apply(group, contents, tensor)  # type: ignore[no-untyped-call]
    return sliced


class _ScatterHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, contents: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.contents = group, contents
        ctx.heads = [tensor.shape[-2] for tensor in tensors]
        repeated = [repeat_heads(tensor, group.size) for tensor in tensors]
        return tuple(_scatter(group, repeated, "queries, keys and values", contents))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        sliced = _gather(ctx.group, gradients, "gradients of queries, keys and values", ctx.contents)
        return None, None, *(sum_copies(gradient, heads) for gradient, heads in zip(sliced, ctx.heads, strict=True))


class _GatherHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, contents: int, tensor: Tensor) -> Tensor:
        ctx.group, ctx.contents = group, contents
        return _gather(group, (tensor,), "the context", contents)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        return None, None, _scatter(ctx.group, (gradient,), "the gradient of the context", ctx.contents)[0]


def _scatter(group: Group, tensors: Sequence[Tensor], label: str, contents: int) -> list[Tensor]:
    """Exchanges tensors [b, s/n, ..., h, d], whose h are multiples of n, for [b, s, ..., h/n, d]."""
    shapes = [(*tensor.shape[2:-2], tensor.shape[-2] // group.size, tensor.shape[-1]) for tensor in tensors]
    buffer = _concatenate([torch.unflatten(tensor, -2, (group.size, -1)).movedim(-3, 0) for tensor in tensors])
    parts = _split(_all_to_all(buffer, group, label, contents), shapes)
    return [part.movedim(0, 1).flatten(1, 2) for part in parts]  # views of the buffer if b = 1


def _gather(group: Group, tensors: Sequence[Tensor], label: str, contents: int) -> list[Tensor]:
    """Exchanges tensors [b, s, ..., h/n, d], whose s is a multiple of n, for [b, s/n, ..., h, d]."""
    shapes = [tensor.shape[2:] for tensor in tensors]
    buffer = _concatenate([torch.unflatten(tensor, 1, (group.size, -1)).movedim(1, 0) for tensor in tensors])
    parts = _split(_all_to_all(buffer, group, label, contents), shapes)
    return [part.movedim(0, -3).flatten(-3, -2) for part in parts]


def _all_to_all(buffer: Tensor, group: Group, label: str, contents: int) -> Tensor:
    output = torch.empty_like(buffer)
    # Over the ranks that hold the slices of the same samples, in the same order (see the module's docstring).
    group.transport().all_to_all(output, buffer, label=label, contents=contents).wait_sent()
    return output


def _concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Concatenates tensors [n, b, s/n, ...] into a new buffer [n, b, s/n, w], and copies each only once."""
    widths = [math.prod(part.shape[3:]) for part in parts]
    buffer = parts[0].new_empty((*parts[0].shape[:3], sum(widths)))
    for target, part in zip(torch.split(buffer, widths, dim=-1), parts, strict=True):
        torch.unflatten(target, -1, part.shape[3:]).copy_(part)
    return buffer


def _split(buffer: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    parts = torch.split(buffer, [math.prod(shape) for shape in shapes], dim=-1)
    return [torch.unflatten(part, -1, tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]


def repeat_heads(tensor: Tensor, num_ranks: int) -> Tensor:
    """Repeats each head of [b, s, ..., h, d], so that there are lcm(h, n) heads and all ranks get the same number.

    Copies of a head are adjacent, so each query head still matches a copy of its key head.
    """
    num_copies = math.lcm(tensor.shape[-2], num_ranks) // tensor.shape[-2]
    return tensor if num_copies == 1 else tensor.repeat_interleave(num_copies, dim=-2)


def sum_copies(gradient: Tensor, num_heads: int) -> Tensor:
    """Returns the gradient of `repeat_heads`, [b, s, ..., copies x h, d] -> [b, s, ..., h, d], with copies summed."""
    if gradient.shape[-2] == num_heads:
        return gradient
    return torch.sum(torch.unflatten(gradient, -2, (num_heads, -1)), dim=-2)
