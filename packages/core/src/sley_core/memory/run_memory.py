"""`run.memory`: what a rank's run holds, and the calls that move it off the device and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from sley_core.errors import UsageError
from sley_core.memory.state import PARTS, Moved, Part, Where

if TYPE_CHECKING:
    from sley_core.memory.holdings import Holdings
    from sley_core.memory.protocols import OffloadManager

TO_STEP = PARTS
TO_EVALUATE: tuple[Part, ...] = ("weights", "buffers", "pools", "messages")
TO_LOAD: tuple[Part, ...] = ("weights", "buffers", "masters")
"""What must be there for a step, an evaluation, and for loading weights."""


class Move:
    """Memory that is on its way. Nothing need wait for it: the run's own methods do. `wait` is for others on the device."""

    def __init__(self, waits: Sequence[Callable[[], None]]) -> None:
        self._waits = waits

    def wait(self) -> None:
        """Waits, on the host, until everything has left or come; only then other programs can have the memory."""
        for wait in self._waits:
            wait()


class RunMemory:
    """The memory of one rank's run, by part (`memory.state.PARTS`).

        run.memory.offload().wait()       # between two steps: other programs may use the device
        ...
        run.memory.onload()               # the next step gives the same numbers as if nothing had been

    managers: those of the plan, attached. settle: makes sure that no step is under way; the run sets it. No
    method communicates, so ranks need not do alike; but a step or an evaluation of all ranks needs everything on each.
    """

    def __init__(self, holdings: Holdings, managers: Sequence[OffloadManager]) -> None:
        self.holdings = holdings
        self.managers = managers
        self.settle: Callable[[], None] = _nothing

    @property
    def bytes(self) -> dict[Part, int]:
        """Bytes of device memory that each part has now; 0 for one that is away. Optimizer states come in the first step."""
        return {part: self.holdings.num_bytes(part) for part in PARTS}

    @property
    def where(self) -> dict[Part, Where]:
        """Where each part is; parts that no manager of the plan moves are here."""
        found = dict.fromkeys(PARTS, Where.HERE)
        for manager in self.managers:
            found.update({part: manager.where(part) for part in manager.parts})
        return found

    def offload(self, *parts: Part) -> Move:
        """Moves `parts`, or all that the plan's managers move, off the device; those that are away stay so.

        Copies run beside other work: `wait` of the result, if another program is to have the memory. Gradients are freed, and
        those of the last step are gone. Raises RunError `step-running` within a step, UsageError `no-offload` for a
        part that no `[[offload]]` of the plan moves.
        """
        self.settle()
        return Move([manager.offload(part) for part, manager in reversed(self._chosen(parts))])

    def onload(self, *parts: Part) -> Move:
        """Brings `parts`, or all, back to the device; those that are here stay so. Raises as `offload`."""
        self.settle()
        return Move([manager.onload(part) for part, manager in self._chosen(parts)])

    def require(self, what: str, parts: Iterable[Part]) -> None:
        """Lets the device's work wait for those of `parts` that are coming. Raises StateError `memory-away` if one is away, and
        needs a call to come back. what: what they are needed for, as "a step".
        """
        for manager in self.managers:
            for part in parts:
                if part in manager.parts:
                    manager.require(part, what)

    @property
    def report(self) -> dict[Part, Moved]:
        """What moving each part has cost since the run began."""
        found: dict[Part, Moved] = {}
        for manager in self.managers:
            found.update({part: manager.moved(part) for part in manager.parts})
        return found

    def counts(self) -> Mapping[str, float]:
        """Returns the report as flat numbers: `weights_copied_out`, ...; those that are not zero."""
        flat = {f"{part}_{name}": value for part, moved in self.report.items() for name, value in asdict(moved).items()}
        return {name: value for name, value in flat.items() if value}

    def _chosen(self, parts: Sequence[Part]) -> list[tuple[Part, OffloadManager]]:
        """The wanted parts with their managers, in the order in which they come back."""
        of_part = {part: manager for manager in self.managers for part in manager.parts}
        for part in parts:
            if part not in PARTS:
                raise UsageError("no-part", f"a run's memory has no part {part!r}", hint=f"it has {', '.join(PARTS)}")
            if part not in of_part:
                raise _not_moved(part)
        if not of_part:
            raise _not_moved("memory")
        return [(part, of_part[part]) for part in PARTS if part in (parts or of_part)]


def _nothing() -> None: ...


def _not_moved(part: str) -> UsageError:
    return UsageError(
        "no-offload",
        f"nothing in the plan moves the run's {part.replace('_', ' ')}",
        hint='add [[offload]] with `use = "memory.everything"` (package sley-memory)',
    )
