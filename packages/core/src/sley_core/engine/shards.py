"""How a weight is cut over the ranks of `wp`: equal stretches of its first dim, the last ones padded with zeros.

    5 rows over 2 ranks     | 0 1 2 | 3 4 . |      . a row of zeros, which no gradient ever changes

Every rank holds as many rows, so that buffers, buckets and messages are alike everywhere. Values are drawn whole and then
cut, so they do not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sley_core.comm.collectives import all_gather
from sley_core.model.build import like

if TYPE_CHECKING:
    from sley_core.comm.groups import Group, Groups
    from sley_core.engine.book import Entry
    from sley_core.model.layers import Layer

AXIS = "wp"
"""The axis over which weights are cut."""

REDUCE_GROUP = "wdp"
"""The axis over which the gradient of a shard is still partial, once a communicator has reduced it over `wp`."""

Place = tuple[nn.Module, str]
"""A module, and the attribute under which it holds a parameter."""


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count` of a tensor of the global `shape`, along dim 0."""

    shape: tuple[int, ...]
    count: int
    index: int

    @property
    def rows(self) -> int:
        """Rows of a shard, padding included; the same on every rank."""
        return -(-self.shape[0] // self.count)

    @property
    def own_rows(self) -> int:
        """Rows of this shard that are rows of the whole."""
        return max(0, min(self.rows, self.shape[0] - self.index * self.rows))

    @property
    def padding(self) -> int:
        """Elements of this shard that are no elements of the whole."""
        return (self.rows - self.own_rows) * prod(self.shape[1:])

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's rows of `whole`, in memory of their own, padded with zeros."""
        assert tuple(whole.shape) == self.shape, f"a tensor of {list(whole.shape)} for a shard of {list(self.shape)}"
        own = whole.new_zeros((self.rows, *self.shape[1:]))
        first = self.index * self.rows
        own[: self.own_rows].copy_(whole[first : first + self.own_rows])
        return own


Shards = dict[int, Shard]
"""By id of the parameter on meta, which the model's layers keep alive."""


def shards_of(layers: Iterable[Layer], takes: Callable[[Sequence[Place]], bool], group: Group) -> Shards:
    """The shards of those parameters of the whole model that can be cut, the same on all ranks but for their index.

    takes: whether a parameter that is held at all of these places can be.
    """
    places: dict[int, list[Place]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for layer in layers:
        for module in layer.module.modules():
            for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                places.setdefault(id(parameter), []).append((module, attribute))
                parameters[id(parameter)] = parameter
    return {
        key: Shard(tuple(parameters[key].shape), group.size, group.coord)
        for key, held in places.items()
        if group.size > 1 and parameters[key].ndim > 0 and takes(held)
    }


def cut_on_meta(layers: Iterable[Layer], shards: Shards) -> None:
    """What `materialize` does to the parameters of `layers`, without values: for a fake world."""
    cut: dict[int, nn.Parameter] = {}
    for layer in layers:
        for module in layer.module.modules():
            for attribute, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                shard = shards.get(id(parameter))
                if shard is not None:
                    small = torch.empty((shard.rows, *shard.shape[1:]), device="meta", dtype=parameter.dtype)
                    setattr(module, attribute, cut.setdefault(id(parameter), like(parameter, small)))


def wholes(parts: Mapping[Entry, Tensor], groups: Groups) -> dict[Entry, Tensor]:
    """Copies of the wholes of which `parts`, each of the shape of its entry's parameter, are this rank's.

    One collective over `wp` per dtype of what is sharded: its ranks ask for the same entries in the same order.
    """
    found = {entry: own.detach().clone() for entry, own in parts.items() if entry.shard is None}
    sharded = {entry: own.detach() for entry, own in parts.items() if entry.shard is not None}
    for dtype in dict.fromkeys(own.dtype for own in sharded.values()):
        alike = {entry: own for entry, own in sharded.items() if own.dtype == dtype}
        sent = torch.cat([own.reshape(-1) for own in alike.values()])
        received = sent.new_empty((groups[AXIS].size, sent.numel()))
        all_gather(received, sent[None], groups[AXIS], what="parts of parameters", lane="gather").wait()
        slices = torch.split(received, [own.numel() for own in alike.values()], dim=1)
        for (entry, own), every in zip(alike.items(), slices, strict=True):
            found[entry] = every.reshape(-1, *own.shape[1:])[: entry.shape[0]].clone()
    return {entry: found[entry] for entry in parts}
