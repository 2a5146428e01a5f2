"""The tensors that the optimizer updates: weights, fp32 master weights, shards of them, or full matrices of an owner.

A bf16 weight of 1.0 cannot represent an update of 0.001, but its fp32 master can. The working weight changes after enough
updates. If this rank gets only a part of a gradient, it updates only that part, and has a master of only that part.

Between two steps a program may write to working weights (`load_state_dict` on a layer, `p.copy_` under no_grad, `p.data = `).
These values are copied to the masters before the next step, and the masters of unwritten weights keep their full precision.
Writes through `p.data` itself (`p.data.copy_`) do not increment the version counter and cannot be detected: use `p.copy_` or
`Run.load_weights`. The optimizer may write its parameters in any way, including `p.data = `.

If the optimizer's update needs a full matrix, one rank owns each split matrix, and updates all of it:

    parts     rank 0: a0 b0    rank 1: a1 b1    matrices a and b, as a reducer or a weight communicator splits them
    gather    rank 0: a0 a1    rank 1: b0 b1    owners update full matrices, and keep their optimizer states
    scatter   rank 0: a0 b0    rank 1: a1 b1    the new values

A matrix may be split twice: into shards over `wp`, and each shard into ranges of elements over the ranks of a reducer. Its
parts are then exchanged over one axis after the other. If each rank has full gradients, as with `dp.bucketed` and without `wp`,
each rank updates its own copy, and nothing is exchanged. Norms and clipping use the parts.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from math import prod

import torch
from torch import Tensor, nn

from sley_core.comm.device import free, reallocate, storage_id
from sley_core.comm.world import Group, Groups
from sley_core.engine.buffers import ElementRange, FlatBuffer, WeightStore
from sley_core.engine.gradients import GradientStore
from sley_core.engine.registry import Param
from sley_core.engine.shards import SHARD_AXIS
from sley_core.errors import RunError


@dataclass(eq=False)
class OptimizerParam:
    """The tensor that the optimizer updates for one parameter. Its gradient is `GradientStore.part(param)`. parameter: the
    updated tensor. original: the working weight in the modules, which may be the same object. elements: the range of elements
    in `parameter`; None if it has all elements. is_owned: whether `parameter` is the full tensor of a split matrix that this
    rank owns. master: the memory of a master weight; None if `parameter` is the working weight or a view of it. working: with a
    master, the elements of the working weight that get the master's values. synced: the last recorded `state`.
    """

    param: Param
    parameter: nn.Parameter
    original: nn.Parameter
    elements: ElementRange | None = None
    is_owned: bool = False
    master: Tensor | None = None

    def __post_init__(self) -> None:
        if self.master is not None:
            self.sync()

    def sync(self) -> None:
        """Records that the master equals the working weight now. Must also be called after the working weight has moved."""
        self.working = _view_elements(self.original.detach(), self.elements)
        self.synced = self.state

    @property
    def name(self) -> str:
        return self.param.name

    @property
    def state(self) -> tuple[object, ...]:
        """Returns the version, the storage's id, the offset and the strides of the working weight. An offload changes none."""
        weight = self.original
        return weight._version, storage_id(weight), int(weight.storage_offset()), weight.stride()

    @property
    def decays(self) -> bool:
        return self.param.decays


@dataclass(eq=False)
class MasterWeights:
    """Holds the tensors that the optimizer updates, in the order of `add` calls.

    weights: the store of the working weights. store: the gradient store, which knows this rank's elements. dtype: the dtype of
    the updated tensors. If working weights have this dtype, the optimizer updates the parameters or views of them. Otherwise
    parameters are rounded to the working dtype, and their former values become master weights, in one flat buffer for each call
    of `add` and one for this rank's part of each sharded buffer. device: the device of the masters; None means the parameters'
    device. With a `device` there are always masters, and the code that updates them copies gradients to this device and weights
    back. owners: exchanges the matrices that the optimizer needs in full; None if it needs none. local_params: this rank's
    parts of the weights. optimizer_params: the tensors in the optimizer's groups: `local_params`, in which full matrices that
    this rank owns replace parts of split matrices.
    """

    weights: WeightStore
    store: GradientStore
    dtype: torch.dtype
    device: torch.device | None = None
    owners: "MatrixOwners | None" = None
    local_params: list[OptimizerParam] = field(default_factory=list, init=False)
    optimizer_params: list[OptimizerParam] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._originals: list[tuple[Param, nn.Parameter, torch.dtype]] = []
        self._flats: list[FlatBuffer] = []
        self._masters: dict[Param, OptimizerParam] = {}
        self._copies: list[OptimizerParam] = []  # the entries whose `parameter` is a master or a view of a weight

    def add(self, params: Sequence[Param]) -> list[OptimizerParam]:
        """Adds `params`, and rounds them to the working dtype if needed. Returns the tensors that the optimizer updates."""
        narrow = [param for param in params if self.weights.dtype_of(param) != self.dtype or self.device is not None]
        masters = self._copy_to_masters(narrow)
        added = []
        for param in params:
            self.weights.adopt(param)
            parameter, elements = param.parameter, self.store.elements(param)
            self._originals.append((param, parameter, parameter.dtype))
            if elements is not None and not elements.numel:
                continue
            if param in masters:
                updated, master = nn.Parameter(masters[param]), masters[param]
                self._masters[param] = OptimizerParam(param, updated, parameter, elements, master=master)
                added.append(self._masters[param])
            else:
                updated = parameter if elements is None else nn.Parameter(_view_elements(parameter.detach(), elements))
                added.append(OptimizerParam(param, updated, parameter, elements))
        self.local_params += added
        self._copies += [entry for entry in added if entry.parameter is not entry.original]
        if self.owners is not None:
            self.owners.add(params)
            added = [entry for entry in added if entry.param not in self.owners.params]
            owned = [(param, self.owners.owned_params[param]) for param in params if param in self.owners.owned_params]
            added += [OptimizerParam(param, parameter, param.parameter, is_owned=True) for param, parameter in owned]
        self.optimizer_params += added
        return added

    @property
    def num_bytes(self) -> int:
        """Returns the memory in bytes of the master weights; 0 if the optimizer updates the parameters themselves."""
        return sum(flat.num_bytes for flat in self._flats)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields each master weight with the name of its parameter."""
        for entry in self._masters.values():
            yield entry.name, entry.parameter

    def set_gradients(self) -> None:
        """Prepares the optimizer's tensors for an update. Calls `copy_outside_writes`. Without a `device`, also sets their
        `grad` from the store, or to None if the parameter is frozen, and gathers split matrices and their gradients on the
        owners: a collective of all ranks of a stage.
        """
        self.copy_outside_writes()
        if self.device is not None:
            return
        gradients = self.store.parts()
        for entry in self.optimizer_params:
            if not entry.is_owned:
                gradient = gradients.get(entry.param)
                entry.parameter.grad = None if gradient is None else gradient.to(entry.parameter.dtype)
        if self.owners is not None:
            self.gather_owned_params()
            self.owners.gather_gradients()

    def gather_owned_params(self) -> None:
        """Copies the values of split matrices to their owners. All ranks of a stage call this."""
        if self.owners is not None:
            self.owners.gather_values({entry.param: entry.parameter.detach() for entry in self.local_params})

    def scatter_owned_params(self) -> None:
        """Copies the owners' values of split matrices into this rank's parts. All ranks of a stage call this."""
        if self.owners is not None:
            values = self.owners.scatter_values()
            for entry in self.local_params:
                if entry.param in values:
                    entry.parameter.detach().copy_(values[entry.param].view(entry.parameter.shape))

    def write_back(self, *, are_sent: bool | None = None) -> None:
        """Rounds masters into working weights, drops references to gradients, and starts to fetch other ranks' parts
        (`weights.settle` waits). are_sent: whether working weights already have these values; by default, whether there is a
        `device`.
        """
        self._copy_back()
        if masters := list(self._masters.values()):
            if not (self.device is not None if are_sent is None else are_sent):
                values = [entry.master for entry in masters if entry.master is not None]
                torch._foreach_copy_([entry.working for entry in masters], values)
            for entry in masters:
                entry.synced = entry.state
        for entry in self._copies:
            entry.parameter.grad = None
        self.weights.start_completions()

    @torch.no_grad()
    def _copy_back(self) -> None:
        """If the optimizer has replaced the `.data` of its tensors, copies the values back into masters and weights."""
        for entry in self._copies:
            memory = _view_elements(entry.original.detach(), entry.elements) if entry.master is None else entry.master
            if entry.parameter.data_ptr() != memory.data_ptr():
                memory.copy_(entry.parameter.detach())
                entry.parameter.data = memory

    @torch.no_grad()
    def set(self, param: Param, value: Tensor) -> None:
        """Sets the parameter's working weight and master to `value`, of its shape, each rounded to the tensor's dtype."""
        self.weights.restore_places()
        parameter = param.parameter
        value = value.to(self.dtype)  # rounded even on ranks without a master, so that all ranks round alike
        parameter.copy_(value)
        entry = self._masters.get(param)
        if entry is not None and entry.master is not None:
            entry.master.copy_(_view_elements(value, entry.elements))
            entry.sync()

    @property
    def has_outside_writes(self) -> bool:
        """Returns whether code outside the engine has written to weights since the last `copy_outside_writes`. Can be called
        while the weights are offloaded.
        """
        is_moved = next(self.weights.moved_parameters(), None) is not None
        return is_moved or any(entry.synced != entry.state for entry in self._masters.values())

    def copy_outside_writes(self) -> None:
        """Copies the values that code outside the engine has written to working weights into their masters, and makes weights
        with other strides contiguous again. Detects writes by version, storage and strides, without a device sync. Weights and
        masters must not be offloaded. Raises RunError `weight-replaced` if such code has replaced a parameter or changed its
        dtype.
        """
        for param, original, dtype in self._originals:
            parameter = param.parameter
            if parameter is not original or parameter.dtype != dtype:
                message = f"the parameter {param.name!r} is not the tensor that the optimizer updates: it was replaced or cast"
                hint = "write into the parameter under torch.no_grad() (`parameter.copy_(value)`), or use `run.load_weights`"
                raise RunError("weight-replaced", message, hint=hint)
        self.weights.restore_places()
        for _, original, _ in self._originals:
            if not original.is_contiguous():
                original.data = original.detach().contiguous()
        for entry in self._masters.values():
            master = entry.master
            if master is not None and entry.synced != entry.state:
                entry.sync()
                working = entry.working.to(master.device)
                # copies only elements whose rounded values differ: the others keep their full precision
                master.copy_(torch.where(working != master.to(working.dtype), working.to(master.dtype), master))

    def _copy_to_masters(self, params: Sequence[Param]) -> dict[Param, Tensor]:
        """Returns copies of this rank's elements of `params` in `dtype`: in one new flat buffer, and one per sharded buffer."""
        if not params:
            return {}
        device = self.device or params[0].parameter.device
        whole = [param for param in params if self.store.elements(param) is None]
        flat = FlatBuffer([param.parameter.shape for param in whole], self.dtype, device)
        copies = dict(zip(whole, flat.views, strict=True))
        self._flats.append(flat)
        added = set(params)
        for buffer in self.store.buffers:
            if buffer.shard and added.issuperset(buffer.params):
                part = FlatBuffer([buffer.local_part.shape], self.dtype, device)
                copies |= buffer.part_views(part.data)
                self._flats.append(part)
        for param, copy in copies.items():
            copy.copy_(_view_elements(param.parameter.detach(), self.store.elements(param)))
        return copies


def _view_elements(value: Tensor, elements: ElementRange | None) -> Tensor:
    return value if elements is None else elements.view(value)


def update_cost(shape: Sequence[int]) -> int:
    """Returns the relative cost of updating a matrix: its number of elements x the smaller of its last two dims."""
    return prod(shape) * (min(shape[-2:]) if len(shape) > 1 else 1)


class PartExchange:
    """Exchanges parts of parameters over one group, whose ranks call `gather` and `scatter` in the same order. owners: for each
    parameter, the coordinate of the rank that owns it. sizes: for each parameter, the number of elements of each rank's part.
    label: describes the content for errors.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.owners: dict[Param, int] = {}
        self.sizes: dict[Param, Sequence[int]] = {}

    def gather(self, parts: Mapping[Param, Tensor], label: str) -> dict[Param, Tensor]:
        """Returns the full tensors of the parameters that this rank owns. A collective. parts: this rank's part of each."""
        coord = self.group.coord
        by_owner = [[param for param in parts if self.owners[param] == owner] for owner in range(self.group.size)]
        sent = [[parts[param] for param in params] for params in by_owner]
        owned = by_owner[coord]
        sizes = [[self.sizes[param][rank] for param in owned] for rank in range(self.group.size)]
        received = self._exchange(sent, sizes, label)
        return {param: self._join(param, [pieces[index] for pieces in received]) for index, param in enumerate(owned)}

    def scatter(self, full_tensors: Mapping[Param, Tensor], like: Tensor, label: str) -> dict[Param, Tensor]:
        """Returns this rank's part of each parameter as a flat tensor. A blocking collective. full_tensors: the full tensors of
        the parameters that this rank owns. like: a tensor of the same dtype and device.
        """
        coord = self.group.coord
        by_owner = [[param for param in self.owners if self.owners[param] == owner] for owner in range(self.group.size)]
        pieces = [self._split(param, full_tensors[param]) for param in by_owner[coord]]
        sent = [[piece[rank] for piece in pieces] for rank in range(self.group.size)]
        received = self._exchange(sent, [[self.sizes[param][coord] for param in params] for params in by_owner], label, like)
        return dict(zip(chain(*by_owner), chain(*received), strict=True))

    def _join(self, param: Param, pieces: Sequence[Tensor]) -> Tensor:
        """Returns the tensor that the parts of all ranks, `pieces`, form: shards over `wp`, else ranges of elements."""
        if self.group.axis != SHARD_AXIS:
            return torch.cat(list(pieces)).view(param.parameter.shape)
        assert param.shard is not None, param
        return param.shard.join(torch.stack(list(pieces)).view(-1, *param.shard.local_shape))

    def _split(self, param: Param, full_tensor: Tensor) -> Sequence[Tensor]:
        """Returns the part of `full_tensor` for each rank. Inverse of `_join`."""
        if self.group.axis != SHARD_AXIS:
            return torch.split(full_tensor.reshape(-1), list(self.sizes[param]))
        assert param.shard is not None, param
        return [replace(param.shard, index=index).cut(full_tensor) for index in range(self.group.size)]

    def _exchange(
        self, sent: Sequence[Sequence[Tensor]], received_sizes: Sequence[Sequence[int]], label: str, like: Tensor | None = None
    ) -> list[Sequence[Tensor]]:
        """Sends the tensors `sent[i]` to member i, and returns flat tensors from each member. A blocking collective.
        received_sizes: for each member, the numbers of elements of its tensors. like: a tensor of their dtype and device,
        needed if this rank sends nothing.
        """
        flat = [tensor.reshape(-1) for tensors in sent for tensor in tensors]
        outgoing = torch.cat(flat) if flat or like is None else like.new_empty(0)
        send_splits = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
        receive_splits = [sum(sizes) for sizes in received_sizes]
        # All ranks that share the matrices run this at the end of a step, when this channel's other exchanges are done.
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
    """Assigns each split parameter to an owner, a rank that updates all of it, so that update costs are balanced. Exchanges
    gradients and values with the owners. The ranks of a stage make the same calls. dtype: the dtype of the values. elementwise:
    the names of parameters that need no owner. params: all parameters that have an owner on any rank. owned_params: the full
    tensors that this rank updates; they have memory only from `gather_values` to `scatter_values`.
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
        """Assigns an owner to each split parameter in `params`, in descending order of cost: the rank with the least total cost
        so far. All ranks pass the same parameters in the same order, and so agree on the owners.
        """
        owned = set()
        for param in sorted(params, key=lambda param: -update_cost(param.shape)):
            part_sizes = self._part_sizes(param)
            if not part_sizes:
                continue
            self.params.add(param)
            owners = product(*(range(len(sizes)) for sizes in part_sizes.values()))
            loads = self._loads.setdefault(tuple(part_sizes), dict.fromkeys(owners, 0))
            owner = min(loads, key=loads.__getitem__)
            loads[owner] += update_cost(param.shape)
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
        """Copies the values of split parameters to their owners. A collective. parts: this rank's parts, without empty ones."""
        for memory, num_bytes in self._memory:
            reallocate(memory, num_bytes)
        parts = {param: parts.get(param, self._template) for param in self.params}
        for param, value in self._gather(parts, "the values of matrices for their owners").items():
            self.owned_params[param].detach().copy_(value)

    def gather_gradients(self) -> None:
        """Sets `grad` of each owned parameter to its full gradient, or to None if the parameter is frozen. A collective."""
        parts = {param: self._store.part(param) for param in self.params if param in self._store}
        gradients = self._gather(parts, "the gradients of matrices for their owners")
        for param, parameter in self.owned_params.items():
            parameter.grad = gradients[param].to(parameter.dtype) if param in gradients else None

    def scatter_values(self) -> dict[Param, Tensor]:
        """Returns this rank's flat parts of the owners' values, and frees the owners' memory. A collective."""
        parts = {param: parameter.detach() for param, parameter in self.owned_params.items()}
        for exchange in self._ordered_exchanges()[::-1]:
            parts |= exchange.scatter(parts, self._template, "the new values of matrices")
        for param, parameter in self.owned_params.items():
            parameter.grad = None
            parameter.data = self._views[param]  # the optimizer may have replaced `data`
        for memory, _ in self._memory:
            free(memory)
        return parts

    def _gather(self, parts: dict[Param, Tensor], label: str) -> dict[Param, Tensor]:
        """Returns the full tensors that this rank owns, gathered over one axis after the other. Changes `parts`."""
        for exchange in self._ordered_exchanges():
            local = {param: parts.pop(param) for param in exchange.owners if param in parts}
            if local:
                parts |= exchange.gather(local, label)
        return parts

    def _ordered_exchanges(self) -> list[PartExchange]:
        """Returns the exchanges over the axes of reducers, then the exchange over `wp`. The order is equal on all ranks."""
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
