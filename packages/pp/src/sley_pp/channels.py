"""The communicators of messages between stages: one per direction, and one on the host if tensors are on a device.

up    from a stage to a later one     ┐ two channels of the group `pp`
down  from a stage to an earlier one  ┘
host  the group `control`, for headers, announcements and digests; if tensors are on the CPU, these use up and down instead

On a device, a stage's first walks send tensors through the host too (`uses_host`). Then `connect` connects the device's
communicators while no message is in flight. There are two reasons (docs/adr/0014). NCCL connects two ranks at their first
message, and blocks the host of each until the other reaches that message. CUDA loads a kernel at its first launch, and then
waits until the device is idle, even if the device waits for a peer. Since receives are posted ahead, two stages could block
each other forever.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from hashlib import sha256
from itertools import groupby
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from sley_core.api.actions import direction_of
from sley_core.api.comm import Device, Group, SentBytes, Work
from sley_core.errors import RunError

Operation = Literal["send", "receive"]
"""Whether this stage sends or receives a message."""


def has_separate_header(device: Device) -> bool:
    """Returns whether a message's header travels on the host, separately from its tensors: always, unless `device` is a CPU."""
    return device.torch_device.type != "cpu"


class Channels:
    """Holds the communicators of one stage to its neighbours.

    separate_header: whether headers are sent on the host, separately from their tensors. uses_host: whether tensors are sent
    through the host too, which must be equal at both ends. sent: the counter of message bytes.

    Both ends must start the sends and receives on a communicator in the same order, which the lowered lists of actions define.
    """

    def __init__(self, groups: Mapping[str, Group], *, separate_header: bool) -> None:
        self.group = groups["pp"]
        self.stage = self.group.coord
        self.separate_header = separate_header
        self.uses_host = False
        self._control = groups["control"]
        self._connected_peers: set[int] = set()
        # The channels of a fake world have another backend. There, the device of the tensors tells whether gloo would be used.
        self._uses_gloo = not separate_header or any(
            dist.get_backend(channel) == "gloo" for channel in self.group.channels.values()
        )
        self.sent = SentBytes()

    @property
    def reports_completion(self) -> bool:
        """Whether `is_completed` of a send becomes true without a wait, as it does with NCCL but not with gloo."""
        return not (self.uses_host or self._uses_gloo)

    def connect(self, peers: Iterable[int], device: Device) -> None:
        """Exchanges one byte on `device` with each of `peers` in both directions, unless an earlier call did.

        Blocks until the peers call `connect` too. All stages must call it while no message between stages is in flight. Each
        stage exchanges with its peers in ascending order of (lower stage, higher stage), so that stages cannot deadlock.
        """
        for peer in sorted(set(peers) - self._connected_peers, key=lambda peer: sorted((self.stage, peer))):
            self._connected_peers.add(peer)
            byte, label = torch.zeros(1, dtype=torch.uint8, device=device.torch_device), f"the first byte, of stage {peer}"
            for sender, receiver in (sorted((self.stage, peer)), sorted((self.stage, peer), reverse=True)):
                operation = self.group.send if sender == self.stage else self.group.receive
                operation(byte, direction_of(sender, receiver), peer, label=label).wait()

    def send(self, pieces: Sequence[Tensor], peer: int, label: str) -> list[Work]:
        """Starts to send the `pieces` of a message to stage `peer`, and returns a handle for each, in the same order.

        label: the message's description for errors. The last piece is the body, which is not sent if it is empty. The caller
        must not write to `pieces` before the handles are done.
        """
        self.sent.add_message(sum(piece.nbytes for piece in pieces))
        return self._start_message("send", pieces, peer, label)

    def receive(self, pieces: Sequence[Tensor], peer: int, label: str) -> list[Work]:
        """Starts to receive a message from stage `peer` into `pieces` of the same sizes. Returns handles like `send`."""
        return self._start_message("receive", pieces, peer, label)

    def send_host(self, tensor: Tensor, peer: int, label: str) -> Work:
        """Starts to send a host `tensor`, such as a header or an announcement, to stage `peer`."""
        return self._start("send", tensor, peer, label, on_host=True)

    def receive_host(self, tensor: Tensor, peer: int, label: str) -> Work:
        """Starts to receive a host tensor that stage `peer` sends with `send_host`, into `tensor`."""
        return self._start("receive", tensor, peer, label, on_host=True)

    def _start_message(self, operation: Operation, pieces: Sequence[Tensor], peer: int, label: str) -> list[Work]:
        *headers, body = pieces
        pending = [self._start(operation, header, peer, label, on_host=True) for header in headers]
        if body.numel():
            pending.append(self._start(operation, body, peer, label, on_host=self.uses_host))
        return pending

    def _start(self, operation: Operation, tensor: Tensor, peer: int, label: str, *, on_host: bool) -> Work:
        """Starts to send or receive `tensor`. on_host: whether it is a host tensor, or is sent through the host."""
        sender, receiver = (self.stage, peer) if operation == "send" else (peer, self.stage)
        if on_host and self.separate_header:
            group, channel, coord = self._control, "main", self._control.ranks.index(self.group.ranks[peer])
        else:
            group, channel, coord = self.group, str(direction_of(sender, receiver)), peer
        start = group.send if operation == "send" else group.receive
        return start(tensor, channel, coord, label=label)


class WalkCheck:
    """Checks that neighbouring stages run the same microbatches in a walk, which is one pass through a list of actions.

    At the start of a walk each stage sends its neighbours a digest of its microbatches, which they compare before they receive
    messages. Otherwise stages that differ could wait forever or mistake messages. number: the number of walks that have begun.
    """

    def __init__(self, channels: Channels) -> None:
        self.number = 0
        self._channels = channels
        self._sends: dict[int, Work] = {}
        self._receives: dict[int, tuple[Work, Tensor]] = {}
        self._confirmed_peers: set[int] = set()

    def begin(self, keys: Sequence[Hashable], peers: Sequence[int]) -> None:
        """Starts to send the digest of a new walk to the stages `peers`, without blocking. keys: the key of each microbatch."""
        self.number += 1
        runs = [f"{len(list(run))} x {key}" for key, run in groupby(keys)]
        self._text = f"{len(keys)} microbatches: {', '.join(runs)} (walk {self.number})"
        self._digest = torch.frombuffer(bytearray(sha256(self._text.encode()).digest()), dtype=torch.uint8)
        for peer in peers:
            label = f"the microbatches of stage {self._channels.stage}, to stage {peer}"
            self._sends[peer] = self._channels.send_host(self._digest, peer, label)

    def start_receive(self, peer: int, label: str) -> None:
        """Starts to receive the digest of stage `peer`, unless an earlier call did. label: the next transfer."""
        if peer not in self._receives:
            digest = torch.empty_like(self._digest)
            self._receives[peer] = self._channels.receive_host(digest, peer, label), digest

    def is_confirmed(self, peer: int) -> bool:
        """Returns whether `confirm` has compared the digest of `peer` in this walk."""
        return peer in self._confirmed_peers

    def confirm(self, peer: int, label: str) -> None:
        """Blocks until the digest of `peer` has arrived. Raises RunError `stages-differ` if it differs from this stage's."""
        if peer in self._confirmed_peers:
            return
        if not self._channels.group.has_peers:
            self._confirmed_peers.add(peer)
            return
        self.start_receive(peer, label)
        pending, digest = self._receives[peer]
        pending.wait()
        if not torch.equal(digest, self._digest):
            self._sends[peer].wait()  # so that the peer has this stage's digest and raises the same error
            raise stages_differ_error(f"stage {peer} does not run the {self._text[:500]} of stage {self._channels.stage}")
        self._confirmed_peers.add(peer)

    def finish(self) -> None:
        """Blocks until the digests of all peers have been compared and this stage's has been sent. Raises like `confirm`."""
        for peer, pending in self._sends.items():
            self.confirm(peer, f"the microbatches of stage {peer}")
            pending.wait()

    def discard(self) -> None:
        """Drops all digests, without waiting for those in flight."""
        self._sends.clear()
        self._receives.clear()
        self._confirmed_peers.clear()


def stages_differ_error(fault: str) -> RunError:
    """Returns the RunError `stages-differ` for two stages that run different steps."""
    return RunError(
        "stages-differ",
        fault,
        hint="run the same steps on all stages of a replica, with the same number and shapes of microbatches",
    )
