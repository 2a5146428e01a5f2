"""Copies between a device and the host beside the device's own work, and waits for that.

    stream.follow()                  # after all work that the device has been given so far
    stream.copy(host, weights)       # several copies, in this order
    event = stream.record()
    event.hold_device()              # work that the device is given from now on starts when they are done
    free(weights)

Memory that a copy reads or writes must not be written, read or freed by the device before `hold_device`, nor by the host
before `wait`. On the CPU a copy is done when `copy` returns, and all waits are no-ops; `sley_testing.drawn_copies` has
a stream whose copies happen as late, and in any order, as these calls permit.
"""

from __future__ import annotations

import ctypes
import mmap
import warnings
import weakref
from contextlib import suppress
from math import ceil
from typing import Any, Protocol

import torch
from torch import Tensor


class CopyEvent(Protocol):
    """A point in a stream of copies: all that were given to it before."""

    def is_done(self) -> bool:
        """Returns whether those copies are done; does not wait."""
        ...

    def wait(self) -> None:
        """Waits, on the host, until those copies are done."""
        ...

    def hold_device(self) -> None:
        """Makes all work that the device's own stream is given from now on wait for those copies; does not block the host."""
        ...


class CopyStream(Protocol):
    """Copies that happen in the order in which they are given, beside the device's own work."""

    def follow(self) -> None:
        """Makes all later copies wait for the work that the device's own stream has been given so far."""
        ...

    def after(self, event: CopyEvent) -> None:
        """Makes all later copies wait for those of another stream before `event`."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueues a copy of `source` into `target`, of equal shapes and dtypes. Both stay as they are until it is done."""
        ...

    def record(self) -> CopyEvent:
        """Returns an event of all copies that the stream has been given so far."""
        ...


class _Done:
    """The event of a stream whose copies are done at once."""

    def is_done(self) -> bool:
        return True

    def wait(self) -> None: ...

    def hold_device(self) -> None: ...


class HostStream:
    """The stream of a device whose work the host does itself: each copy is done when `copy` returns."""

    def follow(self) -> None: ...

    def after(self, event: CopyEvent) -> None:
        event.wait()

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.no_grad():
            target.copy_(source)

    def record(self) -> CopyEvent:
        return _Done()


class _CudaEvent:
    """An event that the stream `main` of the run waits for, whatever the current device and stream of the asking thread: one
    that saves, or collects garbage, would begin with device 0, and take some hundred MiB of it for a context.
    """

    def __init__(self, event: torch.cuda.Event, main: torch.cuda.Stream) -> None:
        self.event = event
        self._main = main

    def is_done(self) -> bool:
        with torch.cuda.device(self._main.device):
            return bool(self.event.query())  # type: ignore[no-untyped-call]  # torch's

    def wait(self) -> None:
        with torch.cuda.device(self._main.device):
            self.event.synchronize()

    def hold_device(self) -> None:
        self._main.wait_event(self.event)


class CudaStream:
    """A CUDA stream of its own; copies from and to page-locked memory do not block the host. main: the run's own stream."""

    def __init__(self, main: torch.cuda.Stream) -> None:
        self._main = main
        self._stream = torch.cuda.Stream(main.device)  # type: ignore[no-untyped-call]  # torch's

    def follow(self) -> None:
        self._stream.wait_stream(self._main)

    def after(self, event: CopyEvent) -> None:
        if isinstance(event, _CudaEvent):
            self._stream.wait_event(event.event)
        else:
            event.wait()

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.no_grad(), torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def record(self) -> CopyEvent:
        return _CudaEvent(self._stream.record_event(), self._main)


def storage_id(tensor: Tensor) -> int:
    """Returns a number that identifies the storage of `tensor` among those that exist, with or without memory."""
    return int(tensor.untyped_storage()._cdata)


def free(tensor: Tensor) -> int:
    """Frees the memory of `tensor` and of all its views, which stay valid objects; returns the bytes that it had.

    Whoever computes with one of them before `grow` reads memory that is not there: on a CPU that ends the process.
    """
    storage = tensor.untyped_storage()
    num_bytes = storage.nbytes()
    storage.resize_(0)
    return num_bytes


def grow(tensor: Tensor, num_bytes: int) -> None:
    """Gives `tensor` and all its views `num_bytes` again, as `free` returned; undefined contents, perhaps another address."""
    tensor.untyped_storage().resize_(num_bytes)


_hosts: weakref.WeakSet[HostMemory] = weakref.WeakSet()


def is_host_memory(tensor: Tensor) -> bool:
    """Returns whether `tensor` lies in a `HostMemory` that is alive: on a CPU, what was moved off the device."""
    place = storage_id(tensor)
    return any(storage_id(memory.data) == place for memory in list(_hosts))


class HostMemory:
    """`data`, uint8 [num_bytes] of the host, zeroed. Takes whole pages and no more: torch's own pinned memory takes the next
    power of two.

    lock: whether to register it with CUDA, so that copies need not wait for the host; `is_locked` says whether that worked.
    Where the system refuses, it warns. The pages are locked as long as this object lives, and freed with the last view.
    """

    def __init__(self, num_bytes: int, *, lock: bool) -> None:
        self.num_bytes = max(1, ceil(num_bytes / mmap.PAGESIZE)) * mmap.PAGESIZE
        pages = mmap.mmap(-1, self.num_bytes)
        self.data: Tensor = torch.frombuffer(pages, dtype=torch.uint8)[:num_bytes]
        self.is_locked = lock and self._lock(ctypes.addressof(ctypes.c_char.from_buffer(pages)))
        _hosts.add(self)

    def _lock(self, address: int) -> bool:
        """Registers the pages at `address` with CUDA until this object ends; returns whether that worked, and warns if not."""
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's
        if error := int(runtime.cudaHostRegister(address, self.num_bytes, 0)):
            # CUDA keeps an error that was answered, and torch would raise it from this thread's next operation, whatever that
            # is: a kernel, behind which torch asks for errors, takes it back.
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda").add_(1)
            warnings.warn(
                f"{self.num_bytes / 2**20:.0f} MiB of host memory could not be page-locked (CUDA error {error}): "
                "copies will be slower, and wait for the host",
                RuntimeWarning,
                stacklevel=3,
            )
            return False
        weakref.finalize(self, runtime.cudaHostUnregister, address)
        return True
