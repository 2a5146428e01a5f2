"""Tells which tensors are plain torch tensors, not of a subclass."""

from __future__ import annotations

from torch import Tensor

PLAIN: set[type] = {Tensor}
"""The types of plain tensors. While bytes are estimated it includes fake tensors, which stand for plain ones."""


def is_plain(tensor: object) -> bool:
    """Returns whether `tensor` is a plain tensor: neither a parameter nor of a subclass with behaviour of its own."""
    return type(tensor) in PLAIN
