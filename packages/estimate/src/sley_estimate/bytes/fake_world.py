"""Replaces the device, the peers and the host of a rank that runs steps without values.

Tensors on the device have shapes, dtypes and storages, but no values. Exchanges and copies complete at once and change no
tensor, and a `Recording` receives them. The functions of the real transport allocate scratch memory. Running the layers of
other stages on meta shows which outputs these stages announce.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from sley_core.comm.device import CopyEvent, CopyStream, Device, HostMemory, storage_id
from sley_core.comm.exchanges import ActionProgress, Members, first_line
from sley_core.comm.transport import MessageTransport, Transport, Work, installed_transports
from sley_core.comm.world import ExchangeKind, Simulation
from sley_core.data.dataset import AnyDataset
from sley_core.engine.boundary import Description, unflatten
from sley_core.errors import RunError
from sley_core.model.layers import Layer, parameter_like
from sley_core.model.tensors import referenced_tensors
from sley_core.plan.plan import Plan
from sley_core.protocols import Collective
from sley_core.records import import_object
from sley_estimate.bytes.fake_tensors import FakeTensors
from sley_estimate.layers.trace import module_signature, replace_tensors
from sley_estimate.machine import CopyDirection
from sley_estimate.step.record import Recording
from sley_trainer.execute import describe_output
from sley_trainer.stepper import Stage
from train_cli.meta_model import meta_micro_batch, meta_output, meta_state

_COLLECTIVES: Mapping[ExchangeKind, Collective] = {  # the collective whose cost a kind of exchange has; messages have none
    **dict.fromkeys(("sum", "max", "min"), "sum"),
    "all_gather": "gather",
    "all_to_all": "swap",
}


class FakeStream(CopyStream):
    """A copy stream that records copies in `device.recording`. pending_copies: the numbers of copies not waited for yet."""

    def __init__(self, device: "FakeDevice", number: int) -> None:
        self.pending_copies: deque[int] = deque()
        self._device = device
        self._number = number
        self._previous_copy: int | None = None

    def wait_for(self, event: CopyEvent) -> None:
        assert isinstance(event, FakeEvent), event
        self._previous_copy = event.last_copy

    def copy(self, target: Tensor, source: Tensor) -> None:
        with patch.object(self._device.tensors, "listener", None):  # a copy is not an operator of the device
            super().copy(target, source)
        direction: CopyDirection = "to_host" if self._device.is_on_host(target) else "to_device"
        previous, self._previous_copy = self._previous_copy, None
        self.pending_copies.append(self._device.recording.on_copy(direction, self._number, source.nbytes, previous))
        if not self._device.runs_ahead:
            self.wait_until(self.pending_copies[-1])

    def record(self) -> CopyEvent:
        return FakeEvent(self, self.pending_copies[-1] if self.pending_copies else None)

    def wait_until(self, number: int) -> None:
        """Records a wait for copy `number` and for all earlier copies on this stream."""
        while self.pending_copies and self.pending_copies[0] <= number:
            self._device.recording.on_wait(self.pending_copies.popleft())


class FakeEvent(CopyEvent):
    """A point in a stream. last_copy: the number of the last pending copy before it, or None if no copy was pending."""

    def __init__(self, stream: FakeStream, last_copy: int | None) -> None:
        self.last_copy = last_copy
        self._stream = stream

    def is_done(self) -> bool:
        return self.last_copy is None or not self._stream.pending_copies or self._stream.pending_copies[0] > self.last_copy

    def wait(self) -> None:
        if self.last_copy is not None:
            self._stream.wait_until(self.last_copy)

    def make_device_wait(self) -> None:
        self.wait()


class FakeHostMemory(HostMemory):
    """Host memory without values, which does not count as memory of the device."""

    def __init__(self, data: Tensor) -> None:
        self.num_bytes = data.numel()
        self.data = data
        self.is_locked = False


@dataclass(frozen=True)
class FakeDevice(Device):
    """A device whose tensors have no values. runs_ahead: whether copies overlap with other work, as on CUDA."""

    tensors: FakeTensors = field(kw_only=True)
    recording: Recording = field(kw_only=True)
    runs_ahead: bool = field(kw_only=True)
    _stream_numbers: Iterator[int] = field(default_factory=count, init=False, compare=False)
    _host_storages: dict[int, weakref.ref[torch.UntypedStorage]] = field(default_factory=dict, init=False, compare=False)

    def as_default(self) -> AbstractContextManager[object]:
        return self.tensors

    def read_values(self, values: Tensor, fallback: list[float]) -> list[float]:
        return fallback

    def move(self, tensor: Tensor) -> Tensor:
        """Returns `tensor` as a fake tensor of the device. Its memory counts as new memory, except on a CPU."""
        if isinstance(tensor, FakeTensor):
            return tensor
        if self.torch_device == tensor.device:
            return self.tensors.keep_values(tensor, counts=self.runs_ahead)
        with self.tensors:
            return torch.empty_like(tensor, device=self.torch_device)

    def alias(self, memory: Tensor) -> Tensor:
        alias = self.tensors.allocate_uncounted(memory.numel(), memory.dtype)
        self.tensors.ledger.share_address(alias, memory)
        return alias

    def bytes_of(self, memory: Tensor) -> memoryview:
        return memoryview(bytearray(memory.numel()))

    def copy_stream(self) -> FakeStream:
        return FakeStream(self, next(self._stream_numbers))

    def host_memory(self, num_bytes: int) -> FakeHostMemory:
        """Returns host memory of `num_bytes` bytes, which never counts as memory of the device."""
        memory = FakeHostMemory(self.tensors.allocate_uncounted(num_bytes, torch.uint8))
        storage = memory.data.untyped_storage()
        key = storage._cdata
        self._host_storages[key] = weakref.ref(storage, lambda _: self._host_storages.pop(key, None))
        return memory

    def is_on_host(self, tensor: Tensor) -> bool:
        return storage_id(tensor) in self._host_storages


class FakeWork(Work):
    """An exchange that reports itself as pending until the rank waits for it, since a run ends complete exchanges early.
    on_wait: called at each wait. allocate_scratch: allocates the memory to sum the parts of the peers. It is called once: at
    the first wait, or at the first query in a later entry of the action list, when the parts have usually arrived.
    """

    def __init__(self, on_wait: Callable[[], None], allocate_scratch: Callable[[], None], progress: ActionProgress) -> None:
        self._on_wait = on_wait
        self._allocate_scratch = allocate_scratch
        self._progress = progress
        self._start_entry = progress.current_entry
        self._has_waited = False

    def is_completed(self) -> bool:
        if self._progress.current_entry is not self._start_entry:
            self._allocate_scratch_once()
        return self._has_waited

    def wait(self) -> None:
        self._allocate_scratch_once()
        self._has_waited = True
        self._on_wait()

    def wait_sent(self) -> None:
        self.wait()

    def _allocate_scratch_once(self) -> None:
        """Allocates the scratch memory at the first call. Does nothing at later calls."""
        allocate_scratch, self._allocate_scratch = self._allocate_scratch, lambda: None
        allocate_scratch()


@dataclass(eq=False)
class FakeTransport(Transport):
    """A transport without peers, for the group `members` and one channel. on_start: called with the collective, axis, channel
    and size in bytes of an exchange; returns a function to call at the wait. scratch_rows: returns the rows of scratch memory
    that the caller must provide for a shard of n rows. scratch: allocates the memory needed to sum a tensor.
    """

    members: Members
    channel: str
    on_start: Callable[[Collective, str, str, int], Callable[[], None]]
    scratch_rows: Callable[[int], int]
    scratch: Callable[[Tensor], object]

    def num_scratch_rows(self, num_rows: int) -> int:
        return self.scratch_rows(num_rows)

    def all_gather(self, outputs: Sequence[Tensor], shards: Sequence[Tensor], *, label: str) -> Work:
        return self._begin("gather", outputs)

    def reduce_scatter(self, outputs: Sequence[Tensor], scratches: Sequence[Tensor], *, label: str, checksum: int = 0) -> Work:
        return self._begin("reduce", outputs, [output[: output.shape[0] // self.members.size] for output in outputs])

    def all_to_all(self, received: Tensor, sent: Tensor, *, label: str, checksum: int = 0) -> Work:
        return self._begin("swap", [sent])

    def all_reduce(self, tensor: Tensor, *, label: str, checksum: int = 0) -> Work:
        flat = tensor.view(-1)
        return self._begin("sum", [tensor], [flat[: -(-flat.numel() // self.members.size)]])

    def _begin(self, collective: Collective, tensors: Sequence[Tensor], reduced: Sequence[Tensor] = ()) -> Work:
        """Reports the start of an exchange of `tensors`. reduced: the tensors that this rank sums, one after another."""
        on_wait = self.on_start(collective, self.members.axis, self.channel, sum(tensor.nbytes for tensor in tensors))

        def allocate_scratch() -> None:
            for tensor in reduced:
                self.scratch(tensor)

        return FakeWork(on_wait, allocate_scratch, self.members.progress.step_progress)


@dataclass(frozen=True)
class StepSimulation(Simulation):
    """Simulates the communication of a rank on fake tensors. On a CPU, but not on CUDA, exchanges need additional memory."""

    tensors: FakeTensors
    recording: Recording
    device_type: str

    def transports(
        self, members: Members, channels: Mapping[str, dist.ProcessGroup], *, cross_memory: bool
    ) -> dict[str, Transport]:
        """Returns for each of `channels` a transport that allocates the same memory as the real transport. cross_memory:
        whether the ranks may attach each other's memory; on a CPU, the result then imitates the first installed transport.
        """
        records = installed_transports() if cross_memory and self.device_type == "cpu" else ()
        path = records[0].scratch if records else None
        scratch: Callable[[Tensor], object] = import_object(path) if path else lambda tensor: None
        transports: dict[str, Transport] = {}
        for name, channel in channels.items():
            has_messages = self.device_type == "cpu" and not records
            rows = MessageTransport(members, name, channel).num_scratch_rows if has_messages else lambda num_rows: 0
            transports[name] = FakeTransport(members, name, self.recording.on_exchange, rows, scratch)
        return transports

    def simulate_exchange(
        self, members: Members, kind: ExchangeKind, result: Tensor, tensor: Tensor, channel: str, label: str
    ) -> Callable[[], None] | None:
        """Records a collective and returns a function to call at the wait. Returns None for a message."""
        if kind not in _COLLECTIVES:
            return None
        return self.recording.on_exchange(_COLLECTIVES[kind], members.axis, channel, result.nbytes)

    def make_output_describer(
        self, plan: Plan, stage: Stage, dataset: AnyDataset, dtype: torch.dtype
    ) -> Callable[[int, int], Description] | None:
        """Returns a function of (stage, chunk) that describes the output of the chunk; None for a plan with one stage."""
        if plan.parallel.pp == 1:
            return None
        placement, outputs = stage.action_lists.placement, meta_outputs(plan, stage, dataset, dtype)
        return lambda number, chunk: outputs[placement.position(number, chunk)]

    def fill_layers(self, layers: Sequence[Layer], dtype: torch.dtype) -> None:
        """Replaces all parameters, buffers and other meta tensors to which `layers` refer by new fake tensors."""
        modules = {id(module): module for layer in layers for module in layer.module.modules()}
        parameter_ids = {id(parameter) for layer in layers for parameter in layer.module.parameters()}
        cpu = torch.device("cpu")
        with self.tensors:
            references = (entry for layer in layers for entry in referenced_tensors(layer.name, layer.module, set(modules)))
            for tensor in [entry.tensor for entry in references]:
                if tensor.is_meta and tensor.grad_fn is None and id(tensor) not in parameter_ids:
                    value = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=cpu)
                    replacement = parameter_like(tensor, value) if isinstance(tensor, nn.Parameter) else value
                    torch.utils.swap_tensors(tensor, replacement)  # type: ignore[no-untyped-call]
            replace_tensors(modules.values(), dtype, cpu)


def meta_outputs(plan: Plan, stage: Stage, dataset: AnyDataset, dtype: torch.dtype) -> list[Description]:
    """Returns the description of the output at each position except the last. Layers run on meta, and each distinct layer runs
    once. stage: any stage of the run, since every stage knows all layers of the model. dtype: the dtype of the parameters.
    Raises RunError `estimate-layer` if a layer fails.
    """
    fields = meta_micro_batch(plan, dataset)
    output_by_signature: dict[str, Any] = {}
    outputs: list[Description] = []
    args: tuple[Any, ...] = ()
    for _, layers in stage.layers_by_position[:-1]:
        for layer in layers:
            state = meta_state(layer, dtype, plan.precision.keep)
            description, tensors = describe_output(args[0], layer.name) if args else (None, [])
            shapes = [(tensor.shape, tensor.stride(), tensor.requires_grad) for tensor in tensors]
            dtypes = [tensor.dtype for tensor in state.values()]
            signature = repr((module_signature(layer.module, layer.name), layer.fields, description, shapes, dtypes))
            if signature not in output_by_signature:
                try:
                    output_by_signature[signature] = meta_output(layer, args, fields, state)
                except Exception as error:  # the user's forward may fail on meta
                    reason = f"{type(error).__name__}: {first_line(error)}"
                    message = f"the layer {layer.name!r} ({type(layer.module).__name__}) cannot run without values: {reason}"
                    hint = "make the shapes of a layer's output depend only on the shapes of its input, not on values"
                    raise RunError("estimate-layer", message, hint=hint) from error
            args = (output_by_signature[signature],)
        description, tensors = describe_output(args[0], layers[-1].name)
        outputs.append(description)
        pairs = zip(description.leaves, tensors, strict=True)
        inputs = [tensor.detach().requires_grad_(leaf.has_gradient) for leaf, tensor in pairs]
        args = (unflatten(inputs, description.structure),)
    return outputs
