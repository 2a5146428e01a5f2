"""Caches values that follow from a batch field, which every layer of a forward needs and only the first must compute.

A mask from `cu_seqlens`, rotary tables from `positions`: the layers are called one by one with the same field, so the
first one computes the value and the others find it.
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
    """Returns `compute()`, or its cached result for the same field; it must depend on `field` and `what` alone.

    The cache entry lives as long as the tensor object, so it ends with its micro-batch. It depends on the tensor's
    version, so a field that is written to is computed anew. Recomputation gets the same tensor object and finds the
    value; with a copy it would compute an equal one. `compute` runs without gradients. A compiled layer computes inside
    its graph instead. In inference mode, whose tensors have no version and may not enter a graph later, every call
    computes.
    """
    if torch.compiler.is_compiling() or field.is_inference() or torch.is_inference_mode_enabled():
        return compute()
    known: dict[Any, T] = _COMPUTED.setdefault(field, {})
    key = field._version, what
    if key not in known:
        with torch.no_grad():
            known[key] = compute()
    return known[key]


def computed_from(field: Tensor) -> list[Any]:
    """Returns what has been computed from the field as it is now, and is cached: each layer that asks for it gets the same."""
    known: dict[Any, Any] = _COMPUTED.get(field, {})
    return [value for (version, _), value in known.items() if version == field._version]
