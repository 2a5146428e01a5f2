"""The link's memory: a message is lent, and reused only when nothing that aliases it is alive.

    lease ──> [ the link fills or receives it ] ──> give_back ───────────────────────────────> free
                                               └──> lend ──> views, autograd, users let go ──> free

No order of events tells when a received tensor is free: a gradient may be a view of the received one, a layer may keep its
input. So the pool checks reference counts of the memory (`Message.is_shared`) when the next message is wanted.

The pool's size is bounded by twice the most bytes in use at one time. Beyond that, as with sequences of many lengths, a free
message that is large enough is given the new layout, and the messages unused longest are dropped.
"""

from __future__ import annotations

import torch

from sley_pp.message import Extent, Layout, Message


class Pool:
    """Messages on `device`; apart: as `Message`. num_allocated: since the beginning; num_bytes: of existing messages."""

    def __init__(self, device: torch.device, *, apart: bool) -> None:
        self.device = device
        self.apart = apart
        self.num_allocated = 0
        self.num_bytes = 0
        self._in_use = 0
        self._most_in_use = 0
        self._free: dict[Layout, list[Message]] = {}
        self._lent: list[Message] = []

    def lease(self, layout: Layout) -> Message:
        """Returns a message of `layout` that nothing else uses, reused or new; its contents are undefined."""
        if not self._free.get(layout):
            self._collect()
        free = self._free.get(layout)
        message = free.pop() if free else self._other(layout)
        self._in_use += message.num_bytes
        self._most_in_use = max(self._most_in_use, self._in_use)
        return message

    def give_back(self, message: Message) -> None:
        """Returns a leased message to the pool; no tensor of it may be in use."""
        self._in_use -= message.num_bytes
        # Behind all others: the first ones are those that have been free longest.
        free = self._free.pop(message.layout, [])
        free.append(message)
        self._free[message.layout] = free

    def lend(self, message: Message) -> None:
        """Marks a leased message as used by its `lent` tensors; it returns to the pool once none of them is alive."""
        self._lent.append(message)

    def _collect(self) -> None:
        """Moves lent messages whose tensors are all dead to the free list."""
        lent, self._lent = self._lent, []
        for message in lent:
            if message.is_shared:
                self._lent.append(message)
            else:
                self.give_back(message)

    def _other(self, layout: Layout) -> Message:
        """Returns a new message, or at the size bound a free one of another layout, laid out anew."""
        extent = Extent.of(layout)
        size = extent.body + (0 if self.apart else extent.head)
        bound = 2 * max(self._most_in_use, self._in_use + size)
        if self.num_bytes + size > bound:
            fitting = [message for free in self._free.values() for message in free if message.fits(layout)]
            if fitting:
                message = min(fitting, key=lambda message: message.num_bytes)
                self._take(message)
                message.lay(layout)
                return message
        while self.num_bytes + size > bound and (oldest := next(filter(None, self._free.values()), None)):
            self.num_bytes -= oldest[0].num_bytes
            self._take(oldest[0])
        self.num_allocated += 1
        self.num_bytes += size
        return Message(layout, self.device, apart=self.apart)

    def _take(self, message: Message) -> None:
        """Removes `message` from the free list."""
        free = self._free[message.layout]
        free.remove(message)
        if not free:
            del self._free[message.layout]
