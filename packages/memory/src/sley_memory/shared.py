"""Offloads memory that is equal on several ranks: each rank keeps a part on its host.

    rank 0   a a a a b b b c c   ── offload ──>  host of rank 0:  a a a a b     the equal memory, concatenated, in even parts
    rank 1   a a a a b b b c c                   host of rank 1:  b b c c
                                 <── onload ───  each copies its part to the device, then they gather

Memory that differs, such as sharded master weights, is kept in full. All ranks of the run must make the same calls. Ranks
compare fingerprints to find equal memory without moving it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress

import torch
from torch import Tensor

from sley_core.api.comm import Group
from sley_core.api.memory import Moved, Part, StorageEntry, Where, fingerprint, storage_id
from sley_core.api.parts import ALIGNMENT_BYTES, round_up
from sley_core.errors import RunError
from sley_memory.arena import HostArena
from sley_memory.movers import HostCopy, ListStorages, Streams, is_resizable, reserve_segment

Report = list[tuple[str, int, int]]
"""The name, bytes and fingerprint of each storage of one rank."""


class _LocalSlice(StorageEntry):
    """This rank's part of a storage that is equal on several ranks. `SharedCopies` frees and allocates the whole storage."""

    def free(self) -> int:
        return 0

    def grow(self) -> None: ...


class SharedCopies(HostCopy):
    """Offloads the storages that `list_storages` returns, one `part` of a run. All ranks of the run must make each call.

    group: the ranks that may have equal memory. control: all ranks, which compare their calls before memory is freed.
    bucket_bytes: the extra device memory that an onload needs.
    """

    def __init__(
        self,
        part: Part,
        list_storages: ListStorages,
        group: Group,
        control: Group,
        streams: Streams,
        arena: HostArena,
        bucket_bytes: int,
        counters: Moved,
    ) -> None:
        super().__init__(self._list_local_storages, streams, arena, bucket_bytes, counters, reserves_segment=False)
        self._part = part
        self._list_all_storages = list_storages
        self._group = group
        self._control = control
        self._distinct: list[StorageEntry] = []
        self._common: list[StorageEntry] = []
        self._slices: list[StorageEntry] = []
        self._num_peer_bytes = 0

    def offload(self) -> None:
        """Copies this rank's part of the memory that is equal on the group, and all other memory in full, then frees all of it.
        Raises RunError `ranks-differ` on all ranks, before memory is freed, if a rank makes another call.
        """
        storages: dict[str, StorageEntry] = {}
        if not self._is_away:
            self.require()
            for storage in self._list_all_storages():
                if storage.memory.numel() and is_resizable(storage):
                    name = next(iter(storage.tensors))
                    storages[f"{name} {len(storages)}" if name in storages else name] = storage
        fingerprints = [fingerprint(storage.memory) for storage in storages.values()]
        hashes = torch.stack(fingerprints).tolist() if fingerprints else []
        sizes = [storage.memory.numel() for storage in storages.values()]
        report = list(zip(storages, sizes, hashes, strict=True))
        reports = self._exchange_reports("offload", report)
        if self._is_away:
            return
        member_reports = [set(reports[rank]) for rank in self._group.ranks]
        # By name: ranks may have created their states in different orders.
        common_names = sorted(entry[0] for entry in report if all(entry in member for member in member_reports))
        self._common = [storages[name] for name in common_names]
        self._distinct = [storage for name, storage in storages.items() if name not in set(common_names)]
        size = self._share_bytes()
        self._slices = [_LocalSlice(memory, {}) for memory, _ in self._common_slices(self._group.coord * size, size)]
        super().offload()
        num_local_bytes = sum(storage.memory.numel() for storage in self._slices)
        num_peer_bytes = sum(storage.free() for storage in self._common) - num_local_bytes
        self._counters.given_back += num_peer_bytes - self._num_peer_bytes
        self._num_peer_bytes = num_peer_bytes

    def onload(self) -> None:
        """Onloads all memory, bucket by bucket: this rank's part from its host, other parts from the other ranks.

        Raises RunError `ranks-differ` if a rank makes another call, and `collective-failed` if a peer has died; then the memory
        stays away.
        """
        self._exchange_reports("onload", [])
        if not self._is_away:
            return
        offloaded = self._offloaded
        if storages := [*self._common, *self._distinct]:
            reserve_segment((storage.memory.numel() for storage in storages), storages[0].memory.device)
        try:
            for storage in self._common:
                storage.grow()
            self._start_onload()
            if self._common:
                self.wait()
                self._gather()
        except BaseException:
            self._streams.wait()
            for storage in storages:
                storage.free()
            self._where, self._copies, self._offloaded = Where.AWAY, None, offloaded
            raise
        self._common = []

    def _list_local_storages(self) -> list[StorageEntry]:
        return [*self._distinct, *self._slices]

    @property
    def _is_away(self) -> bool:
        """Whether the memory is offloaded, even if its copies are in flight. The value is equal on all ranks."""
        return self._where in (Where.LEAVING, Where.AWAY)

    def _gather(self) -> None:
        """Gathers the parts of other ranks, a bucket at a time. This rank's part is on the device."""
        size, num_ranks, coord = self._share_bytes(), self._group.size, self._group.coord
        device = self._common[0].memory.device
        step = min(size, max(ALIGNMENT_BYTES, self._bucket_bytes // (num_ranks + 1) // ALIGNMENT_BYTES * ALIGNMENT_BYTES))
        local_part = torch.empty(step, dtype=torch.uint8, device=device)
        all_parts = torch.empty(num_ranks * step, dtype=torch.uint8, device=device)
        for start in range(0, size, step):
            length = min(step, size - start)
            for memory, offset in self._common_slices(coord * size + start, length):
                local_part[offset : offset + memory.numel()].copy_(memory)
            # The ranks of the group have agreed on these storages and on this call.
            label = f"the run's {self._part.replace('_', ' ')}, which were offloaded"
            self._group.all_gather(all_parts[: num_ranks * length], local_part[:length], label=label).wait()
            for rank in set(range(num_ranks)) - {coord}:
                for memory, offset in self._common_slices(rank * size + start, length):
                    memory.copy_(all_parts[rank * length + offset : rank * length + offset + memory.numel()])
            self._counters.gathered += (num_ranks - 1) * length

    def host(self) -> Mapping[int, Tensor]:
        """Returns the host copies that this rank has in full, by `storage_id`, uint8 [bytes]. Waits for the copies."""
        distinct_ids = {storage_id(storage.memory) for storage in self._distinct}
        return {key: copy for key, copy in super().host().items() if key in distinct_ids}

    def close(self) -> None:
        """Onloads the memory for use after the run. If other ranks do not answer, shared memory is lost: each of its bytes is
        set to 255 (NaN in floating point), with a warning.
        """
        if self._is_away:
            with suppress(RunError):
                self.onload()
        if self._is_away:
            for storage in self._common:
                storage.grow()
            self._start_onload()
            self.wait()
            for storage in self._common:
                storage.memory.fill_(255)
            name = self._part.replace("_", " ")
            message = f"the run was closed while its {name} were offloaded, but not all ranks answered, so they are lost"
            warnings.warn(message, RuntimeWarning, 4)
        self.wait()

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
        """Returns the bytes of common memory that each rank keeps: an even part of the concatenated, aligned storages."""
        total = sum(round_up(storage.memory.numel(), ALIGNMENT_BYTES) for storage in self._common)
        return round_up(-(-total // self._group.size), ALIGNMENT_BYTES)

    def _common_slices(self, offset: int, length: int) -> Iterator[tuple[Tensor, int]]:
        """Yields the slices of common storages in `length` bytes from `offset` of the concatenated, aligned storages.

        With each slice, yields its position relative to `offset`.
        """
        storage_start = 0
        for storage in self._common:
            size = storage.memory.numel()
            lower, upper = max(offset, storage_start), min(offset + length, storage_start + size)
            if lower < upper:
                yield storage.memory[lower - storage_start : upper - storage_start], lower - offset
            storage_start += round_up(size, ALIGNMENT_BYTES)
