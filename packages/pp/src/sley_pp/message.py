"""A message: one crossing of a stage boundary, as a head and then every tensor, each at an aligned offset.

    | head: walk, micro-batch, fault, end, flags | tensor 0 . . . | tensor 1 . . . . . |
    0                                       1024 + flags          aligned to 256 bytes

Both ends know the size before it is sent, so a receive can be posted ahead. The head lets a receiver report an unexpected
message; a sender that detects a mismatch sends the expected size and the error text in the head. The flags say which of the
tensors have a gradient and which are the same tensor. Only the flags may change from one micro-batch to the next, if layers are
frozen or the data decide.

Gloo accepts a message that is shorter than the receive buffer, and leaves the rest unchanged. So a head on the host also has
the last bytes of the message, which the receiver overwrites before: if they have not come, that is an error.

The head is always on the host, so that both ends read it without a device synchronisation. With tensors on the host it lies
before them, in one piece; otherwise it is a separate piece.
"""

from __future__ import annotations

import json
import struct
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sley_core.api.comm import Device
from sley_core.api.parts import ALIGNMENT_BYTES, Description, Leaf, round_up
from sley_core.errors import RunError

if TYPE_CHECKING:
    from torch import Tensor

    from sley_core.api.comm import Pending
    from sley_core.api.parts import Description
    from sley_pp.lines import Lines
    from sley_pp.pool import Lending


HEAD_BYTES = 1024
"""Room for the numbers and for the text of a mismatch; the flags of each tensor follow."""

END_BYTES = 8
_NUMBERS = struct.Struct(f"<III{END_BYTES}s")
"""Walk, micro-batch, bytes of the fault's text, the last bytes of the message."""

_NOT_COME = b"not come"
"""The mark in place of the last bytes until they arrive."""


Layout = tuple[tuple[torch.dtype, tuple[int, ...]], ...]
"""Dtype and shape of each tensor; messages of one layout are interchangeable."""


def layout_of(leaves: Sequence[Leaf]) -> Layout:
    """Returns the layout of a message with these tensors."""
    return tuple((leaf.dtype, leaf.shape) for leaf in leaves)


@dataclass(frozen=True)
class Extent:
    """Holds the sizes in bytes of a message of some layout. starts: byte offset of each tensor from the start of the body."""

    head: int
    body: int
    starts: tuple[int, ...]

    @classmethod
    def of(cls, layout: Layout) -> Extent:
        """Computes head, body and offsets for `layout`; every tensor starts at a multiple of ALIGNMENT_BYTES."""
        starts, end = [], 0
        for dtype, shape in layout:
            starts.append(end)
            end += round_up(prod(shape) * dtype.itemsize, ALIGNMENT_BYTES)
        return cls(HEAD_BYTES + round_up(Leaf.FLAG_BYTES * len(layout), ALIGNMENT_BYTES), end, tuple(starts))


def num_bytes_of(layout: Layout, *, apart: bool) -> int:
    """Returns how many bytes a message of `layout` takes; apart: as `Message`."""
    extent = Extent.of(layout)
    return extent.body + (0 if apart else extent.head)


class Message:
    """Lays out a message in `memory`, uint8 [bytes]. tensors: views of it, in the order of `layout`; pieces: the tensors to
    send or receive.

    device: where `memory` lies. apart: whether the head is a separate piece, on the host. leased: the lease of the memory, and
    the tensor it gave, while there is one.

    Its views have a separate storage over the same memory, so that the number of users of that storage shows who uses this
    message, whatever references a pool and earlier users still have to the memory.

    Views are made once per layout, and the head is read and written without torch operations: messages are sent and received
    between actions, and each operation there is time in which the stage does not compute.
    """

    def __init__(self, memory: Tensor, layout: Layout, device: Device, *, apart: bool) -> None:
        self._device = device
        self._apart = apart
        self.leased: tuple[AbstractContextManager[Tensor], Tensor] | None = None
        with torch.inference_mode(False):
            self._memory = device.again(memory)
        self._storage = self._memory.untyped_storage()
        self.lay(layout)

    @property
    def is_shared(self) -> bool:
        """Whether anything else refers to the memory: a view, a tensor saved by autograd, a numpy array, a storage.

        An address (`data_ptr()`) or a weak reference keeps no tensor's memory alive, nor this one.
        """
        return any(now > own for now, own in zip(_num_users(self._storage), self._num_own, strict=True))

    def lay(self, layout: Layout) -> None:
        """Lays this out as a message of `layout`, which must fit; no tensor in its memory may be in use elsewhere."""
        extent = Extent.of(layout)
        before = 0 if self._apart else extent.head
        body = self._memory[: before + extent.body]
        head = torch.empty(extent.head, dtype=torch.uint8) if self._apart else body[: extent.head]
        self.layout = layout
        self.pieces = [head, body] if self._apart else [body]
        self._head = self._device.bytes_of(head)
        # Tensors on a device are not checked: nothing of them is read here.
        has_end = extent.body and not self._apart
        self._end = self._device.bytes_of(body[-END_BYTES:]) if has_end else memoryview(bytearray())
        self.tensors: list[Tensor] = []
        for (dtype, shape), start in zip(layout, extent.starts, strict=True):
            end = start + prod(shape) * dtype.itemsize
            self.tensors.append(body[before + start : before + end].view(dtype).view(shape))
        del head, body  # they would count as users of the storage below
        self._num_own = _num_users(self._storage)

    def lent(self) -> list[Tensor]:
        """Returns the tensors for the caller.

        Each has its own version counter, so writing to one does not invalidate the others.
        """
        return [tensor.data for tensor in self.tensors]

    def write_head(self, walk: int, micro: int, flags: bytes, fault: str = "") -> None:
        """Writes the head. fault: the text of a mismatch, cut to fit; empty if there is none."""
        text = fault.encode()[: HEAD_BYTES - _NUMBERS.size]
        _NUMBERS.pack_into(self._head, 0, walk, micro, len(text), b"")
        self._head[_NUMBERS.size : _NUMBERS.size + len(text)] = text
        self._head[HEAD_BYTES : HEAD_BYTES + len(flags)] = flags

    def seal(self) -> None:
        """Copies the message's last bytes into the head; called when the tensors are in their places, before it is sent."""
        at = _NUMBERS.size - END_BYTES
        self._head[at : at + len(self._end)] = self._end

    def open(self) -> None:
        """Prepares this to be received: overwrites its last bytes with a mark."""
        self._end[:] = _NOT_COME[: len(self._end)]

    @property
    def is_whole(self) -> bool:
        """Whether a received message has arrived up to its end."""
        at = _NUMBERS.size - END_BYTES
        return self._head[at : at + len(self._end)] == self._end

    def read_head(self) -> tuple[int, int, bytes, str]:
        """Returns walk, micro-batch, flags and fault as `write_head` wrote them."""
        walk, micro, size, _ = _NUMBERS.unpack_from(self._head)
        fault = bytes(self._head[_NUMBERS.size : _NUMBERS.size + size]).decode(errors="replace")
        return walk, micro, bytes(self._head[HEAD_BYTES : HEAD_BYTES + Leaf.FLAG_BYTES * len(self.layout)]), fault


def to_bytes(description: Description) -> Tensor:
    """Serialises `description` as JSON for an announcement, uint8 [bytes] on the host."""
    leaves = [[str(leaf.dtype).removeprefix("torch."), list(leaf.shape), leaf.has_gradient] for leaf in description.leaves]
    text = json.dumps({"leaves": leaves, "structure": description.structure})
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def from_bytes(data: Tensor) -> Description:
    """Returns the description that `to_bytes` serialised."""
    content = json.loads(data.numpy().tobytes())
    leaves = tuple(Leaf(getattr(torch, name), tuple(shape), gradient) for name, shape, gradient in content["leaves"])
    return Description(leaves, content["structure"])


def _num_users(storage: torch.UntypedStorage) -> tuple[int, int]:
    """Returns how many tensors, arrays and capsules keep `storage` alive, and how many Python references it has itself.

    Python has one object per storage, shared by all tensors that return it, so the first number alone does not show its
    users.
    """
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count, sys.getrefcount(storage)


def mismatch(fault: str) -> RunError:
    """Returns the RunError `boundary-mismatch`."""
    return RunError(
        "boundary-mismatch", fault, hint="what a layer returns may depend on the shapes of the batch, not on its values"
    )


class Announcements:
    """Sends and receives descriptions on `lines`, in one order with the messages there; each as two messages: its length, then
    its text.
    """

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._sending: list[Pending] = []

    def send(self, description: Description, peer: int, what: str) -> None:
        """Starts to send `description` to the stage `peer`."""
        text = to_bytes(description)
        parts = torch.tensor([text.numel()]), text
        self._sending += [self._lines.tell(part, peer, what) for part in parts]

    def hear(self, peer: int, what: str) -> Description:
        """Blocks until the next announcement of the stage `peer` has arrived; returns its description."""
        size = torch.zeros(1, dtype=torch.int64)
        self._lines.hear(size, peer, what).wait()
        text = torch.empty(int(size), dtype=torch.uint8)
        self._lines.hear(text, peer, what).wait()
        return from_bytes(text)

    def end(self) -> None:
        """Blocks until all that were sent have been received."""
        while self._sending:
            self._sending.pop().wait()

    def forget(self) -> None:
        """Drops the announcements in flight, without waiting for them."""
        self._sending.clear()


SENDS_UNDER_WAY = 8
"""Where messages go by gloo, the number that a stage may have in flight before it waits for the oldest."""


class Outbox:
    """Holds messages whose send is in flight, oldest first."""

    def __init__(self, lines: Lines, memory: Lending) -> None:
        self._lines = lines
        self._memory = memory
        self._sending: deque[tuple[list[Pending], Message]] = deque()

    def send(
        self, peer: int, what: str, head: tuple[int, int], expected: Description, came: Description, tensors: list[Tensor]
    ) -> None:
        """Leases, fills and sends to stage `peer` a message of layout `expected`; sends nothing if that has no tensors.

        what: describes it, for errors. head: the numbers of the walk and of the micro-batch. If `came`, the description of
        `tensors`, does not fit, sends the mismatch in the head, waits for that and raises RunError `boundary-mismatch`.
        """
        if not expected.leaves:
            if came != expected:  # there is no message in which to tell the receiver
                raise mismatch(f"{what}: expected {expected}, came {came}")
            return
        message = self._memory.lease(layout_of(expected.leaves))
        fault = "" if came.fits(expected) else f"{what}: expected {expected}, came {came}"
        message.write_head(*head, expected.flags if fault else came.flags, fault)
        if not fault:
            for place, tensor in zip(message.tensors, tensors, strict=True):
                place.copy_(tensor)
        message.seal()
        self._sending.append((self._lines.send(message.pieces, peer, f"what {what}"), message))
        if fault:
            for pending in self._sending[-1][0]:
                pending.wait()
            raise mismatch(fault)
        self._end_sends()

    def drain(self) -> None:
        """Blocks until all sends are complete."""
        while self._sending:
            self._end_send()

    def forget(self) -> None:
        """Drops all messages in flight, without waiting for them."""
        self._sending.clear()

    def _end_sends(self) -> None:
        """Returns messages whose send is complete to the pool; on gloo, waits for the oldest beyond SENDS_UNDER_WAY.

        Gloo reports the end of a send only to a wait. The wait delays only a stage that would be delayed anyway: the peer
        reaches its receive without anything that this stage issues later (`sley_core.actions.lower`), and much earlier, unless
        it is slower.
        """
        if self._lines.says_when_sent:
            while self._sending and self._sending[0][0][-1].is_done():
                self._end_send()
        while not self._lines.says_when_sent and len(self._sending) > SENDS_UNDER_WAY:
            self._end_send()

    def _end_send(self) -> None:
        """Waits for the oldest send, and returns its message to the pool. NCCL releases its tensors only in a wait, even if the
        send is done.
        """
        under_way, message = self._sending.popleft()
        for pending in under_way:
            pending.wait()
        self._memory.give_back(message)
