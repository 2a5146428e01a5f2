"""The largest elements of a gradient, from each rank to all, and what each rank keeps of its own."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sley_core.api.comm import Pending, SentBytes

if TYPE_CHECKING:
    from sley_core.api.comm import Group


class SparseSum:
    """The sum over `group` of the largest `ratio` of each rank's `gradient` [...], while it is under way.

    Begins at once, and reads `gradient` alone until `finish`. what: names it in errors. All ranks of `group` make theirs in one
    order.
    """

    def __init__(self, gradient: Tensor, ratio: float, group: Group, sent: SentBytes, what: str) -> None:
        self._flat = gradient.view(-1)
        count = ceil(ratio * gradient.numel())
        # Not sorted: a sum does not ask in which order elements came.
        chosen = torch.topk(self._flat.abs(), count, sorted=False).indices
        self._values = gradient.new_empty(group.size, count)
        self._places = chosen.new_empty(group.size, count)
        self._own = chosen
        self._pending: list[Pending] = []
        # The parameter's reduce group: its ranks send equally many elements, values first.
        for whole, own, kind in ((self._values, self._flat[chosen], "values"), (self._places, chosen, "places")):
            self._pending.append(group.all_gather(whole, own[None], what=f"{kind} of {what}"))
            sent.add(whole, group, passes=1)

    def wait(self) -> None:
        """Waits until all ranks' elements are here; for a step that failed, whose sums nobody wants."""
        for pending in self._pending:
            pending.wait()

    def finish(self, error: Tensor) -> None:
        """Waits; puts what this rank did not send into `error` [numel], and the sum into the gradient.

        The same bits on all ranks: each adds the ranks' elements in one order, and those of a rank are at different places.
        """
        self.wait()
        error.copy_(self._flat)
        error[self._own] = 0
        self._flat.zero_()
        for values, places in zip(self._values, self._places, strict=True):
            self._flat.index_add_(0, places, values)
