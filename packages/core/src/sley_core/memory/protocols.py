"""The interfaces of objects that hold memory, and of those that move it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from sley_core.engine.parts import Parts
    from sley_core.memory.holdings import Holdings
    from sley_core.memory.state import Moved, Part, Where


class OffloadManager(Protocol):
    """Moves parts of a run's memory off the device and back; named by the plan's list `[[offload]]`.

    Memory is freed and allocated by storage (`api.memory.free`, `grow`): no tensor is re-pointed. Only `offload`, `onload` and
    `detach` may communicate, and only if the manager's table says so.
    """

    @property
    def parts(self) -> Sequence[Part]:
        """Returns the parts of the run's memory that it moves."""
        ...

    def attach(self, parts: Parts, holdings: Holdings) -> None:
        """Called once, when the run is complete; from then on `parts.events` calls it in steps. Where tensors have no memory,
        as while a plan is checked, it is not called, and nothing is to be moved.
        """

    def offload(self, part: Part) -> Callable[[], None]:
        """Starts to move `part` off the device, between two steps; does nothing if it is away. Returns a function that waits
        for it.
        """
        ...

    def onload(self, part: Part) -> Callable[[], None]:
        """Starts to bring `part` back; does nothing if it is here. Returns a function that waits for it."""
        ...

    def require(self, part: Part, what: str) -> None:
        """Makes the device's work wait for `part` if it is coming. Raises StateError if it is away and stays away until
        `onload`.
        """
        ...

    def where(self, part: Part) -> Where:
        """Returns where `part` is."""
        ...

    def moved(self, part: Part) -> Moved:
        """Returns the cost of moving `part` so far."""
        ...

    def host(self, part: Part) -> Mapping[int, Tensor]:
        """Returns the host's copies of those storages of `part` that are away or coming, once they are complete: by
        `storage_id`, uint8 [bytes]. They are valid until the next offload.
        """
        return {}

    def detach(self) -> None:
        """Called when the run closes. Brings weights and buffers back, so that layers are ordinary modules again."""


@runtime_checkable
class Holds(Protocol):
    """Reports device memory that it keeps between steps; for any live object: a gradient handler, a pool, a stage link."""

    def held(self) -> Iterable[tuple[str, Tensor]]:
        """Yields name and tensor of everything it keeps; the same tensors as long as it uses them, with or without memory."""
        ...


@runtime_checkable
class Trims(Protocol):
    """Frees memory on request, and allocates it again when needed. Any live object may have it: a pool, a stage link."""

    def trim(self) -> int:
        """Frees what it does not need now; returns the number of bytes freed. Called between two steps."""
        ...


@runtime_checkable
class HoldsMessages(Protocol):
    """Reports device memory that a gradient handler keeps for what is on its way to other ranks, and that its `trim` frees."""

    def messages(self) -> Iterable[tuple[str, Tensor]]:
        """Yields name and tensor of each buffer that `trim` would free."""
        ...
