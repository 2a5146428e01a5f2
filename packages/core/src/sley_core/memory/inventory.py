"""The parts of a run's memory, their locations and transfer costs, the interfaces that offloads use, and the list of storages
that reports and offload managers share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from itertools import chain
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from sley_core.comm.device import free, grow, storage_id

if TYPE_CHECKING:
    from sley_core.engine.gradients import GradientStore
    from sley_core.engine.parts import Parts
    from sley_core.engine.weights import Stepped


Part = Literal["weights", "buffers", "masters", "optimizer_states", "gradients", "handlers", "pools"]
"""A part of the memory that a run keeps between steps.

weights: parameters, or their shards with `wp`. buffers: the buffers of modules. masters: master weights. handlers: the tensors
of gradient handlers, such as PowerSGD's errors. pools: the buffers of the device pool, most of which are free
between steps.
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
    has seen. timed_out, timed_in: the bytes of these copies. host_bytes: the host memory of the part.
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


NamedTensors = Callable[[], Iterable[tuple[str, Tensor]]]


class StorageEntry(NamedTuple):
    """One storage with memory on the device. memory: a tensor over the full storage, uint8 [bytes]. tensors: the tensors in the
    storage by name.
    """

    memory: Tensor
    tensors: dict[str, Tensor]

    def free(self) -> int:
        """Frees the memory and returns the number of freed bytes. The tensors stay valid objects, but must not be used in
        computations before `grow`, which would crash the process on a CPU.
        """
        return free(self.memory)

    def grow(self) -> None:
        """Allocates the freed memory again; its contents are undefined."""
        grow(self.memory, self.memory.numel())


@dataclass(eq=False)
class MemoryInventory:
    """Lists the memory of one rank's run on `device`, by part.

    sources: a function that yields the (name, tensor) pairs of each part. Each method calls it again, because optimizers create
    states late and pools grow. trim: frees the unused memory of the pool and
    returns the number of freed bytes.

    Tensors on other devices (AdamW's step counts, on the host) are not listed. Scalar optimizer states are not listed either,
    because each would need a separate copy of a few bytes.
    """

    device: torch.device
    store: GradientStore
    _sources: Mapping[Part, NamedTensors]
    _states_of: Callable[[Stepped], Iterable[tuple[str, Tensor]]]
    trim: Callable[[], int]

    def all_tensors(self, part: Part) -> Iterator[tuple[str, Tensor]]:
        """Yields the name and tensor of all memory of `part`, including scalars and tensors on the host."""
        return iter(self._sources[part]())

    def tensors(self, part: Part) -> Iterator[tuple[str, Tensor]]:
        """Yields the name and tensor of the memory of `part` on the device, offloaded or not; no scalar optimizer states."""
        for name, tensor in self._sources[part]():
            if self._is_state(tensor) if part == "optimizer_states" else tensor.device == self.device:
                yield name, tensor

    def storages(self, part: Part) -> list[StorageEntry]:
        """Returns the storages of `part` on the device, each once, except those that an earlier part of `PARTS` also uses."""
        earlier_ids = self._storage_ids_before(part)
        return [entry for entry in group_by_storage(self.tensors(part)) if storage_id(entry.memory) not in earlier_ids]

    def state_storages(self, stepped: Sequence[Stepped]) -> list[StorageEntry]:
        """Returns the storages of the optimizer states of `stepped`, each once; [] before the first step."""
        states = chain.from_iterable(map(self._states_of, stepped))
        return group_by_storage((name, state) for name, state in states if self._is_state(state))

    def storage_ids_without(self, stepped: Sequence[Stepped]) -> set[int]:
        """Returns the `storage_id` of every storage except those of the states of `stepped`.

        A storage in the result must not be offloaded while only some parameters are stepped.
        """
        ids = {id(state) for tensor in stepped for _, state in self._states_of(tensor)}
        other_states = (state for _, state in self._sources["optimizer_states"]() if id(state) not in ids)
        return self._storage_ids_before("optimizer_states") | set(map(storage_id, other_states))

    def num_bytes(self, part: Part) -> int:
        """Returns the bytes of device memory of `part`; 0 while it is offloaded."""
        return sum({storage_id(tensor): tensor.untyped_storage().nbytes() for _, tensor in self.tensors(part)}.values())

    def _storage_ids_before(self, part: Part) -> set[int]:
        """Returns the `storage_id` of each storage on the device that a part before `part` uses."""
        return {storage_id(tensor) for earlier in PARTS[: PARTS.index(part)] for _, tensor in self.tensors(earlier)}

    def _is_state(self, tensor: Tensor) -> bool:
        """Returns whether an optimizer state is offloaded with its part: it is on the device and not a scalar."""
        return tensor.device == self.device and tensor.dim() > 0


def group_by_storage(tensors: Iterable[tuple[str, Tensor]]) -> list[StorageEntry]:
    """Returns the storages of `tensors`, each once, with their tensors by name."""
    tensors_by_storage: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        tensors_by_storage.setdefault(storage_id(tensor), {})[name] = tensor
    entries = []
    for named_tensors in tensors_by_storage.values():
        tensor = next(iter(named_tensors.values()))
        view = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        entries.append(StorageEntry(view, named_tensors))  # the view keeps its size while the memory is freed
    return entries


def view_in_copy(tensor: Tensor, copy: Tensor) -> Tensor:
    """Returns the view of `copy` that has the dtype, shape, strides and storage offset of `tensor`.

    copy: a copy of the tensor's storage, uint8 [bytes], which starts at a multiple of the dtype's size in its own storage.
    """
    start, remainder = divmod(int(copy.storage_offset()), tensor.dtype.itemsize)
    assert remainder == 0, f"a copy of {tensor.dtype} starts at byte {copy.storage_offset()}"
    view = torch.empty(0, dtype=tensor.dtype, device=copy.device)
    return view.set_(copy.untyped_storage(), start + tensor.storage_offset(), tensor.shape, tensor.stride())
