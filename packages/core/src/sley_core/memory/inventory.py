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

Held = Callable[[], Iterable[tuple[str, Tensor]]]


class StorageEntry(NamedTuple):
    """One piece of memory, which is here: a tensor over its whole storage, uint8 [bytes], and what lies in it, by name."""

    memory: Tensor
    tensors: dict[str, Tensor]

    def free(self) -> int:
        """Frees the memory, whose tensors stay valid objects; returns the bytes freed. Before `grow` nothing may compute with
        the tensors: on a CPU that ends the process.
        """
        return free(self.memory)

    def grow(self) -> None:
        """Allocates the freed memory again; its contents are undefined."""
        grow(self.memory, self.memory.numel())


@dataclass(eq=False)
class MemoryInventory:
    """The memory of one rank's run on `device`, by part. sources: what yields `(name, tensor)` of each part, asked anew each
    time: optimizers make their states late, and pools grow. trim: frees what a part, "pools" or "messages", can allocate anew;
    returns the bytes freed.

    A tensor that lies elsewhere (the step counts of AdamW, on the host) is not listed, nor is one of dim 0 among the
    optimizer's states: a few bytes that would cost a copy each.
    """

    device: torch.device
    store: GradientStore
    _sources: Mapping[Part, Held]
    _states_of: Callable[[Stepped], Iterable[tuple[str, Tensor]]]
    trim: Callable[[Part], int]

    def everything(self, part: Part) -> Iterator[tuple[str, Tensor]]:
        """Yields name and tensor of all of `part`, also of what lies on the host or is a scalar."""
        return iter(self._sources[part]())

    def tensors(self, part: Part) -> Iterator[tuple[str, Tensor]]:
        """Yields name and tensor of what `part` holds on the device, also while it is away; of optimizer states no scalars."""
        for name, tensor in self._sources[part]():
            if self._is_state(tensor) if part == "optimizer_states" else tensor.device == self.device:
                yield name, tensor

    def pieces(self, part: Part) -> list[StorageEntry]:
        """Returns the storages that `part` holds on the device, and no earlier part of `PARTS`, each once, with its tensors."""
        taken = self._storage_ids_before(part)
        return [entry for entry in group_by_storage(self.tensors(part)) if storage_id(entry.memory) not in taken]

    def states_of(self, stepped: Sequence[Stepped]) -> list[StorageEntry]:
        """Returns the storages of these parameters' optimizer states, each once, with its tensors; none at first."""
        states = chain.from_iterable(map(self._states_of, stepped))
        return group_by_storage((name, state) for name, state in states if self._is_state(state))

    def storage_ids_without(self, stepped: Sequence[Stepped]) -> set[int]:
        """Returns what identifies (`storage_id`) each storage of everything but the states of these parameters: of earlier
        parts, and of other parameters' states. A storage that is among them cannot leave while only some parameters are
        stepped.
        """
        ids = {id(state) for tensor in stepped for _, state in self._states_of(tensor)}
        other_states = (state for _, state in self._sources["optimizer_states"]() if id(state) not in ids)
        return self._storage_ids_before("optimizer_states") | set(map(storage_id, other_states))

    def num_bytes(self, part: Part) -> int:
        """Returns the bytes of device memory that `part` has now; 0 while it is away."""
        return sum({storage_id(tensor): tensor.untyped_storage().nbytes() for _, tensor in self.tensors(part)}.values())

    def _storage_ids_before(self, part: Part) -> set[int]:
        """Returns what identifies (`storage_id`) each storage that the parts before `part` hold on the device."""
        return {storage_id(tensor) for before in PARTS[: PARTS.index(part)] for _, tensor in self.tensors(before)}

    def _is_state(self, tensor: Tensor) -> bool:
        """Returns whether an optimizer state moves with its part: it is on the device, and no scalar."""
        return tensor.device == self.device and tensor.dim() > 0


def group_by_storage(tensors: Iterable[tuple[str, Tensor]]) -> list[StorageEntry]:
    """Returns the storages of `tensors`, each once, with the tensors in it by name."""
    entries: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        entries.setdefault(storage_id(tensor), {})[name] = tensor
    return [StorageEntry(whole_storage(next(iter(tensors.values()))), tensors) for tensors in entries.values()]


def whole_storage(tensor: Tensor) -> Tensor:
    """Returns a view of the whole storage of `tensor`, uint8 [bytes]; it keeps its size while the memory is away."""
    import torch

    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(tensor.untyped_storage())


def view_in_copy(tensor: Tensor, memory: Tensor) -> Tensor:
    """Returns the view of `memory` that lies there as `tensor` does in its storage, of its dtype, shape and strides. memory: a
    copy of that storage, uint8 [bytes], which starts at a multiple of the dtype's size in its own storage.
    """
    import torch

    start, remainder = divmod(int(memory.storage_offset()), tensor.dtype.itemsize)
    assert remainder == 0, f"a copy of {tensor.dtype} starts at byte {memory.storage_offset()}"
    view = torch.empty(0, dtype=tensor.dtype, device=memory.device)
    return view.set_(memory.untyped_storage(), start + tensor.storage_offset(), tensor.shape, tensor.stride())
