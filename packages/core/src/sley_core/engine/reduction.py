"""Adds up gradients of microbatches and ranks, losses and norms, in the order that `[parallel] reduction` selects.

A run has one `Reduction`, which belongs to the store. The class here is "fast": it adds terms in their order of arrival. Its
subclass in `engine.canonical` adds in one order for all layouts. No other code depends on which of the two a run has.

On a CPU torch adds the squares of a tensor one after the other in the tensor's own dtype: over ten million fp32 elements the
norm is off by 4e-4 (measured), and the error depends on how gradients lie in buffers, i.e. on the layout. Along the rows of a
matrix it adds in vectors, so a long tensor is viewed as rows, whose norms are combined in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from sley_core.engine.accumulators import Accumulator, UnbufferedAccumulator
from sley_core.topology import DEFAULT_CHANNEL

if TYPE_CHECKING:
    from sley_core.comm.group import Group, Groups
    from sley_core.comm.progress import SentBytes
    from sley_core.engine.buffers import GradientBuffer, NormGroup
    from sley_core.engine.gradients import GradientStore
    from sley_core.engine.registry import Param, Stages
    from sley_core.engine.step_state import StepState


class Sums(Protocol):
    """Sums a reducer's buffers over ranks.

         start* ──> finish ──> start* ──> finish ...
            └────> discard ────────┘             (a step that failed)

    All ranks of a group call `start` for the same buffers in the same order, so it may issue collectives.
    """

    def start(self, buffer: GradientBuffer, group: Group) -> None:
        """Starts to sum `buffer`, this rank's complete share, over `group`; it must not be used until `finish`."""

    def finish(self) -> None:
        """Blocks until every started buffer holds its sum."""

    def discard(self) -> None:
        """Blocks until nothing writes into a buffer any more, and drops the state of a failed step."""


class Totals:
    """Computes the loss and the gradient norm of a step. The constructor may run a collective over all ranks. gradients, loss:
    this rank's gradients, and its loss, float64 of any shape. norm_type: the p of the p-norm; math.inf for the largest element.
    """

    def __init__(self, groups: Groups, gradients: Sequence[NormGroup], loss: Tensor, norm_type: float) -> None:
        self._norm_type = norm_type
        self._loss = loss
        self._norm = torch.zeros((), dtype=torch.float64, device=loss.device)
        for group in gradients:
            norm = combined_norm(group.tensors, norm_type)
            if math.isinf(norm_type):
                self._norm = torch.maximum(self._norm, norm)
            else:  # each rank adds its share, so that the sum over all ranks counts every gradient once
                copies = groups[group.reduce_group].size // group.num_shards * len(group.stages)
                self._norm += norm**norm_type / copies
        if math.isinf(norm_type):
            # NaN becomes inf: backends differ in max(x, NaN), and some return x.
            self._norm = self._norm.nan_to_num(nan=math.inf, posinf=math.inf)
            # A collective over all ranks, at the end of every step, before the totals are summed.
            groups["all"].all_reduce(self._norm, "max", label="the gradient norm").wait()

    def terms(self) -> Tensor:
        """Returns the terms to sum over all ranks: float64 [n], with the same n on all ranks."""
        return torch.stack([self._loss, self._norm])

    def result(self, summed: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sum of all losses and the norm, as float64 scalars. summed: the sum of all ranks' `terms`."""
        loss, norm = summed.unbind()
        return loss, self._norm if math.isinf(self._norm_type) else norm.pow(1 / self._norm_type)


class Reduction:
    """Adds terms in their order of arrival.

    fixed_order: whether the order is the same in every layout. Then losses and loss weights are stored by microbatch, and code
    that adds gradients passes the layer and the microbatch. micro_axes: the axes whose ranks run equally many microbatches.
    """

    fixed_order = False
    micro_axes: Sequence[str] = ("model", "sp")

    def __init__(self, groups: Groups, state: StepState) -> None:
        self.groups = groups
        self.state = state

    @staticmethod
    def check_model(stages: Stages, per_rank_buffers: Sequence[str]) -> None:
        """Raises PlanError for a model whose gradients cannot be added in the order of this reduction.

        stages: the full model, on meta. per_rank_buffers: patterns of the buffers that each rank keeps for itself.
        """

    def num_sums(self, param: Param) -> int:
        """Returns the number of sums of each gradient that a rank passes to the reducer, besides those of microbatches."""
        return 1

    def new_accumulator(self, param: Param, view: Tensor, *, is_loose: bool) -> Accumulator:
        """Returns a new accumulator for `param`. view: the parameter's part of a buffer; an empty tensor if it is in none."""
        return UnbufferedAccumulator(param, view) if is_loose else Accumulator(param, view)

    def partial_sums(self) -> Sequence[Tensor]:
        """Returns this step's tensors other than the gradients."""
        return ()

    def clear(self) -> None:
        """Frees the memory of `partial_sums`."""

    def concurrent_microbatches(self, group: Group) -> range | None:
        """Returns the microbatches that the ranks of `group` run now, or None if gradients need not be added one by one."""
        return None

    def sums(self, store: GradientStore, sent: SentBytes, channel: str = DEFAULT_CHANNEL) -> Sums | None:
        """Returns the sums that a reducer must use, or None if any order is right. channel: the channel of the groups."""
        return None

    def totals(self, gradients: Sequence[NormGroup], loss: Tensor, norm_type: float) -> Totals:
        return Totals(self.groups, gradients, loss, norm_type)

    def weight_terms(self, weights: Iterable[float]) -> list[float]:
        """Returns the terms of the loss weights of this rank's microbatches, which are added over ranks."""
        return [sum(weights)]

    def weight_of(self, terms: Sequence[float]) -> float:
        """Returns the loss weight from the sum of all ranks' terms."""
        return terms[0]

    def loss_terms(self, losses: Sequence[Tensor]) -> Tensor:
        """Returns the terms, float64 [n], of the losses of several batches. `loss_of` adds up their sums over ranks."""
        return reduce(torch.add, losses).reshape(1)

    def loss_of(self, summed: Tensor, num_batches: int) -> float:
        return float(summed)


def reduction_class(name: str) -> type[Reduction]:
    if name == "canonical":
        from sley_core.engine.canonical.tree import CanonicalReduction  # few plans need it

        return CanonicalReduction
    return Reduction


ROW = 1024
LONG = 4 * ROW
"""The least number of elements of a tensor that is viewed as rows. For 16,384 elements, few of them large as in an embedding's
gradient, the error without rows was 1.2e-6 (measured).
"""


def combined_norm(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    """Returns the p-norm over `tensors`, of one device and dtype, as a float64 scalar. norm_type: p, which may be inf."""
    min_rows_numel = LONG if norm_type == 2 else ROW  # other powers lose more
    wide = torch.promote_types(tensors[0].dtype, torch.float32) if tensors else None
    norms, short = [], []
    for tensor in tensors:
        if tensor.device.type != "cpu" or tensor.numel() < min_rows_numel:
            short.append(tensor)
            continue
        num_remaining = tensor.numel() % ROW  # 0 for most weights: a call of torch costs as much as the norm of a small one
        rows = tensor.reshape(-1)[:-num_remaining].view(-1, ROW) if num_remaining else tensor.reshape(-1, ROW)
        norms.append(torch.linalg.vector_norm(rows, norm_type, dim=1, dtype=wide))
        if num_remaining:
            norms.append(torch.linalg.vector_norm(tensor.reshape(-1)[-num_remaining:], norm_type, dtype=wide).reshape(1))
    if short:
        # As torch.nn.utils.get_total_norm, without its sorting by device and dtype: here all have the same.
        norms.append(torch.stack(torch._foreach_norm(short, norm_type, dtype=wide)))
    joined: Tensor = torch.linalg.vector_norm(torch.cat(norms), norm_type, dtype=torch.float64)
    return joined
