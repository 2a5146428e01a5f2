"""Counts the floating-point operations that a token costs a model, and those that a device can do.

Model FLOPs utilisation is the first, times tokens per second, over the second. What recomputation adds is not counted,
so that the same tokens per second give the same utilisation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import nn

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

    Every parameter that multiplies a token costs 2 FLOPs forward and 4 backward. A layer of causal attention, whose
    heads are W = heads x head_dim wide together, takes 2 W FLOPs for its scores and 2 W for its context per position
    that is seen, S / 2 of them on average, and twice that backward. Source: PaLM (Chowdhery et al., 2022), appendix B,
    which counts the whole square, 12 W S; halved for the causal mask.

    attention_width: the sum of W over all layers. sequence: S, in tokens; of packed documents too, so that numbers of
    runs with equal sequences compare.
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
