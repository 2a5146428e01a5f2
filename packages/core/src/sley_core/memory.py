"""Defines the parts of a run's memory, with the location, the storages and the transfer costs of each; the interface of offload
managers; and the device pool.

The pool lends a buffer for a `with` block. It rounds sizes up, so that buffers of almost equal sizes can reuse the same memory:

    requested bytes         1 .. 256   .. 512 ..        4096    4608    5120  ..  8192    9216 ..
    bytes of the block         256        512           4096    4608    5120      8192    9216
                            multiples of 256 below 2048, then 8 sizes from each power of two to the next

Above 2048 bytes, a block is at most an eighth larger than the request, and about a sixteenth on average.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, get_args
from weakref import WeakSet

import torch
from torch import Tensor

from sley_core.comm.device import free, reallocate, storage_id

if TYPE_CHECKING:
    from sley_core.engine.gradients import GradientStore
    from sley_core.engine.parts import Parts
    from sley_core.engine.weights import OptimizerParam


Part = Literal["weights", "buffers", "masters", "optimizer_states", "gradients", "handlers", "pools"]
"""A part of the memory that a run keeps between steps.

weights: parameters, or with `wp` their shards. buffers: the buffers of modules. masters: the full-precision copies of weights.
optimizer_states: the optimizer's states of parameters. gradients: the buffers of the gradient store. handlers: the tensors of
gradient handlers, such as PowerSGD's errors. pools: the buffers of the device pool, most of which are free between steps.
"""

PARTS: tuple[Part, ...] = get_args(Part)
"""All parts, in the order of the type. A storage that several parts use belongs to the first of them."""

COPIED_PARTS: tuple[Part, ...] = ("weights", "buffers", "masters", "optimizer_states", "handlers")
"""The parts that an offload copies to the host; the other parts are freed without a copy."""


class Where(Enum):
    """The location of a part: HERE ─ offload ─> LEAVING ─ copies done ─> AWAY ─ onload ─> COMING ─ copies done ─> HERE."""

    HERE = "here"
    LEAVING = "leaving"
    AWAY = "away"
    COMING = "coming"


@dataclass
class Moved:
    """The cost of all transfers of a part since the start of the run.

    copied_out, copied_in: the numbers of bytes copied off and onto the device. given_back: the size in bytes of the device
    memory that the last offload freed. seconds_out, seconds_in: the total duration of all copies that the host knows to be
    complete. timed_out, timed_in: the sizes of these copies in bytes. host_bytes: the host memory that the part uses, in bytes.
    """

    copied_out: int = 0
    copied_in: int = 0
    given_back: int = 0
    seconds_out: float = 0.0
    seconds_in: float = 0.0
    timed_out: int = 0
    timed_in: int = 0
    host_bytes: int = 0


class OffloadManager(Protocol):
    """Moves parts of a run's memory off the device and back. The plan's list `[[offload]]` names it.

    A manager frees and allocates storages (`StorageEntry.free`, `reallocate`), so tensors stay the same objects. Only
    `offload`, `onload` and `detach` may communicate, and only if the manager's table allows it.
    """

    @property
    def parts(self) -> Sequence[Part]:
        """The parts of the run's memory that the manager moves."""
        ...

    def attach(self, parts: Parts, inventory: MemoryInventory) -> None:
        """Prepares to move the memory in `inventory`. Called once, after all parts of the run are built. Not called if tensors
        have no memory, as in an estimate.
        """

    def offload(self, part: Part) -> Callable[[], None]:
        """Starts to move `part` off the device, unless it is already off. Returns a function that waits until it is off."""
        ...

    def onload(self, part: Part) -> Callable[[], None]:
        """Starts to move `part` back to the device, unless it is there. Returns a function that waits until it is there."""
        ...

    def require(self, part: Part, caller: str) -> None:
        """Makes the device wait for the onload of `part` in progress. Raises StateError "memory-away" if the part is offloaded
        and the manager does not onload it by itself. caller: the operation that needs the part, for the error.
        """
        ...

    def where(self, part: Part) -> Where: ...

    def moved(self, part: Part) -> Moved: ...

    def host(self, part: Part) -> Mapping[int, Tensor]:
        """Returns the host copies, uint8 [bytes], of the storages of `part` that are not on the device, by `storage_id`. The
        copies are complete, and valid until the next offload.
        """
        return {}

    def detach(self) -> None:
        """Moves weights and buffers back to the device. Called when the run closes."""


NamedTensors = Callable[[], Iterable[tuple[str, Tensor]]]
"""A function that yields (name, tensor) pairs."""


class StorageEntry(NamedTuple):
    """A storage on the device. memory: all of it, uint8 [bytes]. tensors: the tensors in it, by name."""

    memory: Tensor
    tensors: dict[str, Tensor]

    def free(self) -> int:
        """Frees the memory and returns the number of freed bytes. The tensors stay valid objects, but no computation may use
        them until `reallocate` is called: on a CPU, this crashes the process.
        """
        return free(self.memory)

    def reallocate(self) -> None:
        """Allocates the freed memory again; its contents are undefined."""
        reallocate(self.memory, self.memory.numel())


@dataclass(eq=False)
class MemoryInventory:
    """Lists the memory that the run uses on this rank's `device`, by part.

    _sources: for each part, a function that yields (name, tensor) pairs. Each method calls it again, because optimizers create
    states late and pools grow. _states_of: a function that yields these pairs for the optimizer states of a parameter. trim: a
    function that frees the unused memory of the pool and returns the number of freed bytes.

    Tensors on other devices, such as AdamW's step counts on the host, are not listed. Nor are scalar optimizer states, because
    each would need a separate copy of a few bytes.
    """

    device: torch.device
    store: GradientStore
    _sources: Mapping[Part, NamedTensors]
    _states_of: Callable[[OptimizerParam], Iterable[tuple[str, Tensor]]]
    trim: Callable[[], int]

    def all_tensors(self, part: Part) -> Iterator[tuple[str, Tensor]]:
        """Yields the name and value of each tensor of `part`, including scalars and tensors on the host."""
        return iter(self._sources[part]())

    def tensors(self, part: Part) -> Iterator[tuple[str, Tensor]]:
        """Yields the name and value of each tensor of `part` on the device, even if it is offloaded, except scalar states."""
        for name, tensor in self._sources[part]():
            if self._is_state(tensor) if part == "optimizer_states" else tensor.device == self.device:
                yield name, tensor

    def storages(self, part: Part) -> list[StorageEntry]:
        """Returns each storage of `part` on the device once, except storages that an earlier part of `PARTS` also uses."""
        earlier_ids = self._storage_ids_before(part)
        return [entry for entry in group_by_storage(self.tensors(part)) if storage_id(entry.memory) not in earlier_ids]

    def state_storages(self, params: Sequence[OptimizerParam]) -> list[StorageEntry]:
        """Returns each storage of the optimizer states of `params` once; [] before the first step."""
        states = chain.from_iterable(map(self._states_of, params))
        return group_by_storage((name, state) for name, state in states if self._is_state(state))

    def storage_ids_without(self, params: Sequence[OptimizerParam]) -> set[int]:
        """Returns the `storage_id`s of the optimizer states of all other parameters, and of the parts that come before the
        optimizer states in `PARTS`. None of these storages may be offloaded with the states of `params`.
        """
        ids = {id(state) for param in params for _, state in self._states_of(param)}
        other_states = (state for _, state in self._sources["optimizer_states"]() if id(state) not in ids)
        return self._storage_ids_before("optimizer_states") | set(map(storage_id, other_states))

    def num_bytes(self, part: Part) -> int:
        """Returns the number of bytes that `part` occupies on the device; 0 while it is offloaded."""
        return sum({storage_id(tensor): tensor.untyped_storage().nbytes() for _, tensor in self.tensors(part)}.values())

    def _storage_ids_before(self, part: Part) -> set[int]:
        return {storage_id(tensor) for earlier in PARTS[: PARTS.index(part)] for _, tensor in self.tensors(earlier)}

    def _is_state(self, tensor: Tensor) -> bool:
        return tensor.device == self.device and tensor.dim() > 0


def group_by_storage(tensors: Iterable[tuple[str, Tensor]]) -> list[StorageEntry]:
    """Returns each storage of `tensors` once, with its tensors by name."""
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
    """Returns a view of `copy` with the dtype, shape, strides and storage offset of `tensor`. copy: a copy of the tensor's
    storage, uint8 [bytes], whose own storage offset is a multiple of the dtype's size.
    """
    start, remainder = divmod(int(copy.storage_offset()), tensor.dtype.itemsize)
    assert remainder == 0, f"a copy of {tensor.dtype} starts at byte {copy.storage_offset()}"
    view = torch.empty(0, dtype=tensor.dtype, device=copy.device)
    return view.set_(copy.untyped_storage(), start + tensor.storage_offset(), tensor.shape, tensor.stride())


ALIGNMENT_BYTES = 256
"""The alignment in bytes of views in a buffer and of CUDA's memory. It allows vector loads and NCCL's fast copies."""


def round_up(size: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def block_bytes(num_bytes: int) -> int:
    """Returns the smallest block size that fits `num_bytes`. Block sizes are the multiples of 256 bytes up to 2048, and then
    eight sizes from each power of two to the next, so a block of more than 2048 bytes exceeds the request by at most an eighth.
    """
    power = 1 << max(num_bytes - 1, 1).bit_length() - 1  # the largest power of two below `num_bytes`
    return round_up(max(1, num_bytes), max(ALIGNMENT_BYTES, power // 8))


class _Block:
    """Holds `memory`, uint8 [num_bytes], whose address is a multiple of ALIGNMENT_BYTES. key: the device and the block size.
    num_allocated: the allocated bytes, including bytes skipped for the alignment.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        # The host's allocator aligns to 64 bytes; a device's aligns to 256.
        self.num_allocated = num_bytes + (ALIGNMENT_BYTES if device.type == "cpu" else 0)
        with torch.inference_mode(False):  # an inference tensor could not be used in training later
            allocation = torch.empty(self.num_allocated, dtype=torch.uint8, device=device)
            start = -allocation.data_ptr() % ALIGNMENT_BYTES
            self.memory = allocation[start : start + num_bytes]
        self.key = device, num_bytes
        self._view = self.memory

    def view(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns a tensor over the first bytes: the same object as in the last call if shape and dtype are equal."""
        if (self._view.shape, self._view.dtype) != (shape, dtype):
            with torch.inference_mode(False):
                self._view = self.memory[: prod(shape) * dtype.itemsize].view(dtype).view(shape)
        return self._view


class DevicePool:
    """Lends tensors of any shape and dtype, aligned to 256 bytes, in blocks whose sizes are rounded up.

    All blocks use at most twice the largest number of bytes lent at the same time. At this limit, the pool lends a larger free
    block, or else releases the blocks that have been unused the longest. If a `with` block never ends, because its generator is
    closed, the block of memory leaves the pool.
    """

    def __init__(self) -> None:
        self.num_allocations = 0
        self.num_leases = 0
        self._max_lent = 0
        # The free blocks with each key are in the order of their last use, the oldest first.
        self._free: dict[tuple[torch.device, int], list[_Block]] = {}
        # Weak references: a failed step loses its leases. Peers may still write to their buffers, which the last user frees.
        self._lent: WeakSet[_Block] = WeakSet()

    @property
    def num_lent(self) -> int:
        return len(self._lent)

    @property
    def num_bytes(self) -> int:
        """The size in bytes of all blocks, lent or free."""
        return sum(block.num_allocated for block in self._all_blocks())

    @contextmanager
    def lease(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
        """Lends a buffer for a `with` block. Its contents are undefined. Allocates memory, if necessary, only on entry."""
        block = self._acquire(prod(shape) * dtype.itemsize, device)
        is_lost = False
        try:
            yield block.view(tuple(shape), dtype)
        except GeneratorExit:
            is_lost = True
            raise
        finally:
            if not is_lost:
                self._lent.remove(block)
                self._free[block.key] = [*self._free.pop(block.key, []), block]

    def trim(self) -> int:
        """Frees every block that is not lent; returns the number of freed bytes."""
        num_bytes = sum(block.num_allocated for blocks in self._free.values() for block in blocks)
        self._free.clear()
        return num_bytes

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the name and the memory, uint8 [bytes], of every block, lent or free."""
        num_lent = len(self._lent)
        for number, block in enumerate(self._all_blocks()):
            yield (f"lent.{number}" if number < num_lent else f"free.{number - num_lent}"), block.memory

    def counts(self) -> dict[str, float]:
        """Returns the memory in bytes of all and of lent blocks, the numbers of allocations and leases, and the hit rate."""
        return {
            "held_bytes": self.num_bytes,
            "lent_bytes": sum(block.num_allocated for block in self._lent),
            "allocations": self.num_allocations,
            "leases": self.num_leases,
            "hit_rate": 1 - self.num_allocations / self.num_leases if self.num_leases else 0.0,
        }

    def _all_blocks(self) -> list[_Block]:
        return [*self._lent, *(block for blocks in self._free.values() for block in blocks)]

    def _acquire(self, num_bytes: int, device: torch.device) -> _Block:
        key = device, block_bytes(num_bytes)
        block = self._pop_free(key) if key in self._free else self._pop_larger(*key)
        if block is None:
            block = _Block(*key)
            self.num_allocations += 1
        self._lent.add(block)
        self.num_leases += 1
        return block

    def _pop_larger(self, device: torch.device, size: int) -> _Block | None:
        """Returns the smallest free block of at least `size` bytes if a new block would exceed the limit of the pool, else
        None. If no free block is large enough, releases the blocks that have been unused the longest.
        """
        self._max_lent = max(self._max_lent, size + sum(block.num_allocated for block in self._lent))
        if self.num_bytes + size > 2 * self._max_lent:
            if keys := [key for key in self._free if key[0] == device and key[1] >= size]:
                return self._pop_free(min(keys, key=lambda key: key[1]))
            while self._free and self.num_bytes + size > 2 * self._max_lent:
                self._pop_free(next(iter(self._free)), 0)
        return None

    def _pop_free(self, key: tuple[torch.device, int], index: int = -1) -> _Block:
        """Removes a free block with the key `key` and returns it; by default, the block that was used last."""
        block = self._free[key].pop(index)
        if not self._free[key]:
            del self._free[key]
        return block
