"""Replicas start equal: every copy of a weight or buffer has the first copy's value, or the run says which has not.

Values are sent and compared as bytes: gloo knows few types, a parameter may have any.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sley_core.comm.collectives import Pending, all_reduce, broadcast
from sley_core.errors import RunError

if TYPE_CHECKING:
    from sley_core.comm.groups import Group
    from sley_core.run import Run

CHUNK_BYTES = 64 << 20
"""How much is broadcast at a time."""

CHUNK_ELEMENTS = 1 << 20
"""How much is fingerprinted at a time: the working memory is a few times 8 bytes for each."""

SHOWN = 3


def broadcast_values(run: Run) -> None:
    """Gives this rank the values of the first rank of each group; a collective over every reduce group."""
    under_way: list[tuple[Tensor, Tensor, Pending]] = []
    num_bytes = 0
    for name, value, group in _replicated(run):
        copy = value.contiguous()
        # The group over which this value is replicated; all of its ranks walk the book in one order.
        under_way.append((value, copy, broadcast(_bytes(copy), group, what=name)))
        num_bytes += value.nbytes
        if num_bytes > CHUNK_BYTES:
            _take(under_way)
            num_bytes = 0
    _take(under_way)


def check_values(run: Run) -> None:
    """Raises RunError `replicas-differ` on every rank of a group alike, naming the values that are not equal."""
    names: dict[str, list[str]] = {}
    prints: dict[str, list[Tensor]] = {}
    for name, value, group in _replicated(run):
        names.setdefault(group.axis, []).append(name)
        prints.setdefault(group.axis, []).append(fingerprint(value))
    differing: list[str] = []
    for axis, group_names in names.items():
        most = torch.stack(prints[axis])
        least = most.clone()
        # The group over which these values are replicated; all of its ranks come to the groups in the book's order.
        all_reduce(most, run.groups[axis], "max", what="the largest fingerprints").wait()
        all_reduce(least, run.groups[axis], "min", what="the smallest fingerprints").wait()
        differing += [name for name, same in zip(group_names, (most == least).tolist(), strict=True) if not same]
    if differing:
        more = f" and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
        raise RunError(
            "replicas-differ",
            f"replicas do not start equal: {', '.join(differing[:SHOWN])}{more}",
            hint='let the model draw from torch\'s generator alone, or use `start = "broadcast"`',
        )


def fingerprint(value: Tensor) -> Tensor:
    """An int64 scalar from the bytes and their places: equal for equal values, different for almost all others."""
    data = _bytes(value.contiguous())
    total = torch.zeros((), dtype=torch.int64, device=value.device)
    for start in range(0, data.numel(), CHUNK_ELEMENTS):
        chunk = data[start : start + CHUNK_ELEMENTS].to(torch.int64)
        places = torch.arange(start + 1, start + 1 + chunk.numel(), device=value.device)
        total += ((chunk + 1) * (places * 2654435761 % (1 << 31))).sum()
    return total


def _replicated(run: Run) -> Iterator[tuple[str, Tensor, Group]]:
    """Parameters over their reduce group, buffers over the stage, in the order of the book."""
    for entry in run.book:
        group = run.groups[entry.reduce_group]
        if group.size > 1 and entry.numel:
            yield entry.name, entry.parameter.detach(), group
    stage = run.groups["stage"]
    for layer in run.layers if stage.size > 1 else ():
        for name, buffer in layer.module.named_buffers(layer.name):
            if buffer.numel():
                yield name, buffer, stage


def _take(under_way: list[tuple[Tensor, Tensor, Pending]]) -> None:
    """Waits for all, and writes those back that had to be copied; not an expanded one, unless it has to be told."""
    for value, copy, pending in under_way:
        pending.wait()
        if copy.data_ptr() != value.data_ptr() and not torch.equal(_bytes(copy), _bytes(value.contiguous())):
            value.copy_(copy)
    under_way.clear()


def _bytes(value: Tensor) -> Tensor:
    """The memory of `value`, which is contiguous, as a view."""
    return value.reshape(-1).view(torch.uint8)
