"""Counts what operators on a CPU take inside themselves, which no fake tensor shows: copies of their tensors
in a common type.

fp32.add_(fp16)    the fp16 tensor as fp32 first: torch's TensorIterator has kernels of one type only
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as PROMOTION
from torch._prims_common import elementwise_dtypes

_aten = torch.ops.aten
_CHOOSE = {_aten.where, _aten.masked_fill}
"""Their condition stays as it is."""

_REDUCE = {_aten.sum, _aten.mean, _aten.prod, _aten.linalg_vector_norm}
"""They read their input in the type of their result; a mean in fp32 at least."""


def scratch_bytes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], found: Any) -> int:
    """Returns the bytes that the CPU's operator `func` takes while it runs and gives back by its end: copies of tensors in the
    dtype in which it computes. 0 for operators that are neither element by element nor a sum, mean, product or norm. found: its
    result.
    """
    packet = func._overloadpacket
    if packet in _REDUCE:
        is_mean = packet is _aten.mean and found.dtype.is_floating_point
        return _copies([args[0]], torch.promote_types(found.dtype, torch.float32) if is_mean else found.dtype)
    if torch.Tag.pointwise not in func.tags or not isinstance(found, Tensor):
        return 0
    given = [*args, *(value for name, value in kwargs.items() if name != "out")]
    if packet in _CHOOSE:
        given = [value for value in given if not (isinstance(value, Tensor) and value.dtype == torch.bool)]
    tensors = [value for value in given if isinstance(value, Tensor)]
    if all(tensor.dtype == found.dtype for tensor in tensors):
        return 0
    numbers = (value for value in given if isinstance(value, Tensor | bool | int | float))
    common = elementwise_dtypes(*numbers, type_promotion_kind=PROMOTION.DEFAULT)[1]
    if found.dtype.is_floating_point and not common.is_floating_point:
        common = found.dtype  # of integers, as by a division
    is_given = "out" in kwargs or any(found is tensor for tensor in tensors)
    written = [found] if is_given and found.dtype != torch.bool else []
    return _copies([*tensors, *written], common)


def _copies(tensors: Sequence[Tensor], dtype: torch.dtype) -> int:
    """Returns the bytes of copies in `dtype` of those of `tensors` that have another dtype."""
    return sum(tensor.numel() * dtype.itemsize for tensor in tensors if tensor.dtype != dtype)
