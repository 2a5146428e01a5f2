"""One crossing of a stage boundary is one message: a short head, then every tensor, each at an aligned place.

    | head: what this is | tensor 0 . . . | tensor 1 . . . . . |
    0                    1024             aligned to 256 bytes

Both ends know the size before it is sent, so a receive can be posted ahead. The head lets a receiver say what came when it
is not what was expected; a sender that finds that out fills the expected size and says so in the head.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch import Tensor

from sley_core.engine.boundary import Description, Leaf
from sley_core.engine.flat import ALIGNMENT_BYTES

HEAD_BYTES = 1024
"""Room for the words of a mismatch; also the size of an announcement."""


def num_bytes(leaves: Sequence[Leaf]) -> int:
    """The size of a message with these tensors."""
    return HEAD_BYTES + sum(_padded(leaf.num_bytes) for leaf in leaves)


def views(message: Tensor, leaves: Sequence[Leaf]) -> list[Tensor]:
    """The tensors of `message` (uint8 [num_bytes]), in place."""
    found = []
    start = HEAD_BYTES
    for leaf in leaves:
        found.append(message[start : start + leaf.num_bytes].view(leaf.dtype).view(leaf.shape))
        start += _padded(leaf.num_bytes)
    return found


def write_head(message: Tensor, text: str) -> None:
    """Puts `text` into the head, cut to fit; empty means that all is as expected."""
    data = text.encode()[: HEAD_BYTES - 4]
    head = len(data).to_bytes(4, "little") + data
    message[: len(head)].copy_(torch.frombuffer(bytearray(head), dtype=torch.uint8))


def read_head(message: Tensor) -> str:
    """The text of the head."""
    size = int.from_bytes(bytes(message[:4].tolist()), "little")
    return bytes(message[4 : 4 + size].tolist()).decode(errors="replace")


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
