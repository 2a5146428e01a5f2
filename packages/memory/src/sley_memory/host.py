"""`memory.host`: offloads to the host what chosen layers save for their backward.

    forward of layer k     autograd saves
    end of layer k         copies to the host begin ──> the device's memory is free at the end of layer k + 1
    backward of layer k+1  begins ──> what layer k saved comes back while it computes
    backward of layer k    finds it there

The gradient of a layer's output shows that its backward begins. Copies have their own stream, which keeps them in order, so
host buffers are reused without waiting.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from sley_core.api.actions import Action
from sley_core.api.memory import is_plain
from sley_core.api.model import tensors_in
from sley_core.protocols import ActivationPolicy
from sley_memory.config import chosen
from sley_memory.host_buffers import HostBuffers
from sley_memory.moved import Handle, KeptTensor, MovedStorage, Owners

if TYPE_CHECKING:
    from sley_core.api.comm import CopyEvent
    from sley_core.api.parts import MicroStep, Parts, Phase
    from sley_memory.config import HostConfig
    from sley_memory.host_buffers import HostBuffers


class HostTally:
    """Counts bytes and copies since the beginning, and the seconds that the host took for them."""

    def __init__(self) -> None:
        self._total: dict[str, float] = {}

    def out(self, num_bytes: int, seconds: float) -> None:
        """Counts a storage of `num_bytes` that goes to the host, and the host's seconds to start its copy."""
        self._add(moved_bytes=num_bytes, moved_storages=1, copy_out_host_s=seconds)

    def back(self, num_bytes: int, seconds: float) -> None:
        """Counts a storage of `num_bytes` that comes back, and the host's seconds to start its copy."""
        self._add(fetched_bytes=num_bytes, copy_back_host_s=seconds)

    def waited(self) -> None:
        """Counts a storage that was not on its way when it was needed."""
        self._add(fetched_on_demand=1)

    def over_budget(self, num_bytes: int) -> None:
        """Counts a storage that stayed because the budget was used up."""
        self._add(over_budget_bytes=num_bytes)

    def counts(self, buffers: HostBuffers) -> Mapping[str, float]:
        """Returns the numbers since the beginning, by name; and of the host's buffers the most bytes lent, their bytes and how
        many were allocated.
        """
        names = ("moved_bytes", "moved_storages", "fetched_bytes", "fetched_on_demand", "over_budget_bytes")
        return {
            **{name: self._total.get(name, 0) for name in (*names, "copy_out_host_s", "copy_back_host_s")},
            "max_away_bytes": buffers.max_lent_bytes,
            "host_bytes": buffers.num_bytes,
            "host_allocations": buffers.num_allocations,
        }

    def _add(self, **more: float) -> None:
        for name, value in more.items():
            self._total[name] = self._total.get(name, 0) + value


class Visit:
    """Tracks one call of `layer`: what it saved that is in flight. Keeps none of it alive.

    stayed: what did not fit on the host.
    """

    def __init__(self, layer: str) -> None:
        self.layer = layer
        self.moved: list[weakref.ref[MovedStorage]] = []
        self.stayed: set[int] = set()

    def alive(self) -> list[MovedStorage]:
        """Returns what autograd still has, the last saved first: a backward needs it in this order."""
        return [moved for each in reversed(self.moved) if (moved := each()) is not None]


class HostActivations(ActivationPolicy):
    """Moves what the layers `names` save to the host, and prefetches it back."""

    def __init__(self, config: HostConfig, names: frozenset[str]) -> None:
        self.config = config
        self.names = names
        self._parts: Parts | None = None
        self._moved: weakref.WeakValueDictionary[int, MovedStorage] = weakref.WeakValueDictionary()
        self._num_steps = 0
        self._leaving: deque[tuple[CopyEvent, list[MovedStorage]]] = deque()
        self._last: dict[tuple[int, int], Visit] = {}
        self.tally = HostTally()

    def attach(self, parts: Parts) -> None:
        """Takes a copy stream of this rank's device and makes host buffers for it; keeps the run's parts, whose memory stays on
        the device.
        """
        device = parts.world.device
        self._parts = parts
        self._owners = Owners(parts)
        self._stream = device.copy_stream()
        self.buffers = HostBuffers(device.host_memory, self._stream, self.config.budget_bytes)

    def begin(self, actions: Sequence[Action], phase: Phase) -> None:
        """Discards what a failed step left, whose copies the device waits for, and notes where parameters and buffers are. The
        first step looks for writes that no version counter counts.
        """
        if self._parts is None:
            return
        self._num_steps += phase == "train"
        self._let_go()
        self._last.clear()
        self._stream.record().hold_device()
        self.buffers.begin()
        self._owners.begin()

    def detach(self) -> None:
        """Lets go of device memory that has left, and frees the host's buffers."""
        if self._parts is not None:
            self._let_go()
            self._last.clear()
            self.buffers.trim()

    def held(self) -> Any:
        """Yields the host's buffers, as (name, uint8 tensor); nothing before `attach`."""
        return () if self._parts is None else self.buffers.held()

    def counts(self) -> Mapping[str, float]:
        """Returns bytes moved and kept, copies, the host's seconds in them, and the bytes of the host's buffers; {} before
        `attach`.
        """
        return {} if self._parts is None else self.tally.counts(self.buffers)

    def call(
        self, name: str, layer: Callable[..., Any], args: tuple[Any, ...], fields: Mapping[str, Any], micro: MicroStep
    ) -> Any:
        """Calls the layer and returns its output. What a chosen layer saves for its backward is copied to the host when the
        layer is over, leaves the device when the next one is, and comes back when the gradient of the next layer's output, or
        of its own, is there. Before `attach` nothing leaves.
        """
        if self._parts is None:
            return layer(*args, **fields)
        place = micro.chunk, micro.micro
        before = self._last.get(place)
        if name not in self.names:
            output = layer(*args, **fields)
        else:
            visit = self._last[place] = Visit(name)
            fixed = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(fields.values())}
            with saved_tensors_hooks(lambda tensor: self._pack(tensor, visit, fixed), self._unpack):
                output = layer(*args, **fields)
            self._fetch_with(output, visit)
        self._let_go()  # what layers before this one sent
        if name in self.names:
            self._leave(visit)
        if before is not None:
            self._fetch_with(output, before)
        return output

    def _pack(self, tensor: Tensor, visit: Visit, fixed: set[int]) -> Handle | KeptTensor | Tensor:
        """Returns what autograd keeps in place of `tensor`, and notes in `visit` the storage that is to leave.

        fixed: addresses of storages that stay, of the micro-batch's fields.
        """
        if not self._may_leave(tensor, fixed):
            return _kept(tensor, visit.layer)
        key = tensor.untyped_storage()._cdata
        moved = self._moved.get(key)
        if moved is None or not moved.has(tensor):
            if key in visit.stayed or (moved := self._prepared(tensor)) is None:
                visit.stayed.add(key)  # autograd has it from here on, so no other storage gets this key
                return _kept(tensor, visit.layer)
            self._moved[key] = moved
        if all(each() is not moved for each in visit.moved):
            visit.moved.append(weakref.ref(moved))
        return moved.handle(tensor, visit.layer)

    def _may_leave(self, tensor: Tensor, fixed: set[int]) -> bool:
        """Returns whether `tensor` lies on this device in a storage of at least `min_bytes` that belongs to no field,
        parameter, buffer or pool, and is no more than its memory.
        """
        assert self._parts is not None, "not attached"
        if not _is_plain(tensor) or tensor.device != self._parts.world.device.torch_device:
            return False
        storage = tensor.untyped_storage()
        if storage.nbytes() < max(1, self.config.min_bytes) or storage.data_ptr() in fixed:
            return False
        return storage._cdata in self._moved or not self._owners.have(tensor)

    def _prepared(self, tensor: Tensor) -> MovedStorage | None:
        """Takes host memory for the storage of `tensor` and returns what holds both; None, counted, if that exceeds the
        budget.
        """
        num_bytes = tensor.untyped_storage().nbytes()
        buffer = self.buffers.take(num_bytes)
        if buffer is None:
            self.tally.over_budget(num_bytes)
            return None
        return MovedStorage(tensor, buffer, self.buffers, self._stream)

    def _send(self, moved: MovedStorage) -> None:
        """Starts to copy a storage to the host, and counts that."""
        began = time.perf_counter()
        moved.send(looks=self._num_steps == 1)
        self.tally.out(moved.num_bytes, time.perf_counter() - began)

    def _unpack(self, packed: Handle | KeptTensor | Tensor) -> Tensor:
        """Returns the tensor that autograd saved, on the device; fetches it if it is still away, and counts that. May be called
        again, as long as autograd keeps it. Raises RunError `saved-in-place` if it was written on since.
        """
        if isinstance(packed, Tensor):
            return packed
        if isinstance(packed, Handle) and self._fetch(packed.moved):
            self.tally.waited()
        return packed.tensor()

    def _fetch_with(self, output: Any, visit: Visit) -> None:
        """Lets what `visit` saved start to come back as soon as one of the tensors in `output` has a gradient."""

        def fetch(_gradient: Tensor) -> None:
            for moved in visit.alive():
                self._fetch(moved)

        if visit.moved:
            for tensor in tensors_in((output,)):
                if tensor.requires_grad:
                    tensor.register_hook(fetch)  # type: ignore[no-untyped-call]  # torch's

    def _fetch(self, moved: MovedStorage) -> bool:
        """Starts to bring a storage back if it is away, and counts that; returns whether it was."""
        began = time.perf_counter()
        is_away = moved.fetch()
        if is_away:
            self.tally.back(moved.num_bytes, time.perf_counter() - began)
        return is_away

    def _leave(self, visit: Visit) -> None:
        """Sends what the layer of `visit` saved, and lets the device's memory go: now if its copies are done, else behind the
        next layer; in the first step always then, to look for writes of that layer.
        """
        moved = visit.alive()[::-1]
        for each in moved:
            if not each.is_sent:
                self._send(each)
        self._leaving.append((self._stream.record(), [each for each in moved if each.is_here]))
        if self._num_steps != 1 and self._leaving[-1][0].is_done():
            self._let_go()

    def _let_go(self) -> None:
        """Frees the device's memory of all layers that are leaving.

        The device waits for copies that are not done: it may be given the memory for its next work, which must not write there
        before.
        """
        while self._leaving:
            event, moved = self._leaving.popleft()
            event.hold_device()
            for each in moved:
                each.release()


def _is_plain(tensor: Tensor) -> bool:
    """Returns whether a tensor is no more than a geometry of a storage: no subclass, nor what stands for a batch of them."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    if is_wrapped or not is_plain(tensor) or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return not (tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor())


def _kept(tensor: Tensor, layer: str) -> KeptTensor | Tensor:
    """Returns what autograd has of a tensor that stays; a leaf has no history that could keep it alive."""
    return tensor if tensor.is_leaf and tensor.requires_grad else KeptTensor(tensor, layer)


def build(config: HostConfig, layer_names: Sequence[str]) -> HostActivations:
    """Returns `memory.host`, for those of `layer_names` (the whole model's, in order) that `config.layers` chooses."""
    return HostActivations(config, chosen(config.layers, layer_names))
