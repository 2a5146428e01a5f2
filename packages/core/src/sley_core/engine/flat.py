"""Flat buffers: one aligned tensor with many views, used by buckets, coalesced gathers, masters and offload.

    | a a a a a . . . | b b . . . . . . | c c c c c c c . |      . padding, always zero
    0                 offset of b       offset of c

An operation over the buffer is one call instead of one per tensor, and no step allocates memory for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from operator import mul

import torch
from torch import Tensor

ALIGNMENT_BYTES = 256
"""Every view starts at a multiple of this: suits vector loads and NCCL's copy paths, and equals the CUDA allocator's."""


class FlatBuffer:
    """Holds `len(shapes)` contiguous, aligned views into one zeroed tensor `data` of `dtype` on `device`.

    data: shape [numel], padding included. views: in the order of `shapes`. Padding stays zero as long as only views are
    written, so a sum or a norm over `data` is one over the views. memory: becomes `data`, and must be zeroed; left out, it is
    allocated. alignment: of each view, in elements; left out, ALIGNMENT_BYTES. multiple: `numel` divides into that many aligned
    parts.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype,
        device: torch.device,
        memory: Tensor | None = None,
        *,
        alignment: int | None = None,
        multiple: int = 1,
    ) -> None:
        alignment = alignment or ALIGNMENT_BYTES // dtype.itemsize
        self.offsets, numel = offsets(shapes, alignment, multiple)
        self.data: Tensor = torch.zeros(numel, dtype=dtype, device=device) if memory is None else memory
        assert self.data.shape == (numel,), f"{self.data.shape} for {numel} elements"
        self.views = views_of(self.data, self.offsets, shapes)

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()


def offsets(shapes: Sequence[Sequence[int]], alignment: int, multiple: int = 1) -> tuple[list[int], int]:
    """Returns the offset of each shape, in elements and a multiple of `alignment`, and the number of elements of the buffer.

    multiple: above 1, that number divides into as many aligned parts, each of at least one `alignment`.
    """
    starts: list[int] = []
    end = 0
    for shape in shapes:
        starts.append(end)
        end += -(-prod(shape) // alignment) * alignment
    if multiple > 1:
        end = max(1, -(-end // (multiple * alignment))) * multiple * alignment
    return starts, end


def views_of(flat: Tensor, starts: Sequence[int], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Returns a contiguous view of `flat`, [numel], for each of `shapes`, which begins at that element of `starts`."""
    before, numel = int(flat.storage_offset()), flat.numel()
    views = []
    for start, shape in zip(starts, shapes, strict=True):
        assert start + prod(shape) <= numel, f"{shape} at {start} of {numel} elements"
        strides = list(accumulate(reversed(shape[1:]), mul, initial=1))[::-1] if len(shape) else []
        # one call where a slice and its `view` are two, for each weight that is gathered and for each gradient
        views.append(flat.as_strided(tuple(shape), strides, before + start))
    return views
