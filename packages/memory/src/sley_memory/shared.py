"""Moves memory that several ranks have in common, of which each keeps a part on its host.

    rank 0   a a a a b b b c c   ── offload ──>  host of rank 0:  a a a a b     what is equal, end to end, in even parts
    rank 1   a a a a b b b c c                   host of rank 1:  b b c c
                                 <── onload ───  each copies its own part to the device, and they gather the rest

Memory that differs, such as masters of which each rank steps a part, is kept in full. All ranks of the run must make the same
calls. Ranks compare fingerprints to find equal memory without moving it.

The fingerprint of a memory is the sum of all its 32-bit words, each times an odd number that is drawn for its place, modulo
2^64. One word that differs always changes it; any other difference passes with a chance of 2^-31 at most. Words of 64 bits
would not do: two that differ in their highest bit, as a number's sign, could change places unseen.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from sley_core.api.comm import CopyEvent, Group
from sley_core.api.memory import Moved, Part, StorageEntry, Where, free, grow
from sley_core.api.parts import ALIGNMENT_BYTES, round_up
from sley_core.errors import RunError
from sley_memory.arena import HostArena
from sley_memory.movers import HostCopy, Mover, Pieces, Streams, can_leave, make_room

Report = list[tuple[str, int, int]]  # name, bytes and fingerprint of each piece of one rank


class SharedCopies(Mover):
    """Moves the storages that `pieces` returns when an offload begins, one `part` of a run. All ranks of the run make each
    call.

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
        arena: HostArena,
        bucket_bytes: int,
        moved: Moved,
    ) -> None:
        super().__init__(moved)
        self._part = part
        self._pieces = pieces
        self._group = group
        self._control = control
        self._streams = streams
        self._arena = arena
        self._bucket_bytes = bucket_bytes
        self._own: list[StorageEntry] = []
        self._rest = HostCopy(lambda: self._own, streams, arena, bucket_bytes, moved)
        self._common: list[StorageEntry] = []
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
        """Copies this rank's part of the memory that all ranks of the group have in common, and everything else in full; frees
        all of it. Raises RunError `ranks-differ` on all ranks, and frees nothing, if one makes another call.
        """
        here: dict[str, StorageEntry] = {}
        if not self._is_away:
            self.require()
            for piece in self._pieces():
                if piece.memory.numel() and can_leave(piece):
                    name = next(iter(piece.tensors))
                    here[f"{name} {len(here)}" if name in here else name] = piece
        prints = fingerprints([piece.memory for piece in here.values()])
        report = [(name, piece.memory.numel(), number) for (name, piece), number in zip(here.items(), prints, strict=True)]
        reports = self._agree("offload", report)
        if self._is_away:
            super().offload()
            return
        others = [set(reports[rank]) for rank in self._group.ranks]
        # By name: the order in which a rank made its states is its own.
        common = sorted(name for name, *facts in report if all((name, *facts) in theirs for theirs in others))
        self._own = [piece for name, piece in here.items() if name not in set(common)]
        self._rest.offload()
        try:
            self._send([here[name] for name in common])
        except BaseException:
            self._rest.onload()
            raise
        self._is_away = True
        freed = sum(free(piece.memory) for piece in self._common)
        # The rest counts in the same place; each adds the bytes that its own last offload freed.
        self._moved.given_back += freed - self._given_back
        self._given_back = freed

    def _send(self, pieces: list[StorageEntry]) -> None:
        """Copies this rank's part of `pieces`, which all ranks of the group have, to the host."""
        self._common = pieces
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

    def onload(self) -> None:
        """Brings everything back: this rank's part from its host, the others from their ranks, bucket by bucket.

        Raises RunError `ranks-differ` if a rank makes another call, and `collective-failed` if a peer has died; the memory is
        away then.
        """
        self._agree("onload", [])
        if not self._is_away:
            super().onload()
            return
        began = time.perf_counter()
        try:
            if self._common:
                make_room((piece.memory.numel() for piece in self._common), self._common[0].memory.device)
            for piece in self._common:
                grow(piece.memory, piece.memory.numel())
            self._gather()
        except BaseException:
            for piece in self._common:
                free(piece.memory)
            raise
        self._is_away = False
        self._moved.seconds_in += time.perf_counter() - began
        self._moved.timed_in += self._share() * self._group.size
        self._common = []
        self._rest.onload()

    def _gather(self) -> None:
        """Copies this rank's part to the device and gathers the others' from their ranks, a bucket at a time."""
        size, count = self._share(), self._group.size
        if not size:
            return
        assert self._host is not None, "memory is away that is nowhere"
        device = self._common[0].memory.device
        step = min(size, max(ALIGNMENT_BYTES, self._bucket_bytes // (count + 1) // ALIGNMENT_BYTES * ALIGNMENT_BYTES))
        own = torch.empty(step, dtype=torch.uint8, device=device)
        all_parts = torch.empty(count * step, dtype=torch.uint8, device=device)
        into = self._streams.into
        into.after(self._streams.out.record())
        for first in range(0, size, step):
            length = min(step, size - first)
            into.follow()  # the gather of the bucket before has read this memory
            into.copy(own[:length], self._host[first : first + length])
            into.record().hold_device()
            # Over the ranks that hold the same memory, which have agreed on these pieces and on this call.
            what = f"the run's {self._part.replace('_', ' ')}, which were away"
            self._group.all_gather(all_parts[: count * length], own[:length], what=what).wait()
            for rank in range(count):
                for memory, at in self._within(rank * size + first, length):
                    memory.copy_(all_parts[rank * length + at : rank * length + at + memory.numel()])
            self._moved.copied_in += length
            self._moved.gathered += (count - 1) * length
        into.record().wait()  # so that the seconds are those of the copies

    def require(self) -> None:
        self._rest.require()

    def wait(self) -> None:
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
        """Brings the memory back for users after the run. If other ranks do not answer, shared memory is lost, with a warning,
        and every byte of it is 255 (NaN in floating point).
        """
        if self._is_away:
            with suppress(RunError):
                self.onload()
        if self._is_away:
            for piece in self._common:
                grow(piece.memory, piece.memory.numel())
                piece.memory.fill_(255)
            self._rest.onload()
            self._is_away = False
            name = self._part.replace("_", " ")
            message = f"the run closed while its {name} were away, and its ranks did not all answer: they are lost"
            warnings.warn(message, RuntimeWarning, 4)
        self._rest.wait()

    def _agree(self, call: str, report: Report) -> dict[int, Report]:
        """Returns the reports of all ranks, by global rank. Raises RunError `ranks-differ`, on all ranks alike, unless all make
        the same call for the same part in the same state.
        """
        # Over all ranks: every one of them calls this for each call of `offload` and `onload` and each part, in one order.
        own = [[call, self._part, self._is_away], report]
        everyone = self._control.gather_objects(own, what=f"which memory `run.memory.{call}` moves")
        for rank, (theirs, _) in zip(self._control.ranks, everyone, strict=True):
            if theirs != everyone[0][0]:
                texts = [
                    f"calls `run.memory.{name}` for {part.replace('_', ' ')} that are {'away' if is_away else 'here'}"
                    for name, part, is_away in (theirs, everyone[0][0])
                ]
                raise RunError(
                    "ranks-differ",
                    f"rank {rank} {texts[0]}, rank {self._control.ranks[0]} {texts[1]}",
                    hint="with `shared = true` all ranks offload and onload the same parts in the same order",
                )
        return {rank: [(*facts,) for facts in theirs] for rank, (_, theirs) in zip(self._control.ranks, everyone, strict=True)}

    def _share(self) -> int:
        """Returns how many bytes each rank keeps of the common memory: an even part of the pieces end to end, each aligned."""
        total = sum(round_up(piece.memory.numel(), ALIGNMENT_BYTES) for piece in self._common)
        return round_up(-(-total // self._group.size), ALIGNMENT_BYTES)

    def _within(self, first: int, length: int) -> Iterator[tuple[Tensor, int]]:
        """Yields the parts of common pieces that lie in `length` bytes from `first` on, if all pieces lie end to end, aligned;
        each with the byte, from `first`, where it starts.
        """
        start = 0
        for piece in self._common:
            size = piece.memory.numel()
            begin, end = max(first, start), min(first + length, start + size)
            if begin < end:
                yield piece.memory[begin - start : end - start], begin - first
            start += round_up(size, ALIGNMENT_BYTES)


WIDTH = 1024  # words in a row

CHUNK = {"cpu": 64, "cuda": 3072}
"""Rows that are multiplied at a time: on a CPU the products stay in its cache; on CUDA they are 24 MiB (35 ms for 4.5 GiB on an
H200).
"""


def fingerprints(memories: Sequence[Tensor]) -> list[int]:
    """Returns a number for each of `memories`, which differs, but for a chance of 2^-31, where their bytes do. Waits for the
    device. memories: uint8 [bytes], of one device, each starting at a multiple of 4 bytes.
    """
    if not memories:
        return []
    most_rows = max(memory.numel() // 4 // WIDTH for memory in memories)
    # Once for all of them: many small pieces would otherwise cost more operations than bytes.
    factors = _factors(WIDTH + max(most_rows, WIDTH + 2) + 1, memories[0].device)
    of_places, of_rest = factors[:WIDTH], factors[WIDTH:]  # of the places in a row, then of rows and of the rest
    prints = []
    for memory in memories:
        num_words = memory.numel() // 4
        words = memory[: num_words * 4].view(torch.int32)
        num_rows = num_words // WIDTH
        table = words[: num_rows * WIDTH].view(num_rows, WIDTH)
        sums = [(rows * of_places).sum(1) for rows in torch.split(table, CHUNK.get(memory.device.type, CHUNK["cuda"]))]
        tail = torch.cat([words[num_rows * WIDTH :].long(), memory[num_words * 4 :].long()])
        last = (tail * of_rest[: tail.numel()]).sum().reshape(1)
        prints.append((torch.cat([*sums, last]) * of_rest[: num_rows + 1]).sum())
    return [int(number) for number in torch.stack(prints).tolist()]


def _factors(count: int, device: torch.device) -> Tensor:
    """Returns odd pseudorandom numbers, int64 [count]: those of SplitMix64."""
    numbers = torch.arange(1, count + 1, device=device) * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        # a shift that fills with zeros; torch's fills with the sign
        numbers = (numbers ^ ((numbers >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return numbers | 1


def _signed(number: int) -> int:
    """Returns the int64 with the bits of `number`."""
    return number - (1 << 64) if number >= 1 << 63 else number
