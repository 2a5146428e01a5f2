"""The simplest memory pool that holds its contract, and some that are wrong in one way each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

from sley_core.protocols import MemoryPool


class Naive(MemoryPool):
    """Keeps what is given back, by shape and dtype."""

    def __init__(self, config) -> None:
        self.free: dict[object, list[Tensor]] = {}
        self.lent: list[Tensor] = []

    @contextmanager
    def lease(self, shape, dtype, device) -> Iterator[Tensor]:
        buffer = self.take(tuple(shape), dtype, device)
        self.lent.append(buffer)
        try:
            yield buffer
        finally:
            self.lent = [one for one in self.lent if one is not buffer]
            self.give(buffer)

    def take(self, shape, dtype, device) -> Tensor:
        free = self.free.get((shape, dtype, device))
        return free.pop() if free else self.made(shape, dtype, device)

    def made(self, shape, dtype, device) -> Tensor:
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=dtype, device=device)

    def give(self, buffer: Tensor) -> None:
        self.free.setdefault((tuple(buffer.shape), buffer.dtype, buffer.device), []).append(buffer)

    def trim(self) -> int:
        num_bytes = sum(one.nbytes for kept in self.free.values() for one in kept)
        self.free.clear()
        return num_bytes

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        every = [*self.lent, *(one for kept in self.free.values() for one in kept)]
        return ((f"{number}", one) for number, one in enumerate(every))


class Shared(Naive):
    """Has one buffer of a size, whoever has it."""

    def take(self, shape, dtype, device) -> Tensor:
        kept = self.free.setdefault((shape, dtype, device), [])
        if not kept:
            kept.append(self.made(shape, dtype, device))
        return kept[0]

    def give(self, buffer: Tensor) -> None:
        pass


class Elements(Naive):
    """Takes buffers of as many elements for one another."""

    def take(self, shape, dtype, device) -> Tensor:
        free = self.free.get((prod(shape), dtype))
        return free.pop() if free else self.made(shape, dtype, device)

    def give(self, buffer: Tensor) -> None:
        self.free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)


class Inferred(Naive):
    """Allocates in whatever mode it is called."""

    def made(self, shape, dtype, device) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)


class Hoards(Naive):
    """Allocates for each lease, and keeps all."""

    def take(self, shape, dtype, device) -> Tensor:
        return self.made(shape, dtype, device)


class Loses(Naive):
    """Does not take back what a block that failed had."""

    @contextmanager
    def lease(self, shape, dtype, device) -> Iterator[Tensor]:
        buffer = self.take(tuple(shape), dtype, device)
        self.lent.append(buffer)
        yield buffer
        self.lent = [one for one in self.lent if one is not buffer]
        self.give(buffer)


class Counts(Naive):
    """Says that it trims more than it does."""

    def trim(self) -> int:
        return super().trim() + sum(one.nbytes for one in self.lent)


class Frees(Naive):
    """Frees what is lent, too."""

    def trim(self) -> int:
        num_bytes = sum(one.nbytes for _, one in self.named_tensors())
        for _, one in self.named_tensors():
            one.untyped_storage().resize_(0)
        self.free.clear()
        return num_bytes


class Keeps(Naive):
    """Has a second list of all that it made."""

    def made(self, shape, dtype, device) -> Tensor:
        self.all = [*getattr(self, "all", ()), super().made(shape, dtype, device)]
        return self.all[-1]


class Silent(Naive):
    """Tells of what is free alone."""

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return ((f"{at}", one) for at, one in enumerate(one for kept in self.free.values() for one in kept))


class Again(Naive):
    """A lease takes the buffer that it had before."""

    def lease(self, shape, dtype, device):
        return _Kept(self, self.take(tuple(shape), dtype, device))


class _Kept:
    def __init__(self, pool: Again, buffer: Tensor) -> None:
        self.pool, self.buffer = pool, buffer

    def __enter__(self) -> Tensor:
        self.pool.lent.append(self.buffer)
        return self.buffer

    def __exit__(self, *_: object) -> None:
        self.pool.lent = [one for one in self.pool.lent if one is not self.buffer]
        self.pool.give(self.buffer)
