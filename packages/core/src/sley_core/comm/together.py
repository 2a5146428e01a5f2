"""Several tensors in one collective of the backend, where one call for each would be one launch each.

On NCCL the tensors of a layer's weights go into one `ncclGroupStart` ... `ncclGroupEnd`: one kernel, one event to wait for, and
no copy into a flat buffer before or out of it after, which FSDP2's fused gathers need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

_GATHER, _REDUCE = (
    ("all_gather_single_coalesced", "reduce_scatter_single_coalesced")
    if hasattr(dist.ProcessGroup, "all_gather_single_coalesced")
    else ("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced")
)
"""Renamed in torch 2.13."""


def gather_together(wholes: Sequence[Tensor], shards: Sequence[Tensor], lane: dist.ProcessGroup) -> Any:
    """Starts filling each of `wholes` [size x n, ...] with the ranks' `shards` [n, ...]; the work to wait for."""
    return getattr(lane, _GATHER)(list(wholes), list(shards))


def reduce_together(own: Sequence[Tensor], wholes: Sequence[Tensor], lane: dist.ProcessGroup) -> Any:
    """Starts summing this rank's rows of each of `wholes` [size x n, ...] into `own` [n, ...]; the work to wait for.

    `own` may be those rows of `wholes` themselves: NCCL sums in place where an output is at its rank's offset in the input
    (user guide, "In-place Operations"), and Megatron-LM reduces its buckets so, several in one call
    (megatron/core/distributed/param_and_grad_buffer.py). Nothing else of `wholes` is written there; gloo copies it first.
    """
    return getattr(lane, _REDUCE)(list(own), list(wholes))
