"""A message: the tensors that cross a stage boundary, as a header and then every tensor, each at an aligned offset.

    | header: walk, microbatch, fault, end, flags | tensor 0 . . . | tensor 1 . . . . . |
    0                                         1024 + flags          aligned to 256 bytes

Both ends know the size before the message is sent, so that a receive can be posted ahead. The header lets a receiver report an
unexpected message. A sender that detects a mismatch sends a message of the expected size with the error text in its header. The
flags show which tensors have a gradient and which are the same tensor. Only flags may differ between microbatches, for example
if layers are frozen.

Gloo accepts a message that is shorter than the receive buffer, and leaves the rest of the buffer unchanged. So a header on the
host repeats the message's last bytes. The receiver clears these bytes first, and compares them after the receive.

The header is always on the host, so that both ends read it without a device synchronisation. If the tensors are on the host
too, they follow it in the same piece. Otherwise it is a separate piece.
"""

from __future__ import annotations

import json
import struct
import sys
from collections import deque
from collections.abc import MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sley_core.api.comm import Device
from sley_core.api.parts import ALIGNMENT_BYTES, Description, Leaf, round_up
from sley_core.errors import RunError

if TYPE_CHECKING:
    from sley_core.api.comm import Work
    from sley_core.api.memory import DevicePool
    from sley_pp.channels import Channels


HEADER_BYTES = 1024
"""The size of the header's numbers and error text in bytes. The flags of each tensor follow."""

END_BYTES = 8
_NUMBERS = struct.Struct(f"<III{END_BYTES}s")
"""The walk, the microbatch, the size of the error text in bytes, and the last bytes of the message."""

_EMPTY_END = b"no bytes"
"""The placeholder of the last bytes until they arrive."""


Layout = tuple[tuple[torch.dtype, tuple[int, ...]], ...]
"""The dtype and shape of each tensor. Messages with equal layouts are interchangeable."""


def message_layout(leaves: Sequence[Leaf]) -> Layout:
    """Returns the layout of a message with these tensors."""
    return tuple((leaf.dtype, leaf.shape) for leaf in leaves)


@dataclass(frozen=True)
class MessageSizes:
    """Holds the sizes in bytes of a message's header and body. offsets: the byte offset of each tensor in the body."""

    header: int
    body: int
    offsets: tuple[int, ...]

    @classmethod
    def from_layout(cls, layout: Layout) -> MessageSizes:
        """Computes the sizes and offsets of `layout`. Every tensor starts at a multiple of ALIGNMENT_BYTES."""
        offsets, end = [], 0
        for dtype, shape in layout:
            offsets.append(end)
            end += round_up(prod(shape) * dtype.itemsize, ALIGNMENT_BYTES)
        return cls(HEADER_BYTES + round_up(Leaf.FLAG_BYTES * len(layout), ALIGNMENT_BYTES), end, tuple(offsets))


def message_bytes(layout: Layout, *, separate_header: bool) -> int:
    """Returns the memory size of a message with this layout, in bytes. separate_header: as in `Message`."""
    sizes = MessageSizes.from_layout(layout)
    return sizes.body + (0 if separate_header else sizes.header)


class Message:
    """A message in `memory`, uint8 [bytes].

    device: the device of `memory`. separate_header: whether the header is a separate piece, on the host. tensors: views of the
    memory, in the order of the layout. pieces: the tensors to send or receive. lease: the lease of the memory and its tensor,
    or None between leases.

    The views have their own storage over the memory. So the number of users of that storage shows whether this message is in
    use, even if a pool and earlier users refer to the memory.

    Views are created once per layout, and no torch operation reads or writes the header, since the stage does not compute while
    it sends and receives messages.
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
        """Sets the layout, which must fit into the memory. No tensor in the memory may be in use."""
        sizes = MessageSizes.from_layout(layout)
        body_start = 0 if self._separate_header else sizes.header
        body = self._memory[: body_start + sizes.body]
        header = torch.empty(sizes.header, dtype=torch.uint8) if self._separate_header else body[: sizes.header]
        self.layout = layout
        self.pieces = [header, body] if self._separate_header else [body]
        self._header = self._device.bytes_of(header)
        has_end = sizes.body and not self._separate_header  # the host does not read tensors on a device
        self._end = self._device.bytes_of(body[-END_BYTES:]) if has_end else memoryview(bytearray())
        self.tensors: list[Tensor] = []
        for (dtype, shape), offset in zip(layout, sizes.offsets, strict=True):
            start = body_start + offset
            self.tensors.append(body[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape))
        del header, body  # they would count as users of the storage below
        self._num_owned = _num_users(self._storage)

    def aliases(self) -> list[Tensor]:
        """Returns an alias of each tensor with its own version counter, so that a write to one does not invalidate the rest."""
        return [tensor.data for tensor in self.tensors]

    def write_header(self, walk: int, micro: int, flags: bytes, fault: str = "") -> None:
        """Writes the header. fault: the text of a mismatch, which is cut to fit, or an empty text."""
        text = fault.encode()[: HEADER_BYTES - _NUMBERS.size]
        _NUMBERS.pack_into(self._header, 0, walk, micro, len(text), b"")
        self._header[_NUMBERS.size : _NUMBERS.size + len(text)] = text
        self._header[HEADER_BYTES : HEADER_BYTES + len(flags)] = flags

    def write_end(self) -> None:
        """Copies the message's last bytes into the header. Called after the tensors are written, before the send."""
        start = _NUMBERS.size - END_BYTES
        self._header[start : start + len(self._end)] = self._end

    def clear_end(self) -> None:
        """Overwrites the message's last bytes with a placeholder. Called before the receive."""
        self._end[:] = _EMPTY_END[: len(self._end)]

    @property
    def is_complete(self) -> bool:
        """Whether all bytes of a received message have arrived."""
        start = _NUMBERS.size - END_BYTES
        return self._header[start : start + len(self._end)] == self._end

    def read_header(self) -> tuple[int, int, bytes, str]:
        """Returns the walk, the microbatch, the flags and the fault that `write_header` wrote."""
        walk, micro, size, _ = _NUMBERS.unpack_from(self._header)
        fault = bytes(self._header[_NUMBERS.size : _NUMBERS.size + size]).decode(errors="replace")
        return walk, micro, bytes(self._header[HEADER_BYTES : HEADER_BYTES + Leaf.FLAG_BYTES * len(self.layout)]), fault


def _num_users(storage: torch.UntypedStorage) -> tuple[int, int]:
    """Returns the number of owners of the memory (tensors, arrays and capsules) and the number of references to `storage`.

    Both are needed, since the first counts the Python storage object once, however many references it has.
    """
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count, sys.getrefcount(storage)


def boundary_mismatch_error(fault: str) -> RunError:
    """Returns the RunError `boundary-mismatch`."""
    return RunError(
        "boundary-mismatch",
        fault,
        hint="make the tensors that a layer returns depend only on the shapes of the batch, not on its values",
    )


class Announcements:
    """Sends and receives descriptions over `channels`. An announcement is two messages: its length and its text."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._sends: list[Work] = []

    def send(self, description: Description, peer: int, label: str) -> None:
        """Starts to send `description` to the stage `peer`, as JSON."""
        leaves = [[str(leaf.dtype).removeprefix("torch."), list(leaf.shape), leaf.has_gradient] for leaf in description.leaves]
        content = json.dumps({"leaves": leaves, "structure": description.structure})
        text = torch.frombuffer(bytearray(content.encode()), dtype=torch.uint8)
        size = torch.tensor([text.numel()])
        self._sends += [self._channels.send_host(tensor, peer, label) for tensor in (size, text)]

    def receive(self, peer: int, label: str) -> Description:
        """Blocks until the next announcement of the stage `peer` has arrived, and returns its description."""
        size = torch.zeros(1, dtype=torch.int64)
        self._channels.receive_host(size, peer, label).wait()
        text = torch.empty(int(size), dtype=torch.uint8)
        self._channels.receive_host(text, peer, label).wait()
        content = json.loads(text.numpy().tobytes())
        leaves = tuple(Leaf(getattr(torch, name), tuple(shape), gradient) for name, shape, gradient in content["leaves"])
        return Description(leaves, content["structure"])

    def finish(self) -> None:
        """Blocks until all announcements have been received."""
        while self._sends:
            self._sends.pop().wait()

    def discard(self) -> None:
        """Drops the announcements in flight, without waiting for them."""
        self._sends.clear()


MAX_SENDS = 8
"""The number of gloo sends that may be in flight before a stage waits for the oldest one."""


class Outbox:
    """Holds the messages that are being sent, oldest first."""

    def __init__(self, channels: Channels, message_pool: MessagePool) -> None:
        self._channels = channels
        self._message_pool = message_pool
        self._sends: deque[tuple[list[Work], Message]] = deque()

    def send(
        self, peer: int, label: str, ids: tuple[int, int], expected: Description, actual: Description, tensors: list[Tensor]
    ) -> None:
        """Sends `tensors` to stage `peer` in a message of layout `expected`, or sends nothing if `expected` has no tensors.

        label: the message's description for errors. ids: the numbers of the walk and the microbatch. actual: the description
        of `tensors`. Raises RunError `boundary-mismatch` if `actual` does not fit `expected`, after a message with that error
        is sent.
        """
        if not expected.leaves:
            if actual != expected:  # there is no message that could report it to the receiver
                raise boundary_mismatch_error(f"{label}: expected {expected}, but got {actual}")
            return
        message = self._message_pool.lease(message_layout(expected.leaves))
        fault = "" if actual.fits(expected) else f"{label}: expected {expected}, but got {actual}"
        message.write_header(*ids, expected.flags if fault else actual.flags, fault)
        if not fault:
            for target, tensor in zip(message.tensors, tensors, strict=True):
                target.copy_(tensor)
        message.write_end()
        self._sends.append((self._channels.send(message.pieces, peer, f"what {label}"), message))
        if fault:
            for pending in self._sends[-1][0]:
                pending.wait()
            raise boundary_mismatch_error(fault)
        self._release_messages()

    def drain(self) -> None:
        """Blocks until all sends are complete."""
        while self._sends:
            self._finish_oldest_send()

    def discard(self) -> None:
        """Drops all messages in flight, without waiting for them."""
        self._sends.clear()

    def _release_messages(self) -> None:
        """Releases the messages whose sends are complete. With gloo, waits for the oldest sends if more than MAX_SENDS remain.

        Gloo reports the end of a send only to a wait. The peer's receive does not depend on later actions of this stage
        (`sley_core.actions.lower`), so the wait delays this stage only if the peer is slower and would delay it anyway.
        """
        if self._channels.reports_completion:
            while self._sends and self._sends[0][0][-1].is_completed():
                self._finish_oldest_send()
        while not self._channels.reports_completion and len(self._sends) > MAX_SENDS:
            self._finish_oldest_send()

    def _finish_oldest_send(self) -> None:
        """Waits for the oldest send and releases its message. NCCL needs the wait to free the tensors of a complete send."""
        handles, message = self._sends.popleft()
        for handle in handles:
            handle.wait()
        self._message_pool.release(message)


class MessagePool:
    """Lends messages on `device`, in buffers of `pool`. separate_header: as in `Message`.

        lease ──> [ the link fills or receives it ] ──> release ────────────────────────────────────> buffer in the pool
                                                  └───> release_when_unused ──> views, autograd end ──> buffer in the pool

    No order of events shows when a received tensor is free. For example, a gradient may be a view of the received gradient, or
    a layer may store its input. So the pool checks the memory's reference counts (`Message.is_shared`) before each lease.
    """

    def __init__(self, pool: DevicePool, device: Device, *, separate_header: bool) -> None:
        self.pool = pool
        self.device = device
        self.separate_header = separate_header
        self._messages_in_use: list[Message] = []
        # The messages of free buffers, since building a message takes as long as copying 300 KB. An entry disappears when the
        # pool frees its buffer.
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
        """Releases a leased message in the first `release_unused` after its `aliases` are dead."""
        self._messages_in_use.append(message)

    def release_unused(self) -> None:
        """Releases the messages whose aliases are all dead."""
        messages, self._messages_in_use = self._messages_in_use, []
        for message in messages:
            if message.is_shared:
                self._messages_in_use.append(message)
            else:
                self.release(message)
