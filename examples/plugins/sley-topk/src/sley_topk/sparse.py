"""Sums the largest elements of a gradient over ranks, and keeps the omitted elements as an error."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sley_core.api.comm import SentBytes, Work

if TYPE_CHECKING:
    from sley_core.api.comm import Group


class SparseSum:
    """Sums the largest elements, `ratio` of each rank's `gradient` [...], over `group`.

    The exchange starts at once. `gradient` is only read until `finish`. name: the name of the parameter for errors. All ranks
    of `group` must create their sums in the same order.
    """

    def __init__(self, gradient: Tensor, ratio: float, group: Group, sent: SentBytes, name: str) -> None:
        self._flat = gradient.view(-1)
        count = ceil(ratio * gradient.numel())
        indices = torch.topk(self._flat.abs(), count, sorted=False).indices
        self._values = gradient.new_empty(group.size, count)
        self._indices = indices.new_empty(group.size, count)
        self._local_indices = indices
        self._pending: list[Work] = []
        # The parameter's reduce group: its ranks send equally many elements, values first.
        for gathered, local, label in ((self._values, self._flat[indices], "values"), (self._indices, indices, "indices")):
            self._pending.append(group.all_gather(gathered, local[None], label=f"{label} of {name}"))
            sent.add(gathered, group, passes=1)

    def wait(self) -> None:
        """Waits for the elements of all ranks."""
        for pending in self._pending:
            pending.wait()

    def finish(self, error: Tensor) -> None:
        """Waits, and writes the omitted elements of this rank into `error` [numel] and the sum into the gradient.

        All ranks get the same bits, since they add the elements of ranks in the same order, and the elements of a rank have
        different positions.
        """
        self.wait()
        error.copy_(self._flat)
        error[self._local_indices] = 0
        self._flat.zero_()
        for values, indices in zip(self._values, self._indices, strict=True):
            self._flat.index_add_(0, indices, values)
