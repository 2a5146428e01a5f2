"""Which number formats a model's tensors have in a run, whatever its factory gave them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor


def is_kept(name: str, keep: Sequence[str]) -> bool:
    """Returns whether the parameter `name` keeps fp32. keep: `[precision] keep`, patterns of names."""
    return any(fnmatchcase(name, pattern) for pattern in keep)


def parameter_format(name: str, dtype: torch.dtype, keep: Sequence[str]) -> torch.dtype:
    """Returns the dtype of a parameter where those that are not kept have `dtype`."""
    return torch.promote_types(dtype, torch.float32) if is_kept(name, keep) else dtype


def buffer_format(buffer: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of a buffer: its own, whatever `dtype` the parameters have; but fp64 beside parameters in fp64, where
    the factory gave it fp32.
    """
    return dtype if dtype is torch.float64 and buffer.dtype is torch.float32 else buffer.dtype


def formats_hint(error: BaseException) -> str:
    """Returns what to do about an error of torch's that formats do not meet; "" for any other error."""
    if not isinstance(error, RuntimeError) or not re.search(r"dtype|scalar type", str(error)):
        return ""
    return (
        'under [precision] compute = "bf16" or "fp16" parameters become narrow and buffers keep their format: let the forward '
        "cast what a buffer gives (`self.table.to(h.dtype)`), or name parameters that stay in fp32 in `[precision] keep`"
    )
