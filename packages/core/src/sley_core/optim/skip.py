"""A step that the device leaves out, without the host knowing: the way of torch.amp.GradScaler with fused optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step_if` can leave a step of `optimizer` out: torch's fused ones read a flag in their kernels.

    Not in the first step, in which SGD makes its momentum from what the kernel would have written.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def step_if(optimizer: torch.optim.Optimizer, allowed: Tensor) -> None:
    """`optimizer.step()`, of which weights, states and counts of steps notice nothing where `allowed`, a bool, is false."""
    fused: Any = optimizer
    fused.grad_scale, fused.found_inf = None, (~allowed).float()
    try:
        optimizer.step()
    finally:
        del fused.grad_scale, fused.found_inf
