"""Makes replicas equal: every copy of a weight or buffer gets the first copy's value. Core then checks that they are equal.

Values are sent as bytes: gloo supports few dtypes, a parameter may have any.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sley_core.api.comm import Pending, broadcast

if TYPE_CHECKING:
    from sley_core.api.comm import Group
    from sley_core.api.parts import Parts

CHUNK_BYTES = 64 << 20
"""Bytes in flight after which the broadcasts are awaited."""


def broadcast_values(parts: Parts) -> None:
    """Overwrites weights and buffers with those of the first rank of each group; blocks. All ranks must call it."""
    under_way: list[tuple[Tensor, Tensor, Pending]] = []
    num_bytes = 0
    for name, value, group in _replicated(parts):
        copy = value.contiguous()
        # Over the group that holds copies of this value; all of its ranks iterate over the registry in one order.
        under_way.append((value, copy, broadcast(_bytes(copy), group, what=name)))
        num_bytes += value.nbytes
        if num_bytes > CHUNK_BYTES:
            _take(under_way)
            num_bytes = 0
    _take(under_way)


def _replicated(parts: Parts) -> Iterator[tuple[str, Tensor, Group]]:
    """Yields name, value and group: parameters with their reduce group, buffers with the stage's; in the order of the
    registry.
    """
    for param in parts.registry:
        group = parts.groups[param.reduce_group]
        if group.has_peers and param.numel:
            yield param.name, param.parameter.detach(), group
    stage = parts.groups["stage"]
    for layer in parts.layers if stage.has_peers else ():
        for name, buffer in layer.module.named_buffers(layer.name):
            if buffer.numel():
                yield name, buffer, stage


def _take(under_way: list[tuple[Tensor, Tensor, Pending]]) -> None:
    """Waits for all broadcasts and writes contiguous copies back to their values.

    Equal values are not written: an expanded tensor cannot be, unless its value differs.
    """
    for value, copy, pending in under_way:
        pending.wait()
        if copy.data_ptr() != value.data_ptr() and not torch.equal(_bytes(copy), _bytes(value.contiguous())):
            value.copy_(copy)
    under_way.clear()


def _bytes(value: Tensor) -> Tensor:
    """Returns the memory of `value`, which is contiguous, as a uint8 view."""
    return value.reshape(-1).view(torch.uint8)
