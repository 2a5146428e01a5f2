"""Memory pools: the simplest correct one, and some with one bug each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

from sley_core.protocols import MemoryPool


class Naive(MemoryPool):
    """Caches returned buffers by shape and dtype."""

    def __init__(self, config) -> None:
        self.free: dict[object, list[Tensor]] = {}
        self.leased: list[Tensor] = []

    @contextmanager
    def lease(self, shape, dtype, device) -> Iterator[Tensor]:
        buffer = self.acquire(tuple(shape), dtype, device)
        self.leased.append(buffer)
        try:
            yield buffer
        finally:
            self.leased = [leased for leased in self.leased if leased is not buffer]
            self.release(buffer)

    def acquire(self, shape, dtype, device) -> Tensor:
        free = self.free.get((shape, dtype, device))
        return free.pop() if free else self.allocate(shape, dtype, device)

    def allocate(self, shape, dtype, device) -> Tensor:
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=dtype, device=device)

    def release(self, buffer: Tensor) -> None:
        self.free.setdefault((tuple(buffer.shape), buffer.dtype, buffer.device), []).append(buffer)

    def trim(self) -> int:
        num_bytes = sum(buffer.nbytes for buffers in self.free.values() for buffer in buffers)
        self.free.clear()
        return num_bytes

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        buffers = [*self.leased, *(buffer for cached in self.free.values() for buffer in cached)]
        return ((f"{number}", buffer) for number, buffer in enumerate(buffers))


class Shared(Naive):
    """Leases one buffer per size to all users."""

    def acquire(self, shape, dtype, device) -> Tensor:
        buffers = self.free.setdefault((shape, dtype, device), [])
        if not buffers:
            buffers.append(self.allocate(shape, dtype, device))
        return buffers[0]

    def release(self, buffer: Tensor) -> None:
        pass


class Elements(Naive):
    """Ignores shapes and compares only the number of elements."""

    def acquire(self, shape, dtype, device) -> Tensor:
        free = self.free.get((prod(shape), dtype))
        return free.pop() if free else self.allocate(shape, dtype, device)

    def release(self, buffer: Tensor) -> None:
        self.free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)


class Inferred(Naive):
    """Allocates in the mode of its caller, such as inference mode."""

    def allocate(self, shape, dtype, device) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)


class Loses(Naive):
    """Loses the buffer of a block that raises."""

    @contextmanager
    def lease(self, shape, dtype, device) -> Iterator[Tensor]:
        buffer = self.acquire(tuple(shape), dtype, device)
        self.leased.append(buffer)
        yield buffer
        self.leased = [leased for leased in self.leased if leased is not buffer]
        self.release(buffer)


class Counts(Naive):
    """Reports more trimmed bytes than it frees."""

    def trim(self) -> int:
        return super().trim() + sum(buffer.nbytes for buffer in self.leased)


class Frees(Naive):
    """Frees leased buffers too."""

    def trim(self) -> int:
        num_bytes = sum(buffer.nbytes for _, buffer in self.named_tensors())
        for _, buffer in self.named_tensors():
            buffer.untyped_storage().resize_(0)
        self.free.clear()
        return num_bytes


class Keeps(Naive):
    """Keeps a second list of all buffers."""

    def allocate(self, shape, dtype, device) -> Tensor:
        self.all = [*getattr(self, "all", ()), super().allocate(shape, dtype, device)]
        return self.all[-1]


class Silent(Naive):
    """Reports only free buffers."""

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return ((f"{number}", cached[0]) for number, cached in enumerate(filter(None, self.free.values())))


class Reused(Naive):
    """Returns the same buffer on each use of a lease."""

    def lease(self, shape, dtype, device):
        return _ReusedLease(self, self.acquire(tuple(shape), dtype, device))


class _ReusedLease:
    def __init__(self, pool: Reused, buffer: Tensor) -> None:
        self.pool, self.buffer = pool, buffer

    def __enter__(self) -> Tensor:
        self.pool.leased.append(self.buffer)
        return self.buffer

    def __exit__(self, *_: object) -> None:
        self.pool.leased = [leased for leased in self.pool.leased if leased is not self.buffer]
        self.pool.release(self.buffer)
