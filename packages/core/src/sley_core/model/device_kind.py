"""The kind of device on which a run computes: that of its tensors, or, where they have no values, that for which they stand.

An estimate takes a run's steps on tensors of the host. Where the run would be on CUDA, what takes another way there asks here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_stands_for: ContextVar[str | None] = ContextVar("_stands_for", default=None)


def device_kind(tensor: Tensor) -> str:
    """Returns the type of the device on which a run computes with `tensor`: "cpu", "cuda", ..."""
    return _stands_for.get() or tensor.device.type


@contextmanager
def standing_for(kind: str) -> Iterator[None]:
    """Within the block all tensors of this thread stand for some of a device of this type."""
    before = _stands_for.set(kind)
    try:
        yield
    finally:
        _stands_for.reset(before)
