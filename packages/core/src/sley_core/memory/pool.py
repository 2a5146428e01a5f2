"""The device pools of a run: buffers are lent for the length of a `with`, and share memory if their sizes are almost equal.

    asked for, in bytes     1 .. 256   .. 512 ..        4096    4608    5120  ..  8192    9216 ..
    lent a view of a block     256        512           4096    4608    5120      8192    9216
                            multiples of 256 below 2048, then 8 sizes from each power of two to the next

A block is at most an eighth larger than the request, a sixteenth on average, and sequences of any lengths use a few dozen
sizes. With one size per doubling, as torch's pinned memory has, up to half of a block is wasted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from math import prod
from types import TracebackType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from sley_core.errors import PlanError
from sley_core.protocols import MemoryPool
from sley_core.sizes import ALIGNMENT_BYTES, round_up
from sley_core.words import suggestion

_SIZES_OF_ONE_ALIGNMENT = 8
"""Up to this many alignments, every multiple of the alignment is a size."""

DEFAULT = "core.pool"
"""What reports call the pool of a run that tables without a `pool` share."""


def block_bytes(num_bytes: int, per_doubling: int = 8) -> int:
    """Returns the size of the block that lends `num_bytes`: the least size that holds them, a multiple of 256."""
    units = max(1, round_up(num_bytes, ALIGNMENT_BYTES) // ALIGNMENT_BYTES)
    if units > _SIZES_OF_ONE_ALIGNMENT:
        below = 1 << (units - 1).bit_length() - 1  # the largest power of two that is less than `units`
        units = round_up(units, max(1, below // per_doubling))
    return units * ALIGNMENT_BYTES


class _Block:
    """`memory`, uint8 [num_bytes], starts at a multiple of ALIGNMENT_BYTES. num_asked: the bytes of the current lease."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        # The host's allocator aligns to 64 bytes; a device's aligns to 256.
        self.num_held = num_bytes + (ALIGNMENT_BYTES if device.type == "cpu" else 0)
        with torch.inference_mode(False):  # an inference tensor could not be used in training later
            whole = torch.empty(self.num_held, dtype=torch.uint8, device=device)
            start = -whole.data_ptr() % ALIGNMENT_BYTES
            self.memory = whole[start : start + num_bytes]
        self.place = device, num_bytes
        self.num_asked = 0
        self._view = self.memory

    def view(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns a tensor on the block's first bytes; the same object as before for the same shape and dtype."""
        if (self._view.shape, self._view.dtype) != (shape, dtype):
            with torch.inference_mode(False):
                self._view = self.memory[: prod(shape) * dtype.itemsize].view(dtype).view(shape)
        return self._view


class _Lease(AbstractContextManager[Tensor]):
    """Lends a view of a block for the length of one `with`."""

    def __init__(self, pool: DevicePool, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self._pool = pool
        self._size = tuple(shape), dtype
        self._device = device
        self._block: _Block | None = None
        self._is_used = False

    def __enter__(self) -> Tensor:
        shape, dtype = self._size
        if self._is_used:
            raise AssertionError(f"a lease of {shape} {dtype} is used twice")
        self._is_used = True
        self._block = self._pool._take(prod(shape) * dtype.itemsize, self._device)
        return self._block.view(shape, dtype)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._block is None:
            raise AssertionError(f"a lease of {self._size} ends before it began, or twice")
        block, self._block = self._block, None
        self._pool._give(block)


class DevicePool(MemoryPool):
    """Lends views of exact shape and dtype, aligned to 256 bytes, of blocks whose sizes are rounded up.

    Blocks take at most twice the bytes that were ever lent at once: at that bound a larger free block is lent, and those that
    have been free longest are freed. A lease that is lost without its end takes its block with it.

    per_doubling: sizes of blocks between one power of two and the next. num_allocations, num_leases: since the beginning.
    """

    def __init__(self, per_doubling: int = 8) -> None:
        self.per_doubling = per_doubling
        self.num_allocations = 0
        self.num_leases = 0
        self._max_bytes = 0
        self._max_lent = 0
        self._free: dict[tuple[torch.device, int], list[_Block]] = {}
        # Weak: the buffer of a lease that a failed step lost may still be received into, and is freed with its last user.
        self._lent: WeakSet[_Block] = WeakSet()

    @property
    def num_lent(self) -> int:
        return len(self._lent)

    @property
    def num_bytes(self) -> int:
        return sum(block.num_held for block in self._blocks())

    def lease(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Tensor]:
        """Returns a lease for one `with` block; the contents are undefined. Allocates at most when entered."""
        return _Lease(self, shape, dtype, device)

    def trim(self) -> int:
        """Frees every block that is not lent; returns the bytes freed."""
        num_bytes = sum(block.num_held for blocks in self._free.values() for block in blocks)
        self._free.clear()
        return num_bytes

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every block, lent or free, as (name, uint8 tensor)."""
        num_lent = len(self._lent)
        for number, block in enumerate(self._blocks()):
            yield (f"lent.{number}" if number < num_lent else f"free.{number - num_lent}"), block.memory

    def counts(self) -> Mapping[str, float]:
        """Returns bytes of blocks, now and at most, those asked for and wasted, and the numbers of allocations and leases."""
        lent = list(self._lent)
        num_asked = sum(block.num_asked for block in lent)
        return {
            "held_bytes": self.num_bytes,
            "max_held_bytes": self._max_bytes,
            "lent_bytes": num_asked,
            "wasted_bytes": sum(block.num_held for block in lent) - num_asked,
            "allocations": self.num_allocations,
            "leases": self.num_leases,
            "hit_rate": 1 - self.num_allocations / self.num_leases if self.num_leases else 0.0,
        }

    def _blocks(self) -> list[_Block]:
        return [*self._lent, *(block for blocks in self._free.values() for block in blocks)]

    def _take(self, num_bytes: int, device: torch.device) -> _Block:
        """Returns a free block of the size that holds `num_bytes`, a new one, or at the bound a larger free one; as lent."""
        place = device, block_bytes(num_bytes, self.per_doubling)
        block = self._out(place) if place in self._free else self._larger(*place) or self._new(*place)
        self._lent.add(block)
        self.num_leases += 1
        block.num_asked = num_bytes
        return block

    def _larger(self, device: torch.device, size: int) -> _Block | None:
        """Returns the smallest free block of `size` or more if a new one would exceed the bound; else frees nothing or, at the
        bound, the blocks that have been free longest, and returns None.
        """
        self._max_lent = max(self._max_lent, size + sum(block.num_held for block in self._lent))
        if self.num_bytes + size > 2 * self._max_lent:
            if fitting := [place for place in self._free if place[0] == device and place[1] >= size]:
                return self._out(min(fitting, key=lambda place: place[1]))
            while self._free and self.num_bytes + size > 2 * self._max_lent:
                self._out(next(iter(self._free)), 0)
        return None

    def _new(self, device: torch.device, size: int) -> _Block:
        block = _Block(size, device)
        self.num_allocations += 1
        self._max_bytes = max(self._max_bytes, self.num_bytes + block.num_held)
        return block

    def _out(self, place: tuple[torch.device, int], at: int = -1) -> _Block:
        """Removes a free block of this size, the one that came back last, and returns it."""
        block = self._free[place].pop(at)
        if not self._free[place]:
            del self._free[place]
        return block

    def _give(self, block: _Block) -> None:
        """Takes a block back; the next lease of its size gets it."""
        self._lent.remove(block)
        # At the end: the first sizes are those that have been free longest.
        blocks = self._free.pop(block.place, [])
        blocks.append(block)
        self._free[block.place] = blocks


class Pools:
    """Makes each pool when it is first asked for: the run's own, that of a table `[pools.NAME]`, or a record's, with defaults.

    tables: the plan's `[pools]`. build: makes the pool of a record. pools: those made so far, by name.
    """

    def __init__(self, tables: Mapping[str, Any], build: Callable[[str], MemoryPool]) -> None:
        self._tables = tables
        self._build = build
        self.pools: dict[str, MemoryPool] = {}

    def __call__(self, name: str | None) -> MemoryPool:
        """Returns the pool of the table `[pools.name]`, or of the record `name`, as `memory.size_classes`; for None the run's
        own. Raises PlanError `unknown-name` or `unknown-record`, and PluginError for a plugin that cannot be loaded.
        """
        key = name or DEFAULT
        if key not in self.pools:
            if name is None:
                self.pools[key] = DevicePool()
            elif name in self._tables:
                self.pools[key] = self._tables[name].build()
            elif "." in name:
                self.pools[key] = self._build(name)
            else:
                hint = suggestion(name, self._tables, 'add the table, or use the name of a record, "plugin.record"')
                raise PlanError("unknown-name", f"the plan has no table [pools.{name}]", hint=hint)
        return self.pools[key]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors that the pools report, named `pool.tensor`."""
        for name, pool in self.pools.items():
            yield from ((f"{name}.{label}", tensor) for label, tensor in pool.named_tensors())

    def labels(self) -> Mapping[str, MemoryPool]:
        """Returns the pools by their names in the plan: `pools.NAME`, or the name of a record."""
        return {name if "." in name else f"pools.{name}": pool for name, pool in self.pools.items()}
