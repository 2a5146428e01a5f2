"""`memory.host`: offloads to the host what chosen layers save for their backward.

    forward of layer k     autograd saves
    end of layer k         copies to the host begin ──> the device's memory is free at the end of layer k + 1
    backward of layer k+1  begins ──> storages of layer k come back while it computes
    backward of layer k    finds them there

The gradient of a layer's output shows that its backward begins. Copies have their own stream, which keeps them in order, so
host memory is reused without waiting. One storage:

    pack ──> HERE ── send, release ──> AWAY ── fetch ──> BACK ──> gone with the last handle
              │ copied when the layer is over │ host alone     │ on the device again
              └───────────────────────────────┴────────────────┴──> unpack
"""

from __future__ import annotations

import time
import weakref
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from mmap import PAGESIZE
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from sley_core.api.actions import Action
from sley_core.api.comm import CopyEvent, CopyStream
from sley_core.api.memory import is_plain, storage_id, sum_of_bits, version_of
from sley_core.api.model import tensors_in
from sley_core.api.parts import MicroStep, Parts, Phase, round_up
from sley_core.errors import RunError
from sley_core.protocols import ActivationPolicy
from sley_memory.arena import HostArena
from sley_memory.config import HostConfig, chosen

MOST_WASTE = 1.25  # a spare place up to this much larger than a request is lent: lengths differ from step to step

COUNTS = ("moved_bytes", "moved_storages", "fetched_bytes", "fetched_on_demand", "over_budget_bytes")


class Geometry(NamedTuple):
    """Where a tensor lies in its storage. span: its first byte and its end. is_dense: whether all between are its own."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    span: tuple[int, int]
    is_dense: bool


def _geometry(tensor: Tensor) -> Geometry:
    start = end = int(tensor.storage_offset() * tensor.element_size())
    if tensor.numel():
        extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end = start + int((extent + 1) * tensor.element_size())
    return Geometry(tensor.dtype, tensor.shape, tensor.stride(), (start, end), end - start == tensor.nbytes)


class MovedStorage:
    """The storage of `tensor`, copied once, in full, to a place of `arena` over `stream`, however many tensors of it were
    saved.

    It is copied when its layer is over: tensors may share a storage without sharing a version counter (`unsafe_chunk`,
    `.data`), so the layer may write to one after it has saved another. Only handles own this object: autograd drops them when
    it drops saved tensors, and with the last one the place on the host is free.
    """

    def __init__(self, tensor: Tensor, arena: HostArena, stream: CopyStream) -> None:
        self._event: CopyEvent | None = None  # of the copy back, until somebody has waited for it
        storage = tensor.untyped_storage()
        self.num_bytes = storage.nbytes()
        self.device = tensor.device
        self._arena = arena
        (self._host,) = arena.places([round_up(self.num_bytes, PAGESIZE)])
        self._stream = stream
        self._source: torch.UntypedStorage | None = storage
        self.weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # torch's; while it lives, no other storage has this one's address
        self._back: torch.UntypedStorage | None = None
        self._places: dict[Geometry, int] = {}
        self._handles: list[weakref.ref[Handle]] = []
        self.is_sent = False

    def __del__(self) -> None:
        if self._event is not None:
            self._event.hold_device()  # the next owner of this memory must not write there before the copy
        self._arena.give(self._host)

    @property
    def is_here(self) -> bool:
        """Returns whether this object still holds the device's memory that is copied."""
        return self._source is not None

    def has(self, tensor: Tensor) -> bool:
        """Returns whether the host will have the present contents of `tensor`, of this storage: the copy is still to be made,
        or it has all of these elements and nobody has written to them since.
        """
        if not self.is_sent:
            return True
        version, own = version_of(tensor), _geometry(tensor)
        return self._places.get(own) == version or any(
            then == version and place.is_dense and place.span[0] <= own.span[0] and own.span[1] <= place.span[1]
            for place, then in self._places.items()
        )

    def handle(self, tensor: Tensor, layer: str) -> Handle:
        """Returns the handle that autograd keeps of `tensor`, of this storage, which `layer` saves."""
        handle = Handle(tensor, self, layer)
        if not self.is_sent:
            self._places[_geometry(tensor)] = version_of(tensor)
        if self.is_here:
            self._handles.append(weakref.ref(handle))
        return handle

    def send(self, *, looks: bool) -> None:
        """Starts the copy to the host, once the layer is over. looks: whether handles are to find later writes."""
        assert self._source is not None, "sent after it was released"
        if looks:
            for handle in self._alive():
                handle.look()
        self._stream.follow()
        with torch.inference_mode(False), torch.no_grad():
            whole = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self._source)
        self._stream.copy(self._host[: self.num_bytes], whole)
        self.is_sent = True

    def release(self) -> None:
        """Drops the device's memory, and lets handles note whether their tensors were written on since they were saved. The
        copy must be done, or the device held until it is.
        """
        for handle in self._alive():
            handle.release()
        self._handles.clear()
        self._source = None

    def _alive(self) -> list[Handle]:
        """Returns the handles that autograd has not dropped."""
        return [handle for reference in self._handles if (handle := reference()) is not None]

    def fetch(self) -> bool:
        """Starts to bring the storage back if it is away; returns whether it was."""
        if self._source is not None or self._back is not None:
            return False
        with torch.inference_mode(False), torch.no_grad():
            back = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)
        self._stream.follow()  # the device's earlier work may still use this memory
        self._stream.copy(back, self._host[: self.num_bytes])
        self._event = self._stream.record()
        self._back = back.untyped_storage()
        return True

    def storage(self) -> torch.UntypedStorage:
        """Returns the storage on the device: the one that was saved, or the fetched one, whose contents the device's later work
        sees. It must not be away.
        """
        if self._source is not None:
            return self._source
        assert self._back is not None, "used before it was fetched"
        if self._event is not None:
            self._event.hold_device()
            self._event = None
        return self._back


class Handle:
    """Stands for one saved tensor of a `moved` storage, in autograd's graph."""

    __slots__ = ("__weakref__", "_bits", "_fault", "_saved", "dtype", "layer", "moved", "offset", "shape", "stride")

    def __init__(self, tensor: Tensor, moved: MovedStorage, layer: str) -> None:
        self.moved = moved
        self.layer = layer
        self.dtype = tensor.dtype
        self.offset = tensor.storage_offset()
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self._saved = (tensor.detach(), version_of(tensor)) if moved.is_here else None
        self._bits: Tensor | None = None
        self._fault = ""

    def look(self) -> None:
        """Remembers the tensor's bits, by which writes show that no version counter counts."""
        assert self._saved is not None, "looked at too late"
        self._bits = sum_of_bits(self._saved[0])

    def release(self) -> None:
        """Drops the device's memory, and notes whether the tensor was written on since it was saved."""
        if self._saved is not None:
            self._check(self._saved[0])
            self._saved = None

    def tensor(self) -> Tensor:
        """Returns the tensor as it was saved, over storage on the device, which must have been fetched. Raises RunError
        `saved-in-place` if it was written on before it left; after `look`, also by other owners of its storage.
        """
        if self._saved is not None:
            self._check(self._saved[0])
        elif (
            self._bits is not None and (original := torch.UntypedStorage._new_with_weak_ptr(self.moved.weak.cdata)) is not None
        ):
            self._check(self._over(original))
        if self._fault:
            raise written(self.layer, self._fault)
        return self._over(self.moved.storage())

    def _over(self, storage: torch.UntypedStorage) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            empty = torch.empty(0, dtype=self.dtype, device=self.moved.device)
            return empty.set_(storage, self.offset, self.shape, self.stride)

    def _check(self, tensor: Tensor) -> None:
        """Notes a fault if `tensor`, in the place of the saved one, was written on. Waits for the device after `look`."""
        if self._saved is not None and version_of(tensor) != self._saved[1]:
            self._fault = "since its forward saved it"
        elif self._bits is not None:
            bits = sum_of_bits(tensor)
            if bits is None or not torch.equal(self._bits, bits):
                self._fault = "through another that shares its memory, as `.data` and `unsafe_chunk` do"


class KeptTensor:
    """Stands for a saved tensor that stays: the tensor without its history, which would otherwise keep itself alive."""

    __slots__ = ("_tensor", "_version", "layer")

    def __init__(self, tensor: Tensor, layer: str) -> None:
        self.layer = layer
        self._tensor = tensor if tensor.grad_fn is None else tensor.detach()
        # A tensor that stands for a batch of tensors has no contents of its own.
        is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        self._version = None if is_wrapped else version_of(tensor)

    def tensor(self) -> Tensor:
        """Returns the tensor; raises RunError `saved-in-place` as autograd would, which does not look where there are hooks."""
        if self._version is not None and version_of(self._tensor) != self._version:
            raise written(self.layer)
        return self._tensor


def written(layer: str, how: str = "since its forward saved it") -> RunError:
    """Returns the RunError `saved-in-place` of a tensor that `layer` saved and that was written on before its backward."""
    return RunError(
        "saved-in-place",
        f"a tensor that the backward of layer {layer!r} needs was written on in place {how}",
        hint="let the layer make a new tensor (`h = h + x`); `core.keep` refuses it too, and autograd names the operation",
    )


class Spans:
    """The addresses of the storages of `tensors`."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = {storage.data_ptr(): storage.nbytes() for storage in (each.untyped_storage() for each in tensors)}
        self._starts = sorted(start for start, size in storages.items() if size)
        self._ends = [start + storages[start] for start in self._starts]

    def __contains__(self, address: int) -> bool:
        at = bisect_right(self._starts, address) - 1
        return at >= 0 and address < self._ends[at]


class Visit:
    """One call of `layer`: references to the storages that it saved. stayed: storages that did not fit on the host."""

    def __init__(self, layer: str) -> None:
        self.layer = layer
        self.moved: list[weakref.ref[MovedStorage]] = []
        self.stayed: set[int] = set()

    def alive(self) -> list[MovedStorage]:
        """Returns the storages that autograd still has, the last saved first: a backward needs them in this order."""
        return [moved for each in reversed(self.moved) if (moved := each()) is not None]


class HostActivations(ActivationPolicy):
    """Moves storages that the layers `names` save to the host, and prefetches them."""

    def __init__(self, config: HostConfig, names: frozenset[str]) -> None:
        self.config = config
        self.names = names
        self._parts: Parts | None = None
        self._moved: weakref.WeakValueDictionary[int, MovedStorage] = weakref.WeakValueDictionary()
        self._lasting = Spans(())
        self._num_steps = 0
        self._leaving: deque[tuple[CopyEvent, list[MovedStorage]]] = deque()
        self._last: dict[tuple[int, int], Visit] = {}
        self._total: Counter[str] = Counter()
        self._seconds = {"copy_out_host_s": 0.0, "copy_back_host_s": 0.0}

    def attach(self, parts: Parts) -> None:
        """Takes a copy stream of this rank's device, and host memory for it."""
        device = parts.world.device
        self._parts = parts
        self._stream = device.copy_stream()
        # Nothing is freed within a step: unlocking memory of the host may wait for all work of the device, and that may include
        # a receive whose sender waits for this rank.
        wait = lambda: self._stream.record().wait()  # noqa: E731
        self.arena = HostArena(device.host_memory, wait, most_waste=MOST_WASTE, frees=False)

    def begin(self, actions: Sequence[Action], phase: Phase) -> None:
        """Discards the remains of a failed step, whose copies the device waits for, and notes where parameters and buffers are;
        they stay there for a step. The first step looks for writes that no version counter counts.
        """
        if self._parts is None:
            return
        self._num_steps += phase == "train"
        self._let_go()
        self._last.clear()
        self._stream.record().hold_device()
        self.arena.trim(2 * self.arena.max_lent_bytes)
        buffers = [buffer for layer in self._parts.layers for buffer in layer.module.buffers()]
        self._lasting = Spans([*buffers, *(param.parameter for param in self._parts.registry)])

    def detach(self) -> None:
        """Lets go of device memory that has left, and frees the host's."""
        if self._parts is not None:
            self._let_go()
            self._last.clear()
            self.arena.trim()

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the host's memory, as (name, uint8 tensor); nothing before `attach`."""
        return iter(()) if self._parts is None else self.arena.held()

    def counts(self) -> Mapping[str, float]:
        """Returns bytes moved, fetched, kept and on the host, and the host's seconds in copies; {} before `attach`."""
        if self._parts is None:
            return {}
        return {
            **{name: self._total[name] for name in COUNTS},
            **self._seconds,
            "max_away_bytes": self.arena.max_lent_bytes,
            "host_bytes": self.arena.num_bytes,
            "host_allocations": self.arena.num_allocations,
        }

    def call(
        self, name: str, layer: Callable[..., Any], args: tuple[Any, ...], fields: Mapping[str, Any], micro: MicroStep
    ) -> Any:
        """Calls the layer and returns its output. Storages that a chosen layer saves for its backward are copied to the host
        when the layer is over, leave the device when the next one is, and come back when the gradient of the next layer's
        output, or of its own, is there. Before `attach` nothing leaves.
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
        self._let_go()  # storages of layers before this one
        if name in self.names:
            self._leave(visit)
        if before is not None:
            self._fetch_with(output, before)
        return output

    def _pack(self, tensor: Tensor, visit: Visit, fixed: set[int]) -> Handle | KeptTensor | Tensor:
        """Returns the object that autograd keeps in place of `tensor`, and notes in `visit` the storage that is to leave.
        fixed: addresses of storages that stay, of the micro-batch's fields.
        """
        if not self._may_leave(tensor, fixed):
            return _kept(tensor, visit.layer)
        key = storage_id(tensor)
        moved = self._moved.get(key)
        if moved is None or not moved.has(tensor):
            if key in visit.stayed or not self._fits(tensor):
                visit.stayed.add(key)  # autograd has it from here on, so no other storage gets this key
                return _kept(tensor, visit.layer)
            moved = self._moved[key] = MovedStorage(tensor, self.arena, self._stream)
        if all(each() is not moved for each in visit.moved):
            visit.moved.append(weakref.ref(moved))
        return moved.handle(tensor, visit.layer)

    def _may_leave(self, tensor: Tensor, fixed: set[int]) -> bool:
        """Returns whether `tensor` lies on this device in a storage of at least `min_bytes` that belongs to no field,
        parameter, buffer or pool, and is no more than its memory. Pools are asked each time: they grow within a step.
        """
        assert self._parts is not None, "not attached"
        is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        if is_wrapped or not is_plain(tensor) or tensor.layout is not torch.strided or tensor.is_nested:
            return False  # more than a geometry of a storage
        if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
            return False
        if tensor.device != self._parts.world.device.torch_device:
            return False
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if storage.nbytes() < max(1, self.config.min_bytes) or address in fixed:
            return False
        if storage_id(tensor) in self._moved:
            return True
        return address not in self._lasting and address not in Spans(buffer for _, buffer in self._parts.pool.held())

    def _fits(self, tensor: Tensor) -> bool:
        """Returns whether the budget has room for the storage of `tensor`; counts its bytes if not."""
        num_bytes, budget = tensor.untyped_storage().nbytes(), self.config.budget_bytes
        if budget is None or self.arena.num_lent_bytes + round_up(num_bytes, PAGESIZE) <= budget:
            return True
        self._total["over_budget_bytes"] += num_bytes
        return False

    def _unpack(self, packed: Handle | KeptTensor | Tensor) -> Tensor:
        """Returns the tensor that autograd saved, on the device; fetches it if it is still away, and counts that. May be called
        again, as long as autograd keeps it. Raises RunError `saved-in-place` if it was written on since.
        """
        if isinstance(packed, Tensor):
            return packed
        if isinstance(packed, Handle) and self._fetch(packed.moved):
            self._total["fetched_on_demand"] += 1
        return packed.tensor()

    def _fetch_with(self, output: Any, visit: Visit) -> None:
        """Lets the storages of `visit` start to come back as soon as one of the tensors in `output` has a gradient."""

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
            self._total["fetched_bytes"] += moved.num_bytes
            self._seconds["copy_back_host_s"] += time.perf_counter() - began
        return is_away

    def _leave(self, visit: Visit) -> None:
        """Sends the storages of `visit`, and lets the device's memory go: now if its copies are done, else behind the next
        layer; in the first step always then, to look for writes of that layer.
        """
        storages = visit.alive()[::-1]
        for moved in storages:
            if not moved.is_sent:
                began = time.perf_counter()
                moved.send(looks=self._num_steps == 1)
                self._total.update(moved_bytes=moved.num_bytes, moved_storages=1)
                self._seconds["copy_out_host_s"] += time.perf_counter() - began
        self._leaving.append((self._stream.record(), [moved for moved in storages if moved.is_here]))
        if self._num_steps != 1 and self._leaving[-1][0].is_done():
            self._let_go()

    def _let_go(self) -> None:
        """Frees the device's memory of all layers that are leaving. The device waits for copies that are not done: it may be
        given the memory for its next work, which must not write there before.
        """
        while self._leaving:
            event, storages = self._leaving.popleft()
            event.hold_device()
            for moved in storages:
                moved.release()


def _kept(tensor: Tensor, layer: str) -> KeptTensor | Tensor:
    """Returns the object that autograd gets for a tensor that stays; a leaf has no history that could keep it alive."""
    return tensor if tensor.is_leaf and tensor.requires_grad else KeptTensor(tensor, layer)


def build(config: HostConfig, layer_names: Sequence[str]) -> HostActivations:
    """Returns `memory.host`, for those of `layer_names` (the whole model's, in order) that `config.layers` chooses."""
    return HostActivations(config, chosen(config.layers, layer_names))
