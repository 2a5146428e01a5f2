"""Messages between stages, and the communicators that carry them: one per direction, and one on the host.

up    from a stage to a later one     ┐ two channels of the `pp` group
down  from a stage to an earlier one  ┘
host  the `control` group, for headers, announcements and digests; if tensors are on the CPU, these use up and down instead

On a device, a stage's first walks send tensors through the host too (`uses_host`). Then `connect` connects the device's
communicators while no message is in flight. There are two reasons (docs/adr/0014). NCCL connects two ranks at their first
message, and blocks the host of each until the other reaches that message. CUDA loads a kernel at its first launch, and then
waits until the device is idle, even if the device waits for a peer. Since receives are posted ahead, two stages could block
each other forever.

A message has a header and then every tensor that crosses the boundary, each at an aligned offset:

    | header: walk, microbatch, fault, flags | tensor 0 . . . | tensor 1 . . . . . |
    0                                    1024 + flags    aligned to 256 bytes

Both ends know the size before the message is sent, so that a receive can be posted ahead. The header lets a receiver report an
unexpected message. A sender that detects a mismatch sends a message of the expected size with the error text in its header. The
flags show which tensors have a gradient and which are the same tensor. They may differ between microbatches of the same shape,
for example if layers are frozen.

The header is always on the host, so that both ends read it without a device synchronisation. If the tensors are on the host
too, they follow the header in the same piece. Otherwise the header is a separate piece.
"""

import json
import struct
import sys
from collections.abc import Hashable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from hashlib import sha256
from itertools import groupby
from math import prod
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sley_core.api.actions import direction_of
from sley_core.api.comm import Device, Group, SentBytes, Work
from sley_core.api.memory import DevicePool
from sley_core.api.parts import ALIGNMENT_BYTES, Description, FlatLayout, Leaf, round_up
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
        # The channels of a fake world have another backend, so the device of the tensors counts too.
        self._uses_gloo = not separate_header or any(
            dist.get_backend(channel) == "gloo" for channel in self.group.channels.values()
        )
        self.sent = SentBytes()

    @property
    def reports_completion(self) -> bool:
        """Whether `is_completed` of a send becomes true without a wait, as it does with NCCL but not with gloo."""
        return not (self.uses_host or self._uses_gloo)

    def connect(self, peers: Iterable[int], device: Device) -> None:
        """Exchanges one byte on `device` with each of `peers` in both directions, unless an earlier call did. All stages must
        call it while no message between stages is in flight. Each stage visits its peers in ascending order of (lower stage,
        higher stage), so that stages cannot deadlock.
        """
        for peer in sorted(set(peers) - self._connected_peers, key=lambda peer: sorted((self.stage, peer))):
            self._connected_peers.add(peer)
            byte, label = torch.zeros(1, dtype=torch.uint8, device=device.torch_device), f"the first byte, of stage {peer}"
            for sender, receiver in (sorted((self.stage, peer)), sorted((self.stage, peer), reverse=True)):
                operation = self.group.send if sender == self.stage else self.group.receive
                operation(byte, direction_of(sender, receiver), peer, label=label).wait()

    def start_message(self, operation: Operation, pieces: Sequence[Tensor], peer: int, label: str) -> list[Work]:
        """Starts to send the `pieces` of a message to stage `peer`, or to receive a message from it into `pieces` of the sent
        sizes. Returns a handle for each piece, in the same order. The last piece is the body, which is not sent if it is empty.
        The caller must not write to sent pieces before the handles are done.
        """
        if operation == "send":
            self.sent.add_message(sum(piece.nbytes for piece in pieces))
        *headers, body = pieces
        pending = [self.start(operation, header, peer, label) for header in headers]
        if body.numel():
            pending.append(self.start(operation, body, peer, label, on_host=self.uses_host))
        return pending

    def start(self, operation: Operation, tensor: Tensor, peer: int, label: str, *, on_host: bool = True) -> Work:
        """Starts to send `tensor` to stage `peer`, or to receive it; returns the handle. on_host: whether it travels on the
        host.
        """
        sender, receiver = (self.stage, peer) if operation == "send" else (peer, self.stage)
        if on_host and self.separate_header:
            group, channel, coord = self._control, "main", self._control.ranks.index(self.group.ranks[peer])
        else:
            group, channel, coord = self.group, str(direction_of(sender, receiver)), peer
        start = group.send if operation == "send" else group.receive
        return start(tensor, channel, coord, label=label)


class WalkCheck:
    """Checks that neighbouring stages run the same microbatches in a walk, which is one pass through a list of actions.

    At the start of a walk, each stage sends a digest of its microbatches to its neighbours. A stage compares the digest of a
    neighbour with its own before it receives messages from the neighbour. Without this check, stages that differ could wait
    forever, or take one message for another. num_walks: the number of walks so far. confirmed_peers: the stages whose digests
    are equal to this stage's digest.
    """

    def __init__(self, channels: Channels) -> None:
        self.num_walks = 0
        self._channels = channels
        self._sends: dict[int, Work] = {}
        self._receives: dict[int, tuple[Work, Tensor]] = {}
        self.confirmed_peers: set[int] = set()

    def begin(self, keys: Sequence[Hashable], peers: Sequence[int]) -> None:
        """Starts to send the digest of a new walk to the stages `peers`, without blocking. keys: the key of each microbatch."""
        self.num_walks += 1
        runs = [f"{len(list(run))} x {key}" for key, run in groupby(keys)]
        self._description = f"{len(keys)} microbatches: {', '.join(runs)} (walk {self.num_walks})"
        self._digest = torch.frombuffer(bytearray(sha256(self._description.encode()).digest()), dtype=torch.uint8)
        for peer in peers:
            label = f"the microbatches of stage {self._channels.stage}, to stage {peer}"
            self._sends[peer] = self._channels.start("send", self._digest, peer, label)

    def start_receive(self, peer: int, label: str) -> None:
        """Starts to receive the digest of stage `peer`, unless an earlier call did. label: the next transfer."""
        if peer not in self._receives:
            digest = torch.empty_like(self._digest)
            self._receives[peer] = self._channels.start("receive", digest, peer, label), digest

    def confirm_peer(self, peer: int, label: str) -> None:
        """Waits for the digest of the stage `peer`. Raises RunError `stages-differ` if this stage's digest differs. label:
        describes the exchange that waits, for errors.
        """
        if peer in self.confirmed_peers:
            return
        if not self._channels.group.has_peers:
            self.confirmed_peers.add(peer)
            return
        self.start_receive(peer, label)
        pending, digest = self._receives[peer]
        pending.wait()
        if not torch.equal(digest, self._digest):
            self._sends[peer].wait()  # so that the peer has this stage's digest and raises the same error
            raise stages_differ_error(
                f"stage {peer} is not running the {self._description[:500]} of stage {self._channels.stage}"
            )
        self.confirmed_peers.add(peer)

    def finish(self) -> None:
        """Waits until this stage has sent its digest and compared the digests of all peers. Raises `confirm_peer`'s errors."""
        for peer, pending in self._sends.items():
            self.confirm_peer(peer, f"the microbatches of stage {peer}")
            pending.wait()

    def discard(self) -> None:
        """Drops all digests, without waiting for digests in flight, and forgets which peers were confirmed."""
        self._sends.clear()
        self._receives.clear()
        self.confirmed_peers.clear()


def stages_differ_error(fault: str) -> RunError:
    """Returns RunError "stages-differ", for stages that run different steps, with the message `fault`."""
    hint = "run the same steps on all stages of a replica, with the same number and shapes of microbatches"
    return RunError("stages-differ", fault, hint=hint)


HEADER_BYTES = 1024
"""The size in bytes of the first part of a header, with the numbers and the error text. The flags of each tensor follow."""

_NUMBERS = struct.Struct("<III")
"""The header's numbers: the walk, the microbatch, and the size of the error text in bytes."""

Layout = tuple[tuple[torch.dtype, tuple[int, ...]], ...]
"""The dtype and shape of each tensor. Messages with equal layouts are interchangeable."""


def message_layout(leaves: Sequence[Leaf]) -> Layout:
    """Returns the layout of a message with the tensors that `leaves` describe."""
    return tuple((leaf.dtype, leaf.shape) for leaf in leaves)


def header_bytes(layout: Layout) -> int:
    """Returns the size of a message's header in bytes, a multiple of ALIGNMENT_BYTES."""
    return HEADER_BYTES + round_up(Leaf.FLAG_BYTES * len(layout), ALIGNMENT_BYTES)


def body_layout(layout: Layout) -> FlatLayout:
    """Returns the layout of the body, in bytes: each tensor as a row of uint8, at a multiple of ALIGNMENT_BYTES."""
    return FlatLayout([(prod(shape) * dtype.itemsize,) for dtype, shape in layout], ALIGNMENT_BYTES)


def message_bytes(layout: Layout, *, separate_header: bool) -> int:
    """Returns the size of a message's memory in bytes. separate_header: whether the header is not in this memory."""
    return body_layout(layout).numel + (0 if separate_header else header_bytes(layout))


class Message:
    """A message stored in `memory`, a uint8 tensor of shape [bytes].

    device: the device of `memory`. separate_header: whether the header is a separate piece, on the host. tensors: views of the
    memory, in the order of the layout. pieces: the tensors to send or receive. lease: the pool's lease and the tensor that the
    pool lends, or None between leases.

    The views have their own storage over the memory, so the number of users of that storage shows whether this message is in
    use, even if a pool and earlier users refer to the memory. A stage does not compute while its host thread prepares a
    message. To save this time, views are created once per layout, and the header is read and written without torch operations.
    """

    def __init__(self, memory: Tensor, layout: Layout, device: Device, *, separate_header: bool) -> None:
        self._device = device
        self._separate_header = separate_header
        self.lease: tuple[AbstractContextManager[Tensor], Tensor] | None = None
        with torch.inference_mode(False):
            self._memory = device.alias(memory)
        self._storage = self._memory.untyped_storage()
        self.set_layout(layout)

    @property
    def is_shared(self) -> bool:
        """Whether another object keeps the memory alive, such as a view, a tensor saved by autograd, or a numpy array."""
        return any(users > owned for users, owned in zip(_num_users(self._storage), self._num_owned, strict=True))

    def set_layout(self, layout: Layout) -> None:
        """Sets the layout, which must fit into the memory. The message must not be in use."""
        header_size = header_bytes(layout)
        body_start = 0 if self._separate_header else header_size
        body = self._memory[: message_bytes(layout, separate_header=self._separate_header)]
        header = torch.empty(header_size, dtype=torch.uint8) if self._separate_header else body[:header_size]
        self.layout = layout
        self.pieces = [header, body] if self._separate_header else [body]
        self._header = self._device.bytes_of(header)
        rows = body_layout(layout).views(body[body_start:])
        self.tensors = [row.view(dtype).view(shape) for row, (dtype, shape) in zip(rows, layout, strict=True)]
        del header, body, rows  # they would count as users of the storage below
        self._num_owned = _num_users(self._storage)

    def aliases(self) -> list[Tensor]:
        """Returns an alias of each tensor. Each has its own version counter, so a write to one is not a write to another."""
        return [tensor.data for tensor in self.tensors]

    def write_header(self, walk: int, micro: int, flags: bytes, fault: str = "") -> None:
        """Writes the header. walk: the number of the current walk. micro: the microbatch. flags: the flags of all tensors
        (`Description.flags`). fault: the error text of a mismatch, truncated to fit; empty if there is none.
        """
        text = fault.encode()[: HEADER_BYTES - _NUMBERS.size]
        _NUMBERS.pack_into(self._header, 0, walk, micro, len(text))
        self._header[_NUMBERS.size : _NUMBERS.size + len(text)] = text
        self._header[HEADER_BYTES : HEADER_BYTES + len(flags)] = flags

    def read_header(self) -> tuple[int, int, bytes, str]:
        """Returns the arguments with which the sender called `write_header`: walk, micro, flags and fault."""
        walk, micro, size = _NUMBERS.unpack_from(self._header)
        fault = bytes(self._header[_NUMBERS.size : _NUMBERS.size + size]).decode(errors="replace")
        return walk, micro, bytes(self._header[HEADER_BYTES : HEADER_BYTES + Leaf.FLAG_BYTES * len(self.layout)]), fault


def _num_users(storage: torch.UntypedStorage) -> tuple[int, int]:
    """Returns the number of owners of the memory (`storage` counts once), and the number of references to `storage`."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count, sys.getrefcount(storage)


def boundary_mismatch_error(fault: str) -> RunError:
    """Returns RunError "boundary-mismatch", for tensors that do not fit the announcement, with the message `fault`."""
    hint = "make the tensors that a layer returns depend only on the shapes of the batch, not on its values"
    return RunError("boundary-mismatch", fault, hint=hint)


def send_description(channels: Channels, description: Description, peer: int, label: str) -> list[Work]:
    """Starts to send `description` to stage `peer`: the length of its JSON text, then the text. Returns both handles."""
    leaves = [[str(leaf.dtype).removeprefix("torch."), list(leaf.shape), leaf.has_gradient] for leaf in description.leaves]
    json_text = json.dumps({"leaves": leaves, "structure": description.structure})
    content = torch.frombuffer(bytearray(json_text.encode()), dtype=torch.uint8)
    return [channels.start("send", tensor, peer, label) for tensor in (torch.tensor([content.numel()]), content)]


def receive_description(channels: Channels, peer: int, label: str) -> Description:
    """Blocks until the next description from stage `peer` has arrived, and returns it."""
    size = torch.zeros(1, dtype=torch.int64)
    channels.start("receive", size, peer, label).wait()
    content = torch.empty(int(size), dtype=torch.uint8)
    channels.start("receive", content, peer, label).wait()
    output = json.loads(content.numpy().tobytes())
    leaves = tuple(Leaf(getattr(torch, name), tuple(shape), gradient) for name, shape, gradient in output["leaves"])
    return Description(leaves, output["structure"])


class MessagePool:
    """Lends messages on `device`, in buffers of `pool`. separate_header: whether headers are separate pieces.

        lease ──> [ the link fills or receives it ] ──> release ────────────────────────────────────> buffer in the pool
                                                  └───> release_when_unused ──> views, autograd end ──> buffer in the pool

    The schedule does not determine when a received tensor is no longer used: a gradient may be a view of the received gradient,
    or a layer may store its input. So the pool checks reference counts (`Message.is_shared`) before each lease.
    """

    def __init__(self, pool: DevicePool, device: Device, *, separate_header: bool) -> None:
        self.pool = pool
        self.device = device
        self.separate_header = separate_header
        self._messages_in_use: list[Message] = []
        # The cache keeps the messages of free buffers, since building a message takes as long as copying 300 KB. An entry
        # disappears when the pool frees its buffer.
        self._message_cache: MutableMapping[Tensor, Message] = WeakTensorKeyDictionary()

    def lease(self, layout: Layout) -> Message:
        """Returns a message with the layout `layout`, which nothing else uses. The contents of the message are undefined."""
        self.release_unused()
        num_bytes = message_bytes(layout, separate_header=self.separate_header)
        lease = self.pool.lease((num_bytes,), torch.uint8, self.device.torch_device)
        memory = lease.__enter__()
        message = self._message_cache.pop(memory, None)
        if message is None:
            message = Message(memory, layout, self.device, separate_header=self.separate_header)
        elif message.layout != layout:
            message.set_layout(layout)
        message.lease = lease, memory
        return message

    def release(self, message: Message) -> None:
        """Returns the buffer of a leased message to the pool. None of its tensors may be in use."""
        assert message.lease is not None, "a message is released twice"
        (lease, memory), message.lease = message.lease, None
        self._message_cache[memory] = message
        lease.__exit__(None, None, None)

    def release_when_unused(self, message: Message) -> None:
        """Makes `release_unused` release a leased message once none of its `aliases` is alive."""
        self._messages_in_use.append(message)

    def release_unused(self) -> None:
        """Releases the messages that were passed to `release_when_unused` and are no longer in use."""
        messages, self._messages_in_use = self._messages_in_use, []
        for message in messages:
            if message.is_shared:
                self._messages_in_use.append(message)
            else:
                self.release(message)
