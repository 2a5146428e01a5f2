"""Lends messages, whose buffers go back to the pool once nobody uses a tensor in them."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sley_pp.message import Layout, Message, num_bytes_of

if TYPE_CHECKING:
    from sley_core.api.comm import Device
    from sley_core.protocols import MemoryPool


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
