"""Pickles, files and copies of what a factory has made: they get values, for what has no memory.

torch's `__reduce_ex__` hands out memory as it is, which on meta is none: a file without numbers, or the end of the process.
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
    """Inside, a tensor on meta is pickled with the values that it has by then, and `copy.copy` is the same memory."""
    reduce, doing = _TENSOR._reduce_ex_internal, threading.local()

    def reduced(self: Tensor, proto: int) -> Any:
        with journal.lock, unwatched():
            if self.is_meta and journal.shown(self) != META and not getattr(doing, "copies", False):
                real = journal.lend(self.detach())
                return reduce(real.requires_grad_(self.requires_grad), proto)
        return reduce(self, proto)

    def copied(self: Tensor) -> Any:
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
    """A plain tensor on meta and its values; those that were views of one memory are views of one copy."""
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
    """Whether somebody above reads memory at the address that a tensor says, as safetensors does when it writes a file."""
    frame: Any = sys._getframe(1)
    for _ in range(8):
        if frame is None:
            return False
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) in _READ_BY_ADDRESS:
            return True
        frame = frame.f_back
    return False
