"""Lays small optimizer states together once they have left: one copy moves many of them.

A model of 500 small parameters has 1000 states, and a copy of a few hundred bytes takes as long as one of 200 KB. The tensors
stay the objects that the optimizer has; what changes, once, is the storage in which they lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sley_core.api.memory import Holding, is_plain
from sley_memory.offload.arena import aligned
from sley_memory.offload.parked import can_leave

SMALL = 1 << 20
"""Bytes. A larger copy takes 40 us and more at 25 GB/s, beside which what it takes to start one does not count."""

OWNERS = 3
"""Of a storage that nothing else looks at: its tensor, the view of the whole in `Holding`, and the object that Python has."""


def packed(pieces: Sequence[Holding], most_bytes: int) -> list[Holding]:
    """Moves small storages that one tensor alone looks at into larger ones of up to `most_bytes`; returns all storages that
    there are then.

    The device's memory must be here. What a program has of a state beside the optimizer's own tensor, such as a view, would
    look at the old memory: such a state stays where it is.
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
    flat = torch.zeros(
        sum(aligned(piece.memory.numel()) for piece in run), dtype=torch.uint8, device=run[0].memory.device
    )
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
