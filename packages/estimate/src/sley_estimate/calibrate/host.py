"""Measures copies between a device and its host as an offload makes them, and an optimizer on the host's own cores."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch

from sley_core.comm.copies import free, grow
from sley_estimate.bench.lead import Lead
from sley_estimate.calibrate.device import MOVED_BYTES, PATIENCE_S, REPETITIONS

if TYPE_CHECKING:
    from sley_core.comm.copies import CopyEvent, CopyStream, HostMemory
    from sley_core.comm.device import Device

SMALL_BYTES = 1 << 12
"""Of the copies whose start is timed."""

NUM_SMALL = 100
"""Of them one after the other: what the host takes to start one is hidden, as in a run, by those before."""

BUCKETS, BUCKET = 4, 1 << 24
"""How many buckets an optimizer steps on the host, to time it, and elements of each: as a run steps them, some 64 MB of weights
at a time, which are rounded while caches still have them. Together they are more than caches hold, which of a server are
hundreds of MiB: in a run each element is stepped once between two forwards.
"""

RING = 2
"""Buckets whose gradients are on the host at once, in the same memory by turns."""

STEP_BYTES = 7 * 4 + 6
"""Of each element in fp32: weight, gradient and two states are read, all but the gradient written; then the weight is rounded
to bf16.
"""


def measure_host(device: Device) -> dict[str, float]:
    """Measures copies and returns the table `[host]` of a machine file: bytes per second to and from memory of the host,
    page-locked where that helps, seconds to start a copy, and with a CUDA device the bandwidth of the host's own memory, as an
    optimizer there has it.

    On a CPU the memory that a copy left is given back, and comes anew for the next one, as in an offload: what the system takes
    for that is in the figures.
    """
    num_bytes = MOVED_BYTES["cuda" if device.is_async else "cpu"] // 4
    to_host, to_device = _seconds(device, num_bytes)
    table = {"to_host": num_bytes / to_host, "to_device": num_bytes / to_device, "latency_s": _start_s(device)}
    if device.is_async:
        table["memory_bandwidth"] = host_bandwidth(device)
    return table


def host_bandwidth(device: Device) -> float:
    """Returns the bytes per second that a fused AdamW reads and writes on the host, where it steps buckets one after the other
    and rounds each to bf16: while the next gradients come from `device`, and the weights before go there, as in a run.
    """
    stepping = HostStepping(device)
    stepping.step()  # makes the states
    return BUCKETS * BUCKET * STEP_BYTES / statistics.median(stepping.step() for _ in range(REPETITIONS))


class HostStepping:
    """Steps buckets on the host, as an optimizer there does in a run. parameters: fp32, one for each bucket. sent: the last of
    them as `device` has it, in bf16.
    """

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
        """Steps all buckets once; returns the seconds from the arrival of the first gradients until the last weights are
        rounded.
        """
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
        """Starts to copy a bucket's gradients to the host."""
        self._out.copy(self._landed[at % RING], self._gradient)
        return self._out.record()


def _start_s(device: Device) -> float:
    """Returns the seconds of a copy of next to nothing, where several follow one another: the faster way."""
    memory, stream = device.host_memory(SMALL_BYTES), device.copy_stream()
    there = torch.ones(SMALL_BYTES, dtype=torch.uint8, device=device.torch_device)
    lead = Lead(device)
    found = []
    for target, source in ((memory.data, there), (there, memory.data)):
        stream.copy(target, source)
        host_s = 0.0
        for _ in range(2):  # by the first it is known how long the host takes to start them
            lead(host_s)
            began, began_s = device.moment(), time.perf_counter()
            stream.follow()
            for _ in range(NUM_SMALL):
                stream.copy(target, source)
            stream.record().hold_device()
            host_s = time.perf_counter() - began_s
            seconds = device.seconds_between(began, device.moment())
        found.append(seconds / NUM_SMALL)
    return min(found)


def _seconds(device: Device, num_bytes: int) -> tuple[float, float]:
    """Returns the median seconds of a copy of `num_bytes` to the host, and of one back."""
    memory, stream = device.host_memory(num_bytes), device.copy_stream()
    there = torch.ones(num_bytes, dtype=torch.uint8, device=device.torch_device)
    found = [_there_and_back(device, memory, stream, there)]
    while len(found) <= REPETITIONS and sum(map(sum, found)) < PATIENCE_S:
        found.append(_there_and_back(device, memory, stream, there))
    out, into = zip(*(found[1:] or found), strict=True)  # the first takes pages that nobody has touched
    return max(statistics.median(out), 1e-9), max(statistics.median(into), 1e-9)


def _there_and_back(device: Device, memory: HostMemory, stream: CopyStream, there: torch.Tensor) -> tuple[float, float]:
    """Copies `there`, uint8 [bytes], into `memory`, frees it, allocates it again and copies it back; returns the seconds of
    each way.
    """
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
