"""Holds what autograd saved of one storage, on its way to the host and back.

    pack ──> HERE ── send, release ──> AWAY ──fetch──> BACK ──> gone with the last handle
              │ copied when the layer is over │ host alone     │ on the device again
              └───────────────────────────────┴────────────────┴──> unpack

A storage is copied once, in full, however many tensors of it were saved, and with whatever shapes and strides. It is copied
when its layer is over: tensors may share a storage without sharing a version counter (`unsafe_chunk`, `.data`), so the layer
may write to one after it has saved another. Only handles own a `MovedStorage`: autograd drops them when it drops what it saved,
and with the last one the host buffer is free.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sley_core.api.memory import sum_of_bits, version_of
from sley_core.errors import RunError

if TYPE_CHECKING:
    from sley_core.api.comm import CopyEvent, CopyStream, HostMemory
    from sley_core.api.parts import Parts
    from sley_memory.host_buffers import HostBuffers


class Spans:
    """The addresses of some tensors' storages."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = {storage.data_ptr(): storage.nbytes() for storage in (each.untyped_storage() for each in tensors)}
        self._starts = sorted(start for start, size in storages.items() if size)
        self._ends = [start + storages[start] for start in self._starts]

    def __contains__(self, address: int) -> bool:
        at = bisect_right(self._starts, address) - 1
        return at >= 0 and address < self._ends[at]


class Owners:
    """Parameters and buffers of this rank's layers, and whatever its pools hold: by address, as views and aliases share it."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._lasting = Spans(())

    def begin(self) -> None:
        """Notes where the layers' parameters and buffers are; they stay there for a step."""
        buffers = [buffer for layer in self._parts.layers for buffer in layer.module.buffers()]
        self._lasting = Spans([*buffers, *(param.parameter for param in self._parts.registry)])

    def have(self, tensor: Tensor) -> bool:
        """Returns whether the storage of `tensor` is one of the layers' parameters or buffers, or a pool's. Pools are asked
        each time: they grow within a step.
        """
        address = tensor.untyped_storage().data_ptr()
        return address in self._lasting or address in Spans(held for _, held in self._parts.pool.held())


class MovedStorage:
    """The storage of `tensor`, to be copied to `buffer` over `stream`; gives the buffer back to `buffers` in the end."""

    def __init__(self, tensor: Tensor, buffer: HostMemory, buffers: HostBuffers, stream: CopyStream) -> None:
        self._event: CopyEvent | None = None  # of what comes back, until somebody has waited for it
        self._buffer = buffer
        self._buffers = buffers
        storage = tensor.untyped_storage()
        self.num_bytes = storage.nbytes()
        self.device = tensor.device
        self._storage = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # torch's; while it lives, no other storage has this one's address
        self._stream = stream
        self._source: torch.UntypedStorage | None = storage
        self._back: torch.UntypedStorage | None = None
        self._places: dict[Geometry, int] = {}
        self._handles: list[weakref.ref[Handle]] = []
        self.is_sent = False

    def __del__(self) -> None:
        if self._event is not None:
            self._event.hold_device()  # who is given this memory next must not write there before the copy
        self._buffers.give(self._buffer)

    @property
    def is_here(self) -> bool:
        """Returns whether this object still holds the device's memory that is copied."""
        return self._source is not None

    def has(self, tensor: Tensor) -> bool:
        """Returns whether the host will have what `tensor`, of this storage, contains now: the copy is still to be made, or it
        has all of these elements and nobody has written to them since.
        """
        if not self.is_sent:
            return True
        version, span = version_of(tensor), _span(tensor)
        return self._places.get(_place(tensor)) == version or any(
            then == version and place.is_dense and place.span[0] <= span[0] and span[1] <= place.span[1]
            for place, then in self._places.items()
        )

    def handle(self, tensor: Tensor, layer: str) -> Handle:
        """Returns what autograd keeps of `tensor`, of this storage, which `layer` saves."""
        made = Handle(tensor, self, layer)
        if not self.is_sent:
            self._places[_place(tensor)] = version_of(tensor)
        if self.is_here:
            self._handles.append(weakref.ref(made))
        return made

    def send(self, *, looks: bool) -> None:
        """Starts the copy to the host, once the layer is over. looks: whether handles are to find later writes."""
        assert self._source is not None, "sent after it was released"
        if looks:
            for handle in self._needed():
                handle.look()
        self._stream.follow()
        self._stream.copy(self._buffer.data[: self.num_bytes], _whole(self._source, self.device))
        self.is_sent = True

    def release(self) -> None:
        """Drops the device's memory, and lets handles note whether their tensors were written on since they were saved. The
        copy must be done, or the device held until it is.
        """
        for handle in self._needed():
            handle.release()
        self._handles.clear()
        self._source = None

    def _needed(self) -> list[Handle]:
        """Returns the handles that autograd has not dropped."""
        return [handle for each in self._handles if (handle := each()) is not None]

    def original(self) -> torch.UntypedStorage | None:
        """Returns the storage that was saved, if anybody still has it."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        return found

    def fetch(self) -> bool:
        """Starts to bring the storage back, if it is away; returns whether it was. It is not away before `release`, nor once it
        is fetched.
        """
        if self._source is not None or self._back is not None:
            return False
        with torch.inference_mode(False), torch.no_grad():
            back = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)
        # The memory may be what the device's earlier work still uses.
        self._stream.follow()
        self._stream.copy(back, self._buffer.data[: self.num_bytes])
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


class Geometry(NamedTuple):
    """Where a tensor lies in its storage. span: its first byte, and the byte after its last. is_dense: whether all between are
    its own.
    """

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    span: tuple[int, int]
    is_dense: bool


def _place(tensor: Tensor) -> Geometry:
    span = _span(tensor)
    return Geometry(tensor.dtype, tensor.shape, tensor.stride(), span, span[1] - span[0] == tensor.nbytes)


def _span(tensor: Tensor) -> tuple[int, int]:
    """Returns the tensor's first byte in its storage, and the byte after its last."""
    start = int(tensor.storage_offset() * tensor.element_size())
    if not tensor.numel():
        return start, start
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + int((extent + 1) * tensor.element_size())


class Handle:
    """What autograd has of one tensor that it saved: its place in a `moved` storage."""

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
        `saved-in-place` if it was written on before it left; after `look`, also by who still has it.
        """
        if self._saved is not None:
            self._check(self._saved[0])
        elif self._bits is not None and (original := self.moved.original()) is not None:
            self._check(self._over(original))
        if self._fault:
            raise written(self.layer, self._fault)
        return self._over(self.moved.storage())

    def _over(self, storage: torch.UntypedStorage) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            made = torch.empty(0, dtype=self.dtype, device=self.moved.device)
            return made.set_(storage, self.offset, self.shape, self.stride)

    def _check(self, tensor: Tensor) -> None:
        """Notes a fault if `tensor`, in which the saved one was, was written on. Waits for the device after `look`."""
        if self._saved is not None and version_of(tensor) != self._saved[1]:
            self._fault = "since its forward saved it"
        elif self._bits is not None and not torch.equal(self._bits, _bits_of(tensor)):
            self._fault = "through another that shares its memory, as `.data` and `unsafe_chunk` do"


def _bits_of(tensor: Tensor) -> Tensor:
    bits = sum_of_bits(tensor)
    assert bits is not None, "a tensor that has become another"
    return bits


class KeptTensor:
    """What autograd has of a tensor that stays: the tensor without its history, which would otherwise keep itself alive."""

    __slots__ = ("_tensor", "_version", "layer")

    def __init__(self, tensor: Tensor, layer: str) -> None:
        self.layer = layer
        self._tensor = tensor if tensor.grad_fn is None else tensor.detach()
        # What stands for a batch of tensors has no contents of its own.
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


def _whole(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    """Returns all of a storage: uint8 [bytes]."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
