"""The communicators of messages between stages: one per direction, and a third on the host if tensors are on a device.

up    from a stage to a later one     ┐ of the group `pp`, a communicator each
down  from a stage to an earlier one  ┘
host  of the group `control`: heads and announcements, if tensors are on a device; otherwise they go up and down too

On a device, tensors go by the host too in a stage's first walks (`by_host`), and communicators are connected when nothing else
is under way (`connect`). NCCL connects two ranks at their first message, and blocks the host of either until the other comes to
it; CUDA loads a kernel at its first launch, and waits until the device has nothing to do, also for a receive that waits for a
peer. With receives that are posted ahead each stage would wait for the other (docs/adr/0014).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from sley_core.api.actions import DEFAULT_LANE, direction_of
from sley_core.api.comm import SentBytes, receive_from, send_to

if TYPE_CHECKING:
    from sley_core.api.comm import Device, Group, Groups, Pending


def heads_are_apart(device: Device) -> bool:
    """Returns whether message heads travel on the host while their tensors travel from device to device."""
    return device.torch_device.type != "cpu"


class Lines:
    """Holds the lines of one stage to its neighbours. apart: whether heads use the host's line, apart from their tensors.
    by_host: whether tensors use it too; alike at both ends. sent: counts the bytes of messages.

    Both ends of a line must issue its messages in the same order, heads and tensors too; the lowered lists give that order.
    """

    def __init__(self, groups: Groups, *, apart: bool) -> None:
        self.group = groups["pp"]
        self.stage = self.group.coord
        self.apart = apart
        self.by_host = False
        self._control = groups["control"]
        self._connected: set[int] = set()
        # A fake world's lanes have a backend of their own: what gloo would carry there is told by where tensors lie.
        self._is_gloo = not apart or any(dist.get_backend(lane) == "gloo" for lane in self.group.lanes.values())
        self.sent = SentBytes()

    @property
    def says_when_sent(self) -> bool:
        """Returns whether a handle's `is_done` says that its message was sent: NCCL's does, gloo tells only a wait."""
        return not (self.by_host or self._is_gloo)

    def connect(self, peers: Iterable[int], device: Device) -> None:
        """Exchanges a byte of `device` with each of `peers`, up and then down; blocks until they do it too. Once per peer:
        later calls do nothing.

        All stages call it when no message between stages is under way. Each takes its pairs in ascending order, so none can
        wait in a circle.
        """
        for peer in sorted(set(peers) - self._connected, key=lambda peer: sorted((self.stage, peer))):
            self._connected.add(peer)
            byte, what = torch.zeros(1, dtype=torch.uint8, device=device.torch_device), f"a first byte, of stage {peer}"
            for sender, receiver in ((min, max), (max, min)):
                ends = sender(self.stage, peer), receiver(self.stage, peer)
                move = send_to if ends[0] == self.stage else receive_from
                move(byte, self.group, direction_of(*ends), peer, what=what).wait()

    def send(self, pieces: Sequence[Tensor], peer: int, what: str) -> list[Pending]:
        """Starts to send a message's `pieces` to stage `peer`; returns handles to wait on, in that order.

        An empty body is not sent. what: names the message in errors. `pieces` must stay as they are until the handles
        are done.
        """
        *head, body = pieces
        self.sent.add_message(sum(piece.nbytes for piece in pieces))
        pending = [self.tell(each, peer, what) for each in head]
        if body.numel():
            pending.append(send_to(body, *self._line(self.stage, peer, peer), what=what))
        return pending

    def receive(self, pieces: Sequence[Tensor], peer: int, what: str) -> list[Pending]:
        """Starts to receive a message that stage `peer` sends by `send`, into `pieces` of the same sizes."""
        *head, body = pieces
        pending = [self.hear(each, peer, what) for each in head]
        if body.numel():
            pending.append(receive_from(body, *self._line(peer, self.stage, peer), what=what))
        return pending

    def tell(self, words: Tensor, peer: int, what: str) -> Pending:
        """Starts to send `words`, a tensor on the host, to stage `peer`; used for heads and announcements."""
        return send_to(words, *self._host(self.stage, peer, peer), what=what)

    def hear(self, words: Tensor, peer: int, what: str) -> Pending:
        """Starts to receive into `words`, a tensor on the host, what stage `peer` sends by `tell`."""
        return receive_from(words, *self._host(peer, self.stage, peer), what=what)

    def _line(self, sender: int, receiver: int, peer: int) -> tuple[Group, str, int]:
        """Returns group, lane and the peer's index in that group for a message's tensors from stage `sender` to `receiver`."""
        if self.by_host:
            return self._host(sender, receiver, peer)
        return self.group, direction_of(sender, receiver), peer

    def _host(self, sender: int, receiver: int, peer: int) -> tuple[Group, str, int]:
        """Returns group, lane and the peer's index in that group for host tensors from stage `sender` to stage `receiver`."""
        if not self.apart:
            return self.group, direction_of(sender, receiver), peer
        return self._control, DEFAULT_LANE, self._control.ranks.index(self.group.ranks[peer])
