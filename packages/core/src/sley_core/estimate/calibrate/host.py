"""Measures copies between a device and its host as an offload makes them, and what the host's own cores move."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import torch

from sley_core.comm.copies import free, grow
from sley_core.comm.device import Device
from sley_core.estimate.calibrate.device import MOVED_BYTES, PATIENCE_S, REPETITIONS, bandwidth

if TYPE_CHECKING:
    from sley_core.comm.copies import CopyStream, HostMemory

SMALL_BYTES = 1 << 12
"""Of the copy whose start is timed."""


def measure_host(device: Device) -> dict[str, float]:
    """Measures copies and returns the table `[host]` of a machine file: bytes per second to and from memory of the host,
    page-locked where that helps, seconds to start a copy, and with a CUDA device the bandwidth of the host's own memory.

    On a CPU the memory that a copy left is given back, and comes anew for the next one, as in an offload: what the system takes
    for that is in the figures.
    """
    num_bytes = MOVED_BYTES["cuda" if device.is_async else "cpu"] // 4
    to_host, to_device = _seconds(device, num_bytes)
    table = {
        "to_host": num_bytes / to_host,
        "to_device": num_bytes / to_device,
        "latency_s": min(_seconds(device, SMALL_BYTES)),
    }
    if device.is_async:
        host = Device(torch.device("cpu"))
        table["memory_bandwidth"] = bandwidth(host, MOVED_BYTES["cpu"])
    return table


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
