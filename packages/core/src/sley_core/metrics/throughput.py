"""Measures a step for its metrics row: tokens and samples per second, share of the device's FLOP/s, peak memory."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from sley_core.data.dataset import DataInfo
    from sley_core.engine.parts import Parts
    from sley_core.model.layers import Layer


MEMORY_EVERY_S = 0.5


class Meter:
    """Counts what a batch has, as the dataset declares it, and measures steps.

    unit: "tokens", the positions of the first field that has a sequence dim, or "samples" if no field has one.
    flops_per_token: see `sley_core.metrics.throughput`. peak_flops: FLOP/s of all devices of the run together, None if not
    known.
    """

    def __init__(
        self, device: torch.device, info: DataInfo, *, flops_per_token: float = 0.0, peak_flops: float | None = None
    ) -> None:
        """Chooses the field by which batches are counted."""
        self.device = device
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops
        self._measured_at = -math.inf
        self._memory = 0.0
        fields = list(info.fields.items())
        self._name, self._field = next((item for item in fields if item[1].sequence_dim is not None), fields[0])
        self.unit = "samples" if self._field.sequence_dim is None else "tokens"

    @classmethod
    def of(cls, parts: Parts, layers: Iterable[Layer], info: DataInfo) -> Meter:
        """Returns the meter of this run: FLOPs of all layers of the full model, peak of all devices."""
        device = parts.world.device.torch_device
        peak = device_peak_flops(device, parts.precision.compute)
        return cls(
            device,
            info,
            flops_per_token=model_flops_per_token(
                (layer.module for layer in layers),
                info.sequence or 0,
                {id(param.parameter): prod(param.shape) for param in parts.registry if param.shard},
            ),
            peak_flops=None if peak is None else peak * parts.world.size,
        )

    def count(self, batch: Mapping[str, Tensor]) -> int:
        """Returns how many samples, or tokens, `batch` has; tokens whose label is ignored count, as they are computed."""
        shape, dim = batch[self._name].shape, self._field.sequence_dim
        return shape[self._field.batch_dim] * (1 if dim is None else shape[dim])

    def measure(self, count: int, seconds: float, data_wait_s: float) -> dict[str, float | int]:
        """Returns `tokens`, `seconds`, `tokens_per_s`, `data_wait_s`, `memory_mb`, and `mfu` if the device's peak is
        known; or `samples` and `samples_per_s` of data without sequences, and no `mfu`, which is of tokens.

        count: of the step, over all ranks. seconds: of the step. data_wait_s: how much of it this rank waited for
        data. memory_mb: this rank's peak in MiB. mfu: of all devices together, a fraction.
        """
        per_s = count / seconds
        row = {
            self.unit: count,
            "seconds": seconds,
            f"{self.unit}_per_s": per_s,
            "data_wait_s": data_wait_s,
            "memory_mb": self._memory_mb(),
        }
        if self.peak_flops is not None and self.unit == "tokens":
            row["mfu"] = per_s * self.flops_per_token / self.peak_flops
        return row

    def _memory_mb(self) -> float:
        """Returns the peak in MiB, at most `MEMORY_EVERY_S` old: the kernel takes a tenth of a millisecond to tell."""
        now = time.monotonic()
        if now - self._measured_at >= MEMORY_EVERY_S:
            self._measured_at = now
            self._memory = memory_mb(self.device)
        return self._memory


Peaks = dict[str, float]
"""Dense FLOP/s by type, in units of 1e12: `tf32` is fp32 through tensor cores. fp64 is that of tensor cores."""

_A100: Peaks = {"fp64": 19.5, "fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0}
_H100: Peaks = {"fp64": 67.0, "fp32": 67.0, "tf32": 494.5, "bf16": 989.4, "fp16": 989.4}
_H100_PCIE: Peaks = {"fp64": 51.0, "fp32": 51.0, "tf32": 378.0, "bf16": 756.0, "fp16": 756.0}
_HOPPER_NVL: Peaks = {"fp64": 60.0, "fp32": 60.0, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5}
_B200: Peaks = {"fp64": 37.0, "fp32": 75.0, "tf32": 1125.0, "bf16": 2250.0, "fp16": 2250.0}
_GB200: Peaks = {"fp64": 40.0, "fp32": 80.0, "tf32": 1250.0, "bf16": 2500.0, "fp16": 2500.0}

PEAKS: tuple[tuple[str, Peaks], ...] = (
    (r"\bA100\b", _A100),
    (r"\bH100\b.*\bPCIe\b", _H100_PCIE),
    (r"\b(H100|H200)\b.*\bNVL\b", _HOPPER_NVL),
    (r"\b(H100|H200|GH200)\b", _H100),
    (r"\bGB200\b", _GB200),
    (r"\bB200\b", _B200),
)
"""Patterns of device names, the first that is found counts, and what NVIDIA's datasheets of them give (A100 80GB 2021,
H100 2023, H200 2024, GH200 2023, HGX B200 and GB200 NVL72 2024), halved where they count structured sparsity."""


def peak_flops(device_name: str, compute: str) -> float | None:
    """Returns the dense FLOP/s of a device in the dtype `compute` (fp64, fp32, tf32, bf16, fp16), None if not known.

    device_name: as `torch.cuda.get_device_name` gives it. A MIG slice is a part of a device and not known.

    Model FLOPs utilisation is the first, times tokens per second, over the second. What recomputation adds is not counted,
    so that the same tokens per second give the same utilisation.
    """
    if "MIG" in device_name:
        return None
    for pattern, peaks in PEAKS:
        if re.search(pattern, device_name):
            return peaks[compute] * 1e12 if compute in peaks else None
    return None


def device_peak_flops(device: torch.device, compute: str) -> float | None:
    """Returns the dense FLOP/s of this device in the plan's `precision.compute`; None for a CPU and if not known."""
    if device.type != "cuda":
        return None
    if compute == "fp32" and torch.backends.cuda.matmul.fp32_precision == "tf32":
        compute = "tf32"
    return peak_flops(torch.cuda.get_device_name(device), compute)


def flops_per_token(num_matmul_parameters: int, attention_width: int, sequence: int) -> float:
    """Returns 6 N + 6 W S: the FLOPs of one token's forward and backward through a causal model.

    Every parameter that multiplies a token costs 2 FLOPs forward and 4 backward. A layer of causal attention, W = heads x
    head_dim wide, takes 2 W FLOPs for its scores and 2 W for its context per position that is seen, S / 2 of them on average,
    and twice that backward: half of the 12 W S of PaLM (Chowdhery et al., 2022, appendix B), which counts the whole square.

    attention_width: the sum of W over all layers. sequence: S, in tokens; of packed documents too, so that runs compare.
    """
    return 6.0 * num_matmul_parameters + 6.0 * attention_width * sequence


def model_flops_per_token(layers: Iterable[nn.Module], sequence: int, whole: Mapping[int, int] | None = None) -> float:
    """Returns `flops_per_token` of any model, counted from its modules, which may be on meta.

    A matrix counts if it is the own `weight`, of two dims or more, of a module that is not an embedding: linears,
    convolutions of stride 1, and a tied head, whose weight multiplies once more there. Attention counts if a module
    declares `attention_width = heads * head_dim`; a model that does not declare it is counted without its attention.

    whole: the full number of elements of sharded parameters, by id.
    """
    whole = whole or {}
    num_parameters = 0
    attention_width = 0
    for layer in layers:
        for module in layer.modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, torch.Tensor) and weight.ndim >= 2 and not isinstance(module, _LOOK_UP):
                num_parameters += whole.get(id(weight), weight.numel())
            attention_width += getattr(module, "attention_width", 0)
    return flops_per_token(num_parameters, attention_width, sequence)


_LOOK_UP = (nn.Embedding, nn.EmbeddingBag)


STATUS = Path("/proc/self/status")


def memory_mb(device: torch.device) -> float:
    """Returns the peak in MiB: of torch's allocations on a CUDA device, of this process's resident set on a CPU.

    The resident set includes everything: torch's libraries (some 200 MiB), threads' stacks, mapped files.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resident_mb()


def resident_mb() -> float:
    """Returns the largest resident set of this process, in MiB.

    From /proc if there is one: getrusage would report the parent's peak if that was higher at the fork.
    """
    try:
        status = STATUS.read_bytes()
        return int(status.partition(b"VmHWM:")[2].split(maxsplit=1)[0]) / 2**10
    except (OSError, IndexError):
        import resource  # there is none on Windows

        unit = 2**20 if sys.platform == "darwin" else 2**10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
