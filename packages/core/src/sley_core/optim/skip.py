"""Skips a step on the device without the host knowing, as torch.amp.GradScaler does with fused optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether `step_if` can skip a step of `optimizer`: torch's fused ones read a flag in their kernels.

    Not in the first step, in which SGD creates its momentum from what the kernel would have written.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def step_if(optimizer: torch.optim.Optimizer, allowed: Tensor) -> None:
    """Calls `optimizer.step()`, which changes no weight, state or step count if `allowed`, a bool on the device, is
    false.

    Does not synchronise with the device.
    """
    fused: Any = optimizer
    fused.grad_scale, fused.found_inf = None, (~allowed).float()
    try:
        optimizer.step()
    finally:
        del fused.grad_scale, fused.found_inf
