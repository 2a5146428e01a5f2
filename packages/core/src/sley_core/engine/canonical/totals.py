"""Loss and norm of a step, bit for bit the same in every layout: what ranks sum for them, and the results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sley_core.comm.collectives import all_reduce
from sley_core.engine.canonical.exact_norm import digits, largest, norm_of
from sley_core.engine.canonical.losses import spread, tree_sum

if TYPE_CHECKING:
    from sley_core.comm.groups import Groups
    from sley_core.engine.buffers import Piece
    from sley_core.engine.canonical.tree import CanonicalOrder


class ExactTotals:
    """Computes norm and loss from the gradients `pieces` and from `losses`, float64 [micro-batches] of this rank. kind: the p
    of the p-norm.

    Its construction is a collective over all ranks, which finds the largest element.
    """

    def __init__(
        self, order: CanonicalOrder, groups: Groups, pieces: Sequence[Piece], losses: Tensor, kind: float
    ) -> None:
        self._order = order
        self._kind = kind
        self._losses = losses
        self._counted = [tensor for piece in pieces if _counts(piece, groups) for tensor in piece.tensors]
        self._most = largest((tensor for piece in pieces for tensor in piece.tensors), losses.device)
        # All ranks of the world, before the message of the totals, at the end of every step.
        all_reduce(self._most, groups["all"], "max", what="the largest gradient").wait()

    def terms(self) -> Tensor:
        """Returns what is to be summed over all ranks: float64 [n], n the same on all."""
        found = [] if math.isinf(self._kind) else [digits(self._counted, self._most, self._kind)]
        return torch.cat([*found, spread(self._losses, self._order.state.first_micro, self._order.num_leaves)])

    def result(self, summed: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sum of all losses and the norm, float64 scalars, from the sum of all ranks' `terms`."""
        num_losses = self._order.num_leaves
        loss = tree_sum(summed[-num_losses:])
        if math.isinf(self._kind):
            return loss, self._most
        return loss, norm_of(summed[:-num_losses], self._most, self._kind)


def _counts(piece: Piece, groups: Groups) -> bool:
    """Returns whether this rank is the one, among those with copies of these elements, that counts them."""
    return groups[piece.reduce_group].coord < piece.num_shards and groups["pp"].coord == piece.stages[0]
