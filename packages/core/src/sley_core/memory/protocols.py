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
    """Moves parts of a run's memory off the device and back; the plan's list `[[offload]]` names it.

    Memory leaves by its storage (`api.memory.free`, `grow`): nothing re-points a tensor. Only `offload`, `onload` and
    `detach` may communicate, where the manager's table says so.
    """

    @property
    def parts(self) -> Sequence[Part]:
        """The parts that it moves."""
        ...

    def attach(self, parts: Parts, holdings: Holdings) -> None:
        """Called once, when the run is complete; `parts.events` calls it in steps from then on."""

    def offload(self, part: Part) -> Callable[[], None]:
        """Starts to move `part` off the device, between two steps; does nothing if it is away. Returns what waits for it."""
        ...

    def onload(self, part: Part) -> Callable[[], None]:
        """Starts to bring `part` back; does nothing if it is here. Returns what waits for it."""
        ...

    def require(self, part: Part, what: str) -> None:
        """Makes the device's work wait for `part` if it is coming. Raises StateError if it is away and stays so until
        `onload`.
        """
        ...

    def where(self, part: Part) -> Where:
        """Returns where `part` is."""
        ...

    def moved(self, part: Part) -> Moved:
        """Returns what moving `part` has cost."""
        ...

    def host(self, part: Part) -> Mapping[int, Tensor]:
        """Returns the host's copies of those storages of `part` that are away or coming, once they are complete: by
        `storage_id`, uint8 [bytes]. They stay as they are until the next offload.
        """
        return {}

    def detach(self) -> None:
        """Called when the run closes. Brings weights and buffers back: layers are ordinary modules from then on."""


@runtime_checkable
class Holds(Protocol):
    """Any live object of a run that keeps device memory between steps: a gradient handler, a pool, a stage link."""

    def held(self) -> Iterable[tuple[str, Tensor]]:
        """Yields name and tensor of what it keeps; the same tensors as long as it uses them, with or without memory."""
        ...


@runtime_checkable
class Trims(Protocol):
    """Any live object of a run that can free memory and allocate it anew: a pool, a stage link."""

    def trim(self) -> int:
        """Frees what it does not need now; returns how many bytes that were. Called between two steps."""
        ...
