"""Checks that copies of a weight or buffer start equal, and names those that do not: replicas that start apart stay apart.

Compared once, before the first step, by every rank that holds a copy, whatever reduces its gradients: parameters over their
reduce group and, if several stages hold one, over its tie group; buffers over the stage. A model draws the same values on all
ranks if it draws from torch's generator; numpy's, or one of its own, has another state on each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sley_core.comm.collectives import all_gather, all_reduce, gather_objects
from sley_core.errors import RunError

if TYPE_CHECKING:
    from sley_core.comm.groups import Group
    from sley_core.engine.parts import Parts

CHUNK_WORDS = 1 << 20
"""How many words of 8 bytes are fingerprinted at a time: the working memory is a few times that."""

SHOWN = 3
_ODD = 2654435761


def check_first_values(parts: Parts, per_rank_buffers: Sequence[str] = ()) -> None:
    """Compares the first values of copies by fingerprint. Blocking collectives: all ranks call it. Raises RunError
    `ranks-differ` on all ranks of the run alike, naming the values that differ, and where.

    per_rank_buffers: patterns of the buffers that may differ between ranks.
    """
    by_axis: dict[str, list[tuple[str, Tensor]]] = {}
    for name, value, axis in _copies(parts, per_rank_buffers):
        by_axis.setdefault(axis, []).append((name, value))
    faults = []
    # The ranks of a stage hold the same entries, and so do those of a tie. All ranks take the axes in one order: no deadlock.
    for axis in sorted(by_axis):
        names = [name for name, _ in by_axis[axis]]
        prints = torch.stack([fingerprint(value) for _, value in by_axis[axis]])
        faults.append(_differing(names, prints, parts.groups[axis]))
    # All ranks must raise: those of other groups would wait for the ones that stop.
    everyone = gather_objects(faults, parts.groups["control"], what="first values that differ")
    if fault := next((fault for found in everyone for fault in found if fault), ""):
        hint = (
            "let the model draw from torch's generator alone, and load weights on every rank"
            ' (or `start = "broadcast"` of `dp.bucketed`: the first rank\'s)'
        )
        raise RunError("ranks-differ", fault, hint=hint)


def fingerprint(value: Tensor) -> Tensor:
    """Returns an int64 scalar computed from the bytes and their positions: equal for equal values, different for almost all
    others.
    """
    data = value.contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    words = data[:whole].clone().view(torch.int64) if data.data_ptr() % 8 else data[:whole].view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=value.device)
    for start in range(0, words.numel(), CHUNK_WORDS):
        chunk = words[start : start + CHUNK_WORDS]
        places = torch.arange(start + 1, start + 1 + chunk.numel(), device=value.device)
        total += ((chunk + 1) * (places * _ODD | 1)).sum()
    rest = data[whole:].to(torch.int64)
    return total + ((rest + 1) * (torch.arange(1, 1 + rest.numel(), device=value.device) * _ODD | 1)).sum()


def _copies(parts: Parts, per_rank_buffers: Sequence[str]) -> Iterator[tuple[str, Tensor, str]]:
    """Yields name, value and axis of each value of which the ranks of that axis hold copies, in the same order on all ranks."""
    for entry in sorted(parts.book, key=lambda entry: entry.name):
        for axis in (entry.reduce_group, entry.tie_group):
            if axis is not None and parts.groups[axis].size > 1 and entry.numel:
                yield entry.name, entry.parameter.detach(), axis
    for layer in parts.layers if parts.groups["stage"].size > 1 else ():
        for name, buffer in layer.module.named_buffers(layer.name):
            if buffer.numel() and not any(fnmatchcase(name, pattern) for pattern in per_rank_buffers):
                yield name, buffer, "stage"


def _differing(names: list[str], prints: Tensor, group: Group) -> str:
    """Compares fingerprints over `group`, whose ranks pass the same names, by blocking collectives. Returns the text of what
    differs, or "".
    """
    extremes = torch.stack([prints, ~prints])  # the maximum of ~x is ~(the minimum of x)
    all_reduce(extremes, group, "max", what="the fingerprints of first values").wait()
    is_odd = extremes[0] != ~extremes[1]
    if not is_odd.any():
        return ""
    differing = [name for name, odd in zip(names, is_odd.tolist(), strict=True) if odd]
    own = prints[is_odd][:1].contiguous()
    every = own.new_empty(group.size)
    all_gather(every, own, group, what="the fingerprints that differ").wait()
    other = next(rank for rank, one in zip(group.ranks, every.tolist(), strict=True) if one != int(every[0]))
    more = f" and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
    return f"first values differ between rank {group.ranks[0]} and rank {other}: {', '.join(differing[:SHOWN])}{more}"
