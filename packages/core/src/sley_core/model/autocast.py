"""Refuses factories that compute with parameters under autocast, which does not act on tensors on meta."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from sley_core.errors import PlanError
from sley_core.model.layers import MODEL

_NARROWED = {"matmul", "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "einsum", "chain_matmul"}
_NARROWED |= {
    "__matmul__",
    "__rmatmul__",
    "tensordot",
    "multi_dot",
    "linear",
    "bilinear",
    "multi_head_attention_forward",
}
_NARROWED |= {"scaled_dot_product_attention"} | {
    f"conv{kind}{dims}d" for kind in ("", "_transpose") for dims in (1, 2, 3)
}
"""Functions whose arguments autocast narrows, or that call such a function."""


def check_autocast(name: str, args: Any, kwargs: Any) -> None:
    """Raises PlanError "model-init" for a function of parameters that autocast would have narrowed if they had memory.

    Only fp32 tensors on meta are affected; without autocast it does nothing.
    """
    if name not in _NARROWED or not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
        return
    if any(
        isinstance(one, Tensor) and one.is_meta and one.dtype == torch.float32 for one in tree_leaves((args, kwargs))
    ):
        message = (
            f"the factory computes with parameters under autocast (`{name}`), which passes over what has no memory yet"
        )
        raise PlanError(
            "model-init", message, path=MODEL, hint="leave autocast out of the factory, or cast: `w.bfloat16()`"
        )
