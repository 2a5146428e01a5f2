"""`isp.slots`, a pool that keeps buffers by size, and `isp.fresh`, which keeps none.

lease ──> with ... as buffer ──> back in the pool ──> lent again
                 ^ a second `with` of one lease raises: its buffer may be lent to another user by then; with
                   assertions off (`python -O`) it gets another buffer, and the pool warns once
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sley_core.protocols import MemoryPool

if TYPE_CHECKING:
    from sley_isp.config import FreshConfig, SlotsConfig

Size = tuple[tuple[int, ...], torch.dtype, torch.device]


class Lease:
    """Lends a buffer for the length of one `with` block."""

    def __init__(self, pool: Slots, size: Size) -> None:
        self._pool = pool
        self._size = size
        self._buffers: list[Tensor] = []
        self._is_used = False

    def __enter__(self) -> Tensor:
        """Takes a buffer from the pool, or allocates one."""
        assert not self._is_used, f"a lease of {self._size} is used twice"
        if self._is_used:
            self._pool._warn(f"a lease of {self._size} is used twice, and gets another buffer each time")
        self._is_used = True
        self._buffers.append(self._pool._take(self._size))
        return self._buffers[-1]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._buffers, f"a lease of {self._size} ends before it began"
        self._pool._give(self._size, self._buffers.pop())


class Slots(MemoryPool):
    """Lends buffers of the exact shape, dtype and device; keeps returned ones, and allocates if none is free.

    num_allocations: since the beginning. num_lent, max_lent: buffers lent now, and at most at one time. num_bytes: of all
    buffers, lent or not.
    """

    keeps = True

    def __init__(self, config: SlotsConfig | FreshConfig) -> None:
        self.config = config
        self.num_allocations = 0
        self.num_lent = 0
        self.max_lent = 0
        self.num_bytes = 0
        self._free: dict[Size, list[Tensor]] = {}
        self._lent: dict[int, Tensor] = {}  # by id; held, so that no other tensor can have that id
        self._has_warned = False

    def lease(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Lease:
        """Returns a lease of such a buffer for one `with` block; the contents are undefined. Allocates at most when entered."""
        return Lease(self, (tuple(shape), dtype, device))

    def trim(self) -> int:
        """Frees every buffer that is not lent; returns their bytes."""
        free = [buffer for buffers in self._free.values() for buffer in buffers]
        self._free.clear()
        num_bytes = sum(buffer.nbytes for buffer in free)
        self.num_bytes -= num_bytes
        return num_bytes

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every buffer, lent or free, as (name, tensor)."""
        yield from ((f"lent.{number}", buffer) for number, buffer in enumerate(self._lent.values()))
        free = (buffer for buffers in self._free.values() for buffer in buffers)
        yield from ((f"free.{number}", buffer) for number, buffer in enumerate(free))

    def _take(self, size: Size) -> Tensor:
        """Returns a free buffer of this size, or a new one, and counts it as lent."""
        free = self._free.get(size)
        if free:
            buffer = free.pop()
        else:
            shape, dtype, device = size
            with torch.inference_mode(False):  # an inference tensor could not be used in training later
                buffer = torch.empty(shape, dtype=dtype, device=device)
            self.num_allocations += 1
            self.num_bytes += buffer.nbytes
        assert id(buffer) not in self._lent, f"the buffer of {size} is lent already"
        self._lent[id(buffer)] = buffer
        self.num_lent += 1
        self.max_lent = max(self.max_lent, self.num_lent)
        return buffer

    def _give(self, size: Size, buffer: Tensor) -> None:
        """Takes a buffer back, and keeps it if the pool keeps buffers."""
        del self._lent[id(buffer)]
        self.num_lent -= 1
        if self.keeps:
            self._free.setdefault(size, []).append(buffer)
        else:
            self.num_bytes -= buffer.nbytes

    def _warn(self, message: str) -> None:
        """Warns the first time it is called."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(message, RuntimeWarning, stacklevel=3)


class Fresh(Slots):
    """Allocates a buffer for each lease and frees it at the end."""

    keeps = False
