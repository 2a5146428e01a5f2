"""Measures a device and its host: products, bandwidth, launches; copies, and an optimizer that steps on the host's cores."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from math import ceil
from typing import Any

import torch

from sley_core.comm.copies import CopyEvent, CopyStream, HostMemory, free, grow
from sley_core.comm.device import Device

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
SIZES = {"cpu": (64, 192, 384, 768), "cuda": (256, 1024, 2048, 4096, 8192)}
"""Edges of the square products that are timed."""

MOVED_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}  # of the addition that measures bandwidth: more than caches hold
STARTS = 200  # operators with nothing to do whose start is timed
PATIENCE_S = 0.5  # seconds for one figure, after which no further repetition begins

REPETITIONS = 7

SMALL_BYTES, NUM_SMALL = 1 << 12, 100
"""Of copies whose start is timed, and how many follow each other, so that the host's time to start one is hidden."""

BUCKETS, BUCKET = 4, 1 << 24
"""Buckets that an optimizer steps on the host, and elements of each: about 64 MB at a time, as in a run, and together more than
a server's caches hold."""

RING = 2  # buckets whose gradients are on the host at once

STEP_BYTES = 7 * 4 + 6
"""Per element in fp32: weight, gradient and two states are read, all but the gradient written; the weight is rounded to
bf16.
"""

WRITTEN_BYTES = {"cpu": 1 << 26, "cuda": 1 << 28}
"""Of one write of a `Lead`, more than caches hold: in a run other layers fill them before a layer's turn."""

LEAD = 1.5  # how many times the host's seconds the device is kept at work: these vary


def measure_device(device: Device) -> dict[str, Any]:
    """Returns the table `[device]` of a machine file. Takes some seconds, and three times `MOVED_BYTES`."""
    kind = "cuda" if device.type == "cuda" else "cpu"

    def product_s(size: int, dtype: torch.dtype) -> float:
        square = torch.ones(size, size, dtype=dtype, device=device.torch_device)
        other = torch.ones_like(square)
        return _shortest(device, lambda: torch.mm(square, other))

    small = torch.ones(1 << 10, device=device.torch_device)
    table: dict[str, Any] = {
        "name": torch.cuda.get_device_name(device.torch_device) if kind == "cuda" else platform.processor() or "CPU",
        "kind": kind,
        "memory_bandwidth": bandwidth(device, MOVED_BYTES[kind]),
        "launch_s": _shortest(device, lambda: [small.add_(1.0) for _ in range(STARTS)]) / STARTS,
        "matmul": {
            name: saturation([(2.0 * size**3, product_s(size, dtype)) for size in SIZES[kind]])
            for name, dtype in DTYPES.items()
        },
    }
    if kind == "cuda":
        table["memory"] = torch.cuda.get_device_properties(device.torch_device).total_memory
    return table


def saturation(times: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Fits `flops_per_s` and `half_flops`, not negative, to pairs (FLOPs, seconds) by least squares of relative errors."""
    # t / t_i = 1: columns n / t_i and 1 / t_i, with unknowns 1 / rate and half / rate
    a = sum((n / t) ** 2 for n, t in times)
    b = sum(n / t**2 for n, t in times)
    c = sum(1 / t**2 for _, t in times)
    p, q = sum(n / t for n, t in times), sum(1 / t for _, t in times)
    determinant = a * c - b * b
    slope, offset = ((p * c - q * b) / determinant, (q * a - p * b) / determinant) if determinant > 1e-9 * a * c else (p / a, 0)
    if offset < 0 or slope <= 0:
        slope, offset = p / a, 0.0
    return {"flops_per_s": 1 / slope, "half_flops": offset / slope}


def bandwidth(device: Device, num_bytes: int) -> float:
    """Returns bytes per second of an addition in fp32: two tensors of `num_bytes` are read, one is written."""
    term = torch.ones(num_bytes // 4, device=device.torch_device)
    other, result = torch.ones_like(term), torch.empty_like(term)
    return 3 * num_bytes / _shortest(device, lambda: torch.add(term, other, out=result))


def _shortest(device: Device, work: Callable[[], object]) -> float:
    """Returns the shortest seconds of several calls of `work`, after one to warm up; at least 1 ns."""
    work()
    taken: list[float] = []
    while len(taken) < REPETITIONS and (sum(taken) < PATIENCE_S or not taken):
        began = device.moment()
        work()
        taken.append(device.seconds_between(began, device.moment()))
    return max(min(taken), 1e-9)


class Lead:
    """Writes to unused memory of `device`: evicts the caches, and keeps a device that works through a queue busy while the host
    starts what is timed there, as in a run, whose host is ahead.

    host     start writes | start the layer |
    device   write write write write write  | the layer, and no wait for a launch |
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        if device.torch_device.type == "cpu":  # not torch's memory, which a run keeps
            self._memory = HostMemory(WRITTEN_BYTES["cpu"], lock=False).data
        else:
            self._memory = torch.empty(WRITTEN_BYTES["cuda"], dtype=torch.uint8, device=device.torch_device)
        self._write_s = 0.0
        if device.is_async:
            self._memory.zero_()
            began = device.moment()
            for _ in range(20):
                self._memory.zero_()
            self._write_s = device.seconds_between(began, device.moment()) / 20

    def __call__(self, host_s: float = 0.0) -> None:
        """Starts writes for longer than `host_s`; at least one."""
        for _ in range(1 + (ceil(LEAD * host_s / self._write_s) if self._write_s else 0)):
            self._memory.zero_()


def measure_host(device: Device) -> dict[str, float]:
    """Returns the table `[host]` of a machine file: copies as an offload makes them, and with a CUDA device the bandwidth of
    the host's memory, as an optimizer there has it.

    On a CPU the memory that a copy left is freed and allocated anew for the next one, as in an offload.
    """
    num_bytes = MOVED_BYTES["cuda" if device.is_async else "cpu"] // 4
    memory, stream = device.host_memory(num_bytes), device.copy_stream()
    there = torch.ones(num_bytes, dtype=torch.uint8, device=device.torch_device)
    times = [_out_and_back(device, memory, stream, there)]
    while len(times) <= REPETITIONS and sum(map(sum, times)) < PATIENCE_S:
        times.append(_out_and_back(device, memory, stream, there))
    ways = zip(*(times[1:] or times), strict=True)  # the first touches new pages
    to_host, to_device = (max(statistics.median(way), 1e-9) for way in ways)
    table = {"to_host": num_bytes / to_host, "to_device": num_bytes / to_device, "latency_s": _start_s(device)}
    if device.is_async:
        table["memory_bandwidth"] = host_bandwidth(device)
    return table


def host_bandwidth(device: Device) -> float:
    """Returns bytes per second of a fused AdamW on the host that steps buckets one after the other and rounds each to bf16,
    while the next gradients come from `device` and the weights before go there.
    """
    stepping = HostStepping(device)
    stepping.step()  # makes the states
    return BUCKETS * BUCKET * STEP_BYTES / statistics.median(stepping.step() for _ in range(REPETITIONS))


class HostStepping:
    """Steps fp32 `parameters` on the host, bucket by bucket. sent: the last bucket on `device`, in bf16."""

    def __init__(self, device: Device) -> None:
        self.parameters = [torch.nn.Parameter(torch.ones(BUCKET)) for _ in range(BUCKETS)]
        self._optimizer = torch.optim.AdamW(self.parameters, fused=True)
        # memory that the device copies to and from, not that of tensors
        self._memory = [device.host_memory(size * BUCKET) for size in RING * (4, 2)]
        views = [memory.data[: BUCKET * size] for memory, size in zip(self._memory, RING * (4, 2), strict=True)]
        self._landed = [view.view(torch.float32).fill_(1.0) for view in views[::2]]
        self._leaving = [view.view(torch.bfloat16) for view in views[1::2]]
        for at, parameter in enumerate(self.parameters):
            parameter.grad = self._landed[at % RING]
        self._gradient = torch.ones(BUCKET, device=device.torch_device)
        self.sent = torch.ones(BUCKET, dtype=torch.bfloat16, device=device.torch_device)
        self._out, self._into = device.copy_stream(), device.copy_stream()
        for stream in (self._out, self._into):
            stream.follow()

    def step(self) -> float:
        """Steps all buckets once; returns the seconds from the arrival of the first gradients to the last rounding."""
        arriving = [self._fetch(at) for at in range(RING)]
        for event in arriving:
            event.wait()
        leaving: list[CopyEvent] = []
        began = time.perf_counter()
        for at, parameter in enumerate(self.parameters):
            arriving[at].wait()
            self._optimizer.param_groups[0]["params"] = [parameter]
            self._optimizer.step()
            if at >= RING:
                leaving[at - RING].wait()
            torch._foreach_copy_([self._leaving[at % RING]], [parameter.detach()])
            ended = time.perf_counter()
            self._into.copy(self.sent, self._leaving[at % RING])
            leaving.append(self._into.record())
            if at + RING < BUCKETS:
                arriving.append(self._fetch(at + RING))
        for event in leaving:
            event.wait()
        return ended - began

    def _fetch(self, at: int) -> CopyEvent:
        self._out.copy(self._landed[at % RING], self._gradient)
        return self._out.record()


def _start_s(device: Device) -> float:
    """Returns the seconds of a copy of next to nothing, the faster way, where several follow each other."""
    memory, stream = device.host_memory(SMALL_BYTES), device.copy_stream()
    there = torch.ones(SMALL_BYTES, dtype=torch.uint8, device=device.torch_device)
    lead = Lead(device)
    times = []
    for target, source in ((memory.data, there), (there, memory.data)):
        stream.copy(target, source)
        host_s = 0.0
        for _ in range(2):  # the first shows how long the host takes to start them
            lead(host_s)
            began, began_s = device.moment(), time.perf_counter()
            stream.follow()
            for _ in range(NUM_SMALL):
                stream.copy(target, source)
            stream.record().hold_device()
            host_s = time.perf_counter() - began_s
            seconds = device.seconds_between(began, device.moment())
        times.append(seconds / NUM_SMALL)
    return min(times)


def _out_and_back(device: Device, memory: HostMemory, stream: CopyStream, there: torch.Tensor) -> tuple[float, float]:
    """Copies `there`, uint8 [bytes], out, frees it, allocates it again and copies it back; returns the seconds of each way."""
    moments = [device.moment()]
    stream.follow()
    stream.copy(memory.data, there)
    stream.record().hold_device()
    num_bytes = free(there)
    moments.append(device.moment())
    grow(there, num_bytes)
    stream.follow()
    stream.copy(there, memory.data)
    stream.record().hold_device()
    moments.append(device.moment())
    return device.seconds_between(*moments[:2]), device.seconds_between(*moments[1:])
