"""Several tensors in one collective of the backend, where one call for each would be one launch each.

On NCCL the tensors of a layer's weights go into one `ncclGroupStart` ... `ncclGroupEnd`: one kernel, one event to wait for, and
no copy into a flat buffer before or out of it after, which FSDP2's fused gathers need. gloo, which carries CUDA tensors where
ranks share a device, has one call for each.
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


def gather_together(wholes: Sequence[Tensor], shards: Sequence[Tensor], lane: dist.ProcessGroup) -> list[Any]:
    """Starts filling each of `wholes` [size x n, ...] with the ranks' `shards` [n, ...]; the works to wait for."""
    if is_coalesced(lane):
        return [getattr(lane, _GATHER)(list(wholes), list(shards))]
    parts = [list(whole.view(lane.size(), *shard.shape)) for whole, shard in zip(wholes, shards, strict=True)]
    return [dist.all_gather(rows, shard, group=lane, async_op=True) for rows, shard in zip(parts, shards, strict=True)]


def reduce_together(own: Sequence[Tensor], wholes: Sequence[Tensor], lane: dist.ProcessGroup) -> list[Any]:
    """Starts summing `own` [n, ...], this rank's rows of each of `wholes` [size x n, ...], in place; the works to wait for.

    NCCL sums in place where an output is at its rank's offset in the input (user guide, "In-place Operations"), and
    Megatron-LM reduces its buckets so, several in one call (megatron/core/distributed/param_and_grad_buffer.py). The other
    rows of `wholes` are undefined afterwards.
    """
    if is_coalesced(lane):
        return [getattr(lane, _REDUCE)(list(own), list(wholes))]
    return [dist.all_reduce(whole, group=lane, async_op=True) for whole in wholes]


def is_coalesced(lane: dist.ProcessGroup) -> bool:
    """Whether the backend takes several tensors in one call, on any device that it serves.

    gloo does not. In torch/csrc/distributed/c10d/ProcessGroupGloo.cpp `allgather` has a class for CUDA (AsyncAllgatherCUDAWork)
    and `allreduce` one in its registry (GlooAllreduceRegistry, ProcessGroupGlooCuda.cpp): they copy to the host and back.
    The coalesced gather is AsyncAllgatherCoalescedWork whatever the device, which would hand the device's addresses to
    the host; the coalesced reduce-scatter is one `allreduce` per tensor too, each of a copy.
    """
    return bool(dist.get_backend(lane) != "gloo")
