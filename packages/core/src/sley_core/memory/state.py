"""The parts of a run's memory, their locations and transfer costs, and the interfaces that offloads use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal, Protocol, get_args, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from sley_core.engine.parts import Parts
    from sley_core.memory.inventory import MemoryInventory

Part = Literal["weights", "buffers", "masters", "optimizer_states", "gradients", "handlers", "pools", "messages"]
"""A part of the memory that a run keeps between steps.

weights: parameters, or their shards with `wp`. buffers: the buffers of modules. masters: master weights. handlers: the tensors
of gradient handlers, such as PowerSGD's errors. pools: the buffers of pools, most of which are free between steps. messages:
the message buffers of stage links and handlers.
"""

PARTS: tuple[Part, ...] = get_args(Part)

COPIED: tuple[Part, ...] = ("weights", "buffers", "masters", "optimizer_states", "handlers")
"""The parts that an offload copies to the host; it frees the others."""


class Where(Enum):
    """Where a part is. HERE ── offload ──> LEAVING ── copies done ──> AWAY ── onload ──> COMING ── copies done ──> HERE"""

    HERE = "here"
    LEAVING = "leaving"
    AWAY = "away"
    COMING = "coming"


@dataclass
class Moved:
    """The cost of all transfers of a part since the start of the run.

    copied_out, copied_in: the copied bytes. gathered: the bytes that were received from other ranks' hosts. given_back: the
    bytes of device memory that the last offload freed. seconds_out, seconds_in: the duration of the copies whose end the host
    has seen. timed_out, timed_in: the bytes of these copies. host_bytes: the host memory of the part. num_no_ops: the number of
    calls for a part that was already at its destination.
    """

    copied_out: int = 0
    copied_in: int = 0
    gathered: int = 0
    given_back: int = 0
    seconds_out: float = 0.0
    seconds_in: float = 0.0
    timed_out: int = 0
    timed_in: int = 0
    host_bytes: int = 0
    num_no_ops: int = 0

    def numbers(self) -> dict[str, float]:
        """Returns the costs by name, with the rates `gb_per_s_out` and `gb_per_s_in` (0 if unknown) for the timed bytes."""
        numbers: dict[str, float] = asdict(self)
        for direction in ("out", "in"):
            timed, seconds = numbers.pop(f"timed_{direction}"), numbers[f"seconds_{direction}"]
            numbers[f"gb_per_s_{direction}"] = timed / 1e9 / seconds if seconds else 0.0
        return numbers


class OffloadManager(Protocol):
    """Moves parts of a run's memory off the device and back. The plan's list `[[offload]]` names it.

    Memory is freed and allocated by storage (`StorageEntry.free`, `grow`), so tensors stay the same objects. Only `offload`,
    `onload` and `detach` may communicate, and only if the manager's table allows it.
    """

    @property
    def parts(self) -> Sequence[Part]:
        """The parts of the run's memory that the manager moves."""
        ...

    def attach(self, parts: Parts, inventory: MemoryInventory) -> None:
        """Called once, when the run is complete. Not called if tensors have no memory, as in an estimate."""

    def offload(self, part: Part) -> Callable[[], None]:
        """Starts to move `part` off the device unless it is offloaded. Returns a function that waits for the end."""
        ...

    def onload(self, part: Part) -> Callable[[], None]:
        """Starts to move `part` back unless it is on the device. Returns a function that waits for the end."""
        ...

    def require(self, part: Part, caller: str) -> None:
        """Makes the device wait for a transfer of `part`. Raises StateError if the part stays offloaded."""
        ...

    def where(self, part: Part) -> Where:
        """Returns the location of `part`."""
        ...

    def moved(self, part: Part) -> Moved:
        """Returns the cost of all transfers of `part`."""
        ...

    def host(self, part: Part) -> Mapping[int, Tensor]:
        """Returns the host's complete copies of the storages of `part` that are not on the device, by `storage_id`, uint8
        [bytes]. They are valid until the next offload.
        """
        return {}

    def detach(self) -> None:
        """Called when the run closes. Moves weights and buffers back, so that layers are ordinary modules again."""


@runtime_checkable
class HoldsTensors(Protocol):
    """Reports the device memory that an object of the run (handler, pool or stage link) keeps between steps."""

    def named_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Yields the name and tensor of all memory, offloaded or not; always the same tensors."""
        ...


@runtime_checkable
class Trimmable(Protocol):
    """Frees memory on request and allocates it again when needed. A pool, handler or stage link may implement it."""

    def trim(self) -> int:
        """Frees unused memory and returns the number of freed bytes. Called between two steps."""
        ...


@runtime_checkable
class HoldsMessages(Protocol):
    """Reports the message buffers of a gradient handler, which its `trim` frees."""

    def messages(self) -> Iterable[tuple[str, Tensor]]:
        """Yields the name and tensor of each buffer that `trim` would free."""
        ...
