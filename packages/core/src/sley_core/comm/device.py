"""Defines a rank's device, which hides all differences between device types, and copies between the device and the host.

`cuda` means CUDA with NCCL, `cpu` means gloo, and `meta` is a fake world, whose tensors have shapes but no memory. Copies run
in parallel with the device's own work:

    stream.wait_for_device()         # copies start after all work that is queued on the device so far
    stream.copy(host, weights)       # several copies, in this order
    event = stream.record()
    event.make_device_wait()         # work that is queued on the device from now on starts after the copies
    free(weights)

The device must not read, write or free the memory of a copy before `make_device_wait`, nor the host before `wait`. On the CPU,
a copy is done when `copy` returns, and all waits are no-ops. `sley_testing.drawn_copies` has a stream that delays and reorders
its copies as far as these calls permit.
"""

import ctypes
import mmap
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import wraps
from math import ceil
from typing import Any, TypeVar, cast

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from sley_core.errors import RunError
from sley_core.generators import host_rng_state, seed_host, set_host_rng_state

Moment = float | torch.cuda.Event
"""A timestamp of a device's work: on CUDA, an event of the current stream; otherwise, `time.perf_counter()` in seconds."""

F = TypeVar("F", bound=Callable[..., Any])

BACKENDS = {"cuda": "nccl", "cpu": "gloo"}
"""Maps each device type to the backend of torch.distributed that its process groups use by default."""


class CopyEvent:
    """A point in a `CopyStream`, reached when all earlier copies are done. In this base class (CPU), it is always reached."""

    def is_done(self) -> bool:
        """Returns whether the copies before this event are done. Does not wait."""
        return True

    def wait(self) -> None:
        """Blocks the host until the copies before this event are done."""

    def make_device_wait(self) -> None:
        """Makes all later work on the device's own stream wait for the copies before this event. Does not block the host."""


class CopyStream:
    """Runs copies between host and device in order. In this base class, for the CPU, a copy is done when `copy` returns."""

    def wait_for_device(self) -> None:
        """Makes all later copies wait for the work that is queued on the device's own stream so far."""

    def wait_for(self, event: CopyEvent) -> None:
        """Makes all later copies wait for `event` of another copy stream."""
        event.wait()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueues a copy of `source` into `target`, of the same shape. Until the copy ends, neither tensor may be written."""
        with torch.no_grad():
            target.copy_(source)

    def record(self) -> CopyEvent:
        """Returns an event that is reached when all copies enqueued so far are done."""
        return CopyEvent()


class _CudaEvent(CopyEvent):
    """An event that the run's stream can wait for. Its methods do not depend on the thread's current device. In a new thread,
    the current device is device 0, and using it would create a CUDA context of a few hundred MiB there.
    """

    def __init__(self, event: torch.cuda.Event, run_stream: torch.cuda.Stream) -> None:
        self.event = event
        self._run_stream = run_stream

    def is_done(self) -> bool:
        with torch.cuda.device(self._run_stream.device):
            return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        with torch.cuda.device(self._run_stream.device):
            self.event.synchronize()

    def make_device_wait(self) -> None:
        self._run_stream.wait_event(self.event)


class CudaStream(CopyStream):
    """Runs copies on a separate CUDA stream. Copies from and to page-locked host memory do not block the host."""

    def __init__(self, run_stream: torch.cuda.Stream) -> None:
        self._run_stream = run_stream
        self._stream = torch.cuda.Stream(run_stream.device)  # type: ignore[no-untyped-call]

    def wait_for_device(self) -> None:
        self._stream.wait_stream(self._run_stream)

    def wait_for(self, event: CopyEvent) -> None:
        if isinstance(event, _CudaEvent):
            self._stream.wait_event(event.event)
        else:
            event.wait()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.no_grad(), torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def record(self) -> CopyEvent:
        return _CudaEvent(self._stream.record_event(), self._run_stream)


def storage_id(tensor: torch.Tensor) -> int:
    """Returns a number that identifies the storage of `tensor` among all live storages."""
    return int(tensor.untyped_storage()._cdata)


def free(tensor: torch.Tensor) -> int:
    """Frees the memory of `tensor` and all its views, and returns the number of bytes freed. The tensors stay valid objects,
    but no operation may read or write them until `reallocate` is called: on a CPU, the process would crash.
    """
    storage = tensor.untyped_storage()
    num_bytes = storage.nbytes()
    storage.resize_(0)
    return num_bytes


def reallocate(tensor: torch.Tensor, num_bytes: int) -> None:
    """Allocates the memory of `tensor` and its views after `free`, which returned `num_bytes`. The contents are undefined."""
    tensor.untyped_storage().resize_(num_bytes)


_host_memories: "weakref.WeakSet[HostMemory]" = weakref.WeakSet()


class HostMemory:
    """A block of zeroed host memory: `data`, a uint8 tensor of the requested size in bytes. The allocation is rounded up to
    whole pages, and its size is the `num_bytes` attribute; torch would round pinned memory up to a power of two. lock: whether
    to page-lock the memory for CUDA, so that copies do not block the host. is_locked: whether locking succeeded; if it failed,
    a RuntimeWarning is given. The pages stay locked while this object lives, and are freed with the last view of `data`.
    """

    def __init__(self, num_bytes: int, *, lock: bool) -> None:
        self.num_bytes = max(1, ceil(num_bytes / mmap.PAGESIZE)) * mmap.PAGESIZE
        pages = mmap.mmap(-1, self.num_bytes)
        self.data: torch.Tensor = torch.frombuffer(pages, dtype=torch.uint8)[:num_bytes]
        self.is_locked = lock and self._lock(ctypes.addressof(ctypes.c_char.from_buffer(pages)))
        _host_memories.add(self)

    @staticmethod
    def contains(tensor: torch.Tensor) -> bool:
        """Returns whether `tensor` is in the memory of a live `HostMemory`, as offloaded tensors are."""
        key = storage_id(tensor)
        return any(storage_id(memory.data) == key for memory in list(_host_memories))

    def _lock(self, address: int) -> bool:
        """Page-locks `num_bytes` bytes at `address` for the life of this object. Returns False, and warns, if CUDA refuses."""
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if error := int(runtime.cudaHostRegister(address, self.num_bytes, 0)):
            # CUDA remembers the error, and torch would raise it from this thread's next operation. A kernel launch clears it,
            # since torch checks for errors after each launch.
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


@dataclass(frozen=True)
class Device:
    """The device on which a rank runs, as `Device.pick` chooses it. is_shared: whether several ranks of this machine use the
    device. stream: the CUDA stream on which the run works; None on other devices.
    """

    torch_device: torch.device
    is_shared: bool = False
    stream: torch.cuda.Stream | None = field(default=None, kw_only=True, repr=False, compare=False)

    @classmethod
    def pick(cls, name: str, local_rank: int = 0, local_size: int = 1) -> "Device":
        """Returns this rank's device. A CUDA device becomes torch's current device. name: cpu, cuda or auto; auto means cuda if
        each of the `local_size` ranks of this machine can have its own device, and cpu otherwise. With cuda, ranks share
        devices if there are fewer devices than ranks, and the run uses the current stream. The environment variable
        `CUDA_DEVICE_MAX_CONNECTIONS` is then set to 32 unless it is set already; this works only before the process uses CUDA.
        Raises RunError `no-device` if `name` is cuda and there is no CUDA device.
        """
        count = torch.cuda.device_count() if name != "cpu" and torch.cuda.is_available() else 0
        if name == "auto":
            name = "cuda" if 0 < local_size <= count else "cpu"
        if name == "cpu":
            return cls(torch.device("cpu"))
        if count == 0:
            raise RunError("no-device", 'the plan asks for device = "cuda", but torch finds no CUDA device')
        # All CUDA streams share this number of driver queues: 8 by default, and 32 at most. A run has more than eight streams;
        # if two of them share a queue, a receive that waits for its peer delays the copies behind it.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        device = torch.device("cuda", local_rank % count)
        torch.cuda.set_device(device)
        # Autograd's thread has no current device before its first kernel. If that were a matrix product, as in a stage that
        # receives gradients, cuBLAS would warn that it has no context.
        torch.autograd.backward(torch.ones(1, device=device, requires_grad=True) * 2)
        return cls(device, is_shared=local_size > count, stream=torch.cuda.current_stream(device))

    @property
    def type(self) -> str:
        """Returns the device type: cpu, cuda or meta."""
        return self.torch_device.type

    @property
    def backend(self) -> str:
        """Returns the backend of this device's process groups: gloo for the CPU, nccl for CUDA. A CUDA device that ranks share
        uses gloo unless the environment sets NCCL_MULTI_RANK_GPU_ENABLE=1, which lets NCCL 2.30 and later share devices.
        """
        if self.is_shared and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
            return "gloo"
        return BACKENDS[self.type]

    @property
    def host_device(self) -> torch.device:
        """Returns the device of host tensors: the CPU, or meta if this device is meta."""
        return self.torch_device if self.type == "meta" else torch.device("cpu")

    @property
    def is_async(self) -> bool:
        """Returns whether the device runs work asynchronously, so that reading a value makes the host wait."""
        return self.type == "cuda"

    def as_default(self) -> AbstractContextManager[object]:
        """Returns a context manager that makes new tensors fake if the device is simulated. On a real device it does nothing,
        since real tensors need no mode.
        """
        return nullcontext()

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Makes the run's stream current within the block. The block's work follows the caller's earlier work on the device,
        and precedes the caller's later work. Does nothing if the run's stream is already current, or the device has no streams.
        """
        if self.stream is None or (current := torch.cuda.current_stream(self.torch_device)) == self.stream:
            yield
            return
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            current.wait_stream(self.stream)

    def read_values(self, values: torch.Tensor, fallback: list[float]) -> list[float]:
        """Waits for the device, and returns the elements of `values`. A simulated device returns `fallback`."""
        return [float(value) for value in values.reshape(-1).tolist()]

    def seed(self, seed: int) -> None:
        """Seeds all generators that a forward may use, in torch, `random` and numpy. seed: an integer in [0, 2**63)."""
        seed_host(seed)
        if self.type == "cuda":
            torch.cuda.default_generators[self.torch_device.index].manual_seed(seed)

    @contextmanager
    def preserve_random_state(self) -> Iterator[None]:
        """At the end of the block, restores all generators that `seed` seeds, so the program's own draws are unaffected."""
        generator = torch.cuda.default_generators[self.torch_device.index] if self.type == "cuda" else None
        state, device_state = host_rng_state(), None if generator is None else generator.get_state()
        try:
            yield
        finally:
            set_host_rng_state(state)
            if generator is not None and device_state is not None:
                generator.set_state(device_state)

    def moment(self) -> Moment:
        """Returns a timestamp of the device's work: on CUDA, an event recorded on the current stream without synchronizing;
        otherwise, `time.perf_counter()` in seconds.
        """
        if not self.is_async:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait_until(self, moment: Moment) -> None:
        """Waits on the host until the device has reached `moment`."""
        if isinstance(moment, torch.cuda.Event):
            moment.synchronize()

    def seconds_between(self, first: Moment, last: Moment) -> float:
        """Returns the time from `first` to `last` in seconds. Waits until the device has reached `last`."""
        self.wait_until(last)
        if isinstance(first, torch.cuda.Event):
            return float(first.elapsed_time(cast(torch.cuda.Event, last))) / 1e3
        return cast(float, last) - first

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns `tensor` on this device: a copy, or a detached tensor with the same memory if it is there already. The result
        is always a new object. Does not wait for a copy to CUDA: a host tensor is copied to pinned memory first.
        """
        if tensor.device == self.torch_device:
            return tensor.detach()
        if self.is_async and tensor.device.type == "cpu":
            tensor = tensor.pin_memory()
        return tensor.to(self.torch_device, non_blocking=True)

    def copy_to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """On CUDA, returns a page-locked copy of `tensor`, which is complete when the device reaches a `moment` taken
        afterwards. On other devices, returns `tensor` itself.
        """
        if not self.is_async:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def alias(self, memory: torch.Tensor) -> torch.Tensor:
        """Returns a detached tensor over `memory` with its own storage object, whose use count shows uses of this tensor."""
        return from_dlpack(to_dlpack(memory.detach()))  # does not reference the tensor object

    def bytes_of(self, memory: torch.Tensor) -> memoryview:
        """Returns a memoryview of `memory`, a one-dimensional uint8 tensor on the host."""
        return memory.numpy().data

    def copy_stream(self) -> CopyStream:
        """Returns a new stream for copies to and from the host. On CUDA, copies run in parallel with the device's own work."""
        return CopyStream() if self.stream is None else CudaStream(self.stream)

    def host_memory(self, num_bytes: int) -> HostMemory:
        """Returns zeroed host memory, page-locked if this device is asynchronous."""
        return HostMemory(num_bytes, lock=self.is_async)

    def __str__(self) -> str:
        if self.type == "cuda":
            return f"{self.torch_device} ({torch.cuda.get_device_name(self.torch_device)})"
        return str(self.torch_device)


def on_stream(method: F) -> F:
    """Decorates a method so that it runs on the stream of its object's device (`Device.on_stream`)."""

    @wraps(method)
    def call_on_stream(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.device.on_stream():
            return method(self, *args, **kwargs)

    return cast(F, call_on_stream)
