"""Defines movers. Each offloads and onloads one part of a run's memory, or one bucket of optimizer states.

        offload                                onload
HERE ────────────> LEAVING ──────────> AWAY ────────────> COMING ────────> HERE
      copy out, hold the device,              grow, follow,        `require`: the device
      free bucket by bucket                   copy in              waits for the copies
"""

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from sley_core.api.comm import CopyEvent, CopyStream
from sley_core.api.memory import MemoryInventory, Moved, OptimizerParam, StorageEntry, Where, is_plain, storage_id
from sley_core.api.parts import ALIGNMENT_BYTES, round_up, split_by_size
from sley_memory.arena import HostArena

_MAX_MERGED_BYTES = 1 << 20
"""The size in bytes of the largest storage that is merged with others. A larger copy takes much longer than its launch."""

_UNSHARED_USE_COUNT = 3
"""The use count of a storage without other views: its tensor, the view in `StorageEntry`, and the Python object."""

ListStorages = Callable[[], Sequence[StorageEntry]]
"""A function that returns the storages to move. They may differ between calls."""

StorageCopy = tuple[StorageEntry, torch.Tensor]
"""A storage, and the host memory of equal size that holds its bytes while it is offloaded."""

_MAX_PACKED_BYTES = 1 << 20
"""The largest size in bytes of tensors that torch's allocator packs into shared segments of driver memory."""

_ROUNDING_BYTES = 512
"""Torch's allocator rounds sizes up to multiples of this number of bytes."""


def reserve_segment(sizes: Iterable[int], device: torch.device) -> None:
    """Makes torch's allocator reserve one segment of device memory for tensors of `sizes` bytes, if its cache is too small.
    Does nothing on a CPU, or if the driver has no segment of that size. Without this call, each large tensor gets its own
    segment: on an H200, the driver takes 19 ms to allocate and 14 ms to free 336 segments of 21 MiB, but 0.5 ms and 3 ms for
    one of 7 GiB.
    """
    large_sizes = [round_up(size, _ROUNDING_BYTES) for size in sizes if size > _MAX_PACKED_BYTES]
    if device.type != "cuda" or len(large_sizes) < 2:
        return
    num_cached_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if num_cached_bytes < sum(large_sizes):
        with suppress(torch.OutOfMemoryError):
            torch.empty(sum(large_sizes), dtype=torch.uint8, device=device)  # freed at once, so torch keeps the segment


def merge_small(storages: Sequence[StorageEntry], max_bytes: int) -> list[StorageEntry]:
    """Merges small storages of one tensor each into storages of up to `max_bytes`, and returns all resulting storages. This
    makes copies faster, since a few hundred bytes take as long as 200 KB. The tensor objects stay the same. A tensor with other
    views keeps its storage, since the views would refer to the old memory. All memory must be on the device.
    """
    small = [storage for storage in storages if _is_mergeable(storage)]
    small_ids = {id(storage) for storage in small}
    result = [storage for storage in storages if id(storage) not in small_ids]
    for group in split_by_size(small, lambda storage: round_up(storage.memory.numel(), ALIGNMENT_BYTES), max_bytes):
        result += group if len(group) == 1 else [_merge_storages(group)]
    return result


def _is_mergeable(storage: StorageEntry) -> bool:
    """Returns whether a storage is resizable, has at most 1 MiB, and holds one plain tensor without other views."""
    if len(storage.tensors) > 1 or not 0 < storage.memory.numel() <= _MAX_MERGED_BYTES or not is_resizable(storage):
        return False
    (tensor,) = storage.tensors.values()
    if not is_plain(tensor) or tensor.requires_grad or tensor.is_inference():
        return False
    return bool(torch._C._storage_Use_Count(storage_id(tensor)) == _UNSHARED_USE_COUNT)


@torch.no_grad()
def _merge_storages(storages: Sequence[StorageEntry]) -> StorageEntry:
    """Moves the tensors of `storages` into one new storage and returns it; the tensor objects stay the same."""
    sizes = [round_up(storage.memory.numel(), ALIGNMENT_BYTES) for storage in storages]
    flat = torch.zeros(sum(sizes), dtype=torch.uint8, device=storages[0].memory.device)
    tensors: dict[str, torch.Tensor] = {}
    start = 0
    for storage, size in zip(storages, sizes, strict=True):
        flat[start : start + storage.memory.numel()].copy_(storage.memory)
        for name, tensor in storage.tensors.items():
            offset = start // tensor.itemsize + int(tensor.storage_offset())
            tensor.set_(flat.untyped_storage(), offset, tensor.shape, tensor.stride())
            tensors[name] = tensor
        start += size
    return StorageEntry(flat, tensors)


def is_resizable(entry: StorageEntry) -> bool:
    """Returns whether torch can free and grow the memory of `entry`: torch owns the memory, and no other process shares it."""
    storage = entry.memory.untyped_storage()
    # A host tensor shared between processes claims to be resizable, but growing it crashes the process.
    return storage.resizable() and not (entry.memory.device.type == "cpu" and storage.is_shared())


class Streams:
    """The copy streams of a manager: one per direction, since the link between device and host is full duplex."""

    def __init__(self, new_stream: Callable[[], CopyStream]) -> None:
        self.to_host = new_stream()
        self.to_device = new_stream()

    def wait(self) -> None:
        """Blocks the host until all copies so far are done."""
        self.to_host.record().wait()
        self.to_device.record().wait()


class TimedCopies(NamedTuple):
    """Copies in flight in one direction. end: the event after the copies. start_s: the time of their start, by
    `time.perf_counter`.
    """

    end: CopyEvent
    start_s: float
    num_bytes: int

    def finish(self, counters: Moved, *, to_host: bool) -> None:
        """Waits for the copies, and adds their duration, as measured on the host, and their bytes to `counters`."""
        self.end.wait()
        seconds = time.perf_counter() - self.start_s
        if to_host:
            counters.seconds_out += seconds
            counters.timed_out += self.num_bytes
        else:
            counters.seconds_in += seconds
            counters.timed_in += self.num_bytes


class Mover:
    """Offloads and onloads one part of a run's memory, and counts its copies in `counters`. This base class moves nothing.
    is_onloaded_automatically: whether the part returns to the device without a call of `onload` when it is needed.
    """

    is_onloaded_automatically = False

    def __init__(self, counters: Moved) -> None:
        self._counters = counters
        self._where = Where.HERE

    @property
    def where(self) -> Where:
        """The location of the part."""
        return self._where

    def offload(self) -> None:
        """Starts to offload the part, unless it is away or leaving."""

    def onload(self) -> None:
        """Starts to onload the part, unless it is here or coming."""

    def require(self) -> None:
        """Makes later device work wait for the part if it is coming."""

    def wait(self) -> None:
        """Blocks the host until copies in flight are done."""

    def host(self) -> Mapping[int, torch.Tensor]:
        """Returns host copies, uint8 [bytes], of storages that are not on the device, by `storage_id`. Waits for copies."""
        return {}

    def close(self) -> None:
        """Onloads the part for use after the run, and waits until it is here."""
        self.onload()
        self.wait()


class GradientMover(Mover):
    """Frees the gradients of `inventory.store` on offload, and allocates zeros on onload."""

    def __init__(self, inventory: MemoryInventory, counters: Moved) -> None:
        super().__init__(counters)
        self._inventory = inventory

    def offload(self) -> None:
        if self._where is Where.HERE:
            self._counters.given_back = self._inventory.num_bytes("gradients")
            self._inventory.store.free()
            self._where = Where.AWAY

    def onload(self) -> None:
        if self._where is Where.AWAY:
            self._inventory.store.build()
            self._where = Where.HERE


class PoolMover(Mover):
    """Frees unused memory of pools by calling `trim`, which returns the freed bytes. Pools allocate new memory when needed."""

    def __init__(self, trim: Callable[[], int], counters: Moved) -> None:
        super().__init__(counters)
        self._trim = trim

    def offload(self) -> None:
        self._counters.given_back = self._trim()


class HostCopyMover(Mover):
    """Copies storages to the host and back. Together, the storages are a part, or one bucket of optimizer states. bucket_bytes:
    the number of bytes to free or allocate at a time. reserves_segment: whether an onload first reserves device memory for all
    storages at once.
    """

    def __init__(
        self,
        list_storages: ListStorages,
        streams: Streams,
        arena: HostArena,
        bucket_bytes: int,
        counters: Moved,
        *,
        reserves_segment: bool = True,
    ) -> None:
        super().__init__(counters)
        self._list_storages = list_storages
        self._streams = streams
        self._arena = arena
        self._bucket_bytes = bucket_bytes
        self._reserves_segment = reserves_segment
        self._host_memory: dict[int, torch.Tensor] = {}
        self._offloaded: list[StorageCopy] = []
        self._copies: TimedCopies | None = None
        self._num_freed_bytes = 0
        self._has_warned = False

    @property
    def where(self) -> Where:
        """The location of the memory. Reading it ends a move whose copies are done."""
        if self._copies is not None and self._copies.end.is_done():
            self._finish_move()
        return self._where

    def offload(self) -> None:
        """Starts to copy all storages to the host, and frees their device memory. After an error, onloads all of them."""
        if self._where in (Where.LEAVING, Where.AWAY):
            return
        self.require()
        start_s = time.perf_counter()
        copies = self._allocate_copies()
        try:
            self._send(copies)
        except BaseException:
            self._offloaded = [copy for copy in copies if not copy[0].memory.untyped_storage().nbytes()]
            self._where = Where.AWAY
            self._start_onload()
            self.require()
            raise
        self._offloaded = copies
        num_bytes = sum(host.numel() for _, host in copies)
        self._counters.copied_out += num_bytes
        # Several movers may share counters, so each replaces only the number of bytes that its own last offload freed.
        self._counters.given_back += num_bytes - self._num_freed_bytes
        self._num_freed_bytes = num_bytes
        self._start_move(Where.LEAVING, start_s, num_bytes)

    def _send(self, copies: Sequence[StorageCopy]) -> None:
        """Copies all storages to the host and frees them, bucket by bucket."""
        # The copies read memory that earlier device work writes.
        self._streams.to_host.wait_for_device()
        for bucket in self._split_into_buckets(copies):
            for storage, host in bucket:
                self._streams.to_host.copy(host, storage.memory)
            # The allocator may reuse the memory for the next device work, which must wait for the copies.
            self._streams.to_host.record().make_device_wait()
            for storage, _ in bucket:
                storage.free()

    def onload(self) -> None:
        """Starts to allocate all storages on the device and copy them back."""
        if self._where in (Where.LEAVING, Where.AWAY):
            self._start_onload()

    def _start_onload(self) -> None:
        """Allocates all storages on the device, and starts to copy them back, bucket by bucket."""
        start_s = time.perf_counter()
        to_device = self._streams.to_device
        to_device.wait_for(self._streams.to_host.record())
        if self._reserves_segment and self._offloaded:
            reserve_segment((host.numel() for _, host in self._offloaded), self._offloaded[0][0].memory.device)
        for bucket in self._split_into_buckets(self._offloaded):
            for storage, _ in bucket:
                storage.reallocate()
            # The copies wait for earlier device work that used this memory.
            to_device.wait_for_device()
            for storage, host in bucket:
                to_device.copy(storage.memory, host)
        num_bytes = sum(host.numel() for _, host in self._offloaded)
        self._counters.copied_in += num_bytes
        self._start_move(Where.COMING, start_s, num_bytes)

    def require(self) -> None:
        """Makes later device work wait for the copies to the device, if they are in flight."""
        if self._where is Where.COMING:
            assert self._copies is not None, "memory comes without an event"
            self._copies.end.make_device_wait()
            self._where, self._copies, self._offloaded = Where.HERE, None, []

    def wait(self) -> None:
        """Blocks the host until copies in flight are done, and updates the location."""
        if self._copies is not None:
            self._finish_move()

    def host(self) -> Mapping[int, torch.Tensor]:
        if self._where is Where.LEAVING:
            self.wait()
        elif self._offloaded:  # coming: the copies to the host may be unfinished
            self._streams.to_host.record().wait()
        return {storage_id(storage.memory): host for storage, host in self._offloaded}

    def _start_move(self, target: Where, start_s: float, num_bytes: int) -> None:
        """Sets the location to `target`, with copies of `num_bytes` bytes in flight. Ends the move if they are done."""
        stream = self._streams.to_host if target is Where.LEAVING else self._streams.to_device
        self._where, self._copies = target, TimedCopies(stream.record(), start_s, num_bytes)
        self.where  # noqa: B018  # ends a synchronous copy now, so that its time is right

    def _finish_move(self) -> None:
        """Waits for the copies, counts their duration and size, and updates the location."""
        assert self._copies is not None, "no copy is in flight"
        self._copies.finish(self._counters, to_host=self._where is Where.LEAVING)
        if self._where is Where.LEAVING:
            self._where, self._copies = Where.AWAY, None
        else:
            self.require()

    def _allocate_copies(self) -> list[StorageCopy]:
        """Returns each resizable storage with its host memory. Allocates host memory for new storages. Releases the host memory
        of storages that no longer exist or have another size. Warns about the first storage that is not resizable.
        """
        storages = []
        for storage in self._list_storages():
            if storage.memory.numel() and is_resizable(storage):
                storages.append(storage)
            elif storage.memory.numel() and not self._has_warned:
                self._has_warned = True
                name = next(iter(storage.tensors))
                message = f"{name} stays on the device, since torch does not own its memory: another process or numpy does"
                warnings.warn(message, RuntimeWarning, 5)
        sizes = {storage_id(storage.memory): storage.memory.numel() for storage in storages}
        for key in [key for key, host in self._host_memory.items() if host.numel() != sizes.get(key)]:
            self._arena.release(self._host_memory.pop(key))
        new_sizes = {key: size for key, size in sizes.items() if key not in self._host_memory}
        self._host_memory.update(zip(new_sizes, self._arena.allocate([*new_sizes.values()], self._counters), strict=True))
        return [(storage, self._host_memory[storage_id(storage.memory)]) for storage in storages]

    def _split_into_buckets(self, copies: Sequence[StorageCopy]) -> list[list[StorageCopy]]:
        return split_by_size(copies, lambda copy: copy[1].numel(), self._bucket_bytes)


def split_params(params: Iterable[OptimizerParam], num_bytes: int) -> list[list[OptimizerParam]]:
    """Splits `params` into buckets whose parameters have at most `num_bytes` bytes. A larger parameter gets its own bucket."""
    return split_by_size(params, lambda param: param.parameter.nbytes, num_bytes)
