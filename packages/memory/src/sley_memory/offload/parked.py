"""Copies some memory to the host and back, as one unit: a part of a run, or one bucket of its states.

        offload                                onload
HERE ────────────> LEAVING ──────────> AWAY ────────────> COMING ────────> HERE
      copy out, hold the device,              grow, follow,        `require`: the device
      free bucket by bucket                   copy in              waits for the copies
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sley_core.api.memory import CopyEvent, CopyStream, Holding, Moved, Where, free, grow, is_plain, make_room, storage_id
from sley_memory.offload.arena import aligned

if TYPE_CHECKING:
    from sley_memory.offload.arena import Arena


SMALL = 1 << 20
"""Bytes. A larger copy takes 40 us and more at 25 GB/s, beside which what it takes to start one does not count."""

OWNERS = 3
"""Of a storage that nothing else looks at: its tensor, the view of the whole in `Holding`, and the object that Python has."""


def packed(pieces: Sequence[Holding], most_bytes: int) -> list[Holding]:
    """Moves small storages that one tensor alone looks at into larger ones of up to `most_bytes`; returns all storages that
    there are then.

    The device's memory must be here. What a program has of a state beside the optimizer's own tensor, such as a view, would
    look at the old memory: such a state stays where it is.

    A model of 500 small parameters has 1000 states, and a copy of a few hundred bytes takes as long as one of 200 KB. The
    tensors stay the objects that the optimizer has; what changes, once, is the storage in which they lie.
    """
    found = [piece for piece in pieces if not _is_movable(piece)]
    for run in _runs([piece for piece in pieces if _is_movable(piece)], most_bytes):
        found += run if len(run) == 1 else [_together(run)]
    return found


def _is_movable(piece: Holding) -> bool:
    """Returns whether a storage may be laid together with others: at most 1 MiB, torch's own, of one plain tensor, and known to
    nobody else.
    """
    if len(piece.tensors) > 1 or not 0 < piece.memory.numel() <= SMALL or not can_leave(piece):
        return False
    (tensor,) = piece.tensors.values()
    if not is_plain(tensor) or tensor.requires_grad or tensor.is_inference():
        return False
    owners: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return owners == OWNERS


def _runs(pieces: Sequence[Holding], most_bytes: int) -> Iterator[list[Holding]]:
    """Yields the pieces in runs of at most `most_bytes`, each aligned to 256 bytes; a larger one is alone."""
    run: list[Holding] = []
    size = 0
    for piece in pieces:
        if run and size + piece.memory.numel() > most_bytes:
            yield run
            run, size = [], 0
        run.append(piece)
        size += aligned(piece.memory.numel())
    if run:
        yield run


@torch.no_grad()
def _together(run: Sequence[Holding]) -> Holding:
    """Moves the tensors of `run` into one new storage, which it returns with them; the tensors stay the same objects."""
    flat = torch.zeros(sum(aligned(piece.memory.numel()) for piece in run), dtype=torch.uint8, device=run[0].memory.device)
    tensors: dict[str, Tensor] = {}
    start = 0
    for piece in run:
        flat[start : start + piece.memory.numel()].copy_(piece.memory)
        for name, tensor in piece.tensors.items():
            place = start // tensor.itemsize + int(tensor.storage_offset())
            tensor.set_(flat.untyped_storage(), place, tensor.shape, tensor.stride())
            tensors[name] = tensor
        start += aligned(piece.memory.numel())
    return Holding(flat, tensors)


Pieces = Callable[[], Sequence[Holding]]

Placed = tuple[Holding, Tensor, int]
"""A piece, its copy on the host, and its bytes."""


class Streams:
    """The streams of a manager's copies, one each way: links between device and host carry both at once."""

    def __init__(self, make: Callable[[], CopyStream]) -> None:
        self.out = make()
        self.into = make()

    def wait(self) -> None:
        """Waits, on the host, for all copies so far."""
        self.out.record().wait()
        self.into.record().wait()


class Parked:
    """Moves what `pieces` returns when an offload begins. bucket_bytes: how much is freed, or allocated, at a time.

    The first offload makes places on the host in `arena`; pieces that appear later get theirs then. makes_room: whether an
    onload first takes memory for all pieces from the driver at once; of no use where the allocator still keeps it.
    """

    def __init__(
        self, pieces: Pieces, streams: Streams, arena: Arena, bucket_bytes: int, moved: Moved, *, makes_room: bool = True
    ) -> None:
        self._pieces = pieces
        self._streams = streams
        self._arena = arena
        self._bucket_bytes = bucket_bytes
        self._moved = moved
        self._makes_room = makes_room
        self._places: dict[int, Tensor] = {}
        self._away: list[Placed] = []
        self._event: CopyEvent | None = None
        self._where = Where.HERE
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
        """Starts to copy everything to the host, and frees it; of memory that is leaving or away, only counts the call.

        If it fails in the middle, everything is brought back first.
        """
        if self._where in (Where.LEAVING, Where.AWAY):
            self._moved.num_no_ops += 1
            return
        self.require()
        self._began = time.perf_counter()
        placed = self._placed(self._pieces())
        try:
            self._send(placed)
        except BaseException:
            self._bring_back(placed)
            raise
        self._away = placed
        num_bytes = sum(num_bytes for _, _, num_bytes in placed)
        self._moved.copied_out += num_bytes
        # Several units may count in one place; each adds what its own last offload freed.
        self._moved.given_back += num_bytes - self._given_back
        self._given_back = num_bytes
        self._go(Where.LEAVING, num_bytes)

    def _send(self, placed: Sequence[Placed]) -> None:
        """Copies everything to the host, and frees it, bucket by bucket."""
        # Every copy reads what the device has been given to write so far.
        self._streams.out.follow()
        for bucket in self._buckets(placed):
            for piece, host, _ in bucket:
                self._streams.out.copy(host, piece.memory)
            # The allocator may give the memory to the device's next work at once: that must wait for the copies.
            self._streams.out.record().hold_device()
            for piece, _, _ in bucket:
                free(piece.memory)

    def _bring_back(self, placed: Sequence[Placed]) -> None:
        """Undoes an offload that failed, or was interrupted, in the middle."""
        self._away = [one for one in placed if not one[0].memory.untyped_storage().nbytes()]
        self._where = Where.AWAY
        self.onload()
        self.require()

    def onload(self) -> None:
        """Starts to allocate and copy everything back; of memory that is here or coming, only counts the call."""
        if self._where in (Where.HERE, Where.COMING):
            self._moved.num_no_ops += 1
            return
        self._began = time.perf_counter()
        into = self._streams.into
        into.after(self._streams.out.record())
        if self._makes_room and self._away:
            make_room((num_bytes for _, _, num_bytes in self._away), self._away[0][0].memory.device)
        for bucket in self._buckets(self._away):
            for piece, _, num_bytes in bucket:
                grow(piece.memory, num_bytes)
            # What the device last did with this memory, before it was given here, comes first.
            into.follow()
            for piece, host, _ in bucket:
                into.copy(piece.memory, host)
        num_bytes = sum(num_bytes for _, _, num_bytes in self._away)
        self._moved.copied_in += num_bytes
        self._go(Where.COMING, num_bytes)

    def require(self) -> None:
        """Makes the device's work wait for memory that is coming."""
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
        """Waits for copies to the host; returns those of what is away or coming, by `storage_id`, uint8 [bytes]."""
        if self._where is Where.LEAVING:
            self.wait()
        elif self._away:  # it is coming, and maybe nobody has waited for what it left
            self._streams.out.record().wait()
        return {storage_id(piece.memory): host for piece, host, _ in self._away}

    def _go(self, where: Where, num_bytes: int) -> None:
        """Notes that copies of `num_bytes` are in flight to `where`; if they are done at once, notes that too."""
        stream = self._streams.out if where is Where.LEAVING else self._streams.into
        self._where, self._event, self._moving = where, stream.record(), num_bytes
        self.where  # noqa: B018  # a copy that is done at once takes until now, and not until somebody asks

    def _arrived(self) -> None:
        """Counts the seconds and bytes of the copies in flight, which are done; what left is away, and what came is here."""
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

    def _placed(self, pieces: Sequence[Holding]) -> list[Placed]:
        """Returns each piece that can leave, with its place on the host and its bytes. Makes places for new pieces, and gives
        back those of pieces that are gone or have another size.
        """
        able = [piece for piece in pieces if piece.memory.numel() and self._can_leave(piece)]
        sizes = {storage_id(piece.memory): piece.memory.numel() for piece in able}
        for key in [key for key, host in self._places.items() if host.numel() != sizes.get(key)]:
            self._arena.give(self._places.pop(key))  # of what is gone, or has another size now
        new = {key: size for key, size in sizes.items() if key not in self._places}
        hosts = self._arena.places([*new.values()], self._moved)
        self._places.update(zip(new, hosts, strict=True))
        return [(piece, self._places[key], size) for piece, (key, size) in zip(able, sizes.items(), strict=True)]

    def _can_leave(self, piece: Holding) -> bool:
        """Returns whether a piece can leave the device; warns, once, of one that cannot."""
        if can_leave(piece):
            return True
        if not self._has_warned:
            self._has_warned = True
            name = next(iter(piece.tensors))
            warnings.warn(f"{name} stays: its memory is not torch's own (shared, or of numpy)", RuntimeWarning, 5)
        return False

    def _buckets(self, placed: Sequence[Placed]) -> Iterator[Sequence[Placed]]:
        """Yields the pieces in runs of at most `bucket_bytes`; a larger one is alone."""
        bucket: list[Placed] = []
        size = 0
        for one in placed:
            if bucket and size + one[2] > self._bucket_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append(one)
            size += one[2]
        if bucket:
            yield bucket


def can_leave(piece: Holding) -> bool:
    """Returns whether the memory of `piece` is torch's own, to free and to grow: not shared between processes, nor another
    library's.
    """
    storage = piece.memory.untyped_storage()
    # A host tensor that processes share says that it can be resized; to grow it again ends the process.
    return storage.resizable() and not (piece.memory.device.type == "cpu" and storage.is_shared())
