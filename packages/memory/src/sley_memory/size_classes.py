"""`memory.size_classes`: a pool that rounds sizes up, so that buffers of other shapes, dtypes and users share blocks.

    asked for, in bytes     1 .. 256   .. 512 ..        4096    4608    5120  ..  8192    9216 ..
    lent a view of a block     256        512           4096    4608    5120      8192    9216
                            multiples of 256 below 2048, then 8 sizes from each power of two to the next

With 8 sizes per doubling a block is at most an eighth larger than what was asked for, a sixteenth on average, and sequences of
any lengths use a few dozen sizes. With one per doubling, as torch's pinned memory has, up to half of a block is wasted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from math import prod
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sley_core.api.parts import ALIGNMENT_BYTES
from sley_core.protocols import MemoryPool

if TYPE_CHECKING:
    from sley_memory.config import SizeClassesConfig

_SIZES_OF_ONE_ALIGNMENT = 8
"""Up to this many alignments, every multiple of the alignment is a size: finer ones could not be told apart."""


def class_bytes(num_bytes: int, per_doubling: int = 8) -> int:
    """Returns the size of the block that `num_bytes` are lent from: the least size that holds them, a multiple of 256."""
    units = max(1, -(-num_bytes // ALIGNMENT_BYTES))
    if units <= _SIZES_OF_ONE_ALIGNMENT:
        return units * ALIGNMENT_BYTES
    below = 1 << (units - 1).bit_length() - 1  # the largest power of two that is less than `units`
    step = max(1, below // per_doubling)
    return -(-units // step) * step * ALIGNMENT_BYTES


class _Block:
    """`memory`, uint8 [num_bytes], starts at a multiple of ALIGNMENT_BYTES."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        # The host's allocator aligns to 64 bytes; a device's does by itself, and gives the rest back to no one.
        room = num_bytes + (ALIGNMENT_BYTES if device.type == "cpu" else 0)
        with torch.inference_mode(False):  # an inference tensor could not be used in training later
            whole = torch.empty(room, dtype=torch.uint8, device=device)
        start = -whole.data_ptr() % ALIGNMENT_BYTES
        self.memory = whole[start : start + num_bytes]
        self.place = device, num_bytes
        self.num_held = room

    def view(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns a tensor of this shape and dtype on the block's first bytes."""
        with torch.inference_mode(False):
            return self.memory[: prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))


class _Lease(AbstractContextManager[Tensor]):
    """A view of a block for the length of one `with`."""

    def __init__(self, pool: SizeClasses, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self._pool = pool
        self._shape = tuple(shape)
        self._dtype = dtype
        self._device = device
        self._block: _Block | None = None
        self._is_used = False

    @property
    def num_bytes(self) -> int:
        """Returns the bytes that were asked for."""
        return prod(self._shape) * self._dtype.itemsize

    def __enter__(self) -> Tensor:
        if self._is_used:
            raise AssertionError(f"a lease of {self._shape} {self._dtype} is used twice")
        self._is_used = True
        self._block = self._pool._take(self.num_bytes, self._device)
        return self._block.view(self._shape, self._dtype)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._block is None:
            raise AssertionError(f"a lease of {self._shape} {self._dtype} ends before it began, or twice")
        block, self._block = self._block, None
        self._pool._give(block, self.num_bytes)


class SizeClasses(MemoryPool):
    """Lends views of exact shape and dtype, 256-byte aligned, of blocks whose sizes are rounded up.

    num_allocations, num_leases: since the beginning. num_lent, max_lent: leases now, and at most. num_bytes, max_bytes: of all
    blocks, lent or not, now and at most. num_bytes_lent, max_bytes_lent: asked for by leases, now and at most.
    """

    def __init__(self, config: SizeClassesConfig) -> None:
        self.config = config
        self.num_allocations = 0
        self.num_leases = 0
        self.num_lent = 0
        self.max_lent = 0
        self.num_bytes = 0
        self.max_bytes = 0
        self.num_bytes_lent = 0
        self.max_bytes_lent = 0
        self._bytes_of_lent_blocks = 0
        self._free: dict[tuple[torch.device, int], list[_Block]] = {}
        self._lent: set[_Block] = set()

    def lease(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Tensor]:
        """Returns a lease for one `with` block; the contents are undefined. Allocates at most when entered."""
        return _Lease(self, shape, dtype, device)

    def trim(self) -> int:
        """Frees every block that is not lent; returns the bytes freed."""
        num_bytes = sum(block.num_held for blocks in self._free.values() for block in blocks)
        self._free.clear()
        self.num_bytes -= num_bytes
        return num_bytes

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every block, lent or free, as (name, uint8 tensor)."""
        for number, block in enumerate(self._lent):
            yield f"lent.{number}", block.memory
        for number, block in enumerate(block for blocks in self._free.values() for block in blocks):
            yield f"free.{number}", block.memory

    def counts(self) -> Mapping[str, float]:
        """Returns bytes held and lent, now and at most, the bytes that rounding wastes now, numbers of allocations and of
        leases, and the share of leases that needed no allocation.
        """
        return {
            "held_bytes": self.num_bytes,
            "max_held_bytes": self.max_bytes,
            "lent_bytes": self.num_bytes_lent,
            "max_lent_bytes": self.max_bytes_lent,
            "wasted_bytes": self._bytes_of_lent_blocks - self.num_bytes_lent,
            "allocations": self.num_allocations,
            "leases": self.num_leases,
            "hit_rate": 1 - self.num_allocations / self.num_leases if self.num_leases else 0.0,
        }

    def _take(self, num_bytes: int, device: torch.device) -> _Block:
        """Returns a free block of the size that holds `num_bytes`, or a new one, and counts it as lent."""
        size = class_bytes(num_bytes, self.config.per_doubling)
        free = self._free.get((device, size))
        if free:
            block = free.pop()
        else:
            block = _Block(size, device)
            self.num_allocations += 1
            self.num_bytes += block.num_held
            self.max_bytes = max(self.max_bytes, self.num_bytes)
        self._lent.add(block)
        self.num_leases += 1
        self.num_lent += 1
        self.max_lent = max(self.max_lent, self.num_lent)
        self.num_bytes_lent += num_bytes
        self._bytes_of_lent_blocks += block.num_held
        self.max_bytes_lent = max(self.max_bytes_lent, self.num_bytes_lent)
        return block

    def _give(self, block: _Block, num_bytes: int) -> None:
        """Takes a block back from a lease of `num_bytes`; the next lease of its size gets it."""
        self._lent.remove(block)
        self.num_lent -= 1
        self.num_bytes_lent -= num_bytes
        self._bytes_of_lent_blocks -= block.num_held
        self._free.setdefault(block.place, []).append(block)
