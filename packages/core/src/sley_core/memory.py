"""The parts of a run's memory: their locations and transfer costs, the interface of offload managers, the storages of each
part, and the device pool.

In the pool a buffer is lent for a `with` block, and buffers of almost equal sizes share memory:

    requested bytes         1 .. 256   .. 512 ..        4096    4608    5120  ..  8192    9216 ..
    bytes of the block         256        512           4096    4608    5120      8192    9216
                            multiples of 256 below 2048, then 8 sizes from each power of two to the next

A block is at most an eighth larger than the request, a sixteenth on average, and sequences of any lengths use a few dozen
sizes. With one size per doubling, as torch's pinned memory has, up to half of a block is wasted.
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
    """A part's location. HERE ── offload ──> LEAVING ── copies done ──> AWAY ── onload ──> COMING ── copies done ──> HERE"""

    HERE = "here"
    LEAVING = "leaving"
    AWAY = "away"
    COMING = "coming"


@dataclass
class Moved:
    """The cost of all transfers of a part since the start of the run.

    copied_out, copied_in: the copied bytes. given_back: the bytes of device memory that the last offload freed. seconds_out,
    seconds_in: the duration of the copies whose end the host has seen. timed_out, timed_in: the bytes of these copies.
    host_bytes: the host memory of the part.
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
    states late and pools grow. trim: frees the unused memory of the pool and returns the number of freed bytes.

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
    """Returns a view of `copy` with the dtype, shape, strides and storage offset of `tensor`.

    copy: a copy of the tensor's storage, uint8 [bytes], which starts at a multiple of the dtype's size in its own storage.
    """
    start, remainder = divmod(int(copy.storage_offset()), tensor.dtype.itemsize)
    assert remainder == 0, f"a copy of {tensor.dtype} starts at byte {copy.storage_offset()}"
    view = torch.empty(0, dtype=tensor.dtype, device=copy.device)
    return view.set_(copy.untyped_storage(), start + tensor.storage_offset(), tensor.shape, tensor.stride())


ALIGNMENT_BYTES = 256
"""The alignment of views in a buffer, the same as that of the CUDA allocator. It allows vector loads and NCCL's fast copies."""

MAX_LINEAR_UNITS = 8
"""Up to this many alignments, every multiple of the alignment is a block size."""

BLOCKS_PER_DOUBLING = 8
"""The number of block sizes from one power of two to the next."""


def round_up(size: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def block_bytes(num_bytes: int) -> int:
    """Returns the smallest block size that fits `num_bytes`, a multiple of 256."""
    units = max(1, round_up(num_bytes, ALIGNMENT_BYTES) // ALIGNMENT_BYTES)
    if units > MAX_LINEAR_UNITS:
        lower_power = 1 << (units - 1).bit_length() - 1  # the largest power of two below `units`
        units = round_up(units, lower_power // BLOCKS_PER_DOUBLING)
    return units * ALIGNMENT_BYTES


class _Block:
    """Holds `memory`, uint8 [num_bytes], which starts at a multiple of ALIGNMENT_BYTES.

    key: the device and the block size. num_allocated: the allocated bytes.
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
        """Returns a tensor on the block's first bytes; the same object as before for the same shape and dtype."""
        if (self._view.shape, self._view.dtype) != (shape, dtype):
            with torch.inference_mode(False):
                self._view = self.memory[: prod(shape) * dtype.itemsize].view(dtype).view(shape)
        return self._view


class DevicePool:
    """Lends views of exact shape and dtype, aligned to 256 bytes, of blocks whose sizes are rounded up.

    Blocks use at most twice the bytes that were ever lent at the same time. At this limit the pool lends a larger free block,
    or releases the blocks that have been unused the longest. The block of a lost lease leaves the pool.
    """

    def __init__(self) -> None:
        self.num_allocations = 0
        self.num_leases = 0
        self._max_lent = 0
        # The first sizes are those that have been unused the longest.
        self._free: dict[tuple[torch.device, int], list[_Block]] = {}
        # Weak: a failed step loses its leases. Their buffers may still be received into, and are freed with their last user.
        self._lent: WeakSet[_Block] = WeakSet()

    @property
    def num_lent(self) -> int:
        """The number of lent blocks."""
        return len(self._lent)

    @property
    def num_bytes(self) -> int:
        """The bytes of all blocks, lent or free."""
        return sum(block.num_allocated for block in self._all_blocks())

    @contextmanager
    def lease(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
        """Lends a buffer for one `with` block; its contents are undefined. Allocates at most when the block is entered."""
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
        """Yields every block, lent or free, as (name, uint8 tensor)."""
        num_lent = len(self._lent)
        for number, block in enumerate(self._all_blocks()):
            yield (f"lent.{number}" if number < num_lent else f"free.{number - num_lent}"), block.memory

    def counts(self) -> dict[str, float]:
        """Returns the bytes of all blocks and of lent blocks, and the numbers of allocations and leases."""
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
        """Returns a block that fits `num_bytes`, and marks it as lent."""
        key = device, block_bytes(num_bytes)
        block = self._pop_free(key) if key in self._free else self._pop_larger(*key)
        if block is None:
            block = _Block(*key)
            self.num_allocations += 1
        self._lent.add(block)
        self.num_leases += 1
        return block

    def _pop_larger(self, device: torch.device, size: int) -> _Block | None:
        """Returns the smallest free block of at least `size` bytes if a new block would exceed the limit of the pool.

        Returns None if a new block fits within the limit, or if no free block is large enough. In the latter case it first
        releases the blocks that have been unused the longest.
        """
        self._max_lent = max(self._max_lent, size + sum(block.num_allocated for block in self._lent))
        if self.num_bytes + size > 2 * self._max_lent:
            if keys := [key for key in self._free if key[0] == device and key[1] >= size]:
                return self._pop_free(min(keys, key=lambda key: key[1]))
            while self._free and self.num_bytes + size > 2 * self._max_lent:
                self._pop_free(next(iter(self._free)), 0)
        return None

    def _pop_free(self, key: tuple[torch.device, int], index: int = -1) -> _Block:
        """Removes a free block of a size and returns it, by default the block that was released last."""
        block = self._free[key].pop(index)
        if not self._free[key]:
            del self._free[key]
        return block
