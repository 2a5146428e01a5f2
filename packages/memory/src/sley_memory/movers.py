"""Movers: each moves one part of a run's memory, or one bucket of its states, off the device and back.

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

import torch
from torch import Tensor

from sley_core.api.comm import CopyEvent, CopyStream
from sley_core.api.memory import Moved, Stepped, StorageEntry, Where, free, grow, is_plain, storage_id
from sley_core.api.parts import ALIGNMENT_BYTES, round_up, split_by_size
from sley_memory.arena import HostArena

SMALL = 1 << 20  # bytes. A larger copy takes 40 us and more at 25 GB/s, so the time to start it does not count

OWNERS = 3
"""Of a storage that nothing else looks at: its tensor, the view of the whole in `StorageEntry`, and Python's object."""

MB = 10**6

Pieces = Callable[[], Sequence[StorageEntry]]

Placed = tuple[StorageEntry, Tensor, int]  # a piece, its copy on the host, and its bytes

SHARED_BYTES = 1 << 20
"""Of tensors up to this size, many share a piece of memory that torch's allocator takes from the driver."""

ROUNDED_BYTES = 512
"""Torch's allocator gives out whole multiples of this."""


def make_room(sizes: Iterable[int], device: torch.device) -> None:
    """Lets torch's allocator take one piece of memory from the driver for tensors of `sizes` bytes, to be allocated next, if it
    keeps less than they need. Does nothing on a CPU, nor where the driver has not as much in one piece.

    Otherwise each large tensor becomes a piece of its own, and the driver takes its time for each piece: on an H200 19 ms to
    give 336 of 21 MiB and 14 ms to take them back, but 0.5 and 3 ms for 7 GiB at once.
    """
    large = [round_up(size, ROUNDED_BYTES) for size in sizes if size > SHARED_BYTES]
    if device.type != "cuda" or len(large) < 2:
        return
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if kept < sum(large):
        with suppress(torch.OutOfMemoryError):
            torch.empty(sum(large), dtype=torch.uint8, device=device)  # and the allocator has it back at once


def packed(pieces: Sequence[StorageEntry], most_bytes: int) -> list[StorageEntry]:
    """Moves small storages, each of one tensor, into larger ones of up to `most_bytes`; returns all storages that exist then.

    The device's memory must be here. A view of a state beside the optimizer's own tensor would look at the old memory: such a
    state stays where it is.

    A model of 500 small parameters has 1000 states, and a copy of a few hundred bytes takes as long as one of 200 KB. The
    tensors stay the objects that the optimizer has; their storage changes once.
    """
    small = [piece for piece in pieces if _is_movable(piece)]
    numbers = {id(piece) for piece in small}
    storages = [piece for piece in pieces if id(piece) not in numbers]
    for run in split_by_size(small, lambda piece: round_up(piece.memory.numel(), ALIGNMENT_BYTES), most_bytes):
        storages += run if len(run) == 1 else [_together(run)]
    return storages


def _is_movable(piece: StorageEntry) -> bool:
    """Returns whether a storage may join others: at most 1 MiB, torch's own, of one plain tensor, known to nobody else."""
    if len(piece.tensors) > 1 or not 0 < piece.memory.numel() <= SMALL or not can_leave(piece):
        return False
    (tensor,) = piece.tensors.values()
    if not is_plain(tensor) or tensor.requires_grad or tensor.is_inference():
        return False
    owners: int = torch._C._storage_Use_Count(storage_id(tensor))
    return owners == OWNERS


@torch.no_grad()
def _together(run: Sequence[StorageEntry]) -> StorageEntry:
    """Moves the tensors of `run` into one new storage, which it returns with them; the tensors stay the same objects."""
    sizes = [round_up(piece.memory.numel(), ALIGNMENT_BYTES) for piece in run]
    flat = torch.zeros(sum(sizes), dtype=torch.uint8, device=run[0].memory.device)
    tensors: dict[str, Tensor] = {}
    start = 0
    for piece, size in zip(run, sizes, strict=True):
        flat[start : start + piece.memory.numel()].copy_(piece.memory)
        for name, tensor in piece.tensors.items():
            place = start // tensor.itemsize + int(tensor.storage_offset())
            tensor.set_(flat.untyped_storage(), place, tensor.shape, tensor.stride())
            tensors[name] = tensor
        start += size
    return StorageEntry(flat, tensors)


def can_leave(piece: StorageEntry) -> bool:
    """Returns whether the memory of `piece` is torch's own to free and grow: not shared, nor another library's."""
    storage = piece.memory.untyped_storage()
    # A host tensor that processes share says that it can be resized; to grow it again ends the process.
    return storage.resizable() and not (piece.memory.device.type == "cpu" and storage.is_shared())


class Streams:
    """The streams of a manager's copies, one each way: links between device and host carry both at once."""

    def __init__(self, make: Callable[[], CopyStream]) -> None:
        self.out = make()
        self.into = make()

    def wait(self) -> None:
        """Waits, on the host, for all copies so far."""
        self.out.record().wait()
        self.into.record().wait()


class Mover:
    """Moves one part of a run's memory; `moved` counts. This one moves nothing: the part is always here. comes_back: whether
    the part comes by itself when it is needed.
    """

    comes_back = False

    def __init__(self, moved: Moved) -> None:
        self._moved = moved
        self._where = Where.HERE

    @property
    def where(self) -> Where:
        """Returns where the part is: here, leaving, away or coming."""
        return self._where

    def offload(self) -> None:
        """Starts to move the part off the device; if it is away, only counts the call."""
        self._moved.num_no_ops += 1

    def onload(self) -> None:
        """Starts to bring the part back; if it is here, only counts the call."""
        self._moved.num_no_ops += 1

    def require(self) -> None:
        """Makes the device's work wait for the part if it is coming."""

    def wait(self) -> None:
        """Waits, on the host, for copies in flight."""

    def host(self) -> Mapping[int, Tensor]:
        """Waits for copies to the host; returns those of storages that are away or coming, by `storage_id`, uint8 [bytes]."""
        return {}

    def close(self) -> None:
        """Brings the part back for users after the run."""
        self.onload()
        self.wait()


class Gradients(Mover):
    """Frees gradients by an offload, and makes zeroed memory for them by an onload. num_bytes: their bytes now."""

    def __init__(self, free: Callable[[], None], build: Callable[[], None], num_bytes: Callable[[], int], moved: Moved) -> None:
        super().__init__(moved)
        self._free = free
        self._build = build
        self._num_bytes = num_bytes

    def offload(self) -> None:
        if self._where is Where.AWAY:
            super().offload()
            return
        self._moved.given_back = self._num_bytes()
        self._free()
        self._where = Where.AWAY

    def onload(self) -> None:
        if self._where is Where.HERE:
            super().onload()
            return
        self._build()
        self._where = Where.HERE


class Trimmed(Mover):
    """Frees memory that its owner allocates anew when it needs it: such a part is never away."""

    def __init__(self, trim: Callable[[], int], moved: Moved) -> None:
        super().__init__(moved)
        self._trim = trim

    def offload(self) -> None:
        self._moved.given_back = self._trim()

    def onload(self) -> None: ...


class HostCopy(Mover):
    """Copies the storages that `pieces` returns when an offload begins, as one unit: a part, or one bucket of its states.

    bucket_bytes: how much is freed, or allocated, at a time. The first offload makes places on the host in `arena`; pieces that
    appear later get theirs then. makes_room: whether an onload first takes memory for all pieces from the driver at once; of no
    use where the allocator still keeps it.
    """

    def __init__(
        self, pieces: Pieces, streams: Streams, arena: HostArena, bucket_bytes: int, moved: Moved, *, makes_room: bool = True
    ) -> None:
        super().__init__(moved)
        self._pieces = pieces
        self._streams = streams
        self._arena = arena
        self._bucket_bytes = bucket_bytes
        self._makes_room = makes_room
        self._places: dict[int, Tensor] = {}
        self._away: list[Placed] = []
        self._event: CopyEvent | None = None
        self._began = 0.0
        self._moving = 0
        self._given_back = 0
        self._has_warned = False

    @property
    def where(self) -> Where:
        """Returns where the memory is now; notes copies that are done."""
        if self._event is not None and self._event.is_done():
            self._arrived()
        return self._where

    def offload(self) -> None:
        """Starts to copy everything to the host, and frees it. If it fails in the middle, everything is brought back first."""
        if self._where in (Where.LEAVING, Where.AWAY):
            super().offload()
            return
        self.require()
        self._began = time.perf_counter()
        placed = self._placed()
        try:
            self._send(placed)
        except BaseException:
            self._away = [each for each in placed if not each[0].memory.untyped_storage().nbytes()]
            self._where = Where.AWAY
            self.onload()
            self.require()
            raise
        self._away = placed
        num_bytes = sum(num_bytes for _, _, num_bytes in placed)
        self._moved.copied_out += num_bytes
        # Several units may count in one place; each adds the bytes that its own last offload freed.
        self._moved.given_back += num_bytes - self._given_back
        self._given_back = num_bytes
        self._go(Where.LEAVING, num_bytes)

    def _send(self, placed: Sequence[Placed]) -> None:
        """Copies everything to the host, and frees it, bucket by bucket."""
        # Every copy reads memory that the device has been given to write so far.
        self._streams.out.follow()
        for bucket in self._buckets(placed):
            for piece, host, _ in bucket:
                self._streams.out.copy(host, piece.memory)
            # The allocator may give the memory to the device's next work at once: that must wait for the copies.
            self._streams.out.record().hold_device()
            for piece, _, _ in bucket:
                free(piece.memory)

    def onload(self) -> None:
        """Starts to allocate and copy everything back."""
        if self._where in (Where.HERE, Where.COMING):
            super().onload()
            return
        self._began = time.perf_counter()
        into = self._streams.into
        into.after(self._streams.out.record())
        if self._makes_room and self._away:
            make_room((num_bytes for _, _, num_bytes in self._away), self._away[0][0].memory.device)
        for bucket in self._buckets(self._away):
            for piece, _, num_bytes in bucket:
                grow(piece.memory, num_bytes)
            # The device's last use of this memory, before it was given here, comes first.
            into.follow()
            for piece, host, _ in bucket:
                into.copy(piece.memory, host)
        num_bytes = sum(num_bytes for _, _, num_bytes in self._away)
        self._moved.copied_in += num_bytes
        self._go(Where.COMING, num_bytes)

    def require(self) -> None:
        if self._where is Where.COMING:
            assert self._event is not None, "memory comes without an event"
            self._event.hold_device()
            self._where, self._event, self._away = Where.HERE, None, []

    def wait(self) -> None:
        """Waits, on the host, for copies in flight, and notes that they are done."""
        if self._event is not None:
            self._event.wait()
            self._arrived()

    def host(self) -> Mapping[int, Tensor]:
        if self._where is Where.LEAVING:
            self.wait()
        elif self._away:  # it is coming, and maybe nobody has waited for the copies to the host
            self._streams.out.record().wait()
        return {storage_id(piece.memory): host for piece, host, _ in self._away}

    def _go(self, where: Where, num_bytes: int) -> None:
        """Notes that copies of `num_bytes` are in flight to `where`; if they are done at once, notes that too."""
        stream = self._streams.out if where is Where.LEAVING else self._streams.into
        self._where, self._event, self._moving = where, stream.record(), num_bytes
        self.where  # noqa: B018  # a copy that is done at once takes until now, and not until somebody asks

    def _arrived(self) -> None:
        """Counts the seconds and bytes of the copies in flight, which are done, and notes where the memory is."""
        seconds = time.perf_counter() - self._began
        if self._where is Where.LEAVING:
            self._moved.seconds_out += seconds
            self._moved.timed_out += self._moving
            self._where = Where.AWAY
        else:
            self._moved.seconds_in += seconds
            self._moved.timed_in += self._moving
            self.require()
        self._event = None

    def _placed(self) -> list[Placed]:
        """Returns each piece that can leave, with its place on the host and its bytes. Makes places for new pieces, and gives
        back those of pieces that are gone or have another size. Warns once of a piece that cannot leave.
        """
        movable = []
        for piece in self._pieces():
            if piece.memory.numel() and can_leave(piece):
                movable.append(piece)
            elif piece.memory.numel() and not self._has_warned:
                self._has_warned = True
                name = next(iter(piece.tensors))
                warnings.warn(f"{name} stays: its memory is not torch's own (shared, or of numpy)", RuntimeWarning, 5)
        sizes = {storage_id(piece.memory): piece.memory.numel() for piece in movable}
        for key in [key for key, host in self._places.items() if host.numel() != sizes.get(key)]:
            self._arena.give(self._places.pop(key))
        new = {key: size for key, size in sizes.items() if key not in self._places}
        self._places.update(zip(new, self._arena.places([*new.values()], self._moved), strict=True))
        return [(piece, self._places[key], size) for piece, (key, size) in zip(movable, sizes.items(), strict=True)]

    def _buckets(self, placed: Sequence[Placed]) -> list[list[Placed]]:
        return split_by_size(placed, lambda each: each[2], self._bucket_bytes)


def by_bytes(stepped: Iterable[Stepped], num_bytes: int) -> list[list[Stepped]]:
    """Returns `stepped` in runs of at most `num_bytes` of parameters; a larger one is alone."""
    return split_by_size(stepped, lambda each: each.parameter.nbytes, num_bytes)
