"""The memory that a run keeps between steps, by part and by storage; reports and offload managers share this list."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from sley_core.comm.copies import free, grow, storage_id
from sley_core.memory.state import PARTS, Part

if TYPE_CHECKING:
    import torch

    from sley_core.engine.gradients import GradientStore
    from sley_core.engine.weights import Stepped

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
    states late and pools grow. trim: frees the memory of a part ("pools" or "messages") that can be allocated again, and
    returns the number of freed bytes.

    Tensors on other devices (AdamW's step counts, on the host) are not listed. Scalar optimizer states are not listed either,
    because each would need a separate copy of a few bytes.
    """

    device: torch.device
    store: GradientStore
    _sources: Mapping[Part, NamedTensors]
    _states_of: Callable[[Stepped], Iterable[tuple[str, Tensor]]]
    trim: Callable[[Part], int]

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
    import torch

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
    import torch

    start, remainder = divmod(int(copy.storage_offset()), tensor.dtype.itemsize)
    assert remainder == 0, f"a copy of {tensor.dtype} starts at byte {copy.storage_offset()}"
    view = torch.empty(0, dtype=tensor.dtype, device=copy.device)
    return view.set_(copy.untyped_storage(), start + tensor.storage_offset(), tensor.shape, tensor.stride())
