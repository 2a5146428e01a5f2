"""The flat buffers in which gradients lie side by side, and the memory that one layout takes over from another."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from sley_core.comm.copies import free, grow
from sley_core.comm.marks import checksum
from sley_core.engine.book import Entry
from sley_core.engine.flat import ALIGNMENT_BYTES, FlatBuffer, offsets


class GradientBuffer(FlatBuffer):
    """The gradients of some entries of one family, side by side in `memory`; `num_holders` stages hold a copy of each."""

    def __init__(self, entries: Sequence[Entry], memory: Tensor) -> None:
        super().__init__([entry.parameter.shape for entry in entries], memory.dtype, memory.device, memory)
        self.entries = list(entries)
        self.reduce_group = entries[0].reduce_group
        self.num_holders = len(entries[0].stages)
        assert all(entry.family == entries[0].family for entry in entries), f"{entries} do not reduce together"

    @cached_property
    def contents(self) -> int:
        """A checksum of whose gradients these are, in their order: two ranks that sum a buffer have the same."""
        return checksum(entry.name for entry in self.entries)


class GradientMemory:
    """What the buffers of a layout lie in: one piece for all, which the next layout takes over if it is as large.

    Buffers in another order take as much as before. Memory that is freed and asked for anew would be written to for the
    first time once more, and malloc would leave a gap where it was.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._data = torch.empty(0, dtype=dtype, device=device)
        self._num_freed = 0

    def forget(self) -> None:
        """Drops the memory, so that the next layout gets new one: a collective in flight may still write into this."""
        self._data = self._data.new_empty(0)

    def free(self) -> None:
        """Gives the memory back to the device; buffers stay valid objects, without any."""
        self._num_freed = free(self._data)

    def build(self) -> None:
        """Gives all buffers memory again, zeroed: padding too, since norms run over it."""
        grow(self._data, self._num_freed)
        self._data.zero_()

    def buffers(self, lists: Sequence[Sequence[Entry]]) -> list[GradientBuffer]:
        """Returns one zeroed buffer for each list of entries. Buffers of the layout before must not be used any more."""
        alignment = ALIGNMENT_BYTES // self._data.dtype.itemsize
        sizes = [offsets([entry.parameter.shape for entry in entries], alignment)[1] for entries in lists]
        if self._data.numel() == sum(sizes):
            self._data.zero_()
        else:
            self.forget()
            self._data = self._data.new_zeros(sum(sizes))
        parts = torch.split(self._data, sizes)
        return [GradientBuffer(entries, part) for entries, part in zip(lists, parts, strict=True)]
