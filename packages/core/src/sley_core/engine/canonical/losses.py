"""The sum of the losses of all micro-batches, in the order of the tree."""

from __future__ import annotations

import torch
from torch import Tensor


def spread(own: Tensor, first: int, num_leaves: int) -> Tensor:
    """Returns [num_leaves] with `own`, this rank's values per micro-batch, from index `first` on, and zeros elsewhere.

    Summed over ranks, it has each micro-batch's value exactly: only zeros are added to it.
    """
    spaced = own.new_zeros(num_leaves)
    spaced[first : first + own.numel()] = own
    return spaced


def tree_sum(values: Tensor) -> Tensor:
    """Returns the sum of `values` [n], n at least 1, in the order of `tree.Node(0, n)`: level by level, from the leaves."""
    while values.numel() > 1:
        pairs = values.numel() // 2
        joined = values[: 2 * pairs : 2] + values[1 : 2 * pairs : 2]
        values = torch.cat([joined, values[2 * pairs :]])
    return values[0]
