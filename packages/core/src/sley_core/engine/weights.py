"""The memory of working weights, and the tensors that the optimizer updates: weights, fp32 master weights, or shards of them.

    lay_out ──> adopt: values move in, masters are made ──> updated: ranks have updated their parts ──> settle ─┐
                                                               ^                                               │
                                                               └───────────────────────────────────────────────┘

Weights are in buffers only if a part of the run requests it, since `torch.save` of such a parameter saves its whole buffer
unless it is cloned. Only this module sets a parameter's `.data`; tied modules keep one parameter object.

A bf16 weight of 1.0 cannot represent an update of 0.001, but its fp32 master can. The working weight changes after enough
updates. If this rank gets only a part of a gradient, it updates only that part, and has a master of only that part.

Between two steps a program may write to working weights (`load_state_dict` on a layer, `p.copy_` under no_grad, `p.data = `).
These values are copied to the masters before the next step, and the masters of unwritten weights keep their full precision.
Writes through `p.data` itself (`p.data.copy_`) do not increment the version counter and cannot be detected: use `p.copy_` or
`Run.load_weights`. The optimizer may write its parameters in any way, including `p.data = `.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from sley_core.comm.device import free, reallocate, storage_id
from sley_core.engine.buffers import SHARD_ALIGNMENT, ElementRange, FlatBuffer
from sley_core.engine.gradients import GradientStore
from sley_core.engine.owners import MatrixOwners
from sley_core.engine.registry import Param
from sley_core.errors import RunError
from sley_core.model.tensors import matches_any, select_parameter_dtype


class WeightBuffer(FlatBuffer):
    """Holds the working weights of `params` side by side, in `num_parts` equal parts. Each parameter has the same offset as its
    gradient in a gradient buffer of `num_parts` shards.

    The buffer has no memory until `build`, so that only one buffer at a time exists beside the initial values. On a CPU, a read
    or write before that crashes the process (`comm.device.free`).
    """

    def __init__(self, params: Sequence[Param], dtype: torch.dtype, num_parts: int) -> None:
        shapes = [param.parameter.shape for param in params]
        device = params[0].parameter.device
        super().__init__(shapes, dtype, device, alignment=SHARD_ALIGNMENT, multiple=num_parts)
        self.params = list(params)
        self._num_freed = free(self.data)  # 0 once it has memory

    def build(self) -> None:
        if self._num_freed:
            reallocate(self.data, self._num_freed)
            self.data.zero_()
            self._num_freed = 0


class Completion(Protocol):
    """Fetches the parts of weights that other ranks update: start ──> wait ──> finish."""

    def start(self) -> None:
        """Starts the exchange, once this rank has updated its own parts. All ranks call this."""

    def wait(self) -> None:
        """Blocks until all weights are those of the last step. Other ranks need not call anything after their `start`."""

    def finish(self) -> None:
        """Calls `wait`, and blocks until no other rank reads this rank's weights, so that they may be written."""


class WeightStore:
    """Holds the buffers of working weights, in `dtype`. Weights whose names match a pattern of `keep` stay in fp32.

    is_eager: whether `start_completions` also waits; if not, weights arrive during the next step, each before its layer runs.
    """

    def __init__(self, dtype: torch.dtype, keep: Sequence[str] = ()) -> None:
        self.dtype = dtype
        self.keep = keep
        self.buffers: list[WeightBuffer] = []
        self.is_eager = False
        self._places: dict[Param, tuple[WeightBuffer, Tensor]] = {}
        self._buffered_params: list[tuple[nn.Parameter, Tensor]] = []
        self._completions: list[Completion] = []
        self._is_laid_out = False

    def lay_out(self, lists: Iterable[tuple[Sequence[Param], int]]) -> list[WeightBuffer]:
        """Returns a buffer without memory for each (parameters, number of parts). Must be called before masters are made."""
        assert not self._is_laid_out, "weights are laid out before masters are made"
        buffers = [WeightBuffer(params, self.dtype, num_parts) for params, num_parts in lists]
        for buffer in buffers:
            assert not any(matches_any(param.name, self.keep) for param in buffer.params), "buffers have one dtype"
            names_laid_out_twice = [param.name for param in buffer.params if param in self._places]
            assert not names_laid_out_twice, f"{names_laid_out_twice} are in a buffer already"
            self._places |= {param: (buffer, view) for param, view in zip(buffer.params, buffer.views, strict=True)}
        self.buffers += buffers
        return buffers

    def __contains__(self, param: Param) -> bool:
        """Returns whether the parameter's working weight is in one of the buffers."""
        return param in self._places

    def dtype_of(self, param: Param) -> torch.dtype:
        return select_parameter_dtype(param.name, self.dtype, self.keep)

    def adopt(self, param: Param) -> None:
        """Rounds the parameter's value to its working dtype, and moves it to its place in a buffer, if it has one. Afterwards
        it is contiguous: fused optimizers read weight, gradient and states in the order of memory, whatever their strides.
        """
        self._is_laid_out = True
        parameter = param.parameter
        if param not in self._places:
            dtype = self.dtype_of(param)
            if parameter.dtype != dtype or not parameter.is_contiguous():
                parameter.data = parameter.detach().to(dtype).contiguous()
            return
        buffer, place = self._places[param]
        buffer.build()
        place.copy_(parameter.detach())
        parameter.data = place
        if place.numel():
            self._buffered_params.append((parameter, place))

    @torch.no_grad()
    def restore_places(self) -> None:
        """For each parameter whose `.data` a program has replaced, copies the values back to its place in a buffer."""
        for parameter, place in self.moved_parameters():
            value = parameter.detach()
            parameter.data = place
            parameter.copy_(value)  # increments its version counter, by which masters notice the write

    def moved_parameters(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yields each parameter whose `.data` a program has replaced, though not by an offload, and its place in a buffer."""
        # Does not compare addresses, which change when memory moves, nor use `is_set_to`, which refuses fake tensors.
        for parameter, place in self._buffered_params:
            same_storage = storage_id(parameter) == storage_id(place)
            if not same_storage or parameter.storage_offset() != place.storage_offset():
                yield parameter, place

    def add_completion(self, completion: Completion) -> None:
        """Registers `completion`. Must be called before masters are made."""
        self._completions.append(completion)

    @property
    def can_arrive_late(self) -> bool:
        """Returns whether weights may be in flight after a step returns. The result is the same on all ranks."""
        return bool(self._completions) and not self.is_eager

    def start_completions(self) -> None:
        """Starts the exchanges that complete the weights, and waits if `is_eager`. All ranks call this after the update."""
        for completion in self._completions:
            completion.start()
        if self.is_eager:
            self.settle()

    def settle(self) -> None:
        """Blocks until this rank's weights are those of the last step, and may be written. All ranks call this."""
        for completion in self._completions:
            completion.finish()

    @contextmanager
    def settle_on_error(self) -> Iterator[None]:
        """If the block raises, waits for complete weights and re-raises. Ignores a RunError of that wait."""
        try:
            yield
        except BaseException:
            for completion in self._completions:
                with suppress(RunError):
                    completion.wait()
            raise


@dataclass(eq=False)
class OptimizerParam:
    """The tensor that the optimizer updates for one parameter. Its gradient is the store's `part`.

    parameter: the updated tensor. original: the working weight in the modules, which may be the same object. elements: the
    range that this rank updates, in whose shape `parameter` is; None if it updates all. is_owned: whether `parameter` is the
    full tensor of a split matrix that this rank owns. master: the memory of a master weight; None if `parameter` is the working
    weight or a view of it. working: with a master, the elements of the working weight that it determines. synced: the `state`
    at which both were last equal.
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
        """Records that the master equals the working weight, whose memory may have moved."""
        self.working = _view_elements(self.original.detach(), self.elements)
        self.synced = self.state

    @property
    def name(self) -> str:
        return self.param.name

    @property
    def state(self) -> tuple[int, int, int]:
        """Returns the version and the location of the working weight, which an offload does not change."""
        return self.original._version, storage_id(self.original), int(self.original.storage_offset())

    @property
    def decays(self) -> bool:
        return self.param.decays


@dataclass(eq=False)
class MasterWeights:
    """Holds the tensors that the optimizer updates, in the order of `add` calls.

    weights: the store of the working weights. store: the gradient store, which knows this rank's elements. dtype: the dtype of
    the updated tensors. If the weights have this dtype, the parameters or views of them are updated. Otherwise parameters are
    rounded to the working dtype, and their former values become master weights, in one flat buffer for each call of `add` and
    one for this rank's part of each sharded buffer. device: the device of the masters; None for the device of the parameters.
    With a `device` there are always masters, and the code that updates them copies gradients there and weights back. owners:
    exchange the matrices that the optimizer needs in full; None if it can update parts. local_params: this rank's parts of the
    weights. optimizer_params: the tensors in the optimizer's groups: those of `local_params`, but for split matrices the full
    tensors that this rank owns.
    """

    weights: WeightStore
    store: GradientStore
    dtype: torch.dtype
    device: torch.device | None = None
    owners: MatrixOwners | None = None
    local_params: list[OptimizerParam] = field(default_factory=list, init=False)
    optimizer_params: list[OptimizerParam] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._originals: list[tuple[Param, nn.Parameter, torch.dtype]] = []
        self._flats: list[FlatBuffer] = []
        self._masters: dict[Param, OptimizerParam] = {}
        self._copies: list[OptimizerParam] = []  # those whose `parameter` is a master or a view of a weight

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
        """Returns the bytes of the master weights; 0 if the parameters are updated directly."""
        return sum(flat.num_bytes for flat in self._flats)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for entry in self._masters.values():
            yield entry.name, entry.parameter

    def set_gradients(self) -> None:
        """Calls `copy_outside_writes`. Without a `device`, also sets `grad` of the optimizer's tensors from the store, to None
        if frozen, and gathers the values and gradients of split matrices on their owners.
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
        """Rounds the masters into the working weights, drops references to gradients, and starts to fetch the parts of other
        ranks, which may be incomplete until `weights.settle`. are_sent: whether the working weights already have the values; by
        default, whether there is a `device`.
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
            memory = entry.master
            if memory is None:
                memory = _view_elements(entry.original.detach(), entry.elements)
            if entry.parameter.data_ptr() != memory.data_ptr():
                memory.copy_(entry.parameter.detach())
                entry.parameter.data = memory

    @torch.no_grad()
    def set(self, param: Param, value: Tensor) -> None:
        """Sets the parameter's weight and its master to `value`, of the parameter's shape, at the master's full precision."""
        self.weights.restore_places()
        parameter = param.parameter
        value = value.to(self.dtype)  # on every rank, even without a master, so that all round alike
        parameter.copy_(value)
        entry = self._masters.get(param)
        if entry is not None and entry.master is not None:
            entry.master.copy_(_view_elements(value, entry.elements))
            entry.sync()

    @property
    def has_outside_writes(self) -> bool:
        """Returns whether a program has written weights since the last `copy_outside_writes`. Works during an offload too."""
        is_moved = next(self.weights.moved_parameters(), None) is not None
        return is_moved or any(entry.synced != entry.state for entry in self._masters.values())

    def copy_outside_writes(self) -> None:
        """Copies the values that a program wrote to working weights into their masters. Writes are detected by version and
        storage, without a device sync. Weights and masters must not be offloaded. Raises RunError `weight-replaced` if a
        program has replaced a parameter or changed its dtype.
        """
        for param, original, dtype in self._originals:
            parameter = param.parameter
            if parameter is not original or parameter.dtype != dtype:
                message = (
                    f"the parameter {param.name!r} is not the tensor that the optimizer updates: it was replaced, or "
                    "its type has changed"
                )
                hint = "write into the parameter under torch.no_grad() (`parameter.copy_(value)`), or use `run.load_weights`"
                raise RunError("weight-replaced", message, hint=hint)
        self.weights.restore_places()
        for entry in self._masters.values():
            master = entry.master
            if master is not None and entry.synced != entry.state:
                entry.sync()
                working = entry.working.to(master.device)
                # only elements whose rounded values differ: the others keep the precision that the working weight cannot hold
                master.copy_(torch.where(working != master.to(working.dtype), working.to(master.dtype), master))

    def _copy_to_masters(self, params: Sequence[Param]) -> dict[Param, Tensor]:
        """Returns copies of `params` in `dtype` for the optimizer: in one new flat buffer, and one per sharded buffer."""
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
    return (
        value
        if elements is None
        else value.reshape(-1)[elements.first : elements.last].view(elements.optimizer_shape(value.shape))
    )
