"""The device pool of a run: a buffer is lent for a `with` block, and buffers of almost equal sizes share memory.

    requested bytes         1 .. 256   .. 512 ..        4096    4608    5120  ..  8192    9216 ..
    bytes of the block         256        512           4096    4608    5120      8192    9216
                            multiples of 256 below 2048, then 8 sizes from each power of two to the next

A block is at most an eighth larger than the request, a sixteenth on average, and sequences of any lengths use a few dozen
sizes. With one size per doubling, as torch's pinned memory has, up to half of a block is wasted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from weakref import WeakSet

import torch
from torch import Tensor

ALIGNMENT_BYTES = 256
"""The alignment of views in a buffer, the same as that of the CUDA allocator. It allows vector loads and NCCL's fast copies."""

MAX_LINEAR_UNITS = 8
"""Up to this many alignments, every multiple of the alignment is a block size."""

BLOCKS_PER_DOUBLING = 8
"""The number of block sizes from one power of two to the next."""


def round_up(size: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def block_bytes(num_bytes: int) -> int:
    """Returns the smallest block size that fits `num_bytes`, a multiple of 256."""
    units = max(1, round_up(num_bytes, ALIGNMENT_BYTES) // ALIGNMENT_BYTES)
    if units > MAX_LINEAR_UNITS:
        lower_power = 1 << (units - 1).bit_length() - 1  # the largest power of two below `units`
        units = round_up(units, lower_power // BLOCKS_PER_DOUBLING)
    return units * ALIGNMENT_BYTES


class _Block:
    """Holds `memory`, uint8 [num_bytes], which starts at a multiple of ALIGNMENT_BYTES.

    key: the device and the block size. num_allocated: the allocated bytes.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        # The host's allocator aligns to 64 bytes; a device's aligns to 256.
        self.num_allocated = num_bytes + (ALIGNMENT_BYTES if device.type == "cpu" else 0)
        with torch.inference_mode(False):  # an inference tensor could not be used in training later
            allocation = torch.empty(self.num_allocated, dtype=torch.uint8, device=device)
            start = -allocation.data_ptr() % ALIGNMENT_BYTES
            self.memory = allocation[start : start + num_bytes]
        self.key = device, num_bytes
        self._view = self.memory

    def view(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns a tensor on the block's first bytes; the same object as before for the same shape and dtype."""
        if (self._view.shape, self._view.dtype) != (shape, dtype):
            with torch.inference_mode(False):
                self._view = self.memory[: prod(shape) * dtype.itemsize].view(dtype).view(shape)
        return self._view


class DevicePool:
    """Lends views of exact shape and dtype, aligned to 256 bytes, of blocks whose sizes are rounded up.

    Blocks use at most twice the bytes that were ever lent at the same time. At this limit the pool lends a larger free block,
    or releases the blocks that have been unused the longest. The block of a lost lease leaves the pool.
    """

    def __init__(self) -> None:
        self.num_allocations = 0
        self.num_leases = 0
        self._max_lent = 0
        # The first sizes are those that have been unused the longest.
        self._free: dict[tuple[torch.device, int], list[_Block]] = {}
        # Weak: a failed step loses its leases. Their buffers may still be received into, and are freed with their last user.
        self._lent: WeakSet[_Block] = WeakSet()

    @property
    def num_lent(self) -> int:
        return len(self._lent)

    @property
    def num_bytes(self) -> int:
        return sum(block.num_allocated for block in self._all_blocks())

    @contextmanager
    def lease(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
        """Lends a buffer for one `with` block; its contents are undefined. Allocates at most when the block is entered."""
        block = self._acquire(prod(shape) * dtype.itemsize, device)
        is_lost = False
        try:
            yield block.view(tuple(shape), dtype)
        except GeneratorExit:
            is_lost = True
            raise
        finally:
            if not is_lost:
                self._lent.remove(block)
                self._free[block.key] = [*self._free.pop(block.key, []), block]

    def trim(self) -> int:
        """Frees every block that is not lent; returns the number of freed bytes."""
        num_bytes = sum(block.num_allocated for blocks in self._free.values() for block in blocks)
        self._free.clear()
        return num_bytes

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every block, lent or free, as (name, uint8 tensor)."""
        num_lent = len(self._lent)
        for number, block in enumerate(self._all_blocks()):
            yield (f"lent.{number}" if number < num_lent else f"free.{number - num_lent}"), block.memory

    def counts(self) -> dict[str, float]:
        """Returns the bytes of all blocks and of lent blocks, and the numbers of allocations and leases."""
        return {
            "held_bytes": self.num_bytes,
            "lent_bytes": sum(block.num_allocated for block in self._lent),
            "allocations": self.num_allocations,
            "leases": self.num_leases,
            "hit_rate": 1 - self.num_allocations / self.num_leases if self.num_leases else 0.0,
        }

    def _all_blocks(self) -> list[_Block]:
        return [*self._lent, *(block for blocks in self._free.values() for block in blocks)]

    def _acquire(self, num_bytes: int, device: torch.device) -> _Block:
        """Returns a block that fits `num_bytes`, and marks it as lent."""
        key = device, block_bytes(num_bytes)
        block = self._pop_free(key) if key in self._free else self._pop_larger(*key)
        if block is None:
            block = _Block(*key)
            self.num_allocations += 1
        self._lent.add(block)
        self.num_leases += 1
        return block

    def _pop_larger(self, device: torch.device, size: int) -> _Block | None:
        """Returns the smallest free block of at least `size` bytes if a new block would exceed the limit of the pool.

        Returns None if a new block fits within the limit, or if no free block is large enough. In the latter case it first
        releases the blocks that have been unused the longest.
        """
        self._max_lent = max(self._max_lent, size + sum(block.num_allocated for block in self._lent))
        if self.num_bytes + size > 2 * self._max_lent:
            if keys := [key for key in self._free if key[0] == device and key[1] >= size]:
                return self._pop_free(min(keys, key=lambda key: key[1]))
            while self._free and self.num_bytes + size > 2 * self._max_lent:
                self._pop_free(next(iter(self._free)), 0)
        return None

    def _pop_free(self, key: tuple[torch.device, int], index: int = -1) -> _Block:
        """Removes a free block of a size and returns it, by default the block that was released last."""
        block = self._free[key].pop(index)
        if not self._free[key]:
            del self._free[key]
        return block
