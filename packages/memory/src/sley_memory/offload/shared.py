"""Moves memory that several ranks have in common, of which each keeps a part on its host.

    rank 0   a a a a b b b c c   ── offload ──>  host of rank 0:  a a a a b     what is equal, end to end, in even parts
    rank 1   a a a a b b b c c                   host of rank 1:  b b c c
                                 <── onload ───  each copies its own part to the device, and they gather the rest

What differs, such as masters of which each rank steps a part, is kept in full. All ranks of the run must make the same calls.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sley_core.api.comm import all_gather, gather_objects
from sley_core.api.memory import Holding, Moved, Part, Where, free, grow, make_room
from sley_core.errors import RunError
from sley_memory.offload.arena import ALIGNMENT, Arena, aligned
from sley_memory.offload.fingerprint import fingerprints
from sley_memory.offload.parked import Parked, Pieces, Streams, can_leave

if TYPE_CHECKING:
    from sley_core.api.comm import CopyEvent, Group

Told = list[tuple[str, int, int]]
"""Name, bytes and fingerprint of each piece, as a rank tells the others."""


class SharedCopies:
    """Moves what `pieces` returns when an offload begins, one `part` of a run.

    group: the ranks that may have memory in common. control: all ranks, which compare their calls before anything is freed.
    bucket_bytes: how much more device memory is needed while memory comes back.
    """

    def __init__(
        self,
        part: Part,
        pieces: Pieces,
        group: Group,
        control: Group,
        streams: Streams,
        arena: Arena,
        bucket_bytes: int,
        moved: Moved,
    ) -> None:
        self._part = part
        self._pieces = pieces
        self._group = group
        self._control = control
        self._streams = streams
        self._arena = arena
        self._bucket_bytes = bucket_bytes
        self._moved = moved
        self._own: list[Holding] = []
        self._rest = Parked(lambda: self._own, streams, arena, bucket_bytes, moved)
        self._alike: list[Holding] = []
        self._given_back = 0
        self._host: Tensor | None = None
        self._is_away = False
        self._leaving: tuple[CopyEvent, float, int] | None = None

    @property
    def where(self) -> Where:
        """Returns where the memory is now."""
        rest = self._rest.where
        return Where.AWAY if self._is_away and rest is Where.HERE else rest

    def offload(self) -> None:
        """Copies this rank's part of what all ranks of the group have in common, and everything else in full; frees all of it.
        Of memory that is away, only counts the call.

        All ranks of the run call it. Raises RunError `ranks-differ` on all of them, and frees nothing, if one makes another
        call.
        """
        here: dict[str, Holding] = {}
        if not self._is_away:
            self.require()
            here = _by_name(piece for piece in self._pieces() if piece.memory.numel() and can_leave(piece))
        prints = fingerprints([piece.memory for piece in here.values()])
        told: Told = [(name, piece.memory.numel(), found) for (name, piece), found in zip(here.items(), prints, strict=True)]
        views = self._agree("offload", told)
        if self._is_away:
            self._moved.num_no_ops += 1
            return
        everyone = [set(views[rank]) for rank in self._group.ranks]
        # By name: the order in which a rank made its states is its own.
        alike = sorted(one for one in told if all(one in theirs for theirs in everyone))
        names = {name for name, _, _ in alike}
        self._own = [piece for name, piece in here.items() if name not in names]
        self._rest.offload()
        try:
            self._send([here[name] for name, _, _ in alike])
        except BaseException:
            self._rest.onload()
            raise
        self._free()

    def _send(self, pieces: list[Holding]) -> None:
        """Copies this rank's part of `pieces`, which all ranks of the group have, to the host."""
        self._alike = pieces
        size = self._share()
        if self._host is not None and self._host.numel() != size:
            self._arena.give(self._host)
            self._host = None
        if size and self._host is None:
            (self._host,) = self._arena.places([size], self._moved)
        if self._host is not None:
            began = time.perf_counter()
            self._streams.out.follow()
            for memory, at in self._within(self._group.coord * size, size):
                self._streams.out.copy(self._host[at : at + memory.numel()], memory)
            # The allocator may give the memory to the device's next work at once: that must wait for the copies.
            event = self._streams.out.record()
            event.hold_device()
            self._leaving = event, began, size
        self._moved.copied_out += size

    def _free(self) -> None:
        """Frees the pieces that all ranks of the group have, which are away from then on; counts their bytes."""
        self._is_away = True
        freed = sum(free(piece.memory) for piece in self._alike)
        # The rest counts in the same place; each adds what its own last offload freed.
        self._moved.given_back += freed - self._given_back
        self._given_back = freed

    def onload(self) -> None:
        """Brings everything back: this rank's part from its host, the others from their ranks, bucket by bucket. Of memory that
        is here, only counts the call.

        All ranks of the run call it. Raises RunError `ranks-differ` if one makes another call, and `collective-failed` if a
        peer has died; the memory is away then.
        """
        self._agree("onload", [])
        if not self._is_away:
            self._moved.num_no_ops += 1
            return
        began = time.perf_counter()
        try:
            if self._alike:
                make_room(self._sizes(), self._alike[0].memory.device)
            for piece, size in zip(self._alike, self._sizes(), strict=True):
                grow(piece.memory, size)
            self._gather()
        except BaseException:
            for piece in self._alike:
                free(piece.memory)
            raise
        self._is_away = False
        self._moved.seconds_in += time.perf_counter() - began
        self._moved.timed_in += self._share() * self._group.size
        self._rest.onload()

    def _gather(self) -> None:
        """Copies this rank's part to the device and gathers the others' from their ranks, a bucket at a time, into their
        places.
        """
        size, count = self._share(), self._group.size
        if not size:
            return
        assert self._host is not None, "memory is away that is nowhere"
        device = self._alike[0].memory.device
        step = min(size, max(ALIGNMENT, self._bucket_bytes // (count + 1) // ALIGNMENT * ALIGNMENT))
        own = torch.empty(step, dtype=torch.uint8, device=device)
        all_parts = torch.empty(count * step, dtype=torch.uint8, device=device)
        into = self._streams.into
        into.after(self._streams.out.record())
        for first in range(0, size, step):
            length = min(step, size - first)
            # The gather of the bucket before has read this memory.
            into.follow()
            into.copy(own[:length], self._host[first : first + length])
            into.record().hold_device()
            # Over the ranks that hold the same, which have agreed on these pieces and on this call.
            what = f"the run's {self._part.replace('_', ' ')}, which were away"
            all_gather(all_parts[: count * length], own[:length], self._group, what=what).wait()
            for rank in range(count):
                for memory, at in self._within(rank * size + first, length):
                    memory.copy_(all_parts[rank * length + at : rank * length + at + memory.numel()])
            self._moved.copied_in += length
            self._moved.gathered += (count - 1) * length
        into.record().wait()  # so that the seconds are those of the copies

    def require(self) -> None:
        """Makes the device's work wait for memory that is coming."""
        self._rest.require()

    def wait(self) -> None:
        """Waits, on the host, for copies in flight."""
        if self._leaving is not None:
            event, began, size = self._leaving
            event.wait()
            self._moved.seconds_out += time.perf_counter() - began
            self._moved.timed_out += size
            self._leaving = None
        self._rest.wait()

    def host(self) -> Mapping[int, Tensor]:
        """Waits for copies to the host; returns those that this rank's host has whole, by `storage_id`, uint8 [bytes]."""
        return self._rest.host()

    def close(self) -> None:
        """Brings the memory back for whoever uses it after the run; where other ranks do not answer, what they shared is lost,
        with a warning, and every byte of it 255 (NaN in floating point).
        """
        if self._is_away:
            with suppress(RunError):
                self.onload()
        if self._is_away:
            self._lose()
        self._rest.wait()

    def _lose(self) -> None:
        """Allocates the shared memory again, filled with bytes of 255, brings the rest back, and warns that the contents are
        lost.
        """
        for piece, size in zip(self._alike, self._sizes(), strict=True):
            grow(piece.memory, size)
            piece.memory.fill_(255)
        self._rest.onload()
        self._is_away = False
        name = self._part.replace("_", " ")
        message = f"the run closed while its {name} were away, and its ranks did not all answer: they are lost"
        warnings.warn(message, RuntimeWarning, 4)

    def _agree(self, call: str, told: Told) -> dict[int, Told]:
        """Exchanges what every rank calls and tells; returns what each tells, by global rank.

        Raises RunError `ranks-differ`, on all ranks alike, unless all make the same call for the same part in the same state.
        """
        own = [call, self._part, self._is_away]
        # Over all ranks: every one of them calls this for each call of `offload` and `onload` and each part, in one order.
        every = gather_objects([own, told], self._control, what=f"what `run.memory.{call}` moves")
        for rank, (theirs, _) in zip(self._control.ranks, every, strict=True):
            if theirs != every[0][0]:
                first, second = (_said(*one) for one in (theirs, every[0][0]))
                raise RunError(
                    "ranks-differ",
                    f"rank {rank} {first}, rank {self._control.ranks[0]} {second}",
                    hint="with `shared = true` all ranks offload and onload the same parts in the same order",
                )
        return {
            rank: [(name, size, found) for name, size, found in theirs]
            for rank, (_, theirs) in zip(self._control.ranks, every, strict=True)
        }

    def _sizes(self) -> list[int]:
        """Returns the bytes of each piece that all ranks of the group have."""
        return [piece.memory.numel() for piece in self._alike]

    def _share(self) -> int:
        """Returns how many bytes each rank keeps of what all of the group have: an even part of the pieces end to end, each
        aligned.
        """
        total = sum(aligned(size) for size in self._sizes())
        return aligned(-(-total // self._group.size))

    def _within(self, first: int, length: int) -> Iterator[tuple[Tensor, int]]:
        """Yields the parts of shared pieces that lie in `length` bytes from `first` on, if all pieces lie end to end, aligned;
        each with the byte, from `first`, where it starts.
        """
        start = 0
        for piece, size in zip(self._alike, self._sizes(), strict=True):
            begin, end = max(first, start), min(first + length, start + size)
            if begin < end:
                yield piece.memory[begin - start : end - start], begin - first
            start += aligned(size)


def _by_name(pieces: Iterable[Holding]) -> dict[str, Holding]:
    """Returns the pieces by the name of the first tensor in each; where two have one name, by that and a number."""
    found: dict[str, Holding] = {}
    for piece in pieces:
        name = next(iter(piece.tensors))
        found[f"{name} {len(found)}" if name in found else name] = piece
    return found


def _said(call: str, part: str, is_away: bool) -> str:
    """Returns words for what a rank calls, for an error."""
    return f"calls `run.memory.{call}` for {part.replace('_', ' ')} that are {'away' if is_away else 'here'}"
