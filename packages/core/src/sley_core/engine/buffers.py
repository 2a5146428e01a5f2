"""Flat buffers, the layout of gradients in them, and the part of each that this rank reduces and updates.

    | a a a a a . . . | b b . . . . . . | c c c c c c c . |      . padding, always zero
    0                 offset of b       offset of c

Many aligned views share one tensor, so an operation over the buffer is one call instead of one per view, and no step allocates
memory for it. If a buffer is sharded (ZeRO's partitions), each rank of a group gets the sum of one part:

    buffer   | a a a a a . | b b b . . . | c c . . . . |
    shards   | rank 0          | rank 1            |         rank 0: all of a, the first elements of b

A shard may begin anywhere within a parameter, so only element-wise operations can work on it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sley_core.comm.exchanges import checksum
from sley_core.engine.registry import Param
from sley_core.errors import RunError
from sley_core.memory import ALIGNMENT_BYTES, round_up


class FlatLayout:
    """The layout of tensors with these `shapes` in a flat buffer.

    alignment: the alignment of each tensor, in elements. multiple: the number of equal, aligned parts into which the buffer can
    be divided. offsets: the offsets of the tensors, in elements. numel: the number of elements of the buffer, with padding.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], alignment: int, multiple: int = 1) -> None:
        self.offsets: list[int] = []
        self.numel = 0
        for shape in shapes:
            self.offsets.append(self.numel)
            self.numel += round_up(prod(shape), alignment)
        if multiple > 1:
            self.numel = round_up(max(1, self.numel), multiple * alignment)
        # Strides are computed once, since weights are gathered into such buffers many times in a step.
        strides = (list(accumulate(reversed(shape[1:]), mul, initial=1))[::-1] if len(shape) else [] for shape in shapes)
        self._views = list(zip(map(tuple, shapes), strides, self.offsets, strict=True))

    def views(self, flat: Tensor) -> list[Tensor]:
        """Returns a contiguous view of `flat` [numel] for each of the shapes."""
        assert flat.numel() == self.numel, f"{flat.numel()} elements for {self.numel}"
        start = int(flat.storage_offset())
        # One call instead of a slice and a `view`.
        return [flat.as_strided(shape, strides, start + offset) for shape, strides, offset in self._views]


class FlatBuffer:
    """Holds `len(shapes)` contiguous, aligned views into one zeroed tensor `data` of `dtype` on `device`.

    data: shape [numel], including padding. views: the views, in the order of `shapes`. Padding stays zero as long as only views
    are written, so a sum or a norm over `data` equals that over the views. memory: the zeroed tensor that becomes `data`;
    allocated by default. alignment, multiple: as in `FlatLayout`; the default alignment is ALIGNMENT_BYTES bytes.
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
        layout = FlatLayout(shapes, alignment or ALIGNMENT_BYTES // dtype.itemsize, multiple)
        self.offsets = layout.offsets
        self.data: Tensor = torch.zeros(layout.numel, dtype=dtype, device=device) if memory is None else memory
        self.views = layout.views(self.data)

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()


SHARD_ALIGNMENT = 128
"""The alignment, in elements, of the parameters in a sharded buffer. Gradients, working weights and masters have the same
offsets, which are multiples of 256 bytes in every dtype of two bytes or more.
"""


class ElementRange(NamedTuple):
    """Names the range [first, last) of elements of a flattened parameter."""

    first: int
    last: int

    @property
    def numel(self) -> int:
        return self.last - self.first

    def optimizer_shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape for the optimizer: `whole`, the parameter's shape, if the range has all elements. Otherwise returns
        a flat shape with leading dims of size 1, since an optimizer may treat matrices and vectors differently.
        """
        if self.numel == prod(whole):
            return tuple(whole)
        return (*(1 for _ in whole[1:]), self.numel)


@dataclass(frozen=True)
class BufferShard:
    """Names this rank's part of a buffer: part `index` of `count` equal parts over the ranks of the group `axis`. If the reduce
    group is larger than `count`, other ranks have copies of the part.
    """

    axis: str
    count: int
    index: int

    def bounds(self, numel: int) -> tuple[int, int]:
        """Returns the half-open index range [start, end) of the part in a buffer of `numel` elements."""
        size, remainder = divmod(numel, self.count)
        assert remainder == 0, f"{numel} elements over {self.count} ranks"
        return size * self.index, size * (self.index + 1)


FULL_BUFFER = BufferShard("", 1, 0)
"""The only shard of a buffer that is not divided."""


class Layout(NamedTuple):
    """The layout of gradients that a reducer needs: the buffers, and the order in which parameters are reported ready.

    buffers: the parameters of each buffer, all of one `Param.family`. order: all parameters in the order of their reports,
    which is equal on all ranks of every reduce group. loose: the parameters of `order` in no buffer, because no handler reduces
    them. shards: the part of each buffer whose sum this rank gets, None for a full buffer; empty if all are full. is_fixed:
    whether masters and optimizer states follow the layout, so that no parameter may be frozen or unfrozen.
    """

    buffers: list[list[Param]]
    order: list[Param]
    loose: Sequence[Param] = ()
    shards: Sequence[BufferShard | None] = ()
    is_fixed: bool = False

    def check(self, trainable: Sequence[Param]) -> None:
        """Asserts that `order`, and `buffers` with `loose`, name each of `trainable`, in the registry's order, exactly once."""
        for params in (self.order, [param for buffer in (*self.buffers, self.loose) for param in buffer]):
            indices = sorted(param.index for param in params)
            assert indices == [param.index for param in trainable], "a layout names every trainable parameter once"


class NormGroup(NamedTuple):
    """Groups gradients that enter a norm with the same factor. tensors: this rank's gradients, of one dtype. reduce_group:
    their reduce group. stages: the stages that hold a copy of each. num_shards: the number of ranks of the reduce group that
    share one copy, each with other elements.
    """

    tensors: list[Tensor]
    reduce_group: str
    stages: tuple[int, ...]
    num_shards: int = 1


Planner = Callable[[list[Param]], Layout]
"""A function that returns the layout of parameters, which it receives in reverse order of use."""


def plan_without_buffers(params: list[Param]) -> Layout:
    """Returns a layout without buffers, for a run without a reduction."""
    return Layout([], params, params)


def group_by_reduce_group(params: list[Param]) -> Layout:
    """Returns a layout with one buffer per `Param.family`, in the order of `params`."""
    families: dict[tuple[object, ...], list[Param]] = {}
    for param in params:
        families.setdefault(param.family, []).append(param)
    return Layout(list(families.values()), params)


class GradientBuffer(FlatBuffer):
    """Holds the gradients of parameters of one family, side by side in `memory`. shard: the part whose sum this rank gets; None
    for the full buffer. is_whole: False once a reducer has begun to sum a sharded buffer.
    """

    def __init__(self, params: Sequence[Param], memory: Tensor, shard: BufferShard | None = None) -> None:
        shapes = [param.parameter.shape for param in params]
        super().__init__(shapes, memory.dtype, memory.device, memory, **_buffer_alignment(shard))
        self.params = list(params)
        self.shard = shard
        self.num_shards = shard.count if shard else 1
        self.is_whole = True
        self.reduce_group = params[0].reduce_group
        self.stages = params[0].stages
        self._begin, self._end = (shard or FULL_BUFFER).bounds(self.data.numel())
        assert all(param.family == params[0].family for param in params), f"{params} do not reduce together"

    @cached_property
    def contents(self) -> int:
        """Returns a checksum of the parameters' names in order, which is equal on all ranks that sum the buffer."""
        return checksum(param.name for param in self.params)

    @cached_property
    def local_part(self) -> Tensor:
        """Returns the part of `data` whose sum this rank gets, [numel / count]; `data` itself if the buffer is not sharded."""
        return self.data if self.shard is None else self.data[self._begin : self._end]

    @cached_property
    def ranges(self) -> dict[Param, ElementRange]:
        """Returns the range of each parameter's elements in this rank's part, which may be empty."""
        return self.ranges_of((self.shard or FULL_BUFFER).index)

    def ranges_of(self, index: int) -> dict[Param, ElementRange]:
        """Returns the range of each parameter's elements in part `index` of the buffer."""
        begin, end = replace(self.shard or FULL_BUFFER, index=index).bounds(self.data.numel())
        ranges = {}
        for param, start in zip(self.params, self.offsets, strict=True):
            first = min(max(begin - start, 0), param.numel)
            ranges[param] = ElementRange(first, max(first, min(end - start, param.numel)))
        return ranges

    @cached_property
    def parts(self) -> dict[Param, Tensor]:
        return self.part_views(self.local_part)

    def part_views(self, memory: Tensor) -> dict[Param, Tensor]:
        """Returns, for each parameter, a view of its elements in `memory`, a tensor of the length of `local_part`."""
        views = {}
        for param, start in zip(self.params, self.offsets, strict=True):
            elements = self.ranges[param]
            first = max(start + elements.first - self._begin, 0) if elements.numel else 0
            views[param] = memory[first : first + elements.numel].view(elements.optimizer_shape(param.parameter.shape))
        return views

    def check_not_sharded(self, param: Param) -> None:
        """Raises RunError `gradient-sharded`, which names `param`, if a reducer has begun to sum this sharded buffer."""
        if not self.is_whole:
            message = f"the gradient of the parameter {param.name!r} is reduced to shards, and this rank has only one of them"
            hint = "use `store.part(param)`, which contains the elements `store.elements(param)`"
            raise RunError("gradient-sharded", message, hint=hint)

    def zero_padding(self) -> None:
        """Zeroes the padding in this rank's part, in which a reduction may leave arbitrary values."""
        if self._padding_views:
            torch._foreach_zero_(self._padding_views)

    @cached_property
    def _padding_views(self) -> list[Tensor]:
        starts = [max(start + param.numel, self._begin) for param, start in zip(self.params, self.offsets, strict=True)]
        ends = [min(end, self._end) for end in (*self.offsets[1:], self.data.numel())]
        return [self.data[start:end] for start, end in zip(starts, ends, strict=True) if start < end]


def _buffer_alignment(shard: BufferShard | None) -> dict[str, Any]:
    return {} if shard is None else {"alignment": SHARD_ALIGNMENT, "multiple": shard.count}


def allocate_buffers(layout: Layout, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, list[GradientBuffer]]:
    """Allocates one zeroed tensor for all buffers of `layout`. Returns it and the buffers, without those of no parameters."""
    shards = layout.shards or [None] * len(layout.buffers)
    lists = [(params, shard) for params, shard in zip(layout.buffers, shards, strict=True) if params]
    alignment = {"alignment": ALIGNMENT_BYTES // dtype.itemsize}
    sizes = [
        FlatLayout([param.parameter.shape for param in params], **(_buffer_alignment(shard) or alignment)).numel
        for params, shard in lists
    ]
    memory = torch.zeros(sum(sizes), dtype=dtype, device=device)
    parts = torch.split(memory, sizes)
    return memory, [GradientBuffer(params, part, shard) for (params, shard), part in zip(lists, parts, strict=True)]
