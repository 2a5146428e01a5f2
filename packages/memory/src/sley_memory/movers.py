"""Movers: each offloads and onloads one part of a run's memory, or one bucket of optimizer states.

        offload                                onload
HERE ────────────> LEAVING ──────────> AWAY ────────────> COMING ────────> HERE
      copy out, hold the device,              grow, follow,        `require`: the device
      free bucket by bucket                   copy in              waits for the copies
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from sley_core.api.comm import CopyEvent, CopyStream
from sley_core.api.memory import Moved, Stepped, StorageEntry, Where, is_plain, storage_id
from sley_core.api.parts import ALIGNMENT_BYTES, round_up, split_by_size
from sley_memory.arena import HostArena

MAX_SMALL_BYTES = 1 << 20  # at 25 GB/s a larger copy takes 40 us or more, much longer than its launch

NUM_OWNERS = 3
"""The use count of a storage without other views: its tensor, the view in `StorageEntry`, and the Python object."""

MB = 10**6

Pieces = Callable[[], Sequence[StorageEntry]]

HostPlace = tuple[StorageEntry, Tensor, int]  # a piece, its host copy, and its bytes

SHARED_BYTES = 1 << 20
"""Torch's allocator packs tensors up to this size into shared segments of driver memory."""

ROUNDED_BYTES = 512
"""Torch's allocator rounds sizes up to a multiple of this."""


def make_room(sizes: Iterable[int], device: torch.device) -> None:
    """Reserves one segment of device memory in torch's allocator for tensors of `sizes` bytes, if its cache is too small. Does
    nothing on a CPU, or if the driver has no segment of that size.

    Otherwise each large tensor gets its own segment, and the driver is slow: on an H200 it takes 19 ms to allocate 336 segments
    of 21 MiB and 14 ms to free them, but 0.5 and 3 ms for one segment of 7 GiB.
    """
    large = [round_up(size, ROUNDED_BYTES) for size in sizes if size > SHARED_BYTES]
    if device.type != "cuda" or len(large) < 2:
        return
    num_cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if num_cached < sum(large):
        with suppress(torch.OutOfMemoryError):
            torch.empty(sum(large), dtype=torch.uint8, device=device)  # freed at once, so the allocator keeps the segment


def pack_small(pieces: Sequence[StorageEntry], max_bytes: int) -> list[StorageEntry]:
    """Merges small storages of one tensor each into storages of up to `max_bytes`; returns all resulting storages.

    The memory must be on the device. A state with other views keeps its storage, since the views would keep the old memory.

    A model of 500 small parameters has 1000 states, and a copy of a few hundred bytes takes as long as one of 200 KB. The
    tensor objects stay the same; only their storage changes.
    """
    small = [piece for piece in pieces if _is_movable(piece)]
    ids = {id(piece) for piece in small}
    storages = [piece for piece in pieces if id(piece) not in ids]
    for group in split_by_size(small, lambda piece: round_up(piece.memory.numel(), ALIGNMENT_BYTES), max_bytes):
        storages += group if len(group) == 1 else [_merge_storages(group)]
    return storages


def _is_movable(piece: StorageEntry) -> bool:
    """Returns whether a storage may be merged: at most 1 MiB, resizable, with one plain tensor and no other views."""
    if len(piece.tensors) > 1 or not 0 < piece.memory.numel() <= MAX_SMALL_BYTES or not is_resizable(piece):
        return False
    (tensor,) = piece.tensors.values()
    if not is_plain(tensor) or tensor.requires_grad or tensor.is_inference():
        return False
    owners: int = torch._C._storage_Use_Count(storage_id(tensor))
    return owners == NUM_OWNERS


@torch.no_grad()
def _merge_storages(pieces: Sequence[StorageEntry]) -> StorageEntry:
    """Moves the tensors of `pieces` into one new storage and returns it; the tensor objects stay the same."""
    sizes = [round_up(piece.memory.numel(), ALIGNMENT_BYTES) for piece in pieces]
    flat = torch.zeros(sum(sizes), dtype=torch.uint8, device=pieces[0].memory.device)
    tensors: dict[str, Tensor] = {}
    start = 0
    for piece, size in zip(pieces, sizes, strict=True):
        flat[start : start + piece.memory.numel()].copy_(piece.memory)
        for name, tensor in piece.tensors.items():
            offset = start // tensor.itemsize + int(tensor.storage_offset())
            tensor.set_(flat.untyped_storage(), offset, tensor.shape, tensor.stride())
            tensors[name] = tensor
        start += size
    return StorageEntry(flat, tensors)


def is_resizable(piece: StorageEntry) -> bool:
    """Returns whether torch can free and grow the memory of `piece`: it is neither shared nor owned by another library."""
    storage = piece.memory.untyped_storage()
    # A host tensor shared between processes claims to be resizable, but growing it crashes the process.
    return storage.resizable() and not (piece.memory.device.type == "cpu" and storage.is_shared())


class Streams:
    """The copy streams of a manager, one per direction: the link between device and host is full duplex."""

    def __init__(self, make: Callable[[], CopyStream]) -> None:
        self.out = make()
        self.into = make()

    def wait(self) -> None:
        """Blocks the host until all copies so far are done."""
        self.out.record().wait()
        self.into.record().wait()


class TimedCopies(NamedTuple):
    """Copies in flight in one direction: the event at their end, their start time, and their bytes."""

    end: CopyEvent
    start_s: float
    num_bytes: int

    def finish(self, counters: Moved, *, is_out: bool) -> None:
        """Waits for the copies, and counts their seconds and bytes, as measured on the host."""
        self.end.wait()
        seconds = time.perf_counter() - self.start_s
        if is_out:
            counters.seconds_out += seconds
            counters.timed_out += self.num_bytes
        else:
            counters.seconds_in += seconds
            counters.timed_in += self.num_bytes


class Mover:
    """Moves one part of a run's memory, with its `counters`. This base class moves nothing. comes_back: whether the part
    is onloaded automatically when it is needed.
    """

    comes_back = False

    def __init__(self, counters: Moved) -> None:
        self._moved = counters
        self._where = Where.HERE

    @property
    def where(self) -> Where:
        """Returns the state of the part: here, leaving, away or coming."""
        return self._where

    def offload(self) -> None:
        """Starts to offload the part unless it is away."""

    def onload(self) -> None:
        """Starts to onload the part unless it is here."""

    def require(self) -> None:
        """Makes later device work wait for the part if it is coming."""

    def wait(self) -> None:
        """Blocks the host until copies in flight are done."""

    def host(self) -> Mapping[int, Tensor]:
        """Returns the host copies of storages that are away or coming, by `storage_id`, uint8 [bytes]. Waits for the copies."""
        return {}

    def close(self) -> None:
        """Onloads the part for use after the run, and waits."""
        self.onload()
        self.wait()


class FreedGradients(Mover):
    """Frees gradients on offload, and allocates zeros on onload. num_bytes: returns the bytes of all gradients."""

    def __init__(
        self, free: Callable[[], None], build: Callable[[], None], num_bytes: Callable[[], int], counters: Moved
    ) -> None:
        super().__init__(counters)
        self._free = free
        self._build = build
        self._num_bytes = num_bytes

    def offload(self) -> None:
        if self._where is Where.AWAY:
            return
        self._moved.given_back = self._num_bytes()
        self._free()
        self._where = Where.AWAY

    def onload(self) -> None:
        if self._where is Where.HERE:
            return
        self._build()
        self._where = Where.HERE


class TrimOnly(Mover):
    """Frees unused memory that its owner allocates again when needed. The part is never away."""

    def __init__(self, trim: Callable[[], int], counters: Moved) -> None:
        super().__init__(counters)
        self._trim = trim

    def offload(self) -> None:
        self._moved.given_back = self._trim()


class HostCopy(Mover):
    """Offloads the storages that `pieces` returns as one unit: a part, or one bucket of optimizer states.

    bucket_bytes: the bytes to free or allocate at a time. arena: the allocator of host copies, which the first offload
    allocates. makes_room: whether an onload first reserves device memory for all pieces at once.
    """

    def __init__(
        self, pieces: Pieces, streams: Streams, arena: HostArena, bucket_bytes: int, counters: Moved, *, makes_room: bool = True
    ) -> None:
        super().__init__(counters)
        self._pieces = pieces
        self._streams = streams
        self._arena = arena
        self._bucket_bytes = bucket_bytes
        self._makes_room = makes_room
        self._places: dict[int, Tensor] = {}
        self._offloaded: list[HostPlace] = []
        self._copies: TimedCopies | None = None
        self._given_back = 0
        self._has_warned = False

    @property
    def where(self) -> Where:
        """Returns the state of the memory, after an update for finished copies."""
        if self._copies is not None and self._copies.end.is_done():
            self._finish_move()
        return self._where

    def offload(self) -> None:
        """Starts to copy all pieces to the host, and frees them. After a failure all pieces are onloaded before the error is
        raised.
        """
        if self._where in (Where.LEAVING, Where.AWAY):
            return
        self.require()
        start_s = time.perf_counter()
        placed = self._assign_places()
        try:
            self._send(placed)
        except BaseException:
            self._offloaded = [item for item in placed if not item[0].memory.untyped_storage().nbytes()]
            self._where = Where.AWAY
            self._start_onload()
            self.require()
            raise
        self._offloaded = placed
        num_bytes = sum(num_bytes for _, _, num_bytes in placed)
        self._moved.copied_out += num_bytes
        # Several units may share counters; each adds only the bytes that its own last offload freed.
        self._moved.given_back += num_bytes - self._given_back
        self._given_back = num_bytes
        self._start_move(Where.LEAVING, start_s, num_bytes)

    def _send(self, placed: Sequence[HostPlace]) -> None:
        """Copies all pieces to the host and frees them, bucket by bucket."""
        # The copies read memory that earlier device work writes.
        self._streams.out.wait_for_device()
        for bucket in self._buckets(placed):
            for piece, host, _ in bucket:
                self._streams.out.copy(host, piece.memory)
            # The allocator may reuse the memory for the next device work, which must wait for the copies.
            self._streams.out.record().hold_device()
            for piece, _, _ in bucket:
                piece.free()

    def onload(self) -> None:
        """Starts to allocate all pieces on the device and copy them back."""
        if self._where in (Where.LEAVING, Where.AWAY):
            self._start_onload()

    def _start_onload(self) -> None:
        start_s = time.perf_counter()
        into = self._streams.into
        into.wait_for(self._streams.out.record())
        if self._makes_room and self._offloaded:
            make_room((num_bytes for _, _, num_bytes in self._offloaded), self._offloaded[0][0].memory.device)
        for bucket in self._buckets(self._offloaded):
            for piece, _, _ in bucket:
                piece.grow()
            # The copies wait for earlier device work that used this memory.
            into.wait_for_device()
            for piece, host, _ in bucket:
                into.copy(piece.memory, host)
        num_bytes = sum(num_bytes for _, _, num_bytes in self._offloaded)
        self._moved.copied_in += num_bytes
        self._start_move(Where.COMING, start_s, num_bytes)

    def require(self) -> None:
        if self._where is Where.COMING:
            assert self._copies is not None, "memory comes without an event"
            self._copies.end.hold_device()
            self._where, self._copies, self._offloaded = Where.HERE, None, []

    def wait(self) -> None:
        """Blocks the host until copies in flight are done, and updates the state."""
        if self._copies is not None:
            self._finish_move()

    def host(self) -> Mapping[int, Tensor]:
        if self._where is Where.LEAVING:
            self.wait()
        elif self._offloaded:  # coming: the copies to the host may be unfinished
            self._streams.out.record().wait()
        return {storage_id(piece.memory): host for piece, host, _ in self._offloaded}

    def _start_move(self, target: Where, start_s: float, num_bytes: int) -> None:
        """Sets the state to `target` with copies of `num_bytes` in flight; finishes the move if the copies are already done."""
        stream = self._streams.out if target is Where.LEAVING else self._streams.into
        self._where, self._copies = target, TimedCopies(stream.record(), start_s, num_bytes)
        self.where  # noqa: B018  # finishes a synchronous copy now, so that its time is right

    def _finish_move(self) -> None:
        """Waits for the copies, counts their seconds and bytes, and updates the state."""
        assert self._copies is not None, "no copy is in flight"
        self._copies.finish(self._moved, is_out=self._where is Where.LEAVING)
        if self._where is Where.LEAVING:
            self._where, self._copies = Where.AWAY, None
        else:
            self.require()

    def _assign_places(self) -> list[HostPlace]:
        """Returns each resizable piece with its host copy and its bytes. Allocates host copies of new pieces, and releases
        those of pieces that no longer exist or have changed size. Warns once about a piece that is not resizable.
        """
        movable = []
        for piece in self._pieces():
            if piece.memory.numel() and is_resizable(piece):
                movable.append(piece)
            elif piece.memory.numel() and not self._has_warned:
                self._has_warned = True
                name = next(iter(piece.tensors))
                warnings.warn(
                    f"{name} stays on the device, since torch does not own its memory (shared, or from numpy)",
                    RuntimeWarning,
                    5,
                )
        sizes = {storage_id(piece.memory): piece.memory.numel() for piece in movable}
        for key in [key for key, host in self._places.items() if host.numel() != sizes.get(key)]:
            self._arena.release(self._places.pop(key))
        new = {key: size for key, size in sizes.items() if key not in self._places}
        self._places.update(zip(new, self._arena.allocate([*new.values()], self._moved), strict=True))
        return [(piece, self._places[key], size) for piece, (key, size) in zip(movable, sizes.items(), strict=True)]

    def _buckets(self, placed: Sequence[HostPlace]) -> list[list[HostPlace]]:
        return split_by_size(placed, lambda item: item[2], self._bucket_bytes)


def split_by_bytes(stepped: Iterable[Stepped], num_bytes: int) -> list[list[Stepped]]:
    """Returns `stepped` in buckets of at most `num_bytes` of parameters; a larger parameter gets its own bucket."""
    return split_by_size(stepped, lambda param: param.parameter.nbytes, num_bytes)
