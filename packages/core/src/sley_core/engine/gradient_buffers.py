"""Flat buffers of gradients, and the memory that one layout of buffers takes over from the previous one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sley_core.comm.copies import free, grow
from sley_core.comm.marks import checksum
from sley_core.engine.book import Entry
from sley_core.engine.cuts import ALIGNMENT, WHOLE, Cut, Span
from sley_core.engine.flat import ALIGNMENT_BYTES, FlatBuffer, offsets
from sley_core.engine.layout import Piece
from sley_core.engine.slot import LooseSlot
from sley_core.errors import RunError


class GradientBuffer(FlatBuffer):
    """Holds the gradients of some entries of one family, side by side in `memory`; `num_holders` stages hold a copy of each.

    cut: the part whose sum this rank gets; None for all of it. is_whole: whether `data` holds this rank's own contributions or
    the whole sum; false once a reducer has begun to sum a buffer that is cut.
    """

    def __init__(self, entries: Sequence[Entry], memory: Tensor, cut: Cut | None = None) -> None:
        shapes = [entry.parameter.shape for entry in entries]
        super().__init__(shapes, memory.dtype, memory.device, memory, **_spacing(cut))
        self.entries = list(entries)
        self.cut = cut
        self.num_shards = cut.count if cut else 1
        self.is_whole = True
        self.reduce_group = entries[0].reduce_group
        self.stages = entries[0].stages
        self.num_holders = len(self.stages)
        assert all(entry.family == entries[0].family for entry in entries), f"{entries} do not reduce together"

    @cached_property
    def contents(self) -> int:
        """Checksum of the entries' names in order; equal on all ranks that sum the buffer."""
        return checksum(entry.name for entry in self.entries)

    @cached_property
    def own(self) -> Tensor:
        """The part of `data` whose sum this rank gets, [numel / count]; `data` itself if nothing is cut."""
        if self.cut is None:
            return self.data
        first, last = self.cut.bounds(self.data.numel())
        return self.data[first:last]

    @cached_property
    def spans(self) -> dict[Entry, Span]:
        """The elements of each entry that lie in this rank's part; may be none."""
        places = zip(self.entries, self.offsets, strict=True)
        cut = self.cut or WHOLE
        return {entry: cut.span(start, entry.numel, self.data.numel()) for entry, start in places}

    @cached_property
    def parts(self) -> dict[Entry, Tensor]:
        """Each entry's gradient in this rank's part: views in the shape of its span (`Span.shape_in`)."""
        return self.views_in(self.own)

    def views_in(self, memory: Tensor) -> dict[Entry, Tensor]:
        """Returns views of `memory` [as long as `own`], one per entry, at the entry's place in this rank's part; each has the
        shape of its span.
        """
        begin, _ = (self.cut or WHOLE).bounds(self.data.numel())
        found = {}
        for entry, start in zip(self.entries, self.offsets, strict=True):
            span = self.spans[entry]
            first = max(start + span.first - begin, 0) if span.numel else 0
            found[entry] = memory[first : first + span.numel].view(span.shape_in(entry.parameter.shape))
        return found

    def check_whole(self, entry: Entry) -> None:
        """Raises RunError `gradient-sharded` once the buffer's reduction has begun, if this rank gets a part of the sum."""
        if not self.is_whole:
            raise RunError(
                "gradient-sharded",
                f"the gradient of the parameter {entry.name!r} is reduced to shards, of which this rank has one",
                hint="read `store.part(entry)`, the elements `store.span(entry)` of it",
            )

    def zero_padding(self) -> None:
        """Zeroes the padding in this rank's part: a reduction may leave any values there."""
        if self._gaps:
            torch._foreach_zero_(self._gaps)

    @cached_property
    def _gaps(self) -> list[Tensor]:
        ends = [*self.offsets[1:], self.data.numel()]
        begin, end = (self.cut or WHOLE).bounds(self.data.numel())
        return [
            self.data[max(start + entry.numel, begin) : min(until, end)]
            for entry, start, until in zip(self.entries, self.offsets, ends, strict=True)
            if max(start + entry.numel, begin) < min(until, end)
        ]


def pieces_of(buffers: Iterable[GradientBuffer], loose: Iterable[LooseSlot]) -> Iterator[Piece]:
    """Yields all gradients in as few tensors as possible: one per buffer, then lists of the unbuffered ones.

    Of a buffer that is cut, yields this rank's part.
    """
    for buffer in buffers:
        yield Piece([buffer.own], buffer.reduce_group, buffer.num_holders, buffer.num_shards, buffer.stages)
    families: dict[tuple[str, int], list[Tensor]] = {}
    for slot in loose:
        slot.check_nothing_came_late()
        family = (slot.entry.reduce_group, len(slot.entry.stages))
        families.setdefault(family, []).append(slot.view)
    for (reduce_group, num_holders), tensors in families.items():
        yield Piece(tensors, reduce_group, num_holders)


def _spacing(cut: Cut | None) -> dict[str, Any]:
    return {} if cut is None else {"alignment": ALIGNMENT, "multiple": cut.count}


class GradientMemory:
    """Holds the memory of all buffers of a layout in one tensor, which the next layout takes over if it has the same size.

    Buffers in another order take as many bytes. If memory were freed and allocated anew, it would be page-faulted in again, and
    malloc would leave a gap where it was.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._data = torch.empty(0, dtype=dtype, device=device)
        self._num_freed = 0

    def forget(self) -> None:
        """Drops the memory, so that the next layout allocates new one: a collective in flight may still write into this."""
        self._data = self._data.new_empty(0)

    def free(self) -> None:
        """Frees the memory on the device; buffers stay valid objects without memory."""
        self._num_freed = free(self._data)

    def build(self) -> None:
        """Allocates the memory of all buffers again, zeroed: padding too, since norms run over it."""
        grow(self._data, self._num_freed)
        self._data.zero_()

    def buffers(self, lists: Sequence[tuple[Sequence[Entry], Cut | None]]) -> list[GradientBuffer]:
        """Returns one zeroed buffer for each list of entries. Buffers of the previous layout must not be used any more."""
        plain = {"alignment": ALIGNMENT_BYTES // self._data.dtype.itemsize}
        sizes = [
            offsets([entry.parameter.shape for entry in entries], **(_spacing(cut) or plain))[1]
            for entries, cut in lists
        ]
        if self._data.numel() == sum(sizes):
            self._data.zero_()
        else:
            self.forget()
            self._data = self._data.new_zeros(sum(sizes))
        parts = torch.split(self._data, sizes)
        return [GradientBuffer(entries, part, cut) for (entries, cut), part in zip(lists, parts, strict=True)]
