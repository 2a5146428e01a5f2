"""A stage link that sends one message after another, each with its description before it; for tensors on the host.

Nothing is received before it is taken, and everything into memory of its own, so the link keeps nothing of what it gave out.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Hashable, Sequence
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from sley_core.api.actions import Transfer, direction_of
from sley_core.api.comm import Work
from sley_core.api.parts import Description, Leaf, Parts
from sley_core.errors import RunError
from sley_wave.config import LinkConfig

Message = tuple[Description, list[Tensor]]


class Link:
    """Sends at once, receives when it must."""

    def __init__(self, config: LinkConfig) -> None:
        self._walk = 0
        self._word = torch.empty(0, dtype=torch.uint8)
        self._peers: Sequence[int] = ()
        self._agreed: set[int] = set()
        self._due: dict[str, deque[Transfer]] = {"up": deque(), "down": deque()}
        self._come: dict[Transfer, Message] = {}
        self._sending: list[tuple[Work, Tensor]] = []

    def prepare(self, parts: Parts) -> None:
        self._group = parts.groups["pp"]
        self._stage = self._group.coord

    def begin(self, keys: Sequence[Hashable], peers: Sequence[int]) -> None:
        self._forget()
        self._walk += 1
        self._peers = peers
        word = sha256(f"walk {self._walk}: {list(keys)}".encode()).digest()
        self._word = torch.frombuffer(bytearray(word), dtype=torch.uint8)
        for peer in peers:
            self._tell(self._word, peer)

    def post_receive(self, transfer: Transfer, key: Hashable) -> None:
        self._due[direction_of(transfer.peer, self._stage)].append(transfer)

    def send(self, transfer: Transfer, description: Description, tensors: list[Tensor], key: Hashable) -> None:
        if transfer.flow == "forward":
            description = description.with_overlaps(tensors)
        text = torch.frombuffer(bytearray(_to_text(description)), dtype=torch.uint8)
        for piece in (torch.tensor([len(text)]), text, *tensors):
            self._tell(piece.detach().clone(memory_format=torch.contiguous_format), transfer.peer)

    def receive(self, transfer: Transfer) -> Message:
        due = self._due[direction_of(transfer.peer, self._stage)]
        while transfer not in self._come:
            first = due.popleft()
            self._come[first] = self._received(first)
        return self._come.pop(transfer)

    def drain(self) -> None:
        for peer in self._peers:
            self._agree(peer)
        for pending, _ in self._sending:
            pending.wait()
        self._sending.clear()

    def abort(self, why: str) -> None:
        self._forget()

    def _forget(self) -> None:
        parts: list[Any] = [self._agreed, self._come, self._sending, *self._due.values()]
        for part in parts:
            part.clear()

    def _received(self, transfer: Transfer) -> Message:
        self._agree(transfer.peer)
        size = self._hear(torch.empty(1, dtype=torch.int64), transfer.peer)
        text = self._hear(torch.empty(int(size), dtype=torch.uint8), transfer.peer)
        description = _from_text(text.numpy().tobytes())
        return description, [
            self._hear(torch.empty(leaf.shape, dtype=leaf.dtype), transfer.peer) for leaf in description.leaves
        ]

    def _agree(self, peer: int) -> None:
        """Waits for what `peer` walks through. The group `pp`: both ends begin each walk with their words."""
        if peer in self._agreed:
            return
        if not torch.equal(self._hear(torch.empty_like(self._word), peer), self._word):
            for pending, piece in self._sending:
                if piece is self._word:
                    pending.wait()  # so that the peer finds the same
            raise RunError("stages-differ", f"stages {self._stage} and {peer} walk through other microbatches")
        self._agreed.add(peer)

    def _tell(self, piece: Tensor, peer: int) -> None:
        if piece.numel():
            label = f"what stage {self._stage} sends to stage {peer}"
            # The group `pp`: both ends send and take in the order of the lowered lists.
            pending = self._group.send(piece, direction_of(self._stage, peer), peer, label=label)
            self._sending.append((pending, piece))

    def _hear(self, piece: Tensor, peer: int) -> Tensor:
        if piece.numel():
            label = f"what stage {self._stage} receives from stage {peer}"
            self._group.receive(piece, direction_of(peer, self._stage), peer, label=label).wait()
        return piece


def _to_text(description: Description) -> bytes:
    leaves = [[str(leaf.dtype).removeprefix("torch."), list(leaf.shape), leaf.flags] for leaf in description.leaves]
    return json.dumps({"leaves": leaves, "structure": description.structure}).encode()


def _from_text(text: bytes) -> Description:
    found = json.loads(text)
    leaves = (Leaf(getattr(torch, name), tuple(shape), False).with_flags(flags) for name, shape, flags in found["leaves"])
    return Description(tuple(leaves), found["structure"])
