"""Checks that copies of a weight or buffer are equal, and names those that are not: replicas that are apart stay apart.

Compared before the first step, and again from time to time, by every rank that holds a copy, whatever reduces its gradients:
parameters over their reduce group and, if several stages hold one, over its tie group; buffers over the stage. First values
differ if a model draws from a generator that has another state on each rank; later ones, if a forward writes weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sley_core.comm.collectives import all_gather, all_reduce, gather_objects
from sley_core.errors import RunError
from sley_core.model.storage import fingerprint

if TYPE_CHECKING:
    from sley_core.comm.groups import Group
    from sley_core.engine.parts import Parts

SHOWN = 3


class CopyComparison:
    """Compares the weights and buffers of which several ranks have copies, each time it is called.

    per_rank_buffers: patterns of the buffers that may differ between ranks.
    """

    def __init__(self, parts: Parts, per_rank_buffers: Sequence[str] = ()) -> None:
        self.parts = parts
        self.per_rank_buffers = per_rank_buffers
        self._is_first = True

    def __call__(self) -> None:
        """Waits until weights are those of the last step, and compares them. All ranks call it, and it communicates. Raises
        RunError `ranks-differ`.
        """
        is_first, self._is_first = self._is_first, False
        if not is_first:
            self.parts.weights.settle()
            for layer in self.parts.layers:
                self.parts.waits.wait_for(layer.name)
        check_copies(self.parts, self.per_rank_buffers, is_first=is_first)


def check_copies(parts: Parts, per_rank_buffers: Sequence[str] = (), *, is_first: bool) -> None:
    """Compares the values of copies by fingerprint. Blocking collectives: all ranks call it. Raises RunError
    `ranks-differ` on all ranks of the run alike, naming the values that differ, and where.

    per_rank_buffers: patterns of the buffers that may differ between ranks. is_first: whether no step was taken yet.
    """
    what = "first values" if is_first else "values"
    by_axis: dict[str, list[tuple[str, Tensor]]] = {}
    for name, value, axis in _copies(parts, per_rank_buffers):
        by_axis.setdefault(axis, []).append((name, value))
    faults = []
    # The ranks of a stage hold the same entries, and so do those of a tie. All ranks take the axes in one order: no deadlock.
    for axis in sorted(by_axis):
        names = [name for name, _ in by_axis[axis]]
        prints = torch.stack([fingerprint(value) for _, value in by_axis[axis]])
        faults.append(_differing(what, names, prints, parts.groups[axis]))
    # All ranks must raise: those of other groups would wait for the ones that stop.
    everyone = gather_objects(faults, parts.groups["control"], what="first values that differ")
    if fault := next((fault for found in everyone for fault in found if fault), ""):
        hint = (
            "let the model draw from torch's generator, `random` or numpy alone, and load weights on every rank"
            ' (or `start = "broadcast"` of `dp.bucketed`: the first rank\'s)'
            if is_first
            else "write weights and buffers on all ranks alike, and let an optimizer draw from torch's generator"
        )
        raise RunError("ranks-differ", fault, hint=hint)


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


def _differing(what: str, names: list[str], prints: Tensor, group: Group) -> str:
    """Compares fingerprints over `group`, whose ranks pass the same names, by blocking collectives. Returns the text of what
    differs, or "".
    """
    extremes = torch.stack([prints, ~prints])  # the maximum of ~x is ~(the minimum of x)
    all_reduce(extremes, group, "max", what=f"the fingerprints of {what}").wait()
    is_odd = extremes[0] != ~extremes[1]
    if not is_odd.any():
        return ""
    differing = [name for name, odd in zip(names, is_odd.tolist(), strict=True) if odd]
    own = prints[is_odd][:1].contiguous()
    every = own.new_empty(group.size)
    all_gather(every, own, group, what="the fingerprints that differ").wait()
    other = next(rank for rank, one in zip(group.ranks, every.tolist(), strict=True) if one != int(every[0]))
    more = f" and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
    return f"{what} differ between rank {group.ranks[0]} and rank {other}: {', '.join(differing[:SHOWN])}{more}"
