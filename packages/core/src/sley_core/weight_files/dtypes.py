"""The formats of numbers that a safetensors file can hold, by the names that it has for them."""

from __future__ import annotations

import torch

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint8: "U8",
    torch.bool: "BOOL",
} | {whole: f"I{8 * whole.itemsize}" for whole in (torch.int64, torch.int32, torch.int16, torch.int8)}

BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
