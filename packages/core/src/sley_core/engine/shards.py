"""How a weight is sharded over the ranks of `wp`: equal ranges of one of its dims, the last ones padded with zeros.

    5 rows over 2 ranks     | 0 1 2 | 3 4 . |      . a row of zeros, which no gradient ever changes

Rows (dim 0) or columns (dim 1), as the communicator decides. Every rank holds the same size, so that buffers, buckets and
messages have the same shape everywhere. Initial values are drawn for the full weight and then cut, so they do not depend on the
layout.
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
"""The share of a model's parameters that may stay unsharded without a note; norms and biases are less."""

NAMED = 3
"""How many of the unsharded kinds are named in that note."""

Place = tuple[nn.Module, str]
"""A module, and the attribute under which it holds a parameter."""


@dataclass(frozen=True)
class Shard:
    """Names part `index` of `count` of a tensor with the full `shape`, along `dim`."""

    shape: tuple[int, ...]
    count: int
    index: int
    dim: int = 0

    @property
    def size(self) -> int:
        """Size of a shard along `dim`, padding included; the same on every rank."""
        return -(-self.shape[self.dim] // self.count)

    @property
    def own_size(self) -> int:
        """Size of this rank's shard along `dim` without padding; may be 0."""
        return max(0, min(self.size, self.shape[self.dim] - self.index * self.size))

    @property
    def own_shape(self) -> tuple[int, ...]:
        """Shape of a shard, padding included; the same on every rank."""
        return (*self.shape[: self.dim], self.size, *self.shape[self.dim + 1 :])

    @property
    def padding(self) -> int:
        """Number of padding elements in this rank's shard."""
        return (self.size - self.own_size) * prod((*self.shape[: self.dim], *self.shape[self.dim + 1 :]))

    def cut(self, whole: Tensor) -> Tensor:
        """Returns this rank's shard of the full tensor `whole`: a copy of shape `own_shape`, padded with zeros."""
        assert tuple(whole.shape) == self.shape, f"a tensor of {list(whole.shape)} for a shard of {list(self.shape)}"
        own = whole.new_zeros(self.own_shape)
        first = min(self.index * self.size, self.shape[self.dim])
        own.narrow(self.dim, 0, self.own_size).copy_(whole.narrow(self.dim, first, self.own_size))
        return own

    def joined(self, parts: Tensor) -> Tensor:
        """Returns the full tensor, a contiguous copy, from all ranks' shards in `parts` [count, *own_shape]; drops the
        padding.
        """
        padded = parts.movedim(0, self.dim).flatten(self.dim, self.dim + 1)
        return padded.narrow(self.dim, 0, self.shape[self.dim]).clone(memory_format=torch.contiguous_format)


Shards = dict[int, Shard]
"""By id of the parameter on meta, which the model's layers keep alive."""


def shards_of(layers: Iterable[Layer], cuts: Callable[[Sequence[Place]], int | None], group: Group) -> Shards:
    """Returns the shards of all parameters of the full model that can be sharded; the same on all ranks but for their index.

    cuts: returns the dim along which to shard a parameter held at all of these places; None leaves it unsharded. The result is
    empty if `group` has one rank.
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
    """Returns one line of text that names the modules with unsharded parameters, the largest first; no line if they are few.

    layers: of the full model, on meta. Modules of one class and kind are named together, as `blocks.*.experts (Experts, 12)`.
    """
    sizes = {
        id(one): (name, type(module).__name__, one.numel())
        for layer in layers
        for name, module in layer.module.named_modules(prefix=layer.name)
        for one in module.parameters(recurse=False)
    }
    total = sum(numel for _, _, numel in sizes.values())
    whole: dict[tuple[str, str], int] = {}
    modules: dict[tuple[str, str], set[str]] = {}
    for key, (name, kind, numel) in sizes.items():
        if key not in shards:
            alike = ".".join("*" if part.isdigit() else part for part in name.split(".")), kind
            whole[alike] = whole.get(alike, 0) + numel
            modules.setdefault(alike, set()).add(name)
    left = sum(whole.values())
    if not shards or left <= FEW * total:
        return []
    largest = sorted(whole, key=lambda alike: -whole[alike])
    names = [f"{name} ({kind}, {len(modules[name, kind])})" for name, kind in largest[:NAMED]]
    more = f", and {len(largest) - NAMED} more" if len(largest) > NAMED else ""
    share = 100 * (total - left) / total
    return [f"`{AXIS}` shards {share:.0f} % of this model's parameters; not sharded: {', '.join(names)}{more}"]


def cut_on_meta(layers: Iterable[Layer], shards: Shards) -> None:
    """Replaces the parameters of `layers` by shards on meta, as `materialize` does with values; for a fake world."""
    cut: dict[int, nn.Parameter] = {}
    for layer in layers:
        for module in layer.module.modules():
            for attribute, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                shard = shards.get(id(parameter))
                if shard is not None:
                    small = torch.empty(shard.own_shape, device="meta", dtype=parameter.dtype)
                    setattr(module, attribute, cut.setdefault(id(parameter), like(parameter, small)))


def wholes(parts: Mapping[Entry, Tensor], groups: Groups) -> dict[Entry, Tensor]:
    """Returns full copies of sharded tensors: `parts` holds this rank's shard of each, of the shape of its entry's parameter.

    Communicates: one all-gather over `wp` per sharded dtype, so its ranks must pass the same entries in the same order. An
    unsharded tensor is cloned.
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
