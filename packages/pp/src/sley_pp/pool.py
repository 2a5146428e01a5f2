"""`pp.messages`, the link's own pool: keeps free messages up to as much again as was ever in use at one time.

Sequences of many lengths make messages of many sizes. At that bound a larger free buffer is lent for a smaller message, and the
buffers that have been free longest are dropped. No buffer is shared by two leases.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sley_core.protocols import MemoryPool
from sley_pp.message import Layout, Message, num_bytes_of

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from sley_core.api.comm import Device
    from sley_core.protocols import MemoryPool
    from sley_pp.config import MessagesConfig


class Lending:
    """Lends messages on `device`, in buffers of `pool`; apart: as in `Message`.

        lease ──> [ the link fills or receives it ] ──> give_back ───────────────────────────────> the pool's
                                                   └──> lend ──> views, autograd, users let go ──> the pool's

    No order of events shows when a received tensor is free: a gradient may be a view of the received one, a layer may keep its
    input. So the memory's reference counts are checked (`Message.is_shared`), whenever the next message is needed.
    """

    def __init__(self, pool: MemoryPool, device: Device, *, apart: bool) -> None:
        self.pool = pool
        self.device = device
        self.apart = apart
        self._lent: list[Message] = []
        # A cache of laid out messages whose buffers are back in the pool, for as long as it keeps the tensor: laying one out
        # takes as long as copying 300 KB.
        self._laid: MutableMapping[Tensor, Message] = WeakTensorKeyDictionary()

    def lease(self, layout: Layout) -> Message:
        """Returns a message of `layout` that nothing else uses; its contents are undefined."""
        self.collect()
        lease = self.pool.lease((num_bytes_of(layout, apart=self.apart),), torch.uint8, self.device.torch_device)
        memory = lease.__enter__()
        message = self._laid.pop(memory, None) or Message(memory, layout, self.device, apart=self.apart)
        if message.layout != layout:
            message.lay(layout)
        message.leased = lease, memory
        return message

    def give_back(self, message: Message) -> None:
        """Returns a leased message's buffer to the pool; no tensor of it may be in use."""
        assert message.leased is not None, "a message is given back twice"
        (lease, memory), message.leased = message.leased, None
        self._laid[memory] = message
        lease.__exit__(None, None, None)

    def lend(self, message: Message) -> None:
        """Marks a leased message as used by its `lent` tensors; its buffer is free once none of them is alive."""
        self._lent.append(message)

    def collect(self) -> None:
        """Returns to the pool the buffers of lent messages whose tensors are all dead."""
        lent, self._lent = self._lent, []
        for message in lent:
            if message.is_shared:
                self._lent.append(message)
            else:
                self.give_back(message)


Size = tuple[torch.device, int]
"""A device, and bytes there."""


class Messages(MemoryPool):
    """Lends flat buffers, one per message. num_allocations: since the beginning. num_bytes: of existing buffers."""

    def __init__(self, config: MessagesConfig) -> None:
        self.config = config
        self.num_allocations = 0
        self.num_bytes = 0
        self._in_use = 0
        self._most_in_use = 0
        self._free: dict[Size, list[Tensor]] = {}
        # Weak, so that a buffer whose lease a failed step lost is freed with its last user.
        self._lent = WeakTensorKeyDictionary()

    def lease(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Tensor]:
        """Returns a context manager that lends a buffer with undefined contents, and takes it back at the end."""
        return self._lease(tuple(shape), dtype, device)

    def trim(self) -> int:
        """Frees every buffer that is not lent; returns the number of bytes."""
        num_bytes = sum(buffer.numel() for buffers in self._free.values() for buffer in buffers)
        self._free.clear()
        self.num_bytes -= num_bytes
        return num_bytes

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every buffer, lent or free, as (name, uint8 tensor)."""
        yield from ((f"lent.{number}", buffer) for number, buffer in enumerate(self._lent))
        free = (buffer for buffers in self._free.values() for buffer in buffers)
        yield from ((f"free.{number}", buffer) for number, buffer in enumerate(free))

    @contextmanager
    def _lease(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
        """Lends a buffer for the block: the whole buffer if shape and dtype are its own, else a view. If the lease is lost, it
        is not taken back.
        """
        size = prod(shape) * dtype.itemsize
        buffer = self._take((device, size))
        self._lent[buffer] = None
        self._in_use += buffer.numel()
        self._most_in_use = max(self._most_in_use, self._in_use)
        # The buffer itself if it fits exactly: users may cache by the tensor (`Lending`).
        as_asked = buffer
        if (dtype, shape) != (torch.uint8, tuple(buffer.shape)):
            with torch.inference_mode(False):  # a view of another dtype could not be used in training later, either
                as_asked = buffer[:size].view(dtype).view(shape)
        try:
            yield as_asked
        except GeneratorExit:
            return  # the lease was lost: its buffer may still be in use
        except BaseException:
            self._give(buffer, device)
            raise
        self._give(buffer, device)

    def _give(self, buffer: Tensor, device: torch.device) -> None:
        """Takes a buffer back."""
        del self._lent[buffer]
        self._in_use -= buffer.numel()
        # At the end: the first ones are those that have been free longest.
        size = device, buffer.numel()
        free = self._free.pop(size, [])
        free.append(buffer)
        self._free[size] = free

    def _take(self, size: Size) -> Tensor:
        """Returns a free buffer of `size`, a new one, or at the bound a free one that is larger."""
        if free := self._free.get(size):
            return self._out(size, free[-1])
        device, num_bytes = size
        bound = 2 * max(self._most_in_use, self._in_use + num_bytes)
        if self.num_bytes + num_bytes > bound:
            fitting = [free for free in self._free if free[0] == device and free[1] >= num_bytes]
            if fitting:
                smallest = min(fitting, key=lambda size: size[1])
                return self._out(smallest, self._free[smallest][0])
        while self.num_bytes + num_bytes > bound and (oldest := next(iter(self._free.items()), None)):
            self.num_bytes -= self._out(oldest[0], oldest[1][0]).numel()
        self.num_allocations += 1
        self.num_bytes += num_bytes
        with torch.inference_mode(False):  # an inference tensor could not be used in training later
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def _out(self, size: Size, buffer: Tensor) -> Tensor:
        """Removes `buffer` from the free ones of `size`; returns it."""
        free = self._free[size]
        free[:] = [other for other in free if other is not buffer]
        if not free:
            del self._free[size]
        return buffer
