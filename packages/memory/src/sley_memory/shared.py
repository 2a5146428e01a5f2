"""Offloads memory that is equal on several ranks: each rank keeps a part on its host.

    rank 0   a a a a b b b c c   ── offload ──>  host of rank 0:  a a a a b     the equal memory, concatenated, in even parts
    rank 1   a a a a b b b c c                   host of rank 1:  b b c c
                                 <── onload ───  each copies its part to the device, then they gather

Memory that differs, such as sharded master weights, is kept in full. All ranks of the run must make the same calls. Ranks
compare fingerprints to find equal memory without moving it.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress

import torch
from torch import Tensor

from sley_core.api.comm import CopyEvent, Group
from sley_core.api.memory import Moved, Part, StorageEntry, Where, fingerprint
from sley_core.api.parts import ALIGNMENT_BYTES, round_up
from sley_core.errors import RunError
from sley_memory.arena import HostArena
from sley_memory.movers import HostCopy, Mover, Pieces, Streams, is_resizable, make_room

Report = list[tuple[str, int, int]]  # name, bytes and fingerprint of each piece of one rank


class SharedCopies(Mover):
    """Offloads the storages that `pieces` returns, one `part` of a run. All ranks of the run must make each call.

    group: the ranks that may have equal memory. control: all ranks, which compare their calls before memory is freed.
    bucket_bytes: the extra device memory that an onload needs.
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
        counters: Moved,
    ) -> None:
        super().__init__(counters)
        self._part = part
        self._pieces = pieces
        self._group = group
        self._control = control
        self._streams = streams
        self._arena = arena
        self._bucket_bytes = bucket_bytes
        self._distinct: list[StorageEntry] = []
        self._distinct_copies = HostCopy(lambda: self._distinct, streams, arena, bucket_bytes, counters)
        self._common: list[StorageEntry] = []
        self._given_back = 0
        self._host: Tensor | None = None
        self._is_away = False
        self._leaving: tuple[CopyEvent, float, int] | None = None

    @property
    def where(self) -> Where:
        """Returns the state of the memory."""
        state = self._distinct_copies.where
        return Where.AWAY if self._is_away and state is Where.HERE else state

    def offload(self) -> None:
        """Copies this rank's part of the memory that is equal on the group, and all other memory in full, then frees all of it.
        Raises RunError `ranks-differ` on all ranks, before memory is freed, if a rank makes another call.
        """
        pieces: dict[str, StorageEntry] = {}
        if not self._is_away:
            self.require()
            for piece in self._pieces():
                if piece.memory.numel() and is_resizable(piece):
                    name = next(iter(piece.tensors))
                    pieces[f"{name} {len(pieces)}" if name in pieces else name] = piece
        prints = [fingerprint(piece.memory) for piece in pieces.values()]
        hashes = torch.stack(prints).tolist() if prints else []
        report = [(name, piece.memory.numel(), number) for (name, piece), number in zip(pieces.items(), hashes, strict=True)]
        reports = self._exchange_reports("offload", report)
        if self._is_away:
            return
        member_reports = [set(reports[rank]) for rank in self._group.ranks]
        # By name: ranks may have created their states in different orders.
        common = sorted(
            name for name, *size_and_print in report if all((name, *size_and_print) in member for member in member_reports)
        )
        self._distinct = [piece for name, piece in pieces.items() if name not in set(common)]
        self._distinct_copies.offload()
        try:
            self._send([pieces[name] for name in common])
        except BaseException:
            self._distinct_copies.onload()
            raise
        self._is_away = True
        freed = sum(piece.free() for piece in self._common)
        # Both movers share counters; each adds only the bytes that its own last offload freed.
        self._moved.given_back += freed - self._given_back
        self._given_back = freed

    def _send(self, pieces: list[StorageEntry]) -> None:
        """Copies this rank's part of `pieces`, which are equal on the group, to the host."""
        self._common = pieces
        size = self._share_bytes()
        if self._host is not None and self._host.numel() != size:
            self._arena.release(self._host)
            self._host = None
        if size and self._host is None:
            (self._host,) = self._arena.allocate([size], self._moved)
        if self._host is not None:
            start_s = time.perf_counter()
            self._streams.out.wait_for_device()
            for memory, offset in self._slices(self._group.coord * size, size):
                self._streams.out.copy(self._host[offset : offset + memory.numel()], memory)
            # The allocator may reuse the memory for the next device work, which must wait for the copies.
            event = self._streams.out.record()
            event.hold_device()
            self._leaving = event, start_s, size
        self._moved.copied_out += size

    def onload(self) -> None:
        """Onloads all memory, bucket by bucket: this rank's part from its host, other parts from the other ranks.

        Raises RunError `ranks-differ` if a rank makes another call, and `collective-failed` if a peer has died; then the memory
        stays away.
        """
        self._exchange_reports("onload", [])
        if not self._is_away:
            return
        start_s = time.perf_counter()
        try:
            if self._common:
                make_room((piece.memory.numel() for piece in self._common), self._common[0].memory.device)
            for piece in self._common:
                piece.grow()
            self._gather()
        except BaseException:
            for piece in self._common:
                piece.free()
            raise
        self._is_away = False
        self._moved.seconds_in += time.perf_counter() - start_s
        self._moved.timed_in += self._share_bytes() * self._group.size
        self._common = []
        self._distinct_copies.onload()

    def _gather(self) -> None:
        """Copies this rank's part to the device and gathers the parts of other ranks, a bucket at a time."""
        size, count = self._share_bytes(), self._group.size
        if not size:
            return
        assert self._host is not None, "offloaded memory has no host copy"
        device = self._common[0].memory.device
        step = min(size, max(ALIGNMENT_BYTES, self._bucket_bytes // (count + 1) // ALIGNMENT_BYTES * ALIGNMENT_BYTES))
        local_part = torch.empty(step, dtype=torch.uint8, device=device)
        all_parts = torch.empty(count * step, dtype=torch.uint8, device=device)
        into = self._streams.into
        into.wait_for(self._streams.out.record())
        for start in range(0, size, step):
            length = min(step, size - start)
            into.wait_for_device()  # the previous gather has read this memory
            into.copy(local_part[:length], self._host[start : start + length])
            into.record().hold_device()
            # The ranks of the group have agreed on these pieces and on this call.
            label = f"the run's {self._part.replace('_', ' ')}, which were offloaded"
            self._group.all_gather(all_parts[: count * length], local_part[:length], label=label).wait()
            for rank in range(count):
                for memory, offset in self._slices(rank * size + start, length):
                    memory.copy_(all_parts[rank * length + offset : rank * length + offset + memory.numel()])
            self._moved.copied_in += length
            self._moved.gathered += (count - 1) * length
        into.record().wait()  # so that the measured time includes the copies

    def require(self) -> None:
        self._distinct_copies.require()

    def wait(self) -> None:
        if self._leaving is not None:
            event, start_s, size = self._leaving
            event.wait()
            self._moved.seconds_out += time.perf_counter() - start_s
            self._moved.timed_out += size
            self._leaving = None
        self._distinct_copies.wait()

    def host(self) -> Mapping[int, Tensor]:
        """Returns the host copies that this rank has in full, by `storage_id`, uint8 [bytes]. Waits for the copies."""
        return self._distinct_copies.host()

    def close(self) -> None:
        """Onloads the memory for use after the run. If other ranks do not answer, shared memory is lost: each of its bytes is
        set to 255 (NaN in floating point), with a warning.
        """
        if self._is_away:
            with suppress(RunError):
                self.onload()
        if self._is_away:
            for piece in self._common:
                piece.grow()
                piece.memory.fill_(255)
            self._distinct_copies.onload()
            self._is_away = False
            name = self._part.replace("_", " ")
            message = f"the run was closed while its {name} were offloaded, but not all ranks answered, so they are lost"
            warnings.warn(message, RuntimeWarning, 4)
        self._distinct_copies.wait()

    def _exchange_reports(self, call: str, report: Report) -> dict[int, Report]:
        """Returns the reports of all ranks by global rank. Raises RunError `ranks-differ` on all ranks unless all make the same
        call for the same part in the same state.
        """
        # All ranks call this for each `offload` and `onload` of each part, in the same order.
        message = [[call, self._part, self._is_away], report]
        messages = self._control.gather_objects(message, label=f"which memory `run.memory.{call}` moves")
        for rank, (state, _) in zip(self._control.ranks, messages, strict=True):
            if state != messages[0][0]:
                texts = [
                    f"calls `run.memory.{name}` for {part.replace('_', ' ')} that are "
                    f"{'offloaded' if is_away else 'on the device'}"
                    for name, part, is_away in (state, messages[0][0])
                ]
                raise RunError(
                    "ranks-differ",
                    f"rank {rank} {texts[0]}, but rank {self._control.ranks[0]} {texts[1]}",
                    hint="offload and onload the same parts in the same order on all ranks, since `shared = true`",
                )
        return {rank: [(*entry,) for entry in state] for rank, (_, state) in zip(self._control.ranks, messages, strict=True)}

    def _share_bytes(self) -> int:
        """Returns the bytes of common memory that each rank keeps: an even part of the concatenated, aligned pieces."""
        total = sum(round_up(piece.memory.numel(), ALIGNMENT_BYTES) for piece in self._common)
        return round_up(-(-total // self._group.size), ALIGNMENT_BYTES)

    def _slices(self, offset: int, length: int) -> Iterator[tuple[Tensor, int]]:
        """Yields the slices of common pieces in `length` bytes from `offset` of the concatenated, aligned pieces, each with its
        position relative to `offset`.
        """
        piece_start = 0
        for piece in self._common:
            size = piece.memory.numel()
            lower, upper = max(offset, piece_start), min(offset + length, piece_start + size)
            if lower < upper:
                yield piece.memory[lower - piece_start : upper - piece_start], lower - offset
            piece_start += round_up(size, ALIGNMENT_BYTES)
