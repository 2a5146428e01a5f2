"""Stands for the device, the peers and the host of a rank that takes steps without values.

Tensors on the device have shapes, dtypes and storages. Exchanges and copies are over when they begin, and their results keep
what they held; the memory that an exchange takes beside its tensors is taken by the real transport's own functions. What other
stages would announce follows from the layers, which are called on meta. A `StepListener` is told of everything.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from sley_core.comm.backends import Direct, Done, installed_transports
from sley_core.comm.copies import CopyEvent, CopyStream, HostMemory, HostStream, storage_id
from sley_core.comm.device import Device
from sley_core.comm.group import Exchange
from sley_core.comm.groups import Simulation, nothing
from sley_core.comm.progress import ActionProgress, Members
from sley_core.comm.transport import Transport, Work
from sley_core.data.dataset import AnyDataset
from sley_core.engine.boundary import Description, unflatten
from sley_core.engine.execute import describe
from sley_core.engine.stage import Stage
from sley_core.errors import RunError
from sley_core.model.layers import Layer, like
from sley_core.model.tensors import buffer_format, held_tensors
from sley_core.plan.plan import Plan
from sley_core.protocols import Collective
from sley_estimate.bytes.fake_tensors import FakeTensors
from sley_estimate.layers.variants import kind_of
from train_cli.on_meta import meta_micro_batch, meta_output, meta_state

CopyKind = Literal["to_host", "to_device"]

_COLLECTIVES: Mapping[Exchange, Collective] = {
    **dict.fromkeys(("sum", "max", "min"), "sum"),
    **dict.fromkeys(("broadcast", "all_gather"), "gather"),
    "all_to_all": "swap",
}


class StepListener:
    """Is told of exchanges, copies and waits of a fake run. This one records nothing."""

    def __init__(self) -> None:
        self._copies = 0

    def began(self, kind: Collective, axis: str, lane: str, num_bytes: int) -> Callable[[], None]:
        """Is called when an exchange of `num_bytes` begins; returns a function to call when the rank waits for it."""
        return nothing

    def copied(self, kind: CopyKind, stream: int, num_bytes: int, after: int | None) -> int:
        """Is called for a copy on stream number `stream`, after copy number `after`; returns its number, in ascending order."""
        self._copies += 1
        return self._copies

    def awaited(self, number: int) -> None:
        """Is called when the device or the host waits for a copy."""


class FakeCopies:
    """The copy streams and the host memory of a fake device. runs_ahead: whether copies run beside other work, as on CUDA; else
    each is complete when `copy` returns.
    """

    def __init__(self, tensors: FakeTensors, *, runs_ahead: bool) -> None:
        self.runs_ahead = runs_ahead
        self.listener = StepListener()
        self.tensors = tensors
        self.num_streams = 0
        self._places: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def stream(self) -> FakeStream:
        self.num_streams += 1
        return FakeStream(self, self.num_streams - 1)

    def memory(self, num_bytes: int) -> FakeHostMemory:
        """Returns host memory, which never counts as the device's."""
        memory = FakeHostMemory(self.tensors.uncounted(num_bytes, torch.uint8))
        storage = memory.data.untyped_storage()
        place = storage._cdata
        self._places[place] = weakref.ref(storage, lambda _: self._places.pop(place, None))
        return memory

    def is_on_host(self, tensor: Tensor) -> bool:
        return storage_id(tensor) in self._places


class FakeStream(HostStream):
    """A stream of copies. under_way: numbers of copies that nothing has waited for."""

    def __init__(self, copies: FakeCopies, number: int) -> None:
        self.under_way: deque[int] = deque()
        self._copies = copies
        self._number = number
        self._after: int | None = None

    def after(self, event: CopyEvent) -> None:
        assert isinstance(event, FakeEvent), event
        self._after = event.last

    def copy(self, target: Tensor, source: Tensor) -> None:
        with patch.object(self._copies.tensors, "listener", None):  # a copy is no operator of the device
            super().copy(target, source)
        kind: CopyKind = "to_host" if self._copies.is_on_host(target) else "to_device"
        after, self._after = self._after, None
        self.under_way.append(self._copies.listener.copied(kind, self._number, source.nbytes, after))
        if not self._copies.runs_ahead:
            self.wait_until(self.under_way[-1])

    def record(self) -> CopyEvent:
        return FakeEvent(self, self.under_way[-1] if self.under_way else None)

    def wait_until(self, number: int) -> None:
        """Waits for copy `number` and all before it on this stream."""
        while self.under_way and self.under_way[0] <= number:
            self._copies.listener.awaited(self.under_way.popleft())


class FakeEvent:
    """A point of a stream. last: the number of the last copy before it; None if all had been waited for."""

    def __init__(self, stream: FakeStream, last: int | None) -> None:
        self.last = last
        self._stream = stream

    def is_done(self) -> bool:
        return self.last is None or not self._stream.under_way or self._stream.under_way[0] > self.last

    def wait(self) -> None:
        if self.last is not None:
            self._stream.wait_until(self.last)

    def hold_device(self) -> None:
        self.wait()


class FakeHostMemory(HostMemory):
    """Host memory outside of torch's."""

    def __init__(self, data: Tensor) -> None:
        self.num_bytes = data.numel()
        self.data = data
        self.is_locked = False


@dataclass(frozen=True)
class FakeDevice(Device):
    """Stands for `torch_device`. tensors: makes its tensors."""

    tensors: FakeTensors = field(kw_only=True)
    copies: FakeCopies = field(kw_only=True)

    def in_use(self) -> AbstractContextManager[object]:
        return self.tensors

    def read(self, values: Tensor, usual: list[float]) -> list[float]:
        return usual

    def move(self, tensor: Tensor) -> Tensor:
        """Returns `tensor` as a fake tensor of the device, with new memory where copies run ahead (CUDA) or the device is
        another; on a CPU it shares the memory of `tensor`, which is not counted here.
        """
        if isinstance(tensor, FakeTensor):
            return tensor
        if self.torch_device == tensor.device:
            return self.tensors.of(tensor, counts=self.copies.runs_ahead)
        with self.tensors:
            return torch.empty_like(tensor, device=self.torch_device)

    def again(self, memory: Tensor) -> Tensor:
        alias = self.tensors.uncounted(memory.numel(), memory.dtype)
        self.tensors.ledger.place_in(alias, memory)
        return alias

    def bytes_of(self, memory: Tensor) -> memoryview:
        return memoryview(bytearray(memory.numel()))

    def copy_stream(self) -> CopyStream:
        return self.copies.stream()

    def host_memory(self, num_bytes: int) -> HostMemory:
        return self.copies.memory(num_bytes)


class FakeWork(Done):
    """A complete exchange that counts as under way until the rank waits for it: a rank that found it complete would wait at
    once. wait: called at the wait. sums: takes the memory with which the rank adds its peers' parts, at the wait or in the
    next entry of the list, by when they have come as a rule.
    """

    def __init__(self, waits: Callable[[], None], sums: Callable[[], None], progress: ActionProgress) -> None:
        self._waits = waits
        self._sums: Callable[[], None] | None = sums
        self._progress = progress
        self._began_in = progress.pending
        self._is_awaited = False

    def test(self) -> bool:
        if self._progress.pending is not self._began_in:
            self._sum()
        return self._is_awaited

    def wait(self) -> None:
        self._sum()
        self._is_awaited = True
        self._waits()

    def wait_sent(self) -> None:
        self.wait()

    def _sum(self) -> None:
        if self._sums is not None:
            sums, self._sums = self._sums, None
            sums()


@dataclass(eq=False)
class FakeTransport(Transport):
    """Stands for the transport of `lane`. scratch_rows: rows of its callers' scratch memory for a shard of n rows. scratch:
    allocates what it needs to sum a tensor.
    """

    members: Members
    lane: str
    began: Callable[[Collective, str, str, int], Callable[[], None]]
    scratch_rows: Callable[[int], int]
    scratch: Callable[[Tensor], object]

    def num_scratch_rows(self, num_rows: int) -> int:
        return self.scratch_rows(num_rows)

    def all_gather(self, wholes: Sequence[Tensor], shards: Sequence[Tensor], *, what: str) -> Work:
        return self._begin("gather", wholes)

    def reduce_scatter(self, wholes: Sequence[Tensor], scratches: Sequence[Tensor], *, what: str, contents: int = 0) -> Work:
        return self._begin("reduce", wholes, [whole[: whole.shape[0] // self.members.size] for whole in wholes])

    def all_to_all(self, received: Tensor, sent: Tensor, *, what: str, contents: int = 0) -> Work:
        return self._begin("swap", [sent])

    def all_reduce(self, tensor: Tensor, *, what: str, contents: int = 0) -> Work:
        flat = tensor.view(-1)
        return self._begin("sum", [tensor], [flat[: -(-flat.numel() // self.members.size)]])

    def _begin(self, kind: Collective, tensors: Sequence[Tensor], own: Sequence[Tensor] = ()) -> Work:
        """own: the tensors that this rank sums, one after the other."""
        waits = self.began(kind, self.members.axis, self.lane, sum(tensor.nbytes for tensor in tensors))

        def sums() -> None:
            for tensor in own:
                self.scratch(tensor)

        return FakeWork(waits, sums, self.members.progress.step_progress)


class TakenSteps(Simulation):
    """Lets a rank take steps on fake tensors. kind: "cpu" or "cuda": gloo takes memory beside what ranks exchange, NCCL not."""

    def __init__(self, tensors: FakeTensors, kind: str) -> None:
        self.listener = StepListener()
        self._kind = kind
        self._tensors = tensors

    def transports(self, members: Members, lanes: Mapping[str, dist.ProcessGroup], *, attaches: bool) -> dict[str, Transport]:
        """Returns transports that take memory as those of this kind of device: of the installed ones, which CPU ranks use where
        memory is attached, the first counts.
        """
        records = installed_transports() if attaches and self._kind == "cpu" else ()
        own_scratch = records[0].scratch if records else None
        scratch: Callable[[Tensor], object] = records[0].load(own_scratch) if own_scratch else lambda own: None
        is_direct = self._kind == "cpu" and not records
        return {
            name: FakeTransport(
                members,
                name,
                self._began,
                Direct(members, name, lane).num_scratch_rows if is_direct else lambda num_rows: 0,
                scratch,
            )
            for name, lane in lanes.items()
        }

    def imitate(
        self, members: Members, kind: Exchange, result: Tensor, given: Tensor, lane: str, what: str
    ) -> Callable[[], None]:
        """Reports collectives; messages are in the lists of actions."""
        return self._began(_COLLECTIVES[kind], members.axis, lane, result.nbytes) if kind in _COLLECTIVES else nothing

    def announced(
        self, plan: Plan, stage: Stage, dataset: AnyDataset, dtype: torch.dtype
    ) -> Callable[[int, int], Description] | None:
        """Returns a function of stage and chunk that describes the output of that chunk; None without stages."""
        if plan.parallel.pp == 1:
            return None
        placement, outputs = stage.lists.placement, meta_outputs(plan, stage, dataset, dtype)
        return lambda number, chunk: outputs[placement.position(number, chunk)]

    def fill(self, layers: Sequence[Layer], dtype: torch.dtype) -> None:
        with self._tensors:
            replace_meta(layers, dtype=dtype, device=torch.device("cpu"))

    def _began(self, kind: Collective, axis: str, lane: str, num_bytes: int) -> Callable[[], None]:
        return self.listener.began(kind, axis, lane, num_bytes)


def meta_outputs(plan: Plan, stage: Stage, dataset: AnyDataset, dtype: torch.dtype) -> list[Description]:
    """Returns the descriptions of the outputs of all chunks but the last, from layers on meta; each kind of layer is called
    once. stage: has all layers of the model. dtype: of the parameters. Raises RunError `estimate-layer` for a layer that fails.
    """
    fields = meta_micro_batch(plan, dataset)
    known: dict[str, Any] = {}
    outputs: list[Description] = []
    args: tuple[Any, ...] = ()

    def output_of(layer: Layer) -> Any:
        state = meta_state(layer, dtype, plan.precision.keep)
        description, tensors = describe(args[0], layer.name) if args else (None, [])
        shapes = [(tensor.shape, tensor.stride(), tensor.requires_grad) for tensor in tensors]
        dtypes = [tensor.dtype for tensor in state.values()]
        kind = repr((kind_of(layer.module, layer.name), layer.fields, description, shapes, dtypes))
        if kind not in known:
            try:
                known[kind] = meta_output(layer, args, fields, state)
            except Exception as error:  # the user's forward may not work on meta
                raise RunError(
                    "estimate-layer",
                    f"the layer {layer.name!r} ({type(layer.module).__name__}) cannot be called without values: "
                    f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
                    hint="the output of a layer must follow from the shapes of its input",
                ) from error
        return known[kind]

    for _, layers in stage.stages[:-1]:
        for layer in layers:
            args = (output_of(layer),)
        description, tensors = describe(args[0], layers[-1].name)
        outputs.append(description)
        pairs = zip(description.leaves, tensors, strict=True)
        entered = [tensor.detach().requires_grad_(leaf.has_gradient) for leaf, tensor in pairs]
        args = (unflatten(entered, description.structure),)
    return outputs


def replace_meta(layers: Iterable[Layer], *, dtype: torch.dtype, device: torch.device) -> None:
    """Replaces parameters and buffers of `layers`, on meta, by new tensors on `device` with the dtypes of `HostModel.place`;
    shared tensors stay shared. Other meta tensors that layers refer to move in place.
    """
    layers = list(layers)
    registered = {id(module) for layer in layers for module in layer.module.modules()}
    own = {id(parameter) for layer in layers for parameter in layer.module.parameters()}
    for layer in layers:
        for attribute in held_tensors(layer.name, layer.module, registered):
            if attribute.tensor.is_meta and attribute.tensor.grad_fn is None and id(attribute.tensor) not in own:
                value = torch.empty_like(attribute.tensor, device=device)
                same = like(attribute.tensor, value) if isinstance(attribute.tensor, nn.Parameter) else value
                torch.utils.swap_tensors(attribute.tensor, same)  # type: ignore[no-untyped-call]  # torch's
    # By id of the old tensor, which is kept too, so that its id is not reused.
    replaced: dict[int, tuple[Tensor, Tensor]] = {}
    for module in (module for layer in layers for module in layer.module.modules()):
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) not in replaced:
                new = torch.empty(parameter.shape, dtype=dtype, device=device)
                replaced[id(parameter)] = parameter, like(parameter, new)
            setattr(module, name, replaced[id(parameter)][1])
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if id(buffer) not in replaced:
                replaced[id(buffer)] = buffer, torch.empty_like(buffer, dtype=buffer_format(buffer, dtype), device=device)
            setattr(module, name, replaced[id(buffer)][1])
