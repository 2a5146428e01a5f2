"""Says where a part of a run's memory is, and what moving it costs."""

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
"""A kind of memory that a run holds between steps.

weights: parameters, shards where `wp` cuts them. buffers: of modules. masters: fp32 copies that are updated. handlers: what
gradient handlers keep, such as PowerSGD's errors. pools: their buffers, most of which nobody has between steps. messages:
buffers of stage links and of handlers, for what is on its way.
"""

PARTS: tuple[Part, ...] = get_args(Part)

COPIED: tuple[Part, ...] = ("weights", "buffers", "masters", "optimizer_states", "handlers")
"""What an offload keeps on the host; the others are freed."""


class Where(Enum):
    """A part's state. HERE ── offload ──> LEAVING ── copies done ──> AWAY ── onload ──> COMING ── copies done ──> HERE"""

    HERE = "here"
    LEAVING = "leaving"
    AWAY = "away"
    COMING = "coming"


@dataclass
class Moved:
    """What moving a part has cost since the run began.

    copied_out, copied_in: bytes of copies. gathered: bytes that came back from other ranks' hosts. given_back: bytes of
    device memory that the last offload freed.
    seconds_out, seconds_in: until the copies were done, of those whose end the host has seen (it waited, or asked where they
    are); timed_out, timed_in: their bytes. host_bytes: what the part takes on the host. num_no_ops: calls that found it where
    they wanted it.
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
        """Returns the numbers for a report, by name; `gb_per_s_out` and `gb_per_s_in`, 0 if unknown, for the timed bytes."""
        numbers: dict[str, float] = asdict(self)
        for way in ("out", "in"):
            timed, seconds = numbers.pop(f"timed_{way}"), numbers[f"seconds_{way}"]
            numbers[f"gb_per_s_{way}"] = timed / 1e9 / seconds if seconds else 0.0
        return numbers


class OffloadManager(Protocol):
    """Moves parts of a run's memory off the device and back; named by the plan's list `[[offload]]`.

    Memory is freed and allocated by storage (`api.memory.free`, `grow`): no tensor is re-pointed. Only `offload`, `onload` and
    `detach` may communicate, and only if the manager's table says so.
    """

    @property
    def parts(self) -> Sequence[Part]:
        """Returns the parts of the run's memory that it moves."""
        ...

    def attach(self, parts: Parts, inventory: MemoryInventory) -> None:
        """Called once, when the run is complete; from then on `parts.events` calls it in steps. Where tensors have no memory,
        as while a plan is checked, it is not called, and nothing is to be moved.
        """

    def offload(self, part: Part) -> Callable[[], None]:
        """Starts to move `part` off the device, between two steps, unless it is away. Returns a function that waits for it."""
        ...

    def onload(self, part: Part) -> Callable[[], None]:
        """Starts to bring `part` back; does nothing if it is here. Returns a function that waits for it."""
        ...

    def require(self, part: Part, caller: str) -> None:
        """Makes the device's work wait for `part` if it is coming. Raises StateError if it is away and stays so."""
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

    def named_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Yields the name and the tensor of all memory that it keeps, with or without storage; always the same tensors."""
        ...


@runtime_checkable
class Trims(Protocol):
    """Frees memory on request, and allocates it again when needed. Any live object may have it: a pool, a stage link."""

    def trim(self) -> int:
        """Frees the memory that it does not need now; returns the number of freed bytes. Called between two steps."""
        ...


@runtime_checkable
class HoldsMessages(Protocol):
    """Reports device memory that a gradient handler keeps for messages to other ranks, and that its `trim` frees."""

    def messages(self) -> Iterable[tuple[str, Tensor]]:
        """Yields name and tensor of each buffer that `trim` would free."""
        ...
