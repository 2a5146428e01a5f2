"""Announces what a boundary carries, as text before its first message: any number of tensors, of any shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sley_pp.message import from_bytes, to_bytes

if TYPE_CHECKING:
    from sley_core.api.boundary import Description
    from sley_core.api.comm import Pending
    from sley_pp.lines import Lines


class Announcements:
    """Sends and receives descriptions on `lines`, in one order with the messages there; each as two messages: its length, then
    its text.
    """

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._sending: list[Pending] = []

    def send(self, description: Description, peer: int, what: str) -> None:
        """Starts to send `description` to the stage `peer`."""
        text = to_bytes(description)
        parts = torch.tensor([text.numel()]), text
        self._sending += [self._lines.tell(part, peer, what) for part in parts]

    def hear(self, peer: int, what: str) -> Description:
        """Blocks until the next announcement of the stage `peer` has arrived; returns its description."""
        size = torch.zeros(1, dtype=torch.int64)
        self._lines.hear(size, peer, what).wait()
        text = torch.empty(int(size), dtype=torch.uint8)
        self._lines.hear(text, peer, what).wait()
        return from_bytes(text)

    def end(self) -> None:
        """Blocks until all that were sent have been received."""
        while self._sending:
            self._sending.pop().wait()

    def forget(self) -> None:
        """Drops the announcements in flight, without waiting for them."""
        self._sending.clear()
