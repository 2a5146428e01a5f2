"""Gives memory back and makes it anew, never copied: gradients, and what pools and pipeline links do not lend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from sley_core.api.memory import Moved, Where

if TYPE_CHECKING:
    from torch import Tensor


class Freed:
    """Discards gradients by an offload, and makes zeroed memory for them by an onload. free, build: the gradient store's.

    num_bytes: what they take now.
    """

    def __init__(
        self, free: Callable[[], None], build: Callable[[], None], num_bytes: Callable[[], int], moved: Moved
    ) -> None:
        self._free = free
        self._build = build
        self._num_bytes = num_bytes
        self._moved = moved
        self.where = Where.HERE

    def offload(self) -> None:
        """Frees the gradients' memory; of memory that is away, only counts the call."""
        if self.where is Where.AWAY:
            self._moved.num_no_ops += 1
            return
        self._moved.given_back = self._num_bytes()
        self._free()
        self.where = Where.AWAY

    def onload(self) -> None:
        """Makes the gradients' memory again, zeroed; of memory that is here, only counts the call."""
        if self.where is Where.HERE:
            self._moved.num_no_ops += 1
            return
        self._build()
        self.where = Where.HERE

    def require(self) -> None: ...

    def wait(self) -> None: ...

    def host(self) -> Mapping[int, Tensor]:
        """Returns nothing: there is no copy."""
        return {}


class Trimmed:
    """Frees what its owner allocates anew when it needs it: such a part is never away."""

    def __init__(self, trim: Callable[[], int], moved: Moved) -> None:
        self._trim = trim
        self._moved = moved
        self.where = Where.HERE

    def offload(self) -> None:
        """Frees what is not lent, and counts its bytes."""
        self._moved.given_back = self._trim()

    def onload(self) -> None: ...

    def require(self) -> None: ...

    def wait(self) -> None: ...

    def host(self) -> Mapping[int, Tensor]:
        """Returns nothing: there is no copy."""
        return {}
