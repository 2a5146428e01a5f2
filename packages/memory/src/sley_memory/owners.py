"""Knows memory that somebody keeps anyway: to move a copy of it to the host would free nothing, or free what is lent."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from sley_core.api.parts import Parts


class Spans:
    """The addresses of some tensors' storages."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = {storage.data_ptr(): storage.nbytes() for storage in (each.untyped_storage() for each in tensors)}
        self._starts = sorted(start for start, size in storages.items() if size)
        self._ends = [start + storages[start] for start in self._starts]

    def __contains__(self, address: int) -> bool:
        at = bisect_right(self._starts, address) - 1
        return at >= 0 and address < self._ends[at]


class Owners:
    """Parameters and buffers of this rank's layers, and whatever its pools hold: by address, as views and aliases share it."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._lasting = Spans(())

    def begin(self) -> None:
        """Notes where the layers' parameters and buffers are; they stay there for a step."""
        buffers = [buffer for layer in self._parts.layers for buffer in layer.module.buffers()]
        self._lasting = Spans([*buffers, *(entry.parameter for entry in self._parts.book)])

    def have(self, tensor: Tensor) -> bool:
        """Returns whether the storage of `tensor` is one of the layers' parameters or buffers, or a pool's. Pools are asked
        each time: they grow within a step.
        """
        address = tensor.untyped_storage().data_ptr()
        return address in self._lasting or address in Spans(held for _, held in self._parts.pool.held())
