"""Holds what autograd saved of one storage, on its way to the host and back.

    pack ──> HERE ──release──> AWAY ──fetch──> BACK ──> gone with the last handle
              │ copied out       │ host alone     │ on the device again
              └──────────────────┴────────────────┴──> unpack

A storage is copied once, in full, however many tensors of it were saved, and with whatever shapes and strides. Only handles own
a `MovedStorage`: autograd drops them when it drops what it saved, and with the last one the host buffer is free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sley_core.errors import RunError

if TYPE_CHECKING:
    from sley_core.api.comm import CopyEvent, CopyStream, HostMemory
    from sley_memory.host_buffers import HostBuffers

Key = tuple[int, int]
"""A storage, by what identifies it as long as a weak reference to it lives, and the version of its contents."""


def key_of(tensor: Tensor) -> Key:
    """Returns what identifies a tensor's storage, and the version of its contents."""
    storage: int = tensor.untyped_storage()._cdata
    return storage, tensor._version


class MovedStorage:
    """The storage of `tensor`, copied to `buffer` over `stream`; gives the buffer back to `buffers` in the end."""

    def __init__(self, tensor: Tensor, buffer: HostMemory, buffers: HostBuffers, stream: CopyStream) -> None:
        self._event: CopyEvent | None = None  # of what comes back, until somebody has waited for it
        self._buffer = buffer
        self._buffers = buffers
        storage = tensor.untyped_storage()
        self.num_bytes = storage.nbytes()
        self.device = tensor.device
        self._storage = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # torch's; while it lives, no other storage has this one's key
        self._stream = stream
        self._source: tuple[Tensor, int] | None = tensor.detach(), tensor._version
        self._back: torch.UntypedStorage | None = None
        self._was_written = False
        stream.copy(buffer.data[: self.num_bytes], _whole(storage, tensor.device))

    def __del__(self) -> None:
        if self._event is not None:
            self._event.hold_device()  # who is given this memory next must not write there before the copy
        self._buffers.give(self._buffer)

    @property
    def is_here(self) -> bool:
        """Returns whether this object still holds the device's memory that was copied."""
        return self._source is not None

    def release(self) -> None:
        """Drops the device's memory, and notes whether it was written on since it was saved. The copy must be done, or the
        device held until it is.
        """
        if self._source is not None:
            tensor, version = self._source
            self._was_written = tensor._version != version
            self._source = None

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
        sees.

        It must not be away. Raises RunError `saved-in-place` if the tensor was written on before it left.
        """
        if self._source is not None:
            tensor, version = self._source
            self._was_written = tensor._version != version
        if self._was_written:
            raise written()
        if self._source is not None:
            return self._source[0].untyped_storage()
        assert self._back is not None, "used before it was fetched"
        if self._event is not None:
            self._event.hold_device()
            self._event = None
        return self._back


class Handle:
    """What autograd has of one tensor that it saved: its place in a `moved` storage."""

    __slots__ = ("dtype", "moved", "offset", "shape", "stride")

    def __init__(self, tensor: Tensor, moved: MovedStorage) -> None:
        self.moved = moved
        self.dtype = tensor.dtype
        self.offset = tensor.storage_offset()
        self.shape = tensor.shape
        self.stride = tensor.stride()

    def tensor(self) -> Tensor:
        """Returns the tensor as it was saved, over storage on the device, which must have been fetched. Raises RunError
        `saved-in-place` if it was written on before it left.
        """
        with torch.inference_mode(False), torch.no_grad():
            made = torch.empty(0, dtype=self.dtype, device=self.moved.device)
            return made.set_(self.moved.storage(), self.offset, self.shape, self.stride)


class KeptTensor:
    """What autograd has of a tensor that stays: the tensor without its history, which would otherwise keep itself alive."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor if tensor.grad_fn is None else tensor.detach()
        # What stands for a batch of tensors has no contents of its own.
        is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        self._version = None if is_wrapped else tensor._version

    def tensor(self) -> Tensor:
        """Returns the tensor; raises RunError `saved-in-place` as autograd would, which does not look where there are hooks."""
        if self._version is not None and self._tensor._version != self._version:
            raise written()
        return self._tensor


def written() -> RunError:
    """Returns the RunError `saved-in-place` of a saved tensor that was written on before its backward."""
    return RunError(
        "saved-in-place",
        "a tensor that a backward needs was written on in place since its forward saved it",
        hint="let the layer make a new tensor (`h = h + x`); `core.keep` refuses it too, and autograd names the operation",
    )


def _whole(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    """Returns all of a storage: uint8 [bytes]."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
