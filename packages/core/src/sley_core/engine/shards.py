"""How a weight is cut over the ranks of `wp`: equal stretches of one of its dims, the last ones padded with zeros.

    5 rows over 2 ranks     | 0 1 2 | 3 4 . |      . a row of zeros, which no gradient ever changes

Rows (dim 0) or columns (dim 1), as the communicator says. Every rank holds as much, so that buffers, buckets and messages are
alike everywhere. Values are drawn whole and then cut, so they do not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sley_core.comm.collectives import all_gather
from sley_core.model.layers import like

if TYPE_CHECKING:
    from sley_core.comm.groups import Group, Groups
    from sley_core.engine.book import Entry
    from sley_core.model.layers import Layer

AXIS = "wp"
"""The axis over which weights are cut."""

REDUCE_GROUP = "wdp"
"""The axis over which the gradient of a shard is still partial, once a communicator has reduced it over `wp`."""

FEW = 0.01
"""The share of a model's parameters that may stay whole without a word: norms and biases are no more."""

NAMED = 3
"""How many of the others are named."""

Place = tuple[nn.Module, str]
"""A module, and the attribute under which it holds a parameter."""


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count` of a tensor of the global `shape`, along `dim`."""

    shape: tuple[int, ...]
    count: int
    index: int
    dim: int = 0

    @property
    def size(self) -> int:
        """Of a shard along `dim`, padding included; the same on every rank."""
        return -(-self.shape[self.dim] // self.count)

    @property
    def own_size(self) -> int:
        """How much of this shard's size belongs to the whole."""
        return max(0, min(self.size, self.shape[self.dim] - self.index * self.size))

    @property
    def own_shape(self) -> tuple[int, ...]:
        """Of a shard, padding included; the same on every rank."""
        return (*self.shape[: self.dim], self.size, *self.shape[self.dim + 1 :])

    @property
    def padding(self) -> int:
        """Elements of this shard that are no elements of the whole."""
        return (self.size - self.own_size) * prod((*self.shape[: self.dim], *self.shape[self.dim + 1 :]))

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's part of `whole`, in memory of its own, padded with zeros."""
        assert tuple(whole.shape) == self.shape, f"a tensor of {list(whole.shape)} for a shard of {list(self.shape)}"
        own = whole.new_zeros(self.own_shape)
        first = min(self.index * self.size, self.shape[self.dim])
        own.narrow(self.dim, 0, self.own_size).copy_(whole.narrow(self.dim, first, self.own_size))
        return own

    def joined(self, parts: Tensor) -> Tensor:
        """A copy of the whole of which every rank's part is in `parts`, [count, *own_shape]."""
        padded = parts.movedim(0, self.dim).flatten(self.dim, self.dim + 1)
        return padded.narrow(self.dim, 0, self.shape[self.dim]).clone(memory_format=torch.contiguous_format)


Shards = dict[int, Shard]
"""By id of the parameter on meta, which the model's layers keep alive."""


def shards_of(layers: Iterable[Layer], cuts: Callable[[Sequence[Place]], int | None], group: Group) -> Shards:
    """The shards of those parameters of the whole model that can be cut, the same on all ranks but for their index.

    cuts: along which dim a parameter that is held at all of these places can be; None: not at all.
    """
    places: dict[int, list[Place]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for layer in layers:
        for module in layer.module.modules():
            for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                places.setdefault(id(parameter), []).append((module, attribute))
                parameters[id(parameter)] = parameter
    if group.size == 1:
        return {}
    dims = {key: cuts(held) for key, held in places.items() if parameters[key].ndim > 0}
    return {
        key: Shard(tuple(parameters[key].shape), group.size, group.coord, dim)
        for key, dim in dims.items()
        if dim is not None
    }


def left_whole(layers: Iterable[Layer], shards: Shards) -> list[str]:
    """One line of those parameters that every rank will hold whole, the largest first; none where they are few.

    layers: of the whole model, on meta. Layers of one kind are named together, as `blocks.*.experts.up`.
    """
    sizes = {
        id(one): (name, one.numel()) for layer in layers for name, one in layer.module.named_parameters(layer.name)
    }
    total = sum(numel for _, numel in sizes.values())
    whole: dict[str, int] = {}
    for key, (name, numel) in sizes.items():
        if key not in shards:
            kind = ".".join("*" if part.isdigit() else part for part in name.split("."))
            whole[kind] = whole.get(kind, 0) + numel
    left = sum(whole.values())
    if not shards or left <= FEW * total:
        return []
    names = sorted(whole, key=lambda kind: -whole[kind])
    more = f", and {len(names) - NAMED} more" if len(names) > NAMED else ""
    share = 100 * (total - left) / total
    return [
        f"sharded {share:.0f} % of the parameters over `{AXIS}`; whole on every rank: {', '.join(names[:NAMED])}{more}"
    ]


def cut_on_meta(layers: Iterable[Layer], shards: Shards) -> None:
    """What `materialize` does to the parameters of `layers`, without values: for a fake world."""
    cut: dict[int, nn.Parameter] = {}
    for layer in layers:
        for module in layer.module.modules():
            for attribute, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                shard = shards.get(id(parameter))
                if shard is not None:
                    small = torch.empty(shard.own_shape, device="meta", dtype=parameter.dtype)
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
            assert entry.shard is not None, entry
            found[entry] = entry.shard.joined(every.reshape(groups[AXIS].size, *own.shape))
    return {entry: found[entry] for entry in parts}
