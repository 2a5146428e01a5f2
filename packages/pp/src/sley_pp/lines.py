"""The communicators of messages between stages: one per direction, and a third on the host if tensors are on a device.

up    from a stage to a later one     ┐ of the group `pp`, a communicator each
down  from a stage to an earlier one  ┘
host  of the group `control`: heads and announcements, if tensors are on a device; otherwise they go up and down too

On a device, tensors go by the host too in a stage's first walks (`by_host`), and communicators are connected when nothing else
is in flight (`connect`). NCCL connects two ranks at their first message, and blocks the host of either until the other comes to
it; CUDA loads a kernel at its first launch, and waits until the device has nothing to do, also for a receive that waits for a
peer. With receives that are posted ahead each stage would wait for the other (docs/adr/0014).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import groupby
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from sley_core.api.actions import direction_of
from sley_core.api.comm import SentBytes, receive_from, send_to
from sley_core.errors import RunError

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
        return self._control, "main", self._control.ranks.index(self.group.ranks[peer])


WORD_BYTES = 512
_DIGEST_BYTES = 16


class Walk:
    """Checks that neighbouring stages run the same micro-batches: each sends the other a *word* of fixed size at the start of a
    walk, and compares. Otherwise they would wait for messages that never come, or mistake one message for another. No step
    waits for the delivery. number: walks begun so far.
    """

    def __init__(self, lines: Lines) -> None:
        self.number = 0
        self._lines = lines
        self._telling: dict[int, Pending] = {}
        self._hearing: dict[int, tuple[Pending, Tensor]] = {}
        self._agreed: set[int] = set()

    def begin(self, keys: Sequence[Hashable], peers: Sequence[int]) -> None:
        """Starts to tell the stages `peers` that the next walk is through micro-batches with these `keys`; does not block."""
        self.number += 1
        self._word = word_of(self.number, keys)
        for peer in peers:
            what = f"what stage {self._lines.stage} walks through, to stage {peer}"
            self._telling[peer] = self._lines.tell(self._word, peer, what)

    def hear(self, peer: int, what: str) -> None:
        """Starts to receive the word of `peer`, once per walk.

        what: names the transfer that follows, for the error of a failed wait.
        """
        if peer not in self._hearing:
            word = torch.empty(WORD_BYTES, dtype=torch.uint8)
            self._hearing[peer] = self._lines.hear(word, peer, what), word

    def is_agreed(self, peer: int) -> bool:
        """Returns whether `agree` has compared the word of `peer` in this walk and found it equal."""
        return peer in self._agreed

    def agree(self, peer: int, what: str) -> None:
        """Blocks until the word of `peer` has arrived. Raises RunError `stages-differ` if it is another walk."""
        if peer in self._agreed:
            return
        if not self._lines.group.has_peers:
            self._agreed.add(peer)
            return
        self.hear(peer, what)
        pending, word = self._hearing[peer]
        pending.wait()
        if not torch.equal(word, self._word):
            self._telling[peer].wait()  # so that the peer has this stage's word and raises the same error
            mine, other = text_of(self._word), text_of(word)
            raise differ(f"stage {peer} walks through {other}, and stage {self._lines.stage} through {mine}")
        self._agreed.add(peer)

    def end(self) -> None:
        """Blocks until the words of all peers have arrived and been compared, and this stage's are sent."""
        for peer, telling in self._telling.items():
            self.agree(peer, f"what stage {peer} walks through")
            telling.wait()

    def forget(self) -> None:
        """Drops all words in flight and received, without waiting."""
        for words in (self._telling, self._hearing, self._agreed):
            words.clear()


def differ(fault: str) -> RunError:
    """Returns the RunError `stages-differ` for two stages that take different steps."""
    return RunError(
        "stages-differ",
        fault,
        hint="all stages of a replica take the same steps, on micro-batches of the same number and shapes",
    )


def word_of(walk: int, keys: Sequence[Hashable]) -> Tensor:
    """Returns the word of the `walk`-th walk, through micro-batches with `keys`; uint8 [WORD_BYTES] on the host."""
    word = bytearray(WORD_BYTES)
    digest, text = _digest(tuple(keys))
    data = digest + walk.to_bytes(4, "little") + text
    word[: len(data)] = data
    return torch.frombuffer(word, dtype=torch.uint8)


def text_of(word: Tensor) -> str:
    """Returns the text of a word, for an error message."""
    data = word.numpy().tobytes()
    number = int.from_bytes(data[_DIGEST_BYTES : _DIGEST_BYTES + 4], "little")
    text = data[_DIGEST_BYTES + 4 :].rstrip(b"\0").decode(errors="replace")
    return f"{text} (walk {number})"


@lru_cache(maxsize=64)
def _digest(keys: tuple[Hashable, ...]) -> tuple[bytes, bytes]:
    """Returns a digest of all `keys`, and a text that lists as many of them as fit into a word."""
    counted = [f"{len(list(same))} x {key}" for key, same in groupby(map(_plain, keys))]
    text = f"{len(keys)} micro-batches: {', '.join(counted)}".encode()
    return sha256("\n".join(counted).encode()).digest()[:_DIGEST_BYTES], text[: WORD_BYTES - _DIGEST_BYTES - 4]


def _plain(key: Hashable) -> str:
    """Returns `key` as text, equal for keys that differ only in their types, such as a tuple and torch.Size."""
    if isinstance(key, tuple):
        return f"({', '.join(map(_plain, key))})"
    return str(key)
