"""`run.memory`: the memory of a run on one rank, and the methods that move it off the device and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from sley_core.comm.copies import storage_id
from sley_core.comm.device import Device, on_stream
from sley_core.errors import StateError, UsageError
from sley_core.memory.inventory import MemoryInventory, view_in_copy
from sley_core.memory.state import COPIED, PARTS, Moved, OffloadManager, Part, Where

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from sley_core.engine.parts import StepNumbers
    from sley_core.engine.weights import Masters


TO_STEP = PARTS
TO_EVALUATE: tuple[Part, ...] = ("weights", "buffers", "pools", "messages")
TO_LOAD: tuple[Part, ...] = ("weights", "buffers", "masters")
TO_SAVE: dict[str, tuple[Part, ...]] = {"working": ("weights", "buffers"), "full": TO_LOAD}
TO_RESTORE: tuple[Part, ...] = (*TO_LOAD, "optimizer_states", "handlers")
"""What must be there for a step, an evaluation, for loading and saving weights, and for loading a checkpoint."""


class Move:
    """Memory that is on its way. Nothing need wait for it: the run's own methods do. `wait` is for others on the device."""

    def __init__(self, waits: Sequence[Callable[[], None]], leaves: torch.device | None = None) -> None:
        self._waits = waits
        self._leaves = leaves

    def wait(self) -> None:
        """Waits, on the host, until everything has left or come. After an offload on CUDA it also returns what torch's
        allocator keeps for later to the driver: only then other programs can have the memory.
        """
        for wait in self._waits:
            wait()
        if self._leaves is not None and self._leaves.type == "cuda":
            import torch

            torch.cuda.empty_cache()


@dataclass(eq=False)
class RunMemory:
    """The memory of one rank's run, by part (`memory.state.PARTS`).

        run.memory.offload().wait()       # between two steps: other programs may use the device
        ...
        run.memory.onload()               # the next step gives the same numbers as if nothing had been

    device: the rank's. managers: those of the plan, attached. masters: the run's, which follow what a program writes. settle:
    makes sure that no step is under way; check_free: that no exchange of one that failed is; the run sets both. Ranks need not
    do alike, unless a manager shares the host's copies among them, as `memory.everything` does with `shared = true`; a step or
    an evaluation of all ranks needs everything on each.
    """

    device: Device
    inventory: MemoryInventory
    managers: Sequence[OffloadManager]
    masters: Masters
    settle: Callable[[], None] = lambda: None
    check_free: Callable[[], None] = lambda: None

    @property
    def bytes(self) -> dict[str, int]:
        """Returns the bytes of device memory of each part, 0 for one that is away; states come in the first step."""
        return {part: self.inventory.num_bytes(part) for part in PARTS}

    @property
    def where(self) -> dict[Part, Where]:
        """Returns where each part is: here, leaving, away or coming; parts that no manager of the plan moves are here."""
        places = dict.fromkeys(PARTS, Where.HERE)
        for manager in self.managers:
            places.update({part: manager.where(part) for part in manager.parts})
        return places

    @on_stream
    def offload(self, *parts: Part) -> Move:
        """Starts to move `parts`, or all that the plan's managers move, off the device; returns what waits for that. Parts that
        are away stay so.

        Copies run beside other work: `wait` of the result, if another program is to have the memory. Gradients are freed, and
        those of the last step are gone. Raises RunError `step-running` within a step, StateError `step-failed` after a step or
        an evaluation that failed, of several ranks, and UsageError `no-offload` for a part that no `[[offload]]` of the plan
        moves, `no-part` for one that there is not.
        """
        self.settle()
        self.check_free()
        self.follow()
        waits = [manager.offload(part) for part, manager in reversed(self._chosen(parts))]
        return Move(waits, self.inventory.device)

    @on_stream
    def onload(self, *parts: Part) -> Move:
        """Starts to bring `parts`, or all, back to the device; returns what waits for that. Parts that are here stay so. Raises
        RunError `step-running` within a step, and UsageError as `offload`.
        """
        self.settle()
        return Move([manager.onload(part) for part, manager in self._chosen(parts)])

    def require(self, caller: str, parts: Iterable[Part]) -> None:
        """Makes the device wait for `parts` in transfer. caller: such as "a step". Raises StateError `memory-away`."""
        for manager in self.managers:
            for part in parts:
                if part in manager.parts:
                    manager.require(part, caller)

    def follow(self, reader: str | None = None) -> None:
        """Lets masters take over what a program wrote to weights, if both are here; whoever reads masters calls this first.

        reader: what masters are read for, as "a checkpoint"; None if nothing reads them now. With a reader, raises StateError
        `memory-away` if a program wrote weights and one of the two is away. Raises RunError `weight-replaced`.
        """
        try:
            self.require(f"{reader} after a program has written weights", ("weights", "masters"))
        except StateError:
            if reader is not None and self.masters.have_outside_writes:
                raise
        else:
            self.masters.follow()

    @property
    def report(self) -> dict[Part, Moved]:
        """Returns the cost of moving each part since the start of the run, for the parts that a manager moves."""
        costs: dict[Part, Moved] = {}
        for manager in self.managers:
            costs.update({part: manager.moved(part) for part in manager.parts})
        return costs

    @on_stream
    def host(self, part: Part) -> Iterator[tuple[str, Tensor]]:
        """Yields name and value of each tensor of `part`, on the host, without bringing any to the device: a checkpoint of a
        run whose memory is away. Names, shapes and dtypes are those of the part, scalars of the optimizer included.

        What is away is shown where it lies: read it before the next offload, and write nothing. Of sharded weights, the shards
        of this rank. Waits for copies to the host. Raises UsageError `not-copied` for a part whose memory is freed, not copied,
        and StateError `memory-away` where this rank's host has only a part of what is away.
        """
        self.settle()
        if part not in COPIED:
            hint = f"remove it from the call, or use one of {', '.join(COPIED)}"
            raise UsageError("not-copied", f"an offload makes no copy of a run's {part.replace('_', ' ')}", hint=hint)
        if part == "masters":
            self.follow("reading masters")
        copies = self._copies()
        return ((name, _on_host(part, tensor, copies)) for name, tensor in self.inventory.everything(part))

    def at_rest(self) -> Callable[[Tensor], Tensor]:
        """Returns a function that gives each tensor of the run where it lies: itself, or while its memory is away, or not back
        yet, the host's copy. Nothing is copied or brought. Waits for copies to the host. The function raises StateError
        `memory-away` where this rank's host has only a part of what is away.
        """
        return partial(_current_memory, self._copies())

    def _copies(self) -> dict[int, Tensor]:
        """Returns the host's copies of all that is away or coming, by `storage_id`, uint8 [bytes]; one per storage."""
        return {key: copy for manager in self.managers for part in manager.parts for key, copy in manager.host(part).items()}

    def _chosen(self, parts: Sequence[Part]) -> list[tuple[Part, OffloadManager]]:
        """Returns `parts`, or all that move if it is empty, with their managers, in the order in which they come back.

        Raises UsageError `no-part` for a part that there is not, `no-offload` for one that nothing in the plan moves.
        """
        of_part = {part: manager for manager in self.managers for part in manager.parts}
        for part in parts:
            if part not in PARTS:
                raise UsageError("no-part", f"a run's memory has no part {part!r}", hint=f"use one of {', '.join(PARTS)}")
            if part not in of_part:
                raise _no_offload_error(part)
        if not of_part:
            raise _no_offload_error("memory")
        return [(part, of_part[part]) for part in PARTS if part in (parts or of_part)]


def _on_host(part: Part, tensor: Tensor, copies: Mapping[int, Tensor]) -> Tensor:
    """Returns a tensor's value on the host: the view of its copy if it is away, else a new copy."""
    source = _current_memory(copies, tensor, part)
    return source.detach().to("cpu", copy=True) if source is tensor else source


def _current_memory(copies: Mapping[int, Tensor], tensor: Tensor, part: str = "a part of the run") -> Tensor:
    """Returns `tensor`, or if its storage has a copy on the host, the view of that copy. Raises StateError `memory-away` if its
    memory is freed and the host has no whole copy. part: for the message.
    """
    copy = copies.get(storage_id(tensor))
    if copy is None and tensor.numel() and not tensor.untyped_storage().nbytes():
        raise StateError.away(part, "reading on the host")
    return tensor if copy is None else view_in_copy(tensor, copy)


def _no_offload_error(part: str) -> UsageError:
    message = f"no offload manager in the plan moves the run's {part.replace('_', ' ')}"
    return UsageError("no-offload", message, hint='add [[offload]] with `use = "memory.everything"` (package sley-memory)')


GB = 10**9


class ManagerCounts:
    """Reports the parts that a manager has moved, as `protocols.Counts`."""

    def __init__(self, manager: OffloadManager) -> None:
        self._manager = manager

    def counts(self) -> Mapping[str, float]:
        """Returns, by `<part>_<number>`, what moving each part has cost, without zeros; GB/s where seconds are known."""
        numbers: dict[str, float] = {}
        for part in self._manager.parts:
            numbers |= {f"{part}_{name}": value for name, value in self._manager.moved(part).numbers().items() if value}
        return numbers


class OffloadMetrics:
    """Adds numbers to each row of a run that has `[[offload]]`, since the row before: three over all parts, and three for each
    of `parts` that has a copy on the host; 0 if nothing moved. managers: those of the run.

    offload/gb, offload/weights_gb, ...: copied either way, the sum over ranks. offload/s, offload/weights_s, ...: the mean over
    ranks, of copies whose end the host has seen; offload/gb_per_s, offload/weights_gb_per_s, ...: their mean rate.
    """

    def __init__(self, numbers: StepNumbers, num_ranks: int, managers: Sequence[OffloadManager], parts: Iterable[str]) -> None:
        self.managers = managers
        self._num_ranks = num_ranks
        self._before: dict[str, tuple[float, float, float]] = {}
        # a plan's parts, in the order of `COPIED`: the same names on all ranks
        for part in (None, *(part for part in COPIED if part in set(parts))):
            prefix = "offload/" if part is None else f"offload/{part}_"
            numbers.add(f"{prefix}gb", partial(self._gb, part))
            numbers.add(f"{prefix}s", partial(self._seconds, part))
            numbers.add(f"{prefix}gb_per_s", partial(self._rate, part))

    def _gb(self, part: Part | None) -> float:
        return self._since("gb", part)[0] / GB

    def _seconds(self, part: Part | None) -> float:
        return self._since("seconds", part)[2] / self._num_ranks

    def _rate(self, part: Part | None) -> float:
        _, num_timed, seconds = self._since("rate", part)
        return num_timed / GB / seconds / self._num_ranks if seconds else 0.0

    def _since(self, name: str, part: Part | None) -> tuple[float, float, float]:
        """Returns the bytes copied since the last call with this `name` and `part`, those of timed copies, and their time."""
        costs = [manager.moved(one) for manager in self.managers for one in manager.parts if part is None or one == part]
        current = (
            float(sum(cost.copied_out + cost.copied_in for cost in costs)),
            float(sum(cost.timed_out + cost.timed_in for cost in costs)),
            sum(cost.seconds_out + cost.seconds_in for cost in costs),
        )
        key = f"{name} {part}"
        before = self._before.get(key, (0.0, 0.0, 0.0))
        self._before[key] = current
        return current[0] - before[0], current[1] - before[1], current[2] - before[2]
