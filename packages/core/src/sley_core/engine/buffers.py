"""Flat buffers of gradients and of working weights, and the part of each that this rank reduces and updates.

    | a a a a a . . . | b b . . . . . . | c c c c c c c . |      . padding, always zero
    0                 offset of b       offset of c

Many aligned views share one tensor, so an operation over the buffer is one call instead of one per view, and no step allocates
memory for it. If a buffer is sharded (ZeRO's partitions), each rank of a group gets the sum of one part:

    buffer   | a a a a a . | b b b . . . | c c . . . . |
    shards   | rank 0          | rank 1            |         rank 0: all of a, the first elements of b

A shard may begin anywhere within a parameter, so only element-wise operations can work on it.

Working weights are in buffers only if a part of the run requests it, since `torch.save` of such a parameter saves its whole
buffer unless it is cloned. Tied modules keep one parameter object:

    lay_out ──> adopt: values move in, masters are made ──> updated: ranks have updated their parts ──> settle ─┐
                                                               ^                                               │
                                                               └───────────────────────────────────────────────┘
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from sley_core.comm.device import free, reallocate, storage_id
from sley_core.comm.exchanges import checksum
from sley_core.engine.registry import Param
from sley_core.errors import RunError
from sley_core.memory import ALIGNMENT_BYTES, round_up
from sley_core.model.tensors import matches_any, select_parameter_dtype


class FlatLayout:
    """The places of tensors with the given `shapes` in a flat buffer. alignment: the alignment of each tensor, in elements.
    multiple: the number of equal, aligned parts into which the buffer can be divided. offsets: the tensors' offsets, in
    elements. numel: the number of elements of the buffer, including padding.
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
        """Returns one contiguous view of `flat` [numel] for each of the `shapes`."""
        assert flat.numel() == self.numel, f"{flat.numel()} elements for {self.numel}"
        start = int(flat.storage_offset())
        # One call instead of a slice and a `view`.
        return [flat.as_strided(shape, strides, start + offset) for shape, strides, offset in self._views]


class FlatBuffer:
    """Holds `len(shapes)` contiguous, aligned views into one zeroed tensor `data` of `dtype` on `device`. data: shape [numel],
    including padding. views: the views, in the order of `shapes`. Padding stays zero as long as only views are written, so a
    sum or norm over `data` equals the sum or norm over the views. memory: the zeroed tensor that becomes `data`; if None, a new
    tensor is allocated. alignment: the alignment of each view, in elements; by default ALIGNMENT_BYTES bytes. multiple: the
    number of equal, aligned parts into which the buffer can be divided.
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
        """Returns the size of `data` in bytes."""
        return self.data.numel() * self.data.element_size()


SHARD_ALIGNMENT = 128
"""The alignment, in elements, of the parameters in a sharded buffer. A parameter has the same offset in the buffers of its
gradient, working weight and master: a multiple of 256 bytes in every dtype of two bytes or more.
"""


class ElementRange(NamedTuple):
    """The half-open range [first, last) of elements of a flattened parameter."""

    first: int
    last: int

    @property
    def numel(self) -> int:
        """Returns the number of elements in the range."""
        return self.last - self.first

    def optimizer_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape in which an optimizer gets these elements of a parameter of `shape`: `shape` itself if the range
        has all elements; else [1, ..., 1, numel], since an optimizer may treat matrices and vectors differently.
        """
        return tuple(shape) if self.numel == prod(shape) else (*(1 for _ in shape[1:]), self.numel)

    def view(self, tensor: Tensor) -> Tensor:
        """Returns a view of these elements of `tensor`, in the `optimizer_shape`. tensor: contiguous, in the full shape."""
        return tensor.reshape(-1)[self.first : self.last].view(self.optimizer_shape(tensor.shape))


@dataclass(frozen=True)
class BufferShard:
    """This rank's part of a buffer: part `index` of `count` equal parts, one for each rank along `axis`. If the reduce group
    has more ranks, several of them have copies of the same part.
    """

    axis: str
    count: int
    index: int

    def bounds(self, numel: int) -> tuple[int, int]:
        """Returns the half-open index range [start, end) of the part in a buffer of `numel` elements."""
        size, remainder = divmod(numel, self.count)
        assert remainder == 0, f"{numel} elements over {self.count} ranks"
        return size * self.index, size * (self.index + 1)


UNSHARDED = BufferShard("", 1, 0)
"""The shard that contains all of a buffer."""


class Layout(NamedTuple):
    """The layout of gradients that a reducer needs: the buffers, and the order in which the store reports ready gradients.
    buffers: the parameters of each buffer, all of one `Param.family`. order: all parameters in the order of their reports,
    which is equal on all ranks of every reduce group. unbuffered: the parameters in no buffer, because no handler reduces them.
    shards: for each buffer, the part whose sum this rank gets, or None for the full buffer; empty if all buffers are full.
    is_fixed: whether masters and optimizer states follow the layout, so that no parameter may be frozen or unfrozen.
    """

    buffers: list[list[Param]]
    order: list[Param]
    unbuffered: Sequence[Param] = ()
    shards: Sequence[BufferShard | None] = ()
    is_fixed: bool = False

    def check(self, trainable: Sequence[Param]) -> None:
        """Asserts that each parameter in `trainable` (in registry order) occurs exactly once in `order`, and exactly once in
        `buffers` or `unbuffered`.
        """
        for params in (self.order, [param for buffer in (*self.buffers, self.unbuffered) for param in buffer]):
            indices = sorted(param.index for param in params)
            assert indices == [param.index for param in trainable], "a layout must name every trainable parameter exactly once"


class NormGroup(NamedTuple):
    """Gradients of this rank that have one dtype and the same number of copies over all ranks, so that they enter a norm with
    the same factor. reduce_group: the axis over which they are summed. stages: the stages that have a copy of each gradient.
    num_shards: the number of ranks of the reduce group that divide one copy among themselves.
    """

    tensors: list[Tensor]
    reduce_group: str
    stages: tuple[int, ...]
    num_shards: int = 1


Planner = Callable[[list[Param]], Layout]
"""A function that receives the trainable parameters in reverse order of use, and returns their layout."""


def plan_without_buffers(params: list[Param]) -> Layout:
    """Returns a layout without buffers, for a run without a reduction."""
    return Layout([], params, params)


def group_by_reduce_group(params: list[Param]) -> Layout:
    """Returns a layout with one buffer for each `Param.family`. Buffers and reports have the order of `params`."""
    families: dict[tuple[object, ...], list[Param]] = {}
    for param in params:
        families.setdefault(param.family, []).append(param)
    return Layout(list(families.values()), params)


class GradientBuffer(FlatBuffer):
    """Holds the gradients of `params`, which are summed over one group, side by side in `memory`. shard: the part whose sum
    this rank gets; None for the full buffer. has_full_gradients: False once a reducer has begun to sum a sharded buffer.
    """

    def __init__(self, params: Sequence[Param], memory: Tensor, shard: BufferShard | None = None) -> None:
        shapes = [param.parameter.shape for param in params]
        super().__init__(shapes, memory.dtype, memory.device, memory, **_buffer_alignment(shard))
        self.params = list(params)
        self.shard = shard
        self.num_shards = shard.count if shard else 1
        self.has_full_gradients = True
        self.reduce_group = params[0].reduce_group
        self.stages = params[0].stages
        self._begin, self._end = (shard or UNSHARDED).bounds(self.data.numel())
        assert all(param.family == params[0].family for param in params), f"{params} do not reduce together"

    @cached_property
    def checksum(self) -> int:
        """Returns a checksum of the parameters' names in order, which is equal on all ranks that sum the buffer."""
        return checksum(param.name for param in self.params)

    @cached_property
    def local_part(self) -> Tensor:
        """Returns the part of `data` whose sum this rank gets, [numel / count]; `data` itself if the buffer is not sharded."""
        return self.data if self.shard is None else self.data[self._begin : self._end]

    @cached_property
    def ranges(self) -> dict[Param, ElementRange]:
        """Returns, for each parameter, the range of its elements in this rank's part. The range may be empty."""
        return self.ranges_of((self.shard or UNSHARDED).index)

    def ranges_of(self, index: int) -> dict[Param, ElementRange]:
        """Returns, for each parameter, the range of its elements in part `index` of the buffer. The range may be empty."""
        begin, end = replace(self.shard or UNSHARDED, index=index).bounds(self.data.numel())
        ranges = {}
        for param, start in zip(self.params, self.offsets, strict=True):
            first = min(max(begin - start, 0), param.numel)
            ranges[param] = ElementRange(first, max(first, min(end - start, param.numel)))
        return ranges

    @cached_property
    def parts(self) -> dict[Param, Tensor]:
        """Returns, for each parameter, a view of its elements in this rank's part of the gradients."""
        return self.part_views(self.local_part)

    def part_views(self, memory: Tensor) -> dict[Param, Tensor]:
        """Returns, for each parameter, a view of its elements in `memory`, a flat tensor as long as `local_part`."""
        views = {}
        for param, start in zip(self.params, self.offsets, strict=True):
            elements = self.ranges[param]
            first = max(start - self._begin, 0) if elements.numel else 0
            views[param] = memory[first : first + elements.numel].view(elements.optimizer_shape(param.parameter.shape))
        return views

    def zero_padding(self) -> None:
        """Zeroes the padding in this rank's part, in which a reduction may leave arbitrary values."""
        if self._padding_views:
            torch._foreach_zero_(self._padding_views)

    @cached_property
    def _padding_views(self) -> list[Tensor]:
        """Returns views of the padding in this rank's part."""
        starts = [max(start + param.numel, self._begin) for param, start in zip(self.params, self.offsets, strict=True)]
        ends = [min(end, self._end) for end in (*self.offsets[1:], self.data.numel())]
        return [self.data[start:end] for start, end in zip(starts, ends, strict=True) if start < end]


def _buffer_alignment(shard: BufferShard | None) -> dict[str, Any]:
    """Returns the arguments `alignment` and `multiple` of a `FlatLayout` with `shard`; {} if the defaults apply."""
    return {} if shard is None else {"alignment": SHARD_ALIGNMENT, "multiple": shard.count}


def allocate_buffers(layout: Layout, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, list[GradientBuffer]]:
    """Allocates one zeroed tensor for all buffers of `layout`. Returns the tensor and the buffers, without empty ones."""
    shards = layout.shards or [None] * len(layout.buffers)
    lists = [(params, shard) for params, shard in zip(layout.buffers, shards, strict=True) if params]
    sizes = []
    for params, shard in lists:
        alignment = _buffer_alignment(shard) or {"alignment": ALIGNMENT_BYTES // dtype.itemsize}
        sizes.append(FlatLayout([param.parameter.shape for param in params], **alignment).numel)
    memory = torch.zeros(sum(sizes), dtype=dtype, device=device)
    parts = torch.split(memory, sizes)
    return memory, [GradientBuffer(params, part, shard) for (params, shard), part in zip(lists, parts, strict=True)]


class WeightBuffer(FlatBuffer):
    """Holds the working weights of `params` side by side, in `num_parts` equal parts. Each parameter has the same offset as its
    gradient in a gradient buffer of `num_parts` shards. The buffer gets its memory in `build`, so that initial values can be
    moved into one new buffer after the other. On a CPU, an access before `build` crashes the process.
    """

    def __init__(self, params: Sequence[Param], dtype: torch.dtype, num_parts: int) -> None:
        shapes = [param.parameter.shape for param in params]
        device = params[0].parameter.device
        super().__init__(shapes, dtype, device, alignment=SHARD_ALIGNMENT, multiple=num_parts)
        self.params = list(params)
        self._num_freed = free(self.data)  # 0 after `build`

    def build(self) -> None:
        """Allocates zeroed memory for the buffer, unless it has memory already."""
        if self._num_freed:
            reallocate(self.data, self._num_freed)
            self.data.zero_()
            self._num_freed = 0


class Completion(Protocol):
    """After each step, fetches the parts of the weights that other ranks have updated: start ──> wait ──> finish."""

    def start(self) -> None:
        """Starts the exchange. Called on all ranks after this rank has updated its own parts."""

    def wait(self) -> None:
        """Blocks until this rank has the weights of the last step. Other ranks need not call anything after their `start`."""

    def finish(self) -> None:
        """Calls `wait`, and blocks until no other rank reads this rank's weights, so that this rank may write them."""


class WeightStore:
    """Holds the buffers of working weights, in `dtype`. Weights whose names match a pattern of `keep` stay in fp32. is_eager:
    whether `start_completions` also waits. If False, weights arrive during the next step, before their layers run.
    """

    def __init__(self, dtype: torch.dtype, keep: Sequence[str] = ()) -> None:
        self.dtype = dtype
        self.keep = keep
        self.buffers: list[WeightBuffer] = []
        self.is_eager = False
        self._places: dict[Param, tuple[WeightBuffer, Tensor]] = {}
        self._buffered_params: list[tuple[nn.Parameter, Tensor]] = []
        self._completions: list[Completion] = []
        self._is_laid_out = False

    def lay_out(self, lists: Iterable[tuple[Sequence[Param], int]]) -> list[WeightBuffer]:
        """Adds and returns a buffer without memory for each pair (parameters, number of parts). Call it before `adopt`."""
        assert not self._is_laid_out, "weights are laid out before masters are made"
        buffers = [WeightBuffer(params, self.dtype, num_parts) for params, num_parts in lists]
        for buffer in buffers:
            assert not any(matches_any(param.name, self.keep) for param in buffer.params), "buffers have one dtype"
            names_laid_out_twice = [param.name for param in buffer.params if param in self._places]
            assert not names_laid_out_twice, f"{names_laid_out_twice} are in a buffer already"
            self._places |= {param: (buffer, view) for param, view in zip(buffer.params, buffer.views, strict=True)}
        self.buffers += buffers
        return buffers

    def dtype_of(self, param: Param) -> torch.dtype:
        """Returns the dtype of the parameter's working weight."""
        return select_parameter_dtype(param.name, self.dtype, self.keep)

    def adopt(self, param: Param) -> None:
        """Rounds the parameter's value to its working dtype, and moves it to its place in a buffer, if it has one. Afterwards
        the parameter is contiguous, since fused optimizers read weight, gradient and states in the order of memory.
        """
        self._is_laid_out = True
        parameter = param.parameter
        if param not in self._places:
            dtype = self.dtype_of(param)
            if parameter.dtype != dtype or not parameter.is_contiguous():
                parameter.data = parameter.detach().to(dtype).contiguous()
            return
        buffer, place = self._places[param]
        buffer.build()
        place.copy_(parameter.detach())
        parameter.data = place
        if place.numel():
            self._buffered_params.append((parameter, place))

    @torch.no_grad()
    def restore_places(self) -> None:
        """Moves each parameter whose `.data` a program has replaced back to its place in a buffer, with its new values."""
        moved = [(parameter, place, parameter.detach()) for parameter, place in self.moved_parameters()]
        own_memory = {storage_id(buffer.data) for buffer in self.buffers} if moved else set()
        # A value in a buffer, such as the transpose of the old value, is copied before it is overwritten.
        values = [value.clone() if storage_id(value) in own_memory else value for _, _, value in moved]
        for (parameter, place, _), value in zip(moved, values, strict=True):
            parameter.data = place
            parameter.copy_(value)  # increments its version counter, by which masters notice the write

    def moved_parameters(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yields each parameter whose `.data` a program has replaced, and its place in a buffer. An offload does not count."""
        # Does not compare addresses, which change when memory moves, nor use `is_set_to`, which refuses fake tensors.
        for parameter, place in self._buffered_params:
            same_storage = storage_id(parameter) == storage_id(place)
            same_offset = parameter.storage_offset() == place.storage_offset()
            if not (same_storage and same_offset and parameter.stride() == place.stride()):
                yield parameter, place

    def add_completion(self, completion: Completion) -> None:
        """Registers `completion`. Must be called before masters are made."""
        self._completions.append(completion)

    @property
    def can_arrive_late(self) -> bool:
        """Returns whether weights may still arrive after a step has returned. The result is equal on all ranks."""
        return bool(self._completions) and not self.is_eager

    def start_completions(self) -> None:
        """Starts the exchanges that complete the weights, and waits if `is_eager`. All ranks call this after the update."""
        for completion in self._completions:
            completion.start()
        if self.is_eager:
            self.settle()

    def settle(self) -> None:
        """Blocks until this rank has the weights of the last step, and may write them. All ranks call this."""
        for completion in self._completions:
            completion.finish()

    @contextmanager
    def settle_on_error(self) -> Iterator[None]:
        """If the block raises an exception, waits for complete weights. No RunError of this wait replaces the exception."""
        try:
            yield
        except BaseException:
            for completion in self._completions:
                with suppress(RunError):
                    completion.wait()
            raise
