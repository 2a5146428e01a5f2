"""Gives each split matrix one owner, which updates all of it, for optimizers whose update needs the full matrix.

    parts     rank 0: a0 b0    rank 1: a1 b1    matrices a and b, as a reducer or a weight communicator splits them
    gather    rank 0: a0 a1    rank 1: b0 b1    owners update full matrices, and keep their optimizer states
    scatter   rank 0: a0 b0    rank 1: a1 b1    the new values

A matrix may be split twice: into shards over `wp`, and each shard into ranges of elements over the ranks of a reducer. Its
parts are then exchanged over one axis after the other. If each rank has full gradients, as with `dp.bucketed` and without `wp`,
each rank updates its own copy, and nothing is exchanged. Norms and clipping use the parts.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod

import torch
from torch import Tensor, nn

from sley_core.comm.device import free, reallocate
from sley_core.comm.world import Group, Groups
from sley_core.engine.buffers import FlatBuffer
from sley_core.engine.gradients import GradientStore
from sley_core.engine.registry import Param
from sley_core.engine.shards import SHARD_AXIS


def update_work(shape: Sequence[int]) -> int:
    """Returns the relative cost of a matrix optimizer's update: the number of elements x the smaller of the last two dims."""
    return prod(shape) * (min(shape[-2:]) if len(shape) > 1 else 1)


class PartExchange:
    """Exchanges the parts of parameters over one group.

    owners: by parameter, the coordinate of its owner in the group. sizes: by parameter, the number of elements of each rank's
    part. Both are equal on all ranks of the group, which call `gather` and `scatter` in the same order.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.owners: dict[Param, int] = {}
        self.sizes: dict[Param, Sequence[int]] = {}

    def gather(self, parts: Mapping[Param, Tensor], label: str) -> dict[Param, Tensor]:
        """Returns the full tensors of the parameters that this rank owns. parts: this rank's part of each parameter."""
        coord = self.group.coord
        by_owner = [[param for param in parts if self.owners[param] == owner] for owner in range(self.group.size)]
        sent = [[parts[param] for param in params] for params in by_owner]
        owned = by_owner[coord]
        received = self._exchange(
            sent, [[self.sizes[param][rank] for param in owned] for rank in range(self.group.size)], label
        )
        return {param: self._join(param, [pieces[index] for pieces in received]) for index, param in enumerate(owned)}

    def scatter(self, full_tensors: Mapping[Param, Tensor], like: Tensor, label: str) -> dict[Param, Tensor]:
        """Returns this rank's part of each parameter: a flat tensor. full_tensors: the full tensors of the parameters that this
        rank owns. like: a tensor of their dtype and device.
        """
        coord = self.group.coord
        by_owner = [[param for param in self.owners if self.owners[param] == owner] for owner in range(self.group.size)]
        pieces = [self._split(param, full_tensors[param]) for param in by_owner[coord]]
        sent = [[piece[rank] for piece in pieces] for rank in range(self.group.size)]
        received = self._exchange(sent, [[self.sizes[param][coord] for param in params] for params in by_owner], label, like)
        return {
            param: part
            for params, parts in zip(by_owner, received, strict=True)
            for param, part in zip(params, parts, strict=True)
        }

    def _join(self, param: Param, pieces: Sequence[Tensor]) -> Tensor:
        if self.group.axis != SHARD_AXIS:
            return torch.cat(list(pieces)).view(param.parameter.shape)
        assert param.shard is not None, param
        return param.shard.join(torch.stack(list(pieces)).view(-1, *param.shard.local_shape))

    def _split(self, param: Param, full_tensor: Tensor) -> Sequence[Tensor]:
        if self.group.axis != SHARD_AXIS:
            return torch.split(full_tensor.reshape(-1), list(self.sizes[param]))
        assert param.shard is not None, param
        return [replace(param.shard, index=index).cut(full_tensor) for index in range(self.group.size)]

    def _exchange(
        self, sent: Sequence[Sequence[Tensor]], received_sizes: Sequence[Sequence[int]], label: str, like: Tensor | None = None
    ) -> list[Sequence[Tensor]]:
        """Sends `sent[i]` to rank i and returns the flat tensors from each rank. like: dtype and device if nothing is sent."""
        flat = [tensor.reshape(-1) for tensors in sent for tensor in tensors]
        outgoing = torch.cat(flat) if flat or like is None else like.new_empty(0)
        send_splits = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
        receive_splits = [sum(sizes) for sizes in received_sizes]
        # A collective of the ranks that share the matrices, at the end of a step, when this channel's other exchanges are done.
        channel = next(iter(self.group.channels))
        device = outgoing.device
        if self.group.needs_host_copy(outgoing, channel):
            outgoing = outgoing.cpu()
        incoming = outgoing.new_empty(sum(receive_splits))
        self.group.all_to_all(incoming, outgoing, label=label, channel=channel, splits=(receive_splits, send_splits)).wait()
        incoming = incoming.to(device)
        blocks = torch.split(incoming, receive_splits)
        return [torch.split(block, list(sizes)) for block, sizes in zip(blocks, received_sizes, strict=True)]


class MatrixOwners:
    """Assigns split parameters to owners, balanced by the work of their updates, and moves gradients and values to and from the
    owners.

    dtype: the dtype of the values. elementwise: the names of parameters that need no owner. params: all parameters with an
    owner, on any rank. owned_params: the full tensors that this rank updates. Their memory exists only from `gather_values` to
    `scatter_values`.
    """

    def __init__(self, groups: Groups, store: GradientStore, dtype: torch.dtype, elementwise: Collection[str] = ()) -> None:
        self._elementwise = elementwise
        self.params: set[Param] = set()
        self.owned_params: dict[Param, nn.Parameter] = {}
        self._groups = groups
        self._store = store
        self._template = torch.empty(0, dtype=dtype, device=store.device)
        self._exchanges: dict[str, PartExchange] = {}
        self._loads: dict[tuple[str, ...], dict[tuple[int, ...], int]] = {}
        self._views: dict[Param, Tensor] = {}
        self._memory: list[tuple[Tensor, int]] = []

    def add(self, params: Sequence[Param]) -> None:
        """Assigns those of `params` that are split to owners: in descending order of work, each to the owner with the least
        work so far. All ranks pass the same parameters in the same order, and so agree on the owners.
        """
        owned = set()
        for param in sorted(params, key=lambda param: -update_work(param.shape)):
            part_sizes = self._part_sizes(param)
            if not part_sizes:
                continue
            self.params.add(param)
            owners = product(*(range(len(sizes)) for sizes in part_sizes.values()))
            loads = self._loads.setdefault(tuple(part_sizes), dict.fromkeys(owners, 0))
            owner = min(loads, key=loads.__getitem__)
            loads[owner] += update_work(param.shape)
            for (axis, sizes), coordinate in zip(part_sizes.items(), owner, strict=True):
                exchange = self._exchanges.setdefault(axis, PartExchange(self._groups[axis]))
                exchange.owners[param], exchange.sizes[param] = coordinate, sizes
                if coordinate != exchange.group.coord:
                    break
            else:
                owned.add(param)
        if owned:
            ordered = [param for param in params if param in owned]
            flat = FlatBuffer([param.shape for param in ordered], self._template.dtype, self._template.device)
            self.owned_params |= {param: nn.Parameter(view) for param, view in zip(ordered, flat.views, strict=True)}
            self._views |= zip(ordered, flat.views, strict=True)
            self._memory.append((flat.data, free(flat.data)))

    def gather_values(self, parts: Mapping[Param, Tensor]) -> None:
        """Copies the values of all split parameters to their owners. parts: this rank's parts; empty ones may be left out."""
        for memory, num_bytes in self._memory:
            reallocate(memory, num_bytes)
        parts = {param: parts.get(param, self._template) for param in self.params}
        for param, value in self._gather(parts, "the values of matrices for their owners").items():
            self.owned_params[param].detach().copy_(value)

    def gather_gradients(self) -> None:
        """Sets `grad` of each owned parameter to its full gradient, or to None if the parameter is frozen."""
        gradients = self._gather(
            {param: self._store.part(param) for param in self.params if param in self._store},
            "the gradients of matrices for their owners",
        )
        for param, parameter in self.owned_params.items():
            parameter.grad = gradients[param].to(parameter.dtype) if param in gradients else None

    def scatter_values(self) -> dict[Param, Tensor]:
        """Returns this rank's flat part of the new values of all split parameters, and frees the owners' memory."""
        parts = {param: parameter.detach() for param, parameter in self.owned_params.items()}
        for exchange in self._ordered_exchanges()[::-1]:
            parts |= exchange.scatter(parts, self._template, "the new values of matrices")
        for param, parameter in self.owned_params.items():
            parameter.grad = None
            parameter.data = self._views[param]  # the optimizer may have replaced it
        for memory, _ in self._memory:
            free(memory)
        return parts

    def _gather(self, parts: dict[Param, Tensor], label: str) -> dict[Param, Tensor]:
        for exchange in self._ordered_exchanges():
            local = {param: parts.pop(param) for param in exchange.owners if param in parts}
            if local:
                parts |= exchange.gather(local, label)
        return parts

    def _ordered_exchanges(self) -> list[PartExchange]:
        """Returns the exchanges over the axes of reducers, then that over `wp`. The order is the same on all ranks."""
        return [self._exchanges[axis] for axis in sorted(self._exchanges, key=lambda axis: (axis == SHARD_AXIS, axis))]

    def _part_sizes(self, param: Param) -> dict[str, Sequence[int]]:
        """Returns, by axis, the number of elements of each rank's part; {} if the parameter needs no owner or is not split."""
        sizes: dict[str, Sequence[int]] = {}
        buffer = self._store.buffer_of(param)
        if 0 in param.shape or param.name in self._elementwise:
            return sizes
        if buffer is not None and buffer.shard is not None and buffer.shard.count > 1:
            sizes[buffer.shard.axis] = [buffer.ranges_of(index)[param].numel for index in range(buffer.shard.count)]
        if param.shard is not None:
            sizes[SHARD_AXIS] = [param.numel] * param.shard.count
        return sizes
