"""The tables of the plugin `memory`; no torch."""

from __future__ import annotations

from typing import Literal

from sley_core.api.plan import Table


class SizeClassesConfig(Table):
    """Keeps blocks by rounded size, and lends views of them: buffers of almost equal sizes share memory."""

    per_doubling: Literal[1, 2, 4, 8, 16] = 8
    """Sizes of blocks between one power of two and the next; with 8, a block is at most an eighth larger than asked for."""
