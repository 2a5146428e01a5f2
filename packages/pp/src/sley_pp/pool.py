"""Lends messages, and returns their buffers to the pool when nothing uses a tensor in them."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sley_pp.message import Layout, Message, message_bytes

if TYPE_CHECKING:
    from sley_core.api.comm import Device
    from sley_core.protocols import MemoryPool


class MessagePool:
    """Lends messages on `device`, in buffers of `pool`. separate_header: as in `Message`.

        lease ──> [ the link fills or receives it ] ──> release ────────────────────────────────────> buffer in the pool
                                                  └───> release_when_unused ──> views, autograd end ──> buffer in the pool

    No order of events shows when a received tensor is free. For example, a gradient may be a view of the received gradient, or
    a layer may store its input. So this checks the memory's reference counts (`Message.is_shared`) before each lease.
    """

    def __init__(self, pool: MemoryPool, device: Device, *, separate_header: bool) -> None:
        self.pool = pool
        self.device = device
        self.separate_header = separate_header
        self._messages_in_use: list[Message] = []
        # Messages by their buffers, which are back in the pool: building a message takes as long as copying 300 KB. An entry
        # ends when the pool frees its buffer.
        self._message_cache: MutableMapping[Tensor, Message] = WeakTensorKeyDictionary()

    def lease(self, layout: Layout) -> Message:
        """Returns a message of `layout` that nothing else uses. Its contents are undefined."""
        self.release_unused()
        num_bytes = message_bytes(layout, separate_header=self.separate_header)
        lease = self.pool.lease((num_bytes,), torch.uint8, self.device.torch_device)
        memory = lease.__enter__()
        message = self._message_cache.pop(memory, None)
        if message is None:
            message = Message(memory, layout, self.device, separate_header=self.separate_header)
        elif message.layout != layout:
            message.set_layout(layout)
        message.lease = lease, memory
        return message

    def release(self, message: Message) -> None:
        """Returns the buffer of a leased message to the pool. None of its tensors may be in use."""
        assert message.lease is not None, "a message is released twice"
        (lease, memory), message.lease = message.lease, None
        self._message_cache[memory] = message
        lease.__exit__(None, None, None)

    def release_when_unused(self, message: Message) -> None:
        """Lets `release_unused` release a leased message once none of its `aliases` is alive."""
        self._messages_in_use.append(message)

    def release_unused(self) -> None:
        """Returns the buffers of messages to the pool whose aliases are all dead."""
        messages, self._messages_in_use = self._messages_in_use, []
        for message in messages:
            if message.is_shared:
                self._messages_in_use.append(message)
            else:
                self.release(message)
