"""What every layer of a forward needs and only one must compute: values that follow from a batch field.

A mask from `cu_seqlens`, rotary tables from `positions`: the layers are called one by one with the same field, so the
first to ask computes and the others find it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

T = TypeVar("T")

_COMPUTED: Any = WeakIdKeyDictionary()  # field -> {(version of the field, what): value}


def once_per_field(field: Tensor, what: Hashable, compute: Callable[[], T]) -> T:
    """`compute()`, or what it returned for the same field before; it must depend on `field` and `what` alone.

    The memory lasts as long as the tensor object does, so it ends with its micro-batch, and it knows the tensor's
    version, so a field that is written to is computed anew. Recomputation is given the same tensor object and finds the
    value; were it given a copy, it would compute an equal one. `compute` runs without gradients. A compiled layer
    computes inside its graph instead. In inference mode, whose tensors have no version and may not meet a graph later,
    every call computes.
    """
    if torch.compiler.is_compiling() or field.is_inference() or torch.is_inference_mode_enabled():
        return compute()
    known: dict[Any, T] = _COMPUTED.setdefault(field, {})
    key = field._version, what
    if key not in known:
        with torch.no_grad():
            known[key] = compute()
    return known[key]
