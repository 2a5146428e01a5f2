"""One crossing of a stage boundary is one message: a short head, then every tensor, each at an aligned place.

    | head: what this is | tensor 0 . . . | tensor 1 . . . . . |
    0                    1024             aligned to 256 bytes

Both ends know the size before it is sent, so a receive can be posted ahead. The head lets a receiver say what came when it
is not what was expected; a sender that finds that out fills the expected size and says so in the head.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from sley_core.engine.boundary import Description, Leaf
from sley_core.engine.flat import ALIGNMENT_BYTES

HEAD_BYTES = 1024
"""Room for the words of a mismatch; also the size of an announcement."""


Layout = tuple[tuple[torch.dtype, tuple[int, ...]], ...]
"""Dtype and shape of each tensor: messages of one layout can take one another's place. An announcement has none."""


def layout_of(leaves: Sequence[Leaf]) -> Layout:
    """The layout of a message with these tensors."""
    return tuple((leaf.dtype, leaf.shape) for leaf in leaves)


class Message:
    """A buffer for one message at a time. buffer: uint8, whole. tensors: views of it, in the order of `layout`.

    Views are made once, and on the host the head is read and written without an operation of torch: a message is sent and
    received between any two actions, and each operation there is time in which the stage does not compute.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        sizes = [prod(shape) * dtype.itemsize for dtype, shape in layout]
        self.buffer = torch.empty(HEAD_BYTES + sum(map(_padded, sizes)), dtype=torch.uint8, device=device)
        self.tensors: list[Tensor] = []
        start = HEAD_BYTES
        for (dtype, shape), size in zip(layout, sizes, strict=True):
            self.tensors.append(self.buffer[start : start + size].view(dtype).view(shape))
            start += _padded(size)
        self._head = self.buffer.numpy().data if device.type == "cpu" else None

    def write_head(self, text: str = "") -> None:
        """Puts `text` into the head, cut to fit; empty means that all is as expected."""
        data = text.encode()[: HEAD_BYTES - 4]
        head = len(data).to_bytes(4, "little") + data
        if self._head is not None:
            self._head[: len(head)] = head
        elif data:
            self.buffer[: len(head)].copy_(torch.frombuffer(bytearray(head), dtype=torch.uint8))
        else:
            self.buffer[:4].zero_()

    def read_head(self) -> str:
        """The text of the head."""
        head = self._head if self._head is not None else bytes(self.buffer[:HEAD_BYTES].tolist())
        size = int.from_bytes(head[:4], "little")
        return bytes(head[4 : 4 + size]).decode(errors="replace")


def to_text(description: Description) -> str:
    """A description as an announcement carries it."""
    leaves = [
        [str(leaf.dtype).removeprefix("torch."), list(leaf.shape), leaf.has_gradient] for leaf in description.leaves
    ]
    return json.dumps({"leaves": leaves, "structure": description.structure})


def from_text(text: str) -> Description:
    """The description of an announcement."""
    found = json.loads(text)
    leaves = tuple(Leaf(getattr(torch, name), tuple(shape), gradient) for name, shape, gradient in found["leaves"])
    return Description(leaves, found["structure"])


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
