"""Measures a device: products by dtype and size, bytes moved, what starting an operator costs."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sley_core.comm.device import Device

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
SIZES = {"cpu": (64, 192, 384, 768), "cuda": (256, 1024, 2048, 4096, 8192)}
"""Edges of the square products that are timed."""

MOVED_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}
"""Of the copy that measures bandwidth: more than caches hold."""

SMALL = 1 << 10
"""Elements of the operators whose start is timed: nothing to do."""

STARTS = 200
PATIENCE_S = 0.5
"""Seconds for one figure, after which no further repetition is begun."""

REPETITIONS = 7


def measure_device(device: Device) -> dict[str, Any]:
    """Measures the device and returns the table `[device]` of a machine file: name, kind, memory bandwidth, launch, products by
    dtype. Takes some seconds, and as much memory as `MOVED_BYTES` three times.
    """
    kind = "cuda" if device.type == "cuda" else "cpu"
    matmul = {}
    for name, dtype in DTYPES.items():
        found = [(2.0 * size**3, _product_s(device, size, dtype)) for size in SIZES[kind]]
        matmul[name] = saturation(found)
    table: dict[str, Any] = {
        "name": torch.cuda.get_device_name(device.torch_device) if kind == "cuda" else platform.processor() or "CPU",
        "kind": kind,
        "memory_bandwidth": bandwidth(device, MOVED_BYTES[kind]),
        "launch_s": _launch_s(device),
        "matmul": matmul,
    }
    if kind == "cuda":
        table["memory"] = torch.cuda.get_device_properties(device.torch_device).total_memory
    return table


def saturation(found: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Returns `flops_per_s` and `half_flops` of the law seconds = (FLOPs + half_flops) / flops_per_s that comes closest to
    `found`, pairs of FLOPs and seconds, by least squares of relative errors; half_flops is never negative.
    """
    # t / t_i = 1: columns n / t_i and 1 / t_i, with unknowns 1 / rate and half / rate
    a = sum((n / t) ** 2 for n, t in found)
    b = sum(n / t**2 for n, t in found)
    c = sum(1 / t**2 for _, t in found)
    p, q = sum(n / t for n, t in found), sum(1 / t for _, t in found)
    determinant = a * c - b * b
    slope, offset = ((p * c - q * b) / determinant, (q * a - p * b) / determinant) if determinant > 1e-9 * a * c else (p / a, 0)
    if offset < 0 or slope <= 0:
        slope, offset = p / a, 0.0
    return {"flops_per_s": 1 / slope, "half_flops": offset / slope}


def _product_s(device: Device, size: int, dtype: torch.dtype) -> float:
    """Returns the seconds of a product of two matrices of size x size."""
    one = torch.ones(size, size, dtype=dtype, device=device.torch_device)
    other = torch.ones_like(one)
    return _shortest(device, lambda: torch.mm(one, other))


def bandwidth(device: Device, num_bytes: int) -> float:
    """Times an addition on the device and returns its bytes per second: two fp32 tensors are read and one is written, of
    `num_bytes` each.
    """
    one = torch.ones(num_bytes // 4, device=device.torch_device)
    other, result = torch.ones_like(one), torch.empty_like(one)
    return 3 * num_bytes / _shortest(device, lambda: torch.add(one, other, out=result))


def _launch_s(device: Device) -> float:
    """Returns the seconds that the host takes to start an operator with nothing to do, averaged over `STARTS`."""
    small = torch.ones(SMALL, device=device.torch_device)

    def many() -> None:
        for _ in range(STARTS):
            small.add_(1.0)

    return _shortest(device, many) / STARTS


def _shortest(device: Device, work: Callable[[], object]) -> float:
    """Calls `work` once to make things ready, then several times; returns the shortest of those, in seconds, at least 1 ns."""
    work()
    taken: list[float] = []
    while len(taken) < REPETITIONS and (sum(taken) < PATIENCE_S or not taken):
        began = device.moment()
        work()
        taken.append(device.seconds_between(began, device.moment()))
    return max(min(taken), 1e-9)
