"""A stage link for tensors on the host, which sends one message after another, each with its description first.

It receives a message into new memory when the run asks for it, so it keeps no memory of earlier messages.
"""

import pickle
from collections import deque
from collections.abc import Hashable, Sequence
from hashlib import sha256

import torch
from torch import Tensor

from sley_core.api.actions import Transfer, direction_of
from sley_core.api.comm import Work
from sley_core.api.parts import Description, Parts
from sley_core.errors import RunError
from sley_wave.plugin import NoKeys

Message = tuple[Description, list[Tensor]]


class Link:
    def __init__(self, config: NoKeys) -> None:
        self._walk = 0
        self._peers: Sequence[int] = ()
        self._begin_walk()

    def prepare(self, parts: Parts) -> None:
        self._group = parts.groups["pp"]
        self._stage = self._group.coord

    def begin(self, keys: Sequence[Hashable], peers: Sequence[int]) -> None:
        self._begin_walk()
        self._walk += 1
        self._peers = peers
        digest = sha256(f"walk {self._walk}: {list(keys)}".encode()).digest()
        self._digest = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        for peer in peers:
            self._send_tensor(self._digest, peer)

    def post_receive(self, transfer: Transfer, key: Hashable) -> None:
        self._posted[direction_of(transfer.peer, self._stage)].append(transfer)

    def send(self, transfer: Transfer, description: Description, tensors: list[Tensor], key: Hashable) -> None:
        if transfer.flow == "forward":
            description = description.with_overlaps(tensors)
        data = torch.frombuffer(bytearray(pickle.dumps(description)), dtype=torch.uint8)
        for tensor in (torch.tensor([len(data)]), data, *tensors):
            self._send_tensor(tensor.detach().clone(memory_format=torch.contiguous_format), transfer.peer)

    def receive(self, transfer: Transfer) -> Message:
        posted = self._posted[direction_of(transfer.peer, self._stage)]
        while transfer not in self._messages:  # messages arrive in the order of the posts
            next_transfer = posted.popleft()
            self._messages[next_transfer] = self._receive_message(next_transfer)
        return self._messages.pop(transfer)

    def drain(self) -> None:
        for peer in self._peers:
            self._compare_walks(peer)
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()

    def abort(self, why: str) -> None:
        self._begin_walk()

    def _begin_walk(self) -> None:
        self._compared_peers: set[int] = set()
        self._posted: dict[str, deque[Transfer]] = {"up": deque(), "down": deque()}
        self._messages: dict[Transfer, Message] = {}
        self._sends: list[tuple[Work, Tensor]] = []

    def _receive_message(self, transfer: Transfer) -> Message:
        self._compare_walks(transfer.peer)
        size = self._receive_tensor(torch.empty(1, dtype=torch.int64), transfer.peer)
        data = self._receive_tensor(torch.empty(int(size), dtype=torch.uint8), transfer.peer)
        description: Description = pickle.loads(data.numpy().tobytes())
        leaves = description.leaves
        return description, [self._receive_tensor(torch.empty(leaf.shape, dtype=leaf.dtype), transfer.peer) for leaf in leaves]

    def _compare_walks(self, peer: int) -> None:
        """Compares the microbatches of `peer` with those of this stage once per walk. Both stages begin a walk by sending
        digests.
        """
        if peer in self._compared_peers:
            return
        if not torch.equal(self._receive_tensor(torch.empty_like(self._digest), peer), self._digest):
            for work, tensor in self._sends:
                if tensor is self._digest:
                    work.wait()  # so that the peer reports the difference, too
            raise RunError("stages-differ", f"stages {self._stage} and {peer} walk through different microbatches")
        self._compared_peers.add(peer)

    def _send_tensor(self, tensor: Tensor, peer: int) -> None:
        if tensor.numel():
            # The group `pp`: both stages send and receive in the order of the lowered lists.
            work = self._group.send(tensor, direction_of(self._stage, peer), peer, label=f"a message to stage {peer}")
            self._sends.append((work, tensor))

    def _receive_tensor(self, tensor: Tensor, peer: int) -> Tensor:
        if tensor.numel():
            label = f"a message from stage {peer}"
            self._group.receive(tensor, direction_of(peer, self._stage), peer, label=label).wait()
        return tensor
