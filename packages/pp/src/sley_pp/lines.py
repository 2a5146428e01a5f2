"""Where messages between stages travel: two lines, and from device to device where tensors are on one.

up    from a stage to a later one     ┐ of the group `pp`, a communicator each
down  from a stage to an earlier one  ┘
host  of the group `control`: heads and announcements, where tensors are on a device; on the host they go up and down too
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from sley_core.api.actions import DEFAULT_LANE, direction_of
from sley_core.api.comm import receive_from, send_to

if TYPE_CHECKING:
    from sley_core.api.comm import Device, Group, Groups, Pending


def heads_are_apart(device: Device) -> bool:
    """Whether a head travels on the host while its tensors travel from device to device."""
    return device.torch_device.type != "cpu"


class Lines:
    """The lines of one stage to its neighbours. apart: whether heads travel on the host's line, away from their tensors.

    Both ends of a line issue its messages in the order of the lowered lists, and tensors and heads in one order.
    """

    def __init__(self, groups: Groups, *, apart: bool) -> None:
        self.group = groups["pp"]
        self.stage = self.group.coord
        self.apart = apart
        self._control = groups["control"]

    def send(self, pieces: Sequence[Tensor], peer: int, what: str) -> list[Pending]:
        """Starts to send a message's pieces to stage `peer`."""
        *head, body = pieces
        pending = [self.tell(each, peer, what) for each in head]
        if body.numel():
            pending.append(send_to(body, self.group, direction_of(self.stage, peer), peer, what=what))
        return pending

    def receive(self, pieces: Sequence[Tensor], peer: int, what: str) -> list[Pending]:
        """Starts to receive what stage `peer` sends so."""
        *head, body = pieces
        pending = [self.hear(each, peer, what) for each in head]
        if body.numel():
            pending.append(receive_from(body, self.group, direction_of(peer, self.stage), peer, what=what))
        return pending

    def tell(self, words: Tensor, peer: int, what: str) -> Pending:
        """Starts to send `words`, which are on the host."""
        return send_to(words, *self._host(self.stage, peer, peer), what=what)

    def hear(self, words: Tensor, peer: int, what: str) -> Pending:
        """Starts to receive `words` on the host."""
        return receive_from(words, *self._host(peer, self.stage, peer), what=what)

    def _host(self, sender: int, receiver: int, peer: int) -> tuple[Group, str, int]:
        if not self.apart:
            return self.group, direction_of(sender, receiver), peer
        return self._control, DEFAULT_LANE, self._control.ranks.index(self.group.ranks[peer])
