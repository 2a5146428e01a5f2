"""The communicators of messages between stages: one per direction, and a third on the host if tensors are on a device.

up    from a stage to a later one     ┐ of the group `pp`, a communicator each
down  from a stage to an earlier one  ┘
host  of the group `control`: heads and announcements, if tensors are on a device; otherwise they go up and down too
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from sley_core.api.actions import DEFAULT_LANE, direction_of
from sley_core.api.comm import SentBytes, receive_from, send_to

if TYPE_CHECKING:
    from sley_core.api.comm import Device, Group, Groups, Pending


def heads_are_apart(device: Device) -> bool:
    """Returns whether message heads travel on the host while their tensors travel from device to device."""
    return device.torch_device.type != "cpu"


class Lines:
    """Holds the lines of one stage to its neighbours. apart: whether heads use the host's line, apart from their tensors. sent:
    counts the bytes of messages.

    Both ends of a line must issue its messages in the same order, heads and tensors too; the lowered lists give that order.
    """

    def __init__(self, groups: Groups, *, apart: bool) -> None:
        self.group = groups["pp"]
        self.stage = self.group.coord
        self.apart = apart
        self._control = groups["control"]
        self.sent = SentBytes()

    def send(self, pieces: Sequence[Tensor], peer: int, what: str) -> list[Pending]:
        """Starts to send a message's `pieces` to stage `peer`; returns handles to wait on, in that order.

        An empty body is not sent. what: names the message in errors. `pieces` must stay as they are until the handles
        are done.
        """
        *head, body = pieces
        self.sent.add_message(sum(piece.nbytes for piece in pieces))
        pending = [self.tell(each, peer, what) for each in head]
        if body.numel():
            pending.append(send_to(body, self.group, direction_of(self.stage, peer), peer, what=what))
        return pending

    def receive(self, pieces: Sequence[Tensor], peer: int, what: str) -> list[Pending]:
        """Starts to receive a message that stage `peer` sends by `send`, into `pieces` of the same sizes."""
        *head, body = pieces
        pending = [self.hear(each, peer, what) for each in head]
        if body.numel():
            pending.append(receive_from(body, self.group, direction_of(peer, self.stage), peer, what=what))
        return pending

    def tell(self, words: Tensor, peer: int, what: str) -> Pending:
        """Starts to send `words`, a tensor on the host, to stage `peer`; used for heads and announcements."""
        return send_to(words, *self._host(self.stage, peer, peer), what=what)

    def hear(self, words: Tensor, peer: int, what: str) -> Pending:
        """Starts to receive into `words`, a tensor on the host, what stage `peer` sends by `tell`."""
        return receive_from(words, *self._host(peer, self.stage, peer), what=what)

    def _host(self, sender: int, receiver: int, peer: int) -> tuple[Group, str, int]:
        """Returns group, lane and the peer's index in that group for host tensors from stage `sender` to stage `receiver`."""
        if not self.apart:
            return self.group, direction_of(sender, receiver), peer
        return self._control, DEFAULT_LANE, self._control.ranks.index(self.group.ranks[peer])
