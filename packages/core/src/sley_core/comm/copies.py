"""Copies tensors between a device and the host in parallel with the device's own work.

    stream.wait_for_device()         # copies start after all work that is queued on the device so far
    stream.copy(host, weights)       # several copies, in this order
    event = stream.record()
    event.hold_device()              # work that is queued on the device from now on starts after the copies
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
from typing import Any

import torch
from torch import Tensor


class CopyEvent:
    """A point in a copy stream, after all copies that were enqueued before it; this class is that of completed copies."""

    def is_done(self) -> bool:
        """Returns whether those copies are done; does not wait."""
        return True

    def wait(self) -> None:
        """Waits, on the host, until those copies are done."""

    def hold_device(self) -> None:
        """Makes all later work on the device's own stream wait for those copies; does not block the host."""


class CopyStream:
    """Runs copies in order. Here, on the CPU, a copy is done at its return; on CUDA it overlaps with other work."""

    def wait_for_device(self) -> None:
        """Makes all later copies wait for the work that is queued on the device's own stream so far."""

    def wait_for(self, event: CopyEvent) -> None:
        """Makes all later copies wait for `event` of another copy stream."""
        event.wait()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueues a copy of `source` into `target`, of equal shape and dtype. Neither may be written until it is done."""
        with torch.no_grad():
            target.copy_(source)

    def record(self) -> CopyEvent:
        """Returns an event after all copies that were enqueued so far."""
        return CopyEvent()


class _CudaEvent(CopyEvent):
    """An event that the run's stream `main` can wait for.

    Its methods do not depend on the thread's current device. In a new thread that is device 0, where a context would take some
    hundred MiB.
    """

    def __init__(self, event: torch.cuda.Event, main: torch.cuda.Stream) -> None:
        self.event = event
        self._main = main

    def is_done(self) -> bool:
        with torch.cuda.device(self._main.device):
            return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        with torch.cuda.device(self._main.device):
            self.event.synchronize()

    def hold_device(self) -> None:
        self._main.wait_event(self.event)


class CudaStream(CopyStream):
    """A separate CUDA stream; copies from and to page-locked memory do not block the host. main: the run's own stream."""

    def __init__(self, main: torch.cuda.Stream) -> None:
        self._main = main
        self._stream = torch.cuda.Stream(main.device)  # type: ignore[no-untyped-call]

    def wait_for_device(self) -> None:
        self._stream.wait_stream(self._main)

    def wait_for(self, event: CopyEvent) -> None:
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
    """Returns a number that identifies the storage of `tensor` among all live storages."""
    return int(tensor.untyped_storage()._cdata)


def free(tensor: Tensor) -> int:
    """Frees the memory of `tensor` and of all its views, which stay valid objects; returns the bytes freed. Computing with one
    of them before `grow` reads missing memory: on a CPU that ends the process.
    """
    storage = tensor.untyped_storage()
    num_bytes = storage.nbytes()
    storage.resize_(0)
    return num_bytes


def grow(tensor: Tensor, num_bytes: int) -> None:
    """Allocates the memory of `tensor` and all its views again; the contents are undefined. num_bytes: the result of `free`."""
    tensor.untyped_storage().resize_(num_bytes)


_hosts: weakref.WeakSet[HostMemory] = weakref.WeakSet()


class HostMemory:
    """Holds zeroed host memory in `data`, uint8 [num_bytes].

    Its size is rounded up to full pages, while torch's pinned memory takes the next power of two. lock: whether to page-lock
    the memory with CUDA, so that copies need not wait for the host. is_locked: whether that worked; a failure is a warning. The
    pages are locked as long as this object lives, and freed with the last view.
    """

    def __init__(self, num_bytes: int, *, lock: bool) -> None:
        self.num_bytes = max(1, ceil(num_bytes / mmap.PAGESIZE)) * mmap.PAGESIZE
        pages = mmap.mmap(-1, self.num_bytes)
        self.data: Tensor = torch.frombuffer(pages, dtype=torch.uint8)[:num_bytes]
        self.is_locked = lock and self._lock(ctypes.addressof(ctypes.c_char.from_buffer(pages)))
        _hosts.add(self)

    @staticmethod
    def contains(tensor: Tensor) -> bool:
        """Returns whether `tensor` lies in a live `HostMemory`: on a CPU, an offloaded tensor."""
        key = storage_id(tensor)
        return any(storage_id(memory.data) == key for memory in list(_hosts))

    def _lock(self, address: int) -> bool:
        """Page-locks the pages at `address` for the life of this object. Returns whether that worked, and warns if not."""
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if error := int(runtime.cudaHostRegister(address, self.num_bytes, 0)):
            # CUDA remembers the error, and torch would raise it from this thread's next operation. A kernel launch, after which
            # torch checks for errors, clears it.
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda").add_(1)
            warnings.warn(
                f"{self.num_bytes / 2**20:.0f} MiB of host memory could not be pinned (CUDA error {error}), so "
                "copies are slower and block the host",
                RuntimeWarning,
                stacklevel=3,
            )
            return False
        weakref.finalize(self, runtime.cudaHostUnregister, address)
        return True
