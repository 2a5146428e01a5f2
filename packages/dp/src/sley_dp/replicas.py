"""Replicas start equal: every copy of a weight or buffer has the first copy's value, or the run says which has not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sley_core.comm.collectives import all_reduce, broadcast
from sley_core.errors import RunError

if TYPE_CHECKING:
    from sley_core.comm.groups import Group
    from sley_core.run import Run

CHUNK_BYTES = 64 << 20
"""How much is under way at a time."""


def broadcast_values(run: Run) -> None:
    """Gives this rank the values of the first rank of each group; a collective over every reduce group."""
    pending = []
    num_bytes = 0
    for name, value, group in _replicated(run):
        # The group over which this value is replicated; all of its ranks walk the book in one order.
        pending.append(broadcast(value, group, what=name))
        num_bytes += value.numel() * value.element_size()
        if num_bytes > CHUNK_BYTES:
            for one in pending:
                one.wait()
            pending, num_bytes = [], 0
    for one in pending:
        one.wait()


def check_values(run: Run) -> None:
    """Raises RunError `replicas-differ` on every rank of a group alike, naming the values that are not equal."""
    differing = []
    for name, value, group in _replicated(run):
        most = _fingerprint(value)
        least = most.clone()
        # The group over which this value is replicated; all of its ranks walk the book in one order.
        all_reduce(most, group, "max", what=name).wait()
        all_reduce(least, group, "min", what=name).wait()
        if not torch.equal(most, least):
            differing.append(name)
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise RunError(
            "replicas-differ",
            f"replicas do not start equal: {', '.join(differing[:3])}{more}",
            hint='let the model draw from torch\'s generator alone, or use `start = "broadcast"`',
        )


def _replicated(run: Run) -> Iterator[tuple[str, Tensor, Group]]:
    """Parameters over their reduce group, buffers over the stage, in the order of the book."""
    for entry in run.book:
        group = run.groups[entry.reduce_group]
        if group.size > 1:
            yield entry.name, entry.parameter.data, group
    stage = run.groups["stage"]
    for layer in run.layers if stage.size > 1 else ():
        for name, buffer in layer.module.named_buffers(layer.name):
            yield name, buffer, stage


def _fingerprint(value: Tensor) -> Tensor:
    """A 64-bit sum over the bits, position included: equal for equal values, different for almost all others."""
    bits = value.detach().contiguous().reshape(-1).view(torch.uint8).to(torch.int64)
    place = torch.arange(1, bits.numel() + 1, device=bits.device)
    return ((bits + 1) * (place * 2654435761 % (1 << 31))).sum().reshape(1)
