"""The tables of the plugin `memory`; no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sley_core.api.plan import Array, NonNegative, Positive, Table

Layers = Positive | Annotated[Array[str], Field(min_length=1)]


class SizeClassesConfig(Table):
    """Keeps blocks by rounded size, and lends views of them: buffers of almost equal sizes share memory."""

    per_doubling: Literal[1, 2, 4, 8, 16] = 8
    """Sizes of blocks between one power of two and the next; with 8, a block is at most an eighth larger than asked for."""


class HostConfig(Table):
    """What chosen layers save for their backward waits on the host, and comes back ahead of its use."""

    layers: Layers | None = None
    """Which: the first so many blocks, or names and patterns of names (`"blocks.1*"`); left out, all blocks.

    Blocks are all layers but the first and the last.
    """

    min_bytes: NonNegative = 65536
    """Storages smaller than this stay: a copy of one takes longer than its bytes are worth."""

    budget_bytes: NonNegative | None = None
    """How many bytes may be on the host at one time; what would exceed it stays on the device, and is counted."""


class SelectiveConfig(Table):
    """Layers run again in their backward, as with `core.recompute`, but for their attention, whose output is kept."""

    layers: Layers | None = None
    """Which: the first so many blocks, or names and patterns of names; left out, all blocks."""

    budget_bytes: NonNegative | None = None
    """How many bytes of attention may be kept at one time; what would exceed it is computed again, and counted."""
