"""`memory.host`: offloads saved activations of chosen layers to the host.

    forward of layer k     autograd saves
    end of layer k         copies to the host begin ──> the device's memory is free at the end of layer k + 1
    backward of layer k+1  begins ──> storages of layer k are fetched while it computes
    backward of layer k    uses them

A layer's backward starts when a gradient of its output is ready. All copies run in order on one stream of their own, so host
memory can be reused without waiting. A storage has these states:

    pack ──> HERE ── send, release ──> AWAY ── fetch ──> BACK ──> gone with the last handle
              │ copied when the layer is over │ host alone     │ on the device again
              └───────────────────────────────┴────────────────┴──> unpack
"""

import weakref
from bisect import bisect_right
from collections import deque
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
from sley_memory.plugin import HostConfig, match_layers

_MAX_WASTE = 1.25
"""The largest ratio of a reused slot's size to the size of a request. Requests in different steps have different sizes."""


class TensorGeometry(NamedTuple):
    """The layout of a tensor in its storage. span: the start and end of the tensor in the storage, in bytes. is_dense: whether
    the elements fill the span.
    """

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    span: tuple[int, int]
    is_dense: bool


def _get_geometry(tensor: Tensor) -> TensorGeometry:
    start = end = int(tensor.storage_offset() * tensor.element_size())
    if tensor.numel():
        extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end = start + int((extent + 1) * tensor.element_size())
    return TensorGeometry(tensor.dtype, tensor.shape, tensor.stride(), (start, end), end - start == tensor.nbytes)


class OffloadedStorage:
    """A storage that is copied to the host once, in full, for all saved tensors in it. Only their handles own this object.
    Autograd drops the handles with the saved tensors, and the last handle releases the host memory. The copy starts only after
    the layer's forward: tensors may share a storage without sharing a version counter (`unsafe_chunk`, `.data`), so the layer
    may write to one of them after it has saved another. is_sent: whether the copy has started.
    """

    def __init__(self, tensor: Tensor, arena: HostArena, stream: CopyStream) -> None:
        self._event: CopyEvent | None = None  # the end of the copy back, until device work has been made to wait for it
        storage = tensor.untyped_storage()
        self.num_bytes = storage.nbytes()
        self.device = tensor.device
        self._arena = arena
        (self._host,) = arena.allocate([round_up(self.num_bytes, PAGESIZE)])
        self._stream = stream
        self._source: torch.UntypedStorage | None = storage
        self.weak_reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # torch's; while it lives, no other storage has this one's address
        self._fetched: torch.UntypedStorage | None = None
        self._versions: dict[TensorGeometry, int] = {}
        self._handles: list[weakref.ref[SavedTensorHandle]] = []
        self.is_sent = False

    def __del__(self) -> None:
        if self._event is not None:
            self._event.make_device_wait()  # the next owner must not write to this memory before the copy ends
        self._arena.release(self._host)

    @property
    def is_here(self) -> bool:
        """Whether the original device memory has not been released yet."""
        return self._source is not None

    def has_contents_of(self, tensor: Tensor) -> bool:
        """Returns whether the host copy has, or will have, the present contents of `tensor`, a view of the storage."""
        if not self.is_sent:
            return True
        version, geometry = version_of(tensor), _get_geometry(tensor)
        return self._versions.get(geometry) == version or any(
            copied_version == version
            and copied.is_dense
            and copied.span[0] <= geometry.span[0]
            and geometry.span[1] <= copied.span[1]
            for copied, copied_version in self._versions.items()
        )

    def new_handle(self, tensor: Tensor, layer: str) -> "SavedTensorHandle":
        """Returns a handle that autograd keeps in place of `tensor`, which the layer `layer` saves."""
        handle = SavedTensorHandle(tensor, self, layer)
        if not self.is_sent:
            self._versions[_get_geometry(tensor)] = version_of(tensor)
        if self.is_here:
            self._handles.append(weakref.ref(handle))
        return handle

    def send(self, *, sums_bits: bool) -> None:
        """Starts the copy to the host. sums_bits: whether the handles first sum their tensors' bits, to detect later writes."""
        assert self._source is not None, "sent after it was released"
        if sums_bits:
            for handle in self._list_live_handles():
                handle.sum_bits()
        self._stream.wait_for_device()
        with torch.inference_mode(False), torch.no_grad():
            source = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self._source)
        self._stream.copy(self._host[: self.num_bytes], source)
        self.is_sent = True

    def release(self) -> None:
        """Drops the device memory, after each handle has checked its tensor. Later device work must wait for the copy."""
        for handle in self._list_live_handles():
            handle.release()
        self._handles.clear()
        self._source = None

    def _list_live_handles(self) -> "list[SavedTensorHandle]":
        return [handle for reference in self._handles if (handle := reference()) is not None]

    def fetch(self) -> bool:
        """Starts to copy the storage back to the device if it is away. Returns whether it was away."""
        if self._source is not None or self._fetched is not None:
            return False
        with torch.inference_mode(False), torch.no_grad():
            fetched = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)
        self._stream.wait_for_device()  # the device's earlier work may still use this memory
        self._stream.copy(fetched, self._host[: self.num_bytes])
        self._event = self._stream.record()
        self._fetched = fetched.untyped_storage()
        return True

    def storage(self) -> torch.UntypedStorage:
        """Returns the storage on the device, and makes device work wait for its contents. The storage must not be away."""
        if self._source is not None:
            return self._source
        assert self._fetched is not None, "used before it was fetched"
        if self._event is not None:
            self._event.make_device_wait()
            self._event = None
        return self._fetched


class SavedTensorHandle:
    """Replaces a saved tensor, a view of `storage`, in autograd's graph. layer: the name of the layer that saved it."""

    __slots__ = ("__weakref__", "_bits", "_fault", "_saved", "dtype", "layer", "offset", "shape", "storage", "stride")

    def __init__(self, tensor: Tensor, storage: OffloadedStorage, layer: str) -> None:
        self.storage = storage
        self.layer = layer
        self.dtype = tensor.dtype
        self.offset = tensor.storage_offset()
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self._saved = (tensor.detach(), version_of(tensor)) if storage.is_here else None
        self._bits: Tensor | None = None
        self._fault = ""

    def sum_bits(self) -> None:
        """Sums the tensor's bits on the device, so that `_check` finds later writes."""
        assert self._saved is not None, "bits summed after the release"
        self._bits = sum_of_bits(self._saved[0])

    def release(self) -> None:
        """Checks for writes to the tensor since it was saved, and drops the device memory."""
        if self._saved is not None:
            self._check(self._saved[0])
            self._saved = None

    def tensor(self) -> Tensor:
        """Returns the saved tensor, a view of the storage on the device, which must not be away. Raises RunError
        `saved-in-place` if the tensor was written before its release or, after `sum_bits`, through another owner of the
        storage.
        """
        if self._saved is not None:
            self._check(self._saved[0])
        elif self._bits is not None:
            original = torch.UntypedStorage._new_with_weak_ptr(self.storage.weak_reference.cdata)
            if original is not None:
                self._check(self._view(original))
        if self._fault:
            raise build_written_error(self.layer, self._fault)
        return self._view(self.storage.storage())

    def _view(self, storage: torch.UntypedStorage) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            empty = torch.empty(0, dtype=self.dtype, device=self.storage.device)
            return empty.set_(storage, self.offset, self.shape, self.stride)

    def _check(self, tensor: Tensor) -> None:
        """Records a fault if the saved `tensor` was written. Waits for the device if `sum_bits` was called."""
        if self._saved is not None and version_of(tensor) != self._saved[1]:
            self._fault = "since its forward saved it"
        elif self._bits is not None:
            bits = sum_of_bits(tensor)
            if bits is None or not torch.equal(self._bits, bits):
                self._fault = "through another tensor that shares its memory, such as `.data` or `unsafe_chunk`"


class KeptTensor:
    """Replaces a saved tensor that stays on the device. Drops the tensor's history, which would keep the graph alive."""

    __slots__ = ("_tensor", "_version", "layer")

    def __init__(self, tensor: Tensor, layer: str) -> None:
        self.layer = layer
        self._tensor = tensor if tensor.grad_fn is None else tensor.detach()
        # A functorch wrapper has no contents of its own.
        is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        self._version = None if is_wrapped else version_of(tensor)

    def tensor(self) -> Tensor:
        """Returns the tensor. Raises RunError `saved-in-place` if it was written since it was saved."""
        if self._version is not None and version_of(self._tensor) != self._version:
            raise build_written_error(self.layer)
        return self._tensor


def build_written_error(layer: str, fault: str = "since its forward saved it") -> RunError:
    """Returns the RunError `saved-in-place` for a tensor of `layer`. fault: how the tensor was written."""
    message = f"a tensor that the backward of layer {layer!r} needs was written in place {fault}"
    hint = "use a new tensor in the layer (`h = h + x`), or use `core.keep` to see the operation in autograd's error"
    return RunError("saved-in-place", message, hint=hint)


class AddressRanges:
    """The address ranges of the storages of `tensors`. `address in ranges` tests whether a range contains `address`."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
        self._starts = sorted(start for start, size in storages.items() if size)
        self._ends = [start + storages[start] for start in self._starts]

    def __contains__(self, address: int) -> bool:
        index = bisect_right(self._starts, address) - 1
        return index >= 0 and address < self._ends[index]


class LayerCall:
    """A call of `layer`. storages: weak references to the offloaded storages that it has saved. over_budget_ids: the ids of
    storages that stay on the device, since they exceed the host budget.
    """

    def __init__(self, layer: str) -> None:
        self.layer = layer
        self.storages: list[weakref.ref[OffloadedStorage]] = []
        self.over_budget_ids: set[int] = set()

    def list_live_storages(self) -> list[OffloadedStorage]:
        """Returns the storages that autograd still holds, in the order of the backward, that is, the last saved first."""
        return [storage for reference in reversed(self.storages) if (storage := reference()) is not None]


class HostActivations(ActivationPolicy):
    """The policy `memory.host`: offloads the storages that chosen layers save for the backward, and prefetches them.
    layer_names: the names of all layers of the model, in order.
    """

    def __init__(self, config: HostConfig, layer_names: Sequence[str]) -> None:
        self.config = config
        self.names = match_layers(config.layers, layer_names)
        self._parts: Parts | None = None
        self._storages: weakref.WeakValueDictionary[int, OffloadedStorage] = weakref.WeakValueDictionary()
        self._permanent_addresses = AddressRanges(())
        self._num_steps = 0
        self._leaving_storages: deque[tuple[CopyEvent, list[OffloadedStorage]]] = deque()
        self._last_calls: dict[tuple[int, int], LayerCall] = {}
        names = ("moved_bytes", "moved_storages", "fetched_bytes", "fetched_on_demand", "over_budget_bytes")
        self._totals: dict[str, float] = dict.fromkeys(names, 0)

    def attach(self, parts: Parts) -> None:
        """Creates a copy stream and an arena of host memory."""
        device = parts.world.device
        self._parts = parts
        self._stream = device.copy_stream()
        # No block is freed within a step: unlocking host memory may wait for all device work, and that may include a receive
        # whose sender waits for this rank.
        self.arena = HostArena(
            device.host_memory, lambda: self._stream.record().wait(), max_waste=_MAX_WASTE, frees_unused=False
        )

    def begin(self, actions: Sequence[Action], phase: Phase) -> None:
        """Discards the storages of a failed step, frees host memory beyond twice the peak use, and records the addresses of
        parameters and buffers, which are not offloaded.
        """
        if self._parts is None:
            return
        self._num_steps += phase == "train"
        self._release_leaving_storages()
        self._last_calls.clear()
        self._stream.record().make_device_wait()
        self.arena.trim(2 * self.arena.max_lent_bytes)
        buffers = [buffer for layer in self._parts.layers for buffer in layer.module.buffers()]
        self._permanent_addresses = AddressRanges([*buffers, *(param.parameter for param in self._parts.registry)])

    def detach(self) -> None:
        """Releases the device memory of storages whose copies are in flight, and frees unused host memory."""
        if self._parts is not None:
            self._release_leaving_storages()
            self._last_calls.clear()
            self.arena.trim()

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields each block of host memory as (name, uint8 tensor). Yields nothing before `attach`."""
        return iter(()) if self._parts is None else self.arena.named_tensors()

    def counts(self) -> Mapping[str, float]:
        """Returns counts of moved, fetched and over-budget bytes and of host memory, by name; {} before `attach`."""
        if self._parts is None:
            return {}
        return {
            **self._totals,
            "max_away_bytes": self.arena.max_lent_bytes,
            "host_bytes": self.arena.num_bytes,
            "host_allocations": self.arena.num_allocations,
        }

    def call(
        self, name: str, layer: Callable[..., Any], args: tuple[Any, ...], fields: Mapping[str, Any], micro: MicroStep
    ) -> Any:
        """Calls the layer and returns its output. The storages that a chosen layer saves are copied to the host after its
        forward, and released by the end of the next layer's forward. They are fetched when a gradient of the next layer's
        output, or of the layer's own output, is ready. Before `attach`, no storage is offloaded.
        """
        if self._parts is None:
            return layer(*args, **fields)
        key = micro.chunk, micro.micro
        previous = self._last_calls.get(key)
        if name not in self.names:
            output = layer(*args, **fields)
        else:
            call = self._last_calls[key] = LayerCall(name)
            field_addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(fields.values())}
            with saved_tensors_hooks(lambda tensor: self._pack(tensor, call, field_addresses), self._unpack):
                output = layer(*args, **fields)
            self._prefetch_with(output, call)
        self._release_leaving_storages()  # storages of layers before this one
        if name in self.names:
            self._send_storages(call)
        if previous is not None:
            self._prefetch_with(output, previous)
        return output

    def _pack(self, tensor: Tensor, call: LayerCall, field_addresses: set[int]) -> SavedTensorHandle | KeptTensor | Tensor:
        """Returns the object that autograd keeps in place of `tensor`. If its storage is offloaded, adds it to `call`."""
        if not self._is_movable(tensor, field_addresses):
            return _wrap_kept(tensor, call.layer)
        key = storage_id(tensor)
        storage = self._storages.get(key)
        if storage is None or not storage.has_contents_of(tensor):
            if key in call.over_budget_ids or not self._fits_budget(tensor):
                call.over_budget_ids.add(key)  # autograd now holds the storage, so no other storage gets this id
                return _wrap_kept(tensor, call.layer)
            storage = self._storages[key] = OffloadedStorage(tensor, self.arena, self._stream)
        if all(reference() is not storage for reference in call.storages):
            call.storages.append(weakref.ref(storage))
        return storage.new_handle(tensor, call.layer)

    def _is_movable(self, tensor: Tensor, field_addresses: set[int]) -> bool:
        """Returns whether `tensor` is an ordinary tensor on this device, in a storage of at least `min_bytes` that belongs to
        no field, parameter, buffer or pool. Pools are listed each time, since they grow within a step.
        """
        assert self._parts is not None, "not attached"
        is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        if is_wrapped or not is_plain(tensor) or tensor.layout is not torch.strided or tensor.is_nested:
            return False  # such tensors are more than a geometry and a storage
        if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
            return False
        if tensor.device != self._parts.world.device.torch_device:
            return False
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if storage.nbytes() < max(1, self.config.min_bytes) or address in field_addresses:
            return False
        if storage_id(tensor) in self._storages:
            return True
        pool_addresses = AddressRanges(buffer for _, buffer in self._parts.pool.named_tensors())
        return address not in self._permanent_addresses and address not in pool_addresses

    def _fits_budget(self, tensor: Tensor) -> bool:
        """Returns whether the storage of `tensor` fits into the host budget. If it does not, counts its bytes."""
        num_bytes, budget = tensor.untyped_storage().nbytes(), self.config.budget_bytes
        if budget is None or self.arena.num_lent_bytes + round_up(num_bytes, PAGESIZE) <= budget:
            return True
        self._totals["over_budget_bytes"] += num_bytes
        return False

    def _unpack(self, packed: SavedTensorHandle | KeptTensor | Tensor) -> Tensor:
        """Returns the saved tensor on the device. Autograd may call this several times. Fetches the tensor's storage if it is
        still away. Raises RunError `saved-in-place` if the tensor was written since autograd saved it.
        """
        if isinstance(packed, Tensor):
            return packed
        if isinstance(packed, SavedTensorHandle) and self._fetch(packed.storage):
            self._totals["fetched_on_demand"] += 1
        return packed.tensor()

    def _prefetch_with(self, output: Any, call: LayerCall) -> None:
        """Adds hooks that fetch the storages of `call` when the gradient of a tensor in `output` is ready."""

        def fetch(_gradient: Tensor) -> None:
            for storage in call.list_live_storages():
                self._fetch(storage)

        if call.storages:
            for tensor in tensors_in((output,)):
                if tensor.requires_grad:
                    tensor.register_hook(fetch)  # type: ignore[no-untyped-call]

    def _fetch(self, storage: OffloadedStorage) -> bool:
        """Starts to fetch a storage if it is away. Returns whether it was away."""
        is_away = storage.fetch()
        if is_away:
            self._totals["fetched_bytes"] += storage.num_bytes
        return is_away

    def _send_storages(self, call: LayerCall) -> None:
        """Starts the copies of the storages of `call`. If the copies are done at once, releases the storages, except in the
        first step, which releases them after the next layer, to detect that layer's writes.
        """
        storages = call.list_live_storages()[::-1]
        for storage in storages:
            if not storage.is_sent:
                storage.send(sums_bits=self._num_steps == 1)
                self._totals["moved_bytes"] += storage.num_bytes
                self._totals["moved_storages"] += 1
        self._leaving_storages.append((self._stream.record(), [storage for storage in storages if storage.is_here]))
        if self._num_steps != 1 and self._leaving_storages[-1][0].is_done():
            self._release_leaving_storages()

    def _release_leaving_storages(self) -> None:
        """Releases all storages whose copies have started. Later device work, which may reuse them, waits for the copies."""
        while self._leaving_storages:
            event, storages = self._leaving_storages.popleft()
            event.make_device_wait()
            for storage in storages:
                storage.release()


def _wrap_kept(tensor: Tensor, layer: str) -> KeptTensor | Tensor:
    """Returns a `KeptTensor` for `tensor`, or `tensor` itself if it is a trainable leaf, which has no history."""
    return tensor if tensor.is_leaf and tensor.requires_grad else KeptTensor(tensor, layer)
