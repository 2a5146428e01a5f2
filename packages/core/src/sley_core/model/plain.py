"""Which tensors are torch's own, with nothing around them."""

from __future__ import annotations

from torch import Tensor

PLAIN: set[type] = {Tensor}
"""While bytes are estimated, tensors without values too: they stand for plain ones."""


def is_plain(tensor: object) -> bool:
    """Returns whether `tensor` is a plain tensor: no parameter, and of no subclass that does something of its own."""
    return type(tensor) in PLAIN
