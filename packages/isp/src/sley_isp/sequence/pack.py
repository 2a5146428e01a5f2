"""The buffer of one exchange: tensors cut by heads or by positions, side by side.

    by heads       [b, s/n, ..., h, d]  ──>  buffer [n, b, s/n, w]    row i: the heads of rank i
    by positions   [b, s, ..., h/n, d]  ──>  buffer [n, b, s/n, w]    row i: the positions of slice i

w counts the elements of all tensors that one position has for one rank. After an exchange of rows the buffer's row i is what
rank i sent, so what was packed by heads is unpacked by positions, and the other way round. No communication here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def pack_heads(tensors: Sequence[Tensor], num_ranks: int) -> Tensor:
    """Returns the buffer [n, b, s/n, w] of tensors [b, s/n, ..., h, d]; every h is a multiple of n."""
    parts = [torch.unflatten(tensor, -2, (num_ranks, -1)).movedim(-3, 0) for tensor in tensors]
    return _side_by_side(parts)


def pack_positions(tensors: Sequence[Tensor], num_ranks: int) -> Tensor:
    """Returns the buffer [n, b, s/n, w] of tensors [b, s, ..., h/n, d]; s is a multiple of n."""
    parts = [torch.unflatten(tensor, 1, (num_ranks, -1)).movedim(1, 0) for tensor in tensors]
    return _side_by_side(parts)


def unpack_positions(buffer: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Returns the tensors [b, s, ..., h/n, d] of a buffer whose rows are the slices of a sequence.

    shapes: of each tensor per position, (..., h/n, d). For b = 1 they are views of the buffer.
    """
    return [part.movedim(0, 1).flatten(1, 2) for part in _parts(buffer, shapes)]


def unpack_heads(buffer: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Returns the tensors [b, s/n, ..., h, d] of a buffer whose rows are the heads of each rank. shapes: as above."""
    return [part.movedim(0, -3).flatten(-3, -2) for part in _parts(buffer, shapes)]


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Returns tensors [n, b, s/n, ...] as one [n, b, s/n, w]; each is copied once."""
    widths = [math.prod(part.shape[3:]) for part in parts]
    buffer = parts[0].new_empty((*parts[0].shape[:3], sum(widths)))
    for place, part in zip(torch.split(buffer, widths, dim=-1), parts, strict=True):
        torch.unflatten(place, -1, part.shape[3:]).copy_(part)
    return buffer


def _parts(buffer: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    widths = [math.prod(shape) for shape in shapes]
    places = torch.split(buffer, widths, dim=-1)
    return [torch.unflatten(place, -1, tuple(shape)) for place, shape in zip(places, shapes, strict=True)]


def repeat_heads(tensor: Tensor, num_ranks: int) -> Tensor:
    """Returns [b, s, ..., h, d] with each head repeated until all ranks get equally many: lcm(h, n) heads.

    Copies of a head are adjacent, so query heads still match theirs: with g query heads per head before, g / copies
    after, in the same order.
    """
    copies = math.lcm(tensor.shape[-2], num_ranks) // tensor.shape[-2]
    return tensor if copies == 1 else tensor.repeat_interleave(copies, dim=-2)


def sum_copies(gradient: Tensor, num_heads: int) -> Tensor:
    """Returns the gradient of `repeat_heads`: [b, s, ..., copies x h, d] -> [b, s, ..., h, d], copies summed."""
    if gradient.shape[-2] == num_heads:
        return gradient
    return torch.sum(torch.unflatten(gradient, -2, (num_heads, -1)), dim=-2)
