"""Defines `run.memory`, which reports the memory of a run on one rank and moves it off the device and back."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch

from sley_core.comm.device import Device, on_stream, storage_id
from sley_core.engine.parts import StepNumbers
from sley_core.engine.weights import MasterWeights
from sley_core.errors import StateError, UsageError
from sley_core.memory import COPIED_PARTS, PARTS, MemoryInventory, Moved, OffloadManager, Part, Where, view_in_copy

STEP_PARTS = PARTS  # the parts of the memory that must be on the device to take a step
EVALUATION_PARTS: tuple[Part, ...] = ("weights", "buffers", "pools")  # must be on the device to evaluate or predict
LOAD_PARTS: tuple[Part, ...] = ("weights", "buffers", "masters")  # must be on the device to load weights
RESTORE_PARTS: tuple[Part, ...] = (*LOAD_PARTS, "optimizer_states", "handlers")  # must be there to restore a checkpoint
SAVE_PARTS: dict[str, tuple[Part, ...]] = {"working": ("weights", "buffers"), "full": LOAD_PARTS}
"""The parts of the memory that must be on the device to save weights, keyed by the `precision` of the saved weights."""


class Move:
    """A transfer of memory in progress. The run's own methods wait for it; call `wait` before other code uses the memory."""

    def __init__(self, waits: Sequence[Callable[[], None]], offloaded_from: torch.device | None = None) -> None:
        self._waits = waits
        self._offloaded_from = offloaded_from

    def wait(self) -> None:
        """Blocks the host until all copies are done. After an offload from CUDA, also empties the cache of the allocator."""
        for wait in self._waits:
            wait()
        if self._offloaded_from is not None and self._offloaded_from.type == "cuda":
            torch.cuda.empty_cache()


@dataclass(eq=False)
class RunMemory:
    """Reports the memory of one rank's run by part (`sley_core.memory.PARTS`), and moves it off the device and back.

        run.memory.offload().wait()       # between two steps: other programs may use the device
        ...
        run.memory.onload()               # the next step gives the same numbers as without an offload

    Ranks may offload independently, unless the transfers of a manager communicate. inventory: lists the tensors by part.
    managers: the plan's offload managers, already attached. masters: the master weights. wait_until_idle: waits until no step
    is in progress. check_idle: raises StateError if exchanges of a failed step are still in progress.
    """

    device: Device
    inventory: MemoryInventory
    managers: Sequence[OffloadManager]
    masters: MasterWeights
    wait_until_idle: Callable[[], None] = lambda: None
    check_idle: Callable[[], None] = lambda: None

    @property
    def bytes(self) -> dict[str, int]:
        """The number of bytes that each part occupies on the device; 0 for optimizer states before the first step."""
        return {part: self.inventory.num_bytes(part) for part in PARTS}

    @property
    def where(self) -> dict[Part, Where]:
        """The location of each part: `Where.HERE` is the device. A part without a manager is always on the device."""
        return dict.fromkeys(PARTS, Where.HERE) | {part: manager.where(part) for part, manager in self._managers.items()}

    @on_stream
    def offload(self, *parts: Part) -> Move:
        """Starts to move `parts`, or all parts that have a manager, off the device. Skips offloaded parts.

        Copies run in parallel with other work. Call `wait` of the result before another program uses the memory. Offloaded
        gradients are freed and lost. Raises RunError "step-running" within a step, StateError "step-failed" after a failed step
        or evaluation of several ranks, and UsageError "no-part" for an unknown part, "no-offload" for a part without a manager.
        """
        self.wait_until_idle()
        self.check_idle()
        self.update_masters()
        waits = [manager.offload(part) for part, manager in reversed(self._managed_parts(parts))]
        return Move(waits, self.inventory.device)

    @on_stream
    def onload(self, *parts: Part) -> Move:
        """Starts to move `parts`, or all parts that have a manager, back to the device. Skips parts that are on the device.
        Raises RunError "step-running" within a step, and UsageError "no-part" or "no-offload".
        """
        self.wait_until_idle()
        return Move([manager.onload(part) for part, manager in self._managed_parts(parts)])

    def require(self, caller: str, parts: Iterable[Part]) -> None:
        """Makes the device wait for transfers of `parts`. caller: the operation that needs these parts, such as "a step".
        Raises StateError "memory-away" if one of these parts is offloaded.
        """
        managers = self._managers
        for part in parts:
            if part in managers:
                managers[part].require(part, caller)

    def update_masters(self, reader: str | None = None) -> None:
        """If weights and masters are on the device, copies changes that a program has made to the weights into the masters.

        reader: the purpose of a read that follows, such as "a checkpoint", or None. With a reader, raises StateError
        "memory-away" if written weights or masters are offloaded. Raises RunError "weight-replaced" for a replaced weight.
        """
        try:
            self.require(f"{reader} after a program has written weights", ("weights", "masters"))
        except StateError:
            if reader is not None and self.masters.has_outside_writes:
                raise
        else:
            self.masters.copy_outside_writes()

    @property
    def report(self) -> dict[Part, Moved]:
        """The cost (bytes and seconds) of all transfers so far, for each part that has a manager."""
        return {part: manager.moved(part) for part, manager in self._managers.items()}

    @on_stream
    def host(self, part: Part) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the name and value of each tensor of `part` on the host, without moving anything to the device.

        Names, shapes and dtypes are the same as on the device. A sharded weight yields this rank's shard. Values of offloaded
        tensors are views, which are valid until the next offload and must not be written. Waits for copies to the host. Raises
        UsageError "not-copied" for a part that an offload frees without a copy, StateError "memory-away" if this rank's host
        has only a part of the copy, and RunError "step-running" within a step.
        """
        self.wait_until_idle()
        if part not in COPIED_PARTS:
            hint = f"remove it from the call, or use one of {', '.join(COPIED_PARTS)}"
            raise UsageError("not-copied", f"an offload makes no copy of a run's {part.replace('_', ' ')}", hint=hint)
        if part == "masters":
            self.update_masters("reading masters")
        copies = self._copies()

        def value(tensor: torch.Tensor) -> torch.Tensor:
            memory = _find_memory(copies, tensor, part)
            return memory.detach().to("cpu", copy=True) if memory is tensor else memory

        return ((name, value(tensor)) for name, tensor in self.inventory.all_tensors(part))

    def memory_lookup(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Returns a function that maps a tensor of the run to its current memory: the tensor itself, or its copy on the host
        while it is offloaded or in transfer. First waits for copies to the host. The function raises StateError "memory-away"
        if this rank's host has only a part of the copy.
        """
        return partial(_find_memory, self._copies())

    @property
    def _managers(self) -> dict[Part, OffloadManager]:
        return {part: manager for manager in self.managers for part in manager.parts}

    def _copies(self) -> dict[int, torch.Tensor]:
        """Returns the host's copies (uint8 [bytes]) of the storages that are offloaded or in transfer, by `storage_id`."""
        return {key: copy for part, manager in self._managers.items() for key, copy in manager.host(part).items()}

    def _managed_parts(self, parts: Sequence[Part]) -> list[tuple[Part, OffloadManager]]:
        """Returns `parts`, or all parts that have a manager, with their managers, in the order of `PARTS`."""
        managers = self._managers
        if unknown := [part for part in parts if part not in PARTS]:
            raise UsageError("no-part", f"a run's memory has no part {unknown[0]!r}", hint=f"use one of {', '.join(PARTS)}")
        missing: list[str] = [part for part in parts if part not in managers] or ([] if managers else ["memory"])
        if missing:
            message = f"no offload manager in the plan moves the run's {missing[0].replace('_', ' ')}"
            hint = 'add [[offload]] with `use = "memory.everything"` (package sley-memory)'
            raise UsageError("no-offload", message, hint=hint)
        return [(part, managers[part]) for part in PARTS if part in (parts or managers)]


def _find_memory(copies: Mapping[int, torch.Tensor], tensor: torch.Tensor, part: str = "a part of the run") -> torch.Tensor:
    """Returns `tensor`, or a view of its copy in `copies`. Raises StateError "memory-away" if the only memory was freed."""
    copy = copies.get(storage_id(tensor))
    if copy is None and tensor.numel() and not tensor.untyped_storage().nbytes():
        raise StateError.offloaded_error(part, "reading on the host")
    return tensor if copy is None else view_in_copy(tensor, copy)


def summarize_moves(manager: OffloadManager) -> dict[str, float]:
    """Returns the costs (bytes and seconds) of the manager's transfers, keyed by `<part>_<field of Moved>`, without zeros."""
    costs = {part: asdict(manager.moved(part)) for part in manager.parts}
    return {f"{part}_{name}": value for part, numbers in costs.items() for name, value in numbers.items() if value}


class OffloadMetrics:
    """Adds numbers about transfers to each metrics row of a run that has `[[offload]]`: in total, and for each of `parts` that
    is copied to the host (`offload/gb`, `offload/weights_gb`, ...). gb: the size of all copies in both directions since the
    previous row, in 10^9 bytes, summed over ranks. s: the duration of finished copies in seconds, a mean over ranks. gb_per_s:
    the mean rate.
    """

    def __init__(self, numbers: StepNumbers, num_ranks: int, managers: Sequence[OffloadManager], parts: Iterable[str]) -> None:
        self.managers = managers
        self._num_ranks = num_ranks
        self._totals: dict[tuple[str, Part | None], tuple[float, float, float]] = {}
        # the parts of the plan, in the order of `COPIED_PARTS`: the same names on all ranks
        for part in (None, *(part for part in COPIED_PARTS if part in set(parts))):
            prefix = "offload/" if part is None else f"offload/{part}_"
            for name in ("gb", "s", "gb_per_s"):
                numbers.add(prefix + name, partial(self._measure, name, part))

    def _measure(self, name: str, part: Part | None) -> float:
        """Returns this rank's share of "gb", "s" or "gb_per_s" since the previous call. part: None for all parts."""
        costs = [manager.moved(moved) for manager in self.managers for moved in manager.parts if part in (None, moved)]
        totals = (
            float(sum(cost.copied_out + cost.copied_in for cost in costs)),
            float(sum(cost.timed_out + cost.timed_in for cost in costs)),
            sum(cost.seconds_out + cost.seconds_in for cost in costs),
        )
        previous = self._totals.get((name, part), (0.0, 0.0, 0.0))
        self._totals[name, part] = totals
        num_bytes, num_timed, seconds = (new - old for new, old in zip(totals, previous, strict=True))
        if name == "gb":
            return num_bytes / 1e9
        if name == "s":
            return seconds / self._num_ranks
        return num_timed / 1e9 / seconds / self._num_ranks if seconds else 0.0
