"""Refers to memory that may be given back while a copy of it is under way, and poisons it until the copy has happened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from sley_testing.accesses import extent


class Span:
    """A tensor whose memory its owners may give back: then there is nothing to copy from or into."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage: Any = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch's
        self._dtype = tensor.dtype
        self._place = int(tensor.storage_offset()), tensor.shape, tensor.stride()
        self._extent = extent(tensor)

    def tensor(self) -> Tensor | None:
        """Returns the tensor, unseen by autograd; None if its memory is gone."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None or storage.nbytes() < self._extent[1]:
            return None
        with _disable_current_modes():
            return as_tensor(storage, self._dtype, *self._place)

    def overlaps(self, other: Span) -> bool:
        (first, last), (start, end) = self._extent, other._extent
        return self._storage.cdata == other._storage.cdata and first < end and start < last


def poison(span: Span) -> None:
    """Fills memory with what nobody can take for a number: NaN; of integers, large ones."""
    tensor = span.tensor()
    if tensor is None:
        return
    with torch.no_grad(), _disable_current_modes():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype != torch.bool:
            tensor.fill_(0xFF if tensor.dtype == torch.uint8 else torch.iinfo(tensor.dtype).max)


def poison_bytes(storage: torch.UntypedStorage, first: int, last: int) -> None:
    """Fills bytes `first` to `last` of `storage`, if there are any: NaN, whatever they are read as."""
    if last > first:
        with _disable_current_modes():
            as_tensor(storage, torch.uint8, first, (last - first,), (1,)).fill_(0xFF)


def as_tensor(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int]
) -> Tensor:
    """Returns a tensor in `storage`, which keeps it."""
    empty: Any = torch.empty(0, dtype=dtype, device=storage.device)
    found: Tensor = empty.set_(storage, offset, shape, stride)
    return found
