"""A message: the tensors that cross a stage boundary, as a header and then every tensor, each at an aligned offset.

    | header: walk, microbatch, fault, flags | tensor 0 . . . | tensor 1 . . . . . |
    0                                    1024 + flags    aligned to 256 bytes

Both ends know the size before the message is sent, so that a receive can be posted ahead. The header lets a receiver report an
unexpected message. A sender that detects a mismatch sends a message of the expected size with the error text in its header. The
flags show which tensors have a gradient and which are the same tensor. They may differ between microbatches of the same shape,
for example if layers are frozen.

The header is always on the host, so that both ends read it without a device synchronisation. If the tensors are on the host
too, they follow it in the same piece. Otherwise it is a separate piece.
"""

import json
import struct
import sys
from collections.abc import MutableMapping, Sequence
from contextlib import AbstractContextManager
from math import prod

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sley_core.api.comm import Device, Work
from sley_core.api.memory import DevicePool
from sley_core.api.parts import ALIGNMENT_BYTES, Description, FlatLayout, Leaf, round_up
from sley_core.errors import RunError
from sley_pp.channels import Channels

HEADER_BYTES = 1024
"""The number of bytes in the header for its numbers and error text. The flags of each tensor follow."""

_NUMBERS = struct.Struct("<III")
"""The header's numbers: the walk, the microbatch, and the size of the error text in bytes."""


Layout = tuple[tuple[torch.dtype, tuple[int, ...]], ...]
"""The dtype and shape of each tensor. Messages with equal layouts are interchangeable."""


def message_layout(leaves: Sequence[Leaf]) -> Layout:
    """Returns the layout of a message with these tensors."""
    return tuple((leaf.dtype, leaf.shape) for leaf in leaves)


def header_bytes(layout: Layout) -> int:
    """Returns the size of the header of a message, in bytes."""
    return HEADER_BYTES + round_up(Leaf.FLAG_BYTES * len(layout), ALIGNMENT_BYTES)


def body_layout(layout: Layout) -> FlatLayout:
    """Returns the layout of the body, in bytes: each tensor as a row of uint8, at a multiple of ALIGNMENT_BYTES."""
    return FlatLayout([(prod(shape) * dtype.itemsize,) for dtype, shape in layout], ALIGNMENT_BYTES)


def message_bytes(layout: Layout, *, separate_header: bool) -> int:
    """Returns the memory size of a message with this layout, in bytes. separate_header: as in `Message`."""
    return body_layout(layout).numel + (0 if separate_header else header_bytes(layout))


class Message:
    """A message in `memory`, uint8 [bytes].

    device: the device of `memory`. separate_header: whether the header is a separate piece, on the host. tensors: views of the
    memory, in the order of the layout. pieces: the tensors to send or receive. lease: the pool's lease and the tensor that it
    lends, or None between leases.

    The views have their own storage over the memory. So the number of users of that storage shows whether this message is in
    use, even if a pool and earlier users refer to the memory.

    The stage does not compute while its host prepares messages. To save host time, views are created once per layout, and the
    header is read and written without torch operations.
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
        """Whether another object refers to the memory, such as a view, a tensor saved by autograd, a numpy array or a storage.

        Addresses (`data_ptr()`) and weak references do not count, since they do not keep memory alive.
        """
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
        """Returns an alias of each tensor with its own version counter, so that writes to one do not count for others."""
        return [tensor.data for tensor in self.tensors]

    def write_header(self, walk: int, micro: int, flags: bytes, fault: str = "") -> None:
        """Writes the header. fault: the error text of a mismatch, which is cut to fit; empty if there is none."""
        text = fault.encode()[: HEADER_BYTES - _NUMBERS.size]
        _NUMBERS.pack_into(self._header, 0, walk, micro, len(text))
        self._header[_NUMBERS.size : _NUMBERS.size + len(text)] = text
        self._header[HEADER_BYTES : HEADER_BYTES + len(flags)] = flags

    def read_header(self) -> tuple[int, int, bytes, str]:
        """Returns the walk, the microbatch, the flags and the fault that `write_header` wrote."""
        walk, micro, size = _NUMBERS.unpack_from(self._header)
        fault = bytes(self._header[_NUMBERS.size : _NUMBERS.size + size]).decode(errors="replace")
        return walk, micro, bytes(self._header[HEADER_BYTES : HEADER_BYTES + Leaf.FLAG_BYTES * len(self.layout)]), fault


def _num_users(storage: torch.UntypedStorage) -> tuple[int, int]:
    """Returns the number of owners of the memory, where `storage` counts only once, and of references to `storage`."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count, sys.getrefcount(storage)


def boundary_mismatch_error(fault: str) -> RunError:
    return RunError(
        "boundary-mismatch",
        fault,
        hint="make the tensors that a layer returns depend only on the shapes of the batch, not on its values",
    )


def send_description(channels: Channels, description: Description, peer: int, label: str) -> list[Work]:
    """Starts to send `description` to stage `peer` as two messages: the length in bytes and the JSON text."""
    leaves = [[str(leaf.dtype).removeprefix("torch."), list(leaf.shape), leaf.has_gradient] for leaf in description.leaves]
    content = json.dumps({"leaves": leaves, "structure": description.structure})
    text = torch.frombuffer(bytearray(content.encode()), dtype=torch.uint8)
    return [channels.send_host(tensor, peer, label) for tensor in (torch.tensor([text.numel()]), text)]


def receive_description(channels: Channels, peer: int, label: str) -> Description:
    """Blocks until the next description from stage `peer` has arrived, and returns it."""
    size = torch.zeros(1, dtype=torch.int64)
    channels.receive_host(size, peer, label).wait()
    text = torch.empty(int(size), dtype=torch.uint8)
    channels.receive_host(text, peer, label).wait()
    content = json.loads(text.numpy().tobytes())
    leaves = tuple(Leaf(getattr(torch, name), tuple(shape), gradient) for name, shape, gradient in content["leaves"])
    return Description(leaves, content["structure"])


class MessagePool:
    """Lends messages on `device`, in buffers of `pool`. separate_header: as in `Message`.

        lease ──> [ the link fills or receives it ] ──> release ────────────────────────────────────> buffer in the pool
                                                  └───> release_when_unused ──> views, autograd end ──> buffer in the pool

    The schedule does not determine when a received tensor is no longer used. For example, a gradient may be a view of the
    received gradient, or a layer may store its input. So the pool checks the memory's reference counts (`Message.is_shared`)
    before each lease.
    """

    def __init__(self, pool: DevicePool, device: Device, *, separate_header: bool) -> None:
        self.pool = pool
        self.device = device
        self.separate_header = separate_header
        self._messages_in_use: list[Message] = []
        # Keeps the messages of free buffers, since building a message takes as long as copying 300 KB. An entry disappears when
        # the pool frees its buffer.
        self._message_cache: MutableMapping[Tensor, Message] = WeakTensorKeyDictionary()

    def lease(self, layout: Layout) -> Message:
        """Returns a message of `layout` that nothing else uses. Its contents are undefined."""
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
        """Releases those messages passed to `release_when_unused` that are no longer in use."""
        messages, self._messages_in_use = self._messages_in_use, []
        for message in messages:
            if message.is_shared:
                self._messages_in_use.append(message)
            else:
                self.release(message)
