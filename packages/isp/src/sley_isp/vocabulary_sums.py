"""Vocabulary-parallel cross-entropy, in which every rank has a slice of the classes: the local part, without communication.

    logits of a slice [n, c] ──statistics──> [k, n] ──of all slices──> combine ──> losses [n]
                                                                          └─ log of the sum ──> gradient of the slice

As in Megatron-LM (Shoeybi et al. 2019, section 3; megatron/core/tensor_parallel/cross_entropy.py), except for the exchange:
there three all-reduces, of maxima, of targets and of sums; here one gather of every slice's log of its sum, its target and its
sum, which does not have to wait for a maximum first. Logits are processed in chunks, so the extra memory is one chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sley_core.api.model import chunks, wide

NO_TARGET = -(1 << 62)
"""The target of a token whose label is ignored; no label has this value, so that a wrong label is not ignored too."""


class Classes(NamedTuple):
    """Names the classes of a slice: `size` from `first` on, of `total`. The last slices may be empty."""

    first: int
    size: int
    total: int


class Combined(NamedTuple):
    """Holds per token [n]: the log of the sum of all exponentials, the target's logit, and the sum of all logits or None.

    A target that no slice has is -inf: the loss is then infinite, which ends the run without a device synchronisation here.
    """

    log_sum: Tensor
    target: Tensor
    logit_sum: Tensor | None


def statistics(logits: Tensor, targets: Tensor, classes: Classes, smoothing: float) -> Tensor:
    """Returns what the peers need of a slice's `logits` [n, size]: [3, n] with smoothing, else [2, n]; fp32 at least.

    targets: int64 [n], of all classes, or NO_TARGET.
    """
    found = logits.new_full((3 if smoothing else 2, len(logits)), -torch.inf, dtype=wide(logits))
    found[2:] = 0.0
    if not classes.size:
        return found
    inside, local = _local(targets, classes)
    for rows in chunks(logits):
        part = logits[rows].to(found.dtype)
        torch.logsumexp(part, -1, out=found[0, rows])
        found[1, rows] = torch.where(inside[rows], part.gather(-1, local[rows]).squeeze(-1), -torch.inf)
        if smoothing:
            torch.sum(part, -1, out=found[2, rows])
    return found


def combine(parts: Tensor) -> Combined:
    """Combines the `statistics` of all slices, [slices, k, n]."""
    logit_sum = parts[:, 2].sum(0) if parts.shape[1] == 3 else None
    return Combined(parts[:, 0].logsumexp(0), parts[:, 1].amax(0), logit_sum)


def losses(combined: Combined, targets: Tensor, num_classes: int, smoothing: float) -> Tensor:
    """Returns the cross-entropy of every token against its smoothed target, [n]; 0 for a token without a target.

    A share `smoothing` of the target is spread evenly: log_sum - (1 - smoothing) target - smoothing mean.
    """
    found = combined.log_sum - (1.0 - smoothing) * combined.target
    if combined.logit_sum is not None:
        found -= smoothing / num_classes * combined.logit_sum
    return torch.where(targets == NO_TARGET, 0.0, found)


def to_gradient(logits: Tensor, targets: Tensor, classes: Classes, log_sum: Tensor, scale: Tensor, smoothing: float) -> None:
    """Overwrites a slice's `logits` [n, size] with the gradient of the sum of losses, times the scalar `scale`.

    It is softmax minus the smoothed target; 0 for a token without a target.
    """
    if not classes.size:
        return
    inside, local = _local(targets, classes)
    of_target = torch.where(inside, log_sum.new_full((), smoothing - 1.0), 0.0).unsqueeze(-1)
    scales = torch.where(targets == NO_TARGET, 0.0, scale.to(log_sum.dtype)).unsqueeze(-1)
    for rows in chunks(logits):
        part = (logits[rows] - log_sum[rows].unsqueeze(-1)).exp_()
        if smoothing:
            part -= smoothing / classes.total
        part.scatter_add_(-1, local[rows], of_target[rows])
        torch.mul(part, scales[rows], out=logits[rows])


def _local(targets: Tensor, classes: Classes) -> tuple[Tensor, Tensor]:
    """Returns whether the slice has each target [n], and its index there [n, 1]; some valid index if not."""
    local = targets - classes.first
    inside = (local >= 0) & (local < classes.size)
    return inside, local.clamp(0, classes.size - 1).unsqueeze(-1)
