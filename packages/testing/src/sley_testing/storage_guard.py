"""Refuses operations on memory that is not there: a CPU tensor whose storage was freed ends the process when it is read.

with storage_guard():
    free(weights)
    run.step()          # AssertionError, which names the operation and the tensor

Shapes, `view`, `detach` and `.data` of such a tensor are harmless and stay allowed, as is whatever gives it memory again;
slices, `t` and `as_strided` torch itself refuses, and here too the error has the tensor's name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from sley_testing.accesses import Access, MemoryWatch, described, extent, replaced, storage_of


def storage_guard() -> AbstractContextManager[None]:
    """Returns a context manager in which this thread's operations, those of a backward too, raise AssertionError where
    a tensor's storage has fewer bytes than its sizes, strides and offset need. It costs some 0.1 ms per operation.
    """
    return _Guard().watching()


def check_present(name: str, accesses: Sequence[Access]) -> None:
    """Raises AssertionError if a tensor of the operation `name` lies, in part, in memory that is not there."""
    for access in accesses:
        needed, present = _bytes(access.tensor)
        verb = "writes" if access.writes else "reads"
        assert present >= needed, (
            f"{name} {verb} {described(access.tensor)}, which needs {needed} bytes of a storage of {present}: "
            "its memory was freed"
        )


def safe_to_print() -> AbstractContextManager[None]:
    """Returns a context manager in which tensors without memory can be printed, as in the traceback of a test."""
    return replaced(torch.Tensor, "__repr__", _repr_of_present)


def _repr_of_present(name: str, method: Callable[..., str]) -> Callable[..., str]:
    """Returns `method` of a tensor, which for freed memory describes the tensor instead of reading it."""

    def of(tensor: Tensor, *args: object, **kwargs: object) -> str:
        needed, present = _bytes(tensor)
        return method(tensor, *args, **kwargs) if present >= needed else f"<{described(tensor)}, freed>"

    return of


def _bytes(tensor: Tensor) -> tuple[int, int]:
    """Returns how many bytes of its storage `tensor` needs, and how many there are."""
    storage = storage_of(tensor)
    return (0, 0) if storage is None else (extent(tensor)[1], storage.nbytes())


class _Guard(MemoryWatch):  # type: ignore[no-untyped-call]  # torch's
    def saw(self, name: str, accesses: Sequence[Access]) -> None:
        check_present(name, accesses)
