"""Gives tensors on meta their values when a factory pickles, saves or copies them.

torch's `__reduce_ex__` hands out a tensor's memory as it is. A meta tensor has none: the file would have no numbers, or the
process would crash.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sley_core.model.journal import META, Journal, unwatched
from sley_core.model.steps import Ref
from sley_core.model.storage import bytes_of

_TENSOR: Any = torch.Tensor
_READ_BY_ADDRESS = {("safetensors.torch", "_to_ndarray"), ("safetensors.torch", "_tobytes")}


@contextmanager
def saved_with_values(journal: Journal) -> Iterator[None]:
    """Returns a context manager in which a tensor on meta is pickled with its present values, and `copy.copy` shares its
    memory.

    Patches `torch.Tensor` for the whole process until the context ends.
    """
    reduce, doing = _TENSOR._reduce_ex_internal, threading.local()

    def reduced(self: Tensor, proto: int) -> Any:
        """Pickles a tensor on meta as a real tensor with the same values; other tensors as torch does."""
        with journal.lock, unwatched():
            if self.is_meta and journal.shown(self) != META and not getattr(doing, "copies", False):
                real = journal.lend(self.detach())
                return reduce(real.requires_grad_(self.requires_grad), proto)
        return reduce(self, proto)

    def copied(self: Tensor) -> Any:
        """Copies the tensor object as `copy.copy` does, without giving values to its memory."""
        doing.copies = True
        try:
            made = self.__reduce_ex__(4)  # type: ignore[no-untyped-call]
        finally:
            doing.copies = False
        found: Any = copy._reconstruct(self, None, *made)  # type: ignore[attr-defined]  # as copy.copy does
        return found

    _TENSOR._reduce_ex_internal, _TENSOR.__copy__ = reduced, copied
    try:
        yield
    finally:
        _TENSOR._reduce_ex_internal = reduce
        del _TENSOR.__copy__


def deep_copied(journal: Journal, tensor: Tensor, memo: dict[Any, Any]) -> Tensor:
    """Returns a real copy of a plain tensor on meta; tensors that shared memory share the memory of one copy.

    memo: as `copy.deepcopy` passes it; it also records which memory has been copied.
    """
    if id(tensor) in memo:
        known: Tensor = memo[id(tensor)]
        return known
    with journal.lock, unwatched():
        cell, every = journal.cell(tensor), bytes_of(tensor.untyped_storage())
    copies = memo.setdefault(Journal, {})
    if cell not in copies:
        copies[cell] = every.clone()
    with journal.lock, unwatched():
        made = Ref.of(tensor, cell).over(copies[cell].untyped_storage()).requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = made
    made.__dict__ = copy.deepcopy(tensor.__dict__, memo)
    return made


def reads_by_address() -> bool:
    """Returns whether one of the callers reads memory through the address from `data_ptr`, as safetensors does to write a
    file.
    """
    frame: Any = sys._getframe(1)
    for _ in range(8):
        if frame is None:
            return False
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) in _READ_BY_ADDRESS:
            return True
        frame = frame.f_back
    return False
